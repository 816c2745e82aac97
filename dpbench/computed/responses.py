"""Responses of the low-pass filters in time and frequency."""

from __future__ import annotations

import math
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import brentq

from dpbench.computed.common import composed
from dpbench.filters import RecursiveLowPass
from dpbench.spectra import frequency_response

Array = NDArray[np.float64]

# The slowest pole of the papers' filters is 0.9219: after so many steps nothing is left in floating point.
LONG = 1000


def filter_of(option: str) -> RecursiveLowPass:
    """The filter of conf/filter; only its taps are to be used."""
    return cast(RecursiveLowPass, composed("algo=doppler", f"filter={option}").filter)


def impulse_response(low_pass: RecursiveLowPass, steps: int) -> Array:
    """κ_0, ..., κ_{steps-1} of m_t = Σ κ_τ g_{t-τ}, shape (steps,), as the filter itself responds.

    It divides by S_t = κ_0 + ... + κ_t, so it answers an impulse with h_t = κ_t/S_t. As S_{t-1} = (1 - h_t) S_t, that
    tells all κ_t up to a factor, which κ_0 = b_0 settles.
    """
    fresh = RecursiveLowPass(b=low_pass.b, a=low_pass.a)
    impulse = torch.zeros(steps, 1, dtype=torch.float64)
    impulse[0] = 1
    answer = [float(fresh.apply(value)) for value in impulse]
    kappa, total = [low_pass.b[0]], low_pass.b[0]
    for share in answer[1:]:
        total /= 1 - share
        kappa.append(share * total)
    return np.array(kappa)


def gains_of(low_pass: RecursiveLowPass, frequencies: Array) -> Array:
    """|H(ν)| at frequencies in cycles per step, of their shape."""
    return np.abs(frequency_response(low_pass.b, low_pass.a, frequencies))


def gain_of(low_pass: RecursiveLowPass, frequency: float) -> float:
    """|H(ν)| at one frequency."""
    return float(gains_of(low_pass, np.array([frequency]))[0])


def half_power(low_pass: RecursiveLowPass) -> float:
    """The lowest frequency at which the power is halved, in cycles per step."""
    grid = np.linspace(0, 0.5, 501)
    after = int(np.argmax(gains_of(low_pass, grid) < math.sqrt(0.5)))
    root = brentq(lambda nu: gain_of(low_pass, nu) - math.sqrt(0.5), grid[after - 1], grid[after], xtol=1e-12)
    return float(root)
