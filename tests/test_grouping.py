"""Plans of many different releases as plans of few: what that adds to eps, and their calibration."""

import math
from itertools import product

import numpy as np
import pytest
from accounting_references import BESIDE, by_hand
from adp_schedules import FACTORS, RATE
from dp_accounting.pld import PLDAccountant
from dp_accounting.rdp import RdpAccountant
from scipy.special import gammaln, logsumexp

from dpbench.privacy import Plan, Release, calibrate, epsilon
from dpbench.privacy.accountants import Account, NearbyOrders, coarse, event
from dpbench.privacy.fixed_size import FixedSizeAccountant
from dpbench.privacy.sampling import FIXED_SIZE, POISSON

DELTA = 1e-5
pytestmark = pytest.mark.usefixtures("quiet_accountants")


T = 11_760


def adp_plan(schedule, z, beside=(), steps=T):
    return Plan.of([Release(RATE, z * scale, beside) for scale in FACTORS[schedule](steps)])


def joint_multipliers(plan):
    """By the definition, 1/z^2 = 1/z_T^2 + 1/z_H^2."""
    return np.array(
        [
            (run.release.noise_multiplier**-2 + sum(p.noise_multiplier**-2 for p in run.release.beside)) ** -0.5
            for run in plan.runs
        ]
    )


# All that dp-accounting has above 10.9, which are the best here where eps is small.
LARGE_ORDERS = (*range(11, 64), 128, 256)


def renyi_eps(multipliers, times, rate=RATE, orders=range(2, 65)):
    """Eps by the formula of integer orders (Mironov, Talwar and Zhang 2019, section 3.3), over every release."""
    eps = []
    for order in orders:
        k = np.arange(order + 1)
        log_binomial = gammaln(order + 1) - gammaln(k + 1) - gammaln(order - k + 1)
        terms = log_binomial + k * math.log(rate) + (order - k) * math.log1p(-rate)
        each = logsumexp(terms + k * (k - 1) / 2 * multipliers[:, None] ** -2.0, axis=1) / (order - 1)
        total = float(times @ each)
        eps.append(total + math.log1p(-1 / order) - math.log(DELTA * order) / (order - 1))
    return min(eps)


@pytest.mark.parametrize("beside", [(), BESIDE], ids=["alone", "beside"])
@pytest.mark.parametrize(
    ("schedule", "z"),
    [
        ("i", 0.3),
        ("ii", 1.0),
        *(pytest.param(*s, marks=pytest.mark.slow) for s in (("i", 1.0), ("ii", 0.3), ("ii", 5.0))),
    ],
)
def test_a_coarse_plan_spends_a_little_more_by_the_renyi_sum_over_all_steps(schedule, z, beside):
    plan = adp_plan(schedule, z, beside)
    exact = renyi_eps(joint_multipliers(plan), np.array([run.times for run in plan.runs]))
    grouped = coarse(plan, DELTA)
    assert len(grouped) == T
    assert len(grouped.runs) < 150
    spent = renyi_eps(joint_multipliers(grouped), np.array([run.times for run in grouped.runs]))
    assert exact * (1 - 1e-9) <= spent < 1.015 * exact
    if z == 1.0:
        dense = renyi_eps(joint_multipliers(plan), np.ones(T), orders=LARGE_ORDERS)
        assert dense * (1 - 1e-9) <= epsilon(plan, DELTA, "rdp", eps_scale=1.0) < 1.015 * dense


@pytest.mark.parametrize(("schedule", "z"), [("ii", 0.34), ("ii", 0.19), ("i", 1.3), ("i", 0.8)])
def test_a_coarse_plan_adds_little_at_low_orders_where_noisy_releases_count(schedule, z):
    """By the closed form of order 2, log(1 + q² (exp(1/z²) - 1)), though eps is the smallest at a larger order."""
    plan = adp_plan(schedule, z)
    grouped = coarse(plan, DELTA)
    before, after = (
        sum(run.times * math.log1p(RATE**2 * math.expm1(run.release.noise_multiplier**-2)) for run in each.runs)
        for each in (plan, grouped)
    )
    assert before <= after < 1.021 * before
    assert len(grouped.runs) < 200


@pytest.mark.parametrize("scheme", [POISSON, FIXED_SIZE])
def test_a_coarse_plan_has_as_much_noise_or_less_in_every_release(scheme):
    plan = Plan.of([Release(q, z * 1.001**i) for q in (0.02, 0.05) for z in (0.5, 2.0) for i in range(200)], scheme)
    before, after = {}, {}
    for target, each in ((before, plan), (after, coarse(plan, DELTA))):
        for release, times in each.runs:
            target.setdefault(release.sampling_rate, []).extend([release.joint.noise_multiplier] * times)
    assert before.keys() == after.keys()
    for rate in before:
        assert all(np.array(sorted(after[rate])) <= np.array(sorted(before[rate])))
    assert len(coarse(plan, DELTA).runs) < 60


