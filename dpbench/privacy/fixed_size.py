"""Rényi account of batches of a fixed size, drawn without replacement (Wang, Balle and Kasiviswanathan 2019).

dp-accounting has the same bound. It takes differences of numbers that agree in nearly all digits where there is much
noise, so that what is left of high orders is rounding, and so much that no noise reaches a small eps. Here the
differences are integrals of what is never negative.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from dpbench.privacy.plan import Plan

Numbers = NDArray[np.float64]

# dp-accounting's orders up to 63, and from 64 to 1024 each a sixth of an octave above the one before.
ORDERS = (
    *(1 + x / 10 for x in range(1, 100)),
    *range(11, 64),
    *(round(64 * 2 ** (step / 6)) for step in range(25)),
)
# The trapezoidal rule with this step has all digits of integrals of normal width, as far from 0 as this in deviations
# beyond the highest of an integrand.
STEP, BEYOND = 0.05, 13.0
# Less of a shift, in deviations of the noise, is counted as this, which is valid and has a square.
LEAST_SHIFT = 1e-12


class FixedSizeAccountant:
    """Composes releases whose batches have a fixed size, for a sample that is replaced.

    Attributes:
        orders: α, as they were given.
        rdp: divergence at each of them, of all releases so far.
    """

    def __init__(self, orders: Sequence[float] | None = None) -> None:
        """Nothing composed so far.

        Args:
            orders: α > 1; `ORDERS` unless given.
        """
        self.orders: Sequence[float] = ORDERS if orders is None else orders
        self.rdp: Numbers = np.zeros(len(self.orders))

    def compose(self, plan: Plan) -> FixedSizeAccountant:
        """Add the releases of a plan, whose sampling scheme tells the sensitivity."""
        for release, times in plan.runs:
            multiplier = release.joint.noise_multiplier / plan.scheme.sensitivity
            self.rdp = self.rdp + times * divergences(release.sampling_rate, multiplier, self.orders)
        return self

    def get_epsilon_and_optimal_order(self, delta: float) -> tuple[float, float]:
        """Eps at delta, and the order that gives it."""
        from dp_accounting.rdp import compute_epsilon  # takes a second to import

        eps, order = compute_epsilon(self.orders, self.rdp, delta)
        return float(eps), float(order)

    def get_epsilon(self, delta: float) -> float:
        """Eps at delta."""
        return self.get_epsilon_and_optimal_order(delta)[0]


def divergences(rate: float, multiplier: float, orders: Sequence[float]) -> Numbers:
    """Bounds on the Rényi divergences of a Gaussian release of a batch without replacement, when a sample is replaced.

    Theorem 27; corollary 10 between whole orders.

    Args:
        rate: q, batch size over the number of samples.
        multiplier: σ > 0, standard deviation of the noise over the change that replacing a sample makes.
        orders: α > 1, shape (n,).

    Returns:
        Shape (n,).
    """
    of = np.asarray(orders, dtype=np.float64)
    shift = max(1 / multiplier, LEAST_SHIFT)
    if rate == 1:
        return of * shift**2 / 2
    low, high = np.floor(of).astype(int), np.ceil(of).astype(int)
    whole = _log_sums(rate, shift, sorted({*low.tolist(), *high.tolist()}))
    below, above = (np.array([whole[order] for order in ends.tolist()]) for ends in (low, high))
    share = of - low
    found: Numbers = ((1 - share) * below + share * above) / (of - 1)
    return found


def _log_sums(rate: float, shift: float, orders: Sequence[int]) -> dict[int, float]:
    """(α - 1) times the divergence at each whole order α >= 1."""
    i = np.arange(max(orders) + 1)
    raw = i * (i - 1) * shift**2 / 2  # log E r^i, see `log_central_moments`
    central = log_central_moments(shift, len(i))
    bounds = np.minimum(np.log(2) + raw, np.log(4) + (central[2 * (i // 2)] + central[2 * ((i + 1) // 2)]) / 2)
    if len(i) > 2:
        bounds[2] = min(math.log(2) + raw[2], math.log(4) + raw[2] + math.log(-math.expm1(-raw[2])))
    factorials = np.concatenate([[0.0], np.log(i[1:]).cumsum()])
    found = {}
    for order in orders:
        chosen = factorials[order] - factorials[: order + 1] - factorials[order::-1]
        terms = (chosen + i[: order + 1] * math.log(rate) + bounds[: order + 1])[2:]
        found[order] = float(np.logaddexp(0.0, _log_sum(terms))) if order > 1 else 0.0
    return found


def log_central_moments(shift: float, most: int) -> Numbers:
    """Log E (r - 1)^j for even j = 0, 2, ... up to `most`, with r = exp(tz - t²/2) and z standard normal.

    That is the j-th difference at 0 of E r^k over k, of which theorem 27 has the even ones.

    Args:
        shift: t > 0.
        most: largest j.

    Returns:
        Shape (most + 1,); inf at odd j, and where it is at least log(3/4) + log E r^j, with which the theorem's other
        bound is the smaller one.
    """
    found = np.full(most + 1, np.inf)
    found[0] = 0.0
    # E (r - 1)^j >= E r^j - j E r^(j-1), of which the second term is the first times j exp(-(j - 1) t²).
    wanted = [j for j in range(2, most + 1, 2) if (j - 1) * shift**2 < math.log(4 * j)]
    if wanted:
        furthest = math.sqrt(wanted[-1]) + BEYOND
        z = np.arange(-furthest, furthest + wanted[-1] * shift, STEP)
        with np.errstate(divide="ignore"):  # r = 1
            distance = np.log(np.abs(np.expm1(shift * z - shift**2 / 2)))
        weight = -(z**2) / 2 + math.log(STEP / math.sqrt(2 * math.pi))
        for j in wanted:
            found[j] = _log_sum(j * distance + weight)
    return found


def _log_sum(terms: Numbers) -> float:
    """Log Σ exp(terms)."""
    largest = float(terms.max())
    return largest + math.log(float(np.exp(terms - largest).sum()))
