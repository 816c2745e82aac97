"""The share of a split that one of several processes computes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from dpbench.data.splits import Samples


@dataclass(frozen=True)
class Shard:
    """A split of which only every `size`-th sample, from sample `rank` on, is computed here.

    It has the length, the labels and the indices of the whole: a batch that was drawn of all samples gives those of
    its samples that belong here, maybe none. The samples themselves stay where the split has them.

    Attributes:
        whole: the split.
        rank: of this process.
        size: number of processes.
    """

    whole: Samples
    rank: int
    size: int

    @property
    def labels(self) -> Tensor:
        """Of all samples, shape (N,)."""
        return self.whole.labels

    def __len__(self) -> int:
        """Number of samples of the whole split."""
        return len(self.whole)

    def to(self, device: torch.device) -> Shard:
        """The split on a device."""
        return Shard(self.whole.to(device), self.rank, self.size)

    def take(self, indices: Tensor | slice) -> tuple[Tensor, Tensor]:
        """Inputs and targets of those of these indices that belong here, of which there must be some."""
        chosen = torch.arange(len(self), device=self.labels.device)[indices] if isinstance(indices, slice) else indices
        return self.whole.take(self._own(chosen))

    def batches(self, indices: Tensor, size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Those of these indices that belong here, at most `size` at a time."""
        return self.whole.batches(self._own(indices), size)

    def everything(self, size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """All samples that belong here, at most `size` at a time."""
        return self.whole.batches(torch.arange(self.rank, len(self), self.size, device=self.labels.device), size)

    def _own(self, indices: Tensor) -> Tensor:
        return indices[indices % self.size == self.rank]
