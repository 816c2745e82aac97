"""Noise that varies from step to step: ADP-SGD's identities and printed numbers, Du et al.'s decays."""

import math

import numpy as np
import pytest
import torch
from adp_schedules import prepared, rates, scales
from helpers import assembled, composed, step_of
from torch import nn

from dpbench.errors import UserError
from dpbench.noise import DecayingNoise, GrowingNoise, StepSizeNoise
from dpbench.optim import SGD
from dpbench.privacy import Ledger, Plan, Release
from dpbench.privacy.adp_theorem import AdpTheorem
from dpbench.schedules import Constant, InverseSqrt, Schedule, SqrtDecay
from dpbench.stage import Course
from dpbench.threshold import DecayingThreshold
from dpbench.training.budget import budget


class Rates(Schedule):
    """Given step sizes."""

    def __init__(self, rates):
        self.rates = rates

    def factor(self, step, steps):
        return self.rates[step]


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
        ("i", 23_520, 1.5000, 10453),
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
    b, alpha = np.array([1, 2, 4, 8]), scales(Rates([1, 1 / 2, 1 / 4, 1 / 8]), 4)
    adp, dp = (AdpTheorem(tuple(factors), 1000, 10, 1e-5).noise_multiplier(1.0) / 10 for factors in (alpha, np.ones(4)))
    assert (adp, dp) == pytest.approx((0.249683, 0.364686), abs=6e-7)
    assert adp * alpha == pytest.approx([0.249683, 0.353106, 0.499367, 0.706212], abs=6e-7)
    assert adp * alpha / b == pytest.approx([0.249683, 0.176553, 0.124842, 0.088276], abs=6e-7)
    assert dp / b == pytest.approx([0.364686, 0.182343, 0.091172, 0.045586], abs=6e-7)
    of_dp, of_adp = 4 * (1 / b**2).sum(), (alpha**2 / b**2).sum() * (1 / alpha**2).sum()
    assert (of_dp, of_adp) == pytest.approx((5.3125, 3.515625))
    assert (dp / adp) ** 2 * (1 / b**2).sum() / (alpha**2 / b**2).sum() == pytest.approx(1.511111, abs=6e-7)


# adp.md 3.1: noise in the parameters per C_G/eps_bar of schedule (ii): ADP's first and last, DP-SGD's.
@pytest.mark.parametrize(
    ("steps", "printed"),
    [
        (11_760, (2.0046e-3, 4.0691e-4, 7.1235e-3, 2.9353e-4)),
        (23_520, (2.4429e-3, 4.1708e-4, 1.02623e-2, 2.9913e-4)),
        (39_200, (2.8217e-3, 4.2403e-4, 1.34248e-2, 3.0316e-4)),
    ],
)
def test_noise_in_the_parameters_has_the_printed_ends(steps, printed):
    eta, alpha = rates(InverseSqrt(), steps), scales(InverseSqrt(), steps)
    adp, dp = (
        AdpTheorem(tuple(factors), 50_000, 256, 1e-5).noise_multiplier(16.0) / 256
        for factors in (alpha, np.ones(steps))
    )
    ends = [*(eta * alpha * adp)[[0, -1]], *(eta * dp)[[0, -1]]]
    assert ends == pytest.approx(printed, rel=1.3e-5)
    if steps == 23_520:  # figure 1: C_G = 2.5, eps_bar = 3.2
        assert [2.5 / 3.2 * end for end in ends] == pytest.approx([1.909e-3, 3.258e-4, 8.017e-3, 2.337e-4], rel=3e-4)


@pytest.mark.parametrize(("steps", "slope"), [(11_760, 9.2214e-4), (23_520, 6.5205e-4), (39_200, 5.0508e-4)])
def test_the_schedule_linear_in_the_root_has_the_printed_slope(steps, slope):
    """adp.md 2.4: η_t = 0.1 - r_T sqrt(t), and η_T = 1e-10."""
    schedule, lr = SCHEDULES["i"]
    eta = lr * np.array([schedule.factor(t, steps) for t in range(steps + 1)])
    np.testing.assert_allclose((eta[0] - eta[1:]) / np.sqrt(np.arange(1, steps + 1)), slope, rtol=6e-5)
    assert eta[0] == 0.1
    assert eta[-1] == pytest.approx(1e-10, rel=1e-4)


