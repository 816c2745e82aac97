"""What needs no training: numbers and curves against SciPy, closed forms, and the values of the specifications."""

import json
import math
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import dp_accounting
import numpy as np
import pytest
import torch
from dp_accounting.pld import PLDAccountant
from opacus.accountants.analysis.rdp import compute_rdp, get_privacy_spent
from scipy.integrate import quad
from scipy.signal import lfilter
from scipy.special import softmax
from scipy.stats import norm
from sklearn.datasets import load_digits
from specifications import artefacts, first_table, specification

from dpbench import sources
from dpbench.claims import Artefact, Evidence, Finding, Kind, Outcome, examine
from dpbench.claims.computed_file import Computed, Panel, path_of, read_computed, write_computed
from dpbench.computed import adp, compute_all, dc_sgd, disk, fingerprint, scatter
from dpbench.computed.catalogue import COMPUTED
from dpbench.filters import RecursiveLowPass
from dpbench.noise import StepSizeNoise
from dpbench.privacy.tuning import RandomStopping
from dpbench.query import LastIterates
from dpbench.threshold import PercentileThreshold

ALL = [f"{paper}/{name}" for paper, name in COMPUTED]


def shortened(name: str) -> Artefact:
    """The artefact; of the two that take longest some cells of every kind, and no claims about all of them."""
    artefact = artefacts()[name]
    if name == "dc_sgd/figure_2":
        chosen = {"b": ("20", "100"), "sigma_H": ("5", "10"), "p": ("0.1", "0.5", "0.9")}
    elif name == "dc_sgd/text_1":
        chosen = {"data": ("MNIST", "NAMES"), "eps": ("1", "2", "4"), "search": ("none", "RDP 9", "LT 10")}
    else:
        return artefact
    return replace(artefact, cells=artefact.select(chosen), claims=())


@pytest.fixture(scope="session")
def results(tmp_path_factory) -> Path:
    """A results folder in which all is computed."""
    folder = tmp_path_factory.mktemp("computed")
    compute_all(folder, [shortened(name) for name in ALL], lambda line: None)
    return folder


@pytest.fixture
def computed(results) -> Callable[[str], Computed]:
    def read(name: str) -> Computed:
        found = read_computed(path_of(results, *name.split("/")))
        assert found is not None
        return found

    return read


def panel(computed: Computed, start: str) -> Panel:
    """The panel of a title, or the one that begins so."""
    whole = [one for one in computed.panels if one.title == start]
    (found,) = whole or [one for one in computed.panels if one.title.startswith(start)]
    return found


def line(panel: Panel, name: str) -> tuple[np.ndarray, np.ndarray]:
    (found,) = [one for one in panel.curves if one.name == name]
    return np.array(found.x), np.array(found.y)


def verdicts(artefact: Artefact, results: Path) -> tuple[Finding, ...]:
    return examine(artefact, Evidence(results, lambda overrides: None)).findings


# All that is to be computed is, and agrees, but for what is said here.


def test_what_is_computed_is_all_that_conf_paper_asks_for():
    asked = {
        name
        for name, artefact in artefacts().items()
        if artefact.kind == Kind.COMPUTED or any(cell.metric == "computed" for cell in artefact.cells)
    }
    assert asked <= set(ALL)
    beside_runs = {"adp/figure_1", "adp/figure_3", "adp/figure_4", "dc_sgd/table_2"}  # curves, and what searches spend
    assert set(ALL) - asked == beside_runs


@pytest.mark.parametrize("name", ALL)
def test_every_computed_cell_has_its_number_and_every_figure_its_panels(name, computed):
    found = computed(name)
    places = {c.place for c in shortened(name).cells if c.metric == "computed" and c.quoted is None}
    assert set(found.values) == places
    assert all(math.isfinite(value) for value in found.values.values())
    assert bool(found.panels) or "figure" not in name
    for one in found.panels:
        assert one.x.label
        assert one.y.label
        for curve in one.curves:
            assert len(curve.x) == len(curve.y) > 1
            assert len(curve.x) <= 600
            assert np.isfinite(curve.y).all()
            assert not one.y.log or min(curve.y) > 0


