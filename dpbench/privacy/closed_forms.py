"""Privacy guarantees with a formula: the Gaussian mechanism, subsampling and composition.

Scalars in, scalars out, nothing sampled and nothing of training imported; log is the natural logarithm.

The Gaussian mechanism is described by mu = sensitivity / standard deviation, so mu = 1/z for noise multiplier z; the
guarantee is for whatever neighbours the sensitivity is taken over.

| function                       | kind of statement                                             |
|--------------------------------|---------------------------------------------------------------|
| `classical_eps`                | bound, proved only where the eps it gives is below 1          |
| `gaussian_delta`, `_eps`, `_mu`| exact                                                         |
| `composed_mu`                  | exact                                                         |
| `approximate_clt_mu`           | approximation: the true loss can be larger                    |
| `subsampled_as_stated`         | bound, looser than `subsampled`                               |
| `subsampled`                   | bound, the best one that holds for every mechanism            |
| `composed_heterogeneously`     | bound, adaptive composition                                   |
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import scipy

from dpbench.errors import require

_LOG_SQRT_2_PI = 0.5 * math.log(2 * math.pi)
_SQRT_HALF_PI = math.sqrt(math.pi / 2)
# Smallest relative tolerance that brentq takes: the roots below are found to the last digits.
_RTOL = 4 * 2.0**-52


@dataclass(frozen=True)
class Guarantee:
    """(eps, delta)-differential privacy.

    Attributes:
        eps: >= 0.
        delta: in [0, 1].
    """

    eps: float
    delta: float


@dataclass(frozen=True)
class ClassicalGaussian:
    """What the classical bound says of a Gaussian mechanism.

    Attributes:
        eps: sensitivity sqrt(2 log(1.25/delta)) / standard deviation.
        valid: whether the bound is proved there, that is eps < 1. Beyond, use `gaussian_eps`.
    """

    eps: float
    valid: bool


def classical_eps(mu: float, delta: float) -> ClassicalGaussian:
    """Eps of the Gaussian mechanism by the classical bound (Dwork and Roth 2014, Theorem A.1; ADP, Lemma 2.1).

    Args:
        mu: sensitivity over standard deviation, > 0.
        delta: in (0, 1).
    """
    require(mu > 0, "mu", mu, "a number > 0")
    _require_delta(delta)
    eps = mu * math.sqrt(2 * math.log(1.25 / delta))
    return ClassicalGaussian(eps, eps < 1)


def _mills(x: float) -> float:
    """Mills' ratio of the normal distribution, upper tail over density; does not underflow."""
    return _SQRT_HALF_PI * float(scipy.special.erfcx(x / math.sqrt(2)))


def gaussian_log_delta(eps: float, mu: float) -> float:
    """Log of the smallest delta at which the Gaussian mechanism is (eps, delta)-private; see `gaussian_delta`.

    With x = eps/mu - mu/2 and y = x + mu, exp(eps) times the density at y is the density at x. So both terms share
    that factor, no exponential of eps appears, and the result is finite where delta itself underflows.
    """
    require(eps >= 0, "eps", eps, "a number >= 0")
    require(mu >= 0, "mu", mu, "a number >= 0")
    if mu == 0 or math.isinf(eps):
        return -math.inf
    if math.isinf(mu):
        return 0.0
    if eps == 0:  # the difference below would cancel for small mu
        return math.log(math.erf(mu / math.sqrt(8)))
    x = eps / mu - mu / 2
    y = eps / mu + mu / 2
    log_density = -x * x / 2 - _LOG_SQRT_2_PI
    if x < -1:  # 1 - delta is a sum of two positive terms, and Mills' ratio of x may overflow
        return math.log1p(-math.exp(log_density) * (_mills(-x) + _mills(y)))
    difference = _mills(x) - _mills(y)
    return log_density + math.log(difference) if difference > 0 else -math.inf


def gaussian_delta(eps: float, mu: float) -> float:
    """Smallest delta at which the Gaussian mechanism is (eps, delta)-private, exact (Balle and Wang 2018, Theorem 8).

    Phi(mu/2 - eps/mu) - exp(eps) Phi(-mu/2 - eps/mu). For eps from 0.001 to 1000 and delta from 1e-30, the relative
    error is about 1e-11 or less; it grows as about 1e-16 eps/mu^2 where eps and mu are both tiny.

    Args:
        eps: >= 0.
        mu: sensitivity over standard deviation, >= 0.
    """
    return math.exp(gaussian_log_delta(eps, mu))


def gaussian_eps(mu: float, delta: float) -> float:
    """Smallest eps >= 0 at which the Gaussian mechanism is (eps, delta)-private: inverse of `gaussian_delta` in eps.

    Exact up to rounding, about 11 digits; not rounded upwards.

    Args:
        mu: sensitivity over standard deviation, finite, >= 0.
        delta: in (0, 1).
    """
    require(0 <= mu < math.inf, "mu", mu, "a finite number >= 0")
    _require_delta(delta)
    target = math.log(delta)
    if gaussian_log_delta(0.0, mu) <= target:
        return 0.0
    # There x = sqrt(2 log(1/delta)), and delta is at most the tail beyond x, which is below exp(-x^2/2).
    enough = mu * (mu / 2 + math.sqrt(-2 * target))
    return _root(lambda eps: gaussian_log_delta(eps, mu) - target, 0.0, enough)


