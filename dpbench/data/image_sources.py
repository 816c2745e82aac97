"""Image data sets of scikit-learn and torchvision, with the sums of their files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from dpbench.data.image_folders import ImageFolders
from dpbench.data.sources import Fetchable, File, FileSource, Images, ImageSource, Problem, Shape


@dataclass(frozen=True)
class Digits(ImageSource):
    """scikit-learn's embedded 8x8 digits; a fixed random fifth of each class is the test split."""

    @property
    @override
    def built_in(self) -> bool:
        return True

    @override
    def problems(self, root: Path, *, thorough: bool) -> list[Problem]:
        return []

    @override
    def read(self, root: Path, shapes: tuple[Shape, Shape], *, download: bool) -> Images:
        from sklearn.datasets import load_digits
        from sklearn.model_selection import train_test_split

        bunch = load_digits()
        everything = np.arange(len(bunch.target))
        train, test = train_test_split(everything, test_size=0.2, stratify=bunch.target, random_state=0)
        images = torch.from_numpy(bunch.images.astype(np.uint8)).unsqueeze(1)
        labels = torch.from_numpy(bunch.target)
        return images[train], labels[train], images[test], labels[test]


@dataclass(frozen=True)
class Torchvision(Fetchable, FileSource, ImageSource):
    """A data set that torchvision reads and fetches.

    Attributes:
        kind: name of torchvision's class.
        folder: below the data root, torchvision's root.
        splits: arguments that name the splits.
    """

    kind: str = ""
    folder: str = ""
    splits: tuple[dict[str, Any], dict[str, Any]] = ({"train": True}, {"train": False})

    def _open(self, root: Path, split: dict[str, Any], *, download: bool) -> Any:
        import torchvision.datasets

        # What an old torchvision has made of MNIST's files has no known sums, and would be taken in their place.
        changed = {"_check_legacy_exist": lambda _: False}
        if not download:
            # It would take the sums of all files for each split; they have just been checked, see `read`.
            changed["_check_integrity"] = lambda _: True
        kind = type(self.kind, (getattr(torchvision.datasets, self.kind),), changed)
        return kind(str(root / self.folder), download=download, **split)

    @override
    def fetch(self, root: Path) -> None:
        for split in self.splits:
            self._open(root, split, download=True)

    @override
    def read(self, root: Path, shapes: tuple[Shape, Shape], *, download: bool) -> Images:
        self.obtain(root, download=download)
        try:
            train, test = (self._open(root, split, download=False) for split in self.splits)
        except Exception as error:  # torchvision raises whatever the parsing of a file runs into
            why = f"{type(error).__name__}: {error}"
            raise self.error(f"can't be read from data.root={root} ({why}); fetch it anew") from error
        return (*_arrays(train), *_arrays(test))


def _arrays(dataset: Any) -> tuple[Tensor, Tensor]:
    """Images (N, C, H, W) and labels of one of torchvision's data sets, which differ in names and layout."""
    images = torch.as_tensor(dataset.data)
    labels = torch.as_tensor(dataset.labels if hasattr(dataset, "labels") else dataset.targets)
    if images.dim() == 3:
        images = images.unsqueeze(1)
    elif images.shape[1] not in (1, 3):
        images = images.permute(0, 3, 1, 2)
    return images.contiguous(), labels


def _idx(folder: str, *sums: str) -> tuple[File, ...]:
    """The four unpacked files of MNIST's format, in torchvision's order."""
    names = ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1")
    sizes = (16 + 60_000 * 784, 8 + 60_000, 16 + 10_000 * 784, 8 + 10_000)
    files = zip(names, sums, sizes, strict=True)
    return tuple(File(f"{folder}/raw/{name}-ubyte", md5, size) for name, md5, size in files)


SPLIT_NAMES = ({"split": "train"}, {"split": "test"})
IMAGENET_LICENCE = (
    "ask for it at image-net.org and unpack it to imagenet/train/<class>/*.JPEG and imagenet/val/<class>/*.JPEG, as "
    "torchvision.datasets.ImageNet does"
)

IMAGES: dict[str, ImageSource] = {
    source.name: source
    for source in (
        Digits("digits", "8x8 digits of scikit-learn", 1437, 360),
        Torchvision(
            "mnist",
            "MNIST",
            60_000,
            10_000,
            kind="MNIST",
            files=_idx(
                "MNIST",
                "6bbc9ace898e44ae57da46a324031adb",
                "a25bea736e30d166cdddb491f175f624",
                "2646ac647ad5339dbf082846283269ea",
                "27ae3e4e09519cfbb04c329615203637",
            ),
        ),
        Torchvision(
            "fashion_mnist",
            "Fashion-MNIST",
            60_000,
            10_000,
            kind="FashionMNIST",
            files=_idx(
                "FashionMNIST",
                "f4a8712d7a061bf5bd6d2ca38dc4d50a",
                "9018921c3c673c538a1fc5bad174d6f9",
                "8181f5470baa50b63fa0f6fddb340f0a",
                "15d484375f8d13e6eb1aabb0c3f46965",
            ),
        ),
        Torchvision(
            "cifar10",
            "CIFAR-10",
            50_000,
            10_000,
            kind="CIFAR10",
            files=(
                File("cifar-10-batches-py/data_batch_1", "c99cafc152244af753f735de768cd75f", 31_035_704),
                File("cifar-10-batches-py/data_batch_2", "d4bba439e000b95fd0a9bffe97cbabec", 31_035_320),
                File("cifar-10-batches-py/data_batch_3", "54ebc095f3ab1f0389bbae665268c751", 31_035_999),
                File("cifar-10-batches-py/data_batch_4", "634d18415352ddfa80567beed471001a", 31_035_696),
                File("cifar-10-batches-py/data_batch_5", "482c414d41f54cd18b22e5b47cb7c3cb", 31_035_623),
                File("cifar-10-batches-py/test_batch", "40351d587109b95175f43aff81a1287e", 31_035_526),
                File("cifar-10-batches-py/batches.meta", "5ff9c542aee3614f3951f8cda6e48888", 158),
            ),
        ),
        Torchvision(
            "cifar100",
            "CIFAR-100",
            50_000,
            10_000,
            kind="CIFAR100",
            files=(
                File("cifar-100-python/train", "16019d7e3df5f24257cddd939b257f8d"),
                File("cifar-100-python/test", "f0ef6b0ae62326f3e7ffdfab6717acfc"),
                File("cifar-100-python/meta", "7973b15100ade9c7d40fb424638fde48"),
            ),
        ),
        Torchvision(
            "svhn",
            "Street View House Numbers, cropped",
            73_257,
            26_032,
            kind="SVHN",
            folder="svhn",
            splits=SPLIT_NAMES,
            files=(
                File("svhn/train_32x32.mat", "e26dedcc434d2e4c54c9b2d4a06d8373", 182_040_794),
                File("svhn/test_32x32.mat", "eb5a983be6a315427106f1b164d9cef3", 64_275_384),
            ),
        ),
        ImageFolders("imagenet", "ImageNet-1k (ILSVRC 2012)", 1_281_167, 50_000, IMAGENET_LICENCE, classes=1000),
    )
}
