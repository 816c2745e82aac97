"""DP-FTRL's noise against the matrices that it stands for, exactly: independent noise is replaced by unit vectors."""

import math
from copy import deepcopy
from itertools import product

import numpy as np
import pytest
import torch
from cli import only_record, read, read_metrics, run
from helpers import composed
from scipy import stats
from scipy.linalg import toeplitz
from scipy.special import binom

from dpbench.errors import UserError
from dpbench.noise import BandedNoise, TreeNoise
from dpbench.privacy import Ledger, Part, Plan, Release
from dpbench.privacy.accountants import pass_multiplier
from dpbench.privacy.correlation import BandedSquareRoot, Tree
from dpbench.privacy.gaussian import GaussianSource, SeededGaussian
from dpbench.privacy.sampling import CYCLIC, FIXED_SIZE, POISSON, SHUFFLED
from dpbench.stage import Course
from dpbench.training.assemble import assemble

STEPS, EPOCH = 21, 6
CASES = [
    TreeNoise(),
    TreeNoise(restart=True),
    BandedNoise(bands=1),
    BandedNoise(bands=3),
    BandedNoise(bands=5, restart=True),
    BandedNoise(bands=40),
]
MATRICES = [(5, 1), (8, 8), (8, 4), (7, 2), (11, 3), (16, 5), (21, 6)]


class UnitVectors(GaussianSource):
    """The t-th draw is the t-th unit vector, so that what is made of draws shows its weights."""

    def __init__(self):
        self.draws = 0

    def fill(self, out):
        out.zero_()[self.draws] = 1.0
        self.draws += 1
        return out


def prepared_for_passes(noise, steps=STEPS, epoch=EPOCH):
    noise = deepcopy(noise)
    noise.prepare(Course(steps, 10.0, lambda _: 1.0, epoch))
    return noise


def tree_matrix(steps):
    """C by its definition: a row for each complete interval [i 2^l, (i + 1) 2^l) with even i, in order of their ends.

    There are as many as steps, and intervals with odd i are in no prefix sum.
    """
    found = []
    for level in range(steps.bit_length()):
        for start in range(0, steps, 2 << level):
            if (end := start + (1 << level)) <= steps:
                found.append((end, start))
    rows = np.zeros((steps, steps))
    for row, (end, start) in zip(rows, sorted(found), strict=True):
        row[start:end] = 1
    return rows


def root_matrix(bands, steps):
    lags = np.arange(steps)
    with np.errstate(over="ignore"):
        column = np.where(lags < bands, binom(2 * lags, lags) / 4.0**lags, 0.0)
    return toeplitz(column, np.zeros(steps))


def strategy_of(noise, steps, epoch):
    def whole(n):
        return tree_matrix(n) if isinstance(noise, TreeNoise) else root_matrix(noise.bands, n)

    if not noise.restart:
        return whole(steps)
    matrix = np.zeros((steps, steps))
    for start in range(0, steps, epoch):
        end = min(start + epoch, steps)
        matrix[start:end, start:end] = whole(end - start)
    return matrix


def weights_of_draws(noise, steps=STEPS):
    """Rows of what is added at each step, as weights of the independent draws, float64."""
    source = UnitVectors()
    return np.stack([noise.draw(torch.empty(steps, dtype=torch.float64), source).numpy() for _ in range(steps)])


# The noise


@pytest.mark.parametrize("noise", CASES, ids=repr)
def test_what_is_added_is_the_inverse_of_the_strategy(noise):
    found = weights_of_draws(prepared_for_passes(noise))
    want = strategy_of(noise, STEPS, EPOCH)
    np.testing.assert_allclose(noise.correlation.strategy(STEPS, EPOCH), want, atol=1e-15)
    np.testing.assert_allclose(want @ found, np.eye(STEPS), atol=1e-12)


@pytest.mark.parametrize("noise", CASES, ids=repr)
def test_the_deviation_of_each_step_is_that_of_what_is_added(noise):
    stage = prepared_for_passes(noise)
    norms = np.linalg.norm(weights_of_draws(prepared_for_passes(noise)), axis=1)
    np.testing.assert_allclose([stage.deviation(t) for t in range(STEPS)], norms, rtol=1e-12)


@pytest.mark.parametrize("noise", CASES, ids=repr)
def test_noise_that_was_not_told_the_length_of_a_pass_is_not_drawn(noise):
    with pytest.raises(RuntimeError, match="prepare"):
        deepcopy(noise).draw(torch.empty(3), UnitVectors())


def test_a_prefix_sum_of_the_tree_has_the_noise_of_its_binary_digits():
    sums = np.cumsum(weights_of_draws(prepared_for_passes(TreeNoise())), axis=0)
    covariance = sums @ sums.T
    assert np.array_equal(np.diag(covariance), [t.bit_count() for t in range(1, STEPS + 1)])
    # Prefixes of 20 and 21 steps share the intervals [0, 16) and [16, 20).
    assert covariance[19, 20] == 2


