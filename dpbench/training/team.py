"""What a run needs of the processes that train it, where it is one alone; distributed.py has several."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from dpbench.data import Splits
from dpbench.privacy.gaussian import GaussianSource
from dpbench.privacy.uniform import UniformSource

T = TypeVar("T")


class Team:
    """The processes that train one run; this class is a process alone.

    Attributes:
        rank: of this process; rank 0 has the command line, the record and the console.
        size: number of processes.
    """

    rank = 0
    size = 1

    @property
    def leads(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    @property
    def lost(self) -> bool:
        """Whether another process has ended or does not answer, after which there is nothing left to do together."""
        return False

    def device(self, chosen: torch.device) -> torch.device:
        """The device of this process.

        Args:
            chosen: by the settings.

        Raises:
            UserError: it is not for each process.
        """
        return chosen

    def stream(self, run: str) -> str:
        """The name of a run for random streams that each process has its own of."""
        return run if self.leads else f"{run}/{self.rank}"

    def shares(self, splits: Splits) -> Splits:
        """The splits, of which this process computes its share."""
        return splits

    def shared_noise(self, source: GaussianSource) -> GaussianSource:
        """A source that gives all processes the same noise."""
        return source

    def shared_draws(self, source: UniformSource) -> UniformSource:
        """A source that gives all processes the same batches."""
        return source

    def agreed(self, value: Tensor) -> Tensor:
        """A value that must be the same in all processes; where it is not, the next meeting raises `RankError`."""
        return value

    def sum(self, value: Tensor) -> Tensor:
        """The sum over all processes."""
        return value

    def exchange(self, parts: Sequence[Tensor]) -> None:
        """Overwrite each part by that of the process of its rank."""

    def gather(self, value: T) -> list[T]:
        """The values of all processes, by rank."""
        return [value]

    def in_turn(self, work: Callable[[], T]) -> T:
        """Do something in one process of each machine first, then in the others, which find what it left on disk."""
        return work()

    def begin(self) -> None:
        """This process is ready to train; wait until all are, however long that takes."""


ALONE = Team()
