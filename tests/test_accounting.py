"""eps of every sampling scheme and calibration of every accountant, against dp-accounting, Opacus and closed forms."""

import math
from itertools import combinations, product

import dp_accounting
import numpy as np
import pytest
from accounting_references import BESIDE, by_hand, equal_plan
from closed_form_references import composed_mu, gaussian_eps
from dp_accounting import NeighboringRelation
from dp_accounting.pld import PLDAccountant
from dp_accounting.rdp import RdpAccountant, compute_epsilon
from opacus.accountants import PRVAccountant
from opacus.accountants.analysis import rdp as opacus_rdp
from scipy.special import logsumexp

from dpbench.errors import UserError
from dpbench.privacy import Part, Plan, Release, accountants, calibrate, epsilon
from dpbench.privacy.accountants import (
    Account,
    discretisation,
    pass_multiplier,
    renyi_curve,
)
from dpbench.privacy.closed_forms import gaussian_delta
from dpbench.privacy.correlation import Tree
from dpbench.privacy.fixed_size import ORDERS, FixedSizeAccountant
from dpbench.privacy.sampling import CYCLIC, FIXED_SIZE, SCHEMES, SHUFFLED

DELTA = 1e-5
pytestmark = pytest.mark.usefixtures("quiet_accountants")


# Equal releases, Poisson sampling

GRID = list(product((0.001, 0.01, 0.1, 0.5), (1, 100, 2000, 40_000), (0.3, 0.7, 1.0, 3.0, 30.0)))
QUICK = [
    (0.001, 40_000, 1.0), (0.01, 2000, 0.7), (0.1, 100, 3.0), (0.5, 1, 30.0), (0.5, 2000, 30.0), (0.1, 1, 0.3),
    (0.01, 40_000, 0.3),
]  # fmt: skip
SETTINGS = [pytest.param(*s, marks=[] if s in QUICK else pytest.mark.slow) for s in GRID]


@pytest.mark.parametrize(("q", "steps", "z"), SETTINGS)
def test_renyi_of_poisson_sampling_against_dp_accounting_and_opacus(q, steps, z):
    accountant = RdpAccountant()
    expected = by_hand(accountant, [((q, z), steps)])
    found = epsilon(equal_plan(q, z, steps), DELTA, "rdp", eps_scale=1.0)
    assert found == pytest.approx(expected, rel=1e-12)
    orders = [float(a) for a, r in zip(accountant.orders, accountant.rdp, strict=True) if math.isfinite(r) and a < 128]
    divergences = opacus_rdp.compute_rdp(q=q, noise_multiplier=z, steps=steps, orders=orders)
    opacus = opacus_rdp.get_privacy_spent(orders=orders, rdp=divergences, delta=DELTA)[0]
    best = accountant.get_epsilon_and_optimal_order(DELTA)[1]
    # dp-accounting adds terms of alternating sign at broken orders as if all were positive; it has orders above 63.
    assert found <= opacus * (1 + 1e-6 if best >= 11 else 1.05 if opacus < 100 else 1.25)
    assert best >= 128 or found >= opacus * (1 - 1e-6)


@pytest.mark.parametrize(("q", "steps", "z"), SETTINGS)
def test_privacy_losses_of_poisson_sampling_against_finer_ones(q, steps, z):
    plan = equal_plan(q, z, steps)
    above = epsilon(plan, DELTA, "rdp", eps_scale=1.0)
    if above > 1000:
        pytest.skip("beyond any budget")
    found = epsilon(plan, DELTA, "pld", eps_scale=above)
    assert found <= above * (1 + 1e-6)
    finer = by_hand(PLDAccountant(value_discretization_interval=discretisation(above) / 8), [((q, z), steps)])
    # As `discretisation` says.
    assert finer * (1 - 1e-6) <= found <= 1.005 * finer + 2e-4


PRV_QUICK = [(0.01, 2000, 0.7), (0.001, 40_000, 1.0)]


