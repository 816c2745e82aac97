"""What DiSK proves, on problems whose constants are known: the program's steps must keep within the bounds.

The bounds are written from the specification and compared with the numbers printed there before a run is held to them.
"""

import math
from copy import deepcopy
from typing import NamedTuple

import numpy as np
import pytest
import torch
from draws import generator, normal
from toy_problems import (
    disk_step,
    gradient,
    gradients_along,
    linear,
    logistic,
    point_step,
    quadratic,
    squared,
)

from dpbench.clip import ThresholdClip
from dpbench.computed.regression import descend
from dpbench.filters import Exponential
from dpbench.optim import SGD
from dpbench.query import TwoPoint
from dpbench.threshold import FixedThreshold


def mean_error_after(gamma, kappa=0.6):
    """Mean of ∇F(x_t) - m_t over every batch of one sample that step t may draw, and (1 - κ) times that of step t-1."""
    inputs, targets = normal(6, 3, seed=1), normal(6, 2, seed=2)
    step = disk_step(linear(normal(2, 3, seed=3)), logistic, kappa, gamma, expected_batch=1)

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

    def largest_step(self, numerator):
        """Theorem 2's condition on η, at this β."""
        part = (1 - self.kappa) ** 2 * self.beta * self.smoothness * (2 + self.off * self.of_gamma)
        return numerator / (2 * self.smoothness * (1 + 2 * part))

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


def least_steps(ratio, noise, smoothness=1.0, gap=1.0):
    """T_0 of corollary 1 at M_κ, d σ² = noise, L and F_0 - F*."""
    start = 2 * smoothness * gap
    return (start * (16 / ratio**3 + 16 / ratio**2 - 4 / ratio - 4) + start * ratio) / noise


def corollary_1(ratio, noise, steps, smoothness=1.0, gap=1.0):
    """DiSK's settings there, and the corollary's bound."""
    start = 2 * smoothness * gap * ratio  # |∇F(x_0)|²
    tuned = np.sqrt((2 * ratio * smoothness * gap + start) / (2 * steps * noise)) / (ratio * smoothness)
    lr = np.minimum(1 / (smoothness * (2 + 4 / ratio - ratio)), tuned)
    setting = Disk(ratio * smoothness * lr, -1.0, smoothness, lr)
    return setting, 8 * np.sqrt(ratio * smoothness * gap * noise / steps)


def test_the_bounds_of_disk_have_the_printed_relations():
    """disk.md 3.3: the constant 8 needs T >= 3 T_0."""

    def quotient(ratio, times):
        steps = times * least_steps(ratio, 1e-3)
        setting, bound = corollary_1(ratio, 1e-3, steps)
        return setting.mean_square(1.0, 2 * ratio, steps, 2e-3) / bound

    assert quotient(1, 1) == pytest.approx(2.0, abs=0.05)
    assert quotient(0.1, 1) == pytest.approx(108, abs=0.5)
    for ratio in (0.01, 0.1, 0.3, 0.5, 0.8, 1):
        assert 0.90 <= quotient(ratio, 3) <= 0.97


def drawn(generator, low, high, count=200_000):
    """Numbers whose logarithms are uniform."""
    return np.exp(generator.uniform(math.log(low), math.log(high), count))


def test_the_step_size_of_disk_that_the_main_text_allows_is_too_large_and_that_of_its_appendix_is_not():
    """disk.md 3.3, A25: η < (1 + κ)/(2L(1 + 2(1-κ)² β L(2 + |1+γ| M_γ))), or 1 in place of 1 + κ; M_1 is to be > 0."""
    setting = Disk(kappa=0.5, gamma=-1.0, smoothness=1.0, lr=0.48)
    assert setting.margin == pytest.approx(-0.107, abs=6e-4)
    assert setting.largest_step(1 + setting.kappa) == pytest.approx(0.519, abs=6e-4)
    random = np.random.default_rng(0)
    gamma = np.where(random.random(200_000) < 0.2, -1.0, random.choice([-1, 1], 200_000) * drawn(random, 0.03, 30))
    smoothness = drawn(random, 1e-3, 1e3)
    settings = Disk(random.uniform(0.01, 0.999, 200_000), gamma, smoothness, drawn(random, 1e-4, 1) / smoothness)
    covered = settings.kappa > 1 - 1 / np.sqrt(settings.growth)
    by_appendix = covered & (settings.lr < settings.largest_step(1))
    by_text = covered & (settings.lr < settings.largest_step(1 + settings.kappa))
    assert by_appendix.sum() > 50_000
    assert settings.margin[by_appendix].min() > 0
    assert (settings.margin[by_text] <= 0).sum() > 100


