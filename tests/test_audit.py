"""The audit: its bounds against references, and what it catches of a private step that is broken.

All seeds are fixed. Unless stated otherwise a lower bound may exceed the truth with probability 5 % per audit of
correct code, at seeds chosen anew; the tests of correct code ask for 1 %.
"""

import errno
import json
import math
import re
import sys
from copy import deepcopy
from dataclasses import asdict, replace
from io import StringIO
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from cli import CONF
from closed_form_references import gaussian_eps
from helpers import ALGORITHMS, assembled, composed
from hydra.core.global_hydra import GlobalHydra
from mutants import (
    clip_after_the_mean,
    divided_by_the_actual_batch_size,
    missing_clip,
    noise_reused_between_steps,
    noise_times,
    points_clipped_separately,
    sampled_twice,
)
from rich.console import Console
from scipy import stats
from scipy.optimize import linprog

from dpbench.audit.__main__ import main
from dpbench.audit.attacks import audit
from dpbench.audit.bounds import (
    eps_of,
    mu_at_least,
    noticeable_factor,
    one_run_eps_at_least,
    one_run_p_value,
    rate_at_most,
)
from dpbench.audit.canaries import FAR, STEEPNESS, CanaryModel, canary_samples, strongest_centre
from dpbench.audit.many_runs import attack_step, choose_threshold, count_errors
from dpbench.audit.one_run import attack_run, right_guesses
from dpbench.audit.page import print_audit
from dpbench.audit.result import Audit, Finding
from dpbench.audit.settings import AuditSettings, audit_hash, audited
from dpbench.audit.tap import Tap
from dpbench.audit.targets import Restart, canary_target, model_target
from dpbench.config import compose_jobs, config_hash
from dpbench.data import Augmentation, ImageDataset
from dpbench.filters import Exponential
from dpbench.gradients import per_sample
from dpbench.privacy import Ledger
from dpbench.privacy.gaussian import SecureGaussian, SeededGaussian
from dpbench.privacy.sampling import PoissonSampler
from dpbench.privacy.uniform import SecureUniform, SeededUniform
from dpbench.query import Point
from dpbench.tracking.reading import read_audits
from dpbench.training.losses import per_sample_loss

CPU = torch.device("cpu")
# All whose eps is said to be proven; test_error_feedback.py has the one that is not.
PROVEN = sorted({*ALGORITHMS} - {"dicesgd"})
RISK = 0.01
RUNS = 120
SEPARATED = ("algo=disk", "algo.kappa=0.5", "algo.gamma=0.5")  # c = 2: sensitivity 3C when clipped separately


def first_with_each(*groups):
    """Of the algorithms that choose alike in these groups the first."""
    first = {}
    for algo in PROVEN:
        text = (CONF / "algo" / f"{algo}.yaml").read_text()
        chosen = (re.search(rf"override /{group}: (\w+)", text) for group in groups)
        first.setdefault(tuple(found and found[1] for found in chosen), algo)
    return set(first.values())


def slow_unless(default):
    return () if default else pytest.mark.slow


def full_batch(*overrides, runs=RUNS):
    config = composed("eps=8", *overrides)
    return attack_step(canary_target(config, CPU, config.dataset.train_size), runs, RISK)


def sampled(*overrides, runs=RUNS):
    config = composed("eps=8", *overrides)
    return attack_step(canary_target(config, CPU, config.batch_size), runs, RISK)


def on_the_model(*overrides, runs=RUNS):
    config = composed("eps=8", *overrides)
    return attack_step(model_target(config, CPU, config.dataset.train_size), runs, RISK)


def one_run(*overrides, canaries=1000, steps=20):
    return attack_run(composed(*overrides), AuditSettings(canaries=canaries, steps=steps), CPU, RISK)


# Bounds


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