@pytest.mark.parametrize(
    ("q", "steps", "z"),
    [
        pytest.param(*s, marks=[] if s in PRV_QUICK else pytest.mark.slow)
        for s in GRID
        if 0.3 < s[2] < 30 and s[1] > 1 and s[0] * math.sqrt(s[1]) < 10 * s[2]
    ],
)
def test_privacy_losses_of_poisson_sampling_against_opacus(q, steps, z):
    accountant = PRVAccountant()
    accountant.history = [(z, q, steps)]
    reference = accountant.get_epsilon(DELTA, eps_error=0.01, delta_error=DELTA / 1000)
    found = epsilon(equal_plan(q, z, steps), DELTA, "pld", eps_scale=max(reference, 0.05))
    # What it returns is above the true eps by at most twice its error.
    assert reference - 0.02 - 1e-3 * reference <= found <= reference + 1e-3 * reference


@pytest.mark.parametrize(("z", "steps"), [(0.5, 1), (3.0, 10), (30.0, 2000), (20.0, 40_000)])
def test_sampling_all_samples_is_the_gaussian_mechanism(z, steps):
    exact = gaussian_eps(math.sqrt(steps) / z, DELTA)
    found = epsilon(equal_plan(1.0, z, steps), DELTA, "pld", eps_scale=exact)
    assert exact * (1 - 1e-9) <= found <= exact * 1.001
    assert exact <= epsilon(equal_plan(1.0, z, steps), DELTA, "rdp", eps_scale=exact) <= exact * 1.3


# Fixed size


@pytest.mark.parametrize(
    ("q", "steps", "z"), [(0.001, 40_000, 3.0), (0.01, 2000, 2.0), (0.1, 100, 10.0), (0.5, 1, 1.0), (1 / 3, 7, 5.0)]
)
def test_fixed_size_against_dp_accounting(q, steps, z):
    """Whose differences have lost too many digits above order 20 or so; see test_fixed_size.py."""
    orders = [order for order in RdpAccountant().orders if order <= 20]
    accountant = RdpAccountant(orders, neighboring_relation=NeighboringRelation.REPLACE_ONE)
    # Noise of standard deviation z C, and a sum that moves by 2 C: the multiplier is z/2.
    gaussian = dp_accounting.GaussianDpEvent(z * 1.0 / 2.0)
    sampled = dp_accounting.SampledWithoutReplacementDpEvent(30_000, round(30_000 * q), gaussian)
    accountant.compose(sampled, steps)
    found = FixedSizeAccountant(orders).compose(equal_plan(q, z, steps, FIXED_SIZE))
    np.testing.assert_allclose(found.rdp, accountant.rdp, rtol=1e-6)
    assert epsilon(equal_plan(q, z, steps, FIXED_SIZE), DELTA, "rdp", eps_scale=1.0) <= found.get_epsilon(DELTA)


@pytest.mark.parametrize(("z", "steps"), [(1.0, 1), (10.0, 30), (30.0, 2000)])
def test_fixed_size_batches_of_all_samples_are_gaussians_of_twice_the_sensitivity(z, steps):
    found = epsilon(equal_plan(1.0, z, steps, FIXED_SIZE), DELTA, "rdp", eps_scale=1.0)
    orders = np.array(ORDERS)
    divergence = orders * steps * (2 / z) ** 2 / 2
    assert found == pytest.approx(compute_epsilon(orders, divergence, DELTA)[0], rel=1e-12)
    assert gaussian_eps(2 * math.sqrt(steps) / z, DELTA) <= found


def densities(values, batch, z, points):
    """Log density of the noisy sum of a random batch of one-dimensional values in [-1, 1]."""
    sums = [sum(chosen) for chosen in combinations(values, batch)]
    logs = [-((points - s) ** 2) / (2 * z * z) - math.log(z * math.sqrt(2 * math.pi)) for s in sums]
    return logsumexp(logs, axis=0) - math.log(len(sums))


