"""What it costs to choose hyper-parameters on private data: many trainings, of which only the best is published.

| scheme                                         | trainings                  | published          |
|------------------------------------------------|----------------------------|--------------------|
| `RandomStopping` (Liu and Talwar 2019)         | random number, with a cap  | the best           |
| `TruncatedNegativeBinomial` (Papernot and      | random number, no cap      | the best           |
| Steinke 2022)                                  |                            |                    |
| `PoissonRuns` (same)                           | random number, may be 0    | the best, if any   |

In the random schemes each training draws its candidate at random, anew and independently, and the number of trainings
is drawn before and independently of them; a grid that is gone through once is *not* covered. Scores must be part of
the private run: computed from what it published and public data, or paid for in its guarantee. Every guarantee is for
the neighbours of the single run's. With nothing to tune, none of this is needed.

A single training enters by its (eps, delta) (`RandomStopping`) or by its Rényi curve (all others), which has to bound
that of every candidate; those of candidates that make other releases cross, though all spend the same eps. To find the
noise multiplier for a total budget:

* `RandomStopping`: calibrate one training to `per_run(eps, delta)`, by any accountant.
* the others: solve ``scheme.eps(curve(multiplier), delta) = eps`` for the multiplier; it falls as that grows.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Self

import numpy as np
from typing_extensions import override

from dpbench.errors import UserError, require


@dataclass(frozen=True)
class RenyiCurve:
    """Rényi divergence of a mechanism, an upper bound for both directions of each pair of neighbours.

    Attributes:
        orders: each >= 1, strictly increasing. Order 1 is the Kullback-Leibler divergence.
        values: at those orders, each >= 0; inf where nothing is known.
    """

    orders: tuple[float, ...]
    values: tuple[float, ...]

    def __post_init__(self) -> None:
        require(len(self.orders) > 0, "orders", "()", "at least one order")
        require(len(self.values) == len(self.orders), "values", len(self.values), "one for each of the orders")
        require(self.orders[0] >= 1, "orders", self.orders[0], "orders >= 1")
        pairs = zip(self.orders, self.orders[1:], strict=False)
        require(all(a < b for a, b in pairs), "orders", "unsorted", "strictly increasing orders")
        for value in self.values:
            require(value >= 0, "values", value, "divergences >= 0")

    @classmethod
    def of(cls, divergence: Callable[[float], float], orders: Iterable[float]) -> Self:
        """The curve order -> divergence(order), at those orders; what is not a number becomes inf.

        What rounding leaves below 0 becomes 0.
        """
        chosen = tuple(sorted(set(orders)))
        values = (float(divergence(order)) for order in chosen)
        return cls(chosen, tuple(math.inf if math.isnan(value) else max(value, 0.0) for value in values))

    def times(self, runs: float) -> RenyiCurve:
        """The curve of `runs` mechanisms, each chosen in view of the results before it."""
        return RenyiCurve(self.orders, tuple(runs * value for value in self.values))

    def eps(self, delta: float) -> float:
        """Eps at delta, by the best order.

        The conversion is min over a of R(a) + log(1 - 1/a) - log(a delta)/(a - 1) (Canonne, Kamath and Steinke 2020).
        """
        require(0 < delta < 1, "delta", delta, "a number in (0, 1)")
        from dp_accounting.rdp import rdp_privacy_accountant as rdp  # takes a second

        return float(rdp.compute_epsilon(self.orders, self.values, delta)[0])

    def delta(self, eps: float) -> float:
        """Delta at eps >= 0, by the same conversion."""
        require(eps >= 0, "eps", eps, "a number >= 0")
        from dp_accounting.rdp import rdp_privacy_accountant as rdp  # as above

        return float(rdp.compute_delta(self.orders, self.values, eps)[0])


@dataclass(frozen=True)
class RandomStopping:
    """Train random candidates; after each, stop with probability gamma; publish the best (Liu and Talwar 2019).

    Where a training is (eps_1, delta_1)-private and T = log(1/delta_2)/gamma trainings are the cap, the search is
    (eps', delta')-private (dc_sgd, Table II):

        eps'   = 3 eps_1 + 3 sqrt(2 delta_1)
        delta' = 3 sqrt(2 delta_1) T + delta_2

    T is rounded up to a whole number, here and in the search.

    Attributes:
        gamma: probability of stopping after a training, in (0, 1).
        cap_delta: delta_2 in (0, 1), what the cap costs; the paper's 1e-20 by default.
    """

    gamma: float
    cap_delta: float = 1e-20

    def __post_init__(self) -> None:
        require(0 < self.gamma < 1, "tuning.gamma", self.gamma, "a number in (0, 1)")
        require(0 < self.cap_delta < 1, "tuning.cap_delta", self.cap_delta, "a number in (0, 1)")

    @classmethod
    def over(cls, candidates: int) -> Self:
        """As in the paper: gamma = 1/(2 G), so that about 2 G trainings of G candidates are expected."""
        require(candidates >= 1, "tuning.candidates", candidates, "an integer >= 1")
        return cls(1 / (2 * candidates))

    @property
    def most_runs(self) -> int:
        """T, the cap."""
        return math.ceil(math.log(1 / self.cap_delta) / self.gamma)

    @property
    def expected_runs(self) -> float:
        """Mean number of trainings, 1/gamma less what the cap cuts off."""
        return -math.expm1(self.most_runs * math.log1p(-self.gamma)) / self.gamma

    def per_run(self, eps: float, delta: float) -> tuple[float, float]:
        """The largest (eps_1, delta_1) of one training with which the search is (eps, delta)-private.

        Raises:
            UserError: delta is at most `cap_delta`, or eps is used up by delta.
        """
        require(self.cap_delta < delta < 1, "delta", delta, f"a number in ({self.cap_delta:g}, 1)")
        root = (delta - self.cap_delta) / self.most_runs
        if eps <= root:
            raise UserError(
                f"expected more than {root:g}, which tuning at this delta costs alone", field="eps", value=eps
            )
        return (eps - root) / 3, (root / 3) ** 2 / 2


@dataclass(frozen=True)
class RandomRuns(ABC):
    """A random number of trainings, drawn before and independently of them; the best is published.

    Attributes:
        mean: expected number of trainings.
    """

    mean: float

    def curve(self, single: RenyiCurve) -> RenyiCurve:
        """Rényi curve of the search, from that of one training; an order of 1 is left out."""
        known = [(a, value) for a, value in zip(single.orders, single.values, strict=True) if a > 1]
        return RenyiCurve(tuple(a for a, _ in known), tuple(self._at(a, value, single) for a, value in known))

    @abstractmethod
    def _at(self, order: float, value: float, single: RenyiCurve) -> float:
        """Divergence of the search at an order > 1, where one training has `value`."""

    def eps(self, single: RenyiCurve, delta: float) -> float:
        """Eps of the search at delta, from the Rényi curve of one training."""
        return self.curve(single).eps(delta)


@dataclass(frozen=True)
class TruncatedNegativeBinomial(RandomRuns):
    """A number K >= 1 of trainings from the truncated negative binomial distribution; the best is published.

    Where one training has Rényi divergence R, the search has, for every order a > 1 (Papernot and Steinke 2022,
    Theorem 2),

        R(a) + (1 + eta) min_b [(1 - 1/b) R(b) + log(1/gamma)/b] + log(E K)/(a - 1)

    with the minimum over all orders b >= 1, for P(K = k) proportional to (1 - gamma)^k times the product of
    (l + eta)/(l + 1) over l = 0..k-1 (in the limit eta = 0, to (1 - gamma)^k / k).

    Attributes:
        mean: E K > 1; determines gamma.
        shape: eta > -1. 1 is the geometric distribution; 0 the logarithmic one, with a heavier tail and a smaller
            cost; towards -1 the tail gets ever heavier and the cost ever smaller.
    """

    shape: float = 1.0

    def __post_init__(self) -> None:
        require(self.mean > 1, "tuning.mean", self.mean, "a number > 1")
        require(self.shape > -1, "tuning.shape", self.shape, "a number > -1")

    @cached_property
    def gamma(self) -> float:
        """The distribution's parameter in (0, 1)."""
        return math.exp(-self._log_inverse_gamma)

    @cached_property
    def _log_inverse_gamma(self) -> float:
        from scipy.optimize import brentq  # takes half a second

        target = math.log(self.mean)
        high = 1.0
        while _log_mean(high, self.shape) < target:
            high *= 2
        return float(brentq(lambda t: _log_mean(t, self.shape) - target, 0.0, high, xtol=1e-300, rtol=1e-14))

    @override
    def _at(self, order: float, value: float, single: RenyiCurve) -> float:
        t = self._log_inverse_gamma
        pairs = zip(single.orders, single.values, strict=True)
        # The first entry is b -> 1, where the divergence does not enter.
        best = min([t, *((1 - 1 / b) * other + t / b for b, other in pairs if b > 1)])
        return value + (1 + self.shape) * best + math.log(self.mean) / (order - 1)