def test_a_step_is_judged_at_half_the_risk_by_runs_that_chose_no_threshold(monkeypatch):
    from dpbench.audit import many_runs

    risks, chose, judged = [], [], []
    bound, choose, count = many_runs.mu_at_least, many_runs.choose_threshold, many_runs.count_errors
    monkeypatch.setattr(many_runs, "mu_at_least", lambda *a, **k: risks.append(a[4]) or bound(*a, **k))
    monkeypatch.setattr(many_runs, "choose_threshold", lambda *a: chose.append(a[:2]) or choose(*a))
    monkeypatch.setattr(many_runs, "count_errors", lambda *a: judged.append(a[:2]) or count(*a))
    full_batch("algo=dpsgd", "eps=4", runs=60)
    assert len(set(risks)) == 1
    assert risks[0] == pytest.approx(RISK / 2)  # of two statistics
    of_pilots, of_judges = (set(torch.cat([*map(torch.cat, found)]).tolist()) for found in (chose, judged))
    assert of_pilots
    assert not of_pilots & of_judges


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


@pytest.mark.parametrize(
    ("factor", "says"),
    [
        (math.inf, "not even a hundredth of the noise would be noticed; more runs of the step (audit.runs) would"),
        (1.234, "noise too small by a factor of 1.23 would be noticed in about half of all audits"),
    ],
)
def test_how_much_too_little_noise_an_audit_notices_is_said(factor, says):
    finding = Finding("a step", "a model", 1e-5, 0.01, 1.0, 0.5, False, {"notices_noise_too_small_by": factor})
    shown = StringIO()
    print_audit(Audit(0.95, (finding,)), Console(file=shown, width=200))
    assert f"a step, a model: {says}\n" in shown.getvalue()


def test_what_is_released_beside_the_gradient_is_said_to_go_unseen():
    """And noise in g_t must be smaller to be noticed, for what it shows is held against the mu of both."""
    alone, both = full_batch("algo=dpsgd"), full_batch("algo=dcsgd_p", "threshold.histogram_noise=1")
    assert alone.details["unseen"] == []
    assert both.details["unseen"] == ["histogram of norms"]
    claimed = both.details["claimed_mu"]
    assert claimed == pytest.approx(alone.details["claimed_mu"], rel=1e-3)
    of_sum = math.sqrt(claimed**2 - 1)
    factor = both.details["notices_noise_too_small_by"]
    assert factor == pytest.approx(noticeable_factor(of_sum, claimed, RUNS, RISK / 2), rel=1e-6)
    assert factor > 1.1 * alone.details["notices_noise_too_small_by"]
    said = "No attack sees what is released beside each gradient (histogram of norms)"
    for finding, times in ((alone, 0), (both, 1)):
        shown = StringIO()
        print_audit(Audit(0.95, (finding, finding)), Console(file=shown, width=300))
        assert shown.getvalue().count(said) == times


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


# The parts of the attacks


def test_canaries_have_the_gradients_that_they_promise():
    config = composed()
    module = CanaryModel(directions=5).build(config.dataset)
    with torch.no_grad():
        module.positions.weight.copy_(torch.randn(5, 1))
    weight = module.positions.weight
    for centre, sign in ((FAR, 1.0), (9.0, -1.0)):
        for k in range(5):
            samples, labels = canary_samples(torch.tensor([k]), centre)
            (gradient,) = torch.autograd.grad(per_sample_loss(module(samples), labels).sum(), weight)
            assert torch.equal(gradient.squeeze(1), sign * STEEPNESS * torch.eye(5)[k])


def test_the_strongest_canary_lies_between_points_of_opposite_weights():
    low, high = torch.tensor([0.2, 0.0]), torch.tensor([0.4, 0.0])
    centre, sign = strongest_centre([Point(2.0, high), Point(-1.0, low)], 0)
    assert centre == pytest.approx(0.3)
    assert sign == 1.0
    assert strongest_centre([Point(2.0, low), Point(-1.0, high)], 0)[1] == -1.0
    assert strongest_centre([Point(0.7, high), Point(0.3, low)], 0)[0] == FAR