# At the largest order 16 and z = 8, the integrand is centred within 16 * 2 + 4 and as wide as z.
POINTS = np.linspace(-120, 120, 12_001)
PAIRS = [(2, 1), (3, 1), (3, 2), (4, 3), (5, 2)]


def pairs_of_data(size):
    """The first sample goes from one end to the other; the rest is whatever makes that most visible."""
    for rest in product((-1.0, 0.0, 1.0), repeat=size - 1):
        if list(rest) == sorted(rest):
            yield (1.0, *rest), (-1.0, *rest)


def worst_divergence(size, batch, z, order):
    step = POINTS[1] - POINTS[0]
    worst = 0.0
    for one, two in pairs_of_data(size):
        p, q = densities(one, batch, z, POINTS), densities(two, batch, z, POINTS)
        for a, b in ((p, q), (q, p)):
            worst = max(worst, (logsumexp(order * a - (order - 1) * b) + math.log(step)) / (order - 1))
    return worst


def bound_on_divergence(size, batch, z, order):
    plan = Plan.of([Release(batch / size, z)], FIXED_SIZE)
    return float(FixedSizeAccountant([float(order)]).compose(plan).rdp[0])


@pytest.mark.parametrize(("size", "batch"), PAIRS)
@pytest.mark.parametrize("z", [1.0, 4.0])
def test_fixed_size_bounds_the_divergence_of_replacing_a_sample(size, batch, z):
    for order in (2, 5, 16):
        assert worst_divergence(size, batch, z, order) <= bound_on_divergence(size, batch, z, order) * (1 + 1e-6)


def test_with_the_sensitivity_of_adding_a_sample_fixed_size_would_be_no_bound(monkeypatch):
    monkeypatch.setitem(vars(FIXED_SIZE), "sensitivity", 1.0)
    broken = [
        (size, batch)
        for size, batch in PAIRS
        if worst_divergence(size, batch, 1.0, 16) > bound_on_divergence(size, batch, 1.0, 16)
    ]
    assert broken == PAIRS


@pytest.mark.parametrize(("size", "batch"), [(2, 1), (4, 3)])
@pytest.mark.parametrize("z", [1.0, 8.0])
def test_fixed_size_bounds_the_hockey_stick_of_replacing_a_sample(size, batch, z):
    found = epsilon(equal_plan(batch / size, z, 1, FIXED_SIZE), 1e-3, "rdp", eps_scale=1.0)
    for one, two in pairs_of_data(size):
        p, q = densities(one, batch, z, POINTS), densities(two, batch, z, POINTS)
        exceeding = np.exp(p) * -np.expm1(np.minimum(found + q - p, 0.0))
        assert float(exceeding.sum() * (POINTS[1] - POINTS[0])) <= 1e-3


# Passes


@pytest.mark.parametrize("scheme", [SHUFFLED, CYCLIC])
def test_passes_compose_exactly_with_the_least_noise_of_each(scheme):
    multipliers = [5.0, 3.0, 4.0, 6.0, 6.0, 6.0, 9.0, 2.5, 9.0, 7.0, 8.0]  # passes of three; the last is incomplete
    exact = gaussian_eps(composed_mu([3.0, 6.0, 2.5, 7.0]), DELTA)
    plan = Plan.of([Release(1 / 3, z) for z in multipliers], scheme, 3)
    assert epsilon(plan, DELTA, "gdp", eps_scale=1.0) == pytest.approx(exact, rel=1e-9)
    assert exact <= epsilon(plan, DELTA, "rdp", eps_scale=1.0) <= 1.3 * exact


@pytest.mark.parametrize(("z", "steps"), [(0.3, 7), (3.0, 10), (30.0, 40_000)])
def test_equal_passes_are_one_gaussian(z, steps):
    plan = equal_plan(0.1, z, steps, SHUFFLED)
    exact = gaussian_eps(math.sqrt(math.ceil(steps / 10)) / z, DELTA)
    assert epsilon(plan, DELTA, "gdp", eps_scale=1.0) == pytest.approx(exact, rel=1e-9)


