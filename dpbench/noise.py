"""Stage 3, noise: the relative scale s_t of the noise of each step, and its correlation in time."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from dpbench.errors import require
from dpbench.stage import Stage


@dataclass
class Noise(Stage):
    """Noise of standard deviation z s_t Δ on the sum, z being the noise multiplier and Δ the sensitivity."""

    def scale(self, step: int) -> float:
        """Relative scale s_t; must be known before training, for the plan is made of it."""
        raise NotImplementedError

    def claimed_scale(self, step: int) -> float:
        """The scale that a publication's accountant takes it for; differs from `scale` where noise is understated."""
        return self.scale(step)

    def draw(self, out: Tensor, generator: torch.Generator) -> Tensor:
        """Fill `out`, shape (d,), with this step's noise at unit variance and return it."""
        return out.normal_(generator=generator)


@dataclass
class ConstantNoise(Noise):
    """The same scale at every step, independent in time."""

    @override
    def scale(self, step: int) -> float:
        return 1.0


@dataclass
class UnderstatedNoise(Noise):
    """Less noise than a publication's accountant takes it for, as some released code adds.

    Attributes:
        divisor: the noise of each step is divided by it.
        first: step from which on.
    """

    divisor: float = 1.0
    first: int = 0

    def __post_init__(self) -> None:
        require(0 < self.divisor < math.inf, "noise.divisor", self.divisor, "a finite number > 0")
        require(self.first >= 0, "noise.first", self.first, "a whole number >= 0")

    @override
    def scale(self, step: int) -> float:
        return 1.0 / self.divisor if step >= self.first else 1.0

    @override
    def claimed_scale(self, step: int) -> float:
        return 1.0


@dataclass
class DiskReleasedNoise(Noise):
    """The noise of DiSK in Opacus' research folder, divided by sqrt(c² + (1 - c)²) at steps of two evaluations.

    Clip and noise are applied once to the mixture, so nothing warrants the division: for c in (0, 1) it adds noise,
    otherwise it takes noise away (papers' port, optimizer base class).

    Attributes:
        kappa: as in the query.
        gamma: as in the query.
    """

    kappa: float = 0.7
    gamma: float = 0.5

    def __post_init__(self) -> None:
        require(0 < self.kappa <= 1, "noise.kappa", self.kappa, "a number in (0, 1]")
        require(self.gamma != 0 and math.isfinite(self.gamma), "noise.gamma", self.gamma, "a finite number but 0")

    @override
    def scale(self, step: int) -> float:
        weight = (1 - self.kappa) / (self.kappa * self.gamma)
        return 1.0 if step == 0 else 1.0 / math.hypot(weight, 1 - weight)

    @override
    def claimed_scale(self, step: int) -> float:
        return 1.0