def test_all_bands_are_the_square_root_of_prefix_sums():
    root = BandedSquareRoot(bands=STEPS).strategy(STEPS, EPOCH)
    np.testing.assert_allclose(root @ root, np.tril(np.ones((STEPS, STEPS))), atol=1e-12)


def test_bands_that_no_step_has_cost_nothing():
    """10^12 coefficients would take 8 TB."""
    endless, whole = (
        composed("algo=dp_ftrl_banded", f"noise.bands={bands}", "model=linear") for bands in (10**12, 10**4)
    )
    assert pass_multiplier(endless.release_plan()) == pass_multiplier(whole.release_plan())
    assert [endless.noise.deviation(t) for t in range(9)] == [whole.noise.deviation(t) for t in range(9)]


@pytest.mark.parametrize("overrides", [("noise=tree",), ("noise=tree", "noise.restart=true"), ("noise=banded",)])
def test_the_step_releases_prefix_sums_with_the_noise_of_the_matrix(overrides):
    """B C⁻¹ Z read off the iterates of the real step on empty batches, with Z of unit vectors."""
    config = composed("privacy=cyclic", "model=linear", "optim.lr=0.5", "clip=threshold", *overrides)
    steps, epoch, multiplier = 15, 6, 3.0
    plan = Plan.of([Release(config.sampling_rate, multiplier)] * steps, CYCLIC, epoch, config.noise.correlation)
    ledger = Ledger(plan, eps=1.0, delta=1e-5, accountant="gdp")
    step = assemble(config, torch.device("cpu"), multiplier, ledger).step
    step.noise_source = UnitVectors()
    step.gradients.flat.vector.zero_()
    found = []
    for _ in range(steps):
        step([])
        found.append(-step.gradients.flat.vector.double()[:steps] * config.batch_size / (0.5 * multiplier))
    want = np.tril(np.ones((steps, steps))) @ np.linalg.inv(strategy_of(config.noise, steps, epoch))
    np.testing.assert_allclose(torch.stack(found), want, atol=1e-5)


def test_the_tree_keeps_a_vector_for_each_digit_and_the_bands_one_for_each_but_one():
    tree, banded = prepared_for_passes(TreeNoise(), 300), prepared_for_passes(BandedNoise(bands=7), 300)
    source = SeededGaussian(torch.Generator().manual_seed(0))
    for t in range(1, 301):
        for stage in (tree, banded):
            stage.draw(torch.empty(2), source)
        assert len(tree.state_dict()["kept"]) == t.bit_count()
        assert len(banded.state_dict()["kept"]) == min(t, 6)


@pytest.mark.parametrize("noise", CASES, ids=repr)
def test_noise_continues_from_its_state_bit_for_bit(noise):
    generator = torch.Generator().manual_seed(0)
    whole, first, second = prepared_for_passes(noise), prepared_for_passes(noise), prepared_for_passes(noise)
    want = [whole.draw(torch.empty(5), SeededGaussian(generator)).clone() for _ in range(STEPS)]
    generator.manual_seed(0)
    for t in range(STEPS):
        if t == 11:
            second.load_state_dict(deepcopy(first.state_dict()))
        stage = first if t < 11 else second
        assert torch.equal(stage.draw(torch.empty(5), SeededGaussian(generator)), want[t])


# The account


def brute_force(matrix, epoch):
    """Largest ‖C x‖² over one sample's places, with terms of either sign, or none, at each."""
    steps = len(matrix)
    largest = 0.0
    for place in range(min(epoch, steps)):
        columns = matrix[:, place::epoch]
        for signs in product((-1, 0, 1), repeat=columns.shape[1]):
            largest = max(largest, float(np.sum((columns @ signs) ** 2)))
    return largest


@pytest.mark.parametrize(("steps", "epoch"), MATRICES)
@pytest.mark.parametrize("noise", CASES, ids=repr)
def test_the_sensitivity_is_the_largest_of_all_places_and_signs(noise, steps, epoch):
    want = brute_force(strategy_of(noise, steps, epoch), epoch)
    assert noise.correlation.squared_sensitivity(steps, epoch) == pytest.approx(want, rel=1e-12)


def exact_delta(mu, eps):
    """Delta of a Gaussian mechanism at eps (Balle and Wang 2018, theorem 8)."""
    cdf = stats.norm.cdf
    return cdf(mu / 2 - eps / mu) - math.exp(eps) * cdf(-mu / 2 - eps / mu)


