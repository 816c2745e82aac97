"""The noise multiplier that makes a plan spend a given eps."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import version

from scipy.optimize import brentq

from dpbench import cache
from dpbench.errors import UserError
from dpbench.privacy.accountants import GRID, coarse, discretisation, epsilon, quick_bound
from dpbench.privacy.plan import Plan

# The multiplier is solved for to this relative accuracy, then rounded towards more noise.
TOLERANCE = 1e-4


@dataclass(frozen=True)
class Calibration:
    """What calibration found.

    Attributes:
        noise_multiplier: z; the plan scaled by it spends `eps`.
        eps: spent by the scaled plan, at most the target.
        seconds: time it took; 0 when it was read from the cache.
    """

    noise_multiplier: float
    eps: float
    seconds: float


def calibrate(plan: Plan, eps: float, delta: float, accountant: str) -> Calibration:
    """Solve for the smallest noise multiplier z at which the plan's eps is at most the target.

    Results are cached on disk by plan, target, accountant and version of dp-accounting.

    Args:
        plan: releases whose multipliers are relative scales.
        eps: target > 0; inf gives z = 0.
        delta: in (0, 1).
        accountant: see `epsilon`.

    Raises:
        UserError: no multiplier reaches the target.
    """
    if math.isinf(eps):
        return Calibration(0.0, math.inf, 0.0)
    key = _key(plan, eps, delta, accountant)
    known = cache.read("calibration", key)
    if isinstance(known, list) and [type(x) for x in known] == [float, float]:
        return Calibration(known[0], known[1], 0.0)
    start = time.perf_counter()
    multiplier = 1.0
    for bound, step in _bounds(plan, eps, delta, accountant):
        multiplier, spent = solve(bound, eps, multiplier, step)
    cache.write("calibration", key, [multiplier, spent])
    return Calibration(multiplier, spent, time.perf_counter() - start)


def _bounds(plan: Plan, eps: float, delta: float, accountant: str) -> Iterator[tuple[Callable[[float], float], float]]:
    """What a multiplier spends by ever tighter bounds, the last of them the one asked for.

    Each starts the search of the next; with it comes that search's first step in log z.
    """
    yield lambda z: quick_bound(plan.scaled(z), delta), 0.5
    step = 0.1
    if len(coarse(plan).runs) > 1:
        yield lambda z: epsilon(plan.scaled(z), delta, accountant, eps_scale=10 * eps, ratio=1.05), step
        step = 0.01
    yield lambda z: epsilon(plan.scaled(z), delta, accountant, eps_scale=eps), step


def solve(spent: Callable[[float], float], target: float, guess: float, step: float) -> tuple[float, float]:
    """Root of the decreasing function spent(z) = target, found in log z and rounded up until spent <= target.

    Args:
        spent: eps of a multiplier.
        target: eps > 0.
        guess: where to begin.
        step: first step of the search for two multipliers that the root lies between, in log z.

    Returns:
        z, and what it spends.
    """
    known: dict[float, float] = {}

    def excess(log_z: float) -> float:
        if log_z not in known:
            try:
                known[log_z] = spent(math.exp(log_z))
            except OverflowError:  # an accountant's word for a loss beyond floating point
                known[log_z] = math.inf
        return math.log(min(max(known[log_z] / target, 1e-9), 1e9))  # finite, so that the root search can interpolate

    low = high = math.log(guess)
    up = down = step
    while excess(high) > 0:
        low, high, up = high, high + up, 2 * up
        if high > 20:
            raise UserError("no noise multiplier below e^20 reaches it with this many steps", field="eps", value=target)
    while excess(low) <= 0:
        low, high, down = low - down, low, 2 * down
        if low < -20:
            raise UserError("is more than any noise multiplier above e^-20 spends", field="eps", value=target)
    root = float(brentq(excess, low, high, xtol=TOLERANCE / 4))
    while excess(root) > 0:
        root += TOLERANCE / 4
    return math.exp(root), known[root]


def _key(plan: Plan, eps: float, delta: float, accountant: str) -> list[object]:
    how = [plan.scheme.name, plan.epoch, repr(plan.correlation)]
    return [plan.runs, how, eps, delta, accountant, discretisation(eps), TOLERANCE, GRID, version("dp-accounting")]