@pytest.mark.usefixtures("shared_streams")
@pytest.mark.parametrize("multiplier", [0.0, 1.5])
def test_of_constant_steps_it_is_dpsgd_bit_for_bit_and_so_it_is_without_noise(multiplier):
    """U4, U5."""

    def end(*overrides):
        config = composed("algo=adp", "model=linear", "epochs=1", *overrides)
        step = assembled(config, noise_multiplier=multiplier, steps=3).step
        step.ledger.record = lambda release: None  # of another plan
        for t in range(3):
            inputs = torch.rand(20, 1, 8, 8, generator=torch.Generator().manual_seed(t))
            step([(inputs, torch.arange(20) % 10)])
        return step.gradients.flat.vector

    constant = ("schedule=constant", "optim.lr=0.3")
    assert torch.equal(end(*constant), end(*constant, "noise=constant"))
    assert torch.equal(end(), end("noise=constant")) == (multiplier == 0)


def test_a_multiple_of_all_scales_adds_the_same_noise():
    """U3: with step sizes of 1/4 throughout the scales are 2, and the multiplier is half of DP-SGD's."""
    fixed = ("algo=adp", "schedule=inverse_sqrt", "schedule.a=16", "schedule.c=0", "epochs=2", "eps=3")
    twice, once = (composed(*fixed, *more) for more in ((), ("noise=constant",)))
    assert {twice.noise.scale(t) for t in range(twice.steps)} == {2.0}
    assert 2 * budget(twice).noise_multiplier == pytest.approx(budget(once).noise_multiplier, rel=3e-4)


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


def test_what_decays_over_a_run_asks_how_long_it_is():
    for value in (DecayingNoise().scale, DecayingThreshold().value):
        with pytest.raises(RuntimeError, match="prepare"):
            value(1)


def test_the_plan_has_the_scales_of_the_noise_and_its_ledger_accepts_the_run():
    config = composed("algo=adp", "epochs=3")
    planned = [r.noise_multiplier for r, n in config.release_plan().runs for _ in range(n)]
    want = [1 / math.sqrt(config.schedule.factor(t, config.steps)) for t in range(config.steps)]
    assert planned == pytest.approx(want, rel=1e-12)
    assert planned == sorted(planned)


def test_the_noise_that_is_added_is_the_scheduled_one():
    """With the ledger's word for it: a release at another scale than the planned one is refused."""
    noise = prepared(StepSizeNoise(), Rates([1.0, 0.25, 0.04]), 3)
    model = nn.Linear(100, 100, bias=False)
    plan = Plan.of(Release(0.1, s) for s in (2.0, 4.0, 10.0))
    ledger = Ledger(plan, eps=1.0, delta=1e-5, accountant="rdp")
    step = step_of(model, noise=noise, optim=SGD(lr=1.0), noise_multiplier=2.0, sampling_rate=0.1, ledger=ledger)
    flat = step.gradients.flat
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
        (lambda: GrowingNoise(start=1e300), "noise.start"),
        (lambda: GrowingNoise(growth=-1.0), "noise.growth"),
        (lambda: GrowingNoise(growth=1e300), "noise.growth"),
        (lambda: InverseSqrt(a=1e300), "schedule.a"),
        (lambda: InverseSqrt(c=1e300), "schedule.c"),
        (lambda: DecayingNoise(decay=0.0), "noise.decay"),
        (lambda: DecayingNoise(decay=1e-12), "noise.decay"),
        (lambda: DecayingThreshold(decay=1.5), "threshold.decay"),
        (lambda: DecayingThreshold(norm=1e-30, decay=0.1), "threshold.norm"),
    ],
)
def test_settings_out_of_range_are_refused(make, field):
    with pytest.raises(UserError) as error:
        make()
    assert error.value.field == field


class Powers(Schedule):
    """Step sizes t^-p, t = 1, 2, ..."""

    def __init__(self, power):
        self.power = power

    def factor(self, step, steps):
        return (step + 1) ** -self.power


@pytest.mark.parametrize("power", [0.0, 0.25, 0.5, 0.75])
def test_the_noise_of_adp_grows_with_the_steps_by_the_printed_power(power):
    """adp.md 2.3: σ² is as T^(1-p) where α_t² is as t^p, and as log T at p = 1; B_δ apart."""
    sums = [AdpTheorem(tuple(scales(Powers(power), t)), 50_000, 256, 1e-5).inverse_squares() for t in (10_000, 40_000)]
    assert sums[1] / sums[0] == pytest.approx(4 ** (1 - power), rel=0.04)


def test_the_noise_of_adp_grows_by_a_logarithm_where_steps_fall_as_one_over_t():
    sums = [AdpTheorem(tuple(scales(Powers(1.0), t)), 50_000, 256, 1e-5).inverse_squares() for t in (1000, 30_000)]
    assert sums[1] - sums[0] == pytest.approx(math.log(30), rel=1e-3)
