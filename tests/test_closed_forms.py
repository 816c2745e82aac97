import math
from dataclasses import replace
from functools import cache

import dp_accounting
import mpmath
import numpy as np
import pytest
import scipy
from adp_schedules import FACTORS, RATE
from closed_form_references import (
    Guarantee,
    classical_eps,
    composed_heterogeneously,
    composed_mu,
    gaussian_eps,
    gaussian_mu,
    subsampled,
)
from dp_accounting.gaussian_mechanism import get_epsilon_gaussian, get_sigma_gaussian
from dp_accounting.pld import PLDAccountant
from dp_accounting.rdp import RdpAccountant, compute_epsilon
from opacus.accountants.analysis.rdp import compute_rdp

from dpbench.errors import UserError
from dpbench.privacy.accountants import gaussian_epsilon
from dpbench.privacy.adp_theorem import AdpTheorem
from dpbench.privacy.closed_forms import approximate_clt_mu, gaussian_delta, gaussian_log_delta

# The Gaussian mechanism


def by_quadrature(eps, mu):
    """Delta from its definition, the integral of max(p - exp(eps) q, 0) for N(mu, 1) against N(0, 1); 40 digits."""
    with mpmath.workdps(40):
        eps, mu = mpmath.mpf(eps), mpmath.mpf(mu)
        start = eps / mu + mu / 2  # where both densities, one scaled by exp(eps), are equal

        def excess(x):
            return mpmath.npdf(x, mu) * -mpmath.expm1(eps + mu * (mu / 2 - x))

        width = 1 / (1 + abs(start - mu))
        return mpmath.quad(excess, [start, *(start + width * 4**k for k in range(8)), max(start, mu) + 40])


@pytest.mark.parametrize("eps", [0.001, 0.1, 1.0, 10.0, 1000.0])
@pytest.mark.parametrize("delta", [1e-30, 1e-15, 1e-5, 0.3])
def test_exact_gaussian_against_quadrature(eps, delta):
    mu = gaussian_mu(eps, delta)
    reference = by_quadrature(eps, mu)
    assert abs(gaussian_delta(eps, mu) / reference - 1) < 1e-9
    assert abs(reference / delta - 1) < 1e-9
    assert gaussian_eps(mu, delta) == pytest.approx(eps, rel=1e-10)


def test_exact_gaussian_where_delta_underflows():
    with mpmath.workdps(60):
        reference = mpmath.log(mpmath.ncdf(mpmath.mpf(-49.5)) - mpmath.exp(50) * mpmath.ncdf(mpmath.mpf(-50.5)))
    assert gaussian_log_delta(50.0, 1.0) == pytest.approx(float(reference), rel=1e-13)
    assert gaussian_log_delta(1000.0, 1.0) < math.log(5e-324)
    assert gaussian_delta(1000.0, 1.0) == 0.0


@pytest.mark.parametrize("delta", [1e-10, 1e-5, 0.1])
@pytest.mark.parametrize("mu", [0.1, 1.0, 20.0])
def test_exact_gaussian_against_dp_accounting(mu, delta):
    eps = gaussian_eps(mu, delta)
    assert eps == pytest.approx(get_epsilon_gaussian(1 / mu, delta), rel=1e-8, abs=1e-11)
    if eps > 0:
        assert 1 / gaussian_mu(eps, delta) == pytest.approx(get_sigma_gaussian(eps, delta), rel=1e-8)


def test_exact_gaussian_at_its_ends():
    assert gaussian_delta(0.0, 1.0) == pytest.approx(math.erf(1 / math.sqrt(8)), rel=1e-14)  # total variation
    assert gaussian_mu(0.0, 1e-30) == pytest.approx(1e-30 * math.sqrt(2 * math.pi), rel=1e-12)
    assert gaussian_eps(1e-6, 0.1) == 0.0
    assert gaussian_eps(0.0, 1e-5) == 0.0


@pytest.mark.parametrize("delta", [1e-30, 1e-5, 0.5])
def test_the_program_takes_the_exact_eps_wherever_something_is_private(delta):
    for mu in 10.0 ** np.arange(-8, 7):
        assert gaussian_epsilon(1 / mu, delta) == pytest.approx(gaussian_eps(mu, delta), rel=1e-8, abs=1e-11)
    assert gaussian_epsilon(9e-7, delta) == math.inf
    assert gaussian_epsilon(math.inf, delta) == 0


