"""From counts of an attack's guesses to lower bounds on privacy parameters, each at a stated confidence."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq
from scipy.special import betaincinv, ndtr, ndtri
from scipy.stats import binom

from dpbench.privacy import Plan, Release
from dpbench.privacy.accountants import gaussian_epsilon, least_epsilon

# No audit of a few thousand guesses shows more than this.
LARGEST_EPS = 100.0


def rate_at_most(errors: int, trials: int, risk: float) -> float:
    """Upper end of the one-sided interval of Clopper and Pearson (1934) for a probability.

    Args:
        errors: how often it happened.
        trials: in so many independent trials, > 0.
        risk: probability with which the truth may lie above.
    """
    return 1.0 if errors == trials else float(betaincinv(errors + 1, trials - errors, 1 - risk))


def mu_at_least(
    false_positives: int, outside: int, misses: int, inside: int, risk: float, *, sampling_rate: float = 1.0
) -> float:
    """Lower bound on mu of a release: a Gaussian whose mean one sample moves by mu standard deviations, if sampled.

    A test with false positive rate a finds a sample that takes part with probability at most Phi(Phi^-1(a) + mu)
    (Dong, Roth & Su 2022, sec. 2.3), and one that takes part with probability q, with at most
    (1 - q) a + q Phi(Phi^-1(a) + mu) (ibid., Prop. 4.2). Both error rates are replaced by upper bounds, each with half
    the risk.

    Args:
        false_positives: of the runs without the canary, in how many it was said to be there.
        outside: number of runs without.
        misses: of the runs with it, in how many it was said not to be there.
        inside: number of runs with.
        risk: probability with which the bound may exceed the truth.
        sampling_rate: q.

    Returns:
        Inf where no mu explains that it was found so often, 0 where any does.
    """
    fpr = rate_at_most(false_positives, outside, risk / 2)
    found = 1 - rate_at_most(misses, inside, risk / 2)
    if found <= fpr:
        return 0.0
    taking_part = (found - (1 - sampling_rate) * fpr) / sampling_rate
    return float(ndtri(taking_part) - ndtri(fpr)) if taking_part < 1 else math.inf


def eps_of(mu: float, delta: float, *, sampling_rate: float = 1.0) -> float:
    """The eps at delta of a release of this mu, in closed form: an accountant's would be no bound from below.

    Args:
        mu: of the release; 0 or inf of none and of any.
        delta: of the guarantee.
        sampling_rate: q, at which the sample takes part.
    """
    if mu == 0 or math.isinf(mu):
        return mu
    if sampling_rate == 1:
        return gaussian_epsilon(1 / mu, delta)
    return least_epsilon(Plan.of([Release(sampling_rate, 1 / mu)]), delta)


def noticeable_factor(mu: float, claimed: float, runs: int, risk: float) -> float:
    """Factor by which the noise of what is seen may be too small and be noticed by half of all audits; at q = 1.

    Args:
        mu: of what is seen, were its noise as it should be.
        claimed: mu that a bound has to exceed: larger where something is released that is not seen.
        runs: with the canary, and as many without.
        risk: of the bound.

    Returns:
        Inf where no such factor is below 100.
    """

    def excess(log_factor: float) -> float:
        errors = round(runs * float(ndtr(-math.exp(log_factor) * mu / 2)))
        return mu_at_least(errors, runs, errors, runs, risk) - claimed

    highest = math.log(100)
    return math.exp(float(brentq(excess, 0.0, highest, xtol=1e-3))) if excess(highest) > 0 else math.inf


def one_run_p_value(right: int, guesses: int, canaries: int, eps: float, delta: float) -> float:
    """Probability, at most, of `right` guesses that are right in one run of a mechanism that is (eps, delta)-private.

    Steinke, Nasr & Jagielski (2023), Theorem 5.2. Under pure eps a coin is guessed right with probability at most
    p = e^eps/(1 + e^eps), whatever was learnt of the others, so the number W of right guesses is at most binomial;
    delta adds F right guesses with E[F] <= 2 m delta. Hence, with f(v) = P[W >= v] and any law of F,

        P[W + F >= v] <= f(v) + 2 m delta max_{i >= 1} (f(v - i) - f(v)) / i.

    Args:
        right: number of right guesses v.
        guesses: number of guesses r; the other canaries are abstained from.
        canaries: number m of canaries, each included by a fair coin of its own.
        eps: of the hypothesis, for adding or removing one canary.
        delta: of the hypothesis.
    """
    if right == 0:
        return 1.0
    p = 1 / (1 + math.exp(-eps))
    at_least: NDArray[np.float64] = binom.sf(np.arange(right + 1) - 1, guesses, p)
    gains = (at_least[right - 1 :: -1] - at_least[right]) / np.arange(1, right + 1)
    return float(min(1.0, at_least[right] + 2 * canaries * delta * gains.max()))


def one_run_eps_at_least(right: int, guesses: int, canaries: int, delta: float, risk: float) -> float:
    """Largest eps that `right` guesses that are right rule out in one run; 0 where they rule out none.

    Args:
        right: number of right guesses.
        guesses: number of guesses.
        canaries: number of canaries.
        delta: at which eps is bounded.
        risk: probability with which the bound may exceed the truth.
    """
    low, high = 0.0, LARGEST_EPS
    if one_run_p_value(right, guesses, canaries, low, delta) > risk:
        return 0.0
    while high - low > 1e-6:
        middle = (low + high) / 2
        if one_run_p_value(right, guesses, canaries, middle, delta) <= risk:
            low = middle
        else:
            high = middle
    return low