@pytest.mark.parametrize("scope", ["flat", "per_layer"])
@pytest.mark.parametrize("algo", ["dpsgd", "disk"])
def test_the_known_direction_is_that_of_the_clipped_contribution(algo, scope):
    config = composed(f"algo={algo}", "clip=threshold", f"clip.scope={scope}", "threshold.norm=0.1")
    target = model_target(config, CPU, 1437)
    without_memory = deepcopy(target.step.query)
    contribution, *_ = target.step.request([target.canary], 0.1).alone()
    target.step.query = without_memory
    assert float(contribution.norm()) == pytest.approx(0.1, rel=1e-4)
    assert float(contribution @ target.direction) == pytest.approx(0.1, rel=1e-3)


@pytest.mark.parametrize(("norm", "reach"), [(1e-3, 1.0), (1e6, None)])
def test_the_reach_of_a_canary_is_its_share_of_the_sensitivity(norm, reach):
    """A threshold that no gradient reaches clips nothing; then the share is that of the gradient itself."""
    config = composed("algo=disk", "clip=threshold", f"threshold.norm={norm}", "model=mlp")
    target = model_target(config, CPU, 1437)
    if reach is None:
        with_canary, without = (sum_of(target, batch) for batch in (joined(target), target.others))
        reach = float((with_canary - without).norm()) / norm
        assert 0 < reach < 0.01
    assert target.reach == pytest.approx(reach, rel=1e-3)


def joined(target):
    return tuple(torch.cat(pair) for pair in zip(target.others, target.canary, strict=True))


def sum_of(target, batch):
    """The clipped sum of a batch, by a step whose query forgets it again."""
    query = deepcopy(target.step.query)
    total = target.step.request([batch], target.step.threshold.value(target.step.steps)).alone().total.clone()
    target.step.query = query
    return total


def test_a_restart_repeats_everything_but_the_noise():
    target = canary_target(composed("algo=disk", "optim=adam"), CPU, 1437)
    step = target.step
    restart = Restart(step)
    seen = []
    Tap.into(step, lambda gradient: seen.append(gradient.clone()))
    for _ in range(2):
        restart()
        assert (step.steps, len(step.ledger)) == (2, 2)
        step([target.others])
    assert not torch.equal(seen[0], seen[1])
    step.noise_multiplier = 0.0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Ledger, "record", lambda *_: None)
        for _ in range(2):
            restart()
            step([target.others])
    assert torch.equal(seen[2], seen[3])


def test_runs_of_an_audit_compare_gradients_no_more_often_than_a_run(monkeypatch):
    target = canary_target(composed("algo=dpsgd"), CPU, 1437)
    restart, compared = Restart(target.step), Mock(wraps=per_sample.problem_in_batch)
    monkeypatch.setattr(per_sample, "problem_in_batch", compared)
    for _ in range(8):
        restart()
        target.step([target.others])
    assert compared.call_count <= 1


def test_a_tap_shows_the_private_gradient_and_changes_nothing():
    ends, seen = [], []
    for tapped in (False, True):
        parts = assembled(composed("algo=disk", "model=linear"), 1.0)
        parts.step.filter = Exponential(kappa=0.3)
        if tapped:
            Tap.into(parts.step, lambda gradient: seen.append(gradient.clone()))
        for _ in range(3):
            parts.step([(torch.ones(4, 1, 8, 8), torch.arange(4))])
        assert set(parts.step.state_dict()["filter"]) == {"average"}
        ends.append(parts.step.gradients.flat.vector)
    assert torch.equal(*ends)
    assert len(seen) == 3


def test_a_tap_shows_the_whole_gradient_where_the_optimizer_filters_a_projection():
    seen = []
    parts = assembled(composed("algo=lp_dpgalore", "model=linear", "optim.rank=2"), 1.0)
    Tap.into(parts.step, lambda gradient: seen.append(gradient.clone()))
    parts.step([(torch.ones(4, 1, 8, 8), torch.arange(4))])
    assert [len(gradient) for gradient in seen] == [len(parts.step.gradients.flat.vector)]