# Claims that do not hold.
CONTRADICTED = {
    "disk/figure_3": [
        "1, 0.3, 0.2, number rate of",
        "2, 0.5, 0.1, number rate of",
        "1, 0.1, 0, number rate of",
    ],
    "disk/table_7": ["data MNLI", "data QNLI", "data E2E", "data DART"],
    "adp/text_1": [f"eps {eps}, account quoted" for eps in ("0.8", "1.2", "1.6", "3.2", "6.4")],
    "adp/text_2": ["So it does with step size (i)"],
}
AGREEMENT = (Outcome.REPRODUCED, Outcome.AS_DERIVED, Outcome.ORDER_HOLDS, Outcome.NOT_JUDGED)


@pytest.mark.parametrize("name", ALL)
def test_all_numbers_agree_with_the_specification_but_those_that_are_wrong_in_the_paper(name, results):
    wrong = [f.claim for f in verdicts(shortened(name), results) if f.outcome not in (*AGREEMENT, Outcome.NOT_RUN)]
    expected = CONTRADICTED.get(name, [])
    assert len(wrong) == len(expected), wrong
    assert all(any(part in claim for claim in wrong) for part in expected), wrong


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "derived", "contradicted"),
    [
        ("dc_sgd/text_1", 126, ["at eps 2 either"]),
        (
            "dc_sgd/figure_2",
            6,
            ["The estimates hardly depend on sigma_H", "They hardly depend on b, read as 10 in the mean, for all"],
        ),
    ],
)
def test_all_numbers_of_the_longest_agree_with_the_specification(name, derived, contradicted, tmp_path):
    artefact = artefacts()[name]
    compute_all(tmp_path, [artefact], lambda line: None)
    found = verdicts(artefact, tmp_path)
    assert [f.outcome for f in found].count(Outcome.AS_DERIVED) == derived
    fails = [f for f in found if f.outcome not in AGREEMENT]
    assert [f.outcome for f in fails] == [Outcome.ORDER_FAILS] * len(contradicted)
    assert all(part in f.claim for part, f in zip(contradicted, fails, strict=True))


# What conf/paper has from the specifications stands there.


def section(reference: str) -> str:
    """The text of a section, "doppler.md 2.8"; of a whole chapter where there is no such heading."""
    file, number = reference.split()
    lines = specification(file.removesuffix(".md"))
    start = next(i for i, text in enumerate(lines) if re.match(rf"#+ {re.escape(number)}[. ]", text))
    end = next((i for i in range(start + 1, len(lines)) if lines[i].startswith("#")), len(lines))
    return "\n".join(lines[start:end])


# Formulas there, evaluated below; and the middle of "3 to 4".
ELSEWHERE = {
    *(("adp/figure_2", name) for name in ("(ii) at 0", "(ii) at T")),
    ("disk/figure_3", "rate of the paper"),
    ("dc_sgd/figure_2", "spread"),
}


@pytest.mark.parametrize("name", [name for name, a in artefacts().items() if any(c.derived for c in a.cells)])
def test_derived_numbers_stand_in_the_section_that_is_named(name):
    for cell in artefacts()[name].cells:
        if cell.derived is None or cell.printed is None or (name, cell.at.get("number")) in ELSEWHERE:
            continue
        text = re.sub(r"(?<=\d)[, ](?=\d{3}\b)", "", section(cell.derived))
        known = {float(x) for x in re.findall(r"-?(?<![\w.])\d*\.?\d+(?:e-?\d+)?", text)}
        assert cell.printed.value in known, (cell.place, cell.printed.value, cell.derived)


def test_noise_multipliers_are_those_of_the_specification_place_by_place():
    names = ("none", "RDP 9", "RDP 10", "RDP 45", "RDP 90", "LT 9", "LT 10", "LT 45", "LT 90")
    axes = ("data", "eps", "orders", "search")
    cells = {tuple(c.at[axis] for axis in axes): c for c in artefacts()["dc_sgd/text_1"].cells}
    data, compared = "", 0
    for row in first_table(specification("dc_sgd"), "**Noise multipliers to expect"):
        data = row[0].split()[0] if row[0] else data
        for name, text in zip(names, row[2:], strict=True):
            for orders, number in zip(("to 63", "to 512"), re.findall(r"[\d.]+", text), strict=False):
                assert cells[data, row[1], orders, name].printed.value == float(number)
                compared += 1
    assert compared == 126 - 3  # and those of NAMES


# DOPPLER.

