"""What the papers prove, on problems whose constants are known: the program's steps must keep within the bounds.

The bounds are written from the specifications and compared with the numbers printed there before a run is held to them.
"""

import math
from copy import deepcopy
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import pytest
import torch
from helpers import equal_releases
from scipy.signal import lfilter
from test_adp import rates, scales
from test_disk import disk, gradient, linear, logistic, normal
from test_filters import taps
from test_pmlf import Position, half_square
from test_spectra import autocorrelation, normalised_snr

from dpbench.clip import NormalisedClip, ThresholdClip
from dpbench.computed.regression import LinearRegression, descend
from dpbench.filters import Exponential, Identity, RecursiveLowPass
from dpbench.gradients import FlatParameters, PerSampleGradients
from dpbench.noise import ConstantNoise
from dpbench.optim import SGD
from dpbench.privacy.adp_theorem import AdpTheorem
from dpbench.privacy.gaussian import GaussianSource, SeededGaussian
from dpbench.query import LastIterates, OnePoint, TwoPoint
from dpbench.schedules import InverseSqrt
from dpbench.step import PrivateStep
from dpbench.threshold import ExpectedErrorThreshold, FixedThreshold, PercentileThreshold
from dpbench.threshold.histogram import expected_error
from dpbench.training.recorder import GradientRecorder


def quadratic(curvatures, start):
    """F(x) = Σ λ_i (x_i + start)²/2, whose minimum lies at -start: `descend` begins at 0."""
    curvatures = torch.as_tensor(curvatures, dtype=torch.float64)
    inputs = torch.diag(torch.sqrt(len(curvatures) * curvatures))
    return LinearRegression(inputs, inputs @ torch.full_like(curvatures, -start))


def generator(seed):
    return torch.Generator().manual_seed(seed)


def gradients_along(problem, path):
    """Of all iterates but the last, shape (T, d)."""
    return torch.stack([problem.gradient(x) for x in path[:-1]]).numpy()


# DOPPLER


class Uncorrected(RecursiveLowPass):
    """Without the start-up correction, as in the proof."""

    def __post_init__(self):
        super().__post_init__()
        self.step = 0
        self.responses = lfilter(self.b, [1, *self.a], np.ones(1000))

    def apply(self, gradient):
        self.step += 1
        return super().apply(gradient) * self.responses[self.step - 1]


@pytest.mark.parametrize(
    ("name", "left", "right"), [("sgd", 0.914, 0.926), ("momentum", 0.847, 0.906), ("first_v2", 0.881, 0.913)]
)
def test_low_passed_descent_keeps_within_the_bound_of_doppler(name, left, right):
    """doppler.md 3.3, theorem 2: its toy run, 20 seeds. Printed are other draws: 0.002."""
    curvatures, lr, deviation, steps = np.linspace(0.1, 1, 20), 0.02, 0.02, 300
    problem = quadratic(curvatures, 1.0)
    b, a = taps(name)
    kappa = lfilter(b, [1, *a], np.eye(1, steps)[0])
    sides = []
    for seed in range(20):
        settings = {"noise_std": deviation, "lr": lr, "steps": steps, "generator": generator(seed)}
        g = gradients_along(problem, descend(problem, OnePoint(), Uncorrected(b=b, a=a), **settings))
        squares = (g**2).sum(1)
        # c_{-τ} = η L κ_τ/2 makes the condition on the step size tight; c_τ is what the run then has.
        c = [
            (((g[lag:] * g[: steps - lag]).sum(1) - lr * kappa[lag] / 2 * squares[: steps - lag]) / squares[lag:]).min()
            for lag in range(steps)
        ]
        weights = np.cumsum(c * kappa)
        bound = problem.loss(torch.zeros(20, dtype=torch.float64)) / (lr * weights.sum())
        bound += lr / (2 * normalised_snr(kappa, c)) * 20 * deviation**2
        sides.append((weights @ squares / weights.sum(), bound))
    found = np.mean(sides, axis=0)
    assert found == pytest.approx((left, right), abs=2e-3)
    assert found[0] <= found[1]


