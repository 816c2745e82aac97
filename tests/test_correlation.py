"""Sensitivity of correlated noise, by brute force over small matrices."""

from itertools import pairwise, product

import dp_accounting
import numpy as np
import pytest
from dp_accounting import NeighboringRelation
from dp_accounting.rdp import RdpAccountant
from scipy import stats

from dpbench.privacy import Plan, Release
from dpbench.privacy.accountants import epsilon, pass_multiplier
from dpbench.privacy.correlation import BandedSquareRoot, Tree
from dpbench.privacy.sampling import CYCLIC, FIXED_SIZE, POISSON, SHUFFLED

STRATEGIES = [Tree(), BandedSquareRoot(bands=1), BandedSquareRoot(bands=3), BandedSquareRoot(bands=20)]
# Steps and epoch: one pass, whole passes, incomplete ones, powers of two and others.
SHAPES = [(1, 1), (1, 4), (4, 1), (5, 5), (8, 4), (9, 4), (7, 3), (12, 5), (6, 2), (8, 8), (11, 4), (3, 7)]


def block(strategy, steps):
    """The strategy matrix of so many steps, without restart."""
    if isinstance(strategy, Tree):
        rows = []
        for level in range(10):
            for first in range(0, steps, 2 * 2**level):  # prefix sums are made of every other interval alone
                if first + 2**level <= steps:
                    rows.append([first <= step < first + 2**level for step in range(steps)])
        return np.array(rows, dtype=float)
    # Column and row of c_k = (-1)^k binom(-1/2, k), by the binomial distribution: binom(2k, k)/4^k.
    lags = np.subtract.outer(np.arange(steps), np.arange(steps))
    central = stats.binom.pmf(np.maximum(lags, 0), 2 * np.maximum(lags, 0), 0.5)
    return np.where((lags >= 0) & (lags < strategy.bands), central, 0.0)


def matrix(strategy, steps, epoch, restart):
    """The strategy matrix C of all steps."""
    lengths = [min(epoch, steps - first) for first in range(0, steps, epoch)] if restart else [steps]
    blocks = [block(strategy, length) for length in lengths]
    whole = np.zeros((sum(len(b) for b in blocks), steps))
    row = column = 0
    for each in blocks:
        whole[row : row + each.shape[0], column : column + each.shape[1]] = each
        row, column = row + each.shape[0], column + each.shape[1]
    return whole


def largest_square(matrix, patterns):
    """Max of the squared norm of C x over the patterns and all changes -1, 0 or 1 at each of their steps."""
    largest = 0.0
    for steps in patterns:
        changes = np.array(list(product((-1, 0, 1), repeat=len(steps)))).T
        largest = max(largest, float(((matrix[:, list(steps)] @ changes) ** 2).sum(0).max()))
    return largest


def cyclic(steps, epoch):
    """Where a sample takes part, for each position that it may have."""
    return [tuple(range(position, steps, epoch)) for position in range(min(epoch, steps))]


def reshuffled(steps, epoch):
    passes = [range(first, min(first + epoch, steps)) for first in range(0, steps, epoch)]
    return list(product(*passes))


@pytest.mark.parametrize("strategy", STRATEGIES, ids=repr)
@pytest.mark.parametrize(("steps", "epoch"), SHAPES)
def test_sensitivity_by_brute_force(strategy, steps, epoch):
    found = strategy.squared_sensitivity(steps, epoch)
    assert found == pytest.approx(
        largest_square(matrix(strategy, steps, epoch, False), cyclic(steps, epoch)), rel=1e-12
    )


@pytest.mark.parametrize("strategy", STRATEGIES, ids=repr)
@pytest.mark.parametrize(("steps", "epoch"), [(4, 1), (5, 5), (8, 4), (7, 3), (9, 4), (6, 2), (3, 7)])
def test_sensitivity_with_restart_holds_for_reshuffled_passes_too(strategy, steps, epoch):
    restarting = type(strategy)(**{**vars(strategy), "restart": True})
    found = restarting.squared_sensitivity(steps, epoch)
    whole = matrix(strategy, steps, epoch, True)
    assert found == pytest.approx(largest_square(whole, reshuffled(steps, epoch)), rel=1e-12)
    assert found >= largest_square(whole, cyclic(steps, epoch)) * (1 - 1e-12)


def test_directions_other_than_plus_and_minus_move_less():
    draw = np.random.default_rng(0)
    for strategy, (steps, epoch) in product(STRATEGIES, [(9, 3), (12, 5)]):
        whole = matrix(strategy, steps, epoch, False)
        for positions in cyclic(steps, epoch):
            changes = draw.normal(size=(50, len(positions), 3))
            changes /= np.linalg.norm(changes, axis=2, keepdims=True)
            moved = (np.einsum("rs,nsd->nrd", whole[:, list(positions)], changes) ** 2).sum((1, 2))
            assert moved.max() <= strategy.squared_sensitivity(steps, epoch) * (1 + 1e-12)


