"""Problems whose constants are known, on which what the papers prove is checked."""

import torch
from helpers import equal_releases
from test_pmlf import Position, half_square

from dpbench.clip import ThresholdClip
from dpbench.computed.regression import LinearRegression
from dpbench.filters import Identity
from dpbench.gradients import FlatParameters, PerSampleGradients
from dpbench.noise import ConstantNoise
from dpbench.optim import SGD
from dpbench.privacy.gaussian import SeededGaussian
from dpbench.query import OnePoint
from dpbench.step import PrivateStep


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


def point_step(
    threshold, *, start=None, query=None, multiplier=0.0, lr=1e-300, batch=1.0, seed=0, steps=1000, problem=None
):
    """A step on f(x; ξ) = |x - ξ|²/2, or on another problem, a model and its loss; of all samples given."""
    model, loss = problem or (Position(start), half_square)
    flat = FlatParameters(model)
    return PrivateStep(
        PerSampleGradients(model, flat, loss),
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