@pytest.mark.parametrize("lag", [1, 2, 5, 20])
def test_gradients_of_a_smooth_loss_are_correlated_at_least_as_much_as_doppler_says(lag):
    """doppler.md 3.2: φ(τ) >= E[|∇F_t|² + |∇F_{t-τ}|² - L² η² τ Σ_{i<=τ} |g_{t-i}|²]/2; tight for τ = 1 on L |x|²/2."""
    lr, steps = 0.1, 200
    for curvatures, tight in (([0.5] * 8, lag == 1), (np.linspace(0.01, 0.5, 8), False)):
        problem = quadratic(curvatures, 2.0)
        path = descend(problem, OnePoint(), Identity(), noise_std=0.3, lr=lr, steps=steps, generator=generator(0))
        g = gradients_along(problem, path)
        used = ((path[:-1] - path[1:]) / lr).square().sum(1).numpy()
        sums = np.array([used[t - lag : t].sum() for t in range(lag, steps)])
        squares = (g**2).sum(1)
        bound = np.mean(squares[lag:] + squares[: steps - lag] - (0.5 * lr) ** 2 * lag * sums) / 2
        found = autocorrelation(g, lag)[lag]
        assert found >= bound - 1e-12
        assert (found == pytest.approx(bound, rel=1e-12)) == tight


# DiSK


def mean_error_after(gamma, kappa=0.6):
    """Mean of ∇F(x_t) - m_t over every batch of one sample that step t may draw, and (1 - κ) times that of step t-1."""
    inputs, targets = normal(6, 3, seed=1), normal(6, 2, seed=2)
    step = disk(linear(normal(2, 3, seed=3)), logistic, kappa, gamma, batch_size=1)

    def taken(step, sample):
        """Iterate at which the step is taken, and the filtered gradient."""
        x = step.gradients.flat.vector.clone()
        step([(inputs[sample : sample + 1], targets[sample : sample + 1])])
        return x, torch.cat([p.grad.reshape(-1) for p in step.gradients.flat.parameters])

    for sample in (0, 3, 1, 5):
        x, m = taken(step, sample)
    before = gradient(logistic, x, (inputs, targets)) - m
    errors = []
    for sample in range(6):
        x, m = taken(deepcopy(step), sample)
        errors.append(gradient(logistic, x, (inputs, targets)) - m)
    return torch.stack(errors), (1 - kappa) * before


def test_the_error_of_disk_shrinks_by_one_minus_kappa_on_average():
    """disk.md 3.3: E Δ_t = (1 - κ) Δ_{t-1} for γ = -1, whatever the loss; not so for others."""
    errors, expected = mean_error_after(-1.0)
    torch.testing.assert_close(errors.mean(0), expected, rtol=1e-9, atol=1e-12)
    errors, expected = mean_error_after(0.5)
    assert (errors.mean(0) - expected).norm() > 1e-4 * expected.norm()


class Disk(NamedTuple):
    """The constants of DiSK's theorems at κ, γ, L, η."""

    kappa: float
    gamma: float
    smoothness: float
    lr: float

    @property
    def off(self):
        return abs(1 + self.gamma)

    @property
    def of_gamma(self):
        return 1 + 4 * (2 + 1 / self.kappa + self.off) / self.gamma**2

    @property
    def growth(self):
        """A."""
        step = (self.lr * self.smoothness) ** 2
        return 1 + 4 * step + self.off * (self.kappa + 2 * step * self.of_gamma)

    @property
    def beta(self):
        """At equality."""
        kept = (1 - self.kappa) ** 2 * self.growth
        return (self.lr * (1 - self.kappa) / 2 + self.lr**2 * self.smoothness * kept) / (1 - kept)

    @property
    def margin(self):
        """M_1."""
        part = (self.beta + self.lr**2 * self.smoothness) * (1 - self.kappa) ** 2 * self.smoothness**2 * self.lr
        return 1 + self.kappa - 2 * self.lr * self.smoothness - 4 * part * (2 + self.off * self.of_gamma)

    def next_error(self, error, squared_gradient, noise):
        """Lemma 1: bound on E|Δ_t|² from |Δ_{t-1}|², |∇F(x_{t-1})|², and (2 + |1 + γ|) σ_SGD²/B + d σ²."""
        kept = (1 - self.kappa) ** 2
        moved = 2 * (self.lr * self.smoothness) ** 2 * kept * (2 + self.off * self.of_gamma)
        return kept * self.growth * error + moved * squared_gradient + self.kappa**2 * noise

    def mean_square(self, gap, squared_gradient, steps, noise):
        """Theorem 2: bound on the mean of E|∇F(x_t)|²."""
        start = 2 * (gap + self.beta * squared_gradient) / (self.margin * self.lr * steps)
        left = 2 * (self.beta + self.lr**2 * self.smoothness) * self.kappa**2 / (self.margin * self.lr)
        return start + left * noise


