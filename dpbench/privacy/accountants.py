"""eps of a plan at a given delta: by dp-accounting or by ours, as each sampling scheme permits."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from dpbench.errors import require
from dpbench.privacy.fixed_size import FixedSizeAccountant
from dpbench.privacy.grouping import EXCESS, coarse, rounding
from dpbench.privacy.plan import Plan, Release, Repeat
from dpbench.privacy.sampling import FIXED_SIZE, POISSON, Scheme
from dpbench.privacy.tuning import RenyiCurve

# It takes a second to import, so it is imported where an account is asked for.
if TYPE_CHECKING:
    import dp_accounting
    from dp_accounting.pld import PLDAccountant
    from dp_accounting.rdp import RdpAccountant

ACCOUNTANTS = ("pld", "rdp", "gdp")

# Below this the accountants' floating point no longer holds, and nothing is private anyway.
SMALLEST_MULTIPLIER = 1e-6
# Above this they overflow.
LARGEST_MULTIPLIER = 1e8

# An accountant that composes releases.
Opened: TypeAlias = "RdpAccountant | PLDAccountant | FixedSizeAccountant"

# See `rounding`, of accounts that only start a search.
ROUGH = 0.2
# Below, eps by PLD may come out too small by its floating point.
LEAST_DELTA = 1e-9

CLOSED_FORM_ORDERS = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 128, 256, 512, 1024)

# It warns of every Rényi order whose series did not converge; leaving an order out keeps the bound valid.
logging.getLogger("absl").setLevel(logging.ERROR)


def event(plan: Plan) -> dp_accounting.DpEvent:
    """A plan of Poisson samples, or of passes, as an event of dp-accounting."""
    import dp_accounting

    if plan.scheme.passes:
        multiplier = pass_multiplier(plan)
        return dp_accounting.GaussianDpEvent(multiplier) if multiplier < math.inf else dp_accounting.NoOpDpEvent()
    return dp_accounting.ComposedDpEvent(
        [dp_accounting.SelfComposedDpEvent(_sampled(run.release), run.times) for run in plan.runs]
    )


def _sampled(release: Release) -> dp_accounting.DpEvent:
    import dp_accounting

    # Counted as less noise, which is valid, where an accountant would overflow.
    multiplier = min(release.joint.noise_multiplier, LARGEST_MULTIPLIER)
    return dp_accounting.PoissonSampledDpEvent(release.sampling_rate, dp_accounting.GaussianDpEvent(multiplier))


def pass_multiplier(plan: Plan) -> float:
    """Noise multiplier of the one Gaussian release that a plan of passes over the data is; inf for an empty plan.

    In each pass a sample takes part in one release, in the worst case the least noisy one; passes compose exactly
    (Dong, Roth, Su 2022, corollary 3.3). With correlated noise all passes are one release of a matrix mechanism, and
    what is released beside the sums has noise of its own.
    """
    if not len(plan):
        return math.inf
    if plan.correlation is None:
        return _over_passes(plan, lambda release: release.joint.noise_multiplier)
    sums = min(run.release.noise_multiplier for run in plan.runs)
    sums /= math.sqrt(plan.correlation.squared_sensitivity(len(plan), plan.epoch))
    return _together([sums, _over_passes(plan, lambda release: _together(z for _, z in release.beside))])


def _over_passes(plan: Plan, multiplier: Callable[[Release], float]) -> float:
    smallest: list[float] = []
    position = 0
    for release, times in plan.runs:
        first, last = position // plan.epoch, (position + times - 1) // plan.epoch
        smallest += [math.inf] * (last + 1 - len(smallest))
        for number in range(first, last + 1):
            smallest[number] = min(smallest[number], multiplier(release))
        position += times
    return _together(smallest)


def _together(multipliers: Iterable[float]) -> float:
    """Of Gaussian releases as one; inf for none."""
    inverse = [1 / z if z > 0 else math.inf for z in multipliers]
    norm = math.hypot(*inverse)
    return 1 / norm if norm > 0 else math.inf


def discretisation(eps: float) -> float:
    """Interval on which privacy losses are rounded, always upwards, for a plan of about this eps.

    Rounding makes the reported eps larger, never smaller: at this interval by at most 0.5 % plus 0.0002, as measured
    for sampling rates from 0.001, up to 40,000 steps and eps up to 1000, and mostly by far less.
    """
    return max(1e-5, min(1e-3, eps / 5000), eps / 50_000)


def quick_bound(plan: Plan, delta: float) -> float:
    """A looser bound in milliseconds, to start a search from: Rényi at orders with a closed form."""
    if plan.smallest_multiplier < SMALLEST_MULTIPLIER:
        return math.inf
    return _spent(_rdp(plan.scheme, CLOSED_FORM_ORDERS), plan, delta, ROUGH)


def least_epsilon(plan: Plan, delta: float) -> float:
    """A bound from below in milliseconds: what the least noisy release spends alone; 0 where batches aren't Poisson.

    Of q P + (1 - q) Q against Q, δ(ε) = q δ_PQ(log(1 + (e^ε - 1)/q)) (Balle, Barthe and Gaboardi 2018, theorem 2).
    """
    if plan.scheme != POISSON or not len(plan):
        return 0.0
    least = min(plan.runs, key=lambda run: run.release.joint.noise_multiplier).release
    rate, multiplier = least.sampling_rate, least.joint.noise_multiplier
    if multiplier < SMALLEST_MULTIPLIER:
        return math.inf
    if delta >= rate:
        return 0.0
    whole = gaussian_epsilon(multiplier, delta / rate)
    # log(1 + q (e^ε - 1)), whose exponential may be no float
    return math.log1p(rate * math.expm1(whole)) if whole < 700 else whole + math.log(rate)


def gaussian_epsilon(multiplier: float, delta: float) -> float:
    """Eps of one Gaussian release without sampling, exact (Balle and Wang 2018); inf where nothing is private.

    Args:
        multiplier: standard deviation of the noise over the sensitivity; may be inf.
        delta: in (0, 1).
    """
    if multiplier < SMALLEST_MULTIPLIER:
        return math.inf
    from dp_accounting import get_epsilon_gaussian

    with np.errstate(divide="ignore", invalid="ignore"):  # on its way it takes logarithms of 0
        return float(get_epsilon_gaussian(multiplier, delta))


def _rdp(scheme: Scheme, orders: Sequence[float] | None = None) -> RdpAccountant | FixedSizeAccountant:
    if scheme == FIXED_SIZE:
        return FixedSizeAccountant(orders)
    from dp_accounting.rdp import RdpAccountant

    return RdpAccountant(orders)


def _composed(opened: Opened, plan: Plan) -> Opened:
    """An accountant with the releases of a plan added to its own."""
    if isinstance(opened, FixedSizeAccountant):
        return opened.compose(plan)
    return opened.compose(event(plan))


def _pld(interval: float) -> PLDAccountant:
    from dp_accounting.pld import PLDAccountant

    return PLDAccountant(value_discretization_interval=interval)


def _interval(plan: Plan, delta: float, eps_scale: float) -> float:
    """The interval on which privacy losses of this plan are rounded, see `epsilon`."""
    # Losses far beyond the eps expected would take minutes at its resolution; the bound may be infinite.
    beyond = min(quick_bound(plan, delta) / 10, max(1e6, 2 * least_epsilon(plan, delta)))
    if beyond <= eps_scale:
        return discretisation(eps_scale)
    # It may also be a hundred times what the plan spends, which takes a moment to find out where losses are large.
    spent = _spent(_pld(discretisation(beyond)), plan, delta, EXCESS)
    return discretisation(max(eps_scale, min(beyond, spent)))


def _spent(opened: Opened, plan: Plan, delta: float, excess: float) -> float:
    try:
        return float(_composed(opened, coarse(plan, delta, excess)).get_epsilon(delta))
    except OverflowError:  # an accountant's word for a loss beyond floating point
        return math.inf


def tightest(scheme: Scheme) -> str:
    """The accountant that gives the smallest valid eps."""
    return scheme.accountants[0]


def require_delta(delta: float, accountant: str) -> None:
    """Raise `UserError` unless delta is one, and one that the accountant's floating point can tell from none."""
    require(0 < delta < 1, "delta", delta, "a number between 0 and 1")
    told = f"at least {LEAST_DELTA:g} with the accountant pld, whose floating point knows no less; take rdp"
    require(accountant != "pld" or delta >= LEAST_DELTA, "delta", delta, told)


