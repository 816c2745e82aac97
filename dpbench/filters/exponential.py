"""The exponential average: DiSK's simplified Kalman filter."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor
from typing_extensions import override

from dpbench.errors import require
from dpbench.filters.base import Filter


@dataclass
class Exponential(Filter):
    """m_t = (1 - κ) m_{t-1} + κ g_t with m_{-1} = g_0 (DiSK, Zhang et al. 2024, Alg. 3).

    Attributes:
        kappa: weight of the new gradient, in (0, 1]; the steady-state Kalman gain.
    """

    remembers = ("_average",)

    elementwise: ClassVar[bool] = True

    kappa: float = 0.7

    def __post_init__(self) -> None:
        require(0 < self.kappa <= 1, "filter.kappa", self.kappa, "a number in (0, 1]")
        self._average: Tensor | None = None

    @override
    def apply(self, gradient: Tensor) -> Tensor:
        if self._average is None:
            self._average = gradient.clone()
        else:
            self._average.mul_(1 - self.kappa).add_(gradient, alpha=self.kappa)
        return self._average
