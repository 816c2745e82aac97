"""dc_sgd.md 3.1 (numbers T1 to T20), 3.2, 2.4, 2.5, 2.9; Andrew et al."""

import math
from fractions import Fraction
from itertools import accumulate
from pathlib import Path

import numpy as np
import pytest
import torch
from accounting_references import equal_plan
from helpers import assembled, composed
from scipy import optimize, stats

from dpbench.clip import ThresholdClip
from dpbench.errors import UserError
from dpbench.privacy import calibrate, epsilon
from dpbench.privacy.gaussian import GRID, SecureGaussian, SeededGaussian
from dpbench.privacy.plan import Part, Plan, Release
from dpbench.stage import Course
from dpbench.threshold import ExpectedErrorThreshold, PercentileThreshold, QuantileThreshold
from dpbench.threshold import histogram as module
from dpbench.threshold.histogram import expected_error, histogram
from dpbench.training.assemble import assemble
from dpbench.training.budget import budget, open_ledger


def norms_in(bins: dict[int, int], reach: float, number: int = 20) -> torch.Tensor:
    """So many norms in the middle of each bin."""
    return torch.cat([torch.full((n,), (k + 0.5) * reach / number) for k, n in bins.items()])


def after(threshold, norms, error_weight=1.0, steps=1):
    """C and R after so many steps that all see these norms, without noise."""
    for _ in range(steps):
        threshold.observe(norms)
        threshold.release(None, error_weight)
    return threshold.value(steps), getattr(threshold, "_range", None)