@pytest.mark.parametrize("mu", [1e8, 9e11, 1.1e12, 1e86])
def test_the_eps_of_next_to_no_noise_is_that_of_its_tail(mu):
    """The other one of the two tails, weighed with exp(eps), is less than 1/mu of it."""
    expected = mu * (mu / 2 - scipy.special.ndtri(1e-6))
    assert gaussian_eps(mu, 1e-6) == pytest.approx(expected, rel=1e-11)
    assert gaussian_delta(1.0, 0.0) == 0.0
    assert gaussian_delta(1.0, math.inf) == 1.0
    assert gaussian_delta(math.inf, 1.0) == 0.0
    assert gaussian_log_delta(1.0, 8.0) == pytest.approx(float(mpmath.log(by_quadrature(1.0, 8.0))), rel=1e-9, abs=0)


@pytest.mark.parametrize("delta", [1e-10, 1e-5, 0.05])
@pytest.mark.parametrize("eps", [0.1, 1.0, 8.0, 100.0])
def test_exact_gaussian_needs_no_more_noise_than_the_closed_bound(eps, delta):
    """doppler.md 2.11: sqrt(2 ln(1/(2 delta)))/eps + 1/sqrt(2 eps), for delta <= 0.05."""
    bound = math.sqrt(2 * math.log(1 / (2 * delta))) / eps + 1 / math.sqrt(2 * eps)
    assert gaussian_delta(eps, 1 / bound) <= delta < gaussian_delta(eps, 1 / (0.15 * bound))


def test_classical_bound():
    # adp.md, U2
    assert classical_eps(1.0, 1e-5).eps == pytest.approx(4.844805, abs=5e-7)
    assert not classical_eps(1.0, 1e-5).valid
    for delta in (1e-12, 1e-5, 0.1):
        for mu in (1e-3, 0.05, 0.2, 0.4):
            bound = classical_eps(mu, delta)
            if bound.valid:
                assert gaussian_delta(bound.eps, mu) < delta
    # Far beyond, what it says is false.
    assert gaussian_delta(classical_eps(100.0, 1e-5).eps, 100.0) > 1e-5


def test_composition_of_gaussians():
    multipliers = [0.8, 1.0, 2.5, 2.5, 40.0]
    event = dp_accounting.ComposedDpEvent([dp_accounting.GaussianDpEvent(z) for z in multipliers])
    reference = PLDAccountant(value_discretization_interval=1e-4).compose(event).get_epsilon(1e-6)
    eps = gaussian_eps(composed_mu(multipliers), 1e-6)
    assert eps <= reference <= eps * 1.001
    assert composed_mu([2.0] * 100) == pytest.approx(5.0, rel=1e-14)
    assert composed_mu([]) == 0.0
    assert composed_mu([math.inf, 0.5]) == 2.0


def test_central_limit_is_no_bound():
    # Many steps: near the true eps, but below it.
    rate, z, steps, delta, interval = 0.01, 1.0, 1000, 1e-5, 2e-5
    sampled = dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(z))
    accountant = PLDAccountant(value_discretization_interval=interval)
    rounded = accountant.compose(dp_accounting.SelfComposedDpEvent(sampled, steps)).get_epsilon(delta)
    truth = rounded - steps * interval  # or more: each step's loss was rounded up by at most the interval
    mu = approximate_clt_mu(rate, z, steps)
    assert mu == pytest.approx(0.01 * math.sqrt(1000 * (math.e - 1)), rel=1e-14)
    assert 0.7 * truth < gaussian_eps(mu, delta) < truth


# Subsampling and composition, with which the conditions of ADP's theorem are compared below


def test_subsampling_is_sharp():
    # Randomised response on whether one sample is in the batch: its law without and with that sample.
    rate, eps = 0.2, 1.5
    honest = math.exp(eps) / (1 + math.exp(eps))
    without, with_it = 1 - honest, rate * honest + (1 - rate) * (1 - honest)
    assert subsampled(Guarantee(eps, 0.0), rate).eps == pytest.approx(math.log(with_it / without))


