import copy
import inspect
import math
import re

import pytest
import torch
from draws import normal
from helpers import step_of
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import nn

from dpbench.clip import AutomaticClip, NoClip, NormalisedClip, PSAClip, ThresholdClip
from dpbench.errors import UserError
from dpbench.privacy import BudgetError, Ledger, Plan, Release
from dpbench.query import OnePoint, Point, TwoPoint
from dpbench.step import PrivateStep
from dpbench.threshold import FixedThreshold, PercentileThreshold

CLIPS = [
    ThresholdClip(),
    ThresholdClip(scope="per_layer"),
    AutomaticClip(),
    AutomaticClip(stabiliser=0.0),
    AutomaticClip(stabiliser=0.0, scope="per_layer"),
    NormalisedClip(),
    NormalisedClip(scope="per_layer"),
    PSAClip(),
    PSAClip(regulariser=1e-3, scope="per_layer"),
]


class Insensitive(ThresholdClip):
    def sensitivity(self, threshold):
        return 0.0


def clipping_step(model, clip, *, norm=1.0, expected_batch=10.0, seed=0, **settings):
    """A step with this clip on batches that are sampled at a rate of 0.1."""
    settings = {"threshold": FixedThreshold(norm), "sampling_rate": 0.1, "expected_batch": expected_batch, **settings}
    return step_of(model, clip=clip, seed=seed, **settings)


def small_model(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 3))


# Any finite float32, with huge, tiny, subnormal and zero values drawn often.
value = st.one_of(
    st.sampled_from([0.0, 1.0, -1.0, 1e-45, 1e-30, 1e-12, 1e12, -1e30, 3e38]),
    st.floats(width=32, allow_nan=False, allow_infinity=False),
)
sample = st.tuples(st.lists(value, min_size=3, max_size=3), st.integers(0, 2))


def change_by_last_sample(clip, samples, norm, query):
    """Norm, in float64, of what the last sample adds to the un-noised sum."""
    model = small_model()
    step = clipping_step(model, clip, norm=norm, query=query)
    inputs = torch.tensor([x for x, _ in samples])
    labels = torch.tensor([y for _, y in samples])
    with torch.no_grad():
        step.query.points(step.gradients.flat.vector)
        step.gradients.flat.vector.mul_(1.5)  # so that two points differ
        twin = copy.deepcopy(step.query)
        whole, *_ = step.request(zip(inputs.split(2), labels.split(2), strict=True), norm).alone()
        step.query = twin
        without, *_ = step.request(zip(inputs[:-1].split(2), labels[:-1].split(2), strict=True), norm).alone()
    return float((whole.double() - without.double()).norm()), float(without.norm())


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    samples=st.lists(sample, min_size=2, max_size=4),
    norm=st.sampled_from([1e-3, 1.0, 50.0]),
    clip=st.sampled_from(CLIPS),
    two=st.booleans(),
)
def test_one_sample_changes_the_sum_by_at_most_the_sensitivity(samples, norm, clip, two):
    query = TwoPoint(kappa=0.5, gamma=-1.0) if two else OnePoint()
    change, size = change_by_last_sample(clip, samples, norm, query)
    # Rounding: one float32 product in the factor, and one sum of vectors of at most this size.
    assert change <= clip.sensitivity(norm) * (1 + 1e-5) + 1e-6 * size


def test_without_clipping_the_bound_is_broken():
    pairs = ([([1.0, 2.0, 3.0], 0), ([1e3, -1e3, 1e3], label)] for label in range(3))
    assert max(change_by_last_sample(NoClip(), pair, 1.0, OnePoint())[0] for pair in pairs) > 1.0


def test_clipping_each_point_separately_would_break_the_bound():
    """Two opposite gradients of weights 2 and -1 keep norm 3C when clipped one by one."""
    a, b = torch.tensor([[5.0]]), torch.tensor([[-5.0]])
    clip = ThresholdClip()
    separately = sum(
        w * float((clip.factors(v.norm(dim=1).unsqueeze(0), 1.0)[0] * v[0]).norm()) * math.copysign(1, float(v))
        for w, v in ((2.0, a), (-1.0, b))
    )
    mixture = 2.0 * a - 1.0 * b
    together = float((clip.factors(mixture.norm(dim=1).unsqueeze(0), 1.0)[0] * mixture[0]).norm())
    assert separately == 3.0
    assert together == pytest.approx(1.0)