@pytest.mark.parametrize("algo", ["dp_ftrl", "dp_ftrl_banded"])
def test_a_run_spends_what_the_exact_gaussian_mechanism_does(algo, tmp_path):
    outcome = run(tmp_path, f"algo={algo}", "eps=2", "epochs=3", "privacy.accountant=auto")
    assert outcome.code == 0
    record = only_record(tmp_path)
    summary, ledger = read(record, "summary.json"), read(record, "ledger.json")
    steps, epoch = 3 * 23, 23
    assert (summary["steps"], ledger["epoch"], ledger["accountant"]) == (steps, epoch, "gdp")
    matrix = strategy_of(composed(f"algo={algo}").noise, steps, epoch)
    sensitivity = max(np.linalg.norm(matrix[:, place::epoch].sum(1)) for place in range(epoch))
    assert exact_delta(sensitivity / summary["noise_multiplier"], summary["eps"]) == pytest.approx(1437**-1.1, rel=1e-4)
    assert 1.99 < summary["eps"] <= 2
    assert ledger["correlation"] == repr(composed(f"algo={algo}").noise.correlation)


def test_what_is_released_beside_correlated_sums_has_noise_of_its_own():
    """Per place: ‖C x‖²/z² of the sums, and 1/z_b² for each of the three passes."""
    plan = Plan.of([Release(0.5, 2.0, (Part("count", 5.0),))] * 6, CYCLIC, 2, BandedSquareRoot(bands=3))
    want = BandedSquareRoot(bands=3).squared_sensitivity(6, 2) / 4 + 3 / 25
    assert pass_multiplier(plan) == pytest.approx(want**-0.5)


@pytest.mark.usefixtures("shared_streams")
def test_one_band_is_dpsgd_with_the_same_noise_exactly(tmp_path):
    ends = []
    for overrides in (["noise=constant"], ["algo=dp_ftrl_banded", "noise.bands=1"]):
        folder = tmp_path / str(len(overrides))
        arguments = ["privacy=cyclic", "privacy.noise_multiplier=3", "epochs=2", "evaluation.every_steps=5"]
        assert run(folder, *arguments, *overrides).code == 0
        ends.append(read_metrics(only_record(folder)))
    assert len(ends[0]) == 10
    for independent, one_band in zip(*ends, strict=True):
        assert [independent[k] for k in ("train_loss", "test_loss")] == [
            one_band[k] for k in ("train_loss", "test_loss")
        ]
        assert independent["eps"] == pytest.approx(one_band["eps"], rel=1e-12)


# What goes together


@pytest.mark.parametrize(
    ("scheme", "restart"),
    [(POISSON, False), (POISSON, True), (FIXED_SIZE, False), (FIXED_SIZE, True), (SHUFFLED, False)],
)
def test_samplers_that_do_not_say_when_a_sample_takes_part_are_refused(scheme, restart):
    with pytest.raises(UserError, match=r"privacy\.sampler=.*use privacy=cyclic"):
        composed("algo=dp_ftrl", f"noise.restart={str(restart).lower()}", f"privacy={scheme.name}")
    with pytest.raises(ValueError, match=scheme.name):
        Plan.of([Release(0.5, 1.0)] * 4, scheme, 2, Tree(restart=restart))


def test_a_restart_in_each_pass_lets_passes_be_shuffled():
    plan = composed("algo=dp_ftrl", "privacy=shuffled", "epochs=3").release_plan()
    # Three passes of six steps; the first sample of a pass is in intervals of one, two and four steps.
    assert pass_multiplier(plan) == pytest.approx((3 * 3) ** -0.5)


def test_less_than_one_band_is_refused():
    with pytest.raises(UserError, match=r"^noise\.bands=0: expected a whole number >= 1"):
        composed("algo=dp_ftrl_banded", "noise.bands=0")


def test_the_variance_that_an_optimizer_takes_out_is_that_of_the_step():
    config = composed("algo=dpadambc", "noise=tree", "privacy=cyclic", "model=linear", "epochs=2")
    steps = config.steps
    ledger = Ledger(config.release_plan().scaled(2.0), eps=1.0, delta=1e-5, accountant="gdp")
    step = assemble(config, torch.device("cpu"), 2.0, ledger).step
    told = []
    for _ in range(steps):
        step([])
        told.append(step.optimizer.param_groups[0]["noise_std"] * config.batch_size / 2.0)
    np.testing.assert_allclose(told, np.linalg.norm(np.linalg.inv(tree_matrix(steps)), axis=1), rtol=1e-12)


def test_noise_that_forgets_what_it_replaces_is_not_the_inverse(monkeypatch):
    """The tests above would see it."""
    monkeypatch.setattr(TreeNoise, "_correlate", lambda self, fresh, step: fresh)
    assert not np.allclose(tree_matrix(STEPS) @ weights_of_draws(prepared_for_passes(TreeNoise())), np.eye(STEPS))
