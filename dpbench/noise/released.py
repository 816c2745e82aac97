"""Noise as published code has it, where that is not what its accountant takes it for."""

from __future__ import annotations

import math
from dataclasses import dataclass

from typing_extensions import override

from dpbench.errors import require
from dpbench.mixing import mixing_weight, require_mixing
from dpbench.noise.base import Noise


@dataclass
class UnderstatedNoise(Noise):
    """Less noise than a publication's accountant takes it for, as some released code adds.

    Attributes:
        divisor: the noise of each step is divided by it; from 1e-6 to 1e6.
        first: step from which on.
    """

    divisor: float = 1.0
    first: int = 0

    def __post_init__(self) -> None:
        require(1e-6 <= self.divisor <= 1e6, "noise.divisor", self.divisor, "a number from 1e-6 to 1e6")
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
    otherwise it takes noise away (its optimizers' base class).

    Attributes:
        kappa: as in the query.
        gamma: as in the query.
    """

    kappa: float = 0.7
    gamma: float = 0.5

    def __post_init__(self) -> None:
        require_mixing("noise", self.kappa, self.gamma)

    @override
    def scale(self, step: int) -> float:
        weight = mixing_weight(self.kappa, self.gamma)
        return 1.0 if step == 0 else 1.0 / math.hypot(weight, 1 - weight)

    @override
    def claimed_scale(self, step: int) -> float:
        return 1.0
