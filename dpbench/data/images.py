"""Image data sets: what is declared of them, and reading them from scikit-learn or torchvision."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dpbench.data.resident import Split, Splits
from dpbench.errors import UserError, require

# train images, train labels, test images, test labels; images uint8 (N, C, H, W).
Arrays = tuple[Tensor, Tensor, Tensor, Tensor]


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
    suggested: Suggested = field(default_factory=Suggested)

    def __post_init__(self) -> None:
        require(self.name in READERS, "dataset.name", self.name, f"one of {', '.join(READERS)}")
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
        x, y, test_x, test_y = READERS[self.name](root, download)
        for split, images, labels, size in (
            ("training", x, y, self.train_size),
            ("test", test_x, test_y, self.test_size),
        ):
            want = (size, self.channels, self.height, self.width)
            if tuple(images.shape) != want or len(labels) != size:
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

    def _split(self, images: Tensor, labels: Tensor) -> Split:
        return Split.of(images, labels, highest=self.highest, mean=self.mean, std=self.std)


def _digits(root: Path, download: bool) -> Arrays:
    """scikit-learn's embedded 8x8 digits; a fixed random fifth of each class is the test split."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    bunch = load_digits()
    train, test = train_test_split(np.arange(len(bunch.target)), test_size=0.2, stratify=bunch.target, random_state=0)
    images = torch.from_numpy(bunch.images.astype(np.uint8)).unsqueeze(1)
    labels = torch.from_numpy(bunch.target)
    return images[train], labels[train], images[test], labels[test]


def _torchvision(kind: str) -> Callable[[Path, bool], Arrays]:
    def read(root: Path, download: bool) -> Arrays:
        import torchvision.datasets

        dataset = getattr(torchvision.datasets, kind)
        name = kind.lower() if kind != "FashionMNIST" else "fashion_mnist"
        try:
            train = dataset(str(root), train=True, download=download)
            test = dataset(str(root), train=False, download=download)
        except Exception as error:  # torchvision raises whatever the parsing of a damaged file runs into
            if isinstance(error, RuntimeError) and "not found" in str(error).lower() and not download:
                message = (
                    f"no complete copy under data.root={root}; set data.download=true to fetch it, or point "
                    "data.root (or the environment variable DPBENCH_DATA) at one"
                )
            else:
                message = f"can't be read from data.root={root} ({type(error).__name__}: {error}); fetch it anew"
            raise UserError(message, field="dataset", value=name) from error
        return (*_arrays(train), *_arrays(test))

    return read


def _arrays(dataset: object) -> tuple[Tensor, Tensor]:
    """Images (N, C, H, W) and labels of one of torchvision's data sets, which differ in layout."""
    data: Tensor | NDArray[np.uint8] = dataset.data  # type: ignore[attr-defined]
    images = torch.as_tensor(data)
    images = images.unsqueeze(1) if images.dim() == 3 else images.permute(0, 3, 1, 2).contiguous()
    return images, torch.as_tensor(dataset.targets)  # type: ignore[attr-defined]


READERS: dict[str, Callable[[Path, bool], Arrays]] = {
    "digits": _digits,
    "mnist": _torchvision("MNIST"),
    "fashion_mnist": _torchvision("FashionMNIST"),
    "cifar10": _torchvision("CIFAR10"),
    "cifar100": _torchvision("CIFAR100"),
}
