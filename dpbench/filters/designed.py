"""Low-pass filters designed from order and cut-off: Butterworth and Chebyshev."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override

from dpbench.errors import UserError, require
from dpbench.filters.base import Filter
from dpbench.filters.recursive import RecursiveLowPass
from dpbench.state import State


@dataclass
class Designed(Filter):
    """A `RecursiveLowPass` whose taps are computed; its gain at frequency zero is 1.

    The higher the order, the higher is the lowest cut-off that float32 keeps: for `Butterworth` some 0.003 at order 3,
    0.009 at 4, 0.02 at 5, 0.05 at 8.

    Attributes:
        order: n from 1 to 100.
        cutoff: in cycles per step, in (0, 0.5).
    """

    elementwise: ClassVar[bool] = True

    order: int = 1
    cutoff: float = 0.05

    def __post_init__(self) -> None:
        require(1 <= self.order <= 100, "filter.order", self.order, "a whole number from 1 to 100")
        require(0 < self.cutoff < 0.5, "filter.cutoff", self.cutoff, "a number in (0, 0.5), in cycles per step")
        b, a = self._design()
        b = b / b.sum() * a.sum()
        try:
            self._filter = RecursiveLowPass(b=b.tolist(), a=a[1:].tolist())
        except UserError as error:
            raise UserError(
                f"no stable filter of order {self.order} has this cut-off in float32, in which taps are applied",
                field="filter.cutoff",
                value=self.cutoff,
            ) from error

    @property
    def b(self) -> list[float]:
        """Feed-forward taps."""
        return self._filter.b

    @property
    def a(self) -> list[float]:
        """Feedback taps a_1, a_2, ...."""
        return self._filter.a

    @abstractmethod
    def _design(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Taps b and a of the filter, each of shape (order + 1,), a_0 being 1."""

    @override
    def apply(self, gradient: Tensor) -> Tensor:
        return self._filter.apply(gradient)

    @override
    def state_dict(self) -> State:
        return self._filter.state_dict()

    @override
    def load_state_dict(self, state: State) -> None:
        self._filter.load_state_dict(state)


@dataclass
class Butterworth(Designed):
    """Flat pass band; `cutoff` is where the power is halved (scipy.signal.butter)."""

    @override
    def _design(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        from scipy import signal  # takes a second, which most commands have no use for

        b, a = signal.butter(self.order, 2 * self.cutoff)
        return b, a


@dataclass
class Chebyshev(Designed):
    """Ripples in the pass band for a steeper edge (scipy.signal.cheby1, scaled to gain 1 at frequency zero).

    Attributes:
        ripple: of the pass band, in decibel, from 1e-6 to 100.
    """

    ripple: float = 1.0

    @override
    def __post_init__(self) -> None:
        require(1e-6 <= self.ripple <= 100, "filter.ripple", self.ripple, "a number from 1e-6 to 100, in decibel")
        super().__post_init__()

    @override
    def _design(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        from scipy import signal  # as above

        b, a = signal.cheby1(self.order, self.ripple, 2 * self.cutoff)
        return b, a
