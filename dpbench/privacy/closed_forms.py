"""Privacy guarantees with a formula: the Gaussian mechanism, and what many sampled ones approach.

Scalars in, scalars out, nothing sampled and nothing of training imported; log is the natural logarithm.

The Gaussian mechanism is described by mu = sensitivity / standard deviation, so mu = 1/z for noise multiplier z; the
guarantee is for whatever neighbours the sensitivity is taken over.

| function             | kind of statement                          |
|----------------------|--------------------------------------------|
| `gaussian_delta`     | exact                                      |
| `approximate_clt_mu` | approximation: the true loss can be larger |
"""

from __future__ import annotations

import math

import scipy

from dpbench.errors import require

_LOG_SQRT_2_PI = 0.5 * math.log(2 * math.pi)
_SQRT_HALF_PI = math.sqrt(math.pi / 2)


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


def approximate_clt_mu(sampling_rate: float, noise_multiplier: float, steps: int) -> float:
    """Mu that many Poisson-sampled Gaussian releases *approach*: q sqrt(T (exp(1/z^2) - 1)) (Bu et al. 2020).

    An approximation by the central limit theorem for T large with q sqrt(T) fixed, not a bound: the true eps is often
    larger, so never calibrate with it.

    Args:
        sampling_rate: q in (0, 1].
        noise_multiplier: z > 0.
        steps: T >= 0.
    """
    require(0 < sampling_rate <= 1, "sampling_rate", sampling_rate, "a number in (0, 1]")
    require(noise_multiplier > 0, "noise_multiplier", noise_multiplier, "a number > 0")
    require(steps >= 0, "steps", steps, "an integer >= 0")
    return sampling_rate * math.sqrt(steps * math.expm1(noise_multiplier**-2))
