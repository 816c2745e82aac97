"""DP-PMLF: responses of the filters of its Table 4, and the factor by which momentum is to lower the variance."""

from __future__ import annotations

import math

from dpbench.claims import Artefact, Cell
from dpbench.claims.computed_file import Axis, Computed, Panel, Style
from dpbench.computed import scatter
from dpbench.computed.common import curve, values_of
from dpbench.computed.responses import LONG, filter_of, impulse_response, number_of_response, response_panels
from dpbench.query import LastIterates

DECAYS = (0.1, 0.3, 0.5, 0.7, 0.9, 1.0)
LENGTHS = range(1, 7)


def responses_of_filters(artefact: Artefact) -> Computed:
    """text_2: impulse response and gain of the filters of Table 4."""
    options = {cell.at["filter"]: cell.overrides["filter"] for cell in artefact.cells}
    responses = {option: impulse_response(filter_of(option), LONG) for option in options.values()}

    def number(cell: Cell) -> float:
        option = cell.overrides["filter"]
        return number_of_response(filter_of(option), responses[option], cell.at["number"])

    panels = tuple(response_panels(options, responses, ("time", "frequency")))
    return Computed(values_of(artefact, number), panels, ("LP8 is no filter.",))


def variance_of_momentum(artefact: Artefact) -> Computed:
    """text_3: ρ² = 1/Σ w_j² of the momentum's weights, by which independent noise in the iterates' gradients falls."""
    lines = [curve(f"β = {decay:g}", LENGTHS, [_factor(k, decay) for k in LENGTHS], Style.MARKS) for decay in DECAYS]
    panel = Panel("variance factor of the lemma", Axis("k"), Axis("ρ²"), tuple(lines))
    remarks = (f"At the paper's k = 2 and β = 0.1 it is {_factor(2, 0.1):.4g}; what it is along a run: text_7.",)
    return Computed(values_of(artefact, lambda c: _factor(int(c.at["k"]), float(c.at["beta"]))), (panel,), remarks)


def measured_variance(artefact: Artefact) -> Computed:
    """text_7: ρ² of the lemma beside the factor by which the scatter of a batch's gradients falls along a run."""

    def number(cell: Cell) -> float:
        length, decay = int(cell.overrides["length"]), float(cell.overrides["decay"])
        if cell.at["number"] == "lemma":
            return _factor(length, decay)
        noise_multiplier = float(cell.overrides["noise_multiplier"])
        return scatter.measured_factor(cell.at["model"], LastIterates(length, decay), noise_multiplier)

    settings = (
        f"digits, C = {scatter.THRESHOLD:g}, Poisson batches of about {scatter.BATCH}, step size {scatter.LR:g}, "
        f"{scatter.STEPS} steps, noise multiplier z, no filter"
    )
    remarks = (f"Settings of ours: {settings}.", "Below 1 a batch scatters more with momentum than without.")
    return Computed(values_of(artefact, number), remarks=remarks)


def _factor(length: int, decay: float) -> float:
    """ρ² = 1/Σ w_j²."""
    return 1 / math.fsum(weight**2 for weight in LastIterates(length, decay).weights(length))