def test_heterogeneous_composition():
    # adp.md, U1
    equal = composed_heterogeneously([Guarantee(0.1, 1e-7)] * 100, 1e-5)
    assert equal.eps == pytest.approx(5.29811, abs=5e-6)
    assert equal.delta == pytest.approx(1.99999505e-5, abs=5e-14)
    classical = 0.1 * math.sqrt(2 * 100 * math.log(1e5)) + 100 * 0.1 * (math.exp(0.1) - 1) / (math.exp(0.1) + 1)
    assert equal.eps == pytest.approx(classical, rel=1e-14)
    ramp = composed_heterogeneously([Guarantee(i / 1000, 0.0) for i in range(1, 101)], 1e-5)
    assert ramp.eps == pytest.approx(2.96029, abs=5e-6)
    assert ramp.delta == pytest.approx(1e-5)


def test_heterogeneous_composition_bounds_randomised_response():
    # The exact loss of many randomised responses, by dp-accounting, which composition attains no more than.
    losses = [0.05 + 0.01 * i for i in range(30)]
    event = dp_accounting.ComposedDpEvent(
        [dp_accounting.RandomizedResponseDpEvent(2 / (1 + math.exp(eps)), 2) for eps in losses]
    )
    replace = dp_accounting.NeighboringRelation.REPLACE_ONE
    exact = PLDAccountant(replace, value_discretization_interval=1e-4).compose(event).get_epsilon(1e-6)
    bound = composed_heterogeneously([Guarantee(eps, 0.0) for eps in losses], 1e-6).eps
    assert 0.5 * bound < exact <= bound


# ADP's calibration theorem

DELTA = 1e-5


@cache
def theorem(schedule, steps, batch_size=256):
    return AdpTheorem(FACTORS[schedule](steps), 50_000, batch_size, DELTA)


# adp.md 2.6: (T, schedule): B with m, B with m = 1, sum of 1/alpha^2, K with m, K with m = 1.
CONSTANTS = {
    (11_700, "dp"): "215.6885 150.6099 11700 0.031771 0.026549",
    (11_760, "dp"): "215.7485 150.6699 11760 0.031857 0.026622",
    (11_760, "i"): "215.7485 150.6699 392.050 0.0058167 0.0048609",
    (11_760, "ii"): "215.7485 150.6699 208.235 0.0042392 0.0035426",
    (23_520, "dp"): "223.8834 158.8048 23520 0.045894 0.038653",
    (23_520, "i"): "223.8834 158.8048 784.050 0.0083794 0.0070572",
    (23_520, "ii"): "223.8834 158.8048 298.020 0.0051661 0.0043510",
    (39_200, "dp"): "229.8784 164.7999 39200 0.060037 0.050834",
    (39_200, "i"): "229.8784 164.7999 1306.717 0.0109615 0.0092811",
    (39_200, "ii"): "229.8784 164.7999 387.246 0.0059672 0.0050525",
}
# C: sum of 1/alpha^2, K, first and last noise over DP-SGD's; alpha_t = (20 + t C)^(1/4), t = 1..11,700.
ADAPTIVE = {
    1e-5: "2612.384 0.0150128 0.9993 1.0007",
    1e-4: "2579.014 0.0149166 0.9929 1.0071",
    1e-3: "2316.256 0.0141363 0.9409 1.0558",
    1e-2: "1446.444 0.0111711 0.7437 1.2029",
    1e-1: "600.388 0.0071971 0.4796 1.3305",
    1.0: "207.467 0.0042308 0.2851 1.3855",
}


def prints_as(value, printed):
    """Whether the value, rounded to as many digits, is the printed one."""
    return f"{value:.{len(printed.partition('.')[2])}f}" == printed


@pytest.mark.parametrize("setting", CONSTANTS)
def test_calibration_constants(setting):
    steps, schedule = setting
    with_batch, without = theorem(schedule, steps), theorem(schedule, steps, batch_size=1)
    values = [
        with_batch.log_factor,
        without.log_factor,
        with_batch.inverse_squares(),
        with_batch.constant,
        without.constant,
    ]
    for value, printed in zip(values, CONSTANTS[setting].split(), strict=True):
        assert prints_as(value, printed)


@pytest.mark.parametrize("growth", ADAPTIVE)
def test_calibration_constants_of_adaptive_steps(growth):
    factors = tuple((20 + t * growth) ** 0.25 for t in range(1, 11_701))
    adp, dp = AdpTheorem(factors, 50_000, 256, DELTA), theorem("dp", 11_700)
    ends = (factors[0] * adp.constant / dp.constant, factors[-1] * adp.constant / dp.constant)
    for value, printed in zip((adp.inverse_squares(), adp.constant, *ends), ADAPTIVE[growth].split(), strict=True):
        assert prints_as(value, printed)


