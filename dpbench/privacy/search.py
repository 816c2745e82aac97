"""The noise multiplier with which a random search, of which the best run is published, stays within a given eps."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from dpbench import cache
from dpbench.errors import UserError
from dpbench.privacy.accountants import SMALLEST_MULTIPLIER, quick_curve, renyi_curve
from dpbench.privacy.calibration import (
    TOLERANCE,
    Calibration,
    arithmetic,
    require_reached,
    solve,
    why_unreached,
)
from dpbench.privacy.plan import Plan
from dpbench.privacy.tuning import RandomRuns, RenyiCurve, TruncatedNegativeBinomial


def search_of(expected_runs: float) -> RandomRuns:
    """The search that `privacy.search_runs` names: a number of runs drawn from the logarithmic distribution.

    Raises:
        UserError: not more than one run is expected.
    """
    return TruncatedNegativeBinomial(expected_runs, shape=0.0)


def search_cost(plan: Plan, delta: float, search: RandomRuns) -> float:
    """Eps of a search, each of whose runs makes the releases of a plan with its final noise multipliers."""
    return search.eps(renyi_curve(plan, delta), delta)


def calibrate_search(plan: Plan, eps: float, delta: float, search: RandomRuns) -> Calibration:
    """The smallest noise multiplier z of each run, with which the search spends at most eps; cached on disk.

    Every run of the search has to make the releases of this plan, at this z or a larger one: its cost follows from one
    Rényi curve that bounds them all. Two plans that are calibrated one by one have curves that cross, and a search
    over both of them spends more.

    Args:
        plan: of a run, its multipliers relative scales.
        eps: of the search, finite and > 0.
        delta: of the search, in (0, 1).
        search: how many runs, and how their number is drawn.

    Returns:
        z, and eps of the search with it.

    Raises:
        UserError: no multiplier reaches it, which is so where choosing alone costs more, or see `require_reached`.
    """
    known = calibrated_search(plan, eps, delta, search)
    # It may be by another version's arithmetic.
    if known is not None and (total := search_cost(plan.scaled(known), delta, search)) <= eps:
        return Calibration(known, total, 0.0)
    start = time.perf_counter()

    def spent(multiplier: float, curve: Callable[[Plan, float], RenyiCurve]) -> float:
        return search.eps(curve(plan.scaled(max(multiplier, SMALLEST_MULTIPLIER)), delta), delta)

    choosing = search_cost(replace(plan, runs=()), delta, search)
    if eps <= choosing:
        raise UserError(
            f"expected more than {choosing:.4g}, which choosing among runs costs alone", field="eps", value=eps
        )
    multiplier = 1.0
    for curve, step, tolerance in ((quick_curve, 0.5, 0.01), (renyi_curve, 0.02, TOLERANCE)):
        find = partial(spent, curve=curve)
        multiplier, total = solve(find, eps, multiplier, step, tolerance, unreached=why_unreached(plan))
    require_reached(multiplier, total, eps)
    cache.write("search", _key(plan, eps, delta, search), multiplier)
    return Calibration(multiplier, total, time.perf_counter() - start)


def calibrated_search(plan: Plan, eps: float, delta: float, search: RandomRuns) -> float | None:
    """What `calibrate_search` found before and kept; None if it did not."""
    known = cache.read("search", _key(plan, eps, delta, search))
    return known if isinstance(known, float) else None


def _key(plan: Plan, eps: float, delta: float, search: RandomRuns) -> list[object]:
    how = [plan.scheme.name, plan.epoch, repr(plan.correlation)]
    return [plan.runs, *how, eps, delta, repr(search), *arithmetic(__name__)]
