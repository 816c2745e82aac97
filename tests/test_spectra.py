"""Spectra and the recorder, against closed forms, Parseval's identity and printed values."""

import io

import numpy as np
import pytest
import torch
from draws import normal
from filter_references import SNR, TAPS, catalogued, impulse_response, normalised_snr, outputs_of, taps
from helpers import assembled, composed
from scipy.optimize import brentq
from scipy.signal import lfilter
from toy_problems import point_step

from dpbench.filters import OnlineFIR
from dpbench.privacy.sampling import FixedSizeSampler, PoissonSampler
from dpbench.privacy.uniform import SeededUniform
from dpbench.spectra import autocorrelation, frequency_response, signal_to_noise, spectrum
from dpbench.threshold import FixedThreshold
from dpbench.training.recorder import GradientRecorder


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


def test_an_ideal_filter_leaves_sin_t_of_sin_t_and_sin_10_t():
    """doppler.md 3.2, E9: of pass band |ν| <= 1/(2π). 710 steps are 113 periods to 6e-5; lines of sin t: 1/4 each."""
    t = np.arange(710)
    slow, both = np.sin(t), np.sin(t) + np.sin(10 * t)
    assert autocorrelation(slow[:, None], 20) == pytest.approx(np.cos(np.arange(21)) / 2, abs=2e-3)
    frequencies, power = spectrum(slow[:, None])
    assert power[np.abs(frequencies) == 113 / 710] / 710 == pytest.approx([1 / 4] * 2, rel=1e-4)
    found = spectrum(both[:, None])
    assert np.sort(found.power)[-5:] / 710 == pytest.approx([0, *[1 / 4] * 4], abs=1e-4)
    passed = np.fft.ifftshift(np.abs(found.frequencies) <= 1 / (2 * np.pi))
    np.testing.assert_allclose(np.fft.ifft(np.fft.fft(both) * passed), slow, atol=1e-3)


def test_spectrum_is_the_transform_of_the_circular_autocorrelation_and_keeps_the_power():
    signal = white(64, 5)
    found = spectrum(signal)
    circular = [(signal * np.roll(signal, lag, axis=0)).sum() / 64 for lag in range(64)]
    want = np.array(
        [sum(c * np.cos(2 * np.pi * nu * lag) for lag, c in enumerate(circular)) for nu in found.frequencies]
    )
    np.testing.assert_allclose(found.power, want, atol=1e-9)
    assert found.power.mean() == pytest.approx((signal**2).sum(axis=1).mean())


def test_noise_is_white():
    found = spectrum(white(1000, 400, std=0.5))
    assert found.power.mean() == pytest.approx(100, rel=0.01)
    # Each of the 1000 powers is a mean of at least 400 exponentials: relative standard error 5 %.
    assert np.abs(found.power / 100 - 1).max() < 6 * 0.05
    correlations = autocorrelation(white(1000, 400, std=0.5), 3)
    assert np.abs(correlations[1:]).max() < 5 * 100 / np.sqrt(400_000)


# doppler.md 2.8: where the power is halved, and |H| at ν = 0.05, 0.1, 0.25, 0.5.
@pytest.mark.parametrize(
    ("name", "halved", "want"),
    [
        ("sgd", None, (1, 1, 1, 1)),
        ("momentum", 0.01679, (0.31928, 0.16813, 0.07433, 0.05263)),
        ("first_v1", 0.03173, (0.53387, 0.29415, 0.09950, 0)),
        ("first_v2", 0.03307, (0.56002, 0.35081, 0.22250, 0.2)),
        ("second", 0.04468, (0.62738, 0.19517, 0.02124, 0)),
        ("f1", 0.01675, (0.31634, 0.16200, 0.05876, 0.02632)),
        ("f2", 0.01675, (0.31634, 0.16200, 0.05876, 0.02632)),
        ("f3", 0.03522, (0.57430, 0.32357, 0.11043, 0)),  # printed: 0.03523; it is 0.035223
        ("f4", 0.07798, (0.84474, 0.60981, 0.24254, 0)),
        ("f5", 0.01669, (0.31147, 0.15207, 0.03717, 0)),
        ("f6", 0.05257, (0.80191, 0.15054, 0.01957, 0)),
    ],
)
def test_frequency_responses_have_the_printed_values(name, halved, want):
    b, a = taps(name)
    assert np.abs(frequency_response(b, a, [0.05, 0.1, 0.25, 0.5])) == pytest.approx(want, abs=6e-6)
    if halved is not None:
        gain = lambda nu: float(abs(frequency_response(b, a, [nu])[0]) ** 2)  # noqa: E731
        assert brentq(lambda nu: gain(nu) - 0.5, 1e-3, 0.5) == pytest.approx(halved, abs=6e-6)