TAPS = {
    "SGD": ([1], []),
    "Momentum-SGD": ([0.1], [-0.9]),
    "1st-order ver.1": ([1 / 11, 1 / 11], [-9 / 11]),
    "1st-order ver.2": ([3 / 11, -1 / 11], [-9 / 11]),
    "2nd-order": ([1 / 58, 2 / 58, 1 / 58], [-92 / 58, 38 / 58]),
    "f1": ([0.075, 0.025], [-0.9]),
    "f2": ([0.025, 0.075], [-0.9]),
    "f3": ([0.1, 0.1], [-0.8]),
    "f4": ([0.2, 0.2], [-0.6]),
    "f5": ([0.025, 0.05, 0.025], [-0.9]),
    "f6": ([0.025, 0.025], [-1.8, 0.85]),
}


def test_responses_of_all_filters_are_those_of_scipy(computed):
    names = list(TAPS)
    for letters, chosen in (("ab", names[:5]), ("cd", names[5:])):
        in_time, in_frequency = (panel(computed("doppler/figure_6"), f"{letter}:") for letter in letters)
        assert [c.name for c in in_time.curves] == [c.name for c in in_frequency.curves] == chosen
        for name in chosen:
            b, a = TAPS[name]
            lags, kappa = line(in_time, name)
            assert lags.tolist() == list(range(51))
            np.testing.assert_allclose(kappa, lfilter(b, [1, *a], np.eye(1, 51)[0]), rtol=0, atol=1e-12)
            nu, gain = line(in_frequency, name)
            waves = np.exp(-2j * np.pi * np.outer(nu, np.arange(3)))
            by_hand = waves[:, : len(b)] @ b / (waves[:, : 1 + len(a)] @ [1, *a])
            np.testing.assert_allclose(gain, np.abs(by_hand), rtol=0, atol=1e-12)


def test_the_illustration_is_a_parabola_and_its_transform(computed):
    found = computed("doppler/figure_1")
    lags, phi = line(panel(found, "a"), "gradient")
    np.testing.assert_allclose(phi, np.clip(1 - (lags / 4) ** 2, 0, None))
    lags, noise = line(panel(found, "a"), "noise")
    assert noise[lags == 0] == 1
    assert not noise[lags != 0].any()
    nu, power = line(panel(found, "b"), "gradient")
    transform = [(phi * np.exp(-1j * np.pi * one * lags)).sum() for one in nu]
    np.testing.assert_allclose(power, np.real(transform), atol=1e-12)
    np.testing.assert_allclose(line(panel(found, "b"), "noise")[1], 1)
    assert line(panel(found, "c"), "low-pass")[0].tolist() == [-1, -0.6, 0.6, 1]


# DiSK.


@pytest.mark.parametrize("variances", [(1, 0.3, 0.2), (2, 0.5, 0.1), (1, 0.1, 0)])
def test_gains_converge_to_the_fixed_point_at_the_slope_of_their_map(variances, computed):
    w, h, v = variances
    p = disk.steady_gain(w, h, v).variance
    assert p == pytest.approx((w - h) * (p + h + v) / (p + w + v), rel=1e-12)
    slope = ((w - h) / (p + w + v)) ** 2
    assert disk.observed_rate(w, h, v) == pytest.approx(slope, rel=1e-6)
    assert disk.published_rate(w, h, v) > slope + 0.06
    shown = panel(computed("disk/figure_3"), f"σ_w², σ_H², σ_v² = {', '.join(map(str, variances))}")
    gains, k, previous = line(shown, "k_t")[1], [], w
    for _ in gains:
        k.append((previous + h + v) / (previous + w + v))
        previous = (w - h) * k[-1]
    np.testing.assert_allclose(gains, k, rtol=1e-12)
    np.testing.assert_allclose(line(shown, "p_t")[1], (w - h) * np.array(k), rtol=1e-12)


def test_the_rates_of_the_paper_are_those_of_its_formula():
    cells = [c for c in artefacts()["disk/figure_3"].cells if c.at["number"] == "rate of the paper"]
    for cell in cells:
        w, h, v = (float(x) for x in cell.at["variances"].split(", "))
        assert disk.published_rate(w, h, v) == pytest.approx(cell.printed.value, abs=6e-7)
        assert cell.derived == "disk.md 3.2"  # the paper prints the formula, and no number of it
    assert disk.published_rate(1, 0.3, 0.2) == pytest.approx(0.41406, abs=6e-6)  # disk.md 3.2


