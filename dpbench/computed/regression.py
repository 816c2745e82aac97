"""Noisy gradient descent on synthetic linear regression: where filters are compared without clipping or sampling.

DiSK's figure 6(a): NoisyGD (the full gradient and Gaussian noise), NoisyLP (and a low-pass filter) and NoisyKF (DiSK).
There is no privacy here. The paper gives neither dimensions nor step size; those below are ours.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from dpbench.filters import Exponential, Filter, Identity, Kalman, RecursiveLowPass
from dpbench.query import OnePoint, Query, TwoPoint

# Of random problems: n, d, and the standard deviation of e.
SAMPLES, DIMENSION = 200, 20
RESIDUAL = 0.1


@dataclass(frozen=True)
class LinearRegression:
    """F(x) = ‖A x - y‖²/(2n), y = A x* + e with everything normal.

    Attributes:
        inputs: A, shape (n, d).
        targets: y, shape (n,).
    """

    inputs: Tensor
    targets: Tensor

    @classmethod
    def draw(cls, generator: torch.Generator) -> LinearRegression:
        """A random problem in float64."""
        inputs = torch.randn(SAMPLES, DIMENSION, generator=generator, dtype=torch.float64)
        truth = torch.randn(DIMENSION, generator=generator, dtype=torch.float64)
        errors = torch.randn(SAMPLES, generator=generator, dtype=torch.float64)
        return cls(inputs, inputs @ truth + RESIDUAL * errors)

    @property
    def hessian(self) -> Tensor:
        """AᵀA/n, shape (d, d)."""
        return self.inputs.T @ self.inputs / len(self.inputs)

    def loss(self, iterate: Tensor) -> float:
        """F at an iterate of shape (d,)."""
        return float((self.inputs @ iterate - self.targets).square().mean() / 2)

    def gradient(self, iterate: Tensor) -> Tensor:
        """∇F, shape (d,)."""
        return self.inputs.T @ (self.inputs @ iterate - self.targets) / len(self.inputs)

    @property
    def least_loss(self) -> float:
        """F at its minimum."""
        return self.loss(torch.linalg.lstsq(self.inputs, self.targets).solution)


# How each method of the figure queries and filters at a weight kappa of the new gradient.
METHODS: dict[str, Callable[[float], tuple[Query, Filter]]] = {
    "NoisyGD": lambda kappa: (OnePoint(), Identity()),
    "NoisyLP": lambda kappa: (OnePoint(), RecursiveLowPass(b=[kappa], a=[kappa - 1])),
    "NoisyKF": lambda kappa: (TwoPoint(kappa=kappa, gamma=0.5), Exponential(kappa=kappa)),
}


def descend(
    problem: LinearRegression,
    query: Query,
    filter: Filter,
    *,
    noise_std: float,
    lr: float,
    steps: int,
    generator: torch.Generator,
) -> Tensor:
    """Iterates x_0 = 0, x_1, ... of x_{t+1} = x_t - lr ĝ_t, shape (steps + 1, d).

    Args:
        problem: whose full gradient is queried.
        query: the points of each step.
        filter: of the noisy gradients; the Kalman filter is told the exact Hessian times the last step.
        noise_std: standard deviation of the noise in each coordinate.
        lr: step size.
        steps: number of steps.
        generator: of the noise, on the problem's device.
    """
    iterates = [problem.inputs.new_zeros(problem.inputs.shape[1])]
    for step in range(steps):
        iterate = iterates[-1]
        clean = sum(
            (weight * problem.gradient(point) for weight, point in query.points(iterate)), torch.zeros_like(iterate)
        )
        noise = torch.empty_like(iterate).normal_(generator=generator)
        if isinstance(filter, Kalman) and step > 0:
            filter.predict(problem.hessian @ (iterate - iterates[-2]))
        filter.expect(noise_std)
        iterates.append(iterate - lr * filter.apply(clean + noise_std * noise))
    return torch.stack(iterates)
