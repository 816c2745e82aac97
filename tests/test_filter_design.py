"""Designed filters against SciPy, and the filter that estimates its taps against a loop of the printed formulas."""

from copy import deepcopy

import numpy as np
import pytest
import torch
from draws import normal
from filter_references import outputs_of
from helpers import composed
from scipy import signal

from dpbench.errors import UserError
from dpbench.filters import Butterworth, Chebyshev, OnlineFIR, RecursiveLowPass


@pytest.mark.parametrize("order", [1, 2, 3, 4])
@pytest.mark.parametrize("cutoff", [0.02, 0.1, 0.3])
@pytest.mark.parametrize("kind", ["butterworth", "chebyshev"])
def test_taps_are_scipys_with_gain_one_at_frequency_zero(kind, order, cutoff):
    if kind == "butterworth":
        stage = Butterworth(order=order, cutoff=cutoff)
        sos = signal.butter(order, cutoff, fs=1.0, output="sos")
    else:
        stage = Chebyshev(order=order, cutoff=cutoff, ripple=2.0)
        sos = signal.cheby1(order, 2.0, cutoff, fs=1.0, output="sos")
    frequencies = np.linspace(0, 0.499, 200)
    _, want = signal.sosfreqz(sos, frequencies, fs=1.0)
    _, found = signal.freqz(stage.b, [1, *stage.a], frequencies, fs=1.0)
    np.testing.assert_allclose(found, want / want[0], atol=1e-7)
    assert sum(stage.b) - sum(stage.a) == pytest.approx(1, abs=1e-9)
    assert np.abs(np.roots([1, *stage.a])).max() < 1
    inputs = normal(30, 5)
    expected = signal.lfilter(stage.b, [1, *stage.a], inputs, axis=0) / signal.lfilter(
        stage.b, [1, *stage.a], np.ones((30, 1)), axis=0
    )
    np.testing.assert_allclose(outputs_of(stage, inputs), expected, rtol=1e-6, atol=1e-8)


def second_order_sections(kind, order, cutoff, inputs):
    """The filter's output with start-up correction in float64 and in parts of two poles each, which rounding spares."""
    sos = signal.butter(order, cutoff, fs=1.0, output="sos")
    if kind == "chebyshev":
        sos = signal.cheby1(order, 1.0, cutoff, fs=1.0, output="sos")
    return signal.sosfilt(sos, inputs, axis=0) / signal.sosfilt(sos, np.ones((len(inputs), 1)), axis=0)


@pytest.mark.parametrize("order", [2, 3, 4, 5, 6, 8, 10, 14])
@pytest.mark.parametrize("kind", ["butterworth", "chebyshev"])
def test_a_design_is_what_it_says_in_float32_or_refused(kind, order):
    design = {"butterworth": Butterworth, "chebyshev": Chebyshev}[kind]
    inputs = normal(1000, 20) + 0.3
    accepted = []
    for cutoff in (0.4, 0.2, 0.1, 0.05, 0.02, 0.01, 0.003, 0.001):
        try:
            stage = design(order=order, cutoff=cutoff)
        except UserError:
            continue
        accepted.append(cutoff)
        want = second_order_sections(kind, order, cutoff, inputs)[500:]
        found = outputs_of(stage, inputs.float()).double().numpy()[500:]
        assert np.sqrt(np.mean((found - want) ** 2) / np.mean(want**2)) < 0.03, cutoff
    assert 0.2 in accepted or order == 14


def test_a_pole_that_rounding_would_move_onto_the_unit_circle_is_refused():
    assert np.float32(-1 + 1e-8) == -1
    with pytest.raises(UserError, match=r"filter\.a"):
        RecursiveLowPass(b=[1e-8], a=[-1 + 1e-8])


def test_first_v1_is_the_butterworth_that_the_specification_names():
    """doppler.md 2.8: order 1 with tan(π Wn/2) = 0.1."""
    stage = Butterworth(order=1, cutoff=np.arctan(0.1) / np.pi)
    assert stage.b == pytest.approx([1 / 11, 1 / 11])
    assert stage.a == pytest.approx([-9 / 11])


def test_second_is_the_butterworth_that_the_specification_names():
    """doppler.md 2.8: order 2 with tan = 1/sqrt(47), whose taps are rounded to integers in units of b_0."""
    stage, rounded = Butterworth(order=2, cutoff=np.arctan(1 / np.sqrt(47)) / np.pi), composed("filter=second").filter
    b, a = np.round(np.array(stage.b) / stage.b[0]), np.round(np.array([1, *stage.a]) / stage.b[0])
    assert rounded.b == pytest.approx(b / 58)
    assert [1, *rounded.a] == pytest.approx(a / 58)
    assert np.roots([1, *rounded.a]) == pytest.approx([0.793103 + 0.161738j, 0.793103 - 0.161738j], abs=1e-6)


