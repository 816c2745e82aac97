"""eps of a plan at a given delta, by dp-accounting."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable

import dp_accounting
from dp_accounting.pld import PLDAccountant
from dp_accounting.rdp import RdpAccountant

from dpbench.privacy.plan import Plan

# Below this the accountants' floating point no longer holds, and nothing is private anyway.
SMALLEST_MULTIPLIER = 1e-6

# It warns of every Rényi order whose series did not converge; leaving an order out keeps the bound valid.
logging.getLogger("absl").setLevel(logging.ERROR)


def event(plan: Plan) -> dp_accounting.DpEvent:
    """The plan as an event of dp-accounting, composed in order."""
    return dp_accounting.ComposedDpEvent(
        [
            dp_accounting.SelfComposedDpEvent(
                dp_accounting.PoissonSampledDpEvent(
                    release.sampling_rate, dp_accounting.GaussianDpEvent(release.noise_multiplier)
                ),
                count,
            )
            for release, count in plan.runs
        ]
    )


def discretisation(eps: float) -> float:
    """Interval on which privacy losses are rounded, always upwards, for a plan of about this eps.

    Rounding makes the reported eps larger, never smaller; at this interval by a few parts in ten thousand.
    """
    return max(1e-5, min(1e-3, eps / 5000), eps / 50_000)


def _pld(plan: Plan, delta: float, eps_scale: float) -> float:
    accountant = PLDAccountant(value_discretization_interval=discretisation(eps_scale))
    return float(accountant.compose(event(plan)).get_epsilon(delta))


def _rdp(plan: Plan, delta: float, eps_scale: float) -> float:
    return float(RdpAccountant().compose(event(plan)).get_epsilon(delta))


def quick_bound(plan: Plan, delta: float) -> float:
    """A looser bound in milliseconds, to start a search from: Rényi at orders with a closed form."""
    return float(RdpAccountant(orders=[*range(2, 65), 128, 256, 512, 1024]).compose(event(plan)).get_epsilon(delta))


ACCOUNTANTS: dict[str, Callable[[Plan, float, float], float]] = {"pld": _pld, "rdp": _rdp}


def epsilon(plan: Plan, delta: float, accountant: str, *, eps_scale: float) -> float:
    """An upper bound on eps of all releases in the plan, at delta, add-or-remove-one neighbours.

    Args:
        plan: releases with their final noise multipliers.
        delta: in (0, 1).
        accountant: "pld" (privacy loss distributions, tight) or "rdp" (Rényi).
        eps_scale: about the eps expected; sets how finely PLD rounds.
    """
    if len(plan) == 0:
        return 0.0
    if any(release.noise_multiplier < SMALLEST_MULTIPLIER for release, _ in plan.runs):
        return math.inf
    return ACCOUNTANTS[accountant](plan, delta, eps_scale)
