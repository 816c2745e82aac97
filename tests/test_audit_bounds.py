"""The bounds of the audit, against references.

All seeds are fixed. Unless stated otherwise a lower bound may exceed the truth with probability 5 %, at seeds chosen
anew.
"""

import math

import numpy as np
import pytest
import torch
from closed_form_references import gaussian_eps
from scipy import stats
from scipy.optimize import linprog

from dpbench.audit.bounds import (
    eps_of,
    mu_at_least,
    noticeable_factor,
    one_run_eps_at_least,
    one_run_p_value,
    rate_at_most,
)
from dpbench.audit.one_run import right_guesses


@pytest.mark.parametrize(("errors", "trials"), [(0, 10), (3, 50), (49, 50), (50, 50)])
def test_rate_is_the_upper_end_of_the_exact_interval(errors, trials):
    exact = stats.binomtest(errors, trials, alternative="less").proportion_ci(0.99, method="exact")
    assert rate_at_most(errors, trials, 0.01) == pytest.approx(exact.high)


@pytest.mark.parametrize(("mu", "rate"), [(0.5, 1.0), (2.0, 1.0), (2.0, 0.2)])
def test_mu_is_covered_as_often_as_stated_and_reached_in_the_limit(mu, rate):
    rng = np.random.default_rng(0)
    threshold = mu if rate < 1 else mu / 2
    fpr = stats.norm.sf(threshold)
    fnr = 1 - (1 - rate) * fpr - rate * stats.norm.sf(threshold - mu)
    runs, risk, audits = 300, 0.2, 4000
    false, missed = rng.binomial(runs, fpr, audits), rng.binomial(runs, fnr, audits)
    pairs = zip(false.tolist(), missed.tolist(), strict=True)
    exceeded = sum(mu_at_least(f, runs, m, runs, risk, sampling_rate=rate) > mu for f, m in pairs)
    assert exceeded <= stats.binom.ppf(1 - 1e-6, audits, risk)
    many = 10**8
    limit = mu_at_least(round(fpr * many), many, round(fnr * many), many, risk, sampling_rate=rate)
    assert mu * 0.998 < limit < mu


@pytest.mark.parametrize("rate", [1.0, 0.3])
@pytest.mark.parametrize(("false", "missed"), [(3, 40), (0, 5)])
def test_mu_is_that_of_both_error_rates_at_the_ends_of_their_intervals(false, missed, rate):
    """Each of which has half of the risk."""
    runs, risk = 200, 0.05
    ends = [
        stats.binomtest(errors, runs, alternative="less").proportion_ci(1 - risk / 2, method="exact").high
        for errors in (false, missed)
    ]
    taking_part = (1 - ends[1] - (1 - rate) * ends[0]) / rate
    want = stats.norm.ppf(taking_part) - stats.norm.ppf(ends[0]) if taking_part < 1 else math.inf
    assert mu_at_least(false, runs, missed, runs, risk, sampling_rate=rate) == pytest.approx(want)


def test_no_mu_explains_that_a_sampled_canary_is_found_more_often_than_it_is_sampled():
    assert mu_at_least(0, 2000, 1000, 2000, 0.05, sampling_rate=0.3) == math.inf
    assert mu_at_least(500, 1000, 500, 1000, 0.05) == 0.0


@pytest.mark.parametrize(("mu", "rate", "delta"), [(2.0, 0.05, 1e-4), (0.8, 0.0445, 3.3e-4), (1.5, 1.0, 1e-5)])
def test_eps_of_a_release_is_where_its_divergence_is_delta(mu, rate, delta):
    """Not above it, as an accountant's eps is, which would make too much of what an attack showed."""
    found = eps_of(mu, delta, sampling_rate=rate)

    def excess(x):
        return np.maximum((1 - rate) * stats.norm.pdf(x) + rate * stats.norm.pdf(x - mu) - others(x), 0)

    def others(x):
        return math.exp(found) * stats.norm.pdf(x)

    x = np.linspace(-12, 12 + mu, 2_000_001)
    assert np.trapezoid(excess(x), x) == pytest.approx(delta, rel=1e-5)


