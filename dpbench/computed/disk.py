"""DiSK: gains of the scalar filter, the synthetic regression, deltas."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from dpbench.claims import Artefact, Cell
from dpbench.claims.computed_file import Axis, Computed, Panel, Style
from dpbench.computed.common import composed, curve, values_of
from dpbench.computed.regression import METHODS, LinearRegression, descend
from dpbench.filters import Filter, Kalman
from dpbench.filters.kalman import gain_rate, scalar_gains, steady_gain
from dpbench.query import OnePoint, Query
from dpbench.randomness import generator

STEPS_OF_GAINS = 12
FULL = "un-simplified filter"

# The regression. The paper gives none of these.
SEED = 0
RUNS = 50
LR = 0.3
STEPS = 200
VARIANCES = (0.1, 0.3, 1.0, 3.0, 10.0)


def convergence_of_gain(artefact: Artefact) -> Computed:
    """Figure 3: k_t and p_t of the scalar filter, their limits, and how fast they are reached."""
    sets = {cell.at["variances"]: _variances(cell) for cell in artefact.cells}

    def number(cell: Cell) -> float:
        variances, name = _variances(cell), cell.at["number"]
        limit = steady_gain(*variances)
        match name:
            case "p":
                return limit.variance
            case "k":
                return limit.gain
            case "rate" | "rate of the paper":
                return observed_rate(*variances)
            case _:
                return scalar_gains(*variances, 5)[int(name.removeprefix("k_"))].gain

    steps = range(STEPS_OF_GAINS)
    panels = [
        Panel(
            f"σ_w², σ_H², σ_v² = {name}",
            Axis("step t"),
            Axis("gain and variance"),
            tuple(
                curve(label, steps, line)
                for label, line in zip(
                    ("k_t", "p_t"), zip(*scalar_gains(*one, STEPS_OF_GAINS), strict=True), strict=True
                )
            ),
        )
        for name, one in sets.items()
    ]
    name, shown = max(sets.items(), key=lambda item: item[1][1] / item[1][0])
    gaps = np.array([gain.variance for gain in scalar_gains(*shown, STEPS_OF_GAINS)]) - steady_gain(*shown).variance
    lines = (("corrected rate", gain_rate(*shown)), ("the paper's rate", published_rate(*shown)))
    panels.append(
        Panel(
            f"distance from the limit, {name}",
            Axis("step t"),
            Axis("p_t - p_∞", log=True),
            (
                curve("p_t - p_∞", steps, gaps, Style.MARKS),
                *(curve(label, steps, gaps[0] * rate ** np.arange(STEPS_OF_GAINS)) for label, rate in lines),
            ),
        )
    )
    remarks = (
        "The paper does not give the variances that it draws; these are the specification's.",
        "Its formula for the rate is right where σ_H = 0 alone.",
    )
    return Computed(values_of(artefact, number), tuple(panels), remarks)


def observed_rate(noise: float, hessian_noise: float, drift: float) -> float:
    """Quotient of two distances of p_t from its limit, so late that it is the eventual one, and far from rounding."""
    limit = steady_gain(noise, hessian_noise, drift).variance
    gaps = [gain.variance - limit for gain in scalar_gains(noise, hessian_noise, drift, 1000)]
    late = next(step for step, gap in enumerate(gaps) if gap < 1e-7 * limit)
    return gaps[late + 1] / gaps[late]


def published_rate(noise: float, hessian_noise: float, drift: float) -> float:
    """The rate as the paper prints it, with 3σ_H² in the place of -σ_H²; see `gain_rate`."""
    root = math.sqrt((hessian_noise + drift) * (4 * noise - 3 * hessian_noise + drift))
    sum_ = 2 * noise + 3 * hessian_noise + drift
    return (sum_ - root) / (sum_ + root)


def _variances(cell: Cell) -> tuple[float, float, float]:
    """σ_w², σ_H² and σ_v²."""
    w, h, v = (float(cell.overrides[letter]) for letter in "whv")
    return w, h, v


def synthetic_regression(artefact: Artefact) -> Computed:
    """Figure 6a: the loss at which gradient descent on a regression ends under noise, by the filter."""
    device = torch.device("cpu")
    problem = LinearRegression.draw(generator(SEED, "synthetic", device, "regression"))

    def last_loss(make: Callable[[], tuple[Query, Filter]], variance: float) -> float:
        """Mean over runs, each with noise of its own that all methods share."""
        losses = []
        for run in range(RUNS):
            query, low_pass = make()
            noise = generator(SEED + run, "synthetic", device, f"noise {variance:g}")
            path = descend(problem, query, low_pass, noise_std=math.sqrt(variance), lr=LR, steps=STEPS, generator=noise)
            losses.append(problem.loss(path[-1]))
        return math.fsum(losses) / RUNS

    def key(cell: Cell) -> tuple[float, str, float]:
        return float(cell.overrides["kappa"]), cell.at["method"], float(cell.overrides["variance"])

    kappas = sorted({key(cell)[0] for cell in artefact.cells})
    wanted = sorted({key(cell)[2] for cell in artefact.cells} | set(VARIANCES))
    found = {
        (k, method, v): last_loss(partial(make, k), v)
        for k in kappas
        for method, make in METHODS.items()
        for v in wanted
    }
    full = curve(FULL, wanted, [last_loss(partial(_unsimplified, v), v) for v in wanted])
    panels = tuple(
        Panel(
            f"kappa = {kappa:g}",
            Axis("noise variance", log=True),
            Axis("final loss", log=True),
            (*(curve(method, wanted, (found[kappa, method, v] for v in wanted)) for method in METHODS), full),
        )
        for kappa in kappas
    )
    samples, dimension = problem.inputs.shape
    remarks = (
        f"The paper gives no settings. Ours: {samples} samples in {dimension} dimensions, step size {LR}, {STEPS} "
        f"steps, mean of the last loss over {RUNS} runs, whose noise the methods share; NoisyLP gives the new gradient "
        "the weight kappa, as NoisyKF does, whose gamma is 0.5, on which nothing depends here.",
        f"The {FULL} is no curve of the paper's figure: its Alg. 2, which has d×d covariances in the place of kappa, "
        "told the exact Hessian, which no private run knows.",
        f"The least loss of the problem is {problem.least_loss:.4g}.",
    )
    return Computed(values_of(artefact, lambda cell: found[key(cell)]), panels, remarks)


def _unsimplified(variance: float) -> tuple[Query, Filter]:
    """The Hessian is exact and the loss quadratic, so that nothing is left out of the prediction."""
    return OnePoint(), Kalman(noise=variance)


def deltas(artefact: Artefact) -> Computed:
    """Table 7: N^-1.1 of every data set, N the size of its training split."""

    def delta(cell: Cell) -> float:
        return composed(f"dataset={cell.overrides['dataset']}", "delta=1/N^1.1").delta_value

    found = values_of(artefact, delta)
    remarks = (
        "The paper's delta is that of about 433,000 samples for MNLI and 555,000 for QNLI, and half the inverse of the "
        "samples for E2E and DART (of DART's, all splits).",
    )
    return Computed(found, remarks=remarks)
