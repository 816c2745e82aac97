"""DOPPLER: taps of its filters, their responses in time and frequency, and the illustration of its idea."""

from __future__ import annotations

import math

import numpy as np

from dpbench.claims import Artefact, Cell
from dpbench.claims.computed_file import Axis, Computed, Curve, Panel, Style
from dpbench.computed.common import curve, values_of
from dpbench.computed.responses import (
    LONG,
    filter_of,
    gains_of,
    impulse_response,
    number_of_response,
    response_panels,
)
from dpbench.filters import Butterworth, RecursiveLowPass

# The filters of Table 2 and of Table 4, by their names in the tables and in conf/filter.
MAIN = {
    "SGD": "sgd",
    "Momentum-SGD": "momentum",
    "1st-order ver.1": "first_v1",
    "1st-order ver.2": "first_v2",
    "2nd-order": "second",
}
ADDITIONAL = {name: name for name in ("f1", "f2", "f3", "f4", "f5", "f6")}

# Of the illustration: lag at which the gradient's correlation has fallen to zero, and lags on each side.
REACH = 4
LAGS = 20
PASS_BAND = 0.6


def taps_of_filters(artefact: Artefact) -> Computed:
    """Tables 2 and 4: the taps that conf/filter holds, and the designs of Butterworth that two of them are."""

    def tap(cell: Cell) -> float:
        letter, index = cell.at["tap"][0], int(cell.at["tap"][1:])
        low_pass = filter_of(cell.overrides["filter"])
        return low_pass.b[index] if letter == "b" else low_pass.a[index - 1]

    remarks = []
    if any(cell.overrides["filter"] == "second" for cell in artefact.cells):
        designs = {"1st-order ver.1": (1, 0.1), "2nd-order": (2, 1 / math.sqrt(47))}
        for name, (order, tangent) in designs.items():
            cutoff = math.atan(tangent) / math.pi
            deviation = _deviation(Butterworth(order, cutoff), filter_of(MAIN[name]))
            remarks.append(
                f"{name} is Butterworth's of order {order} with the cut-off {cutoff:.6f} cycles per step, taps within "
                f"{deviation:.1g}."
            )
    return Computed(values_of(artefact, tap), remarks=tuple(remarks))


def responses_of_filters(artefact: Artefact) -> Computed:
    """Figure 6: impulse response κ_τ and gain |H(ν)| of all filters."""
    responses = {option: impulse_response(filter_of(option), LONG) for option in (*MAIN.values(), *ADDITIONAL.values())}

    def number(cell: Cell) -> float:
        option = cell.overrides["filter"]
        return number_of_response(filter_of(option), responses[option], cell.at["number"])

    panels: list[Panel] = []
    for letters, table, names in (("ab", "Table 2", MAIN), ("cd", "Table 4", ADDITIONAL)):
        titles = (f"{letters[0]}: time, {table}", f"{letters[1]}: frequency, {table}")
        panels += response_panels(names, responses, titles)
    fine = np.linspace(0, 0.5, 100_001)
    resonant = gains_of(filter_of("f6"), fine)
    negative = [option for option, kappa in responses.items() if kappa.min() < 0]
    remarks = (
        f"f6 is resonant: its gain is {resonant.max():.3f} at ν = {fine[resonant.argmax()]:.3f}.",
        f"{' and '.join(negative)} have negative κ_τ, which the proof of the paper's Theorem 2 does not cover.",
    )
    return Computed(values_of(artefact, number), tuple(panels), remarks)


def illustration(artefact: Artefact) -> Computed:
    """Figure 1: φ(τ) = max(0, 1 - (τ/τ_0)²) of the gradient and a spike of noise, their spectra, an ideal low-pass."""
    lags = np.arange(-LAGS, LAGS + 1)
    gradient = np.maximum(0, 1 - (lags / REACH) ** 2)
    noise = (lags == 0).astype(float)
    nu = np.linspace(-1, 1, 401)  # in units of half a cycle per step, the fastest there is
    waves = np.cos(np.pi * np.outer(nu, lags))
    spectra = (curve("gradient", nu, waves @ gradient), curve("noise", nu, waves @ noise))
    height = float((waves @ gradient).max())
    band = Curve("low-pass", (-1.0, -PASS_BAND, PASS_BAND, 1.0), (0.0, height, 0.0, 0.0), Style.STEPS)
    correlations = (
        curve("gradient", lags, gradient, Style.MARKS),
        curve("noise", lags, noise, Style.MARKS),
    )
    frequency, power = Axis("ν in half cycles per step"), Axis("power P(ν)")
    least = float((waves @ gradient).min())
    return Computed(
        panels=(
            Panel("a: auto-correlation", Axis("lag τ"), Axis("φ(τ)"), correlations),
            Panel("b: power", frequency, power, spectra),
            Panel("c: power and an ideal low-pass", frequency, power, (*spectra, band)),
        ),
        remarks=(
            f"The paper gives neither τ_0, here {REACH}, nor the unit of ν, by which its pass band is [-0.6, 0.6].",
            f"No process has this φ: its transform falls to {least:.2g}, and a power is never negative.",
        ),
    )


def _deviation(design: Butterworth, low_pass: RecursiveLowPass) -> float:
    """Largest difference of a tap."""
    both = zip((*design.b, *design.a), (*low_pass.b, *low_pass.a), strict=True)
    return max(abs(x - y) for x, y in both)