def test_eps_of_nothing_and_of_anything():
    assert eps_of(0.0, 1e-5, sampling_rate=0.1) == 0.0
    assert eps_of(math.inf, 1e-5, sampling_rate=0.1) == math.inf
    assert eps_of(1.0, 0.2, sampling_rate=0.1) == 0.0


@pytest.mark.parametrize("seen", [2.0, 1.5])
def test_noticeable_factor_is_that_at_which_the_bound_reaches_the_claim(seen):
    factor = noticeable_factor(seen, 2.0, 1000, 0.01)
    rng = np.random.default_rng(1)
    error = stats.norm.sf(factor * seen / 2)
    draws = rng.binomial(1000, error, (2000, 2)).tolist()
    caught = sum(mu_at_least(f, 1000, m, 1000, 0.01) > 2.0 for f, m in draws)
    assert 0.4 < caught / 2000 < 0.6
    assert noticeable_factor(0.01, 0.01, 10, 0.01) == math.inf


def test_p_value_of_pure_eps_is_the_exact_test_of_a_biased_coin():
    q = math.e / (1 + math.e)
    for right in (0, 5, 80, 100):
        exact = stats.binomtest(right, 100, q, alternative="greater").pvalue
        assert one_run_p_value(right, 100, 500, 1.0, 0.0) == pytest.approx(exact)


@pytest.mark.parametrize(("right", "guesses", "eps", "failures"), [(95, 100, 1.0, 1.3), (45, 50, 2.0, 0.2)])
def test_p_value_is_the_worst_law_of_the_right_guesses_that_delta_adds(right, guesses, eps, failures):
    """The worst case over all laws of F with E[F] <= 2 m delta as a linear programme."""
    canaries = 1000
    added = np.arange(guesses + 1)
    gain = stats.binom.sf(right - added - 1, guesses, 1 / (1 + math.exp(-eps)))
    worst = linprog(-gain, A_ub=[added], b_ub=[failures], A_eq=[np.ones_like(added)], b_eq=[1])
    p = one_run_p_value(right, guesses, canaries, eps, failures / (2 * canaries))
    assert -worst.fun <= p + 1e-9
    assert p == pytest.approx(-worst.fun, rel=0.05)


def eps_shown(scores, included, delta, guesses):
    right = right_guesses(torch.from_numpy(scores), torch.from_numpy(included), guesses)
    return one_run_eps_at_least(right, guesses, len(scores), delta, 0.05)


@pytest.mark.parametrize("leak", [0.0, 1e-3])
def test_one_run_covers_eps_of_randomised_response(leak):
    """The coin is told truly with probability e^eps/(1 + e^eps), and published with probability `leak`."""
    rng = np.random.default_rng(2)
    eps, canaries, guesses = 1.5, 2000, 1000
    shown = []
    for _ in range(200):
        included = rng.random(canaries) < 0.5
        told = np.where(rng.random(canaries) < 1 / (1 + math.exp(-eps)), included, ~included)
        scores = np.where(told, 1.0, -1.0) + 0.1 * rng.random(canaries)
        published = rng.random(canaries) < leak
        shown.append(eps_shown(np.where(published, np.where(included, 9.0, -9.0), scores), included, leak, guesses))
    # At most 5 % exceed; 24 of 200 have probability below 1e-4 then.
    assert sum(value > eps for value in shown) < 24
    assert leak or np.median(shown) > 1.3


def test_one_run_covers_eps_of_the_gaussian():
    rng = np.random.default_rng(3)
    mu, delta = 1.0, 1e-4
    truth = gaussian_eps(mu, delta)
    for guesses in (100, 1000):
        for _ in range(50):
            included = rng.random(2000) < 0.5
            assert eps_shown(rng.normal(mu * included), included, delta, guesses) <= truth
    assert eps_shown(rng.normal(5 * mu * included), included, delta, 1000) > 2
