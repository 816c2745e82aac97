"""Privacy guarantees with a formula that the program has no use for: what papers state, and what it is compared with.

Scalars in, scalars out; log is the natural logarithm. The Gaussian mechanism is described by mu = sensitivity/standard
deviation, so mu = 1/z for noise multiplier z.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import scipy

from dpbench.privacy.closed_forms import gaussian_log_delta


class Guarantee(NamedTuple):
    """(eps, delta)-differential privacy."""

    eps: float
    delta: float


class ClassicalGaussian(NamedTuple):
    """What the classical bound says of a Gaussian mechanism; proved where eps < 1 alone."""

    eps: float
    valid: bool


def classical_eps(mu: float, delta: float) -> ClassicalGaussian:
    """The classical bound, mu sqrt(2 log(1.25/delta)) (Dwork and Roth 2014, Theorem A.1; ADP, Lemma 2.1)."""
    eps = mu * math.sqrt(2 * math.log(1.25 / delta))
    return ClassicalGaussian(eps, eps < 1)


def gaussian_eps(mu: float, delta: float) -> float:
    """Smallest eps >= 0 at which the Gaussian mechanism is (eps, delta)-private: inverse of `gaussian_delta` in eps.

    Exact up to rounding, about 11 digits; not rounded upwards.

    Args:
        mu: sensitivity over standard deviation, finite, >= 0.
        delta: in (0, 1).
    """
    target = math.log(delta)
    if gaussian_log_delta(0.0, mu) <= target:
        return 0.0
    # There x = sqrt(2 log(1/delta)), and delta is at most the tail beyond x, which is below exp(-x^2/2).
    enough = mu * (mu / 2 + math.sqrt(-2 * target))
    # Above 1e12, where x is lost to rounding, it differs from the root by less than that.
    if mu > 1e12:
        return enough
    return _root(lambda eps: gaussian_log_delta(eps, mu) - target, 0.0, enough)


def gaussian_mu(eps: float, delta: float) -> float:
    """Largest mu at which the Gaussian mechanism is (eps, delta)-private: inverse of `gaussian_delta` in mu.

    The noise multiplier that exactly reaches (eps, delta) in one release is 1/mu. Exact up to rounding, about 11
    digits.
    """
    if eps == 0:
        return 2 * math.sqrt(2) * float(scipy.special.erfinv(delta))
    target = math.log(delta)
    tail = math.sqrt(-2 * target)
    low = high = 2 * eps / (tail + math.sqrt(tail * tail + 2 * eps))  # the inequality in gaussian_eps, solved for mu
    while gaussian_log_delta(eps, high) < target:
        low, high = high, 2 * high
    return _root(lambda mu: gaussian_log_delta(eps, mu) - target, low, high)


def _root(excess: Callable[[float], float], low: float, high: float) -> float:
    """To the last digits, by the smallest relative tolerance that brentq takes."""
    return float(scipy.optimize.brentq(excess, low, high, xtol=1e-300, rtol=4 * 2.0**-52, maxiter=1000))


def composed_mu(multipliers: Iterable[float]) -> float:
    """Mu of several Gaussian mechanisms on the same data, sqrt(sum 1/z^2) (Dong, Roth and Su 2022, Corollary 3.3).

    Exact, also where each release may depend on those before it. Says nothing of subsampled releases.
    """
    return math.sqrt(math.fsum(1 / (z * z) for z in multipliers))


def subsampled(guarantee: Guarantee, sampling_rate: float) -> Guarantee:
    """Amplification by subsampling: (log(1 + q (exp(eps) - 1)), q delta) (Balle, Barthe and Gaboardi 2018).

    No smaller guarantee holds for every mechanism. Two settings are covered, in which the mechanism and the result
    are for the same neighbours: Poisson sampling with rate q, add or remove one sample; m of n samples without
    replacement, q = m/n, replace one sample.
    """
    return Guarantee(math.log1p(sampling_rate * math.expm1(guarantee.eps)), sampling_rate * guarantee.delta)


def composed_heterogeneously(guarantees: Sequence[Guarantee], slack: float) -> Guarantee:
    """Advanced composition of unequal guarantees (ADP, Lemma 2.2/B.1).

    eps   = sqrt(2 log(1/slack) sum eps_i^2) + sum eps_i (exp(eps_i) - 1)/(exp(eps_i) + 1)
    delta = 1 - prod (1 - delta_i) + slack

    ADP asks for eps_i, delta_i in (0, 1); the theorem it follows from (Kairouz, Oh and Viswanath 2015, Theorem 3.5)
    holds for every eps_i >= 0 and delta_i in [0, 1). Plain addition of the eps_i can be smaller, for few or large
    ones. The slack in (0, 1) is the paper's delta'.
    """
    spread = math.sqrt(-2 * math.log(slack) * math.fsum(g.eps**2 for g in guarantees))
    drift = math.fsum(g.eps * math.tanh(g.eps / 2) for g in guarantees)
    failure = -math.expm1(math.fsum(math.log1p(-g.delta) for g in guarantees)) + slack
    return Guarantee(spread + drift, min(failure, 1.0))