def test_the_last_loss_of_noisy_gradient_descent_is_that_of_the_closed_form(computed):
    """x_T - x* is normal around (I - lr H)^T (x_0 - x*), which has vanished. The mean is within 5 errors."""
    problem = disk.LinearRegression.draw(disk.generator(0, "synthetic", disk.torch.device("cpu"), "regression"))
    eigenvalues = np.linalg.eigvalsh(problem.hessian.numpy())
    shares = eigenvalues / 2 * disk.LR**2 / (1 - (1 - disk.LR * eigenvalues) ** 2)  # of each direction, at variance 1
    variances, losses = line(computed("disk/figure_6a").panels[0], "NoisyGD")
    for variance, loss in zip(variances, losses, strict=True):
        error = variance * math.sqrt(2 * (shares**2).sum() / disk.RUNS)
        assert loss - problem.least_loss == pytest.approx(variance * shares.sum(), abs=5 * error)


def test_the_unsimplified_filter_ends_below_the_simplified_one(computed):
    """With the exact Hessian it averages over all steps, and what is left of the noise falls with their number."""
    for panel in computed("disk/figure_6a").panels:
        _, full = line(panel, disk.FULL)
        for name in ("NoisyGD", "NoisyLP", "NoisyKF"):
            assert (full < 0.25 * np.array(line(panel, name)[1])).all()


@pytest.mark.parametrize(
    ("data", "samples"),
    [("MNIST", 60_000), ("CIFAR-10/100", 50_000), ("ImageNet-1k", 1_281_167), ("SST-2", 67_349), ("E2E", 42_061)],
)
def test_deltas_are_powers_of_the_number_of_samples(data, samples, computed):
    found = computed("disk/table_7").values[f"data {data}, delta here"]
    assert math.log(found) == pytest.approx(-1.1 * math.log(samples), rel=1e-12)


# ADP.


def test_step_sizes_are_their_formulas(computed):
    for steps in (11_760, 23_520, 39_200):
        (shown,) = [one for one in computed("adp/figure_2").panels if one.title.endswith(f"T = {steps}")]
        t, blue = line(shown, "1/sqrt(20 + t)")
        np.testing.assert_allclose(blue, 1 / np.sqrt(20 + t), rtol=1e-12)
        t, orange = line(shown, "0.1 - r_T sqrt(t)")
        np.testing.assert_allclose(orange, 0.1 - (0.1 - 1e-10) / math.sqrt(steps) * np.sqrt(t), rtol=1e-9)
        assert t[0] == 0
        assert t[-1] >= 0.98 * steps


def test_noise_and_budget_run_between_the_values_of_the_specification(computed):
    """adp.md 5, Figure 1, and 2.6."""
    noise, spent = computed("adp/figure_1").panels
    for name, first, factor in (("ADP", 1.909e-3, 0.5), ("DP", 8.017e-3, 1.0)):
        (shown,) = [c for c in noise.curves if c.name.startswith(f"{name}-SGD")]
        t, found = np.array(shown.x), np.array(shown.y)
        assert found[0] == pytest.approx(first, rel=5e-4)
        np.testing.assert_allclose(found, found[0] * (20 / (20 + t)) ** (factor / 2), rtol=1e-9)  # sqrt(η) and η
    t, found = line(spent, "DP-SGD")
    np.testing.assert_allclose(found, 3.2 * np.sqrt(t / 23_520), rtol=1e-9, atol=1e-12)
    t, found = line(spent, "ADP-SGD")
    sums = np.concatenate([[0], np.cumsum(1 / np.sqrt(20 + np.arange(23_520)))])
    np.testing.assert_allclose(found, 3.2 * np.sqrt(sums[t.astype(int)] / sums[-1]), rtol=1e-9, atol=1e-12)


def test_noise_grows_with_the_threshold_alone(computed):
    """Figure 3's panels at 120 epochs are Figure 1's, times C / 2.5."""
    reference = computed("adp/figure_1").panels[0]
    for norm_ in ("1", "2.5", "5"):
        shown = panel(computed("adp/figure_3"), f"noise in the parameters, C = {norm_}, 120 epochs")
        for one, other in zip(shown.curves, reference.curves, strict=True):
            np.testing.assert_allclose(one.y, np.array(other.y) * float(norm_) / 2.5, rtol=1e-12)
    ends = panel(computed("adp/figure_3"), "noise in the parameters, C = 1, 200").curves
    assert [c.y[0] * 3.2 for c in ends] == pytest.approx([2.8217e-3, 1.34248e-2], rel=1e-4)  # adp.md 3.1