def require_account(plan: Plan, delta: float, accountant: str) -> None:
    """Raise unless an accountant gives a bound for the scheme of a plan, at such a delta; see `epsilon`."""
    require_delta(delta, accountant)
    if accountant not in plan.scheme.accountants:
        valid = " or ".join(plan.scheme.accountants)
        raise ValueError(f"{accountant} gives no bound for {plan.scheme.name} sampling; take {valid}")


def epsilon(plan: Plan, delta: float, accountant: str, *, eps_scale: float, excess: float = EXCESS) -> float:
    """An upper bound on eps of all releases in the plan, at delta, for the neighbours of its sampling scheme.

    Args:
        plan: releases with their final noise multipliers.
        delta: in (0, 1).
        accountant: "pld" (privacy loss distributions), "rdp" (Rényi) or "gdp" (Gaussian, exact).
        eps_scale: about the eps expected; sets how finely PLD rounds where the plan does not spend far more.
        excess: see `rounding`.

    Raises:
        UserError: delta is none.
        ValueError: the accountant gives no valid bound for the plan's scheme.
    """
    require_account(plan, delta, accountant)
    if len(plan) == 0:
        return 0.0
    if plan.smallest_multiplier < SMALLEST_MULTIPLIER:
        return math.inf
    if accountant == "gdp":
        return gaussian_epsilon(pass_multiplier(plan), delta)
    opened = _rdp(plan.scheme) if accountant == "rdp" else _pld(_interval(plan, delta, eps_scale))
    return _spent(opened, plan, delta, excess)


