"""What DOPPLER proves, on problems whose constants are known: the program's steps must keep within the bounds.

The bounds are written from the specification and compared with the numbers printed there before a run is held to them.
"""

import math

import numpy as np
import pytest
import torch
from draws import generator, normal
from filter_references import SNR, impulse_response, normalised_snr, taps
from scipy.optimize import minimize_scalar
from scipy.signal import lfilter
from toy_problems import gradients_along, point_step, quadratic

from dpbench.computed.regression import descend
from dpbench.filters import Identity, RecursiveLowPass
from dpbench.query import OnePoint
from dpbench.spectra import autocorrelation
from dpbench.threshold import FixedThreshold


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


class Path:
    """∇F along a run of noisy gradient descent, shape (T, d), and how long the sum of what the last steps took is."""

    def __init__(self, problem, *, lr, noise_std, steps=200):
        settings = {"lr": lr, "noise_std": noise_std, "steps": steps, "generator": generator(0)}
        path = descend(problem, OnePoint(), Identity(), **settings)
        self.gradients = gradients_along(problem, path)
        self.path, self.lr = path.numpy(), lr

    def moved(self, lag):
        """|Σ_{s<=τ} g_{t-s}| for t = τ..T-1."""
        return np.linalg.norm(self.path[lag:-1] - self.path[: -1 - lag], axis=1) / self.lr

    def correlation(self, lag):
        """⟨∇F_t, ∇F_{t-τ}⟩, |∇F_t|², |∇F_{t-τ}|²."""
        now, then = self.gradients[lag:], self.gradients[: len(self.gradients) - lag]
        return (now * then).sum(1), (now**2).sum(1), (then**2).sum(1)

    def largest_step(self, lag, c=0.25, back=0.25, smoothness=1.0):
        """Up to which A4 holds with c_τ = c and c_{-τ} = back; 0 where it is at none."""
        _, now, then = self.correlation(lag)
        return np.sqrt(np.maximum((1 - 2 * back) * then + (1 - 2 * c) * now, 0)) / (smoothness * self.moved(lag))


@pytest.mark.parametrize("tight", [True, False])
def test_gradients_stay_correlated_up_to_the_step_size_that_doppler_allows(tight):
    """doppler.md 3.3, A4, on each path with the steps that it took; on L |x|²/2 it holds at no larger step."""
    problem = quadratic([0.5] * 8 if tight else np.linspace(0.01, 0.5, 8), 2.0)
    run, draws = Path(problem, lr=0.1, noise_std=0.3), np.random.default_rng(0)
    for lag in (1, 2, 5, 20):
        product, now, then = run.correlation(lag)
        c, back = draws.uniform(-0.5, 0.6, (50, len(now))), draws.uniform(0, 0.6, (50, len(now)))
        allowed = run.largest_step(lag, c, back, smoothness=0.5) >= run.lr
        held = product >= c * now + back * then
        assert allowed.any()
        assert not held.all()
        assert not (allowed & ~held).any()
        assert (allowed == held).all() == tight


@pytest.mark.parametrize(("noise_std", "power"), [(5.0, -1 / 2), (0.0, -1)])
def test_the_step_size_that_doppler_allows_falls_with_the_lag(noise_std, power):
    """doppler.md E10: as 1/sqrt(τ) where noise dominates, as 1/τ where gradients are aligned.

    The steps are so small that gradients stay what they were, of norm 1; in 400 dimensions the noise has norm 100. Some
    30 windows of 32 steps do not overlap: the mean of their largest steps has a standard error of 0.7 %.
    """
    run = Path(quadratic([1.0] * 400, 0.05), lr=1e-7, noise_std=noise_std, steps=1000)
    lags = np.array([4, 8, 16, 32])
    found = [run.largest_step(lag).mean() for lag in lags]
    assert found == pytest.approx(list(1 / np.sqrt(lags**2 + lags * 400 * noise_std**2)), rel=0.03)
    assert np.diff(np.log(found)) == pytest.approx([power * math.log(2)] * 3, abs=0.05)