@pytest.mark.parametrize("clip", CLIPS, ids=repr)
def test_factors_of_extreme_norms_are_bounded(clip):
    norms = torch.tensor([[0.0, 1e-45, 1e-23, 1e-16, 1e-9, 1.0, 1e19, 3e38, math.inf]])
    scaled = clip.factors(norms, 0.5) * norms.nan_to_num(posinf=0.0)
    assert torch.isfinite(scaled).all()
    assert (scaled <= clip.sensitivity(0.5) * (1 + 1e-6)).all()
    assert clip.factors(norms, 0.5)[0, -1] == 0


def released_noise(step, steps):
    """What the step adds to the sum, read off the parameters: with an empty batch they move by -lr noise / B."""
    draws = []
    for _ in range(steps):
        before = step.gradients.flat.vector.double()
        step([])
        draws.append((before - step.gradients.flat.vector.double()) * step.expected_batch / 0.1)
    return torch.stack(draws)


@pytest.mark.parametrize(
    ("clip", "norm", "want"),
    [(ThresholdClip(), 1.0, 2.0), (AutomaticClip(), 0.5, 1.0), (NormalisedClip(), 0.5, 2.0)],
    ids=["threshold", "automatic", "normalised"],
)
def test_noise_of_the_released_sum_has_the_declared_std(clip, norm, want):
    model = nn.Sequential(nn.Linear(50, 40, bias=False))
    step = clipping_step(model, clip, noise_multiplier=2.0, norm=norm, steps=20)
    with torch.no_grad():
        step.gradients.flat.vector.zero_()
    noise = released_noise(step, 20)
    # 40,000 draws: the two-sided test at level 1e-6 notices a std that is wrong by 2 %.
    statistic = float((noise / want).square().sum())
    low, high = stats.chi2.ppf([5e-7, 1 - 5e-7], noise.numel())
    assert low < statistic < high
    assert not low < statistic * 1.04 < high
    assert stats.kstest((noise / want).flatten().numpy(), "norm").pvalue > 1e-6


def test_noise_is_independent_between_steps_and_coordinates():
    step = clipping_step(nn.Sequential(nn.Linear(50, 40, bias=False)), ThresholdClip(), noise_multiplier=1.0, steps=30)
    with torch.no_grad():
        step.gradients.flat.vector.zero_()
    noise = released_noise(step, 30)
    for x, y in ((noise[:-1], noise[1:]), (noise[:, :-1], noise[:, 1:]), (noise[:-7], noise[7:])):
        correlation = float((x * y).mean() / noise.square().mean())
        # Standard error 1/sqrt(n); five of them are passed with probability below 1e-6.
        assert abs(correlation) < 5 / math.sqrt(x.numel())


def test_every_step_draws_new_noise_and_every_seed_other_noise():
    draws = [
        released_noise(clipping_step(small_model(), ThresholdClip(), noise_multiplier=1.0, seed=seed), 3)
        for seed in (0, 0, 1)
    ]
    assert torch.equal(draws[0], draws[1])
    assert not torch.isclose(draws[0], draws[2]).any()
    assert not torch.isclose(draws[0][0], draws[0][1]).any()


def test_empty_batch_is_a_step_of_noise_that_the_ledger_counts():
    step = clipping_step(small_model(), ThresholdClip(), noise_multiplier=1.0)
    before = step.gradients.flat.vector.clone()
    losses = step([])
    assert losses.shape == (0,)
    assert len(step.ledger) == 1
    assert not torch.equal(before, step.gradients.flat.vector)
    assert torch.isfinite(step.gradients.flat.vector).all()


def test_sum_is_divided_by_the_expected_batch_size_not_the_drawn_one():
    model = small_model()
    step = clipping_step(model, ThresholdClip(), expected_batch=64.0)
    inputs, labels = torch.randn(5, 3), torch.randint(3, (5,))
    total, *_ = step.request([(inputs, labels)], 1.0).alone()
    before = step.gradients.flat.vector.clone()
    step([(inputs, labels)])
    torch.testing.assert_close(step.gradients.flat.vector, before - 0.1 * total / 64)


def test_micro_batches_change_nothing_but_rounding():
    inputs, labels = torch.randn(9, 3), torch.randint(3, (9,))
    ends = []
    for micro in (9, 4, 1):
        step = clipping_step(small_model(), AutomaticClip(), noise_multiplier=0.5, query=TwoPoint())
        for _ in range(4):
            losses = step(zip(inputs.split(micro), labels.split(micro), strict=True))
            assert losses.shape == (9,)
        ends.append(step.gradients.flat.vector)
    torch.testing.assert_close(ends[0], ends[1])
    torch.testing.assert_close(ends[0], ends[2])


