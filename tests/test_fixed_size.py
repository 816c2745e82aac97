"""The Rényi account of batches of a fixed size against its theorem in hundreds of digits, and calibration by it."""

import math

import mpmath
import numpy as np
import pytest
from accounting_references import equal_plan
from dp_accounting.rdp.rdp_privacy_accountant import DEFAULT_RDP_ORDERS

from dpbench.errors import UserError
from dpbench.privacy import calibrate, calibration, fixed_size
from dpbench.privacy.fixed_size import ORDERS, FixedSizeAccountant, divergences, log_central_moments
from dpbench.privacy.sampling import FIXED_SIZE

WHOLE = (2, 3, 4, 5, 16, 63, 128, 203)
SETTINGS = [(0.02, 0.5), (0.178, 5.0), (0.178, 500.0), (0.01, 1.0), (0.5, 20.0), (0.001, 0.3), (0.9, 3.0), (1e-4, 1e6)]


def in_many_digits(q, sigma, orders):
    """Wang, Balle and Kasiviswanathan 2019, theorem 27 of a Gaussian, with sums of alternating sign as they stand."""
    # The j-th difference is about as small as sigma to the minus j.
    with mpmath.workdps(400 + math.ceil(max(orders) * max(0.0, math.log10(sigma)))):
        rate, square = mpmath.mpf(q), 1 / mpmath.mpf(sigma) ** 2
        powers = [mpmath.exp(k * (k - 1) * square / 2) for k in range(max(orders) + 2)]

        def difference(j):
            return mpmath.fsum((-1) ** (j - k) * mpmath.binomial(j, k) * powers[k] for k in range(j + 1))

        even = {j: difference(j) for j in range(0, max(orders) + 2, 2)}
        bounds = {2: min(4 * mpmath.expm1(square), 2 * powers[2])}
        for j in range(3, max(orders) + 1):
            bounds[j] = min(4 * mpmath.sqrt(even[2 * (j // 2)] * even[2 * ((j + 1) // 2)]), 2 * powers[j])
        terms = {j: rate**j * bound for j, bound in bounds.items()}
        sums = [mpmath.fsum(mpmath.binomial(order, j) * terms[j] for j in range(2, order + 1)) for order in orders]
        return [float(mpmath.log1p(found) / (order - 1)) for order, found in zip(orders, sums, strict=True)]


@pytest.mark.parametrize(("q", "sigma"), SETTINGS)
def test_divergences_are_those_of_the_theorem(q, sigma):
    np.testing.assert_allclose(divergences(q, sigma, WHOLE), in_many_digits(q, sigma, WHOLE), rtol=1e-12, atol=0)


def test_a_broken_order_lies_on_the_chord_of_its_neighbours():
    """Corollary 10: (α - 1) times the divergence is convex."""
    low, high, between = divergences(0.1, 2.0, (4, 5, 4.3))
    assert 3.3 * between == pytest.approx(0.7 * 3 * low + 0.3 * 4 * high, rel=1e-13)
    assert divergences(0.1, 2.0, (1.25,))[0] == pytest.approx(divergences(0.1, 2.0, (2,))[0], rel=1e-13)


def test_batches_of_all_samples_are_gaussian():
    np.testing.assert_allclose(divergences(1.0, 3.0, (1.5, 7, 100)), np.array([1.5, 7, 100]) / 18, rtol=1e-14)


def test_a_moment_that_is_left_out_would_not_have_been_the_better_bound():
    """4 E (r - 1)^j against 2 E r^j, of the first moments that are left out."""
    for shift in (0.05, 0.2, 0.7, 2.0):
        found = log_central_moments(shift, 300)
        left_out = [j for j in range(2, 301, 2) if math.isinf(found[j])]
        for j in left_out[:3]:
            with mpmath.workdps(400):
                square = mpmath.mpf(shift) ** 2
                powers = [mpmath.exp(k * (k - 1) * square / 2) for k in range(j + 1)]
                moment = mpmath.fsum((-1) ** (j - k) * mpmath.binomial(j, k) * powers[k] for k in range(j + 1))
                assert 4 * moment > 2 * powers[j]


def test_much_noise_spends_next_to_nothing_and_little_noise_a_lot():
    for sigma, least, most in ((1e8, 0.0, 1e-12), (math.inf, 0.0, 1e-12), (1e-6, 1e10, math.inf)):
        found = divergences(0.02, sigma, ORDERS)
        assert least <= found.min() <= found.max() <= most


def test_there_are_all_orders_of_dp_accounting():
    assert set(DEFAULT_RDP_ORDERS) <= set(ORDERS)
    assert list(ORDERS) == sorted(set(ORDERS))


def test_a_plan_composes_at_every_order():
    plan = equal_plan(0.02, 3.0, 40, FIXED_SIZE)
    found = FixedSizeAccountant((2, 8)).compose(plan).compose(plan)
    np.testing.assert_allclose(found.rdp, 80 * divergences(0.02, 1.5, (2, 8)), rtol=1e-13)  # the sum moves by 2 C


# Of dp-accounting's differences only rounding is left in the first four.
@pytest.mark.parametrize(
    ("q", "steps", "eps", "delta"),
    [
        (0.02, 300, 0.05, 1e-7),
        (0.02, 300, 0.1, 1e-9),
        (256 / 1437, 169, 0.05, 1e-5),
        (256 / 1437, 6, 0.05, 1e-9),
        (0.0008, 10_000, 0.1, 1e-7),
        (0.02, 300, 1000.0, 1e-5),
    ],
)
def test_small_budgets_and_small_deltas_are_reached(q, steps, eps, delta):
    plan = equal_plan(q, 1.0, steps, FIXED_SIZE)
    found = calibrate(plan, eps, delta, "rdp")
    assert 0.99 * eps <= found.eps <= eps
    assert found.noise_multiplier < 12 * calibrate(equal_plan(q, 1.0, steps), eps, delta, "rdp").noise_multiplier


def test_a_target_over_which_an_account_jumps_is_refused():
    """Beyond its orders it is more than the target until it is nothing at all."""
    with pytest.raises(UserError, match=r"^eps=0\.001: this account falls from more than it to 0 at noise multiplier"):
        calibrate(equal_plan(0.02, 1.0, 300, FIXED_SIZE), 0.001, 1e-5, "rdp")


@pytest.mark.parametrize(
    "broken",
    [
        lambda t, most: np.zeros(most + 1),
        lambda t, most: log_central_moments(1.01 * t, most),
        lambda t, most: np.full(most + 1, np.inf),
    ],
)
def test_other_moments_are_noticed(broken, monkeypatch):
    monkeypatch.setattr(fixed_size, "log_central_moments", broken)
    q, sigma = 0.178, 500.0
    assert not np.allclose(divergences(q, sigma, WHOLE), in_many_digits(q, sigma, WHOLE), rtol=1e-3, atol=0)


def test_a_small_jump_is_none(monkeypatch):
    monkeypatch.setattr(calibration, "LEAST_SHARE", 1.0 + 1e-9)
    with pytest.raises(UserError, match="falls from more than it"):
        calibration.require_reached(3.0, 1.0, 1.0)
    monkeypatch.undo()
    calibration.require_reached(3.0, 0.91, 1.0)