def corollary_1(ratio, noise, times):
    """DiSK's settings at M_κ for L = F_0 - F* = 1, d σ² = noise; steps in units of T_0, and the corollary's bound."""
    least = (2 * (16 / ratio**3 + 16 / ratio**2 - 4 / ratio - 4) + 2 * ratio) / noise
    steps = times * least
    lr = min(1 / (2 + 4 / ratio - ratio), math.sqrt(4 * ratio / (2 * steps * noise)) / ratio)
    return Disk(ratio * lr, -1.0, 1.0, lr), steps, 8 * math.sqrt(ratio * noise / steps)


def test_the_bounds_of_disk_have_the_printed_relations():
    """disk.md 3.3: the constant 8 needs T >= 3 T_0; and that a small step size alone does not make M_1 positive."""

    def quotient(ratio, times):
        setting, steps, bound = corollary_1(ratio, 1e-3, times)
        assert setting.beta <= 1 / (2 * ratio)
        return setting.mean_square(1.0, 2 * ratio, steps, 2e-3) / bound

    assert quotient(1, 1) == pytest.approx(2.0, abs=0.05)
    assert quotient(0.1, 1) == pytest.approx(108, abs=0.5)
    for ratio in (0.01, 0.1, 0.3, 0.5, 0.8, 1):
        assert 0.90 <= quotient(ratio, 3) <= 0.97
    setting = Disk(kappa=0.5, gamma=-1.0, smoothness=1.0, lr=0.48)
    assert setting.margin == pytest.approx(-0.107, abs=6e-4)
    assert 1.5 / (2 * (1 + 2 * 0.25 * setting.beta * 2)) == pytest.approx(0.519, abs=6e-4)


def runs_of_disk(setting, steps, deviation, dimension):
    """|∇F(x_t)|² and |Δ_t|² of 40 runs on |x|²/2 from F = 1, shape (40, T) each; the filter starts at 0, as proven."""
    problem = quadratic([1.0] * dimension, math.sqrt(2 / dimension))
    squares, errors = [], []
    for seed in range(40):
        filter = Exponential(kappa=setting.kappa)
        filter.apply(torch.zeros(dimension, dtype=torch.float64))
        settings = {"noise_std": deviation, "lr": setting.lr, "steps": steps, "generator": generator(seed)}
        path = descend(problem, TwoPoint(kappa=setting.kappa, gamma=setting.gamma), filter, **settings)
        g = gradients_along(problem, path)
        squares.append((g**2).sum(1))
        errors.append(((g - ((path[:-1] - path[1:]) / setting.lr).numpy()) ** 2).sum(1))
    return np.array(squares), np.array(errors)


def test_disk_keeps_within_its_bounds():
    """disk.md 3.3, corollary 1 at T = 3 T_0, and theorem 2."""
    dimension, noise = 20, 0.5
    setting, steps, bound = corollary_1(1.0, noise, 3)
    squares, _ = runs_of_disk(setting, round(steps), math.sqrt(noise / dimension), dimension)
    assert squares.mean() <= setting.mean_square(1.0, 2.0, steps, noise) <= bound
    assert squares.mean() > 0.2 * bound


def test_the_error_of_disk_keeps_within_its_bound():
    """disk.md 3.3, lemma 1: nearly reached where steps are small. Means of 40 runs of 300 steps: 0.4 %."""
    setting, noise = Disk(kappa=0.7, gamma=-1.0, smoothness=1.0, lr=0.05), 0.5
    squares, errors = runs_of_disk(setting, 300, math.sqrt(noise / 20), 20)
    expected = setting.next_error(errors[:, :-1], squares[:, :-1], noise)
    assert 0.97 < errors[:, 1:].mean() / expected.mean() < 1


# ADP


class Adp(NamedTuple):
    """Bounds of ADP for b_t = sqrt(20 + t), t = 1..T, where L = G = D_F = η = 1 and d = 1000."""

    steps: int
    eps: float

    def privacy(self, total):
        """B_δ (16 G)² d L/(n² ε²) times a sum."""
        theorem = AdpTheorem((1.0,) * self.steps, 50_000, 256, 1e-5)
        return 1000 * 16**2 * theorem.log_factor * total / (50_000 * self.eps) ** 2

    def general(self, adaptive):
        """Theorem 4.2 with exact sums, from the noise stage and the schedule."""
        schedule = InverseSqrt(a=21.0, c=1.0)
        eta = rates(schedule, self.steps)
        alpha = scales(schedule, self.steps) if adaptive else np.ones(self.steps)
        inverse = AdpTheorem(tuple(alpha), 50_000, 256, 1e-5).inverse_squares()
        factor = (eta**2 * alpha**2).sum() * inverse
        return (1 + (eta**2).sum() / 2 + self.privacy(factor) / 2) / eta.sum()

    def printed(self, adaptive, *, corrected):
        """Equations 25 and 26; or 9 and 10, which are those as misprinted in the main text."""
        log = math.log(1 + self.steps / 20)
        first = (1 + log / 2) / math.sqrt(self.steps - 1)
        root = math.sqrt(self.steps)
        if adaptive:
            return first + self.privacy(root if corrected else root / 2)
        return first + self.privacy(log * (math.sqrt(self.steps - 1) + 1) / 2 if corrected else log * root)


