"""The contract of a data set."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dpbench.data.sources import Source
from dpbench.data.splits import Splits
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
class Dataset(ABC):
    """What a run must know of a data set before it reads it; reading checks that it holds.

    Attributes:
        name: which data set.
        classes: number of labels.
        train_size: samples in the training split.
        test_size: samples in the test split.
        validation_size: of the training samples, so many are set aside, the same ones for all seeds: runs don't train
            on them, and each evaluation reports their accuracy beside that of the test split; null for none.
        suggested: see `Suggested`.
    """

    name: str = ""
    classes: int = 1
    train_size: int = 1
    test_size: int = 1
    validation_size: int | None = None
    suggested: Suggested = field(default_factory=Suggested)

    def __post_init__(self) -> None:
        self._require_positive("classes", "train_size", "test_size")
        aside = self.validation_size
        fits = aside is None or 0 < aside < self.train_size
        allowed = f"null, or a whole number > 0 and below the {self.train_size} training samples"
        require(fits, "dataset.validation_size", aside, allowed)

    @property
    def trained_on(self) -> int:
        """Samples that are trained on, N."""
        return self.train_size - (self.validation_size or 0)

    @property
    @abstractmethod
    def source(self) -> Source:
        """Where its files come from."""

    @property
    @abstractmethod
    def holds(self) -> str:
        """What its samples are, in words."""

    @property
    @abstractmethod
    def sample_shape(self) -> tuple[int, ...]:
        """Shape of the largest input of a model, without the dimension of the samples."""

    @property
    def one_shape(self) -> bool:
        """Whether all inputs have that shape."""
        return True

    @property
    def generates(self) -> bool:
        """Whether the next token is to be predicted; else a sample's class."""
        return False

    def blank(self, count: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """So many blank inputs of the largest shape, and targets."""
        targets = torch.zeros(count, dtype=torch.int64, device=device)
        return torch.zeros(count, *self.sample_shape, device=device), targets

    @abstractmethod
    def inputs(self, samples: Any, root: Path) -> Tensor:
        """Inputs of a model, made of samples as people have them.

        Args:
            samples: of the kind that the data set holds.
            root: data root.

        Raises:
            UserError: they are of another shape.
        """

    @abstractmethod
    def load(self, root: Path, *, download: bool) -> Splits:
        """Read the data set.

        Args:
            root: data root; see docs/data_and_models.md for its layout.
            download: fetch what is missing from the official source.

        Raises:
            UserError: missing, truncated or corrupt files, or not the declared samples.
        """

    def _require_positive(self, *names: str) -> None:
        for name in names:
            require(getattr(self, name) > 0, f"dataset.{name}", getattr(self, name), "a whole number > 0")

    def _numbers(self, samples: Any) -> Tensor:
        """Samples as a tensor of the one shape that the data set has.

        Raises:
            UserError: they are no numbers, or of another shape.
        """
        try:
            numbers = torch.as_tensor(samples)
        except (RuntimeError, TypeError, ValueError) as error:  # texts, or rows of several lengths
            wanted = f"has {self.holds}, and these make no tensor"
            raise UserError(f"{wanted}: {error}", field="dataset", value=self.name) from error
        self._require_shape(numbers)
        return numbers

    def _require_shape(self, samples: Tensor) -> None:
        """Raise `UserError` unless these are inputs of the one shape that the data set has."""
        if tuple(samples.shape[1:]) != self.sample_shape:
            wanted = ", ".join(map(str, self.sample_shape))
            raise UserError(
                f"has samples of shape ({wanted}), not {tuple(samples.shape[1:])}", field="dataset", value=self.name
            )

    def _require_samples(self, split: str, found: int, want: int, root: Path) -> None:
        if found != want:
            raise self._damaged(f"the {split} split has {found:,} samples, expected {want:,}", root)

    def _require_labels(self, split: str, labels: Tensor | Sequence[int], root: Path) -> None:
        ends = labels.aminmax() if isinstance(labels, Tensor) else (min(labels), max(labels))
        if not 0 <= int(ends[0]) <= int(ends[1]) < self.classes:
            raise self._damaged(f"the {split} split has a label outside 0..{self.classes - 1}", root, "classes")

    def _damaged(self, what: str, root: Path, setting: str | None = None) -> UserError:
        """What is read is not what is declared.

        Args:
            what: in words.
            root: data root.
            setting: the one that is wrong unless the files are, where it is known.
        """
        if self.source.built_in and setting is not None:
            return UserError(f"{what}; leave it out", field=f"dataset.{setting}", value=getattr(self, setting))
        told = f"{what}; the files under {root} are damaged, or the settings of the data set are not theirs"
        return UserError(told, field="dataset", value=self.name)
