"""Noise correlated in time: how far one sample can move everything that such a mechanism releases.

A matrix mechanism (Kairouz et al. 2021, Denisov et al. 2022) releases C X + Z, X having the clipped sums x_1 ... x_T as
rows and Z independent Gaussian noise; what a step uses is post-processing. All T steps are one Gaussian release, whose
sensitivity depends on how often and where a sample takes part: here once in each pass over the data, and at the same
position of every pass unless each begins anew.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cache

import numpy as np
from typing_extensions import override

from dpbench.privacy.sampling import CYCLIC, Scheme


@dataclass(frozen=True)
class Correlation(ABC):
    """A strategy matrix C.

    Attributes:
        restart: begin anew with each pass, so that passes are independent releases.
    """

    restart: bool = False

    def covers(self, scheme: Scheme) -> bool:
        """Whether `squared_sensitivity` bounds what a sample does under this scheme.

        Without a restart a sample must take part at the same position in every pass: where passes are reshuffled, it
        may come last in one and first in the next, which can move more of the sums.
        """
        return scheme == CYCLIC or (scheme.passes and self.restart)

    def squared_sensitivity(self, steps: int, epoch: int) -> float:
        """Max over positions p of ‖Σ_j C x_{p + j epoch}‖² for ‖x‖ <= 1, over the first `steps` steps.

        Args:
            steps: T, releases so far.
            epoch: steps in which a sample takes part once.
        """
        if not self.restart or steps <= epoch:
            return self._squared_sensitivity(steps, min(epoch, steps))
        passes, rest = divmod(steps, epoch)
        whole = passes * self._squared_sensitivity(epoch, epoch)
        return whole + (self._squared_sensitivity(rest, rest) if rest else 0.0)

    def strategy(self, steps: int, epoch: int) -> np.ndarray:
        """C of `steps` steps, float64, shape (steps, steps), lower triangular with ones on the diagonal.

        Args:
            steps: T.
            epoch: steps after which it begins anew where it does.
        """
        matrix = np.zeros((steps, steps))
        length = epoch if self.restart else steps
        for start in range(0, steps, length):
            size = min(length, steps - start)
            matrix[start : start + size, start : start + size] = self._strategy(size)
        return matrix

    @abstractmethod
    def _squared_sensitivity(self, steps: int, epoch: int) -> float:
        """`squared_sensitivity` of steps without a restart between them."""

    @abstractmethod
    def _strategy(self, steps: int) -> np.ndarray:
        """`strategy` of steps without a restart between them."""


@dataclass(frozen=True)
class Tree(Correlation):
    """Binary tree aggregation: a noisy sum for every dyadic interval (Dwork et al. 2010, Chan et al. 2011).

    Of the intervals [i 2^l, (i + 1) 2^l) prefix sums are made of those with even i alone. Each step completes exactly
    one of these, of 2^l steps where 2^l is the largest power of two that divides the number of steps so far; no other
    is released, or counted.
    """

    @override
    def _squared_sensitivity(self, steps: int, epoch: int) -> float:
        # A sample adds to an interval as often as it takes part there; terms of one sign are the worst case.
        squares = np.zeros(epoch)
        for level in range(steps.bit_length()):
            length = 1 << level
            covered = np.arange(steps // length * length)  # the last interval of a level may be incomplete
            covered = covered[covered // length % 2 == 0]
            pairs, counts = np.unique(covered // length * epoch + covered % epoch, return_counts=True)
            squares += np.bincount(pairs % epoch, counts**2.0, epoch)
        return float(squares.max())

    @override
    def _strategy(self, steps: int) -> np.ndarray:
        matrix = np.zeros((steps, steps))
        for end in range(1, steps + 1):
            matrix[end - 1, end - (end & -end) : end] = 1.0
        return matrix


@dataclass(frozen=True)
class BandedSquareRoot(Correlation):
    """The square root of the prefix-sum matrix, cut to its first bands (Kalinin and Lampert 2024).

    C is lower triangular and Toeplitz with c_k = binom(2k, k)/4^k for k < bands.

    Attributes:
        bands: number of diagonals b, at least 1; 1 is independent noise.
    """

    bands: int = 1

    def within(self, steps: int) -> np.ndarray:
        """The coefficients c_0, c_1, ... of the lags that `steps` steps have, float64."""
        k = np.arange(1, min(self.bands, steps))
        return np.cumprod(np.concatenate([[1.0], (2 * k - 1) / (2 * k)]))

    @override
    def _squared_sensitivity(self, steps: int, epoch: int) -> float:
        # Coefficients are positive, so the worst case adds the columns of one sample up, and starts as early as it can.
        return _toeplitz_square(self, steps, epoch)

    @override
    def _strategy(self, steps: int) -> np.ndarray:
        matrix = np.zeros((steps, steps))
        for lag, coefficient in enumerate(self.within(steps)):
            matrix += np.diag(np.full(steps - lag, coefficient), -lag)
        return matrix


@cache
def _toeplitz_square(correlation: BandedSquareRoot, steps: int, epoch: int) -> float:
    column = np.zeros(steps)
    bands = correlation.within(steps)
    for start in range(0, steps, epoch):
        part = bands[: steps - start]
        column[start : start + len(part)] += part
    return float(column @ column)
