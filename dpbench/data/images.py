"""Image data sets: what is declared of them, and whether what is read agrees."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor

from dpbench.data.image_sources import IMAGES
from dpbench.data.resident import Split, Splits
from dpbench.data.sources import Shape
from dpbench.errors import UserError, require


@dataclass
class Suggested:
    """Settings with which every algorithm learns on a data set; used where the user names none.

    Attributes:
        batch_size: expected batch size.
        epochs: passes over the data.
        lr: learning rate of each optimizer family.
    """

    batch_size: int = 0
    epochs: float = 0
    lr: dict[str, float] = field(default_factory=dict)


@dataclass
class ImageDataset:
    """What a run must know of an image data set before it reads it; reading checks that it holds.

    Attributes:
        name: which data set.
        channels: C.
        height: H in pixels.
        width: W in pixels.
        classes: number of labels.
        train_size: samples in the training split, N.
        test_size: samples in the test split.
        highest: largest raw pixel value; pixels are divided by it.
        mean: per channel, subtracted after the division; treated as public.
        std: per channel, divides what is left; treated as public.
        resident: all images move to the device; else they stay where they are, in memory or on disk, and go there a
            batch at a time.
        suggested: see `Suggested`.
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
    suggested: Suggested = field(default_factory=Suggested)

    def __post_init__(self) -> None:
        require(self.name in IMAGES, "dataset.name", self.name, f"one of {', '.join(IMAGES)}")
        for name in ("channels", "height", "width", "classes", "train_size", "test_size", "highest"):
            require(getattr(self, name) > 0, f"dataset.{name}", getattr(self, name), "a whole number > 0")
        for name in ("mean", "std"):
            value = getattr(self, name)
            count = f"{self.channels} number{'s' * (self.channels > 1)}, one per channel"
            require(len(value) == self.channels, f"dataset.{name}", value, count)
        require(all(s > 0 for s in self.std), "dataset.std", self.std, "numbers > 0")

    def load(self, root: Path, *, download: bool) -> Splits:
        """Read the data set.

        Args:
            root: data root; see README for its layout.
            download: fetch what is missing from the official source.

        Raises:
            UserError: missing, truncated or corrupt files, or not the declared samples.
        """
        shapes = (self._shape(self.train_size), self._shape(self.test_size))
        x, y, test_x, test_y = IMAGES[self.name].read(root, shapes, download=download)
        for split, images, labels, want in (
            ("training", x, y, shapes[0]),
            ("test", test_x, test_y, shapes[1]),
        ):
            if tuple(images.shape) != want or len(labels) != want[0]:
                raise UserError(
                    f"the {split} split has images of shape {tuple(images.shape)} and {len(labels)} labels, "
                    f"expected {want}; the files under {root} are damaged",
                    field="dataset",
                    value=self.name,
                )
            if not 0 <= int(labels.min()) <= int(labels.max()) < self.classes:
                raise UserError(
                    f"the {split} split has a label outside 0..{self.classes - 1}; the files under {root} are damaged",
                    field="dataset",
                    value=self.name,
                )
        return Splits(*(self._split(images, labels) for images, labels in ((x, y), (test_x, test_y))))

    def _shape(self, size: int) -> Shape:
        return (size, self.channels, self.height, self.width)

    def _split(self, images: Tensor, labels: Tensor) -> Split:
        return Split.of(images, labels, highest=self.highest, mean=self.mean, std=self.std, resident=self.resident)