def test_a_release_is_in_the_ledger_before_noise_is_drawn_or_a_threshold_moves():
    step = clipping_step(small_model(), ThresholdClip(), noise_multiplier=1.0)
    step.threshold = PercentileThreshold()
    plan = Plan.of([Release(0.1, 1.0, step.threshold.beside)])
    step.ledger = Ledger(plan, eps=1.0, delta=1e-5, accountant="rdp")
    batch = [(torch.randn(6, 3), torch.randint(3, (6,)))]
    step(batch)
    before = copy.deepcopy((step.threshold.state_dict(), step.noise.state_dict()))
    streams = [source.generator.get_state() for source in (step.noise_source, step.side_source)]
    with pytest.raises(BudgetError):
        step(batch)
    assert (step.threshold.state_dict(), step.noise.state_dict()) == before
    for source, stream in zip((step.noise_source, step.side_source), streams, strict=True):
        assert torch.equal(source.generator.get_state(), stream)


def test_release_beyond_the_plan_is_refused_before_any_parameter_moves():
    step = clipping_step(small_model(), ThresholdClip(), noise_multiplier=1.0, steps=2)
    step([])
    step([])
    before = step.gradients.flat.vector.clone()
    with pytest.raises(BudgetError):
        step([])
    assert torch.equal(before, step.gradients.flat.vector)


@pytest.mark.parametrize("scope", ["flat", "per_layer"])
def test_a_clip_of_another_scope_than_the_gradients_is_refused(scope):
    """It would be that other clip without a word: one norm over all parameters, or each layer's with C/sqrt(G)."""
    made = clipping_step(small_model(), ThresholdClip(scope=scope))
    other = ThresholdClip(scope={"flat": "per_layer", "per_layer": "flat"}[scope])
    arguments = {name: getattr(made, name) for name in inspect.signature(PrivateStep).parameters if name != "clip"}
    with pytest.raises(ValueError, match=f"per_layer={other.scope == 'per_layer'}"):
        PrivateStep(**arguments, clip=other)


class Restless(OnePoint):
    """Promises one point and asks for two."""

    def points(self, theta):
        return [Point(0.5, theta), Point(0.5, theta)]


@pytest.mark.parametrize(
    ("stage", "said"),
    [
        ({"query": Restless()}, "query=Restless: expected at most the 1 points that it promised, not 2 at step 0"),
        ({"clip": NoClip()}, "clip=NoClip: expected a finite sensitivity > 0, not inf at step 0"),
        ({"clip": Insensitive()}, "clip=Insensitive: expected a finite sensitivity > 0, not 0 at step 0"),
    ],
)
def test_a_step_that_noise_is_not_made_for_is_refused_before_it_is_in_the_ledger(stage, said):
    step = clipping_step(small_model(), stage.pop("clip", ThresholdClip()), noise_multiplier=1.0, **stage)
    before = step.gradients.flat.vector.clone()
    with pytest.raises(UserError, match=f"^{re.escape(said)}$"):
        step([(torch.ones(2, 3), torch.tensor([0, 1]))])
    assert len(step.ledger) == 0
    assert torch.equal(step.gradients.flat.vector, before)


def test_step_resumed_from_its_state_is_the_uninterrupted_one():
    inputs, labels = torch.randn(6, 3), torch.randint(3, (6,))

    def run(step, steps):
        for _ in range(steps):
            step([(inputs, labels)])

    whole = clipping_step(small_model(), ThresholdClip(), noise_multiplier=1.0, query=TwoPoint())
    run(whole, 6)
    first = clipping_step(small_model(), ThresholdClip(), noise_multiplier=1.0, query=TwoPoint())
    run(first, 3)
    state = copy.deepcopy(first.state_dict())
    second = clipping_step(small_model(7), ThresholdClip(), noise_multiplier=1.0, query=TwoPoint())
    with torch.no_grad():
        second.gradients.flat.vector.copy_(first.gradients.flat.vector)
    second.load_state_dict(state)
    second.noise_source.generator.set_state(first.noise_source.generator.get_state())
    run(second, 3)
    assert torch.equal(second.gradients.flat.vector, whole.gradients.flat.vector)