def test_the_authors_default_is_the_chebyshev_that_the_specification_names():
    """doppler.md 2.8: cheby1 of order 2, 10 dB, Wn = 0.02, whose b are printed without unit gain."""
    stage = Chebyshev(order=2, cutoff=0.01, ripple=10.0)
    assert stage.a == pytest.approx([-1.98342955, 0.98549544], abs=1e-8)
    assert np.array(stage.b) / stage.b[0] == pytest.approx([1, 2, 1], rel=1e-4)
    assert stage.b[0] == pytest.approx(1.6332e-4 * 10**0.5, rel=1e-3)


@pytest.mark.parametrize(
    "override",
    [
        "filter.order=0",
        "filter.order=1000000000",
        "filter.cutoff=0",
        "filter.cutoff=0.5",
        "filter.ripple=0",
        "filter.ripple=1e-320",
        "filter.ripple=4000",
        "filter.cutoff=1e-12",
    ],
)
def test_designs_that_do_not_exist_are_refused_by_name(override):
    with pytest.raises(UserError, match=override.split("=")[0]):
        composed("algo=doppler", "filter=chebyshev", override)


def online_reference(g, lags, variance, smallest=1e-3):
    """doppler.md 2.6 with running means, as a loop over steps and lags in NumPy."""
    d, outputs = g.shape[1], []
    for t in range(len(g)):
        c = [0.5]
        for tau in range(1, lags + 1):
            pairs = range(tau, t + 1)
            numerator = [g[s] @ g[s - tau] - 0.5 * max(g[s - tau] @ g[s - tau] - d * variance, 0) for s in pairs]
            denominator = [max(g[s] @ g[s] - d * variance, smallest) for s in pairs]
            c.append(max(np.mean(numerator) / np.mean(denominator), 0) if t >= tau else 0)
        b = np.array(c) / sum(c)
        usable = min(t, lags) + 1
        outputs.append(sum(b[tau] * g[t - tau] for tau in range(usable)) / b[:usable].sum())
    return np.array(outputs)


@pytest.mark.parametrize("lags", [0, 1, 3])
@pytest.mark.parametrize(("noise_std", "small"), [(0.0, 0), (0.6, 0), (2.0, 14)])
def test_online_filter_follows_the_printed_formulas(lags, noise_std, small):
    signal_ = np.cumsum(normal(40, 6).numpy() * 0.1, axis=0) + 1
    g = torch.from_numpy(signal_) + noise_std * normal(40, 6, seed=1)
    # How often the noise of a gradient is taken for more than all of it.
    assert int((g.square().sum(1) - 6 * noise_std**2 < 1e-3).sum()) == small
    stage, found = OnlineFIR(lags=lags), []
    for row in g:
        stage.expect(noise_std)
        found.append(stage.apply(row.clone()).clone())
    np.testing.assert_allclose(torch.stack(found), online_reference(g.numpy(), lags, noise_std**2), rtol=1e-10)


def test_online_filter_recognises_white_noise_and_a_constant():
    """Of noise alone nothing is averaged in the end; a constant weighs all lags alike, for c_τ = 1/2."""
    noise, constant = OnlineFIR(lags=3), OnlineFIR(lags=3)
    for row in 0.5 * normal(300, 2000):
        noise.expect(0.5)
        noise.apply(row)
        constant.apply(torch.ones(5, dtype=torch.float64))
    assert constant.taps() == pytest.approx([0.25] * 4)
    # |g|² - dσ² has mean 0 and std dσ² sqrt(2/d) = 16, of which half is subtracted: c_τ is about -1/2 or less.
    assert noise.taps() == [1, 0, 0, 0]


def test_online_filter_returns_a_constant_and_its_first_input():
    stage = OnlineFIR(lags=3)
    inputs = torch.full((9, 4), 2.0, dtype=torch.float64)
    torch.testing.assert_close(outputs_of(stage, inputs), inputs)
    first = normal(1, 4)
    assert torch.equal(outputs_of(OnlineFIR(lags=3), first), first)


@pytest.mark.parametrize(
    "make",
    [lambda: OnlineFIR(lags=3), lambda: Butterworth(order=3), lambda: Chebyshev(order=2)],
    ids=["online", "butterworth", "chebyshev"],
)
@pytest.mark.parametrize("split", [0, 1, 7])
def test_continued_from_its_state_bit_for_bit(make, split):
    inputs = normal(12, 4)
    want = outputs_of(make(), inputs)
    first, second = make(), make()
    for row in inputs[:split]:
        first.apply(row.clone())
    second.load_state_dict(deepcopy(first.state_dict()))
    assert torch.equal(outputs_of(second, inputs[split:]), want[split:])


def test_caller_may_overwrite_the_input():
    inputs, live = normal(8, 4), torch.empty(4, dtype=torch.float64)
    stage, want = OnlineFIR(lags=3), outputs_of(OnlineFIR(lags=3), inputs)
    found = [stage.apply(live.copy_(row)).clone() for row in inputs]
    assert torch.equal(torch.stack(found), want)


@pytest.mark.parametrize(
    ("override", "field"), [("lags=-1", "lags"), ("lags=1000000000", "lags"), ("smallest=0", "smallest")]
)
def test_settings_of_the_online_filter_out_of_range_are_refused(override, field):
    with pytest.raises(UserError, match=f"filter.{field}"):
        composed("filter=online_fir", f"filter.{override}")
