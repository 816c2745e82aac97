"""DC-SGD: thresholds estimated from noisy histograms, and what tuning costs in noise and in time."""

from __future__ import annotations

import functools
import math
from dataclasses import replace
from importlib.metadata import version

import numpy as np
import torch
from numpy.typing import NDArray
from opacus.accountants import RDPAccountant
from opacus.accountants.analysis.rdp import compute_rdp
from scipy.stats import norm

from dpbench import cache
from dpbench.claims import Artefact, Cell, load_artefact
from dpbench.claims.computed_file import Axis, Computed, Panel, Style
from dpbench.computed.common import composed, curve, values_of
from dpbench.config import conf_folder
from dpbench.privacy import Plan, epsilon
from dpbench.privacy.calibration import solve
from dpbench.privacy.gaussian import SeededGaussian
from dpbench.privacy.tuning import RandomStopping, RenyiCurve
from dpbench.randomness import generator
from dpbench.threshold import PercentileThreshold
from dpbench.threshold.histogram import expected_error, histogram, midpoints

Array = NDArray[np.float64]

CPU = torch.device("cpu")
BATCH = 256
# The synthetic norms, and how often they are drawn.
MEAN, SPREAD = 100.0, 20.0
SEED, DRAWS = 0, 400
# Figure 2: upper end of the histogram; figure 3: that, and σ_T² d/B².
RANGE_P, RANGE_E = 150.0, 120.0
ERROR_WEIGHT = 1.0**2 * 100_000 / BATCH**2
# The panels.
BINS = (5, 10, 20, 50, 100)
NOISES = (0.0, 5.0, 10.0)
QUANTILES = tuple(k / 20 for k in range(1, 20))
THRESHOLDS = np.linspace(0, 120, 1201)


def percentiles_of_noisy_histograms(artefact: Artefact) -> Computed:
    """Figure 2: the threshold of rule P on 256 normal norms, beside their quantile."""
    settings = {(int(c.at["b"]), float(c.at["sigma_H"]), float(c.at["p"])) for c in artefact.cells}
    found = {at: _errors_of_percentile(*at) for at in sorted(settings)}

    def number(cell: Cell) -> float:
        errors = found[int(cell.at["b"]), float(cell.at["sigma_H"]), float(cell.at["p"])]
        return float(errors.mean() if cell.at["number"] == "error" else errors.std(ddof=1))

    panels = []
    for bins in BINS:
        (draw,) = _norms(f"shown {bins}", 1)
        lines = [curve("true percentile", QUANTILES, [_quantile(draw, p) for p in QUANTILES])]
        for noise in NOISES:
            source = _source(f"shown {bins} {noise:g}")
            estimates = [_percentile(draw, bins, noise, p, source) for p in QUANTILES]
            lines.append(curve(f"σ_H = {noise:g}", QUANTILES, estimates, Style.MARKS))
        panels.append(Panel(f"b = {bins}", Axis("percentile p"), Axis("threshold C"), tuple(lines)))
    remarks = (
        f"The paper gives neither its b nor its σ_H; ours are {', '.join(map(str, BINS))} and "
        f"{', '.join(f'{noise:g}' for noise in NOISES)}. Numbers are over {DRAWS} draws, each panel shows one.",
    )
    return Computed(values_of(artefact, number), tuple(panels), remarks)


def _source(run: str) -> SeededGaussian:
    return SeededGaussian(generator(SEED, "synthetic", CPU, f"noise {run}"))


def _norms(run: str, draws: int) -> torch.Tensor:
    """Norms of one batch in each row, shape (draws, B)."""
    source = generator(SEED, "synthetic", CPU, run)
    return MEAN + SPREAD * torch.randn(draws, BATCH, generator=source, dtype=torch.float64)


def _quantile(norms: torch.Tensor, share: float) -> float:
    """The smallest norm that so large a share of the norms does not exceed."""
    return float(norms.sort().values[math.ceil(share * len(norms) - 1e-9) - 1])