def noise(seed=0):
    return SeededGaussian(torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("kind", [ExpectedErrorThreshold, PercentileThreshold, QuantileThreshold])
@pytest.mark.parametrize("drawn", [0, 20])
def test_a_release_is_on_the_cpu_whatever_the_default_device(kind, drawn):
    one, other = kind(), kind()
    for threshold in (one, other):
        threshold.prepare(Course(10, 20, lambda _: 1.0))
        if drawn:
            threshold.observe(torch.linspace(0.1, 2, drawn))
    one.release(noise(), 1.0)
    with torch.device("meta"):
        other.release(noise(), 1.0)
    assert one.value(1) == other.value(1)
    assert not drawn or one.value(1) != kind().value(0)


# T1, and that the joint release of the two parts is the total again.
@pytest.mark.parametrize(
    ("total", "side", "gradient"),
    [(0.596, 5, 0.6003), (0.967, 5, 0.9856), (1.129, 5, 1.1589), (2.123, 8, 2.2020), (4.943, 12, 5.4246)],
)
def test_gradient_and_histogram_are_one_release(total, side, gradient):
    joint = Release(0.01, gradient, (Part("histogram of norms", side),)).joint
    assert joint.noise_multiplier == pytest.approx(total, rel=1e-4)


def test_without_noise_in_the_histogram_nothing_is_left_for_the_gradient():
    """T3: at σ_H towards infinity the gradient's multiplier is the total."""
    assert Release(0.01, 1.1, (Part("h", 1e9),)).joint.noise_multiplier == pytest.approx(1.1)


def test_a_histogram_that_spends_more_alone_than_there_is_is_refused():
    """T2: σ = 1.1, σ_H = 1."""
    eps = epsilon(equal_plan(0.01, 1.1, 100), 1e-5, "rdp", eps_scale=1.0)
    beside = (Part("histogram of norms", 1.0),)
    with pytest.raises(UserError, match="the histogram of norms at noise multiplier 1, released beside the gradient"):
        calibrate(Plan.of([Release(0.01, 1.0, beside)] * 100), eps, 1e-5, "rdp")
    assert calibrate(Plan.of([Release(0.01, 1.0)] * 100), eps, 1e-5, "rdp").noise_multiplier == pytest.approx(1.1, 1e-3)


# T18: (q, T, N, σ, eps) of the rows without tuning in 2.7.
@pytest.mark.parametrize(
    ("samples", "steps", "total", "eps"),
    [(60_000, 2350, 0.842, 2), (50_000, 3920, 0.596, 8), (73_257, 5740, 0.699, 4), (104_743, 2050, 0.751, 2)],
)
@pytest.mark.parametrize("side", [1.5, 5.0, 12.0, 1e3])
def test_eps_is_that_of_the_total_whatever_the_noise_of_the_histogram(samples, steps, total, eps, side):
    gradient = (total**-2 - side**-2) ** -0.5
    plan = Plan.of([Release(256 / samples, gradient, (Part("histogram of norms", side),))] * steps)
    found = epsilon(plan, 1 / samples, "rdp", eps_scale=eps)
    assert found == pytest.approx(eps, rel=0.01)
    plain = epsilon(equal_plan(256 / samples, total, steps), 1 / samples, "rdp", eps_scale=eps)
    assert found == pytest.approx(plain, rel=1e-9)


@pytest.mark.parametrize(("gradient", "side"), [(0.6003, 5.0), (2.2020, 8.0), (1.0, 0.7)])
def test_a_sample_moves_the_scaled_pair_by_the_joint_sensitivity(gradient, side):
    """T19: by at most 1/σ, and by that where its norm is C or more."""
    total = Release(0.01, gradient, (Part("histogram of norms", side),)).joint.noise_multiplier
    norms = torch.tensor([[0.0, 0.3, 1.999, 2.0, 2.001, 50.0]], dtype=torch.float64)
    clipped = (ThresholdClip().factors(norms, 2.0).nan_to_num() * norms).squeeze(0)
    for norm, short in zip(norms[0], clipped, strict=True):
        onehot = histogram(norm.reshape(1), 10.0, 20)
        pair = math.hypot(float(short) / (gradient * 2.0), float(onehot.norm()) / side)
        assert pair <= 1 / total * (1 + 1e-12)
        assert (pair == pytest.approx(1 / total, rel=1e-9)) == (norm >= 2.0)


def test_norms_are_counted_in_the_bin_they_begin():
    """T15, T17."""
    counts = histogram(torch.tensor([0.0, 0.999, 1.0, 19.0, 19.999, 20.0, 1e30, math.inf]), 20.0, 20)
    assert counts.tolist() == [2.0, 1.0, *[0.0] * 17, 5.0]


def test_one_sample_changes_one_count_by_one():
    norms = torch.rand(50, generator=torch.Generator().manual_seed(1)) * 30
    for extra in (0.0, 3.0, 100.0, math.inf):
        change = histogram(torch.cat([norms, torch.tensor([extra])]), 20.0, 20) - histogram(norms, 20.0, 20)
        assert change.norm() == change.sum() == 1


@pytest.mark.parametrize("bins", [0, 7, 19])
def test_percentile_is_the_midpoint_of_the_bin_with_all_norms(bins):
    """T5."""
    threshold, reach = after(PercentileThreshold(range=3.0), norms_in({bins: 40}, 3.0))
    assert threshold == pytest.approx((bins + 0.5) * 3.0 / 20)
    assert reach == 2 * threshold


def test_percentile_moves_by_at_most_its_slew():
    """T6."""
    assert after(PercentileThreshold(range=2.0), torch.full((9,), 5.0))[0] == pytest.approx(1.95)
    assert after(PercentileThreshold(range=2.0), torch.full((9,), 0.09))[0] == pytest.approx(0.05)


def test_percentile_ripples_with_an_even_and_rests_with_an_odd_number_of_bins():
    """T7."""
    even, odd = PercentileThreshold(range=2.0), PercentileThreshold(range=2.0, bins=21)
    seen = [after(even, torch.ones(256))[0] for _ in range(200)][5:]
    assert 0.951 < min(seen) < max(seen) < 1.0501
    assert all(after(odd, torch.ones(256))[0] == pytest.approx(1) for _ in range(20))


@pytest.mark.parametrize(("norm", "updates", "value"), [(100.0, 7, 101.7), (0.012, 2, 0.0125)])
def test_percentile_finds_a_distant_norm_in_a_few_steps(norm, updates, value):
    """T8."""
    threshold = PercentileThreshold(range=2.0)
    seen = [after(threshold, torch.full((256,), norm))[0] for _ in range(updates)]
    assert seen[-1] == pytest.approx(value, rel=1e-3)
    assert [abs(c / norm - 1) < 0.1 for c in seen] == [False] * (updates - 1) + [True]


def test_percentile_of_all_is_the_highest_occupied_bin():
    """T9."""
    assert after(PercentileThreshold(range=2.0, quantile=1.0), norms_in({2: 5, 13: 1}, 2.0))[0] == pytest.approx(1.35)


def test_percentile_of_all_is_the_last_bin_whichever_way_rounding_goes():
    """Sums of noisy counts may end below their total by a rounding; by exact sums the last one is it."""
    below = 0
    for seed in range(400):
        threshold = PercentileThreshold(quantile=1.0, range=20.0)
        counts = 1000 * np.eye(20)[3] + 5 * noise(seed).fill(torch.empty(20, dtype=torch.float64)).numpy()
        exact = list(accumulate(map(Fraction, counts)))
        if max(exact[:-1]) >= exact[-1]:
            continue
        below += np.cumsum(counts)[-1] < counts.sum()
        threshold.observe(torch.full((1000,), 3.5))
        threshold.release(noise(seed), 1.0)
        assert threshold.value(1) == 19.5
    assert below > 10


def test_one_bin_keeps_the_threshold():
    """T4: so with σ_H towards infinity the method is DP-SGD."""
    threshold = PercentileThreshold(range=2.0, bins=1)
    for seed in range(5):
        threshold.observe(torch.rand(30) * 9)
        threshold.release(noise(seed), 1.0)
        assert threshold.value(1) == 1.0


def test_the_first_range_is_twice_the_first_threshold_unless_it_is_set():
    """A4: as that of every later step; the paper prints 1."""
    assert after(PercentileThreshold(norm=10.0), torch.full((256,), 10.0), steps=0) == (10.0, 20.0)
    assert after(PercentileThreshold(norm=10.0, range=1.0), torch.full((256,), 10.0), steps=0) == (10.0, 1.0)


@pytest.mark.usefixtures("shared_streams")
def test_with_one_bin_it_is_dpsgd():
    """T4: the same noise on the same batches gives the same parameters."""
    steps = []
    for overrides in (["threshold.norm=3"], ["threshold=dcsgd_p", "threshold.bins=1", "threshold.norm=3"]):
        config = composed("algo=dpsgd", "clip=threshold", "model=linear", *overrides)
        steps.append(assembled(config, noise_multiplier=1.0).step)
    for t in range(5):
        batch = (torch.rand(20, 1, 8, 8, generator=torch.Generator().manual_seed(t)), torch.arange(20) % 10)
        for step in steps:
            step([batch])
    plain, one_bin = (step.gradients.flat.vector for step in steps)
    assert isinstance(steps[1].threshold, PercentileThreshold)
    assert torch.equal(plain, one_bin)


# T10, T11, T13: counts by bin, K, and what becomes of C = 1 and R = 20.
EXPECTED_ERROR = [
    ({5: 256}, 1.0, 2.8, 10.0),
    ({5: 256}, 3.0, 1.4, 10.0),
    ({5: 256}, 60.0, 0.09, 10.0),
    ({1: 128, 9: 128}, 0.1, 8.0, None),
    ({1: 128, 9: 128}, 1.0, 3.2, None),
    ({1: 128, 9: 128}, 10.0, 0.5, None),
    ({19: 256}, 1.0, 9.6, 40.0),
]


@pytest.mark.parametrize(("bins", "weight", "expected", "reach"), EXPECTED_ERROR)
def test_expected_error_takes_the_specified_candidate(bins, weight, expected, reach):
    threshold, found = after(ExpectedErrorThreshold(), norms_in(bins, 20.0), weight)
    assert threshold == pytest.approx(expected)
    assert reach is None or found == reach


@pytest.mark.parametrize(
    ("weight", "passes", "expected"),
    [(1.0, 2, 2.8), (3.0, 1, 1.4), (24.6, 1, 0.2), (60.0, 2, 0.09)],  # 0.2: the second of 20, next to the edge
    ids=["1", "3", "24.6", "60"],
)
def test_expected_error_searches_as_often_as_specified(weight, passes, expected, monkeypatch):
    """T10."""

    def within(most):
        monkeypatch.setattr(module, "MOST_PASSES", most)
        return after(ExpectedErrorThreshold(), norms_in({5: 256}, 20.0), weight)[0]

    assert [within(most) == pytest.approx(expected) for most in (1, 2, 3)] == [passes == 1, True, True]


# T10, T11, T13, and closed forms of 2.5: counts, K, the continuous minimiser of Ê.
@pytest.mark.parametrize(
    ("bins", "weight", "optimum"),
    [
        ({5: 256}, 1.0, 2.75),
        ({5: 256}, 3.0, 1.375),
        ({5: 256}, 60.0, 0.0902),
        ({1: 128, 9: 128}, 0.1, 7.917),
        ({1: 128, 9: 128}, 1.0, 3.167),
        ({1: 128, 9: 128}, 10.0, 0.500),
        ({19: 256}, 1.0, 9.75),
    ],
)
def test_expected_error_is_least_where_the_closed_form_says(bins, weight, optimum):
    counts = histogram(norms_in(bins, 20.0), 20.0, 20).numpy()
    thresholds = np.linspace(1e-4, 20, 200_000)
    errors = expected_error(thresholds, np.arange(20) + 0.5, counts, weight)
    assert thresholds[errors.argmin()] == pytest.approx(optimum, abs=6e-4)
    assert (np.diff(errors, 2) > -1e-9).all()  # convex


def test_the_error_of_real_gradients_falls_and_then_rises():
    """dc_sgd.md 3.2-2, figure 4: norms of the digits' first gradients under a small network."""
    parts = assembled(composed("algo=dcsgd_e", "model=mlp"))
    seen = []
    parts.step.threshold.observe = lambda norms: seen.append(norms.double())
    parts.step([composed().dataset.load(Path("nowhere"), download=False).train.take(slice(0, 256))])
    norms = torch.cat(seen)
    reach = 1.2 * float(norms.max())
    thresholds = np.linspace(reach / 100, reach, 100)
    counts = histogram(norms, reach, 20).numpy()
    errors = expected_error(thresholds, (np.arange(20) + 0.5) * reach / 20, counts, 0.1)
    least = int(errors.argmin())
    assert 0 < least < 99
    assert (np.diff(errors[: least + 1]) < 0).all()
    assert (np.diff(errors[least:]) > 0).all()


@pytest.mark.parametrize("weight", [0.05, 0.5, 4.0, 60.0])
def test_expected_error_is_within_a_grid_step_of_the_minimiser(weight):
    norms = torch.empty(500).log_normal_(1.0, 0.6, generator=torch.Generator().manual_seed(3))
    counts = histogram(norms, 20.0, 20).numpy()
    midpoints = np.arange(20) + 0.5

    def error(c: float) -> float:
        return weight * c * c + float(counts @ np.maximum(midpoints - c, 0) ** 2) / counts.sum()

    exact = optimize.minimize_scalar(error, bounds=(0, 20), method="bounded", options={"xatol": 1e-9}).x
    found, _ = after(ExpectedErrorThreshold(), norms, weight)
    assert abs(found - exact) < 0.5 * exact
    assert error(found) < 1.2 * error(exact)


@pytest.mark.parametrize("bins", [{5: 256}, {1: 128, 9: 128}, {2: 10, 3: 200, 17: 1}, {19: 256}])
def test_expected_error_clips_nothing_without_noise_and_everything_where_there_is_but_noise(bins):
    """2.5: C >= the largest occupied midpoint at K = 0, and M/(1 + K) -> 0, M the mean norm, once that is below all.

    The grid is that of twentieths: next to its inner end the step is half of the threshold. Rule P has no K.
    """
    norms, midpoint = norms_in(bins, 20.0), max(bins) + 0.5
    found, _ = after(ExpectedErrorThreshold(), norms, 0.0)
    assert midpoint <= found < 2 * midpoint
    mean = float(norms.mean())
    last = math.inf
    for weight in (40.0, 1e3, 1e5):
        found, _ = after(ExpectedErrorThreshold(), norms, weight)
        assert found == pytest.approx(mean / (1 + weight), rel=0.5)
        assert found < last
        last = found
    assert after(ExpectedErrorThreshold(), norms, 1e12)[0] == 20 * module.THRESHOLDS[0]  # the guard
    of_percentile = {after(PercentileThreshold(range=20.0), norms, weight) for weight in (0.0, 1.0, 1e12)}
    assert len(of_percentile) == 1


@pytest.mark.parametrize(
    ("bins", "reach"),
    [
        ({19: 50, 3: 50}, 40.0),
        ({19: 49, 3: 51}, 20.0),
        ({12: 5, 3: 95}, 10.0),
        ({12: 6, 3: 94}, 20.0),
        ({10: 6, 3: 94}, 20.0),  # the first bin of the upper half
        ({9: 6, 3: 94}, 10.0),
    ],
)
def test_the_range_of_expected_error_adapts_at_the_printed_shares(bins, reach):
    """T12: both comparisons are non-strict."""
    assert after(ExpectedErrorThreshold(), norms_in(bins, 20.0))[1] == reach


@pytest.mark.parametrize(("norm", "reach"), [(2.5, 5.0), (1.9, 2.5)])
def test_of_an_odd_number_of_bins_the_middle_one_belongs_to_the_upper_half(norm, reach):
    """Half of it lies beyond half of the range, so a range that was halved might not reach its norms."""
    assert after(ExpectedErrorThreshold(bins=5), torch.full((100,), norm))[1] == reach


@pytest.mark.parametrize(
    ("upper", "bins", "noise_of_bin"), [(26, 20, 5.0), (26, 20, 1.0), (38, 20, 8.0), (13, 100, 5.0)]
)
def test_the_range_of_expected_error_halves_by_chance_and_does_not_come_back(upper, bins, noise_of_bin):
    """Of norms of which most are near 0: findings/dc_sgd.md, on why σ_H matters to it on MNIST.

    Upper half minus a b-th of the total is normal, with n_u - n/b as mean and σ_H² b/2 ((1 - 1/b)² + 1/b²) as variance.
    4,000 draws with a fixed seed: a share is within five standard errors but with probability below 1e-6.
    """
    norms, draws = torch.tensor([0.1] * (256 - upper) + [19.9] * upper), 4000
    source, halved, doubled = noise(3), 0, 0
    for _ in range(draws):
        threshold = ExpectedErrorThreshold(bins=bins, histogram_noise=noise_of_bin)
        threshold.load_state_dict({**threshold.state_dict(), "range": 20.0})
        threshold.observe(norms)
        threshold.release(source, 1.0)
        halved, doubled = halved + (threshold._range == 10), doubled + (threshold._range == 40)
    share = 1 / bins
    deviation = noise_of_bin * math.sqrt(bins / 2 * ((1 - share) ** 2 + share**2))
    wanted = stats.norm.cdf((256 * share - upper) / deviation)
    assert halved / draws == pytest.approx(wanted, abs=5 * math.sqrt(max(wanted * (1 - wanted), 1 / draws) / draws))
    assert doubled == 0  # that takes half of the samples in the last bin


@pytest.mark.parametrize("scale", [1e-3, 7.0, 1e4])
def test_rules_are_equivariant_to_scale(scale):
    """T14, with the same noise."""
    norms = torch.rand(256, dtype=torch.float64, generator=torch.Generator().manual_seed(2)) * 3

    def moved(factor):
        one = PercentileThreshold(norm=factor, range=2.0 * factor)
        other = ExpectedErrorThreshold(norm=factor)
        other._range *= factor
        for threshold in (one, other):
            threshold.observe(norms * factor)
            threshold.release(noise(), 0.4)
        return [x for t in (one, other) for x in (t.value(1), t._range)]

    assert moved(scale) == pytest.approx([scale * x for x in moved(1.0)])


def test_without_noise_the_threshold_does_not_leave_the_norms_far_behind(monkeypatch):
    """dc_sgd.md 3.2-6: P by half a bin, E by a step of its last grid beyond the largest midpoint."""
    grids = []

    def watched(thresholds, *rest):
        grids.append(thresholds)
        return expected_error(thresholds, *rest)

    monkeypatch.setattr(module, "expected_error", watched)
    generator = torch.Generator().manual_seed(5)
    beyond = 0
    for seed in range(300):
        norms = torch.empty(60).log_normal_(0.0, 1.0, generator=generator)
        reach = float(torch.rand(1, generator=generator)) * 10 + 0.1
        one, other = PercentileThreshold(range=reach, quantile=0.1 + 0.8 * seed / 300), ExpectedErrorThreshold()
        other._range = reach
        assert after(one, norms)[0] <= float(norms.max()) + reach / 40
        found, _ = after(other, norms, 10.0 ** (seed % 6 - 5))
        assert found <= 39 * reach / 40 + grids[-1][0]
        beyond += found > 39 * reach / 40
    assert beyond > 0


# dc_sgd.md 3.2-3: b, σ_H: mean and standard deviation of the minimiser of Ê over 400 repeats.
FIGURE_3 = {
    (5, 0): (37.9, 0.4),
    (5, 5): (38.0, 0.8),
    (5, 10): (38.1, 1.5),
    (10, 0): (38.5, 0.4),
    (10, 5): (38.5, 1.2),
    (10, 10): (38.7, 2.2),
    (20, 0): (38.8, 0.4),
    (20, 5): (38.9, 1.5),
    (20, 10): (39.4, 3.3),
    (50, 0): (38.8, 0.4),
    (50, 5): (39.0, 2.3),
    (50, 10): (39.6, 5.6),
    (100, 0): (39.0, 0.4),
    (100, 5): (39.3, 3.7),
    (100, 10): (40.7, 8.7),
}
FIGURE_3_WEIGHT = 100_000 / 256**2


def figure_3_truth(threshold):
    """K C² + E max(n - C, 0)² for norms n of mean 100 and deviation 20."""
    above = (100 - threshold) / 20
    clipped = (20**2 + (100 - threshold) ** 2) * stats.norm.cdf(above) + 20 * (100 - threshold) * stats.norm.pdf(above)
    return FIGURE_3_WEIGHT * threshold**2 + clipped


# dc_sgd.md 3.2-3 at σ_H = 10: mean excess of the true error, 1 to 3 %, and the worst of 400, 75 %, which are of one
# simulation. Of 30 others here: 0.9 to 1.5 % and 18 to 92 % with 50 bins, 2.6 to 5.1 % and 65 to 240 % with 100.
FIGURE_3_EXCESS = {50: ((0.008, 0.017), (0.15, 1.1)), 100: ((0.022, 0.06), (0.6, 2.8))}


@pytest.mark.parametrize(("bins", "deviation"), FIGURE_3)
def test_the_simulation_of_figure_3_has_the_printed_spread(bins, deviation):
    """Both means of 400: 5 standard errors of their difference, and the printed digits. Few outliers of many bins."""
    generator = np.random.default_rng(0)
    thresholds, midpoints = np.arange(1, 1200) * 0.1, (np.arange(bins) + 0.5) * 120 / bins
    best = []
    for _ in range(400):
        counts = histogram(torch.from_numpy(generator.normal(100, 20, 256)), 120.0, bins).numpy()
        noisy = counts + deviation * generator.standard_normal(bins)
        best.append(thresholds[expected_error(thresholds, midpoints, noisy, FIGURE_3_WEIGHT).argmin()])
    mean, spread = FIGURE_3[bins, deviation]
    assert np.mean(best) == pytest.approx(mean, abs=5 * spread * math.sqrt(2 / 400) + 0.06)
    outliers = bins >= 50 and deviation == 10
    assert np.std(best) == pytest.approx(spread, abs=(0.4 if outliers else 0.2) * spread + 0.06)
    excess = figure_3_truth(np.array(best)) / figure_3_truth(39.59) - 1
    if bins <= 20:
        assert 2e-4 < excess.mean() < 6e-3
        assert excess.max() < 0.06
    if outliers:
        for value, (low, high) in zip((excess.mean(), excess.max()), FIGURE_3_EXCESS[bins], strict=True):
            assert low < value < high


def test_the_optimum_of_figure_3():
    optimum = 100 / (1 + FIGURE_3_WEIGHT)
    assert optimum == pytest.approx(39.59, abs=6e-3)
    assert figure_3_truth(optimum) == pytest.approx(6441, abs=0.6)


def quantiles_of_figure_2(bins, deviation, quantile):
    """Of rule P over 400 repeats of 256 norms N(100, 20²), less the quantiles of the samples and of the law."""
    generator, source = np.random.default_rng(0), noise()
    of_sample, of_law = [], []
    for _ in range(400):
        norms = generator.normal(100, 20, 256)
        threshold = PercentileThreshold(range=150.0, bins=bins, quantile=quantile, histogram_noise=deviation or 1.0)
        threshold.observe(torch.from_numpy(norms))
        threshold.release(source if deviation else None, 1.0)
        of_sample.append(threshold.value(1) - np.quantile(norms, quantile, method="inverted_cdf"))
        of_law.append(threshold.value(1) - stats.norm.ppf(quantile, 100, 20))
    return np.array(of_sample), np.array(of_law)


@pytest.mark.parametrize("bins", [10, 20, 50])
@pytest.mark.parametrize("quantile", [0.1, 0.5, 0.9])
def test_without_noise_the_quantile_of_figure_2_is_half_a_bin_off_at_most(bins, quantile):
    """dc_sgd.md 3.2-4."""
    of_sample, _ = quantiles_of_figure_2(bins, 0, quantile)
    assert np.abs(of_sample).max() <= 150 / (2 * bins) + 1e-9


@pytest.mark.parametrize(
    ("quantile", "lowest", "highest"), [(0.1, 8.6, 8.6), (0.3, 3, 4), (0.5, 3, 4), (0.7, 3, 4), (0.9, 4.7, 4.7)]
)
def test_the_noisy_quantile_of_figure_2_has_the_printed_spread(quantile, lowest, highest):
    """dc_sgd.md 3.2-4: b = 20, σ_H = 5. Both spreads are of simulations: 15 %, 3 standard errors of a ratio."""
    _, of_law = quantiles_of_figure_2(20, 5, quantile)
    assert 0.85 * lowest < np.std(of_law) < 1.15 * highest


def test_a_low_quantile_of_many_noisy_bins_fails_as_printed():
    """dc_sgd.md 3.2-4: b = 100, σ_H = 10, p = 0.1; the mean of 400 errors has a standard error of 1.7."""
    _, of_law = quantiles_of_figure_2(100, 10, 0.1)
    assert np.mean(of_law) == pytest.approx(-32, abs=7)


@pytest.mark.parametrize("make", [PercentileThreshold, ExpectedErrorThreshold])
def test_micro_batches_make_one_histogram(make):
    """T16."""
    norms = torch.rand(100, generator=torch.Generator().manual_seed(4)) * 30
    results = []
    for parts in (1, 2, 8):
        threshold = make()
        for part in norms.chunk(parts):
            threshold.observe(part)
        counts = tuple(threshold._counts.tolist())
        assert sum(counts) == 100
        threshold.release(noise(), 0.5)
        results.append((counts, threshold.value(1), threshold._range))
    assert len(set(results)) == 1


@pytest.mark.parametrize("make", [PercentileThreshold, ExpectedErrorThreshold])
def test_an_empty_batch_is_a_step(make):
    """T20; without a positive total nothing moves."""
    threshold = make()
    before = (threshold.value(0), threshold._range)
    threshold.release(None, 1.0)
    assert (threshold.value(1), threshold._range) == before
    for seed in range(50):
        threshold.release(noise(seed), 1.0)
        assert 0 < threshold.value(1) < 1e9


def test_noise_of_the_histogram_has_its_deviation_and_is_fresh(monkeypatch):
    """Mutant: a histogram released without noise is caught."""
    seen = []
    threshold = PercentileThreshold(histogram_noise=3.0, range=1.0)
    monkeypatch.setattr(threshold, "_update", lambda counts, weight: seen.append(counts.copy()))
    source = noise(6)
    for _ in range(400):
        threshold.observe(torch.full((10,), 0.5))
        threshold.release(source, 1.0)
    found = np.array(seen)
    expected = np.zeros(20)
    expected[10] = 10
    # 8000 normals: mean within 5 deviations, variance within 5 of its own, except with probability below 1e-6.
    assert abs((found - expected).mean()) < 5 * 3 / math.sqrt(8000)
    assert (found - expected).var() == pytest.approx(9, rel=5 * math.sqrt(2 / 8000))
    assert len(np.unique(found)) == 8000


# dc_sgd.md 2.9: the simulation that the guards were chosen by; N = 50,000, B = 256, lognormal norms.
@pytest.mark.parametrize("mean", [1e-3, 0.1, 1.0, 100.0, 1e4])
@pytest.mark.parametrize("weight", [0.31, 166.0])
def test_expected_error_settles_from_any_scale(mean, weight):
    generator = torch.Generator().manual_seed(11)
    spread = math.sqrt(math.log(1 + 0.36))
    seen, guarded = [], []

    class Watched(ExpectedErrorThreshold):
        def _update(self, counts, error_weight):
            low, high = (bound * self._range for bound in module.THRESHOLDS)
            empty = min(counts.sum(), counts @ module.midpoints(self._range, self.bins)) <= 0
            super()._update(counts, error_weight)
            if empty or not low < self._threshold < high:
                guarded.append(len(seen))

    threshold, source = Watched(), noise(12)
    for _ in range(600):
        size = int(torch.poisson(torch.tensor(256.0), generator=generator))
        norms = torch.empty(size).log_normal_(math.log(mean) - spread**2 / 2, spread, generator=generator)
        threshold.observe(norms)
        threshold.release(source, weight)
        seen.append((threshold.value(1), threshold._range))
    fired = threshold.guarded()
    assert fired.pop("passes_ended") == fired.pop("range_bounded") == 0
    assert sum(fired.values()) == len(guarded)
    late = np.median(np.array(seen[300:]), axis=0)
    assert late[0] == pytest.approx(mean / (1 + weight), rel=0.16)
    assert 1.2 * mean < late[1] < 2.5 * mean
    assert len(guarded) <= 5
    assert max(guarded, default=0) <= 30


NO_NORMS = torch.empty(0)
FULL_LAST_BIN = torch.full((9,), 1e9)


@pytest.mark.parametrize(
    ("threshold", "norms", "weight", "fired"),
    [
        (PercentileThreshold(), NO_NORMS, 1.0, {"total_not_positive"}),
        (PercentileThreshold(), torch.ones(9), 1.0, set()),
        (PercentileThreshold(norm=1e8), FULL_LAST_BIN, 1.0, {"range_bounded"}),
        (PercentileThreshold(norm=1e-8), torch.zeros(9), 1.0, {"range_bounded"}),
        (ExpectedErrorThreshold(), NO_NORMS, 1.0, {"total_not_positive"}),
        (ExpectedErrorThreshold(), torch.ones(9), 1.0, set()),
        (ExpectedErrorThreshold(), torch.ones(9), 1e8, {"threshold_bounded"}),  # C is about 1.5/K
        (ExpectedErrorThreshold(), torch.ones(9), 1e80, {"threshold_bounded", "passes_ended"}),
    ],
)
def test_each_guard_is_counted_when_it_fires(threshold, norms, weight, fired):
    """dc_sgd.md 2.9: log how often each guard fires."""
    after(threshold, norms, weight)
    assert {name for name, times in threshold.guarded().items() if times == 1} == fired
    assert sum(threshold.guarded().values()) == len(fired)


def test_a_negative_mean_fires_its_guard_alone():
    threshold = ExpectedErrorThreshold()
    threshold._update(np.array([9.0, *[0.0] * 18, -3.0]), 1.0)
    assert threshold.value(1) == 1.0
    assert threshold.guarded() == dict.fromkeys(threshold.guarded(), 0) | {"mean_not_positive": 1}


def test_guards_are_counted_on_after_a_checkpoint():
    one, other = PercentileThreshold(), PercentileThreshold()
    after(one, NO_NORMS, steps=2)
    other.load_state_dict(one.state_dict())
    after(one, NO_NORMS)
    assert (one.guarded()["total_not_positive"], other.guarded()["total_not_positive"]) == (3, 2)


def quantile(**settings) -> QuantileThreshold:
    threshold = QuantileThreshold(**settings)
    threshold.prepare(Course(steps=10, batch=100.0, rate=lambda step: 1.0))
    return threshold


def test_state_of_a_threshold_continues_it():
    for make in (PercentileThreshold, ExpectedErrorThreshold, lambda: quantile(norm=2.0)):
        one, other = make(), make()
        after(one, torch.rand(60) * 4, steps=3)
        other.load_state_dict(one.state_dict())
        assert after(one, torch.full((50,), 1.3)) == after(other, torch.full((50,), 1.3))


def test_quantile_follows_its_formula():
    threshold = quantile(norm=2.0, quantile=0.3, rate=0.25)
    threshold.observe(torch.tensor([1.0] * 60 + [2.0] * 10 + [5.0] * 20 + [math.inf] * 10))
    threshold.release(None, 1.0)
    assert threshold.value(1) == pytest.approx(2.0 * math.exp(-0.25 * (0.7 - 0.3)))


def test_quantile_counts_the_samples_of_all_micro_batches():
    found = []
    for parts in (1, 2, 5):
        threshold = quantile(norm=2.0)
        for part in torch.linspace(0, 3, 100).chunk(parts):
            threshold.observe(part)
        threshold.release(noise(), 1.0)
        found.append(threshold.value(1))
    assert found == [found[0]] * 3


@pytest.mark.parametrize(("norms", "end"), [(math.inf, 1e15), (0.0, 1e-15)])
def test_quantile_stays_within_what_factors_can_be_made_for(norms, end):
    """Whatever the rate: exp of 5e5 is no float."""
    for rate in (20.0, 1e6):
        threshold = quantile(rate=rate)
        assert after(threshold, torch.full((100,), norms), steps=9)[0] == end


def test_quantile_asks_for_the_batch_size_that_its_noise_is_for():
    with pytest.raises(RuntimeError, match="prepare"):
        _ = QuantileThreshold().beside


def test_quantile_of_a_batch_of_unexpected_size_is_centred():
    """130 samples of which all are unclipped: the centred sum is 65, not 130, over B = 100."""
    threshold = quantile(quantile=0.5, rate=1.0)
    threshold.observe(torch.zeros(130))
    threshold.release(None, 1.0)
    assert threshold.value(1) == pytest.approx(math.exp(-0.65))


def test_a_sample_moves_the_released_count_by_its_sensitivity():
    threshold = quantile(count_noise=0.05)
    (part,) = threshold.beside
    deviation = 0.05 * 100
    for norm in (0.1, 1.0, 7.0, math.inf):
        one = quantile(count_noise=0.05)
        one.observe(torch.tensor([norm]))
        assert abs(one._sum) / deviation == pytest.approx(1 / part.noise_multiplier)


def test_quantile_finds_the_quantile_of_stationary_norms():
    generator = torch.Generator().manual_seed(3)
    threshold, source, seen = quantile(norm=0.1, quantile=0.8), noise(1), []
    for _ in range(400):
        threshold.observe(torch.rand(100, generator=generator) * 10)
        threshold.release(source, 1.0)
        seen.append(threshold.value(1))
    assert np.mean(seen[200:]) == pytest.approx(8.0, rel=0.05)


@pytest.mark.parametrize("kind", [ExpectedErrorThreshold, PercentileThreshold])
def test_counts_with_secure_noise_are_multiples_of_a_grid(kind, monkeypatch):
    """Of those, each is what any other counts may give (`add_noise`); 4 is the power of two below the deviation."""
    released = []
    monkeypatch.setattr(kind, "_update", lambda self, counts, weight: released.append(counts))
    threshold = kind(histogram_noise=5.0)
    threshold.observe(torch.linspace(0, 20, 50))
    threshold.release(SecureGaussian(), 1.0)
    places = released[0] * GRID / 4
    assert np.array_equal(places, places.round())
    assert len(set(places)) == 20


def test_a_quantile_with_secure_noise_is_made_of_a_multiple_of_a_grid():
    """0.05 times a batch of 100 is a deviation of 5."""
    places = []
    for _ in range(20):
        threshold = quantile(norm=2.0, quantile=0.3, rate=0.25, count_noise=0.05)
        threshold.observe(torch.linspace(0, 4, 101))
        threshold.release(SecureGaussian(), 1.0)
        released = 100 * (0.3 - 0.5 - math.log(threshold.value(1) / 2.0) / 0.25)
        places.append(released * GRID / 4)
    np.testing.assert_allclose(places, np.round(places), rtol=0, atol=1e-4)
    assert len(set(np.round(places))) == 20


@pytest.mark.parametrize(
    "setting", ["histogram_noise=0", "bins=0", "bins=1000000000", "norm=-1", "quantile=0", "range=0"]
)
def test_impossible_settings_are_refused(setting):
    with pytest.raises(UserError, match=rf"threshold.{setting.split('=')[0]}=.*: expected"):
        composed("threshold=dcsgd_p", f"threshold.{setting}")


@pytest.mark.parametrize("algo", ["dcsgd_p", "dcsgd_e", "andrew"])
def test_a_run_releases_both_parts_and_spends_its_budget(algo):
    config = composed(f"algo={algo}", "eps=2", "epochs=3")
    found = budget(config)
    ledger = open_ledger(config, found.noise_multiplier)
    (run,) = ledger.plan.runs
    assert len(run.release.beside) == 1
    plain = budget(composed("algo=dpsgd", "eps=2", "epochs=3"))
    # T18: the total multiplier is what DP-SGD would have had.
    assert run.release.joint.noise_multiplier == pytest.approx(plain.noise_multiplier, rel=1e-3)
    assert found.noise_multiplier > plain.noise_multiplier


@pytest.mark.parametrize("noise", ["tree", "banded", "step_size schedule=sqrt_decay"])
def test_the_error_of_a_threshold_is_weighed_with_the_noise_that_it_will_have(noise):
    """dc_sgd.md 2.5: K of the step whose gradient is clipped at it; in the last step there is none to come."""
    sampled = [] if noise.startswith("step_size") else ["privacy=cyclic"]
    config = composed("algo=dcsgd_e", "model=linear", "epochs=1", *f"noise={noise}".split(), *sampled)
    step = assemble(config, torch.device("cpu"), 1.0, open_ledger(config, 1.0)).step
    weights, thresholds = [], []

    def release(source, error_weight):
        weights.append(error_weight)

    step.threshold.release = release
    stds = [step.noise_std(t, 1.0) for t in range(config.steps)]
    for _ in range(config.steps):
        thresholds.append(step.threshold.value(0))
        step([(torch.rand(5, 1, 8, 8), torch.arange(5))])
    d = len(step.gradients.flat)
    assert len(set(stds)) > 1
    assert weights == pytest.approx([d * std**2 for std in [*stds[1:], stds[-1]]])
    assert set(thresholds) == {1.0}


def test_norms_of_the_step_reach_the_threshold_once_and_unclipped():
    config = composed("algo=dcsgd_p", "model=linear")
    parts = assembled(config)
    seen = []
    parts.step.threshold.observe = lambda norms: seen.append(norms.clone())
    images, labels = torch.randn(12, 1, 8, 8, generator=torch.Generator().manual_seed(0)), torch.arange(12) % 10
    before = {name: parameter.detach().clone() for name, parameter in parts.model.named_parameters()}
    parts.step([(images[:5], labels[:5]), (images[5:], labels[5:])])
    assert sum(len(norms) for norms in seen) == 12
    gradients = torch.func.vmap(
        torch.func.grad(
            lambda p, x, y: torch.nn.functional.cross_entropy(
                torch.func.functional_call(parts.model, p, (x[None],)), y[None]
            )
        ),
        in_dims=(None, 0, 0),
    )({n: p.detach() for n, p in before.items()}, images, labels)
    want = torch.cat([g.flatten(1) for g in gradients.values()], 1).norm(dim=1)
    torch.testing.assert_close(torch.cat(seen), want)


def exact_passes(counts, reach, weight, threshold):
    """Rule E's threshold in units of the one before, and how often it searches, in rational numbers."""
    centres = [Fraction(2 * k + 1, 2) * reach / 20 for k in range(20)]
    total, reference = sum(counts), Fraction(1)
    for passes in range(1, 65):
        candidates = [i * reference / 10 for i in range(1, 21)]
        errors = [
            weight * (c * threshold) ** 2
            + sum(n * max(m - c * threshold, 0) ** 2 for n, m in zip(counts, centres, strict=True)) / total
            for c in candidates
        ]
        best = errors.index(min(errors))
        reference = candidates[best]
        if 0 < best < 19:
            return reference, passes
    raise AssertionError


def test_rule_e_goes_on_at_the_edge_of_its_grid_whatever_the_threshold_rounds_to(monkeypatch):
    """dc_sgd.md 2.8, 2.9-4: indices are compared. The released code compares (C/10) i with 0.1 C and 2 C.

    These differ by a rounding for a third and a seventh of all C, printed as 34 % and 14 %, where it stops too early.
    """
    draws, counted, searched_again = np.random.default_rng(0), [], 0
    monkeypatch.setattr(module, "expected_error", lambda *arguments: counted.append(1) or expected_error(*arguments))
    for _ in range(60):
        start = float(np.exp(draws.uniform(-3, 3)))
        counts = draws.integers(0, 40, 20)
        weight = float(np.exp(draws.uniform(-4, 4)))
        threshold = ExpectedErrorThreshold(norm=start)
        counted.clear()
        threshold._update(counts.astype(float), weight)
        want, passes = exact_passes([Fraction(int(n)) for n in counts], Fraction(20), Fraction(weight), Fraction(start))
        assert len(counted) == passes
        assert threshold.value(1) == pytest.approx(float(want) * start, rel=1e-12)
        searched_again += passes > 1
    assert searched_again > 20
    thresholds = np.exp(draws.uniform(-5, 5, 100_000))
    shares = [np.mean(thresholds / 10 != 0.1 * thresholds), np.mean(thresholds / 10 * 20 != 2 * thresholds)]
    assert shares == pytest.approx([0.34, 0.14], abs=0.02)


@pytest.mark.parametrize("multiplier", [0.3, 0.7, 1.0])
def test_the_count_of_andrew_takes_next_to_nothing_from_the_gradient(multiplier):
    """dc_sgd.md 4.3: σ_b = B/20 = 12.8, by 1/σ² = 1/σ_T² + 1/(2 σ_b)²: below 0.1 % of σ up to 1."""
    config = composed("algo=andrew", "batch_size=256")
    config.threshold.prepare(Course(10, 256.0, lambda _: 1.0))
    joint = Release(0.01, multiplier, config.threshold.beside).joint.noise_multiplier
    assert joint == pytest.approx((multiplier**-2 + (2 * 12.8) ** -2) ** -0.5, rel=1e-12)
    assert 0 < multiplier / joint - 1 < 1e-3