def test_the_resonant_filter_peaks_and_two_of_the_filters_differ_in_phase_alone():
    """doppler.md 2.8: f6 at 1.529 near ν = 0.0323; f1 and f2, whose zeros are reciprocal."""
    frequencies = np.linspace(0, 0.5, 20_001)
    resonant, one, other = (frequency_response(*taps(name), frequencies) for name in ("f6", "f1", "f2"))
    assert np.abs(resonant).max() == pytest.approx(1.529, abs=6e-4)
    assert frequencies[np.abs(resonant).argmax()] == pytest.approx(0.0323, abs=6e-5)
    np.testing.assert_allclose(np.abs(one), np.abs(other), rtol=1e-9)
    assert np.abs(one - other).max() > 0.03


@pytest.mark.parametrize("name", TAPS)
def test_the_spectrum_behind_a_filter_is_that_before_it_times_its_power(name):
    """P_m = |H|² P_g, of a signal of period 50 once the filter has forgotten its start."""
    period = white(50, 4)
    filtered = outputs_of(catalogued(name), torch.from_numpy(np.tile(period, (12, 1))))[-50:]
    before, behind = spectrum(period), spectrum(filtered)
    power = np.abs(frequency_response(*taps(name), before.frequencies)) ** 2
    np.testing.assert_allclose(behind.power, power * before.power, rtol=1e-6, atol=1e-9)


def test_a_filter_raises_the_ratio_of_signal_to_noise_by_what_it_lets_through():
    t = np.arange(1000)
    signal = np.sin(2 * np.pi * 0.01 * t)[:, None] * np.ones((1, 50))
    noise = white(1000, 50)
    assert signal_to_noise(signal, noise) == pytest.approx(0.5, rel=0.02)
    b, a = taps("momentum")
    passed = abs(frequency_response(b, a, [0.01])[0]) ** 2
    assert signal_to_noise(signal, noise, b, a) == pytest.approx(0.5 * passed / (1 / 19), rel=0.05)


@pytest.mark.parametrize("name", SNR)
def test_normalised_snr_has_the_printed_values(name):
    """The limit, by T = 1,000,000, of which the start makes less than 1e-5."""
    b, a = taps(name)
    *limits, short = SNR[name]
    steps = np.arange(1_000_000)
    kappa = lfilter(b, [1, *a], np.eye(1, len(steps))[0])
    assert kappa[:1000] == pytest.approx(impulse_response(name, 1000), rel=1e-9, abs=1e-12)  # of the stage
    assert normalised_snr(kappa[:1000], np.full(1000, 0.5)) == pytest.approx(short, abs=6e-6)
    for decay, printed in zip((1, 0.95, 0.99), limits, strict=True):
        assert normalised_snr(kappa, 0.5 * decay**steps) == pytest.approx(printed, rel=1e-5, abs=6e-6)


@pytest.mark.parametrize("steps", [1, 2, 7, 300])
def test_without_a_filter_the_snr_is_one_half_at_every_length(steps):
    assert normalised_snr(impulse_response("sgd", steps), 0.5 * 0.9 ** np.arange(steps)) == 0.5


def test_the_snr_of_momentum_is_a_weighted_sum_of_the_correlations():
    """doppler.md 3.3: 1.9 (1/2 + Σ_{τ≥1} 0.9^τ c_τ) in the limit."""
    c = np.concatenate([[0.5], np.random.default_rng(0).uniform(-0.2, 0.5, 60), np.zeros(200_000)])
    powers = 0.9 ** np.arange(len(c))
    assert normalised_snr(0.1 * powers, c) == pytest.approx(1.9 * (0.5 + powers[1:] @ c[1:]), rel=1e-3)


def test_finite_filters_have_the_printed_snr_and_that_of_the_method_is_not_the_largest():
    """doppler.md 3.3 and E6: c = 0.5 * 0.6^τ, n = 4; b proportional to c is best in (Σ c κ)²/Σ κ² alone."""
    c = 0.5 * 0.6 ** np.arange(5)

    def snr(b):
        padded = np.zeros((2, 400_000))
        padded[0, :5], padded[1, :5] = b, c
        return normalised_snr(*padded)

    stage = OnlineFIR(lags=4)
    stage.load_state_dict({"past": [], "signals": [], "products": c[1:].tolist(), "powers": [1.0] * 4})
    method = np.array(stage.taps())
    assert method == pytest.approx(c / c.sum())
    optimum = c / np.linalg.norm(c) + 1 / np.sqrt(5)
    optimum /= optimum.sum()
    assert optimum == pytest.approx([0.3058, 0.2273, 0.1801, 0.1519, 0.1349], abs=6e-5)
    assert [snr(method), snr(np.full(5, 0.2))] == pytest.approx([1.1528, 1.1528], abs=6e-5)
    assert snr(optimum) == pytest.approx(1.273055, abs=2e-5)
    others = np.random.default_rng(0).dirichlet(np.ones(5), size=200)
    assert all((c @ b) ** 2 / (b @ b) < (c @ method) ** 2 / (method @ method) for b in others)


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
    assert (step.recorder.observed - step.recorder.signal).std() == pytest.approx(2 / 64, rel=0.05)
    assert np.abs(step.recorder.signal).max() < 1


