"""ADP-SGD: step sizes, the noise that each schedule brings to the parameters, and what the theorem says it spends."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache, partial

import numpy as np
from numpy.typing import NDArray

from dpbench.claims import Artefact, Cell
from dpbench.claims.computed_file import Axis, Computed, Curve, Panel, Style
from dpbench.computed.common import composed, curve, thinned, values_of
from dpbench.noise import StepSizeNoise
from dpbench.privacy import Plan, Release, epsilon
from dpbench.privacy.accountants import renyi_curve
from dpbench.privacy.adp_theorem import CONSTANT, AdpTheorem
from dpbench.privacy.plan import Repeat
from dpbench.privacy.sampling import POISSON, steps_of
from dpbench.privacy.tuning import RenyiCurve
from dpbench.stage import Course

Array = NDArray[np.float64]

SAMPLES, BATCH, DELTA = 50_000, 256, 1e-5
# Schedules by the paper's numbers, and its colours' names.
SCHEDULES = {
    "(i)": ("schedule=sqrt_decay", "optim.lr=0.1"),
    "(ii)": ("schedule=inverse_sqrt", "optim.lr=1"),
}
EPOCHS = {60: 11_760, 120: 23_520, 200: 39_200}
# Figures 1 and 3 are at this eps/16; text_1 is of a run of this many steps.
BUDGET = 3.2
QUOTED_STEPS = 11_700

# Figure 4: MNIST.
MNIST, MNIST_EPOCHS = 60_000, 50
MULTIPLIERS = (1.6, 3.2, 6.4, 12.8)


@dataclass(frozen=True)
class Schedule:
    """A schedule over T steps and its noise under the theorem.

    Attributes:
        rates: step sizes η_t, shape (T,).
        scales: factors α_t of ADP, shape (T,).
    """

    rates: Array
    scales: Array

    @property
    def adp(self) -> AdpTheorem:
        """The theorem for α_t = 1/sqrt(η_t)."""
        return _theorem(self.scales)

    @property
    def dp(self) -> AdpTheorem:
        """The theorem for DP-SGD, α_t = 1."""
        return _theorem(np.ones_like(self.scales))

    def noise(self, method: str) -> Array:
        """η_t α_t σ times (eps/16)/C: noise in each coordinate of the parameters, shape (T,); of "ADP" or "DP"."""
        if method == "ADP":
            return self.rates * self.scales * self.adp.constant
        return self.rates * self.dp.constant


@cache
def schedule_of(name: str, steps: int) -> Schedule:
    """Schedule (i) or (ii) over `steps` steps, by the program's configuration of it."""
    factors = partial(_factor, name, steps)
    lr = composed("algo=adp", *SCHEDULES[name]).optim.lr
    noise = StepSizeNoise()
    noise.prepare(Course(steps, BATCH, factors))
    rates = np.array([lr * factors(step) for step in range(steps)])
    # The stage leaves out the learning rate: a multiple of all scales is the same method.
    scales = np.array([noise.scale(step) for step in range(steps)]) / math.sqrt(lr)
    return Schedule(rates, scales)


def _factor(name: str, steps: int, step: int) -> float:
    return composed("algo=adp", *SCHEDULES[name]).schedule.factor(step, steps)


def _theorem(scales: Array) -> AdpTheorem:
    return AdpTheorem(tuple(scales.tolist()), SAMPLES, BATCH, DELTA)


def step_sizes(artefact: Artefact) -> Computed:
    """Figure 2: both step sizes over the iterations, for each number of steps."""

    def number(cell: Cell) -> float:
        steps, place = int(cell.overrides["steps"]), cell.overrides["step"]
        (name,) = (name for name, settings in SCHEDULES.items() if f"schedule={cell.overrides['schedule']}" in settings)
        if place == "all":
            return math.fsum(schedule_of(name, steps).rates)
        return composed("algo=adp", *SCHEDULES[name]).optim.lr * _factor(name, steps, 0 if place == "first" else steps)

    panels = []
    for epochs, steps in EPOCHS.items():
        at = [step for step in thinned(steps) if step < steps]
        lines = [
            curve(label, at, schedule_of(name, steps).rates[at])
            for name, label in (("(ii)", "1/sqrt(20 + t)"), ("(i)", "0.1 - r_T sqrt(t)"))
        ]
        panels.append(Panel(f"{epochs} epochs, T = {steps}", Axis("iteration"), Axis("learning rate"), tuple(lines)))
    return Computed(values_of(artefact, number), tuple(panels))


def noise_and_budget(artefact: Artefact) -> Computed:
    """Figure 1: noise in the parameters, and the privacy spent by the theorem, over the iterations."""
    steps = EPOCHS[120]
    schedule, at = schedule_of("(ii)", steps), thinned(steps)
    spent = []
    for name, theorem in (("ADP-SGD", schedule.adp), ("DP-SGD", schedule.dp)):
        multiplier = theorem.noise_multiplier(CONSTANT * BUDGET)
        spent.append(curve(name, at, [theorem.spent(multiplier, step) / CONSTANT for step in at]))
    early = steps // 10
    shares = [line.y[min(range(len(at)), key=lambda i: abs(at[i] - early))] / BUDGET for line in spent]
    return Computed(
        panels=(
            _noise_panel("noise in the parameters, C = 2.5", steps, 2.5),
            Panel("privacy spent", Axis("iteration t"), Axis("overall privacy, ε/16"), tuple(spent)),
        ),
        remarks=(
            "Accuracy is of trained runs; both curves here are formulas.",
            f"By the theorem ADP has used {shares[0]:.0%} of its budget after a tenth of the run, DP {shares[1]:.0%}.",
        ),
    )