class Private:
    """Theorem 2 with c_τ = 1/2 and noise for privacy, of variance C² T log(1/δ)/(N eps)²; no sampling noise."""

    smoothness, gap, dimension, norm, samples, eps, log = 2.0, 0.7, 50, 1.5, 300.0, 2.0, math.log(1e5)

    def __init__(self, kappa, steps):
        self.steps = steps
        kappa = np.pad(kappa, (0, steps - len(kappa)))
        self.weight = np.cumsum(0.5 * kappa).sum()
        self.snr = normalised_snr(kappa, np.full(steps, 0.5))

    def bound(self, lr):
        variance = self.norm**2 * self.steps * self.log / (self.samples * self.eps) ** 2
        return self.gap / (lr * self.weight) + lr * self.smoothness / (2 * self.snr) * self.dimension * variance

    def best(self):
        """The step size with the least bound, and that."""
        found = minimize_scalar(lambda log: self.bound(math.exp(log)), bounds=(-12, 3), method="bounded")
        return math.exp(found.x), found.fun

    @classmethod
    def rate(cls, snr):
        """Theorem 3's."""
        private = cls.dimension * cls.smoothness * cls.gap * cls.log / snr
        return cls.norm * math.sqrt(private) / (cls.samples * cls.eps)

    @classmethod
    def printed_steps(cls, snr):
        """Theorem 3's T, which is η T."""
        root = cls.norm * math.sqrt(cls.dimension * cls.smoothness * cls.log)
        return cls.samples * cls.eps * math.sqrt(snr * cls.gap) / root


@pytest.mark.parametrize("name", ["sgd", "momentum", "first_v2"])
def test_the_rate_of_doppler_gains_the_root_of_the_snr_and_fixes_the_product_of_step_size_and_steps(name):
    """doppler.md 3.3, theorem 3, and E11. The start-up of the filters makes 0.5 % at T = 4000."""
    snr, kappa = SNR[name][0], impulse_response(name, 400)
    for steps in (4_000, 16_000):
        private, longer = Private(kappa, steps), Private(kappa, 4 * steps)
        lr, least = private.best()
        assert least == pytest.approx(2 * Private.rate(snr), rel=5e-3)
        assert lr * steps == pytest.approx(2 * Private.printed_steps(snr), rel=5e-3)
        # The same bound at a quarter of the step size and four times the steps, and not at either alone.
        assert longer.bound(lr / 4) == pytest.approx(least, rel=5e-3)
        assert min(longer.bound(lr), private.bound(lr / 4)) > 2 * least
    assert Private.rate(0.5) / Private.rate(snr) == pytest.approx(math.sqrt(2 * snr))


def test_clipped_gradients_of_distances_are_the_gradient_of_hubers_loss():
    """disk.md 2.7, 1: F_C(x) = ∫_0^1 ⟨∇F_C(z x), x⟩ dz where it is curl-free; doppler.md 3.2: its descent is on F_C."""
    samples, norm = normal(50, 3, seed=2), 0.8

    def clipped(x):
        step = point_step(FixedThreshold(norm), start=x.tolist(), expected_batch=50)
        return step.request([(samples, samples)], norm).alone().total / 50

    def huber(x):
        r = (x - samples).norm(dim=1)
        return torch.where(r <= norm, r**2 / 2, norm * r - norm**2 / 2).mean()

    x = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(huber(x), x)
    x = x.detach()
    torch.testing.assert_close(clipped(x), gradient, rtol=1e-9, atol=1e-12)
    points, shares = np.polynomial.legendre.leggauss(40)
    line = sum(w / 2 * float(clipped((z + 1) / 2 * x) @ x) for z, w in zip(points, shares, strict=True))
    assert line == pytest.approx(float(huber(x) - huber(torch.zeros_like(x))), rel=1e-4)
    step = point_step(FixedThreshold(norm), start=x.tolist(), lr=0.5, expected_batch=50)
    for _ in range(400):
        step([(samples, samples)])
    end = step.gradients.flat.vector.clone()
    assert clipped(end).norm() < 1e-9
    assert (end - samples.mean(0)).norm() > 0.01  # which is not where F itself is least
