"""Image data sets in folders of classes, too large for memory: decoded once, then mapped from disk."""

from __future__ import annotations

import os
import shutil
import socket
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from typing_extensions import override

from dpbench.data.sources import Images, ImageSource, Problem, Shape, State
from dpbench.errors import PlainWarning, require

SPLITS = ("train", "val")
DECODED_AT_ONCE = 64
# Fewer images are decoded sooner than processes start.
WORTH_WORKERS = 2000
# How the names of Pillow's modes of 16 and 32 bits begin, of whose levels it makes 255 where they are larger.
DEEPER = ("I", "F")


@dataclass(frozen=True)
class ImageFolders(ImageSource):
    """Images in ``<name>/train/<class>/`` and ``<name>/val/<class>/``, classes numbered in the order of their names.

    They are decoded once for a size: the shorter side resized to it, and the square in the middle kept. The pixels go
    to ``<name>/pixels-<size>/``, size² times three bytes an image (16 GB for ImageNet at 64 pixels, 200 GB at 224),
    and are mapped from there; without the folders of classes that is all a run needs.

    Attributes:
        classes: known number of classes.
    """

    classes: int = 0

    @override
    def problems(self, root: Path, *, thorough: bool) -> list[Problem]:
        problems = []
        for split, images in zip(SPLITS, (self.train, self.test), strict=True):
            place = f"{self.name}/{split}"
            folders = sorted(path for path in (root / place).glob("*") if path.is_dir())
            if not folders:
                if not self._decoded(root):
                    problems.append(Problem(f"{place} has no folders of classes", absent=True))
            elif len(folders) != self.classes:
                text = f"{place} has {len(folders):,} folders of classes instead of {self.classes:,}"
                problems.append(Problem(text, absent=False))
            elif thorough:
                from torchvision.datasets.folder import IMG_EXTENSIONS

                found = sum(path.suffix.lower() in IMG_EXTENSIONS for folder in folders for path in folder.iterdir())
                if found != images:
                    problems.append(Problem(f"{place} has {found:,} images instead of {images:,}", absent=False))
        return problems

    @override
    def state(self, root: Path) -> tuple[State, str]:
        state, text = super().state(root)
        sizes = ", ".join(map(str, self._decoded(root)))
        return state, "; ".join(filter(None, [text, f"decoded at {sizes} pixels" if sizes else ""]))

    def _decoded(self, root: Path) -> list[int]:
        """Sizes at which the images are decoded."""
        sizes = (path.name.removeprefix("pixels-") for path in (root / self.name).glob("pixels-*"))
        return sorted(int(size) for size in sizes if size.isdecimal())

    @override
    def read(self, root: Path, shapes: tuple[Shape, Shape], *, download: bool) -> Images:
        channels, height, width = shapes[0][1:]
        require(width == height, "dataset.width", width, f"{height} as dataset.height: images are cut to squares")
        require(channels == 3, "dataset.channels", channels, "3: images in folders are decoded in three colours")
        folder = root / self.name / f"pixels-{height}"
        if not folder.is_dir():
            self._decode(root, shapes, folder)
        found: list[Tensor] = []
        for split in SPLITS:
            for path in (folder / f"{split}.npy", folder / f"{split}-labels.npy"):
                try:
                    # Copied on write, because torch has no tensors that can't be written to.
                    found.append(torch.from_numpy(np.load(path, mmap_mode="c")))
                except (OSError, EOFError, ValueError) as error:
                    raise self.error(f"{path} is damaged; delete {folder}, which is made again") from error
        train, train_labels, test, test_labels = found
        for size, images, (count, *_) in zip(("train_size", "test_size"), (train, test), shapes, strict=True):
            if len(images) != count:
                told = f"{folder} has {len(images):,} decoded images, and dataset.{size}={count}"
                raise self.error(f"{told}; where images were added or removed, delete it: it is made again of them")
        if (later := self._changed_after(root, folder)) is not None:
            told = f"{later} was changed after {folder} was made of it, which is taken as it is"
            warnings.warn(f"{told}; delete it where pictures or classes are others now", PlainWarning, stacklevel=2)
        return train, train_labels, test, test_labels

    def _changed_after(self, root: Path, folder: Path) -> Path | None:
        """A folder of a class to which a picture came, or from which one went, after the decoded ones were made."""
        made = folder.stat().st_mtime_ns
        classes = (path for split in SPLITS for path in sorted((root / self.name / split).glob("*")) if path.is_dir())
        return next((path for path in classes if path.stat().st_mtime_ns > made), None)

    def _decode(self, root: Path, shapes: tuple[Shape, Shape], folder: Path) -> None:
        from torchvision.datasets import ImageFolder

        self.require_folder(root, download=False)
        size = shapes[0][2]
        opened = []
        for split, shape in zip(SPLITS, shapes, strict=True):
            place = root / self.name / split
            try:
                opened.append(ImageFolder(str(place), allow_empty=True))
            except FileNotFoundError as error:
                raise self.error(f"{place} has no images in folders of classes; {self.by_hand}") from error
            if len(opened[-1]) != shape[0]:
                raise self.error(f"{place} has {len(opened[-1]):,} images instead of {shape[0]:,}")
        first, second = opened
        if first.classes != second.classes:
            odd = sorted(set(first.classes) ^ set(second.classes))[0]
            raise self.error(f"the class {odd} is in only one of train and val under {root / self.name}")
        needed = sum(len(images) for images in opened) * 3 * size**2
        if shutil.disk_usage(root).free < needed:
            raise self.error(f"decoding at {size} pixels needs {needed / 1e9:.0f} GB under {root}, which are not free")
        with self._made_as_a_whole(folder) as part:
            for split, images in zip(SPLITS, opened, strict=True):
                self._decode_split(images.samples, size, part, split)

    @contextmanager
    def _made_as_a_whole(self, folder: Path) -> Iterator[Path]:
        """A folder that becomes `folder` once it is complete, unless another process was faster."""
        part = folder.with_name(f".{folder.name}.{socket.gethostname()}.{os.getpid()}")
        try:
            part.mkdir()
            yield part
            if not folder.is_dir():
                part.rename(folder)
        except OSError as error:
            raise self.error(f"decoded images can't be written to {folder} ({error.strerror})") from error
        finally:
            shutil.rmtree(part, ignore_errors=True)

    def _decode_split(self, samples: list[tuple[str, int]], size: int, part: Path, split: str) -> None:
        shape = (len(samples), 3, size, size)
        pixels = np.lib.format.open_memmap(str(part / f"{split}.npy"), mode="w+", dtype=np.uint8, shape=shape)
        workers = (os.cpu_count() or 1) if len(samples) >= WORTH_WORKERS else 0
        loader = DataLoader(_Decoded(samples, size), batch_size=DECODED_AT_ONCE, num_workers=workers)
        console = Console(stderr=True)
        start = 0
        for images, complaints in track(
            loader, f"  decoding {self.name}/{split}", console=console, disable=not console.is_terminal
        ):
            for complaint in filter(None, complaints):
                raise self.error(complaint)
            pixels[start : start + len(images)] = images.numpy()
            start += len(images)
        pixels.flush()
        np.save(part / f"{split}-labels.npy", np.array([label for _, label in samples], dtype=np.int64))


class _Decoded(Dataset[tuple[Tensor, str]]):
    """Images as bytes, (3, S, S), each with an empty string, or with what is wrong with it."""

    def __init__(self, samples: list[tuple[str, int]], size: int) -> None:
        from torchvision.transforms import v2

        self._paths = [path for path, _ in samples]
        self._blank = torch.zeros(3, size, size, dtype=torch.uint8)
        self._transform = v2.Compose([v2.Resize(size, antialias=True), v2.CenterCrop(size), v2.PILToTensor()])

    def __len__(self) -> int:
        return len(self._paths)

    @override
    def __getitem__(self, index: int) -> tuple[Tensor, str]:
        from PIL import Image

        path = self._paths[index]
        try:
            with Image.open(path) as image:
                if image.mode.startswith(DEEPER):
                    return self._blank, f"{path} has grey levels of more than 8 bits; save it with levels from 0 to 255"
                return self._transform(image.convert("RGB")), ""
        except Exception:  # Pillow raises whatever the parsing of a damaged file runs into
            return self._blank, f"{path} can't be decoded; take another copy of it"