def test_thresholds_separate_what_can_be_separated():
    without, with_canary = torch.tensor([0.0, 1.0, 2.0]), torch.tensor([4.0, 5.0])
    assert choose_threshold(without, with_canary, 0.1, 0.5) == 3.0
    assert 2.0 < choose_threshold(without, with_canary, 0.1, 1.0) < 4.0
    assert count_errors(torch.tensor([1.0, 4.0]), torch.tensor([3.0, 5.0]), 3.0) == (1, 1, 2)
    broken = torch.full((3,), math.nan)
    assert count_errors(broken, broken, 3.0) == (0, 3, 3)


# What is caught


def require_consistent(found):
    assert not found.violated
    assert found.eps_at_least <= found.claimed_eps <= 8
    assert found.claimed_eps == pytest.approx(8, rel=1e-3)


# Left of the private gradient; what comes after it can't undo privacy, and the slow tests try that too.
# InnerOuter's query is DP-PMLF's with weights that do not sum to 1.
OF_EACH_MECHANISM = first_with_each("query", "clip", "threshold", "noise") | {"innerouter"}
# Noise that changes in every step, whose account by privacy losses takes longer than the attacks.
VARYING = {"adp", "adp_sqrt", "dynamic_dpsgd"}


@pytest.mark.parametrize(
    "overrides",
    [*(pytest.param((f"algo={a}",), marks=slow_unless(a in OF_EACH_MECHANISM)) for a in PROVEN), SEPARATED],
    ids=" ".join,
)
def test_correct_code_is_consistent_with_its_claim(overrides):
    """At fixed seeds; at others these bounds and those of the next test hold together with 96 % confidence."""
    if overrides[0].removeprefix("algo=") in VARYING:
        overrides = (*overrides, "privacy.accountant=rdp")
    require_consistent(full_batch(*overrides))
    found = one_run(*overrides, "eps=8")
    assert 0.3 < found.eps_at_least <= found.claimed_eps <= 8


# Whose contribution is in a batch, and what its gradients are, concerns query and clip; the test above tries the rest.
OF_EACH_QUERY_AND_CLIP = first_with_each("query", "clip")


@pytest.mark.parametrize(
    "overrides",
    [
        *(pytest.param((f"algo={a}",), marks=slow_unless(a in OF_EACH_QUERY_AND_CLIP)) for a in PROVEN),
        pytest.param(SEPARATED, marks=pytest.mark.slow),
    ],
    ids=" ".join,
)
def test_so_it_is_with_sampled_batches_and_with_the_model_of_the_run(overrides):
    correlated = composed(*overrides).noise.correlation is not None
    for attack in (on_the_model,) if correlated else (sampled, on_the_model):
        require_consistent(attack(*overrides))


@pytest.mark.parametrize(
    ("overrides", "used"),
    [
        (("algo=dpsgd",), "pld"),
        (("algo=dpsgd", "privacy.accountant=rdp"), "rdp"),
        (("algo=dp_ftrl",), "gdp"),
        (("algo=dpsgd", "privacy.sampler=shuffled", "privacy.accountant=gdp"), "pld"),  # none for Poisson samples
    ],
)
def test_the_account_is_that_of_the_run_where_it_covers_the_batches_of_an_audit(overrides, used):
    assert audited(composed(*overrides), steps=4, batch_size=64).privacy.valid_accountant == used


@pytest.mark.parametrize("secure", [False, True])
def test_noise_and_batches_that_are_attacked_come_from_where_those_of_the_run_do(monkeypatch, secure):
    """Of no seeded source is anything drawn where the run has secure ones, nor the other way round."""
    drawn = set()
    for kind in (SeededGaussian, SecureGaussian, SeededUniform, SecureUniform):
        monkeypatch.setattr(kind, "fill", noting(kind, drawn))
    settings = AuditSettings(runs=10, canaries=20, steps=2)
    chosen = f"privacy.secure_noise={str(secure).lower()}"
    run = composed("algo=dpsgd", "eps=8", chosen)
    for attack in ("one step", "one run"):
        drawn.clear()
        if attack == "one run":
            attack_run(run, settings, CPU, RISK)
        else:
            attack_step(canary_target(run, CPU, 256), settings.runs, RISK)
        assert drawn == ({SecureGaussian, SecureUniform} if secure else {SeededGaussian, SeededUniform})
    correlated = audited(composed("algo=dp_ftrl", chosen), steps=4, batch_size=64)
    assert (correlated.privacy.sampler, correlated.privacy.secure_noise) == ("cyclic", secure)