def _log_mean(t: float, shape: float) -> float:
    """Log of eta (1 - gamma)/(gamma (1 - gamma^eta)), its limit where that is 0/0, at t = log(1/gamma)."""
    if t == 0:
        return 0.0
    log_odds = t + math.log(-math.expm1(-t))  # of (1 - gamma)/gamma
    if abs(shape * t) < 1e-12:
        return log_odds - math.log(t)
    # 1 - gamma^eta has the sign of eta, and may overflow where that is negative.
    size = abs(shape) * t
    log_rest = math.log(-math.expm1(-size)) + (size if shape < 0 else 0.0)
    return log_odds + math.log(abs(shape)) - log_rest


@dataclass(frozen=True)
class PoissonRuns(RandomRuns):
    """A number K >= 0 of trainings from the Poisson distribution; the best is published, or that there was none.

    Where one training has Rényi divergence R and is (e, d)-private with e = log(1 + 1/(a - 1)), the search has

        log(exp(-m) + m exp((a - 1) (R(a) + m d))) / (a - 1),    m = E K

    at order a > 1. This is Papernot and Steinke 2022, Theorem 6, R(a) + m d + log(m)/(a - 1), plus the event K = 0,
    which the outcome of the search shows; the difference vanishes as m grows, and the bound holds for m < 1 too.

    Attributes:
        mean: m > 0. No training is made with probability exp(-m).
    """

    def __post_init__(self) -> None:
        require(0 < self.mean < math.inf, "tuning.mean", self.mean, "a finite number > 0")

    @override
    def _at(self, order: float, value: float, single: RenyiCurve) -> float:
        spare = self.mean * single.delta(math.log1p(1 / (order - 1)))
        some = math.log(self.mean) + (order - 1) * (value + spare)
        return max(float(np.logaddexp(-self.mean, some)) / (order - 1), 0.0)
