"""The noise multiplier that makes a plan spend a given eps."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache as cache_of_process
from importlib.metadata import version
from typing import NamedTuple

from dpbench import cache
from dpbench.errors import UserError, require
from dpbench.privacy.accountants import NearbyOrders, discretisation, epsilon, quick_bound, require_delta
from dpbench.privacy.grouping import EXCESS
from dpbench.privacy.plan import Plan
from dpbench.sources import digest_of, sources_of

# What a calibrated plan spends is below the target by at most this share of it.
TOLERANCE = 2e-4
# Where an account jumps over the target, what is left of it must be as much, or the noise would be out of proportion.
LEAST_SHARE = 0.9
UNREACHED = "no noise multiplier below e^20 reaches it by this account; take a larger eps or delta, or fewer steps"


@dataclass(frozen=True)
class Calibration:
    """What calibration found.

    Attributes:
        noise_multiplier: z; the plan scaled by it spends `eps`.
        eps: spent by the scaled plan, or by a search of such runs, at most the target.
        seconds: time it took; 0 when it was read from the cache.
    """

    noise_multiplier: float
    eps: float
    seconds: float


def calibrate(plan: Plan, eps: float, delta: float, accountant: str) -> Calibration:
    """Solve for the smallest noise multiplier z at which the plan's eps is at most the target.

    Results are cached on disk by plan, target, accountant and what computes it: versions of dp-accounting and of the
    modules here.

    Args:
        plan: releases whose multipliers are relative scales.
        eps: target > 0; inf gives z = 0.
        delta: in (0, 1).
        accountant: see `epsilon`.

    Raises:
        UserError: eps or delta is none, no multiplier reaches the target, or all do: at a delta that is at least the
            probability with which a sample takes part in any release.
    """
    if not len(plan):
        raise UserError("the plan has no releases, for which no noise is to be found")
    require(eps > 0, "eps", eps, "a number above 0, or inf for no noise")
    require_delta(delta, accountant)
    if math.isinf(eps):
        return Calibration(0.0, math.inf, 0.0)
    if (known := calibrated(plan, eps, delta, accountant)) is not None:
        return known
    chance = _chance_to_take_part(plan)
    told = f"a number below {chance:.3g}, the probability that a sample takes part at all, or no noise is needed"
    require(delta < chance, "delta", delta, told)
    start = time.perf_counter()
    multiplier = 1.0
    for bound, step, tolerance in _bounds(plan, eps, delta, accountant):
        multiplier, spent = solve(bound, eps, multiplier, step, tolerance, unreached=why_unreached(plan))
    require_reached(multiplier, spent, eps)
    cache.write("calibration", _key(plan, eps, delta, accountant), [multiplier, spent])
    return Calibration(multiplier, spent, time.perf_counter() - start)


def calibrated(plan: Plan, eps: float, delta: float, accountant: str) -> Calibration | None:
    """What `calibrate` found before and kept; None if it did not."""
    known = cache.read("calibration", _key(plan, eps, delta, accountant))
    if isinstance(known, list) and [type(x) for x in known] == [float, float]:
        return Calibration(known[0], known[1], 0.0)
    return None


def _chance_to_take_part(plan: Plan) -> float:
    """Probability with which a sample takes part in any release; at such a delta nothing is left to protect."""
    if plan.scheme.passes:
        return 1.0
    return 1 - math.prod((1 - run.release.sampling_rate) ** run.times for run in plan.runs)


def why_unreached(plan: Plan) -> str:
    """Why no multiplier may be large enough."""
    beside = {part for run in plan.runs for part in run.release.beside}
    if not beside:
        return UNREACHED
    parts = " and ".join(f"the {part.name} at noise multiplier {part.noise_multiplier:g}" for part in sorted(beside))
    return (
        f"{parts}, released beside the gradient, leaves nothing of it; give that more noise by its setting of "
        "threshold, such as threshold.histogram_noise"
    )


class _Bound(NamedTuple):
    """What a multiplier spends, and how to search with that.

    Attributes:
        spent: eps of z.
        step: see `solve`.
        tolerance: see `solve`.
    """

    spent: Callable[[float], float]
    step: float
    tolerance: float


def _bounds(plan: Plan, eps: float, delta: float, accountant: str) -> Iterator[_Bound]:
    """Ever tighter bounds, each to start the search of the next, the last of them the one asked for."""
    yield _Bound(lambda z: quick_bound(plan.scaled(z), delta), 0.5, 0.03)
    step = 0.1
    if len(plan.runs) > 1 and not plan.scheme.passes:
        if accountant == "rdp":
            nearby = NearbyOrders(delta)
            yield _Bound(lambda z: nearby.epsilon(plan.scaled(z)), step, TOLERANCE)
        else:
            rough = {"eps_scale": 10 * eps, "excess": 2 * EXCESS}
            yield _Bound(lambda z: epsilon(plan.scaled(z), delta, accountant, **rough), step, 0.01)
        step = 0.02
    yield _Bound(lambda z: epsilon(plan.scaled(z), delta, accountant, eps_scale=eps), step, TOLERANCE)


def solve(
    spent: Callable[[float], float],
    target: float,
    guess: float,
    step: float,
    tolerance: float = TOLERANCE,
    unreached: str = UNREACHED,
) -> tuple[float, float]:
    """A multiplier z that spends the target or a little less, found in log z.

    Args:
        spent: eps of a multiplier; decreases but for small jumps, which grouping releases may bring.
        target: eps > 0.
        guess: where to begin.
        step: first step of the search for two multipliers that the root lies between, in log z.
        tolerance: share of the target that may be left.
        unreached: what to say where even the largest multiplier spends more.

    Returns:
        z, and what it spends, at most the target.

    Raises:
        UserError: no z in e^-20 ... e^20 does.
    """
    known: dict[float, float] = {}

    def excess(log_z: float) -> float:
        if log_z not in known:
            try:
                known[log_z] = spent(math.exp(log_z))
            except OverflowError:  # an accountant's word for a loss beyond floating point
                known[log_z] = math.inf
        ratio = known[log_z] / target
        if 1 - tolerance <= ratio <= 1:
            return 0.0  # ends the search
        # Aims at the middle of what is allowed; finite, so that the root search can interpolate.
        return math.log(min(max(ratio, 1e-9), 1e9)) + tolerance / 2

    from scipy.optimize import brentq  # takes half a second, which a plan of runs has no use for

    low = high = math.log(guess)
    up = down = step
    while excess(high) > 0:
        low, high, up = high, high + up, 2 * up
        if high > 20:
            raise UserError(unreached, field="eps", value=target)
    while excess(low) < 0:
        low, high, down = low - down, low, 2 * down
        if low < -20:
            raise UserError("is more than any noise multiplier above e^-20 spends", field="eps", value=target)
    root = float(brentq(excess, low, high, xtol=tolerance / 8))
    up = tolerance / 8
    while excess(root) > 0:  # at a jump
        root, up = root + up, 2 * up
    return math.exp(root), known[root]


def require_reached(multiplier: float, spent: float, target: float) -> None:
    """Raise `UserError` where an account falls from more than the target to next to nothing, at a lot of noise."""
    if spent < LEAST_SHARE * target:
        raise UserError(
            f"this account falls from more than it to {spent:.3g} at noise multiplier {multiplier:.6g}; take another "
            "accountant or sampler, or a larger eps or delta",
            field="eps",
            value=target,
        )


def _key(plan: Plan, eps: float, delta: float, accountant: str) -> list[object]:
    how = [plan.scheme.name, plan.epoch, repr(plan.correlation)]
    return [plan.runs, how, eps, delta, accountant, discretisation(eps), *arithmetic(__name__)]


@cache_of_process
def arithmetic(module: str) -> tuple[str, ...]:
    """What a multiplier follows from besides the question: code of a module, all that it imports, and dp-accounting."""
    return version("dp-accounting"), digest_of(sources_of(module))