@pytest.mark.parametrize(
    ("rate", "lowest", "steps", "beside"),
    [
        (0.05, 0.8, 24, BESIDE),
        pytest.param(0.01, 0.5, 100, (), marks=pytest.mark.slow),
        pytest.param(0.05, 2.0, 100, BESIDE, marks=pytest.mark.slow),
    ],
)
def test_a_coarse_plan_spends_a_little_more_by_privacy_losses(rate, lowest, steps, beside):
    plan = Plan.of([Release(rate, lowest * (1 + t / steps), beside) for t in range(steps)])
    interval = 1e-3
    exact = by_hand(
        PLDAccountant(value_discretization_interval=interval), [((rate, z), 1) for z in joint_multipliers(plan)]
    )
    grouped = coarse(plan, DELTA)
    assert len(grouped.runs) < steps
    runs = [((run.release.sampling_rate, run.release.noise_multiplier), run.times) for run in grouped.runs]
    spent = by_hand(PLDAccountant(value_discretization_interval=interval), runs)
    assert exact * (1 - 1e-6) <= spent < 1.015 * exact
    assert epsilon(plan, DELTA, "pld", eps_scale=exact) == pytest.approx(spent, rel=2e-3)


@pytest.mark.slow
def test_a_coarse_plan_of_hundreds_of_steps_spends_a_little_more_by_privacy_losses():
    """Multipliers rounded to powers of 1.004, up and down: between the two is the truth."""
    multipliers = 0.315 * np.array(FACTORS["ii"](600))
    accounts = [
        [
            ((RATE, run.release.noise_multiplier), run.times)
            for run in coarse(adp_plan("ii", 0.315, steps=600), DELTA).runs
        ]
    ]
    for rounded in (np.ceil, np.floor):
        powers, times = np.unique(rounded(np.log(multipliers) / math.log(1.004)), return_counts=True)
        accounts.append([((RATE, 1.004**power), int(n)) for power, n in zip(powers, times, strict=True)])
    spent, low, high = (by_hand(PLDAccountant(value_discretization_interval=1e-3), account) for account in accounts)
    assert low < spent < 1.011 * (low + high) / 2


@pytest.mark.slow
@pytest.mark.parametrize(("schedule", "z"), [("i", 0.188), ("ii", 0.188), ("ii", 0.5)])
def test_a_coarse_plan_spends_a_little_more_by_dp_accounting_on_a_fine_grid(schedule, z):
    # Multipliers rounded to powers of 1.004, up and down: between the two is the truth.
    bounds = []
    for rounded in (np.ceil, np.floor):
        powers, times = np.unique(
            rounded(np.log(z * np.array(FACTORS[schedule](T))) / math.log(1.004)), return_counts=True
        )
        releases = [
            ((RATE, 1.004**power), int(n)) for power, n in zip(powers, times, strict=True) if 1.004**power < 1e4
        ]
        bounds.append(by_hand(RdpAccountant(), releases))
    found = epsilon(adp_plan(schedule, z), DELTA, "rdp", eps_scale=1.0)
    assert bounds[0] * (1 - 1e-6) <= found < 1.015 * bounds[1]


@pytest.mark.parametrize("scheme", [POISSON, FIXED_SIZE])
def test_the_orders_near_the_best_one_give_what_all_orders_give(scheme):
    plan = Plan.of([Release(0.1, 0.9 + 0.1 * t) for t in range(2)], scheme)
    nearby = NearbyOrders(DELTA)
    # The best order goes from the smallest to the largest, and back.
    for factor in (3.0, 0.1, 1000.0, 1.0):
        scaled = plan.scaled(factor)
        fixed = scheme == FIXED_SIZE
        whole = FixedSizeAccountant().compose(scaled) if fixed else RdpAccountant().compose(event(scaled))
        assert nearby.epsilon(scaled) == pytest.approx(whole.get_epsilon(DELTA), rel=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize(("schedule", "eps"), list(product(("i", "ii"), (1.0, 8.0))))
@pytest.mark.parametrize("accountant", ["rdp", "pld"])
def test_calibration_of_a_schedule_of_thousands_of_steps(schedule, eps, accountant):
    plan = adp_plan(schedule, 1.0)
    found = calibrate(plan, eps, DELTA, accountant)
    assert 0.99 * eps <= found.eps <= eps
    assert epsilon(plan.scaled(found.noise_multiplier), DELTA, accountant, eps_scale=eps) == found.eps


def test_calibration_of_different_releases_beside_a_part():
    plan = Plan.of([Release(0.01, (20 + t) ** 0.25, BESIDE) for t in range(500)])
    found = calibrate(plan, 2.0, DELTA, "rdp")
    assert 0.99 * 2 <= found.eps <= 2
    scaled = plan.scaled(found.noise_multiplier)
    assert 0.98 * 2 < renyi_eps(joint_multipliers(scaled), np.ones(500), 0.01) <= 2.01


def test_an_account_of_many_different_releases_never_spends_less_than_they_do():
    plan = adp_plan("ii", 1.0)
    growing = Account(plan, DELTA, "rdp", eps_scale=1.0)
    multipliers = joint_multipliers(plan)
    for made in (20, 1000, 6000, T):
        exact = renyi_eps(multipliers[:made], np.ones(made), orders=LARGE_ORDERS)
        assert exact * (1 - 1e-9) <= growing.epsilon(made) < (1.015 if made == T else 1.1) * exact
    assert growing.epsilon(T) == pytest.approx(epsilon(plan, DELTA, "rdp", eps_scale=1.0), rel=1e-6)
