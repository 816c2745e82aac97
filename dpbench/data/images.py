"""Image data sets: what is declared of them, and whether what is read agrees."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from dpbench.data.base import Dataset
from dpbench.data.image_sources import IMAGES
from dpbench.data.own import own_images, require_name
from dpbench.data.sources import ImageSource, Shape
from dpbench.data.splits import Split, Splits
from dpbench.errors import UserError, require


@dataclass
class ImageDataset(Dataset):
    """Images, all of one size.

    Attributes:
        channels: C.
        height: H in pixels.
        width: W in pixels.
        highest: largest raw pixel value; pixels are divided by it.
        mean: per channel, subtracted after the division; treated as public.
        std: per channel, divides what is left; treated as public.
        resident: all images move to the device; else they stay where they are, in memory or on disk, and go there a
            batch at a time.
    """

    name: str = "digits"
    channels: int = 1
    height: int = 8
    width: int = 8
    classes: int = 10
    train_size: int = 1437
    test_size: int = 360
    highest: int = 255
    mean: list[float] = field(default_factory=lambda: [0.0])
    std: list[float] = field(default_factory=lambda: [1.0])
    resident: bool = True

    @override
    def __post_init__(self) -> None:
        require_name(self.name, IMAGES)
        super().__post_init__()
        self._require_positive("channels", "height", "width", "highest")
        for name in ("mean", "std"):
            value = getattr(self, name)
            count = f"{self.channels} number{'s' * (self.channels > 1)}, one per channel"
            require(len(value) == self.channels, f"dataset.{name}", value, count)
        require(all(math.isfinite(m) for m in self.mean), "dataset.mean", self.mean, "finite numbers")
        require(all(0 < s < math.inf for s in self.std), "dataset.std", self.std, "finite numbers > 0")

    @property
    @override
    def source(self) -> ImageSource:
        return IMAGES.get(self.name) or own_images(self.name, self.train_size, self.test_size, self.classes)

    @property
    @override
    def holds(self) -> str:
        return "images"

    @property
    @override
    def sample_shape(self) -> tuple[int, ...]:
        return (self.channels, self.height, self.width)

    @override
    def load(self, root: Path, *, download: bool) -> Splits:
        shapes = (self._shape(self.train_size), self._shape(self.test_size))
        x, y, test_x, test_y = self.source.read(root, shapes, download=download)
        for split, images, labels, want in (
            ("training", x, y, shapes[0]),
            ("test", test_x, test_y, shapes[1]),
        ):
            if tuple(images.shape) != want or len(labels) != want[0]:
                found = f"images of shape {tuple(images.shape)} and {len(labels)} labels"
                size = "train_size" if split == "training" else "test_size"
                settings = zip((size, "channels", "height", "width"), images.shape, want, strict=True)
                wrong = next((name for name, has, declared in settings if has != declared), None)
                raise self._damaged(f"the {split} split has {found}, expected {want}", root, wrong)
            self._require_labels(split, labels, root)
            # Bytes in [0, 255] need no look, for which all of a large data set would be read from disk.
            if (images.dtype != torch.uint8 or self.highest < 255) and self.highest < images.max():
                raise self._damaged(f"the {split} split has pixels up to {int(images.max())}", root, "highest")
        return Splits(self._split(x, y), self._split(test_x, test_y))

    @override
    def inputs(self, samples: Any, root: Path) -> Tensor:
        images = self._numbers(samples)
        wrong = None
        if images.is_floating_point() or images.dtype == torch.bool:  # of which scale nobody can tell
            wrong = str(images.dtype).removeprefix("torch.")
        elif images.numel():
            least, most = (int(end) for end in (images if images.dtype == torch.uint8 else images.long()).aminmax())
            wrong = None if least >= 0 and most <= self.highest else f"from {least} to {most}"
        if wrong is not None:
            wanted = f"has pixels that are whole numbers from 0 to {self.highest}, not {wrong}"
            raise UserError(wanted, field="dataset", value=self.name)
        normalised, _ = self._split(images, torch.zeros(len(images))).take(slice(None))
        return normalised

    def _shape(self, size: int) -> Shape:
        return (size, self.channels, self.height, self.width)

    def _split(self, images: Tensor, labels: Tensor) -> Split:
        return Split.of(images, labels, highest=self.highest, mean=self.mean, std=self.std, resident=self.resident)