class NearbyOrders:
    """Eps by the Rényi orders around the best one: valid, and mostly what all orders give, in a fraction of their time.

    For plans that differ in a factor of their noise multipliers.
    """

    def __init__(self, delta: float) -> None:
        """Nothing known of the best order.

        Args:
            delta: in (0, 1).
        """
        self._delta = delta
        self._orders: Sequence[float] | None = None

    def epsilon(self, plan: Plan) -> float:
        """An upper bound on eps of a plan of independent batches."""
        if plan.smallest_multiplier < SMALLEST_MULTIPLIER:
            return math.inf
        grouped = coarse(plan, self._delta)
        while True:
            orders = self._orders or CLOSED_FORM_ORDERS
            try:
                composed = _composed(_rdp(plan.scheme, orders), grouped)
                eps, best = composed.get_epsilon_and_optimal_order(self._delta)
            except OverflowError:
                return math.inf
            around = _around(float(best), plan.scheme)
            if self._orders and (min(orders) < best < max(orders) or around == orders):
                return float(eps)
            self._orders = around


def _around(order: float, scheme: Scheme) -> Sequence[float]:
    """Those of all orders α whose α - 1 is at most twice as large, or half, and the next at both ends."""
    orders = list(_rdp(scheme).orders)
    near = [place for place, other in enumerate(orders) if 0.5 <= (other - 1) / (order - 1) <= 2]
    return orders[max(near[0] - 1, 0) : near[-1] + 2]


def renyi_curve(plan: Plan, delta: float) -> RenyiCurve:
    """Rényi divergence of all releases of a plan together, at all orders."""
    return _curve(plan, delta, None, EXCESS)


def quick_curve(plan: Plan, delta: float) -> RenyiCurve:
    """The same in milliseconds, looser and at fewer orders, to start a search from."""
    return _curve(plan, delta, CLOSED_FORM_ORDERS, ROUGH)


def _curve(plan: Plan, delta: float, orders: Sequence[float] | None, excess: float) -> RenyiCurve:
    if plan.smallest_multiplier < SMALLEST_MULTIPLIER:
        return RenyiCurve.of(lambda _: math.inf, CLOSED_FORM_ORDERS)
    composed = _composed(_rdp(plan.scheme, orders), coarse(plan, delta, excess))
    return RenyiCurve.of(dict(zip(composed.orders, composed.rdp, strict=True)).__getitem__, composed.orders)


class Account:
    """eps of a growing part of a plan, without starting over each time.

    Releases are grouped as in the whole plan, so that at its end the result is that of `epsilon`. On the way, a plan of
    many different releases may be charged a little more than `epsilon` charges its first part alone, never less than
    that part spends.
    """

    def __init__(self, plan: Plan, delta: float, accountant: str, *, eps_scale: float) -> None:
        require_account(plan, delta, accountant)
        self._plan = plan
        self._delta = delta
        self._name = accountant
        self._scale = eps_scale
        self._composes = not plan.scheme.passes and SMALLEST_MULTIPLIER <= plan.smallest_multiplier < math.inf
        if self._composes:
            self._grouped = rounding(plan, delta)
            self._made = 0

    @cached_property
    def _opened(self) -> Opened:
        """The library's accountant, whose import takes longer than a small run's first steps."""
        return _pld(self.interval) if self.interval is not None else _rdp(self._plan.scheme)

    @cached_property
    def interval(self) -> float | None:
        """The interval on which PLD rounds privacy losses; None for an accountant that rounds none."""
        if self._name != "pld":
            return None
        return _interval(self._plan, self._delta, self._scale) if self._composes else discretisation(self._scale)

    def epsilon(self, made: int) -> float:
        """Eps of the first `made` releases, at least as many as were asked for before."""
        if not self._composes or made == 0:
            return epsilon(self._plan.prefix(made), self._delta, self._name, eps_scale=self._scale)
        self.advance(made)
        return float(self._opened.get_epsilon(self._delta))

    def advance(self, made: int) -> None:
        """Take in the first `made` releases, as `epsilon` does.

        How a sum is rounded depends on its parts: an account that is to agree with another one bit for bit takes the
        same steps.
        """
        if not self._composes or made == self._made:
            return
        since: Counter[Release] = Counter()
        for release, times in self._plan.between(self._made, made).runs:
            since[self._grouped[release.joint]] += times
        new = Plan(tuple(Repeat(*item) for item in since.items()), self._plan.scheme)
        self._made = made
        _composed(self._opened, new)