def test_small_calibration():
    # adp.md, U9
    steps = tuple(map(math.sqrt, (1, 2, 4, 8)))
    adp, dp = (AdpTheorem(factors, 1000, 10, DELTA) for factors in (steps, (1.0,) * 4))
    assert prints_as(adp.log_factor, "129.87883")
    assert prints_as(dp.noise_multiplier(1.0) / 10, "0.364686")  # sigma = G z/m
    noise = [alpha * adp.noise_multiplier(1.0) / 10 for alpha in steps]
    for value, printed in zip(noise, ["0.249683", "0.353106", "0.499367", "0.706212"], strict=True):
        assert prints_as(value, printed)
    for batch, main_text in ((1, False), (10, True)):
        adp, dp = (AdpTheorem(factors, 1000, batch, DELTA, main_text) for factors in (steps, (1.0,) * 4))
        assert prints_as(adp.log_factor, "102.85553")
        assert prints_as(dp.noise_multiplier(1.0) / batch, "0.324537")
        assert prints_as(adp.noise_multiplier(1.0) / batch, "0.222195")


def test_noise_multipliers_of_dp_sgd():
    # adp.md 2.6: z times the normalised budget.
    for steps, with_batch, without in (
        (11_760, "8.155", "6.815"),
        (23_520, "11.749", "9.895"),
        (39_200, "15.370", "13.013"),
    ):
        assert prints_as(theorem("dp", steps).noise_multiplier(16.0), with_batch)
        assert prints_as(256 * theorem("dp", steps, batch_size=1).noise_multiplier(16.0), without)
    # Printed is 6.784, from the rounded K; it is 6.78348.
    for steps, first in ((11_760, "4.709"), (23_520, "6.783"), (39_200, "8.874")):
        adp = theorem("i", steps)
        assert prints_as(adp.factors[0] * adp.noise_multiplier(16.0), first)
        assert adp.factors[-1] > 100 * adp.factors[0]
    for steps, first, last in ((11_760, "2.295", "11.31"), (23_520, "2.797", "16.38"), (39_200, "3.231", "21.50")):
        adp = theorem("ii", steps)
        z = adp.noise_multiplier(16.0)
        assert prints_as(adp.factors[0] * z, first)
        assert prints_as(adp.factors[-1] * z, last)


def test_scale_of_the_factors_does_not_matter():
    # adp.md, U3
    adp = theorem("ii", 11_760)
    scaled = AdpTheorem(tuple(3.7 * alpha for alpha in adp.factors), 50_000, 256, DELTA)
    assert 3.7 * scaled.noise_multiplier(2.0) == pytest.approx(adp.noise_multiplier(2.0), rel=1e-12)
    assert scaled.largest_step_eps(2.0) == pytest.approx(adp.largest_step_eps(2.0), rel=1e-12)


def test_eps_spent_on_the_way():
    # adp.md 2.6: after a tenth of the steps.
    for schedule, share in (("dp", "0.32"), ("ii", "0.54")):
        adp = theorem(schedule, 11_760)
        z = adp.noise_multiplier(12.8)
        assert adp.spent(z) == pytest.approx(12.8, rel=1e-12)
        assert prints_as(adp.spent(z, 1176) / 12.8, share)
        assert adp.spent(z, 0) == 0.0


def test_side_conditions():
    # adp.md, A1: the largest eps of a step over the normalised budget, and where it is at most 1.
    for steps, largest in ((11_760, "1.49 2.57 5.28"), (23_520, "1.05 1.82 4.41"), (39_200, "0.81 1.41 3.87")):
        for schedule, printed in zip(FACTORS, largest.split(), strict=True):
            assert prints_as(theorem(schedule, steps).largest_step_eps(16.0), printed)
    stated, certified = set(), set()
    for steps in (11_760, 23_520, 39_200):
        for schedule in FACTORS:
            for budget in (0.8, 1.2, 1.6, 3.2, 6.4):
                setting = theorem(schedule, steps)
                if setting.largest_step_eps(16 * budget) <= 1:
                    stated.add((schedule, steps, budget))
                if not setting.unmet(16 * budget):
                    certified.add((schedule, steps, budget))
    assert stated == {("dp", 23_520, 0.8), ("dp", 39_200, 0.8), ("dp", 39_200, 1.2)}
    assert certified == stated | {("dp", 11_760, 0.8), ("i", 39_200, 0.8)}


