"""A person's own data, in files of a few fixed names in a folder that is called as the data set is."""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from dpbench.data.encoding import Texts
from dpbench.data.image_folders import ImageFolders
from dpbench.data.sources import File, FileSource, Images, Problem, Shape, Source
from dpbench.data.table_sources import Rows, TableSource
from dpbench.data.text_sources import TextSource
from dpbench.errors import require

SPLITS = ("train", "test")
FOLDER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")


def require_name(name: str, known: Collection[str]) -> None:
    """A data set is one of those known here, or lies in a folder directly under the data root.

    Raises:
        UserError: it is a path, or no name at all.
    """
    allowed = f"one of {', '.join(known)}, or a folder under data.root with data of your own (docs/own_data.md)"
    require(name in known or FOLDER.fullmatch(name) is not None, "dataset.name", name, allowed)


def _files(name: str, kind: str) -> tuple[File, ...]:
    return tuple(File(f"{name}/{split}.{kind}") for split in SPLITS)


def _arrays(source: Source, root: Path) -> list[tuple[np.ndarray, np.ndarray]]:
    """Inputs and labels of both splits, as many of one as of the other, labels int64."""
    found = []
    for file in _files(source.name, "npz"):
        path = root / file.path
        try:
            with np.load(path, allow_pickle=False) as archive:
                inputs, labels = archive["inputs"], archive["labels"]
        except Exception as error:  # whatever the parsing of a file runs into
            why = f"{type(error).__name__}: {error}"
            raise source.error(
                f"{path} can't be read as np.savez writes arrays `inputs` and `labels` ({why})"
            ) from error
        if labels.ndim != 1 or labels.dtype.kind not in "iu" or len(labels) == 0:
            raise source.error(f"labels of {path} are {_told(labels)}, expected whole numbers of shape (N,), N >= 1")
        if inputs.ndim == 0 or len(inputs) != len(labels):
            raise source.error(f"{path} has {len(labels)} labels, and inputs that are {_told(inputs)}")
        found.append((inputs, labels.astype(np.int64)))
    return found


def _told(array: np.ndarray) -> str:
    return f"{array.dtype} of shape {array.shape}"


# A file of one's own may be the only one, and as well be right.
REPAIR = "put that right, or the settings of the data set"


@dataclass(frozen=True)
class OwnImages(ImageFolders):
    """Images in ``<name>/train.npz`` and ``<name>/test.npz``, or else in folders of classes as those of ImageNet.

    Arrays are ``inputs``, uint8 (N, H, W), (N, H, W, C) or (N, C, H, W), and ``labels``, whole numbers (N,).
    """

    REPAIR: ClassVar[str] = REPAIR

    def _has_arrays(self, root: Path) -> bool:
        return any((root / file.path).exists() for file in _files(self.name, "npz"))

    @override
    def problems(self, root: Path, *, thorough: bool) -> list[Problem]:
        if not self._has_arrays(root):
            return super().problems(root, thorough=thorough)
        found = (file.problem(root, thorough=thorough) for file in _files(self.name, "npz"))
        return [problem for problem in found if problem is not None]

    @override
    def read(self, root: Path, shapes: tuple[Shape, Shape], *, download: bool) -> Images:
        self.require_whole(root)
        if not self._has_arrays(root):
            return super().read(root, shapes, download=download)
        splits: list[Tensor] = []
        for (inputs, labels), shape in zip(_arrays(self, root), shapes, strict=True):
            if inputs.dtype != np.uint8:
                raise self.error(f"inputs are {_told(inputs)}, expected pixels as bytes (uint8)")
            splits += (torch.from_numpy(_channels_first(inputs, shape)), torch.from_numpy(labels))
        images, targets, test_images, test_targets = splits
        return images, targets, test_images, test_targets


def _channels_first(images: np.ndarray, shape: Shape) -> np.ndarray:
    """Images as (N, C, H, W), if they are of the declared shape in another order."""
    _, channels, height, width = shape
    if images.shape[1:] == (height, width) and channels == 1:
        images = images[:, None]
    elif images.shape[1:] == (height, width, channels) != (channels, height, width):
        images = images.transpose(0, 3, 1, 2)
    return np.ascontiguousarray(images)