@pytest.mark.parametrize("strategy", STRATEGIES, ids=repr)
@pytest.mark.parametrize(("steps", "epoch"), [(8, 4), (7, 3), (5, 5)])
def test_noise_that_changes_is_accounted_for_as_if_all_of_it_were_the_least(strategy, steps, epoch):
    """Over its multipliers z, the release is C diag(1/z) x + N(0, I), which no change of a sample moves further."""
    z = np.random.default_rng(0).uniform(1.0, 3.0, steps)
    plan = Plan.of([Release(1 / epoch, float(each)) for each in z], CYCLIC, epoch, strategy)
    found = pass_multiplier(plan)
    moved = largest_square(matrix(strategy, steps, epoch, False) / z, cyclic(steps, epoch))
    assert 1 / found**2 >= moved * (1 - 1e-12)
    assert found == pytest.approx(z.min() / strategy.squared_sensitivity(steps, epoch) ** 0.5)


@pytest.mark.parametrize("strategy", [Tree(), BandedSquareRoot(bands=20)], ids=repr)
def test_reshuffled_passes_without_restart_are_refused_since_they_move_more(strategy):
    steps, epoch = 10, 5
    more = largest_square(matrix(strategy, steps, epoch, False), reshuffled(steps, epoch))
    assert more > 1.05 * strategy.squared_sensitivity(steps, epoch)
    releases = [Release(0.2, 1.0)] * steps
    with pytest.raises(ValueError, match="shuffled: no bound on where a sample takes part"):
        Plan.of(releases, SHUFFLED, epoch, strategy)
    for scheme in (POISSON, FIXED_SIZE):
        with pytest.raises(ValueError, match="no bound on where"):
            Plan.of(releases, scheme, 0, strategy)
    assert len(Plan.of(releases, SHUFFLED, epoch, type(strategy)(restart=True))) == steps


@pytest.mark.parametrize("steps", [1, 2, 3, 4, 7, 8, 9, 100, 1000, 1024])
def test_one_pass_of_the_tree_against_dp_accounting(steps):
    tree = Plan.of([Release(1 / steps, 1.7)] * steps, CYCLIC, steps, Tree())
    reference = RdpAccountant([2.0, 16.0], NeighboringRelation.REPLACE_SPECIAL)
    reference.compose(dp_accounting.SingleEpochTreeAggregationDpEvent(1.7, steps))
    ours = RdpAccountant([2.0, 16.0]).compose(dp_accounting.GaussianDpEvent(pass_multiplier(tree)))
    assert ours.rdp == pytest.approx(reference.rdp, rel=1e-12)


@pytest.mark.parametrize("steps", [1, 2, 7, 64])
def test_all_bands_are_the_square_root_of_the_prefix_sums(steps):
    coefficients = BandedSquareRoot(bands=steps).within(steps)
    root = np.array([[coefficients[i - j] if i >= j else 0.0 for j in range(steps)] for i in range(steps)])
    assert root @ root == pytest.approx(np.tril(np.ones((steps, steps))), abs=1e-13)


def test_one_band_is_independent_noise():
    releases = [Release(0.25, 1.3)] * 10
    independent = Plan.of(releases, CYCLIC, 4)
    one_band = Plan.of(releases, CYCLIC, 4, BandedSquareRoot(bands=1))
    assert pass_multiplier(one_band) == pytest.approx(pass_multiplier(independent), rel=1e-12)


@pytest.mark.parametrize("strategy", [Tree(), Tree(restart=True), BandedSquareRoot(bands=5)], ids=repr)
def test_eps_of_a_prefix_never_falls(strategy):
    plan = Plan.of([Release(0.25, 2.0)] * 13, CYCLIC, 4, strategy)
    spent = [epsilon(plan.prefix(made), 1e-5, "gdp", eps_scale=1.0) for made in range(14)]
    assert spent[0] == 0.0
    assert all(later >= earlier for earlier, later in pairwise(spent))


def test_what_is_released_beside_correlated_noise_is_covered():
    # C has an entry of at least 1 in each column, so the joint multiplier charges what is beside at least in full.
    for strategy, (steps, epoch) in product(STRATEGIES, SHAPES):
        assert strategy.squared_sensitivity(steps, epoch) >= -(-steps // epoch)


def test_long_runs_take_little_memory():
    # One position of 2,000 in 50 passes: a matrix of positions and steps would take gigabytes.
    assert Tree().squared_sensitivity(100_000, 2_000) > 50 * 11


@pytest.mark.parametrize("epoch", [1, 2, 3, 5])
@pytest.mark.parametrize("runs", [(1,), (2,), (4,), (6,), (7,), (3, 1), (1, 5, 1), (2, 2, 3)])
def test_every_pass_is_charged_for_its_least_noisy_release_wherever_runs_of_releases_end(epoch, runs):
    """Also for one that a run of equal releases just reaches."""
    each = [1.0 + number for number, times in enumerate(reversed(runs)) for _ in range(times)][::-1]
    plan = Plan.of([Release(1 / epoch, z) for z in each], CYCLIC, epoch)
    passes = [min(each[start : start + epoch]) for start in range(0, len(each), epoch)]
    assert pass_multiplier(plan) == pytest.approx(sum(z**-2 for z in passes) ** -0.5, rel=1e-12)
