"""Thresholds from a private histogram of per-sample norms: DC-SGD (Wei et al. 2025).

Each step releases, beside the clipped sum, the histogram of its norms; the next threshold is post-processing of it.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override

from dpbench.errors import require
from dpbench.privacy.gaussian import GaussianSource, add_noise
from dpbench.privacy.plan import Part
from dpbench.threshold.base import Threshold

Counts = NDArray[np.float64]

RANGES = (1e-8, 1e8)
# Of rule E: searches from one candidate grid to the next, and thresholds in units of the range.
MOST_PASSES = 64
THRESHOLDS = (1e-6, 2.0)


@dataclass
class HistogramThreshold(Threshold):
    """C_{t+1} from the noisy histogram of step t's norms over [0, R_t], whose last bin also has what lies beyond.

    One sample changes one count by one: the histogram has sensitivity 1, and with the clipped sum it is one Gaussian
    release. Counts are neither rounded nor cut at zero.

    Deviations from the paper, all of them post-processing: where the noisy total is not positive, C and R stay as they
    are, and R stays within 1e-8 to 1e8. How often each of these guards fires is counted.

    Attributes:
        norm: C_0.
        bins: b, from 1 to 100,000.
        histogram_noise: σ_H, standard deviation of the noise in each bin.
    """

    remembers = ("_threshold", "_range", "_guarded")

    GUARDS: ClassVar[tuple[str, ...]] = ("total_not_positive", "range_bounded")

    norm: float = 1.0
    bins: int = 20
    histogram_noise: float = 5.0

    def __post_init__(self) -> None:
        require(1e-8 <= self.norm <= 1e8, "threshold.norm", self.norm, "a number from 1e-8 to 1e8")
        require(1 <= self.bins <= 100_000, "threshold.bins", self.bins, "a whole number from 1 to 100000")
        noise = self.histogram_noise
        require(0 < noise < math.inf, "threshold.histogram_noise", noise, "a finite number > 0")
        self._threshold = self.norm
        self._range = self._first_range()
        self._counts: Tensor | None = None
        self._guarded = dict.fromkeys(self.GUARDS, 0)

    @abstractmethod
    def _first_range(self) -> float:
        """R of the first step."""

    @override
    def guarded(self) -> dict[str, int]:
        return dict(self._guarded)

    @property
    @override
    def beside(self) -> tuple[Part, ...]:
        return (Part("histogram of norms", self.histogram_noise),)

    @override
    def value(self, step: int) -> float:
        return self._threshold

    @override
    def observe(self, norms: Tensor) -> None:
        found = histogram(norms, self._range, self.bins)
        self._counts = found if self._counts is None else self._counts + found

    @override
    def release(self, source: GaussianSource | None, error_weight: float) -> None:
        counts = (
            torch.zeros(self.bins, dtype=torch.float64, device="cpu") if self._counts is None else self._counts.cpu()
        )
        self._counts = None
        if source is not None:
            add_noise(counts, source.fill(torch.empty_like(counts)), self.histogram_noise, source)
        self._update(counts.numpy(), error_weight)

    def _update(self, counts: Counts, error_weight: float) -> None:
        if counts.sum() <= 0:
            self._guarded["total_not_positive"] += 1
            return
        self._threshold, reach = self._rule(counts, error_weight)
        self._range = self._within(reach, RANGES, "range_bounded")

    def _within(self, value: float, bounds: tuple[float, float], guard: str) -> float:
        bounded = min(max(value, bounds[0]), bounds[1])
        self._guarded[guard] += int(bounded != value)
        return bounded

    @abstractmethod
    def _rule(self, counts: Counts, error_weight: float) -> tuple[float, float]:
        """C_{t+1} and R_{t+1} from noisy counts of positive sum."""


@dataclass
class PercentileThreshold(HistogramThreshold):
    """DC-SGD-P: C_{t+1} is the midpoint of the bin that holds the p-quantile of the norms, and R_{t+1} = 2 C_{t+1}.

    Attributes:
        quantile: p, share of samples that are to stay unclipped.
        range: R_0; null for 2 C_0, as of every later step. The paper prints 1.
    """

    quantile: float = 0.5
    range: float | None = None

    @override
    def __post_init__(self) -> None:
        require(0 < self.quantile <= 1, "threshold.quantile", self.quantile, "a number in (0, 1]")
        low, high = RANGES
        allowed = f"null, or a number from {low:g} to {high:g}"
        require(self.range is None or low <= self.range <= high, "threshold.range", self.range, allowed)
        super().__post_init__()

    @override
    def _first_range(self) -> float:
        return 2 * self.norm if self.range is None else self.range

    @override
    def _rule(self, counts: Counts, error_weight: float) -> tuple[float, float]:
        reached = np.cumsum(counts) >= self.quantile * counts.sum()
        threshold = float(midpoints(self._range, self.bins)[int(reached.argmax()) if reached.any() else -1])
        return threshold, 2 * threshold


@dataclass
class ExpectedErrorThreshold(HistogramThreshold):
    """DC-SGD-E: C_{t+1} makes the expected squared error of a released gradient smallest, on a grid of candidates.

    Ê(C) = K C² + Σ_k H̃_k max(m_k - C, 0)²/Σ_k H̃_k over midpoints m_k, where K C² is the noise in all coordinates of
    the mean, and the other term what clipping at a threshold takes off. Candidates are C/10, 2C/10, ... 2C; while the
    best is the first or last of them, it takes the place of C.

    Deviations from the paper: also where the noisy mean norm is not positive, C stays; passes are counted, and C stays
    within 1e-6 to 2 times the range. Without these the threshold can vanish for good.
    """

    @override
    def _first_range(self) -> float:
        return float(self.bins)

    GUARDS = (*HistogramThreshold.GUARDS, "mean_not_positive", "passes_ended", "threshold_bounded")

    @override
    def _rule(self, counts: Counts, error_weight: float) -> tuple[float, float]:
        return self._best(counts, error_weight), self._next_range(counts)

    def _best(self, counts: Counts, error_weight: float) -> float:
        centres = midpoints(self._range, self.bins)
        if counts @ centres <= 0:
            self._guarded["mean_not_positive"] += 1
            return self._threshold
        reference = self._threshold
        for _ in range(MOST_PASSES):
            candidates = np.arange(1, 21) * reference / 10
            best = int(expected_error(candidates, centres, counts, error_weight).argmin())
            reference = float(candidates[best])
            if 0 < best < 19:
                break
        else:
            self._guarded["passes_ended"] += 1
        return self._within(reference, (THRESHOLDS[0] * self._range, THRESHOLDS[1] * self._range), "threshold_bounded")

    def _next_range(self, counts: Counts) -> float:
        total = counts.sum()
        if counts[-1] >= 0.5 * total:
            return 2 * self._range
        if counts[self.bins // 2 :].sum() <= total / self.bins:
            return self._range / 2
        return self._range


def expected_error(thresholds: Counts, norms: Counts, counts: Counts, error_weight: float) -> Counts:
    """Ê(C) of `ExpectedErrorThreshold`, of `counts` samples of each norm.

    Args:
        thresholds: C, shape (n,).
        norms: midpoints of bins, or the norms themselves, shape (k,).
        counts: samples of each norm, shape (k,); of any sign, but their sum is positive.
        error_weight: K.

    Returns:
        Shape (n,).
    """
    beyond = np.maximum(norms - thresholds[:, None], 0) ** 2
    errors: Counts = error_weight * thresholds**2 + beyond @ counts / counts.sum()
    return errors


def midpoints(reach: float, bins: int) -> Counts:
    """Middles of equal bins over [0, reach], shape (bins,)."""
    return (np.arange(bins) + 0.5) * reach / bins


def histogram(norms: Tensor, reach: float, bins: int) -> Tensor:
    """Counts of norms, shape (B,), in equal bins over [0, reach], the last one open; float64, shape (bins,)."""
    at = (norms.double() * (bins / reach)).floor().clamp_(0, bins - 1).long()
    return torch.bincount(at, minlength=bins).double()
