"""Noise that varies from step to step: ADP-SGD's identities and printed numbers, Du et al.'s decays."""

import math
from functools import partial

import numpy as np
import pytest
import torch
from helpers import composed
from torch import nn

from dpbench.clip import ThresholdClip
from dpbench.errors import UserError
from dpbench.filters import Identity
from dpbench.gradients import FlatParameters, PerSampleGradients
from dpbench.noise import DecayingNoise, GrowingNoise, StepSizeNoise
from dpbench.optim import SGD
from dpbench.privacy import Ledger, Plan, Release
from dpbench.privacy.gaussian import SeededGaussian
from dpbench.query import OnePoint
from dpbench.stage import Course
from dpbench.step import PrivateStep
from dpbench.threshold import DecayingThreshold
from dpbench.training.assemble import per_sample_loss
from dpbench.training.schedules import Constant, InverseSqrt, Schedule, SqrtDecay

EPOCHS = {11_760: 60, 23_520: 120, 39_200: 200}


class Rates(Schedule):
    """Given step sizes."""

    def __init__(self, rates):
        self.rates = rates

    def factor(self, step, steps):
        return self.rates[step]


def prepared(stage, schedule, steps):
    stage.prepare(Course(steps, 10, partial(schedule.factor, steps=steps)))
    return stage


def scales(schedule, steps):
    stage = prepared(StepSizeNoise(), schedule, steps)
    return np.array([stage.scale(t) for t in range(steps)])


def rates(schedule, steps):
    return np.array([schedule.factor(t, steps) for t in range(steps)])


# adp.md 2.6: Σ 1/α_t² of the two schedules of the experiments, with optim.lr = 0.1 and 1.
PRINTED_SUMS = {
    ("i", 11_760): 392.050,
    ("i", 23_520): 784.050,
    ("i", 39_200): 1306.717,
    ("ii", 11_760): 208.235,
    ("ii", 23_520): 298.020,
    ("ii", 39_200): 387.246,
}
SCHEDULES = {"i": (SqrtDecay(end=1e-9), 0.1), "ii": (InverseSqrt(a=20.0, c=1.0), 1.0)}


@pytest.mark.parametrize(("name", "steps"), PRINTED_SUMS)
def test_scales_have_the_printed_sums(name, steps):
    schedule, lr = SCHEDULES[name]
    alpha = scales(schedule, steps) / math.sqrt(lr)  # a multiple of all scales is the same method
    assert (1 / alpha**2).sum() == pytest.approx(PRINTED_SUMS[name, steps], abs=2e-3)


@pytest.mark.parametrize(
    ("name", "steps", "ratio", "crossing"),
    [
        ("i", 11_760, 1.5000, 5226),
        ("i", 39_200, 1.5000, 17422),
        ("ii", 11_760, 1.7367, 3170),
        ("ii", 23_520, 1.8791, 6209),
        ("ii", 39_200, 1.9883, 10228),
    ],
)
def test_less_noise_reaches_the_parameters_by_the_printed_factor(name, steps, ratio, crossing):
    """adp.md 3.1, U6-U8: at equal Σ 1/z_t², and where the curves of the two methods cross."""
    schedule, _ = SCHEDULES[name]
    eta, alpha = rates(schedule, steps), scales(schedule, steps)
    z = math.sqrt((1 / alpha**2).mean())  # of ADP, where DP-SGD has 1
    adp, dp = eta * alpha * z, eta
    assert (dp**2).sum() / (adp**2).sum() == pytest.approx(ratio, abs=6e-5)
    assert int(np.argmax(adp > dp)) == pytest.approx(crossing, abs=1)


def test_the_tiny_case_of_the_specification():
    """U9: b = (1, 2, 4, 8)."""
    alpha = scales(Rates([1, 1 / 2, 1 / 4, 1 / 8]), 4)
    sigma = 0.364686 * math.sqrt((1 / alpha**2).sum() / 4)
    assert sigma * alpha == pytest.approx([0.249683, 0.353106, 0.499367, 0.706212], abs=2e-6)
    assert sigma * alpha / np.array([1, 2, 4, 8]) == pytest.approx([0.249683, 0.176553, 0.124842, 0.088276], abs=2e-6)


def test_no_other_scales_let_less_noise_into_the_parameters():
    """U6: M(α) >= (Σ η)², with equality at α² proportional to 1/η; 200 random alternatives."""
    eta = rates(InverseSqrt(), 300)
    noise = lambda alpha: (eta**2 * alpha**2).sum() * (1 / alpha**2).sum()  # noqa: E731
    best = noise(scales(InverseSqrt(), 300))
    assert best == pytest.approx(eta.sum() ** 2)
    generator = np.random.default_rng(0)
    assert all(noise(np.exp(0.3 * generator.standard_normal(300))) > best for _ in range(200))


