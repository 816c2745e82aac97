"""DiceSGD: its recursion against plain autograd, and why the published noise is no proof of its eps."""

import copy
import math

import pytest
import torch
from cli import only_record, read, run
from closed_form_references import gaussian_eps
from draws import generator
from helpers import assembled, composed
from results_command import results
from torch import nn

from dpbench.audit.canaries import canary_samples, with_canaries
from dpbench.audit.one_run import attack_run
from dpbench.audit.settings import AuditSettings
from dpbench.audit.tap import Tap
from dpbench.clip import ThresholdClip
from dpbench.error_feedback import ErrorFeedbackClip
from dpbench.errors import UserError
from dpbench.gradients import FlatParameters, PerSampleGradients
from dpbench.query import Point
from dpbench.training.losses import per_sample_loss


def per_sample_gradients(model, inputs, labels):
    rows = []
    for x, y in zip(inputs, labels, strict=True):
        loss = per_sample_loss(model(x[None]), y[None]).sum()
        rows.append(torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))]))
    return torch.stack(rows)


def clipped(v, bound):
    return v * min(1.0, bound / float(v.norm()))


@pytest.mark.parametrize(("norm", "ratio"), [(0.3, 1.0), (0.1, 2.0), (100.0, 1.0)])
def test_iterates_follow_the_printed_recursion(norm, ratio):
    """dc_sgd.md, appendix A, in float64 and with the mean over the expected batch size."""
    settings = [f"threshold.norm={norm}", f"clip.ratio={ratio}", "model=linear", "batch_size=20", "optim.lr=0.5"]
    step = assembled(composed("algo=dicesgd", "eps=inf", *settings)).step
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10)).double()
    theta = step.gradients.flat.vector.double().clone()
    error = torch.zeros_like(theta)
    torch.manual_seed(0)
    for _ in range(8):
        inputs, labels = torch.rand(17, 1, 8, 8), torch.randint(10, (17,))
        step(zip(inputs.split(5), labels.split(5), strict=True))
        nn.utils.vector_to_parameters(theta, model.parameters())
        rows = per_sample_gradients(model, inputs.double(), labels)
        fed = clipped(error, ratio * norm) if float(error.norm()) > 0 else error
        v = torch.stack([clipped(row, norm) for row in rows]).sum(0) / 20 + fed
        error = error + rows.sum(0) / 20 - v
        theta = theta - 0.5 * v
        torch.testing.assert_close(step.gradients.flat.vector.double(), theta, rtol=0, atol=1e-5)
    assert (float(error.norm()) > 0.01) == (norm < 100)


@pytest.mark.parametrize("scope", ["flat", "per_layer"])
@pytest.mark.parametrize("micro", [3, 12])
def test_the_remainder_is_what_the_factors_leave_over(scope, micro):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(4 * 36, 3))
    inputs, labels = torch.randn(12, 1, 8, 8), torch.randint(3, (12,))
    engine = PerSampleGradients(model, flat := FlatParameters(model), per_sample_loss, per_layer=scope == "per_layer")
    start = flat.vector.clone()
    points = [Point(2.0, start), Point(-1.0, start + 0.01)]
    found = engine.clipped_sum(
        points,
        zip(inputs.split(micro), labels.split(micro), strict=True),
        lambda norms: ThresholdClip(scope=scope).factors(norms, 0.5),
        remainder=True,
    )
    twin, whole = copy.deepcopy(model).double(), torch.zeros(len(flat), dtype=torch.float64)
    for weight, iterate in points:
        nn.utils.vector_to_parameters(iterate.double(), twin.parameters())
        whole += weight * per_sample_gradients(twin, inputs.double(), labels).sum(0)
    torch.testing.assert_close(found.total.double() + found.remainder.double(), whole, rtol=0, atol=1e-4)
    without = engine.clipped_sum(points, [(inputs, labels)], lambda norms: ThresholdClip().factors(norms, 0.5))
    assert without.remainder is None


@pytest.mark.parametrize("broken", [1, 4])
def test_a_broken_sample_leaves_nothing_over(broken):
    model = nn.Linear(3, 3)
    engine = PerSampleGradients(model, FlatParameters(model), per_sample_loss)
    points = [Point(1.0, engine.flat.vector.clone())]
    inputs, labels = torch.randn(4, 3), torch.randint(3, (4,))
    inputs[:broken] = math.nan
    found = engine.clipped_sum(points, [(inputs, labels)], lambda n: (0.1 / n).clamp(max=1.0), remainder=True)
    rest = engine.clipped_sum(points, [(inputs[broken:], labels[broken:])][: 4 - broken], torch.zeros_like)
    alone = per_sample_gradients(model, inputs[broken:], labels[broken:]).sum(0) if broken < 4 else rest.total
    torch.testing.assert_close(found.total + found.remainder, alone)
    assert len(found.losses) == 4


def test_an_error_beyond_floating_point_is_forgotten():
    clip, total = ErrorFeedbackClip(), torch.zeros(2)
    for _ in range(2):
        clip.feed_back(total, torch.tensor([3e38, 0.0]), 1.0, 1.0)
    clip.feed_back(total, torch.ones(2), 1.0, 1.0)
    clip.feed_back(total.zero_(), torch.zeros(2), 1.0, 1.0)
    torch.testing.assert_close(total, torch.full((2,), 0.5**0.5))


# What its noise is worth


def releases(present):
    """B g_t of five steps without noise on canaries; the one along coordinate 0 takes part in the first alone."""
    config = with_canaries(composed("algo=dicesgd", "eps=inf", "batch_size=256"), 4)
    step = assembled(config).step
    seen = []
    Tap.into(step, lambda gradient: seen.append(gradient.clone() * config.batch_size))
    others = canary_samples(torch.tensor([1, 2]))
    with_it = canary_samples(torch.tensor([0, 1, 2]))
    for t in range(5):
        step([with_it if present and t == 0 else others])
    return torch.stack(seen)