def test_the_mean_multiplier_of_a_pass_would_spend_too_little(monkeypatch):
    def mean(plan):
        values = [run.release.noise_multiplier for run in plan.runs for _ in range(run.times)]
        passes = [values[i : i + plan.epoch] for i in range(0, len(values), plan.epoch)]
        return 1 / composed_mu([sum(each) / len(each) for each in passes])

    monkeypatch.setattr(accountants, "pass_multiplier", mean)
    with pytest.raises(AssertionError):
        test_passes_compose_exactly_with_the_least_noise_of_each(SHUFFLED)


def test_a_sample_that_takes_part_twice_in_a_pass_spends_more_than_is_charged():
    # Why the sampler of passes must be exact: each sample in both of two releases.
    charged = epsilon(equal_plan(0.5, 2.0, 2, SHUFFLED), DELTA, "gdp", eps_scale=1.0)
    assert gaussian_eps(composed_mu([2.0, 2.0]), DELTA) > 1.3 * charged


@pytest.mark.parametrize("name", SCHEMES)
def test_an_accountant_without_a_bound_for_the_scheme_is_refused(name):
    plan = equal_plan(0.1, 1.0, 3, SCHEMES[name])
    for accountant in {"pld", "rdp", "gdp"} - set(SCHEMES[name].accountants):
        with pytest.raises(ValueError, match=f"{accountant} gives no bound for {name} sampling"):
            epsilon(plan, DELTA, accountant, eps_scale=1.0)
    for accountant in SCHEMES[name].accountants:
        assert epsilon(plan.prefix(0), DELTA, accountant, eps_scale=1.0) == 0.0
        assert epsilon(plan.scaled(0.0), DELTA, accountant, eps_scale=1.0) == math.inf


# Calibration

TARGETS = [0.05, 1.0, 8.0, 100.0, 1000.0]
PLANS = {"poisson": (0.02, 300), "fixed_size": (0.02, 300), "shuffled": (0.1, 95), "cyclic": (0.1, 95)}
CASES = [(name, accountant) for name, scheme in SCHEMES.items() for accountant in scheme.accountants]
SLOW = {("poisson", "pld")}


@pytest.mark.parametrize(
    ("name", "accountant", "eps"),
    [
        pytest.param(*case, eps, marks=pytest.mark.slow if case in SLOW and eps not in (1.0, 1000.0) else [])
        for case in CASES
        for eps in TARGETS
    ],
)
def test_calibration_spends_the_target_and_no_more(name, accountant, eps):
    plan = equal_plan(*PLANS[name][:1], 1.0, PLANS[name][1], SCHEMES[name])
    found = calibrate(plan, eps, DELTA, accountant)
    assert 0.99 * eps <= found.eps <= eps
    spent = epsilon(plan.scaled(found.noise_multiplier), DELTA, accountant, eps_scale=eps)
    assert spent == pytest.approx(found.eps, rel=1e-12)


def test_calibration_of_passes_has_a_closed_form():
    for eps in TARGETS:
        z = calibrate(equal_plan(0.1, 1.0, 95, SHUFFLED), eps, DELTA, "gdp").noise_multiplier
        assert 0.99 * eps <= gaussian_eps(math.sqrt(10) / z, DELTA) <= eps * (1 + 1e-9)


# Parts beside


def test_a_joint_release_adds_inverse_squares():
    assert Release(0.1, 3.0, (Part("a", 4.0),)).joint == Release(0.1, 2.4)
    three = Release(0.1, 2.0, (Part("a", 3.0), Part("b", 6.0))).joint
    assert three.noise_multiplier == pytest.approx((1 / 4 + 1 / 9 + 1 / 36) ** -0.5, rel=1e-15)
    assert Release(0.1, 0.0, BESIDE).joint.noise_multiplier == 0
    assert Release(0.1, 1.0, (Part("a", 0.0),)).joint.noise_multiplier == 0
    assert Release(0.1, 1.0, (Part("a", 1e-200),)).joint.noise_multiplier == 0  # whose inverse square is no float
    assert Release(0.1, 1.0).joint == Release(0.1, 1.0)