def test_constant_steps_give_the_noise_of_dpsgd_exactly():
    assert set(scales(Constant(), 50)) == {1.0}


# adp.md 2.6, T = 11,700: C, Σ 1/α².
@pytest.mark.parametrize(
    ("growth", "total"),
    [(1e-5, 2612.384), (1e-4, 2579.014), (1e-3, 2316.256), (1e-2, 1446.444), (1e-1, 600.388), (1, 207.467)],
)
def test_growing_noise_has_the_printed_sums(growth, total):
    stage = GrowingNoise(start=20.0, growth=growth)
    assert sum(1 / stage.scale(t) ** 2 for t in range(11_700)) == pytest.approx(total, abs=1e-3)


def test_decays_run_from_one_to_their_end():
    course = Course(100, 10, lambda _: 1.0)
    noise, threshold = DecayingNoise(decay=0.25), DecayingThreshold(norm=2.0, decay=0.25)
    noise.prepare(course)
    threshold.prepare(course)
    for step in (0, 50, 100):
        assert noise.scale(step) == pytest.approx(0.25 ** (step / 100))
        assert threshold.value(step) == pytest.approx(2 * 0.25 ** (step / 100))


def test_the_plan_has_the_scales_of_the_noise_and_its_ledger_accepts_the_run():
    config = composed("algo=adp", "epochs=3")
    planned = [r.noise_multiplier for r, n in config.release_plan().runs for _ in range(n)]
    want = [1 / math.sqrt(config.schedule.factor(t, config.steps)) for t in range(config.steps)]
    assert planned == pytest.approx(want, rel=0.016)
    assert planned == sorted(planned)


def test_the_noise_that_is_added_is_the_scheduled_one():
    """With the ledger's word for it: a release at another scale than the planned one is refused."""
    noise = prepared(StepSizeNoise(), Rates([1.0, 0.25, 0.04]), 3)
    model = nn.Linear(100, 100, bias=False)
    flat = FlatParameters(model)
    plan = Plan.of(Release(0.1, s) for s in (2.0, 4.0, 10.0))
    step = PrivateStep(
        PerSampleGradients(model, flat, per_sample_loss),
        query=OnePoint(),
        clip=ThresholdClip(),
        threshold=DecayingThreshold(norm=1.0, decay=1.0),
        noise=noise,
        filter=Identity(),
        optimizer=SGD(lr=1.0).build(flat.parameters),
        noise_multiplier=2.0,
        sampling_rate=0.1,
        expected_batch=1.0,
        ledger=Ledger(plan, eps=1.0, delta=1e-5, accountant="rdp"),
        noise_source=SeededGaussian(torch.Generator().manual_seed(0)),
        side_source=SeededGaussian(torch.Generator().manual_seed(1)),
    )
    before = flat.vector.clone()
    for std in (2.0, 4.0, 10.0):
        assert step.noise_std(step.steps, 1.0) == pytest.approx(std)
        step([])
        # 10,000 draws: relative standard error of the std 0.7 %.
        assert float((flat.vector - before).std()) == pytest.approx(std, rel=0.04)
        before = flat.vector.clone()
    assert step.ledger.complete()


def test_combinations_without_a_plan_are_refused():
    with pytest.raises(UserError, match="not known before training"):
        composed("optim=adagrad_norm", "noise=step_size")
    assert composed("optim=adagrad_norm", "noise=growing").noise.start == 20


def test_a_schedule_that_stops_is_refused():
    with pytest.raises(UserError, match="learning rate > 0"):
        prepared(StepSizeNoise(), Rates([1.0, 0.0]), 2)


def test_algorithms_are_the_stages_they_name():
    adp = composed("algo=adp")
    assert isinstance(adp.noise, StepSizeNoise)
    assert adp.schedule == InverseSqrt(a=20.0, c=1.0)
    assert composed("algo=adp", "noise=constant").schedule == adp.schedule
    adaptive = composed("algo=adp_adagrad")
    assert adaptive.noise == GrowingNoise(start=20.0, growth=1e-4)
    assert adaptive.optim.start == 20
    dynamic = composed("algo=dynamic_dpsgd", "threshold.norm=2", "threshold.decay=0.3", "noise=constant")
    assert dynamic.threshold == DecayingThreshold(norm=2.0, decay=0.3)


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: GrowingNoise(start=0.0), "noise.start"),
        (lambda: GrowingNoise(growth=-1.0), "noise.growth"),
        (lambda: DecayingNoise(decay=0.0), "noise.decay"),
        (lambda: DecayingThreshold(decay=1.5), "threshold.decay"),
        (lambda: DecayingThreshold(norm=1e-30, decay=0.1), "threshold.norm"),
    ],
)
def test_settings_out_of_range_are_refused(make, field):
    with pytest.raises(UserError) as error:
        make()
    assert error.value.field == field
