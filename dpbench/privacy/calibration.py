"""The noise multiplier that makes a plan spend a given eps."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version

from scipy.optimize import brentq

from dpbench import cache
from dpbench.errors import UserError
from dpbench.privacy.accountants import discretisation, epsilon, quick_bound
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
    guess = _solve(lambda z: quick_bound(plan.scaled(z), delta), eps, 1.0)
    multiplier = _solve(lambda z: epsilon(plan.scaled(z), delta, accountant, eps_scale=eps), eps, guess)
    spent = epsilon(plan.scaled(multiplier), delta, accountant, eps_scale=eps)
    result = Calibration(multiplier, spent, time.perf_counter() - start)
    cache.write("calibration", key, [multiplier, spent])
    return result


def _solve(spent: Callable[[float], float], target: float, guess: float) -> float:
    """Root of the decreasing function spent(z) = target, found in log z and rounded up until spent <= target."""
    known: dict[float, float] = {}

    def excess(log_z: float) -> float:
        if log_z not in known:
            try:
                ratio = spent(math.exp(log_z)) / target
            except OverflowError:  # an accountant's word for a loss beyond floating point
                ratio = math.inf
            known[log_z] = math.log(min(max(ratio, 1e-9), 1e9))  # finite, so that the root search can interpolate
        return known[log_z]

    low = high = math.log(guess)
    step = 0.1
    while excess(high) > 0:
        low, high, step = high, high + step, 2 * step
        if high > 20:
            raise UserError("no noise multiplier below e^20 reaches it with this many steps", field="eps", value=target)
    step = 0.1
    while excess(low) <= 0:
        low, high, step = low - step, low, 2 * step
        if low < -20:
            raise UserError("is more than any noise multiplier above e^-20 spends", field="eps", value=target)
    root = float(brentq(excess, low, high, xtol=TOLERANCE / 4))
    while excess(root) > 0:
        root += TOLERANCE / 4
    return math.exp(root)


def _key(plan: Plan, eps: float, delta: float, accountant: str) -> list[object]:
    return [plan.runs, eps, delta, accountant, discretisation(eps), TOLERANCE, version("dp-accounting")]