@pytest.mark.parametrize("accountant", ["rdp", "pld"])
@pytest.mark.parametrize("noise", [0.0, 1e-8])
def test_what_is_beside_with_hardly_any_noise_leaves_nothing_private(accountant, noise):
    """However much noise the gradient has."""
    plan = Plan.of([Release(0.01, 1.0, (Part("a", noise),))] * 10)
    assert plan.smallest_multiplier == pytest.approx(noise)
    assert epsilon(plan, DELTA, accountant, eps_scale=1.0) == math.inf
    assert renyi_curve(plan, DELTA).eps(DELTA) == math.inf


# dc_sgd.md 2.7: joint sigma by Opacus' RDP accountant; (N, steps): {eps: sigma}, B = 256, delta = 1/N.
DC_SGD = {
    (60_000, 2350): {1: 1.129, 2: 0.842, 4: 0.668, 8: 0.544},
    (50_000, 3920): {2: 0.967, 4: 0.739, 8: 0.596},
    (73_257, 5740): {2: 0.893, 4: 0.699, 8: 0.570},
    (104_743, 2050): {2: 0.751, 4: 0.601, 8: 0.490},
}


def check_dc_sgd(size, steps, eps, sigma):
    q, delta = 256 / size, 1 / size
    plan = Plan.of([Release(q, 1.0, BESIDE)] * steps)
    of_gradient = calibrate(plan, eps, delta, "rdp").noise_multiplier
    assert of_gradient == pytest.approx((sigma**-2 - 5.0**-2) ** -0.5, abs=1.5e-3)
    assert by_hand(RdpAccountant(), [((q, sigma), steps)], delta) == pytest.approx(eps, rel=4e-3)


@pytest.mark.parametrize(("setting", "eps"), [(s, eps) for s in DC_SGD for eps in DC_SGD[s]])
def test_noise_beside_a_histogram_is_that_of_dc_sgd(setting, eps):
    check_dc_sgd(*setting, eps, DC_SGD[setting][eps])


@pytest.mark.parametrize(
    ("setting", "sigma", "short", "true"), [((50_000, 3920), 0.967, 1.92, 2.0), ((60_000, 2350), 1.129, 0.956, 1.0)]
)
def test_forgetting_the_histogram_reports_too_small_an_eps(setting, sigma, short, true):
    size, steps = setting
    of_gradient = (sigma**-2 - 5.0**-2) ** -0.5
    both = Plan.of([Release(256 / size, of_gradient, BESIDE)] * steps)
    alone = Plan.of([Release(256 / size, of_gradient)] * steps)
    assert epsilon(both, 1 / size, "rdp", eps_scale=1.0) == pytest.approx(true, abs=0.006)
    assert epsilon(alone, 1 / size, "rdp", eps_scale=1.0) == pytest.approx(short, abs=0.006)


def test_a_joint_release_that_ignores_what_is_beside_is_found(monkeypatch, tmp_path):
    monkeypatch.setenv("DPBENCH_CACHE", str(tmp_path))
    monkeypatch.setattr(Release, "joint", property(lambda self: Release(self.sampling_rate, self.noise_multiplier)))
    with pytest.raises(AssertionError):
        check_dc_sgd(60_000, 2350, 1, 1.129)
    with pytest.raises(AssertionError):
        test_a_joint_release_adds_inverse_squares()


# Accounts that grow