def test_published_noise_does_not_hide_a_sample_with_a_long_gradient():
    """Gradients do not depend on the iterate, so that the means of all releases tell the runs apart exactly."""
    moved = (releases(True) - releases(False)).norm(dim=1)
    assert float(moved[0]) == pytest.approx(1.0, rel=1e-5)
    # In the steps after, by up to 2 B C_2; here it is one of three directions of an error that grows.
    assert (moved[1:] > 40).all()
    assert (moved[1:] <= 2 * 256).all()
    multiplier = 5.0
    noise = multiplier * ErrorFeedbackClip().sensitivity(1.0)
    claimed = gaussian_eps(5**0.5 / multiplier, 1e-5)  # in every step, without sampling
    spent = gaussian_eps(float(moved.norm()) / noise, 1e-5)
    assert claimed < 3
    assert spent > 100


def test_the_audit_refutes_the_published_noise():
    settings = AuditSettings(canaries=1000, steps=20)
    small = ("eps=1", "delta=1e-5")
    dice, plain = (
        attack_run(composed(f"algo={algo}", *small), settings, torch.device("cpu"), 0.01)
        for algo in ("dicesgd", "dpsgd")
    )
    assert dice.violated
    assert not plain.violated


def test_a_run_says_that_its_eps_is_not_proven(tmp_path, monkeypatch):
    monkeypatch.setattr("dpbench.training.display.SECONDS_BETWEEN_LINES", -1)
    outcome = run(tmp_path, "algo=dicesgd")
    assert outcome.code == 0
    assert [", not proven  " in line for line in outcome.out.splitlines() if line.startswith("  step ")] == [True, True]
    assert "NOT CERTIFIED: un-clipped gradients come back in later steps" in outcome.out
    assert read(only_record(tmp_path), "summary.json")["private"] is False
    assert ", not proven" in outcome.out.partition("test accuracy, last (%)")[2]
    assert "  7.999, not proven  " in results(tmp_path, "list").out


@pytest.mark.parametrize("setting", ["algo=dpsgd", "eps=inf"])
def test_a_run_whose_eps_is_proven_or_claims_nothing_has_no_such_mark(setting, tmp_path, monkeypatch):
    monkeypatch.setattr("dpbench.training.display.SECONDS_BETWEEN_LINES", -1)
    outcome = run(tmp_path, "algo=dicesgd", setting)
    assert outcome.code == 0
    assert "  step 2/" in outcome.out
    assert "not proven" not in outcome.out


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (("algo=dicesgd", "noise=tree", "privacy=cyclic"), "clip=error_feedback: error feedback spreads"),
        (("algo=dicesgd", "clip.ratio=0.5"), "clip.ratio=0.5: expected a finite number >= 1"),
    ],
)
def test_what_makes_no_sense_is_refused(overrides, said):
    with pytest.raises(UserError) as caught:
        composed(*overrides)
    assert said in str(caught.value)


def test_an_error_whose_square_is_beyond_float32_still_comes_back():
    """1e25 is a float32 and its square is none: what comes back is C_2 in its direction, and the rest is kept."""
    clip, total = ErrorFeedbackClip(ratio=2.0), torch.zeros(2)
    clip.feed_back(total, torch.tensor([3e25, -4e25]), 1.0, 10.0)
    assert torch.equal(total, torch.zeros(2))
    clip.feed_back(total, torch.zeros(2), 1.0, 10.0)
    torch.testing.assert_close(total, 10 * 2.0 * torch.tensor([0.6, -0.8]))
    torch.testing.assert_close(clip.state_dict()["error"], torch.tensor([3e24, -4e24]))


@pytest.mark.parametrize(("ratio", "factor"), [(1.0, math.sqrt(3)), (4.0, 3.0), (12.0, 5.0)])
def test_noise_is_made_for_the_published_factor_at_every_ratio(ratio, factor):
    """dc_sgd.md, appendix A: sigma^2 (1 + 2 C_2/C_1) times C_1^2."""
    step = assembled(composed("algo=dicesgd", "threshold.norm=0.5", f"clip.ratio={ratio}"), noise_multiplier=2.0).step
    assert step.noise_std(0, 0.5) == pytest.approx(2.0 * 0.5 * factor / step.expected_batch, rel=1e-12)


def test_the_proven_delta_is_of_both_directions():
    """The class's pair: D - H within (eps_2, delta_2), H - D' within (eps_1, delta_1), eps_2 the larger one."""

    def delta(one, other, eps):
        return (one - math.exp(eps) * other).clamp(min=0).sum(1)

    draws = torch.rand(3, 100_000, 3, dtype=torch.float64, generator=generator(0)) ** 6
    with_s, hybrid, without_s = draws / draws.sum(2, keepdim=True)
    eps_1, eps_2 = 0.5, 2.0
    delta_1 = torch.maximum(delta(hybrid, without_s, eps_1), delta(without_s, hybrid, eps_1))
    delta_2 = torch.maximum(delta(hybrid, with_s, eps_2), delta(with_s, hybrid, eps_2))
    without_first = delta(without_s, with_s, eps_1 + eps_2)
    with_first = delta(with_s, without_s, eps_1 + eps_2)
    one, other = delta_1 + math.exp(eps_1) * delta_2, delta_2 + math.exp(eps_2) * delta_1
    assert (torch.maximum(without_first, with_first) <= torch.maximum(one, other) + 1e-12).all()
    assert (without_first <= one + 1e-12).all()
    assert (with_first > one + 0.1).any(), "one direction's delta is not that of the other"