@dataclass(frozen=True)
class OwnTable(FileSource, TableSource):
    """Rows of numbers in ``<name>/train.npz`` and ``<name>/test.npz``: ``inputs`` (N, F) and ``labels`` (N,)."""

    REPAIR: ClassVar[str] = REPAIR

    @override
    def read(self, root: Path, *, download: bool) -> tuple[Rows, Rows]:
        self.require_whole(root)
        splits = []
        for inputs, labels in _arrays(self, root):
            if inputs.ndim != 2 or inputs.dtype.kind not in "fiub":
                raise self.error(f"inputs are {_told(inputs)}, expected numbers of shape (N, F)")
            with np.errstate(over="ignore"):  # told of below
                rows = torch.from_numpy(inputs.astype(np.float32))
            if not rows.isfinite().all():
                place = int((~rows.isfinite().all(1)).nonzero()[0])
                raise self.error(f"inputs have a number that float32 does not hold, in row {place} counted from 0")
            splits.append((rows, torch.from_numpy(labels)))
        train, test = splits
        return train, test


@dataclass(frozen=True)
class OwnTexts(FileSource, TextSource):
    """Texts in ``<name>/train.jsonl`` and ``<name>/test.jsonl``, an object a line.

    To be classified: ``text``, for pairs ``text_pair``, and ``label``, a whole number. For language models: ``prompt``
    and ``completion``.

    Attributes:
        generates: for a language model.
    """

    REPAIR: ClassVar[str] = REPAIR

    generates: bool = False

    @override
    def read(self, root: Path, *, download: bool) -> dict[str, Texts]:
        self.require_whole(root)
        train, test = (self._texts(root / file.path) for file in self.files)
        if (train.second is None) != (test.second is None):
            raise self.error("only one of train.jsonl and test.jsonl has text_pair")
        return {"train": train, "test": test}

    def _texts(self, path: Path) -> Texts:
        rows = []
        try:
            with path.open(encoding="utf-8") as stream:
                for number, line in enumerate(stream, start=1):
                    if line.strip():
                        row = self._row(json.loads(line), f"line {number} of {path}")
                        # Raises at half of a surrogate pair, which JSON can hold and no tokenizer takes.
                        "".join(filter(None, row[:2])).encode()
                        rows.append(row)
        except (ValueError, RecursionError, OSError) as error:
            why = f"{type(error).__name__}: {error}"
            raise self.error(f"{path} can't be read, at line {len(rows) + 1} or near ({why})") from error
        seconds = [second for _, second, _ in rows if second is not None]
        if 0 < len(seconds) < len(rows):
            raise self.error(f"{path} has lines with text_pair and lines without")
        labels = None if self.generates else [label for _, _, label in rows]
        return Texts([first for first, _, _ in rows], seconds or None, labels)

    def _row(self, row: object, place: str) -> tuple[str, str | None, int]:
        texts = ("prompt", "completion") if self.generates else ("text", "text_pair")
        first, second, label = (row.get(key) if isinstance(row, dict) else None for key in (*texts, "label"))
        if self.generates:
            if not (isinstance(first, str) and isinstance(second, str)):
                raise self.error(f'{place} is no object with texts "prompt" and "completion"')
            return first, second, 0
        if not (isinstance(first, str) and isinstance(second, str | None) and type(label) is int):
            raise self.error(f'{place} is no object with a text "text" and a whole number "label"')
        return first, second, label


def own_images(name: str, train: int, test: int, classes: int) -> OwnImages:
    """Where a person's own images come from."""
    hand = (
        f"write {name}/train.npz and {name}/test.npz, or put images into {name}/train/<class>/ and {name}/val/<class>/"
    )
    return OwnImages(name, name, train, test, hand, classes=classes)


def own_table(name: str, train: int, test: int) -> OwnTable:
    """Where a person's own rows of numbers come from."""
    return OwnTable(name, name, train, test, f"write {name}/train.npz and {name}/test.npz", files=_files(name, "npz"))


def own_texts(name: str, train: int, test: int, *, generates: bool) -> OwnTexts:
    """Where a person's own texts come from."""
    hand = f"write {name}/train.jsonl and {name}/test.jsonl"
    return OwnTexts(name, name, train, test, hand, files=_files(name, "jsonl"), generates=generates)
