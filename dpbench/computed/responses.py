"""Responses of the low-pass filters in time and frequency."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import brentq

from dpbench.claims.computed_file import Axis, Panel
from dpbench.computed.common import composed, curve
from dpbench.filters import RecursiveLowPass
from dpbench.spectra import frequency_response

Array = NDArray[np.float64]

# The slowest pole of the papers' filters is 0.9219: after so many steps nothing is left in floating point.
LONG = 1000
# Of a plot.
SHOWN_STEPS = 50
FREQUENCIES = np.linspace(0, 0.5, 501)


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


def number_of_response(low_pass: RecursiveLowPass, kappa: Array, name: str) -> float:
    """A number of a filter: its noise power, its mean delay, its cut-off, the gain "H ν" or κ_τ as "k_τ".

    Args:
        low_pass: the filter.
        kappa: its impulse response over `LONG` steps.
        name: of the number.
    """
    match name.split():
        case ["power"]:
            return float((kappa**2).sum())
        case ["delay"]:
            return float(np.arange(LONG) @ kappa)
        case ["cut"]:
            return half_power(low_pass)
        case ["H", frequency]:
            return gain_of(low_pass, float(frequency))
        case _:
            return float(kappa[int(name.removeprefix("k_"))])


def response_panels(options: Mapping[str, str], responses: Mapping[str, Array], titles: tuple[str, str]) -> list[Panel]:
    """Filters in time and in frequency.

    Args:
        options: of conf/filter, by the names that the curves have.
        responses: impulse response of each option.
        titles: of the two panels.
    """
    steps = np.arange(SHOWN_STEPS + 1)
    in_time = [curve(name, steps, responses[option][: len(steps)]) for name, option in options.items()]
    gains = [curve(name, FREQUENCIES, gains_of(filter_of(option), FREQUENCIES)) for name, option in options.items()]
    return [
        Panel(titles[0], Axis("lag τ in steps"), Axis("impulse response κ_τ"), tuple(in_time)),
        Panel(titles[1], Axis("ν in cycles per step"), Axis("gain |H(ν)|"), tuple(gains)),
    ]