# adp.md 3.2: T, eps: eq. 25, 26, 9, 10, and the general bound of ADP and of DP-SGD.
ADP_BOUNDS = {
    (11_760, 12.8): (0.053255, 0.085695, 0.045943, 0.131903, 0.034104, 0.044296),
    (23_520, 12.8): (0.051033, 0.105934, 0.040303, 0.181308, 0.036023, 0.054121),
    (39_200, 12.8): (0.052643, 0.132567, 0.038420, 0.239852, 0.040149, 0.067326),
    (11_760, 102.4): (0.038860, 0.039367, 0.038746, 0.040089, 0.020298, 0.020457),
    (23_520, 102.4): (0.029909, 0.030767, 0.029741, 0.031944, 0.015513, 0.015796),
    (39_200, 102.4): (0.024641, 0.025890, 0.024419, 0.027566, 0.012780, 0.013205),
}


@pytest.mark.parametrize("key", ADP_BOUNDS, ids=str)
def test_the_bounds_of_adp_have_the_printed_values(key):
    bounds = Adp(*key)
    found = [bounds.printed(adaptive, corrected=c) for c in (True, False) for adaptive in (True, False)]
    general = [bounds.general(adaptive) for adaptive in (True, False)]
    assert [*found, *general] == pytest.approx(ADP_BOUNDS[key], abs=6e-7)
    assert found[0] >= general[0]
    assert found[1] >= general[1]
    assert (found[2] < general[0]) == (key == (39_200, 12.8))  # so equation 9 does not follow


# DP-PMLF and DC-SGD: what clipping takes away


def point_step(threshold, *, start, query=None, multiplier=0.0, lr=1e-300, batch=1.0, seed=0, steps=1000):
    """A step on f(x; ξ) = |x - ξ|²/2, of all samples given."""
    model = Position(start)
    flat = FlatParameters(model)
    return PrivateStep(
        PerSampleGradients(model, flat, half_square),
        query=query or OnePoint(),
        clip=ThresholdClip(),
        threshold=threshold,
        noise=ConstantNoise(),
        filter=Identity(),
        optimizer=SGD(lr=lr).build(flat.parameters),
        noise_multiplier=multiplier,
        sampling_rate=1.0,
        expected_batch=batch,
        ledger=equal_releases(steps, 1.0, multiplier, threshold.beside),
        noise_source=SeededGaussian(generator(seed)),
        side_source=SeededGaussian(generator(seed + 1)),
    )


@pytest.mark.parametrize(("length", "decay", "factor"), [(2, 0.1, 1.1980), (3, 0.5, 2.3333), (1, 0.1, 0.25)])
def test_the_bias_of_clipping_a_momentum_keeps_within_its_bound(length, decay, factor):
    """dp_pmlf.md 3.2-4: |E[clip(v) - v]| <= |∇f(x)| + 2 σ_SGD/ρ; σ_SGD in place of 2 σ_SGD/ρ without momentum."""
    samples = normal(200, 3, seed=4)
    deviation = float((samples - samples.mean(0)).square().sum(1).mean().sqrt())
    step = point_step(
        FixedThreshold(0.5), start=(2.0, -1.0, 0.5), query=LastIterates(length, decay), lr=0.02, batch=200
    )
    for _ in range(30):
        x = step.gradients.flat.vector.clone()
        points = deepcopy(step.query).points(x)
        unclipped = sum(weight * (iterate - samples.mean(0)) for weight, iterate in points)
        clipped = deepcopy(step).request([(samples, samples)], 0.5).alone().total / 200
        bias = float((clipped - unclipped).norm())
        assert bias <= float((x - samples.mean(0)).norm()) + 2 * deviation / math.sqrt(factor if length > 1 else 4)
        step([(samples, samples)])
    assert bias > 0.1