def classical(q, z, steps):
    orders = [1 + x / 10 for x in range(1, 100)] + list(range(11, 64)) + [128, 256, 512, 1024]
    divergences = np.array(compute_rdp(q=q, noise_multiplier=z, steps=steps, orders=orders))
    return float((divergences - math.log(1e-5) / (np.array(orders) - 1)).min())


def test_the_quoted_budgets_are_those_of_the_specification(computed):
    """adp.md 4.1: 0.280, 0.399, 0.536, 1.123 and 2.657, by the conversion of the time."""
    found = computed("adp/text_1")
    assert list(found.values.values()) == pytest.approx([0.280, 0.399, 0.536, 1.123, 2.657], abs=3e-3)
    assert [c.printed for c in found.panels[0].curves] == [True, False, False]


def test_budgets_of_the_mnist_study_by_opacus_and_by_hand(computed):
    for z in (1.6, 3.2, 6.4, 12.8):
        (shown,) = [one for one in computed("adp/figure_4").panels if one.title.endswith(f"= {z:g}")]
        epochs, numerical = line(shown, "numerical ε")
        _, theoretical = line(shown, "theoretical ε/16")
        for at in (0, 19, 49):
            t = math.ceil(epochs[at] * 60_000 / 256)  # steps of the trained runs, on Poisson batches
            assert numerical[at] == pytest.approx(classical(256 / 60_000, z, t), rel=5e-3)
            log_factor = math.log(16 * t * 256 / (60_000 * 1e-5)) * math.log(1.25e5)
            assert theoretical[at] == pytest.approx(256 / (60_000 * z) * math.sqrt(log_factor * t), rel=1e-9)


# DP-PMLF.


def test_filters_of_pmlf_are_those_of_scipy(computed):
    taps = {"LP3": ([0.5, -0.1], [-0.6]), "LP6": ([0.15, -0.05], [-0.9]), "LP7": ([0.05, 0.05], [-0.7, -0.2])}
    for name, (b, a) in taps.items():
        _, kappa = line(panel(computed("dp_pmlf/text_2"), "time"), name)
        np.testing.assert_allclose(kappa, lfilter(b, [1, *a], np.eye(1, 51)[0]), atol=1e-12)
        _, gain = line(panel(computed("dp_pmlf/text_2"), "frequency"), name)
        assert gain[0] == pytest.approx(1)


def test_the_variance_factor_is_that_of_the_lemma(computed):
    """dp_pmlf.md 3.2: (1 + β)(1 - β^k)/((1 - β)(1 + β^k))."""
    for k in range(1, 7):
        for beta in (0.1, 0.3, 0.5, 0.7, 0.9):
            want = (1 + beta) * (1 - beta**k) / ((1 - beta) * (1 + beta**k))
            assert computed("dp_pmlf/text_3").values[f"k {k}, beta {beta}"] == pytest.approx(want, rel=1e-12)


@pytest.mark.parametrize(("length", "decay", "factor"), [(2, 0.1, 1.198), (2, 0.9, 1.9945), (4, 0.9, 3.9455)])
def test_gradients_of_iterates_that_are_independent_scatter_by_the_lemmas_factor_less(
    length, decay, factor, monkeypatch
):
    """dp_pmlf.md 3.2-3; over 2e7 normal numbers the ratio errs by 0.1 % at most, three standard errors."""
    draws = torch.Generator().manual_seed(0)
    monkeypatch.setattr(
        scatter, "_per_sample", lambda network: lambda iterate, pictures, labels: 3 + _normal(pictures, iterate, draws)
    )
    found = scatter.measured_factor("linear", LastIterates(length, decay), noise_multiplier=1)
    assert found == pytest.approx(factor, rel=1e-3)


def _normal(pictures, iterate, draws):
    return torch.randn(len(pictures), len(iterate), generator=draws, dtype=torch.float64)