def test_each_side_condition_is_told_where_it_is_not_met_and_not_just_before():
    few = AdpTheorem((1.0,) * 400, samples=100, batch_size=50, delta=1e-3)
    many = replace(few, batch_size=51)
    assert not any("half of the samples" in one for one in few.unmet(0.1))
    assert "a batch is at most half of the samples (here 51, limit 50)" in many.unmet(0.1)
    setting = theorem("dp", 11_760)
    passes = 11_760 * RATE
    both = math.log(16 * passes / DELTA) * math.log(1.25 / DELTA), math.log(1.25 / (DELTA / (12.5 * passes)))
    most = math.sqrt(8 * both[0] * math.log(1.25 / DELTA) / both[1])
    second = [any("the second term" in one for one in setting.unmet(share * most)) for share in (0.999, 1.001)]
    assert second == [False, True]


def test_where_the_conditions_hold_the_eps_is_true():
    # Step by step through the proof, with exact numbers in place of its estimates.
    setting, eps = theorem("dp", 39_200), 16 * 1.2
    step = Guarantee(gaussian_eps(2 / setting.noise_multiplier(eps), setting.step_delta), setting.step_delta)
    steps = [subsampled(step, RATE)] * 39_200
    total = composed_heterogeneously(steps, DELTA / 1.25)
    assert total.eps <= eps
    assert total.delta <= DELTA


# adp.md 2.8: eps by Rényi divergences at these orders, improved / classic conversion.
ORDERS = [*(1 + x / 10 for x in range(1, 100)), *range(12, 64), 128, 256]
EQUAL_EPS = {
    (11_760, "dp"): "0.197/0.280 0.304/0.399 0.417/0.536 0.917/1.123 2.276/2.654",
    (11_760, "i"): "0.197/0.280 0.306/0.401 0.421/0.540 0.944/1.155 2.945/3.501",
    (11_760, "ii"): "0.198/0.280 0.316/0.438 0.492/0.686 1.957/2.487 10.035/11.299",
    (23_520, "dp"): "0.193/0.275 0.297/0.390 0.406/0.522 0.875/1.074 2.000/2.344",
    (23_520, "i"): "0.193/0.275 0.298/0.391 0.408/0.524 0.887/1.088 2.117/2.476",
    (23_520, "ii"): "0.194/0.275 0.298/0.392 0.415/0.559 1.337/1.740 6.288/7.302",
    (39_200, "dp"): "0.191/0.269 0.292/0.384 0.399/0.514 0.854/1.049 1.895/2.226",
    (39_200, "i"): "0.191/0.270 0.293/0.384 0.400/0.515 0.860/1.057 1.952/2.293",
    (39_200, "ii"): "0.191/0.270 0.293/0.385 0.401/0.518 1.083/1.421 4.541/5.379",
}


QUICK = [(11_760, "dp"), (23_520, "dp"), (39_200, "dp"), (11_760, "ii")]


def sampled_gaussian(z):
    sampled = dp_accounting.PoissonSampledDpEvent(RATE, dp_accounting.GaussianDpEvent(z))
    return RdpAccountant(ORDERS).compose(sampled).rdp


# Logarithms of the noise multipliers at which divergences are computed; between them they are interpolated.
STEP = 0.01
LAST = 410  # z = 60; beyond, divergences are proportional to 1/z^2


@cache
def log_at(point):
    return np.log(sampled_gaussian(math.exp(point * STEP)))


def total_divergence(multipliers):
    """Sum over the steps, those within 0.1 % taken together at their mean."""
    if multipliers[0] == multipliers[-1]:
        return len(multipliers) * sampled_gaussian(multipliers[0])
    total = np.zeros(len(ORDERS))
    points = np.log(multipliers) / STEP
    _, group, counts = np.unique(np.round(points, 1), return_inverse=True, return_counts=True)
    for cell, count in zip(np.bincount(group, points) / counts, counts, strict=True):
        inside = min(cell, LAST)
        first = math.floor(inside) - 1
        s = inside - first  # in [1, 2): cubic through the points 0, 1, 2, 3
        weights = (
            -(s - 1) * (s - 2) * (s - 3) / 6,
            s * (s - 2) * (s - 3) / 2,
            -s * (s - 1) * (s - 3) / 2,
            s * (s - 1) * (s - 2) / 6,
        )
        logs = sum(weight * log_at(first + i) for i, weight in enumerate(weights))
        total += count * np.exp(logs + 2 * STEP * (inside - cell))
    return total


