"""What DP-PMLF proves, on problems whose constants are known: the program's steps must keep within the bounds.

The bounds are written from the specification and compared with the numbers printed there before a run is held to them.
"""

import math
from copy import deepcopy

import numpy as np
import pytest
import torch
from draws import normal
from filter_references import catalogued, weights
from torch import nn
from toy_problems import point_step

from dpbench.query import LastIterates
from dpbench.threshold import FixedThreshold


@pytest.mark.parametrize(("length", "decay", "factor"), [(2, 0.1, 1.1980), (3, 0.5, 2.3333), (1, 0.1, 0.25)])
def test_the_bias_of_clipping_a_momentum_keeps_within_its_bound(length, decay, factor):
    """dp_pmlf.md 3.2-4: |E[clip(v) - v]| <= |∇f(x)| + 2 σ_SGD/ρ; σ_SGD in place of 2 σ_SGD/ρ without momentum."""
    samples = normal(200, 3, seed=4)
    deviation = float((samples - samples.mean(0)).square().sum(1).mean().sqrt())
    step = point_step(
        FixedThreshold(0.5), start=(2.0, -1.0, 0.5), query=LastIterates(length, decay), lr=0.02, expected_batch=200
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


class Waves(nn.Module):
    """f(x; ω, φ) = |x|²/2 + sin(⟨ω, x⟩ + φ)/|ω|, shape (B, 1), of samples (ω, φ).

    Over φ of four quarter turns its gradient is x on average, and x + cos(⟨ω, x⟩ + φ) ω/|ω| has variance 1/2.
    """

    def __init__(self, dimension):
        super().__init__()
        self.x = nn.Parameter(torch.full((dimension,), 2.0, dtype=torch.float64))

    def forward(self, samples):
        omega = samples[:, :-1]
        waves = torch.sin((omega * self.x).sum(1) + samples[:, -1]) / omega.norm(dim=1)
        return (0.5 * self.x.square().sum(-1) + waves).unsqueeze(1)


def errors_of_momentum(length, decay, *, spread, times=1.0):
    """dp_pmlf.md 3.2-3 on `Waves`: E|v - ∇f(x)|² over 2,000 samples, and its parts of sampling and of drift.

    Means over a run on 8 of them, in units of the bounds 4 σ²/ρ², σ²/ρ² and L² η² k³ (C² + d σ_DP²)/ρ²; η is that of
    the condition, times so much. Also ρ².
    """
    d, count, batch, multiplier, norm = 5, 500, 8, 2.4, 1.0
    sampling = 0.5
    step_squared = norm**2 + d * (multiplier * norm / batch) ** 2
    lr = times * math.sqrt(sampling / (length**3 * step_squared))  # L = 1
    rho_squared = (1 + decay) * (1 - decay**length) / ((1 - decay) * (1 + decay**length))
    omega = spread * normal(count, d, seed=7).repeat_interleave(4, dim=0)
    phase = (torch.arange(4, dtype=torch.float64) * math.pi / 2).repeat(count)
    samples = torch.cat([omega, phase[:, None]], dim=1)
    along = omega / omega.norm(dim=1, keepdim=True)
    query, problem = LastIterates(length, decay), (Waves(d), lambda outputs, _: outputs.squeeze(1))
    step = point_step(
        FixedThreshold(norm),
        query=query,
        noise_multiplier=multiplier,
        lr=lr,
        expected_batch=batch,
        seed=2,
        problem=problem,
    )
    found = []
    for t in range(40):
        x = step.gradients.flat.vector.clone()
        if t >= length:
            points = deepcopy(step.query).points(x)
            noise = sum(weight * torch.cos(omega @ point + phase) for weight, point in points)[:, None] * along
            drift = sum(weight * (point - x) for weight, point in points)
            found.append([float(e.square().sum(-1).mean()) for e in (noise + drift, noise, drift)])
        drawn = samples[batch * t : batch * (t + 1)]
        step([(drawn, drawn)])
    bounds = [4 * sampling / rho_squared, sampling / rho_squared, lr**2 * length**3 * step_squared / rho_squared]
    return np.mean(found, axis=0) / bounds, rho_squared


@pytest.mark.parametrize(("length", "decay"), [(1, 0.1), (2, 0.1), (3, 0.5), (5, 0.9)])
def test_the_error_of_a_momentum_keeps_within_its_bound_where_samples_change_with_the_iterate(length, decay):
    """dp_pmlf.md 3.2-3: then the sampling error falls by ρ². Where it is the same at all iterates, it does not.

    500 directions ω: products of two iterates' waves are 0 to 3 %, on average over some 35 steps to 0.5 %.
    """
    (whole, sampled, drifted), rho_squared = errors_of_momentum(length, decay, spread=3000.0)
    assert sampled == pytest.approx(1, rel=0.03)
    assert drifted <= 1
    assert (drifted > 0) == (length > 1)
    assert whole <= 1
    (whole, sampled, _), _ = errors_of_momentum(length, decay, spread=1e-4)
    assert sampled == pytest.approx(rho_squared, rel=0.03)
    assert (whole > 1) == (rho_squared > 4)


def test_that_bound_of_a_momentum_is_broken_by_steps_larger_than_its_condition_allows():
    (whole, _, drifted), _ = errors_of_momentum(3, 0.5, spread=3000.0, times=25.0)
    assert drifted <= 1  # which grows with the step
    assert whole > 1


def gammas(filter, query, correlations, steps=60):
    """Γ_DP and Γ_SGD of dp_pmlf.md 3.2-5 after so many steps, where c_s is given for all lags, and the mean of ĉ."""
    table, momentum = weights(catalogued(filter), steps), query.weights(query.length)
    mixed = np.array([np.dot(momentum, correlations[lag : lag + query.length]) for lag in range(steps)])
    lags = np.subtract.outer(np.arange(steps), np.arange(steps))
    c = np.where(lags >= 0, mixed[lags], 1)  # beyond, weights are 0
    gained = (table * c).sum()
    return gained / (table**2).sum(), gained / (table / c).sum(), gained / steps


@pytest.mark.parametrize("filter", ["sgd", "momentum", "lp6", "lp7"])
def test_the_bound_of_dp_pmlf_is_that_of_dpsgd_without_filter_and_momentum(filter):
    """dp_pmlf.md 3.2-5: Γ = 1 then, whatever the correlations; and Γ_SGD where none of them is below 1."""
    fading = 0.9 ** np.arange(200)
    assert gammas("sgd", LastIterates(length=1), fading)[:2] == pytest.approx((1, 1))
    for query in (LastIterates(length=1), LastIterates(length=3, decay=0.5)):
        of_noise, of_sampling, _ = gammas(filter, query, np.ones(200))
        assert of_sampling == pytest.approx(1, rel=1e-12)
        assert (of_noise == pytest.approx(1)) == (filter == "sgd")
        # By Cauchy and Schwarz, Γ_SGD is at most the square of the mean ĉ: what fades makes the last term larger.
        _, of_sampling, mean = gammas(filter, query, fading)
        assert of_sampling <= mean**2 * (1 + 1e-12)
        assert (mean < 0.99) == (filter != "sgd" or query.length > 1)