def noise_of_runs(artefact: Artefact) -> Computed:
    """Figure 3: noise in the parameters over the iterations; its accuracies are trained."""
    panels = [
        _noise_panel(f"noise in the parameters, C = {norm:g}, {epochs} epochs", EPOCHS[epochs], norm)
        for epochs in (120, 200)
        for norm in (1, 2.5, 5)
    ]
    return Computed(panels=tuple(panels), remarks=("Accuracy is of trained runs; the noise is a formula.",))


def _noise_panel(title: str, steps: int, norm: float) -> Panel:
    schedule, at = schedule_of("(ii)", steps), [step for step in thinned(steps) if step < steps]
    labels = {"ADP": "ADP-SGD, α_t = 1/sqrt(η_t)", "DP": "DP-SGD, α_t = 1"}
    lines = [curve(label, at, schedule.noise(name)[at] * norm / BUDGET) for name, label in labels.items()]
    return Panel(title, Axis("iteration t"), Axis("actual noise η_t α_t σ", log=True), tuple(lines))


def budgets_over_epochs(artefact: Artefact) -> Computed:
    """Figure 4: eps over the epochs by an accountant and by the theorem; its test errors are trained."""
    epochs = range(1, MNIST_EPOCHS + 1)
    steps = [steps_of(POISSON, MNIST, BATCH, epoch) for epoch in epochs]
    panels = []
    for letter, z in zip("abcd", MULTIPLIERS, strict=True):
        single = _curve(MNIST, z, 1)
        numerical = [_classical(single.times(made), DELTA) for made in steps]
        theoretical = [AdpTheorem((1.0,) * made, MNIST, BATCH, DELTA).spent(z) / CONSTANT for made in steps]
        lines = (curve("numerical ε", epochs, numerical), curve("theoretical ε/16", epochs, theoretical))
        panels.append(Panel(f"{letter}: σ = {z:g}", Axis("epoch"), Axis("privacy budget"), lines))
    remarks = (
        "Test errors are of trained runs; both curves here are formulas.",
        f"Read as batches of {BATCH}, delta = {DELTA:g}, σ the noise multiplier: the paper gives none of them.",
    )
    return Computed(panels=tuple(panels), remarks=remarks)


def quoted_budgets(artefact: Artefact) -> Computed:
    """text_1: eps of DP-SGD under the theorem's noise, by the accountant that the authors quote."""
    theorem = AdpTheorem((1.0,) * QUOTED_STEPS, SAMPLES, BATCH, DELTA)
    multipliers = {cell.place: theorem.noise_multiplier(CONSTANT * float(cell.at["eps"])) for cell in artefact.cells}
    values = {place: _classical(_curve(SAMPLES, z, QUOTED_STEPS), DELTA) for place, z in multipliers.items()}
    budgets = tuple(float(cell.at["eps"]) for cell in artefact.cells)
    printed = tuple(cell.printed.value for cell in artefact.cells if cell.printed is not None)
    tight = [
        epsilon(_plan(SAMPLES, z, QUOTED_STEPS), DELTA, "pld", eps_scale=values[place])
        for place, z in multipliers.items()
    ]
    panel = Panel(
        "what an accountant finds",
        Axis("the paper's ε/16"),
        Axis("ε at δ = 1e-5"),
        (
            Curve("as quoted", budgets, printed, Style.MARKS, printed=True),
            curve("Rényi, as then converted", budgets, values.values(), Style.MARKS),
            curve("privacy losses, today", budgets, tight, Style.MARKS),
        ),
    )
    found = ", ".join(f"{eps:.3g}" for eps in tight)
    return Computed(values, (panel,), (f"By privacy loss distributions these runs spend {found}.",))


def effects_of_schedules(artefact: Artefact) -> Computed:
    """text_2: constants of the theorem, the gain of ADP, and its noise at both ends."""

    def number(cell: Cell) -> float:
        schedule = schedule_of(cell.at["schedule"], int(cell.at["steps"]))
        adp, dp = schedule.noise("ADP"), schedule.noise("DP")
        match cell.at["number"].split():
            case ["K", "of", method]:
                return (schedule.adp if method == "ADP" else schedule.dp).constant
            case ["gain"]:
                return float((dp**2).sum() / (adp**2).sum())
            case ["crossing"]:
                return float(np.argmax(adp > dp))
            case [method, place]:
                return float((adp if method == "ADP" else dp)[0 if place == "first" else -1])
            case name:
                raise ValueError(name)

    return Computed(values_of(artefact, number))


def _plan(samples: int, multiplier: float, steps: int) -> Plan:
    return Plan((Repeat(Release(BATCH / samples, multiplier), steps),))


def _curve(samples: int, multiplier: float, steps: int) -> RenyiCurve:
    return renyi_curve(_plan(samples, multiplier, steps), DELTA)


def _classical(curve: RenyiCurve, delta: float) -> float:
    """Eps as TensorFlow Privacy converted in 2021: min over a of R(a) - log(delta)/(a - 1) (Mironov 2017)."""
    pairs = zip(curve.orders, curve.values, strict=True)
    return min(value - math.log(delta) / (order - 1) for order, value in pairs if order > 1)