def noting(kind, drawn):
    fill = kind.fill

    def filled(self, out):
        drawn.add(kind)
        return fill(self, out)

    return filled


def test_a_run_whose_images_are_cut_is_audited_without():
    assert audited(composed("augmentation=crop_flip"), steps=4, batch_size=64).augmentation == Augmentation()
    found = full_batch("augmentation=crop_flip")
    assert found.eps_at_least <= found.claimed_eps


def require_caught(found):
    assert found.violated
    assert found.eps_at_least > found.claimed_eps


@pytest.mark.parametrize("algo", [pytest.param(a, marks=slow_unless(a in OF_EACH_MECHANISM)) for a in PROVEN])
def test_half_the_noise_is_caught_for_every_algorithm(monkeypatch, algo):
    noise_times(0.5)(monkeypatch)
    require_caught(full_batch(f"algo={algo}"))


# All ask for their clipped sums by the one method that is broken here.
OF_EACH_QUERY = first_with_each("query")


@pytest.mark.parametrize("algo", [pytest.param(a, marks=slow_unless(a in OF_EACH_QUERY)) for a in PROVEN])
def test_a_missing_clip_is_caught_for_every_algorithm(monkeypatch, algo):
    missing_clip(monkeypatch)
    require_caught(full_batch(f"algo={algo}"))


@pytest.mark.parametrize("broken", [noise_times(0.5), missing_clip], ids=["half the noise", "missing clip"])
def test_they_are_also_caught_with_the_model_and_data_of_the_run(monkeypatch, broken):
    broken(monkeypatch)
    assert on_the_model("algo=disk").violated


@pytest.mark.parametrize("factor", [0.7, 1 / 1.3], ids=["0.7", "1/1.3"])
def test_a_little_too_little_noise_is_caught(monkeypatch, factor):
    noise_times(factor)(monkeypatch)
    found = full_batch("algo=dpsgd", runs=700)
    assert found.violated
    assert found.details["mu_at_least"] > found.details["claimed_mu"]
    assert found.details["notices_noise_too_small_by"] < 1.25


