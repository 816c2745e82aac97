"""What DC-SGD proves, on problems whose constants are known: the program's steps must keep within the bounds.

The bounds are written from the specification and compared with the numbers printed there before a run is held to them.
"""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from draws import normal
from toy_problems import point_step

from dpbench.clip import NormalisedClip, ThresholdClip
from dpbench.privacy import Plan, Release, calibrate
from dpbench.privacy.gaussian import GaussianSource
from dpbench.threshold import ExpectedErrorThreshold, FixedThreshold, PercentileThreshold
from dpbench.threshold.histogram import expected_error
from dpbench.training.recorder import GradientRecorder


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

    step = point_step(Watched(norm), start=(5.0, *[0.0] * (d - 1)), noise_multiplier=multiplier, expected_batch=batch)
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
        step = point_step(
            make(), start=[1.0] * d, noise_multiplier=multiplier, lr=lr, expected_batch=count, seed=2 * seed
        )
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


def terms_of_the_bound(samples, steps, lr, eps, dimension=1000, rate=0.01):
    """dc_sgd.md 3.2-7 with L = G = L(θ_1) - L(θ_{T+1}) = 1 and C_t <= G, at the noise of an accountant, without bias.

    Also that noise over q sqrt(T log(1/δ))/eps, which is the theorem's c_2.
    """
    plan = Plan.of([Release(rate, 1.0)] * steps)
    multiplier = calibrate(plan, eps, 1e-5, "rdp").noise_multiplier
    noise = lr * multiplier**2 * dimension / (rate * samples) ** 2
    return [1 / (steps * lr), lr, noise], multiplier * eps / (rate * math.sqrt(steps * math.log(1e5)))


def test_the_rate_of_dc_sgd_is_one_over_samples_and_eps():
    """dc_sgd.md 3.2-8: at η = sqrt(d log(1/δ))/(N eps) and η T = 1/η all three terms are of order η.

    Moments give σ = c_2 q sqrt(T log(1/δ))/eps, with a c_2 that is the same to 8 % here, and not where eps > c_1 q² T.
    """
    for samples, eps in ((10_000, 1.0), (20_000, 1.0), (10_000, 2.0)):
        lr = math.sqrt(1000 * math.log(1e5)) / (samples * eps)
        terms, moments = terms_of_the_bound(samples, round(lr**-2), lr, eps)
        assert moments == pytest.approx(1.24, rel=0.05)
        assert terms == pytest.approx([lr, lr, moments**2 * lr], rel=1e-4)
    # Of equal η T the noise is the same; at twice the η T it is doubled.
    (*_, noise), _ = terms_of_the_bound(samples, round(4 * lr**-2), lr / 4, eps)
    (*_, more), _ = terms_of_the_bound(samples, round(2 * lr**-2), lr, eps)
    assert [noise, more] == pytest.approx([terms[2], 2 * terms[2]], rel=0.08)
    _, moments = terms_of_the_bound(10_000, 20, 1.0, 1.0)
    assert moments > 2


@pytest.mark.parametrize("quantile", [0.3, 0.5, 0.9])
def test_rule_p_bounds_the_bias_of_clipping_by_the_share_that_it_clips(quantile):
    """dc_sgd.md 3.2-7: β_t <= p' G, p' = 1 - p, but for a bin: C is the middle of the one that holds the quantile.

    Without noise, from the 20th step on, when the range of the histogram has found the norms.
    """
    samples = normal(300, 4, seed=6)
    threshold = PercentileThreshold(quantile=quantile)
    step = point_step(threshold, start=(1.0, 0.0, -1.0, 0.5), lr=0.02, expected_batch=300)
    excess = []
    for t in range(80):
        g = step.gradients.flat.vector - samples
        norms, value = g.norm(dim=1), threshold.value(t)
        bias = (g * (1 - value / norms[:, None]).clamp(min=0)).mean(0).norm()
        beside = ((norms - value).abs() <= threshold._range / 20).double().mean()
        if t >= 20:
            assert 0 < bias <= (1 - quantile + beside) * norms.max()
            assert bias <= (1 - quantile) * norms.max()
            excess.append(float((norms > value).double().mean()) - (1 - quantile))
        step([(samples, samples)])
    assert np.mean(excess) == pytest.approx(0, abs=0.05)
