"""Noise correlated in time, so that in sums over steps much of it cancels: DP-FTRL (Kairouz et al. 2021).

With C of the correlation (privacy/correlation.py) and independent rows Z, the rows of C⁻¹ Z are added to the clipped
sums X: what is released, X + C⁻¹ Z, is C X + Z in other words. With SGD at a constant step size the iterates are made
of prefix sums, whose noise is the prefix sums of C⁻¹ Z. Rows come one by one, and only those that are still needed are
kept.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from dpbench.errors import require
from dpbench.noise.base import Noise
from dpbench.privacy.correlation import BandedSquareRoot, Correlation, Tree
from dpbench.privacy.gaussian import GaussianSource
from dpbench.stage import Course


@dataclass
class CorrelatedNoise(Noise):
    """Noise of one scale, correlated between steps; for samplers that bound how often a sample takes part.

    Attributes:
        restart: begin anew with each pass over the data, whose noise is then independent of that of others.
    """

    remembers = ("_drawn", "_kept")

    restart: bool = False

    def __post_init__(self) -> None:
        self._drawn = 0  # steps so far
        self._kept: list[Tensor] = []

    @property
    @override
    @abstractmethod
    def correlation(self) -> Correlation:
        """C, which the account needs."""

    @override
    def scale(self, step: int) -> float:
        return 1.0

    @override
    def deviation(self, step: int) -> float:
        return self._deviation(self._since_restart(step))

    @override
    def draw(self, out: Tensor, source: GaussianSource) -> Tensor:
        step = self._since_restart(self._drawn)
        if step == 0:
            self._kept.clear()
        self._drawn += 1
        return self._correlate(source.fill(out), step)

    def _since_restart(self, step: int) -> int:
        course = self.course  # asked of every noise, so that none is drawn for a run that it knows nothing of
        return step % course.epoch if self.restart else step

    @abstractmethod
    def _deviation(self, step: int) -> float:
        """Norm of row `step` of C⁻¹."""

    @abstractmethod
    def _correlate(self, fresh: Tensor, step: int) -> Tensor:
        """Row `step` of C⁻¹ Z from row `step` of Z, in place."""


@dataclass
class TreeNoise(CorrelatedNoise):
    """Binary tree aggregation: the noise of a prefix sum is that of at most log2(T) + 1 intervals of steps.

    Step t adds the difference between the noises of two prefix sums: that of the interval which it completes, less
    those of the intervals which that one replaces. Kept are the intervals that make up the last prefix sum, one for
    each digit 1 of the number of steps so far.
    """

    @property
    @override
    def correlation(self) -> Tree:
        return Tree(self.restart)

    @override
    def _deviation(self, step: int) -> float:
        return math.sqrt(1 + _replaced(step))

    @override
    def _correlate(self, fresh: Tensor, step: int) -> Tensor:
        replaced = [self._kept.pop() for _ in range(_replaced(step))]
        own = fresh.clone()
        for noise in replaced:
            fresh.sub_(noise)
        self._kept.append(own)
        return fresh


@dataclass
class BandedNoise(CorrelatedNoise):
    """The square root of the prefix-sum matrix, cut to b bands: w_t = z_t - Σ_{k=1}^{b-1} c_k w_{t-k}.

    (Kalinin and Lampert 2024; c_k = binom(2k, k)/4^k.) Kept are the last b - 1 of w.

    Attributes:
        bands: b, at least 1, which is independent noise. A sample that takes part again after b steps or more meets
            noise that knows nothing of the last time.
    """

    bands: int = 4

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.bands >= 1, "noise.bands", self.bands, "a whole number >= 1")
        self._coefficients: list[float] = []
        self._deviations: list[float] = []  # of each step since the restart

    @property
    @override
    def correlation(self) -> BandedSquareRoot:
        return BandedSquareRoot(self.restart, self.bands)

    @override
    def prepare(self, course: Course) -> None:
        from scipy.signal import lfilter  # takes a second, which most commands have no use for

        super().prepare(course)
        steps = course.epoch if self.restart else course.steps
        impulse = np.zeros(steps)
        impulse[:1] = 1.0
        self._coefficients = self.correlation.within(steps).tolist()
        self._deviations = np.sqrt(np.cumsum(lfilter([1.0], self._coefficients, impulse) ** 2)).tolist()

    @override
    def _deviation(self, step: int) -> float:
        return self._deviations[step]

    @override
    def _correlate(self, fresh: Tensor, step: int) -> Tensor:
        for coefficient, past in zip(self._coefficients[1:], self._kept, strict=False):
            fresh.sub_(past, alpha=coefficient)
        if self.bands > 1:
            oldest = self._kept.pop() if len(self._kept) == self.bands - 1 else torch.empty_like(fresh)
            self._kept.insert(0, oldest.copy_(fresh))
        return fresh


def _replaced(step: int) -> int:
    """Digits 1 at the end of the number of steps before this one."""
    return (~step & (step + 1)).bit_length() - 1