def _errors_of_percentile(bins: int, noise: float, share: float) -> Array:
    """Estimate less truth in every draw, shape (DRAWS,)."""
    run = f"percentile {bins} {noise:g} {share:g}"
    source = _source(run)
    both = ((_percentile(norms, bins, noise, share, source), _quantile(norms, share)) for norms in _norms(run, DRAWS))
    return np.array([estimate - truth for estimate, truth in both])


def _percentile(norms: torch.Tensor, bins: int, noise: float, share: float, source: SeededGaussian) -> float:
    threshold = PercentileThreshold(bins=bins, histogram_noise=noise or 1.0, quantile=share, range=RANGE_P)
    threshold.observe(norms)
    threshold.release(source if noise else None, 0.0)
    return threshold.value(1)


def expected_errors_of_noisy_histograms(artefact: Artefact) -> Computed:
    """Figure 3: the estimate Ê(C) on 256 normal norms, and the error E(C) itself."""
    truth = _true_error(THRESHOLDS)
    estimates = {(bins, noise): _estimated_errors(bins, noise) for bins in BINS for noise in NOISES}

    def number(cell: Cell) -> float:
        bins, line, name = int(cell.at["b"]), cell.at["curve"], cell.at["number"].split()
        found = truth[None] if line == "truth" else estimates[bins, float(line)]
        if name[0] == "E":
            return float(np.median(found[:, _place(float(name[1]))]))
        best = THRESHOLDS[found.argmin(axis=1)]
        return float(best.mean() if name[0] == "best" else best.std(ddof=1))

    panels = []
    for bins in BINS:
        lines = [curve("true", THRESHOLDS[::5], truth[::5])]
        lines += [curve(f"σ_H = {noise:g}", THRESHOLDS[::5], estimates[bins, noise][0, ::5]) for noise in NOISES]
        panels.append(Panel(f"b = {bins}", Axis("clipping threshold C"), Axis("E(C)"), tuple(lines)))
    at = _place(20)
    above = max(float((found[:, at] > truth[at]).mean()) for found in estimates.values())
    remarks = (
        f"The paper gives neither its b nor its σ_H. The truth is that of the distribution; numbers are over {DRAWS} "
        "draws, each curve shows one.",
        "Of the errors these are medians: an estimate is divided by the noisy number of samples, which may come near "
        f"0, so that it has no mean. Up to {above:.0%} of single estimates lie above the truth at C = 20.",
    )
    return Computed(values_of(artefact, number), tuple(panels), remarks)


def _place(threshold: float) -> int:
    """Where a threshold stands among `THRESHOLDS`."""
    return int(np.abs(THRESHOLDS - threshold).argmin())


def _true_error(thresholds: Array) -> Array:
    """K C² + E max(n - C, 0)² for a normal norm n."""
    above = (MEAN - thresholds) / SPREAD
    beyond = SPREAD**2 * ((above**2 + 1) * norm.cdf(above) + above * norm.pdf(above))
    found: Array = ERROR_WEIGHT * thresholds**2 + beyond
    return found


def _estimated_errors(bins: int, noise: float) -> Array:
    """Ê(C) of every draw, shape (DRAWS, thresholds)."""
    run = f"error {bins} {noise:g}"
    source, found = _source(run), []
    for norms in _norms(run, DRAWS):
        counts = histogram(norms, RANGE_E, bins)
        counts += noise * source.fill(torch.empty_like(counts))
        found.append(expected_error(THRESHOLDS, midpoints(RANGE_E, bins), counts.numpy(), ERROR_WEIGHT))
    return np.array(found)


def noise_multipliers(artefact: Artefact) -> Computed:
    """text_1: the noise multiplier that tuning leaves, behind Tables II, III and VIII."""

    def multiplier(cell: Cell) -> float:
        settings = cell.overrides
        samples = composed(f"dataset={settings['dataset']}").dataset.train_size
        steps, eps, delta = int(settings["epochs"]) * math.ceil(samples / BATCH), float(settings["eps"]), 1 / samples
        candidates = int(settings["candidates"])
        if settings["tuning"] == "stopping":
            eps, delta = RandomStopping.over(candidates).per_run(eps, delta)
        else:
            steps *= candidates
        return _multiplier(BATCH / samples, steps, eps, delta, more_orders=cell.at["orders"] == "to 512")

    return Computed(
        values_of(artefact, multiplier),
        remarks=(
            "Orders up to 63 are the default of the library that the authors used; at the small delta of random "
            "stopping the best one lies above, and by these orders noise at eps 2 is up to 86 % more than is needed. "
            "The paper does not say which orders it took.",
        ),
    )