def test_gradients_of_iterates_that_do_not_move_scatter_as_without_momentum(monkeypatch):
    monkeypatch.setattr(scatter, "LR", 0.0)
    found = scatter.measured_factor("MLP", LastIterates(3, 0.9), noise_multiplier=1)
    assert found == pytest.approx(1, rel=1e-12)


def test_scatter_of_a_linear_model_is_that_of_its_closed_form(monkeypatch):
    """A softmax's per-sample gradients are (p - e_y) x^T and p - e_y; of one step, which has one iterate."""
    seen = []
    monkeypatch.setattr(scatter, "STEPS", 1)
    monkeypatch.setattr(scatter, "_scatter", lambda rows: seen.append(rows) or 1.0)
    starts = LastIterates(1, 0.5)
    monkeypatch.setattr(starts, "points", lambda iterate, points=starts.points: seen.append(iterate) or points(iterate))
    scatter.measured_factor("linear", starts, noise_multiplier=0)
    iterate, rows, momentum = seen
    digits = load_digits()
    weight, bias = iterate[:640].view(10, 64).numpy(), iterate[640:].numpy()
    residual = softmax(digits.data / 16 @ weight.T + bias, axis=1) - np.eye(10)[digits.target]
    each = np.concatenate([np.einsum("bi,bj->bij", residual, digits.data / 16).reshape(-1, 640), residual], axis=1)
    np.testing.assert_array_equal(rows, momentum)
    assert len(rows) == pytest.approx(256, abs=5 * 256**0.5)
    gaps = np.abs(each[None, :, ::37] - rows.numpy()[:, None, ::37]).max(2)
    assert gaps.min(1).max() < 1e-12  # each row is that of some sample
    assert len(set(gaps.argmin(1))) == len(rows)


# DC-SGD.


def test_percentiles_without_noise_are_within_half_a_bin(computed):
    for bins in (5, 10, 20, 50, 100):
        shown = panel(computed("dc_sgd/figure_2"), f"b = {bins}")
        assert [c.name for c in shown.curves] == ["true percentile", "σ_H = 0", "σ_H = 5", "σ_H = 10"]
        p, truth = line(shown, "true percentile")
        np.testing.assert_allclose(truth, norm.ppf(p, 100, 20), atol=5 * 20 * 0.15)  # five errors of 256 samples
        assert np.abs(line(shown, "σ_H = 0")[1] - truth).max() <= 150 / bins / 2 + 1e-9 or bins < 10
        # In the last bin there is no telling how far beyond the range a norm lies; with few bins it is wide.


def test_expected_errors_by_numerical_integration(computed):
    weight = 100_000 / 256**2
    shown = panel(computed("dc_sgd/figure_3"), "b = 20")
    c, truth = line(shown, "true")
    for at in (0, 80, 160, 239):
        beyond = quad(lambda x, at=at: max(x - c[at], 0) ** 2 * norm.pdf(x, 100, 20), -50, 300, points=[100])[0]
        assert truth[at] == pytest.approx(weight * c[at] ** 2 + beyond, rel=1e-6)
    # Of the histogram without noise: its bins have the normal law's shares, within the error of 256 samples.
    _, estimate = line(shown, "σ_H = 0")
    edges = np.append(np.arange(20) * 6.0, np.inf)
    shares = np.diff(norm.cdf(edges, 100, 20))
    middles = 6.0 * np.arange(20) + 3
    expected = weight * c**2 + (shares * np.maximum(middles - c[:, None], 0) ** 2).sum(axis=1)
    np.testing.assert_allclose(estimate, expected, rtol=0.08)