def gaussian_mu(eps: float, delta: float) -> float:
    """Largest mu at which the Gaussian mechanism is (eps, delta)-private: inverse of `gaussian_delta` in mu.

    The noise multiplier that exactly reaches (eps, delta) in one release is 1/mu. Exact up to rounding, about 11
    digits; not rounded downwards.

    Args:
        eps: finite, >= 0.
        delta: in (0, 1).
    """
    require(0 <= eps < math.inf, "eps", eps, "a finite number >= 0")
    _require_delta(delta)
    if eps == 0:
        return 2 * math.sqrt(2) * float(scipy.special.erfinv(delta))
    target = math.log(delta)
    tail = math.sqrt(-2 * target)
    low = high = 2 * eps / (tail + math.sqrt(tail * tail + 2 * eps))  # the inequality in gaussian_eps, solved for mu
    while gaussian_log_delta(eps, high) < target:
        low, high = high, 2 * high
    return _root(lambda mu: gaussian_log_delta(eps, mu) - target, low, high)


def composed_mu(multipliers: Iterable[float]) -> float:
    """Mu of several Gaussian mechanisms on the same data, sqrt(sum 1/z^2) (Dong, Roth and Su 2022, Corollary 3.3).

    Exact, also where each release may depend on those before it. Says nothing of subsampled releases.

    Args:
        multipliers: noise multiplier z > 0 of each release; inf for one that costs nothing.
    """
    total = []
    for z in multipliers:
        require(z > 0, "noise_multiplier", z, "a number > 0")
        total.append(1 / (z * z))
    return math.sqrt(math.fsum(total))


def approximate_clt_mu(sampling_rate: float, noise_multiplier: float, steps: int) -> float:
    """Mu that many Poisson-sampled Gaussian releases *approach*: q sqrt(T (exp(1/z^2) - 1)) (Bu et al. 2020).

    An approximation by the central limit theorem for T large with q sqrt(T) fixed, not a bound: the true eps is often
    larger, so never calibrate with it.

    Args:
        sampling_rate: q in (0, 1].
        noise_multiplier: z > 0.
        steps: T >= 0.
    """
    _require_rate(sampling_rate)
    require(noise_multiplier > 0, "noise_multiplier", noise_multiplier, "a number > 0")
    require(steps >= 0, "steps", steps, "an integer >= 0")
    return sampling_rate * math.sqrt(steps * math.expm1(noise_multiplier**-2))


def subsampled_as_stated(guarantee: Guarantee, sampling_rate: float) -> Guarantee:
    """Amplification by subsampling as ADP states it (Lemma A.1): ((exp(eps) - 1) q, q delta).

    True but loose, since log(1 + x) <= x: for q = 1 it is worse than no sampling. `subsampled` is the sharp form.
    ADP's proofs go on to 2 eps q, which holds for eps up to 1.2564.
    """
    _require_rate(sampling_rate)
    return Guarantee(math.expm1(guarantee.eps) * sampling_rate, sampling_rate * guarantee.delta)


def subsampled(guarantee: Guarantee, sampling_rate: float) -> Guarantee:
    """Amplification by subsampling: (log(1 + q (exp(eps) - 1)), q delta) (Balle, Barthe and Gaboardi 2018).

    No smaller guarantee holds for every mechanism. Two settings are covered, in which the mechanism and the result
    are for the same neighbours: Poisson sampling with rate q, add or remove one sample; m of n samples without
    replacement, q = m/n, replace one sample.

    Args:
        guarantee: of the mechanism on the samples drawn.
        sampling_rate: q in (0, 1].
    """
    _require_rate(sampling_rate)
    return Guarantee(math.log1p(sampling_rate * math.expm1(guarantee.eps)), sampling_rate * guarantee.delta)


def composed_heterogeneously(guarantees: Sequence[Guarantee], slack: float) -> Guarantee:
    """Advanced composition of unequal guarantees (ADP, Lemma 2.2/B.1).

    eps   = sqrt(2 log(1/slack) sum eps_i^2) + sum eps_i (exp(eps_i) - 1)/(exp(eps_i) + 1)
    delta = 1 - prod (1 - delta_i) + slack

    ADP asks for eps_i, delta_i in (0, 1); the theorem it follows from (Kairouz, Oh and Viswanath 2015, Theorem 3.5)
    holds for every eps_i >= 0 and delta_i in [0, 1). Plain addition of the eps_i can be smaller, for few or large
    ones.

    Args:
        guarantees: of each mechanism.
        slack: the paper's delta', in (0, 1).
    """
    require(0 < slack < 1, "slack", slack, "a number in (0, 1)")
    for guarantee in guarantees:
        require(guarantee.eps >= 0, "eps", guarantee.eps, "a number >= 0")
        require(0 <= guarantee.delta < 1, "delta", guarantee.delta, "a number in [0, 1)")
    spread = math.sqrt(-2 * math.log(slack) * math.fsum(g.eps**2 for g in guarantees))
    drift = math.fsum(g.eps * math.tanh(g.eps / 2) for g in guarantees)
    failure = -math.expm1(math.fsum(math.log1p(-g.delta) for g in guarantees)) + slack
    return Guarantee(spread + drift, min(failure, 1.0))


def _root(excess: Callable[[float], float], low: float, high: float) -> float:
    return float(scipy.optimize.brentq(excess, low, high, xtol=1e-300, rtol=_RTOL, maxiter=1000))


def _require_delta(delta: float) -> None:
    require(0 < delta < 1, "delta", delta, "a number in (0, 1)")


def _require_rate(rate: float) -> None:
    require(0 < rate <= 1, "sampling_rate", rate, "a number in (0, 1]")
