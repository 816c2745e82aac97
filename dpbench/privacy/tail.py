"""Where numbers of finite precision end, which no account of Gaussian noise knows: one beyond tells of a sample."""

from __future__ import annotations

import math
from collections.abc import Iterable

import scipy

from dpbench.privacy.closed_forms import gaussian_log_delta

# Standard deviations at which the noise of `SeededGaussian` in single precision ends; on some devices, and in long
# vectors, only further out.
END = 8.16
# The same before this day, when each number was one of torch's: on a CPU, and on a GPU. Near that end these have more
# numbers than a normal distribution.
LONGER_SINCE = "2026-11-25"
END_BEFORE, END_ON_GPU_BEFORE = 5.77, 6.7

# More than the parameters of any model here.
COORDINATES = 1e9


def probability_beyond(
    end: float, releases: Iterable[tuple[float, float, float]], *, coordinates: float = COORDINATES
) -> float:
    """Probability, at most, that a sample shows in a run for sure: by a number that noise alone never gives.

    A sample that takes part moves the released numbers by a vector of norm s, in standard deviations of their noise,
    and a number that it moves by v lies beyond the end with probability P(v) = Φ(-(end - v)) - Φ(-end). In one
    coordinate that is P(s). In more of them it may be more: P(v) is at most φ(end) v and a part that is convex in v²,
    so that over d coordinates it adds up to at most P(s) + φ(end) s sqrt(d), for s <= end - 1. The probability is to be
    added to delta.

    Args:
        end: of the noise, in standard deviations.
        releases: of such as are alike their count, sampling rate, and s; inf where there is no noise.
        coordinates: d, at most.
    """
    return math.fsum(count * rate * _one_beyond(end, moved, coordinates) for count, rate, moved in releases)


def _one_beyond(end: float, moved: float, coordinates: float) -> float:
    if math.isinf(end):
        return 0.0
    if moved > end - 1:
        return 1.0
    density = math.exp(-(end**2) / 2) / math.sqrt(2 * math.pi)
    return min(1.0, 0.5 * math.erfc((end - moved) / math.sqrt(2)) + density * moved * math.sqrt(coordinates))


def moved_by(eps: float, delta: float) -> float:
    """How far a sample moves a Gaussian release that is (eps, delta)-private and no better, in standard deviations."""
    if math.isinf(eps):
        return math.inf
    largest = math.sqrt(2 * eps) + 50  # spends more than any delta
    wanted = math.log(delta)
    return float(scipy.optimize.brentq(lambda mu: gaussian_log_delta(eps, mu) - wanted, 1e-12, largest))


def tail_in_words(probability: float, delta: float) -> str | None:
    """A clause that says so of today's noise where that is more than delta; else None."""
    if probability <= delta:
        return None
    return (
        f"noise drawn from a seed ends at {END:g} standard deviations, which no account counts: with a probability of "
        f"up to {min(1.0, probability):.1g}, more than delta, a sample shows for sure"
    )
