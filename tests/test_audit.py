"""The audit: the parts of its attacks, and what it catches of a private step that is broken.

All seeds are fixed. Unless stated otherwise a lower bound may exceed the truth with probability 5 % per audit of
correct code, at seeds chosen anew; the tests of correct code ask for 1 %.
"""

import math
import re
from copy import deepcopy
from io import StringIO
from unittest.mock import Mock

import pytest
import torch
from cli import CONF
from helpers import ALGORITHMS, assembled, composed
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

from dpbench.audit.attacks import audit
from dpbench.audit.bounds import noticeable_factor
from dpbench.audit.canaries import FAR, STEEPNESS, CanaryModel, canary_samples, strongest_centre
from dpbench.audit.many_runs import attack_step, choose_threshold, count_errors
from dpbench.audit.one_run import attack_run
from dpbench.audit.page import print_audit
from dpbench.audit.result import Audit
from dpbench.audit.settings import AuditSettings, audited
from dpbench.audit.tap import Tap
from dpbench.audit.targets import Restart, canary_target, model_target
from dpbench.data import Augmentation
from dpbench.filters import Exponential
from dpbench.gradients import per_sample
from dpbench.privacy import Ledger
from dpbench.privacy.gaussian import SecureGaussian, SeededGaussian
from dpbench.privacy.sampling import PoissonSampler
from dpbench.privacy.uniform import SecureUniform, SeededUniform
from dpbench.query import Point
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
