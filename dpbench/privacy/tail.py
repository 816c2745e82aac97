"""Where numbers of finite precision end, which no account of Gaussian noise knows: a sum beyond tells of a sample."""

from __future__ import annotations

import math
from collections.abc import Iterable

# Standard deviations that no number of `SeededGaussian` in single precision exceeds, on any device; see there.
END = 8.16
# The same before this day, when each number was one of torch's: on a CPU, and on a GPU.
LONGER_SINCE = "2026-11-25"
END_BEFORE, END_ON_GPU_BEFORE = 5.77, 6.7


def probability_beyond(end: float, releases: Iterable[tuple[int, float, float]]) -> float:
    """Probability, at most, that a sample shows in a run for sure: by a number that noise alone never gives.

    A sample moves the sum by at most 1/z deviations of its noise, z the noise multiplier, which then ends so much
    further. So the probability is at most the sum of count q Φ(-(end - 1/z)) over the releases, to be added to delta.

    Args:
        end: of the noise, in standard deviations.
        releases: count, sampling rate q, and noise multiplier, 0 where there is no noise, of such as are alike.
    """
    return math.fsum(
        count * rate * 0.5 * math.erfc((end - 1 / multiplier) / math.sqrt(2)) if multiplier else count * rate
        for count, rate, multiplier in releases
    )


def in_words(end: float, probability: float, delta: float) -> str | None:
    """A clause that says so where that is more than delta; else None."""
    if probability <= delta:
        return None
    return (
        f"noise drawn from a seed ends at {end:g} standard deviations, which no account counts: with a probability of "
        f"up to {min(1.0, probability):.1g}, more than delta, a sample shows for sure"
    )
