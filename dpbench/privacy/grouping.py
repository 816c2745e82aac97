"""Plans of many different releases as plans of few that spend a little more.

Some schedules, ADP's among them, give every step a noise multiplier of its own, and an accountant takes its time for
each different release. Counting a release as one with less noise keeps every bound valid.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter

import numpy as np
from numpy.typing import NDArray

from dpbench.privacy.plan import Plan, Release, Repeat
from dpbench.privacy.sampling import FIXED_SIZE, Scheme

# Largest share that grouping may add to the sum of Rényi divergences, at any order up to the best. It is always added,
# never taken away. Eps grows by half as much or so: 1.1 % at most where it was measured, of 11,719 steps.
EXCESS = 0.02

_ORDERS = (
    *(1.1, 1.25, 1.5, 1.75, 2, 2.25, 2.5, 2.75, 3, 3.5, 4, 4.5, 5, 6, 7, 8, 9, 10),
    *(12, 14, 16, 20, 24, 28, 32, 40, 48, 64),
)

# So many different releases are left as they are.
_FEW = 16


def coarse(plan: Plan, delta: float, excess: float = EXCESS) -> Plan:
    """A plan of few different releases that spends at least as much, by the arguments of `rounding`.

    The order of releases does not matter where batches are independent. Plans of passes are returned as they are.
    """
    if plan.scheme.passes:
        return plan
    grouped = rounding(plan, delta, excess)
    counts: Counter[Release] = Counter()
    for release, times in plan.runs:
        counts[grouped[release.joint]] += times
    return Plan(tuple(Repeat(*item) for item in counts.items()), plan.scheme)


def rounding(plan: Plan, delta: float, excess: float = EXCESS) -> dict[Release, Release]:
    """The release that each joint release of the plan counts as: one of the same rate with as much noise or less.

    By Rényi divergence, eps is the smallest of Σ_t D(z_t) + c over orders, and by privacy loss distributions less than
    that: there lower orders count, too, at which releases with more noise take a larger part. So the sum at each order
    up to the best one grows by a share at most.

    Args:
        plan: independent batches, multipliers > 0.
        delta: in (0, 1), at which eps matters.
        excess: that share, up to the accuracy of `_divergences`.
    """
    counts: Counter[Release] = Counter()
    for release, number in plan.runs:
        counts[release.joint] += number
    releases = sorted(counts)
    if len(releases) <= _FEW:
        return {release: release for release in releases}
    times = np.array([counts[release] for release in releases])
    each = _divergences(releases, times, plan.scheme, delta)
    sums = each @ times
    allowed = group_may_add = excess * sums
    while True:
        bases = _bases(releases, times, each, group_may_add)
        if bool(((each[:, bases] - each) @ times <= allowed).all()):
            return {release: releases[base] for release, base in zip(releases, bases, strict=True)}
        group_may_add = 0.7 * group_may_add


def _bases(
    releases: list[Release], times: NDArray[np.int64], each: NDArray[np.float64], may_add: NDArray[np.float64]
) -> list[int]:
    """For each of the ascending releases the index of the first, least noisy one of its group."""
    numbers, sums = np.cumsum(times), np.cumsum(times * each, axis=1)

    def is_too_much(i: int) -> bool:
        """Whether a group from `base` to i adds more at some order than it may."""
        added = each[:, base] * (numbers[i] - numbers[base]) - (sums[:, i] - sums[:, base])
        return bool((added > may_add).any())

    bases: list[int] = []
    while (base := len(bases)) < len(releases):
        same_rate = bisect_right(releases, releases[base].sampling_rate, key=lambda release: release.sampling_rate)
        ends = range(base + 1, same_rate)
        bases += [base] * (1 + bisect_left(ends, True, key=is_too_much))
    return bases


def _divergences(
    releases: list[Release], times: NDArray[np.int64], scheme: Scheme, delta: float
) -> NDArray[np.float64]:
    """Rényi divergence of each release at the orders up to the one that gives the smallest eps, shape (orders, n).

    For Poisson sampling; with the leading factor 4 of their bound for batches of fixed size. Accurate to a percent or
    so, which is enough here: it only decides about groups, never about eps.
    """
    rates = np.array([release.sampling_rate for release in releases])
    multipliers = np.array([release.noise_multiplier for release in releases]) / scheme.sensitivity
    factor = 4.0 if scheme == FIXED_SIZE else 1.0
    at_orders, best, smallest = [], 1, np.inf
    for order in _ORDERS:
        each = np.empty(len(releases))
        for rate in np.unique(rates):
            same = rates == rate
            each[same] = factor * _interpolated(order, float(rate), multipliers[same])
        eps = float(times @ each) + np.log1p(-1 / order) - np.log(delta * order) / (order - 1)
        at_orders.append(each)
        if eps < smallest:
            best, smallest = len(at_orders), eps
    return np.array(at_orders[:best])


def _interpolated(order: float, rate: float, multipliers: NDArray[np.float64]) -> NDArray[np.float64]:
    """`_sampled_gaussian` on a grid of multipliers about 5 % apart, linear between them in logarithms."""
    logs = np.log(multipliers)
    nodes = np.linspace(logs.min(), logs.max(), 2 + int(20 * np.ptp(logs)))
    return np.exp(np.interp(logs, nodes, np.log(_sampled_gaussian(order, rate, np.exp(nodes)))))


def _sampled_gaussian(order: float, rate: float, multipliers: NDArray[np.float64]) -> NDArray[np.float64]:
    """D_α((1 - q) N(0, z²) + q N(1, z²) || N(0, z²)) by the trapezoidal rule, shape of z."""
    from scipy.special import logsumexp  # takes a moment, as the rest of SciPy

    z = multipliers[:, None]
    points = np.linspace(-9.0, order / z[:, 0] + 9.0, 300, axis=1)  # in standard deviations of the second
    log_ratio = np.logaddexp(np.log1p(-min(rate, 1 - 1e-12)), np.log(rate) + points / z - 0.5 / z**2)
    log_moment = logsumexp(order * log_ratio - points**2 / 2, axis=1)
    log_moment += np.log((points[:, 1] - points[:, 0]) / np.sqrt(2 * np.pi))
    # What is left of the divergence for little noise, and for much, where the sum above is lost in rounding.
    little = (order * np.log(rate) + order * (order - 1) / 2 * multipliers**-2) / (order - 1)
    much = order / 2 * (rate / multipliers) ** 2
    divergences: NDArray[np.float64] = np.maximum(np.maximum(log_moment / (order - 1), little), much)
    return divergences