@pytest.mark.parametrize(
    ("broken", "attack", "overrides", "statistic", "runs"),
    [
        (clip_after_the_mean, full_batch, ("algo=dpsgd",), "projection", RUNS),
        (points_clipped_separately, full_batch, SEPARATED, "projection", RUNS),
        (noise_reused_between_steps, full_batch, ("algo=dpsgd",), "projection", RUNS),
        (divided_by_the_actual_batch_size, full_batch, ("algo=dpsgd",), "quietness", RUNS),
        (sampled_twice, sampled, ("algo=dpsgd",), "projection", 800),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_subtler_faults_are_caught(monkeypatch, broken, attack, overrides, statistic, runs):
    broken(monkeypatch)
    found = attack(*overrides, runs=runs)
    assert found.violated
    assert found.details["statistic"] == statistic


def test_a_release_that_is_not_in_the_ledger_is_caught(monkeypatch):
    config = composed("algo=dpsgd")
    target = canary_target(config, CPU, 1437)
    monkeypatch.setattr(Ledger, "record", lambda *_: None)
    found = attack_step(target, RUNS, RISK)
    assert found.claimed_eps == 0
    assert found.violated


@pytest.mark.parametrize("noise", ["tree", "banded"])
def test_one_run_sees_through_correlated_noise(monkeypatch, noise):
    """Its attacker undoes the correlation: noise of a smaller scale is found."""
    settings = ("privacy=cyclic", f"noise={noise}", "eps=1", "delta=1e-5")
    assert not one_run(*settings).violated
    noise_times(0.1)(monkeypatch)
    assert one_run(*settings).violated


def test_one_run_samples_at_the_rate_of_its_plan(monkeypatch):
    rates = []
    drawn = PoissonSampler.__init__

    def seen(self, size, batch, generator):
        rates.append(batch / size)
        drawn(self, size, batch, generator)

    monkeypatch.setattr(PoissonSampler, "__init__", seen)
    found = one_run("algo=dpsgd", "eps=1", canaries=2000)
    assert rates == [found.details["sampling_rate"]] == [256 / 2000]


def test_no_batches_are_sampled_where_noise_is_correlated():
    found = audit(composed("algo=dp_ftrl", "eps=8"), AuditSettings(runs=20, canaries=200, steps=5), CPU, lambda _: None)
    assert [finding.attack for finding in found.findings] == ["one step, full batch"] * 2 + ["one run of 5 steps"]
    assert sum(finding.risk for finding in found.findings) == pytest.approx(0.05)


def test_one_run_catches_a_missing_clip_where_delta_lets_it(monkeypatch):
    small = ("algo=disk", "eps=1", "delta=1e-5")
    assert not one_run(*small).violated
    missing_clip(monkeypatch)
    found = one_run(*small)
    assert found.violated
    # All but those that are in and were not sampled once in 20 steps.
    assert found.details["right"] > 0.97 * found.details["guesses"]


# The command

SMALL = ("audit.runs=60", "audit.canaries=200", "audit.steps=3", "device=cpu")


def command(capsys, tmp_path, *arguments):
    try:
        code = main([f"results_dir={tmp_path}", *arguments])
    finally:
        GlobalHydra.instance().clear()
    return code, *capsys.readouterr()


def test_command_prints_and_keeps_what_it_found(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["audit"])
    code, out, _ = command(capsys, tmp_path, "algo=disk", "eps=4", *SMALL)
    assert code == 0
    assert "consistent with the claim" in out
    assert "95 % confidence" in out
    (file,) = tmp_path.glob("audits/*/audit.json")
    kept = json.loads(file.read_text())
    assert kept["verdict"] == "consistent with the claim"
    (job,) = compose_jobs(["algo=disk", "eps=4", "device=cpu"], multirun=False)
    assert kept["run"] == config_hash(job.config)  # whose numbers the page shows beside it
    assert list(read_audits(tmp_path)) == [kept]
    assert kept["settings"]["runs"] == 60
    assert len(kept["findings"]) == 4
    assert sum(finding["risk"] for finding in kept["findings"]) == pytest.approx(0.05)
    assert all(finding["eps_at_least"] <= finding["claimed_eps"] <= 4 for finding in kept["findings"])


def test_an_audit_that_breaks_off_is_no_violation(capsys, tmp_path, monkeypatch):
    def broken(*_):
        raise RuntimeError("no such kernel")

    monkeypatch.setattr("dpbench.audit.__main__.audit", broken)
    code, out, err = command(capsys, tmp_path, "algo=dpsgd", *SMALL)
    assert code == 3
    assert "RuntimeError: no such kernel" in err
    assert "violat" not in out
    assert not list(tmp_path.glob("audits/*/audit.json"))


def test_data_that_can_not_be_read_are_named_in_a_line(capsys, tmp_path, monkeypatch):
    def forbidden(*_, **__):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(ImageDataset, "load", forbidden)
    code, _, err = command(capsys, tmp_path, "data.root=/nowhere", *SMALL)
    assert (code, err) == (2, "error: data.root=/nowhere: can't be read (Permission denied)\n")


def test_audits_are_named_by_what_their_result_hangs_on():
    config, settings = composed("algo=dpsgd", "eps=4"), AuditSettings()
    others = [replace(settings, **{name: value}) for name, value in vary(settings).items()]
    named = [audit_hash(config, one) for one in (settings, *others)]
    named += [audit_hash(composed("algo=dpsgd", line), settings) for line in ("eps=5", "seed=1")]
    assert len(set(named)) == len(named)
    elsewhere = composed("algo=dpsgd", "eps=4", "device=cpu", "results_dir=elsewhere")
    assert audit_hash(elsewhere, settings) == audit_hash(config, settings)


def vary(settings):
    """Another value for each setting."""
    return {name: value / 2 if isinstance(value, float) else value + 1 for name, value in asdict(settings).items()}


def test_command_says_where_no_proof_covers_the_claim(capsys, tmp_path):
    code, out, _ = command(capsys, tmp_path, "algo=dicesgd", *SMALL)
    unproven = "un-clipped gradients come back in later steps"
    assert code == 0
    assert f"NOT CERTIFIED: {unproven}. No proof covers the claimed eps" in " ".join(out.split())
    (file,) = tmp_path.glob("audits/*/audit.json")
    assert json.loads(file.read_text())["uncertified"] == unproven


def test_command_says_what_is_violated(capsys, tmp_path, monkeypatch):
    missing_clip(monkeypatch)
    code, out, _ = command(capsys, tmp_path, *SMALL)
    assert code == 1
    assert "violates the claim" in out
    (file,) = tmp_path.glob("audits/*/audit.json")
    assert json.loads(file.read_text())["verdict"] == "violates the claim"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("eps=inf", "eps=inf: promises nothing"),
        ("eps=1,2", "an audit is of one"),
        ("audit.runs=3", "audit.runs=3: expected a whole number >= 10"),
        ("audit.runs=x", "audit.runs=x: expected a whole number"),
        ("audit.confidence=1", "audit.confidence=1: expected a number in (0, 1)"),
        ("audit.canaries=1", "audit.canaries=1: expected a whole number from 4"),
        ("audit.steps=0", "audit.steps=0: expected a whole number > 0"),
        ("audit.steps=10000001", "audit.steps=10000001: expected a whole number > 0, at most 10000000"),
        ("audit.rus=3", "audit.rus=3: no such setting; audit has runs, canaries, steps, confidence"),
        ("audit.runs", "audit.runs: expected key=value"),
        ("privacy.noise_multiplier=2", "privacy.noise_multiplier=2: expected null"),
        ("privacy=as_published", "privacy.published=poisson_rdp: expected null"),
        ("algo=dikc", "algo=dikc: expected one of"),
        ("--no-such-flag", "--no-such-flag"),
        ("dataset=mnist data.root=/nonexistent", "data.root=/nonexistent: no such folder; set data.download=true"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(capsys, tmp_path, arguments, said):
    code, _, err = command(capsys, tmp_path, *arguments.split())
    assert code == 2
    assert err.count("\n") == 1
    assert said in err
    assert list(tmp_path.rglob("audit.json")) == []


def test_help_shows_every_setting_with_its_default(capsys, tmp_path):
    code, out, _ = command(capsys, tmp_path, "--help")
    assert code == 0
    for name in ("runs=1000", "canaries=2000", "steps=50", "confidence=0.95"):
        assert f"audit.{name}" in out


# More statistics


@pytest.mark.slow
@pytest.mark.parametrize(("eps", "share"), [(8, 0.8), (1, 0.25)])
@pytest.mark.parametrize("algo", PROVEN)
def test_correct_code_is_consistent_and_the_bound_is_tight(algo, eps, share):
    """At fixed seeds; at others with 95 % confidence. A canary below the threshold shows no more than its share."""
    found = audit(composed(f"algo={algo}", f"eps={eps}"), AuditSettings(runs=2000), CPU, lambda _: None)
    assert not found.violated
    full = [finding for finding in found.findings if finding.attack == "one step, full batch"]
    for finding in (one.details for one in full):
        assert finding["mu_at_least"] > share * finding["reach"] * finding["claimed_mu"]


@pytest.mark.slow
@pytest.mark.parametrize("attack", [full_batch, on_the_model])
@pytest.mark.parametrize("algo", PROVEN)
def test_noise_too_small_by_1_3_is_caught_for_every_algorithm(monkeypatch, algo, attack):
    noise_times(1 / 1.3)(monkeypatch)
    assert attack(f"algo={algo}", runs=1000).violated
