"""Processes that each move a part of the parameters, and keep the states of filter and optimizer for it alone."""

from __future__ import annotations

from itertools import pairwise

from torch import Tensor, nn

from dpbench.gradients import FlatParameters
from dpbench.training.team import Team


class Slice:
    """The part of the parameters that one of several processes moves; an `update.Moved`.

    Element by element the arithmetic is that of the whole, so the parameters are the same, bit for bit. Clipped sums,
    noise and the parameters themselves are whole in every process.

    Attributes:
        parameter: the part, a view of the whole, for the optimizer.
    """

    def __init__(self, flat: FlatParameters, team: Team) -> None:
        self._flat = flat
        self._team = team
        ends = [len(flat) * rank // team.size for rank in range(team.size + 1)]
        self._slices = [slice(start, end) for start, end in pairwise(ends)]
        self.parameter = nn.Parameter(self.part(flat.vector))

    def part(self, vector: Tensor) -> Tensor:
        """What belongs to this process of a vector of shape (d,)."""
        return vector[self._slices[self._team.rank]]

    def set_gradient(self, gradient: Tensor) -> None:
        """Give the part its gradient."""
        self.parameter.grad = gradient

    def moved(self) -> None:
        """Give the others this part of the parameters, and take theirs."""
        self._team.exchange([self._flat.vector[part] for part in self._slices])
