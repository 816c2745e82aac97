"""Some of the samples of a split, where they are."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from dpbench.data.splits import Samples, Splits
from dpbench.randomness import generator

VALIDATION = "validation"


@dataclass(frozen=True)
class Subset:
    """Samples of a split, none of which are copied: they may be on disk, and of several lengths.

    Attributes:
        whole: the split.
        places: their indices there, int64, shape (N,).
    """

    whole: Samples
    places: Tensor

    @property
    def labels(self) -> Tensor:
        """Of these samples, shape (N,)."""
        return self.whole.labels[self.places]

    def __len__(self) -> int:
        """Number of these samples."""
        return len(self.places)

    def to(self, device: torch.device) -> Subset:
        """The split on a device."""
        return Subset(self.whole.to(device), self.places.to(device))

    def take(self, indices: Tensor | slice) -> tuple[Tensor, Tensor]:
        """Inputs and targets of these indices among them."""
        return self.whole.take(self.places[indices])

    def batches(self, indices: Tensor, size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Those of these indices among them, at most `size` at a time."""
        return self.whole.batches(self.places[indices], size)

    def everything(self, size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """All of them, at most `size` at a time."""
        return self.whole.batches(self.places, size)


def with_validation(splits: Splits, size: int | None) -> Splits:
    """The splits with so many training samples set aside, at random and the same ones for every run.

    Args:
        splits: as they were read, on the device where they stay: both parts are of what is there.
        size: how many, less than there are; None for none.
    """
    if size is None:
        return splits
    count, cpu = len(splits.train), torch.device("cpu")
    order = torch.randperm(count, generator=generator(0, VALIDATION, cpu))
    aside, kept = (Subset(splits.train, places.sort().values) for places in (order[:size], order[size:]))
    return Splits(kept, splits.test, {**splits.others, VALIDATION: aside}, splits.prompts)
