"""Averages of the iterates, with which a model is evaluated. Post-processing: they cost no privacy."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from typing_extensions import override

from dpbench.errors import require
from dpbench.stage import Stage


@dataclass
class Averaging(Stage):
    """The iterate itself: no averaging."""

    def update(self, iterate: Tensor) -> None:
        """Take in θ_{t+1}, shape (d,), after each step; a live buffer."""

    def average(self, iterate: Tensor) -> Tensor:
        """Parameters to evaluate with, shape (d,), where the last iterate is this one."""
        return iterate


@dataclass
class ExponentialAveraging(Averaging):
    """a ← μ_t a + (1 - μ_t) θ with μ_t = min(decay, (1 + t)/(10 + t)) (De et al. 2022).

    Attributes:
        decay: in [0, 1); 0.9999 in the paper.
    """

    remembers = ("_average", "_steps")

    decay: float = 0.9999

    def __post_init__(self) -> None:
        require(0 <= self.decay < 1, "averaging.decay", self.decay, "a number in [0, 1)")
        self._average: Tensor | None = None
        self._steps = 0

    @override
    def update(self, iterate: Tensor) -> None:
        if self._average is None:
            self._average = iterate.clone()
        else:
            weight = min(self.decay, (1 + self._steps) / (10 + self._steps))
            self._average.lerp_(iterate, 1 - weight)
        self._steps += 1

    @override
    def average(self, iterate: Tensor) -> Tensor:
        return iterate if self._average is None else self._average