def test_beta_of_disk_is_as_small_as_corollary_1_says():
    """disk.md 3.3: β <= 1/(2 M_κ L) wherever it sets η, which is reached, and κ <= 1."""
    random = np.random.default_rng(1)
    ratio, smoothness = drawn(random, 1e-3, 1), drawn(random, 1e-3, 1e3)
    noise, steps, gap = drawn(random, 1e-6, 1e6), drawn(random, 1, 1e7), drawn(random, 1e-3, 1e3)
    setting, _ = corollary_1(ratio, noise, steps, smoothness, gap)
    share = 2 * ratio * smoothness * setting.beta
    assert 0 < setting.kappa.min() < setting.kappa.max() <= 1
    assert 0.99 < share.max() <= 1


def runs_of_disk(setting, steps, deviation, dimension, runs=40):
    """|∇F(x_t)|² and |Δ_t|² of runs on |x|²/2 from F = 1, shape (runs, T) each; the filter starts at 0, as proven."""
    problem = quadratic([1.0] * dimension, math.sqrt(2 / dimension))
    squares, errors = [], []
    for seed in range(runs):
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
    steps = 3 * least_steps(1.0, noise)
    setting, bound = corollary_1(1.0, noise, steps)
    squares, _ = runs_of_disk(setting, round(steps), math.sqrt(noise / dimension), dimension)
    assert squares.mean() <= setting.mean_square(1.0, 2.0, steps, noise) <= bound
    assert squares.mean() > 0.2 * bound


def test_under_privacy_the_bound_of_disk_is_the_same_for_all_numbers_of_steps():
    """disk.md 3.3, theorem 3: of noise v T d C² log(1/δ)/(N eps)² with v = 1/2, from 3 T_0 on.

    The printed T makes d σ² = 1/T, so it is T_0 or more only where T_0 d σ² <= 1, which privacy has no part in.
    """
    dimension, private = 20, 1 / 300  # d C² log(1/δ)/(N eps)²
    rate = 4 * math.sqrt(2 * private)
    for steps in (300, 600, 4800):
        noise = steps * private / 2
        assert steps >= 3 * least_steps(1.0, noise) - 1e-9
        setting, bound = corollary_1(1.0, noise, steps)
        assert bound == pytest.approx(rate, rel=1e-12)
        assert setting.mean_square(1.0, 2.0, steps, 2 * noise) <= rate
        if steps < 1000:
            squares, _ = runs_of_disk(setting, steps, math.sqrt(noise / dimension), dimension, runs=5)
            assert 0.2 * rate < squares.mean() <= rate
    printed = math.sqrt(2 / private)
    assert least_steps(1.0, printed * private / 2) == pytest.approx(50 * printed)
    assert least_steps(1.0, printed * private / 2, gap=0.01) < printed


def test_the_error_of_disk_keeps_within_its_bound():
    """disk.md 3.3, lemma 1: nearly reached where steps are small. Means of 40 runs of 300 steps: 0.4 %."""
    setting, noise = Disk(kappa=0.7, gamma=-1.0, smoothness=1.0, lr=0.05), 0.5
    squares, errors = runs_of_disk(setting, 300, math.sqrt(noise / 20), 20)
    expected = setting.next_error(errors[:, :-1], squares[:, :-1], noise)
    assert 0.97 < errors[:, 1:].mean() / expected.mean() < 1


UNIT = torch.nn.functional.normalize(normal(6, 3, seed=1))  # of norm 1, so each sample's loss is as smooth as below
TARGETS = normal(6, 2, seed=2)
SMOOTHNESS = {squared: 1.0, logistic: 0.25}


def taken(step, sample):
    """Iterate at which the step is taken, and the filtered gradient."""
    x = step.gradients.flat.vector.clone()
    step([(UNIT[sample : sample + 1], TARGETS[sample : sample + 1])])
    return x, torch.cat([p.grad.reshape(-1) for p in step.gradients.flat.parameters])


def gradients_of_samples(loss, x):
    return torch.stack([gradient(loss, x, (i[None], y[None])) for i, y in zip(UNIT, TARGETS, strict=True)])