def test_a_copy_of_a_step_goes_on_as_the_step_would_and_leaves_it_alone():
    batch = [(torch.randn(6, 3), torch.randint(3, (6,)))]
    step, whole = (
        clipping_step(small_model(), ThresholdClip(), noise_multiplier=1.0, query=TwoPoint()) for _ in range(2)
    )
    for _ in range(2):
        step(batch)
    before = step.gradients.flat.vector.clone()
    copied = copy.deepcopy(step)
    for _ in range(3):
        copied(batch)
    for _ in range(5):
        whole(batch)
    assert torch.equal(step.gradients.flat.vector, before)
    for one in (copied, whole):
        parameters = torch.cat([parameter.reshape(-1) for parameter in one.gradients.model.parameters()])
        assert torch.equal(parameters, whole.gradients.flat.vector)


@pytest.mark.filterwarnings("ignore:falling back to materialised")
@pytest.mark.parametrize("way", ["by_vmap", "one_by_one"])
def test_a_copy_of_gradients_without_books_is_of_the_copied_model(way):
    engine = clipping_step(small_model(), ThresholdClip()).gradients
    batch = torch.randn(6, 3), torch.randint(3, (6,))

    def total(gradients):
        point = Point(1.0, gradients.flat.vector)
        return gradients.clipped_sum([point], [batch], torch.ones_like).total

    total(engine)
    books = copy.deepcopy(engine)
    engine._way = getattr(engine, way)()
    rows = copy.deepcopy(engine)
    before = total(engine)
    for copied in (books, rows):
        copied.flat.vector.mul_(3.0)
    torch.testing.assert_close(total(rows), total(books))
    assert type(rows._way) is type(engine._way)
    assert rows._way.by_plain_autograd == (way == "one_by_one")
    assert torch.equal(total(engine), before)
    assert not torch.allclose(total(rows), before)


@pytest.mark.parametrize("clip", [ThresholdClip(), NormalisedClip(), AutomaticClip(stabiliser=0.0), PSAClip()])
@pytest.mark.parametrize("threshold", [1e-30, 1e-25, 1e-18, 1.0])
def test_vectors_whose_squares_underflow_keep_the_bound(clip, threshold):
    """Their computed norm is 0 though they are not."""
    factor = float(clip.factors(torch.zeros(1, 1), threshold))
    assert factor * 1e-20 <= clip.sensitivity(threshold) * (1 + 1e-6)


@pytest.mark.parametrize("clip", CLIPS, ids=repr)
@pytest.mark.parametrize("threshold", [1e-15, 1e-6, 1.0, 1e15])
def test_factors_keep_the_bound_for_every_norm_whose_square_is_a_float(clip, threshold):
    """In float32, whose numbers below 1e-38 lose their digits."""
    norms = torch.logspace(-15, 19, 700, dtype=torch.float64).float()
    norms = norms.repeat(3, 1) if clip.scope == "per_layer" else norms[None]
    factors = clip.factors(norms, threshold)
    assert factors.isfinite().all()
    contributions = (factors.double() * norms.double()).norm(dim=0)
    assert contributions.max() <= clip.sensitivity(threshold) * (1 + 1e-6)


def test_clipping_by_a_threshold_is_non_expansive_and_automatic_clipping_is_not():
    """doppler.md E8."""
    draws = normal(2000, 2, 5, seed=3) * torch.exp(2 * normal(2000, 1, 1, seed=4))

    def expansion(clip):
        clipped = draws * clip.factors(draws.norm(dim=2), 1.0)[..., None]
        return (clipped[:, 0] - clipped[:, 1]).norm(dim=1) / (draws[:, 0] - draws[:, 1]).norm(dim=1)

    assert 0.99 < expansion(ThresholdClip()).max() <= 1 + 1e-12
    assert expansion(AutomaticClip()).max() > 1.5


def test_a_step_whose_threshold_releases_what_the_ledger_did_not_plan_is_refused():
    model = nn.Linear(3, 2)
    ledger = Ledger(Plan.of([Release(1.0, 1.0)] * 3), eps=1.0, delta=1e-5, accountant="rdp")
    step = step_of(model, threshold=PercentileThreshold(), noise_multiplier=1.0, ledger=ledger)
    before, stream = step.gradients.flat.vector.clone(), step.side_source.generator.get_state()
    with pytest.raises(BudgetError, match="refused"):
        step([(torch.ones(2, 3), torch.tensor([0, 1]))])
    assert len(ledger) == 0
    assert torch.equal(step.gradients.flat.vector, before)
    assert torch.equal(step.side_source.generator.get_state(), stream)