@pytest.mark.parametrize("accountant", ["rdp", "pld"])
def test_an_account_that_grows_is_the_account_from_scratch(accountant):
    releases = [Release(0.02, 1.0)] * 30 + [Release(0.02, 2.0)] * 50 + [Release(0.05, 2.0, BESIDE)] * 20
    plan = Plan.of(releases)
    growing = Account(plan, DELTA, accountant, eps_scale=1.0)
    for made in (0, 1, 7, 30, 31, 31, 79, 81, 100):
        scratch = epsilon(plan.prefix(made), DELTA, accountant, eps_scale=1.0)
        assert growing.epsilon(made) == pytest.approx(scratch, rel=1e-6, abs=1e-12)


@pytest.mark.parametrize("accountant", ["rdp", "gdp"])
@pytest.mark.parametrize("correlation", [None, Tree(restart=True)])
def test_an_account_of_passes_that_grows_is_the_account_from_scratch(accountant, correlation):
    plan = Plan.of([Release(0.25, 2.0 + t % 3) for t in range(11)], SHUFFLED, 4, correlation)
    growing = Account(plan, DELTA, accountant, eps_scale=1.0)
    for made in (0, 1, 4, 5, 8, 8, 11):
        assert growing.epsilon(made) == pytest.approx(
            epsilon(plan.prefix(made), DELTA, accountant, eps_scale=1.0), rel=1e-6
        )


def test_an_account_of_fixed_size_batches_that_grows_is_the_account_from_scratch():
    plan = Plan.of([Release(0.02, 1.0)] * 30 + [Release(0.02, 2.0)] * 50, FIXED_SIZE)
    growing = Account(plan, DELTA, "rdp", eps_scale=1.0)
    for made in (0, 1, 30, 70, 80):
        scratch = epsilon(plan.prefix(made), DELTA, "rdp", eps_scale=1.0)
        assert growing.epsilon(made) == pytest.approx(scratch, rel=1e-6)


def test_pass_multiplier_of_no_release_is_none():
    assert pass_multiplier(equal_plan(0.1, 1.0, 0, SHUFFLED)) == math.inf


def test_delta_by_the_closed_form_is_reached():
    z = calibrate(equal_plan(0.5, 1.0, 8, SHUFFLED), 3.0, DELTA, "gdp").noise_multiplier
    assert gaussian_delta(3.0, 2 / z) <= DELTA < gaussian_delta(2.99, 2 / z)


@pytest.mark.parametrize("scheme", ["shuffled", "cyclic"])
def test_a_plan_of_passes_has_no_longer_ones_than_its_sampling_rate_allows(scheme):
    """A sample would take part more often than the account has it."""
    releases = [Release(128 / 1000, 1.0)] * 20
    assert len(Plan.of(releases, SCHEMES[scheme], 8)) == 20
    with pytest.raises(UserError, match="epoch=9: expected at most the 8 releases in which all samples are used"):
        Plan.of(releases, SCHEMES[scheme], 9)
    assert 1 / (1 / 49) > 49  # by rounding, which is no further release
    with pytest.raises(UserError, match="epoch=50: expected at most the 49 releases"):
        Plan.of([Release(1 / 49, 1.0)] * 50, SCHEMES[scheme], 50)


@pytest.mark.parametrize("rate", [0.005, 1.0])
def test_two_accounts_of_gradient_and_histogram_are_not_that_of_their_joint_release(rate):
    """dc_sgd.md 2.7: RDP(q, σ_T) + RDP(q, σ_H) is that of the joint release only without subsampling."""
    steps = 3920 if rate < 1 else 4
    joint = epsilon(Plan.of([Release(rate, 1.2, (Part("h", 1.5),))] * steps), 1e-5, "rdp", eps_scale=1.0)
    apart = epsilon(Plan.of([Release(rate, 1.2), Release(rate, 1.5)] * steps), 1e-5, "rdp", eps_scale=1.0)
    if rate == 1:
        assert apart == pytest.approx(joint, rel=1e-6)
    else:
        assert apart < 0.97 * joint