def both_conversions(divergences):
    classic = np.min(divergences - math.log(DELTA) / (np.array(ORDERS) - 1))
    return compute_epsilon(ORDERS, divergences, DELTA)[0], float(classic)


@pytest.mark.usefixtures("quiet_accountants")
@pytest.mark.parametrize(
    "setting", [pytest.param(s, marks=[] if s in QUICK else pytest.mark.slow, id=f"{s[0]}-{s[1]}") for s in EQUAL_EPS]
)
def test_equal_eps_of_the_theorem_is_not_equal_under_an_accountant(setting):
    steps, schedule = setting
    adp = theorem(schedule, steps)
    for budget, cell in zip((0.8, 1.2, 1.6, 3.2, 6.4), EQUAL_EPS[setting].split(), strict=True):
        multipliers = np.array(adp.factors) * adp.noise_multiplier(16 * budget)
        found = both_conversions(total_divergence(multipliers))
        assert found == pytest.approx([float(x) for x in cell.split("/")], abs=5.5e-4), budget


@pytest.mark.usefixtures("quiet_accountants")
def test_quoted_setting_under_an_accountant():
    # adp.md 4.1: DP-SGD, T = 11,700, classic conversion.
    for batch, row in ((256, "0.280 0.399 0.536 1.123 2.657"), (1, "0.321 0.480 0.646 1.378 3.519")):
        setting = theorem("dp", 11_700, batch)
        for budget, printed in zip((0.8, 1.2, 1.6, 3.2, 6.4), row.split(), strict=True):
            z = 256 / batch * setting.noise_multiplier(16 * budget)
            assert both_conversions(11_700 * sampled_gaussian(z))[1] == pytest.approx(float(printed), abs=6e-4)


def test_larger_orders_lower_the_least_eps_of_the_quoted_setting_alone():
    """By Opacus' divergences at whole orders to 255, of which 88 is the best."""
    setting, orders = theorem("dp", 11_700), np.arange(2, 256)
    for budget, printed in zip((0.8, 1.2, 1.6, 3.2, 6.4), ("0.264", "0.399", "0.536", "1.123", "2.657"), strict=True):
        z = setting.noise_multiplier(16 * budget)
        rdp = compute_rdp(q=256 / 50_000, noise_multiplier=z, steps=11_700, orders=orders)
        eps = rdp + math.log(1e5) / (orders - 1)
        assert eps.min() == pytest.approx(float(printed), abs=6e-4)
        assert budget > 0.8 or orders[eps.argmin()] == 88


@pytest.mark.usefixtures("quiet_accountants")
def test_replacing_a_sample_costs_what_half_the_multiplier_does():
    """adp.md, A13: DP-SGD at T = 11,760, classic conversion."""
    setting = theorem("dp", 11_760)
    for budget, printed in zip((0.8, 1.2, 1.6, 3.2, 6.4), ("0.54", "0.82", "1.12", "2.65", "11.9"), strict=True):
        z = setting.noise_multiplier(16 * budget) / 2
        assert prints_as(both_conversions(11_760 * sampled_gaussian(z))[1], printed)


def test_bad_input():
    with pytest.raises(UserError, match="eps=-1"):
        gaussian_delta(-1.0, 1.0)
    with pytest.raises(UserError, match="mu=-1"):
        gaussian_delta(1.0, -1.0)
    with pytest.raises(UserError, match="sampling_rate=2"):
        approximate_clt_mu(2.0, 1.0, 1)
    with pytest.raises(UserError, match="noise_multiplier=0"):
        approximate_clt_mu(0.1, 0.0, 1)
    with pytest.raises(UserError, match="factors=0"):
        AdpTheorem((1.0, 0.0), 100, 10, 1e-5)
    with pytest.raises(UserError, match="batch_size=101"):
        AdpTheorem((1.0,), 100, 101, 1e-5)
    with pytest.raises(UserError, match=r"delta=0\.1"):
        AdpTheorem((1.0,), 100_000, 1, 0.1)
    with pytest.raises(UserError, match="steps=2"):
        AdpTheorem((1.0,), 100, 10, 1e-5).spent(1.0, 2)