@pytest.mark.parametrize(
    ("place", "samples", "epochs", "multiplier", "histogram", "runs"),
    [
        ("setting CNN MNIST, eps 4, method Du", 60_000, 10, 1.880, math.inf, 90),
        ("setting CNN MNIST, eps 8, method DC-SGD-P", 60_000, 10, 1.2789, 5, 9),
        ("setting ResNet34 CIFAR10, eps 8, method Andrew", 50_000, 20, 1.4272, math.inf, 45),
        ("setting ResNet18 SVHN, eps 4, method DP-SGD", 73_257, 20, 1.922, math.inf, 10),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_search_spends_what_its_runs_spend_together(computed, place, samples, epochs, multiplier, histogram, runs):
    """By privacy loss distributions with a fixed interval; a joint release has 1/z² = 1/σ² + 1/σ_H²."""
    joint = (multiplier**-2 + histogram**-2) ** -0.5
    release = dp_accounting.PoissonSampledDpEvent(256 / samples, dp_accounting.GaussianDpEvent(joint))
    account = PLDAccountant(value_discretization_interval=1e-3)
    account.compose(release, runs * math.ceil(epochs * samples / 256))
    assert computed("dc_sgd/table_2").spent[place] == pytest.approx(account.get_epsilon(1 / samples), rel=0.01)


def test_of_table_2_the_remark_names_the_searches_beyond_their_eps(computed):
    """Those of one grid point have no search."""
    found = computed("dc_sgd/table_2")
    assert len(found.spent) == 6 * 3 * 4
    over = {place for place, spent in found.spent.items() if spent > float(re.findall(r"eps (\d+)", place)[0])}
    (remark,) = found.remarks
    assert f"in {len(over)} of 72 searches" in remark
    assert all(f"on {re.findall('setting (.*?),', place)[0]}" in remark for place in over)
    assert "Du on CNN MNIST 4.92 at eps = 4, Du on CNN MNIST 8.38 at eps = 8, " in remark


@pytest.mark.parametrize("noise", [0, 5, 10])
@pytest.mark.parametrize("bins", [5, 20, 50, 100])
def test_estimated_errors_under_noise_are_about_those_without(bins, noise, computed):
    """N/S' is below x where N - x S' is negative, which is normal around 0 at the x that it has without noise."""
    width = 120 / bins
    shares = np.diff(norm.cdf(np.append(np.arange(bins) * width, np.inf), 100, 20))
    for c in (20, 40, 60, 80):
        beyond = (shares * np.maximum((np.arange(bins) + 0.5) * width - c, 0) ** 2).sum()
        found = computed("dc_sgd/figure_3").values[f"b {bins}, curve {noise}, number E {c}"]
        assert found == pytest.approx(100_000 / 256**2 * c**2 + beyond, rel=0.05)


@pytest.mark.filterwarnings("ignore:Optimal order is the")
def test_noise_multipliers_spend_their_budget_by_opacus(computed):
    """Opacus' own conversion; random stopping by dc_sgd.md 2.7."""
    q, steps, delta = 256 / 60_000, 2350, 1 / 60_000
    orders = [1 + x / 10 for x in range(1, 100)] + list(range(12, 64))
    for search, eps, at, times in (("none", 2, delta, 1), ("RDP 9", 2, delta, 9), ("LT 10", 2 / 3, 1.82e-17, 1)):
        z = computed("dc_sgd/text_1").values[f"data MNIST, eps 2, orders to 63, search {search}"]
        divergences = compute_rdp(q=q, noise_multiplier=z, steps=steps * times, orders=orders)
        spent = get_privacy_spent(orders=orders, rdp=divergences, delta=at)[0]
        assert spent == pytest.approx(eps, rel=2e-3)


@pytest.mark.parametrize("name", ["dc_sgd/text_2", "doppler/figure_6"])
def test_what_follows_from_a_papers_own_numbers_is_not_counted_as_reproduced(name, results):
    """Products of its times, and the gain at frequency 0 of its taps: they agree with the paper by arithmetic alone."""
    outcomes = {finding.outcome for finding in verdicts(shortened(name), results)}
    assert outcomes == {Outcome.AS_DERIVED, Outcome.NOT_JUDGED}


def test_the_saving_is_the_quotient_of_the_printed_times(computed):
    values = computed("dc_sgd/text_2").values
    assert values["of CNN, method saving"] == pytest.approx(10 * 186 / 214)
    assert values["of BERT, method Du"] == 90 * (17 * 60 + 32)


# A part that is wrong is found.


def broken(name: str, tmp_path: Path) -> list[Finding]:
    """The verdicts against the specification where some part is broken."""
    artefact = shortened(name)
    if name == "dc_sgd/figure_2":
        artefact = replace(artefact, cells=artefact.select({"b": ("20",), "sigma_H": ("5",)}), claims=())
    found = COMPUTED[artefact.paper, artefact.name](artefact)
    write_computed(path_of(tmp_path, artefact.paper, artefact.name), found, {})
    return [f for f in verdicts(artefact, tmp_path) if f.outcome not in (*AGREEMENT, Outcome.NOT_RUN)]


APPLY, GAINS = RecursiveLowPass.apply, disk.scalar_gains


def _more_than_the_quantile(self, counts, error_weight):
    reached = np.cumsum(counts) >= (self.quantile + 0.2) * counts.sum()
    return (int(reached.argmax()) + 0.5) * self._range / self.bins, 1.0


PLANTED: list[tuple[str, object, str, object]] = [
    ("doppler/figure_6", RecursiveLowPass, "apply", lambda self, gradient: 0.999 * APPLY(self, gradient)),
    ("disk/figure_3", disk, "scalar_gains", lambda w, h, v, steps: GAINS(w, h, v, steps + 1)[1:]),
    ("disk/figure_6a", disk, "METHODS", {**disk.METHODS, "NoisyKF": disk.METHODS["NoisyLP"]}),
    ("adp/text_2", StepSizeNoise, "scale", lambda self, step: 1 / self.course.rate(step)),
    ("dc_sgd/figure_2", PercentileThreshold, "_rule", _more_than_the_quantile),
    ("dc_sgd/figure_3", dc_sgd, "midpoints", lambda reach, bins: np.arange(bins) * reach / bins),
    ("dc_sgd/text_1", RandomStopping, "over", classmethod(lambda cls, candidates: cls(1 / candidates))),
]


@pytest.mark.parametrize(("name", "where", "attribute", "replacement"), PLANTED, ids=[row[0] for row in PLANTED])
def test_a_part_that_is_wrong_is_found(name, where, attribute, replacement, monkeypatch, tmp_path):
    monkeypatch.setenv("DPBENCH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(where, attribute, replacement)
    monkeypatch.setattr(disk, "RUNS", 5)
    adp.schedule_of.cache_clear()
    try:
        assert len(broken(name, tmp_path)) > len(CONTRADICTED.get(name, []))
    finally:
        adp.schedule_of.cache_clear()


# What is up to date is left alone.


def test_what_is_up_to_date_is_not_computed_again(tmp_path, monkeypatch):
    artefact, said = artefacts()["disk/figure_3"], []
    compute_all(tmp_path, [artefact], said.append)
    path = path_of(tmp_path, "disk", "figure_3")
    first = path.read_text()
    origin = json.loads(first)["provenance"]
    assert {"commit", "versions", "command", "seconds", "fingerprint"} <= set(origin)
    compute_all(tmp_path, [artefact], said.append)
    assert path.read_text() == first
    assert said[1] == "disk/figure_3: up to date"
    monkeypatch.setattr(fingerprint, "PACKAGES", ("numpy",))
    compute_all(tmp_path, [artefact], said.append)
    assert said[2].startswith("disk/figure_3: 36 numbers, 5 panels")


def test_a_damaged_file_is_computed_again(tmp_path):
    path = path_of(tmp_path, "disk", "figure_3")
    path.parent.mkdir(parents=True)
    path.write_text("{")
    compute_all(tmp_path, [artefacts()["disk/figure_3"]], lambda line: None)
    assert read_computed(path).values


def test_an_artefact_that_is_only_trained_is_passed_over(tmp_path):
    compute_all(tmp_path, [artefacts()["doppler/table_3"]], pytest.fail)
    assert not list(tmp_path.iterdir())


def test_a_change_of_a_part_or_a_setting_changes_the_fingerprint(tmp_path, monkeypatch):
    artefact = artefacts()["disk/figure_3"]
    before = fingerprint.fingerprint(artefact, "dpbench.computed.disk")
    for folder in ("dpbench", "conf"):
        shutil.copytree(sources.ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(sources, "ROOT", tmp_path)
    monkeypatch.setattr(fingerprint, "conf_folder", lambda: tmp_path / "conf")
    assert fingerprint.fingerprint(artefact, "dpbench.computed.disk") == before
    for changed in ("dpbench/filters/kalman.py", "conf/filter/f1.yaml", "conf/paper/disk/figure_3.yaml"):
        path = tmp_path / changed
        path.write_text(path.read_text() + "\n")
        after = fingerprint.fingerprint(artefact, "dpbench.computed.disk")
        assert after != before, changed
        before = after
    for unrelated in ("dpbench/cli/table.py", "conf/paper/adp/table_1.yaml"):
        path = tmp_path / unrelated
        path.write_text(path.read_text() + "\n")
        assert fingerprint.fingerprint(artefact, "dpbench.computed.disk") == before, unrelated