def sides_of_lemma_1(loss, kappa, gamma, *, lr, deviation=0.05, steps=40, swapped=False):
    """E|Δ_t|² and its bound, steps - 1 each, on batches of one sample, given all that was before step t.

    The mean over samples is that of copies of the step, without noise; its noise, in which the error is linear, is
    known by its variance.
    """
    threshold = 1e4
    settings = {"clip": ThresholdClip(), "threshold": threshold, "noise_multiplier": deviation / threshold}
    step = disk_step(linear(normal(2, 3, seed=3)), loss, kappa, gamma, expected_batch=1, optim=SGD(lr=lr), **settings)
    if swapped:
        step.filter = Exponential(kappa=1 - kappa)
    step.ledger.record = lambda release: None  # of another plan, for the copies
    setting, order = Disk(kappa, gamma, SMOOTHNESS[loss], lr), np.random.default_rng(0).integers(6, size=steps)
    before, sides = None, []
    for sample in order:
        copies = [deepcopy(step) for _ in range(6)]
        for copy in copies:
            copy.noise_multiplier = 0.0
        clean = torch.stack([taken(copy, each)[1] for each, copy in enumerate(copies)])
        x, m = taken(step, int(sample))
        each = gradients_of_samples(loss, x)
        full = each.mean(0)
        if before is not None:
            error, last = before
            found = float((full - clean).square().sum(1).mean()) + step.filter.kappa**2 * 6 * deviation**2
            sampling = float((each - full).square().sum(1).mean())
            noise = (2 + setting.off) * sampling + 6 * deviation**2
            sides.append((found, setting.next_error(float(error.square().sum()), float(last.square().sum()), noise)))
        before = full - m, full
    return np.array(sides).T


@pytest.mark.parametrize(
    ("loss", "gamma"),
    [
        pytest.param(logistic, -1.0, id="logistic, -1"),
        *(pytest.param(squared, gamma, id=f"squared, {gamma}") for gamma in (-1.0, 0.5, 2.0, -0.5)),
    ],
)
@pytest.mark.parametrize("kappa", [0.3, 0.7])
def test_the_error_of_disk_keeps_within_its_bound_where_samples_are_drawn(loss, gamma, kappa):
    """disk.md 3.3, lemma 1, with both of its noises; its γ other than -1 on linear gradients alone (A26)."""
    found, bound = sides_of_lemma_1(loss, kappa, gamma, lr=0.05)
    assert (found <= bound).all()
    assert found.mean() > 0.2 * bound.mean()
    if kappa == 0.3 and gamma == -1:
        found, bound = sides_of_lemma_1(loss, kappa, gamma, lr=0.05, swapped=True)
        assert found.mean() > bound.mean()


@pytest.mark.parametrize("gamma", [0.5, 2.0, -0.5, -1.0])
def test_the_error_of_disk_shrinks_on_average_for_every_gamma_where_gradients_are_linear(gamma):
    """disk.md 3.3, A26: E Δ_t = (1 - κ) Δ_{t-1} for γ other than -1 only if the gradient is linear along d."""
    kappa = 0.6
    step = disk_step(linear(normal(2, 3, seed=3)), squared, kappa, gamma, expected_batch=1)
    for sample in (0, 3, 1, 5):
        x, m = taken(step, sample)
    before = gradients_of_samples(squared, x).mean(0) - m
    errors = []
    for sample in range(6):
        x, m = taken(deepcopy(step), sample)
        errors.append(gradients_of_samples(squared, x).mean(0) - m)
    torch.testing.assert_close(torch.stack(errors).mean(0), (1 - kappa) * before, rtol=1e-9, atol=1e-12)
    assert float((torch.stack(errors) - (1 - kappa) * before).norm()) > 0.1


def test_disk_keeps_within_corollary_1_where_samples_are_drawn():
    """disk.md 3.3: B >= 2 σ_SGD²/(d σ²), here equal, at T = 3 T_0; f is |x - ξ|²/2, for which L = M_κ = 1."""
    d, noise, batch, norm = 20, 0.5, 8, 1e3
    sampling = batch * noise / 2  # σ_SGD²
    steps = round(3 * least_steps(1.0, noise))
    setting, bound = corollary_1(1.0, noise, steps)
    squares = []
    for seed in range(6):
        filter = Exponential(kappa=setting.kappa)
        filter.apply(torch.zeros(d, dtype=torch.float64))
        step = point_step(
            FixedThreshold(norm),
            start=[math.sqrt(2 / d)] * d,
            lr=setting.lr,
            query=TwoPoint(kappa=setting.kappa, gamma=setting.gamma),
            filter=filter,
            noise_multiplier=math.sqrt(noise / d) * batch / norm,
            expected_batch=batch,
            seed=2 * seed,
        )
        samples = math.sqrt(sampling / d) * normal(steps, batch, d, seed=100 + seed)
        for drawn in samples:
            squares.append(float(step.gradients.flat.vector.square().sum()))
            step([(drawn, drawn)])
    theorem = setting.mean_square(1.0, 2.0, steps, 2 * sampling / batch + noise)
    assert 0.2 * bound < np.mean(squares) <= theorem <= bound
