"""Spectra and the recorder, against closed forms, Parseval's identity and printed values."""

import io

import numpy as np
import pytest
import torch
from helpers import assembled, composed
from scipy.signal import lfilter

from dpbench.spectra import (
    GradientRecorder,
    autocorrelation,
    frequency_response,
    normalised_snr,
    signal_to_noise,
    spectrum,
)

TABLE = {
    "sgd": ([1.0], []),
    "momentum": ([0.1], [-0.9]),
    "first_v1": ([1 / 11, 1 / 11], [-9 / 11]),
    "first_v2": ([3 / 11, -1 / 11], [-9 / 11]),
    "second": ([1 / 58, 2 / 58, 1 / 58], [-92 / 58, 38 / 58]),
    "f3": ([0.1, 0.1], [-0.8]),
    "f6": ([0.025, 0.025], [-1.8, 0.85]),
}


def white(steps, coordinates, std=1.0, seed=0):
    return std * np.random.default_rng(seed).standard_normal((steps, coordinates))


def test_spectrum_of_a_sine_is_two_lines():
    """amplitude A at ν: power T A²/4 at ±ν, nothing elsewhere."""
    t = np.arange(200)
    found = spectrum(3 * np.sin(2 * np.pi * 0.1 * t)[:, None])
    assert found.frequencies[0] == -0.5
    at = np.isclose(np.abs(found.frequencies), 0.1)
    assert found.power[at] == pytest.approx([200 * 9 / 4] * 2)
    assert np.abs(found.power[~at]).max() < 1e-9


def test_spectrum_is_the_transform_of_the_circular_autocorrelation_and_keeps_the_power():
    signal = white(64, 5)
    found = spectrum(signal)
    circular = [(signal * np.roll(signal, lag, axis=0)).sum() / 64 for lag in range(64)]
    want = np.array(
        [sum(c * np.cos(2 * np.pi * nu * lag) for lag, c in enumerate(circular)) for nu in found.frequencies]
    )
    np.testing.assert_allclose(found.power, want, atol=1e-9)
    assert found.power.mean() == pytest.approx((signal**2).sum(axis=1).mean())


def test_autocorrelation_of_a_first_order_process():
    """x_t = 0.8 x_{t-1} + e: φ(τ) = 0.8^τ/(1 - 0.64) per coordinate; 200,000 values, 2 %."""
    signal = lfilter([1], [1, -0.8], white(5000, 40), axis=0)[200:]
    want = 40 * 0.8 ** np.arange(5) / 0.36
    np.testing.assert_allclose(autocorrelation(signal, 4), want, rtol=0.03)


def test_noise_is_white():
    found = spectrum(white(1000, 400, std=0.5))
    assert found.power.mean() == pytest.approx(100, rel=0.01)
    # Each of the 1000 powers is a mean of at least 400 exponentials: relative standard error 5 %.
    assert np.abs(found.power / 100 - 1).max() < 6 * 0.05
    correlations = autocorrelation(white(1000, 400, std=0.5), 3)
    assert np.abs(correlations[1:]).max() < 5 * 100 / np.sqrt(400_000)


@pytest.mark.parametrize(
    ("name", "want"),
    [
        ("momentum", (0.31928, 0.16813, 0.07433, 0.05263)),
        ("first_v1", (0.53387, 0.29415, 0.09950, 0)),
        ("first_v2", (0.56002, 0.35081, 0.22250, 0.2)),
        ("second", (0.62738, 0.19517, 0.02124, 0)),
        ("f6", (0.80191, 0.15054, 0.01957, 0)),
    ],
)
def test_frequency_responses_have_the_printed_values(name, want):
    found = np.abs(frequency_response(*TABLE[name], [0.05, 0.1, 0.25, 0.5]))
    assert found == pytest.approx(want, abs=6e-6)


def test_a_filter_raises_the_ratio_of_signal_to_noise_by_what_it_lets_through():
    t = np.arange(1000)
    signal = np.sin(2 * np.pi * 0.01 * t)[:, None] * np.ones((1, 50))
    noise = white(1000, 50)
    assert signal_to_noise(signal, noise) == pytest.approx(0.5, rel=0.02)
    b, a = TABLE["momentum"]
    passed = abs(frequency_response(b, a, [0.01])[0]) ** 2
    assert signal_to_noise(signal, noise, b, a) == pytest.approx(0.5 * passed / (1 / 19), rel=0.05)


# doppler.md 3.3: SNR for c = 1/2 at T = 1000, and for c = 0.5 * 0.95^τ in the limit.
@pytest.mark.parametrize(
    ("name", "constant", "decaying"),
    [
        ("sgd", 0.5, 0.5),
        ("momentum", 9.45481, 6.55172),
        ("first_v1", 5.48759, 4.37755),
        ("first_v2", 3.91778, 3.28717),
        ("second", 5.08739, 3.95221),
        ("f3", 4.98997, 4.06250),
        ("f6", 3.01410, 2.56018),
    ],
)
def test_normalised_snr_has_the_printed_values(name, constant, decaying):
    b, a = TABLE[name]
    kappa = lfilter(b, [1, *a], np.eye(1, 1000)[0])
    assert normalised_snr(kappa, np.full(1000, 0.5)) == pytest.approx(constant, abs=6e-6)
    kappa = lfilter(b, [1, *a], np.eye(1, 400_000)[0])
    assert normalised_snr(kappa, 0.5 * 0.95 ** np.arange(400_000)) == pytest.approx(decaying, rel=1e-4)


def test_the_recorder_keeps_what_the_step_sees_before_and_after_noise():
    step = assembled(composed("batch_size=64"), noise_multiplier=2.0).step
    plain = assembled(composed("batch_size=64"), noise_multiplier=2.0).step
    size = len(step.gradients.flat)
    step.recorder = GradientRecorder.at_random(size, 1500, torch.Generator().manual_seed(0))
    inputs, labels = torch.rand(20, 1, 8, 8), torch.arange(20) % 10
    for _ in range(4):
        for s in (step, plain):
            s([(inputs, labels)])
    assert torch.equal(step.gradients.flat.vector, plain.gradients.flat.vector)
    assert step.recorder.signal.shape == step.recorder.observed.shape == (4, 1500)
    # 6,000 draws of std 2/64: relative standard error 0.9 %.
    assert step.recorder.noise.std() == pytest.approx(2 / 64, rel=0.05)
    assert np.abs(step.recorder.signal).max() < 1


def test_the_recorder_keeps_projections_and_marks_its_file():
    directions = torch.eye(6)[[1, 4]] * 2
    recorder = GradientRecorder(directions=directions)
    for t in range(3):
        recorder.unnoised(torch.full((6,), float(t)))
        recorder.private(torch.arange(6.0))
    stored = np.load(io.BytesIO(recorder.archive()))
    assert stored["signal"].tolist() == [[0, 0], [2, 2], [4, 4]]
    assert stored["observed"].tolist() == [[2, 8]] * 3
    assert "not private" in str(stored["privacy"])


def test_a_recorder_must_know_what_to_keep():
    with pytest.raises(ValueError, match="not both"):
        GradientRecorder()
    with pytest.raises(ValueError, match="not both"):
        GradientRecorder(coordinates=torch.arange(2), directions=torch.eye(2))