def _multiplier(rate: float, steps: int, eps: float, delta: float, *, more_orders: bool) -> float:
    """The noise multiplier by Opacus' Rényi divergences at its default orders, or at more; cached on disk."""
    orders = (*RDPAccountant.DEFAULT_ALPHAS, *(range(64, 513, 4) if more_orders else ()))
    key = [rate, steps, eps, delta, orders, version("opacus")]
    known = cache.read("multiplier", key)
    if isinstance(known, float):
        return known

    def spent(multiplier: float, orders: tuple[float, ...]) -> float:
        divergences = compute_rdp(q=rate, noise_multiplier=multiplier, steps=steps, orders=orders)
        return RenyiCurve(orders, tuple(max(float(value), 0.0) for value in divergences)).eps(delta)

    guess, _ = solve(lambda z: spent(z, orders[::8]), eps, 1.0, 0.5, 1e-2)
    found, _ = solve(lambda z: spent(z, orders), eps, guess, 0.02, 2e-5)
    cache.write("multiplier", key, found)
    return found


def costs_of_searches(artefact: Artefact) -> Computed:
    """table_2: what going through a whole grid spends, at the noise that random stopping leaves."""
    spent = {cell.place: _spent_by_all(cell) for cell in artefact.cells if len(cell.candidates) > 1}
    over = [
        f"{cell.at['method']} on {cell.at['setting']} {spent[cell.place]:.2f} at eps = {cell.at['eps']}"
        for cell in artefact.cells
        if spent.get(cell.place, 0.0) > float(cell.at["eps"])
    ]
    remark = (
        "Random stopping, by which the paper charges, makes a random number of runs. Here every point of the grid is "
        f"run. By privacy loss distributions all of them together spend more than eps in {len(over)} of {len(spent)} "
        f"searches: {', '.join(over)}. Such a number counts as one under another account."
    )
    return Computed(spent=spent, remarks=(remark,))


def _spent_by_all(cell: Cell) -> float:
    """Eps of one run of each candidate."""
    config = composed(*cell.candidates[0])
    assert config.privacy.noise_multiplier is not None
    plan = config.release_plan().scaled(config.privacy.noise_multiplier)
    every = tuple(run._replace(times=run.times * len(cell.candidates)) for run in plan.runs)
    return _epsilon(replace(plan, runs=every), config.delta_value, config.eps)


@functools.cache
def _epsilon(plan: Plan, delta: float, eps_scale: float) -> float:
    return epsilon(plan, delta, "pld", eps_scale=eps_scale)


def cost_of_tuning(artefact: Artefact) -> Computed:
    """text_2: sizes of the searches of Tables IV and V, and with the printed times of Table I how long they take."""
    sizes = {optimizer: _grid_sizes(f"table_{number}") for optimizer, number in (("Adam", 4), ("SGD", 5))}
    times = {(cell.at["model"], cell.at["method"]): cell.printed for cell in _file("table_1").cells}

    def number(cell: Cell) -> float:
        row, column = cell.at["of"], cell.at["method"]
        if row.startswith("points"):
            return sizes[row.split()[1]][column]

        def seconds(method: str) -> float:
            printed = times[row, method]
            assert printed is not None
            return printed.value * sizes["Adam"][method]

        return seconds("DP-SGD") / seconds("DC-SGD-E") if column == "saving" else seconds(column)

    return Computed(values_of(artefact, number), remarks=("Times of one training are the paper's.",))


def _file(name: str) -> Artefact:
    return load_artefact(conf_folder() / "paper" / "dc_sgd" / f"{name}.yaml")


def _grid_sizes(table: str) -> dict[str, int]:
    """Candidates of each method's search."""
    return {cell.at["method"]: len(cell.candidates) for cell in _file(table).cells}