@pytest.mark.parametrize("threshold", [0.3, 1.0, 2.5, 100.0])
def test_the_bias_of_clipping_is_bounded_by_what_lies_beyond_the_threshold(threshold):
    """dc_sgd.md 3.2-5: |E clip - g| <= mean (|g_i| - C)⁺ <= P(C) (G - C)⁺ <= P(C) G."""
    samples = normal(300, 4, seed=6)
    step = point_step(FixedThreshold(threshold), start=(1.0, 0.0, -1.0, 0.5))
    g = step.gradients.flat.vector - samples
    norms = g.norm(dim=1)
    bias = float((step.request([(samples, samples)], threshold).alone().total / 300 - g.mean(0)).norm())
    beyond = float((norms - threshold).clamp(min=0).mean())
    share, largest = float((norms > threshold).double().mean()), float(norms.max())
    chain = [bias, beyond, share * max(largest - threshold, 0), share * largest]
    assert all(one <= other + 1e-12 for one, other in pairwise(chain))
    assert (bias > 0.01) == (threshold < 100)


@pytest.mark.parametrize("clip", [ThresholdClip(), NormalisedClip()], ids=["clipped", "clipped and divided by C"])
def test_the_error_of_a_released_gradient_is_noise_and_what_was_clipped(clip):
    """dc_sgd.md 3.2-1: E|clip(g) + noise - g|² = d σ_T² C²/B² + (|g| - C)²; 100,000 draws, standard error 0.5 %."""
    d, batch, norm, multiplier = 100, 4.0, 2.0, 0.7
    seen = []

    class Watched(FixedThreshold):
        beside = PercentileThreshold().beside

        def release(self, source, error_weight):
            seen.append(error_weight)

    step = point_step(Watched(norm), start=(5.0, *[0.0] * (d - 1)), multiplier=multiplier, batch=batch)
    step.clip, unit = clip, norm if isinstance(clip, NormalisedClip) else 1.0
    step.recorder = GradientRecorder(torch.arange(d))
    sample = torch.zeros(1, d, dtype=torch.float64)
    for _ in range(1000):
        step([(sample, sample)])
    g = step.gradients.flat.vector.numpy()
    released = unit * (step.recorder.signal * batch + step.recorder.observed - step.recorder.signal)
    found = ((released - g) ** 2).sum(1).mean()
    assert found == pytest.approx(d * (multiplier * norm / batch) ** 2 + (5 - norm) ** 2, rel=0.01)
    model = expected_error(np.array([norm]), np.full(1, 5.0), np.ones(1), seen[0])
    assert found == pytest.approx(float(model[0]), rel=0.01)


class Scaled(GaussianSource):
    """A source whose noise is so many times too large."""

    def __init__(self, source, times):
        self.source, self.times = source, times

    def fill(self, out):
        return self.source.fill(out).mul_(self.times)


def sides_of_descent(make, times=1.0):
    """dc_sgd.md 3.2-7, on |x - ξ|²/2 with all samples in each batch, so L = 1; means over 12 runs of 60 steps."""
    lr, multiplier, d, count, steps = 0.2, 4.0, 10, 40, 60
    samples = normal(count, d, seed=8)
    centre = samples.mean(0)
    sides = []
    for seed in range(12):
        step = point_step(make(), start=[1.0] * d, multiplier=multiplier, lr=lr, batch=count, seed=2 * seed)
        step.noise_source = Scaled(step.noise_source, times)
        first = step.gradients.flat.vector.clone()
        left = noise = clipped = bias = 0.0
        for t in range(steps):
            g = step.gradients.flat.vector - samples
            threshold = step.threshold.value(t)
            mean = (g * (threshold / g.norm(dim=1, keepdim=True)).clamp(max=1)).mean(0)
            left += float(g.mean(0).square().sum()) / steps
            clipped += float(mean.square().sum()) / steps
            noise += threshold**2 / steps
            bias += float(g.mean(0).norm() * (mean - g.mean(0)).norm()) / steps
            step([(samples, samples)])
        fallen = float((first - centre).square().sum() - (step.gradients.flat.vector - centre).square().sum()) / 2
        right = fallen / (steps * lr) + lr * clipped + lr * (multiplier / count) ** 2 * d * noise + bias
        sides.append((left, right))
    return np.mean(sides, axis=0)


@pytest.mark.parametrize("make", [PercentileThreshold, ExpectedErrorThreshold, FixedThreshold])
def test_descent_with_a_moving_threshold_keeps_within_its_bound(make):
    left, right = sides_of_descent(make)
    assert 0.3 * right < left <= right


def test_that_bound_of_descent_is_broken_by_more_noise_than_is_accounted_for():
    left, right = sides_of_descent(FixedThreshold, times=3.0)
    assert left > right