@pytest.mark.parametrize("clip", ["threshold", "normalised", "automatic"])
def test_the_recorder_keeps_the_norms_of_the_last_step_and_what_noise_adds_to_the_squared_error(clip):
    """DC-SGD, eqs. 3 and 4: K = d z²/E[B]², whatever threshold the noise is scaled to."""
    options = ("batch_size=64", "model=linear", f"clip={clip}", "threshold.norm=0.25")
    parts = assembled(composed(*options), noise_multiplier=2.0)
    step, size = parts.step, len(parts.step.gradients.flat)
    step.recorder = GradientRecorder.at_random(size, 1, torch.Generator().manual_seed(0))
    for count in (9, 5):
        inputs, labels = torch.rand(count, 1, 8, 8), torch.arange(count) % 10
        weights = [weight.detach().double() for weight in parts.model.parameters()]
        step([(inputs, labels)])
    stored = np.load(io.BytesIO(step.recorder.archive()))
    assert stored["error_weight"] == pytest.approx(size * (2.0 / 64) ** 2)
    # Of softmax regression: (p - y) xᵀ, and p - y for the bias.
    logits = inputs.flatten(1).double() @ weights[0].T + weights[1]
    errors = logits.softmax(1) - torch.nn.functional.one_hot(labels, 10)
    norms = errors.norm(dim=1) * (1 + inputs.flatten(1).double().square().sum(1)).sqrt()
    assert stored["norms"] == pytest.approx(norms.numpy(), rel=1e-5)


def test_the_recorder_keeps_its_coordinates_and_marks_its_file():
    recorder = GradientRecorder(torch.tensor([1, 4]))
    for t in range(3):
        recorder.unnoised(torch.full((6,), float(t)))
        norms = torch.arange(4.0) + t
        recorder.norms(norms, 0.5 * t)
        norms.zero_()  # a buffer of the step
        recorder.private(torch.arange(6.0))
    stored = np.load(io.BytesIO(recorder.archive()))
    assert stored["signal"].tolist() == [[0, 0], [1, 1], [2, 2]]
    assert stored["observed"].tolist() == [[1, 4]] * 3
    assert stored["norms"].tolist() == [2, 3, 4, 5]
    assert stored["error_weight"] == 1
    assert "not private" in str(stored["privacy"])


def recorded_noise(sampler, samples, *, expected, steps, deviation):
    """w_t = g_t - ∇F(x_t) of |x - ξ|²/2, of batches by this sampler, at an iterate that hardly moves; shape (T, d)."""
    d, norm = samples.shape[1], 1e3
    step = point_step(
        FixedThreshold(norm), start=[0.0] * d, expected_batch=expected, noise_multiplier=deviation * expected / norm
    )
    step.ledger.record = lambda release: None
    step.recorder = GradientRecorder(torch.arange(d))
    for _ in range(steps):
        drawn = samples[sampler.draw()]
        step([(drawn, drawn)] if len(drawn) else [])
    return step.recorder.observed + samples.mean(0).numpy()


@pytest.mark.parametrize("name", ["fixed size", "Poisson"])
def test_what_a_step_adds_to_the_gradient_is_white(name):
    """doppler.md 3.2: φ_w(0) <= d σ_DP² + σ_SGD²/B, and 0 at other lags.

    Of Poisson batches, divided by the expected B (A10), σ_SGD² is to be read as E|∇f|², not as a variance: how many
    samples there are is random, too. 3,000 steps in 60 dimensions: standard errors below 0.5 % of φ(0).
    """
    samples = 0.5 + normal(400, 60, seed=9)
    batch, deviation, steps = 20, 0.05, 3000
    make = {"fixed size": FixedSizeSampler, "Poisson": PoissonSampler}[name]
    sampler = make(400, batch, SeededUniform(torch.Generator().manual_seed(3)))
    noise = recorded_noise(sampler, samples, expected=batch, steps=steps, deviation=deviation)
    variance = float((samples - samples.mean(0)).square().sum(1).mean())
    square = float(samples.square().sum(1).mean())
    private = 60 * deviation**2
    found = autocorrelation(noise, 3)
    share = {"fixed size": variance * (400 - batch) / 399, "Poisson": square * (1 - batch / 400)}[name]
    assert found[0] == pytest.approx(private + share / batch, rel=0.03)
    assert np.abs(found[1:]).max() < 0.02 * found[0]
    assert (found[0] <= private + variance / batch) == (name == "fixed size")


@pytest.mark.parametrize(("decay", "larger"), [(1.0, False), (0.99, False), (0.95, False), (0.8, True), (0.5, True)])
def test_of_finite_length_the_snr_of_momentum_is_larger_only_where_correlations_decay_fast(decay, larger):
    """doppler.md E3: than 1.9 Σ 0.9^τ c_τ; the printed form has c_0 twice, and is too large by 0.95."""
    c, powers = 0.5 * decay ** np.arange(1000), 0.9 ** np.arange(1000)
    found, limit = normalised_snr(impulse_response("momentum", 1000), c), 1.9 * (powers @ c)
    assert (found > limit) == larger
    assert found == pytest.approx(limit, rel=6e-3)
    printed = 1.9 * (0.5 + powers @ c)
    assert printed - limit == pytest.approx(0.95)
