"""The Kalman filter of the gradient, before DiSK simplifies it, and the recurrences of its gain."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from typing_extensions import override

from dpbench.errors import require
from dpbench.filters.base import Filter


@dataclass
class Kalman(Filter):
    """DiSK's un-simplified filter (Zhang et al. 2024, Alg. 2), for small d: d×d matrices, O(d³) a step.

    The gradient is the hidden state; it moves by u_t = H_t (x_t - x_{t-1}), which `predict` is told before `apply`, and
    g_t = C̄ ∇F + noise observes it. With m_{-1} = 0 and P_{-1} = σ_w² I:

        m⁻ = m_{t-1} + u_t,  P⁻ = P_{t-1} + (σ_H² + σ_v²) I,
        K = P⁻ C̄ᵀ (C̄ (P⁻ + σ_C² m⁻ m⁻ᵀ) C̄ᵀ + (σ_w² - σ_H²) I)⁻¹,
        m_t = m⁻ + K (g_t - C̄ m⁻),  P_t = (I - K C̄) P⁻.

    The paper's gain has m_t, which it is itself needed for; m⁻ stands for it. A Hessian times a displacement is made of
    un-noised data, so this is for problems without privacy (`dpbench.computed.regression`), no option of a private run.

    Attributes:
        noise: σ_w² > 0, variance of the noise in each coordinate of g_t.
        hessian_noise: σ_H² in [0, σ_w²), variance of the error in u_t.
        drift: σ_v² >= 0, variance of what the linear prediction leaves out.
        observation_noise: σ_C² >= 0, variance of the random matrix that clipping and sampling multiply by.
    """

    remembers = ("_estimate", "_covariance")

    noise: float = 1.0
    hessian_noise: float = 0.0
    drift: float = 0.0
    observation_noise: float = 0.0

    def __post_init__(self) -> None:
        require(0 < self.noise < math.inf, "filter.noise", self.noise, "a finite number > 0")
        require(0 <= self.hessian_noise < self.noise, "filter.hessian_noise", self.hessian_noise, "in [0, noise)")
        require(self.drift >= 0, "filter.drift", self.drift, "a number >= 0")
        require(self.observation_noise >= 0, "filter.observation_noise", self.observation_noise, "a number >= 0")
        self.observation: Tensor | None = None  # C̄, shape (d, d); None for the identity
        self._shift: Tensor | None = None
        self._estimate: Tensor | None = None
        self._covariance: Tensor | None = None

    def predict(self, shift: Tensor) -> None:
        """Learn u_t, shape (d,), by which the gradient is predicted to move before the next observation."""
        self._shift = shift.clone()

    @override
    def apply(self, gradient: Tensor) -> Tensor:
        identity = torch.eye(len(gradient), dtype=gradient.dtype, device=gradient.device)
        observed = identity if self.observation is None else self.observation
        estimate = torch.zeros_like(gradient) if self._estimate is None else self._estimate
        covariance = self.noise * identity if self._covariance is None else self._covariance
        if self._shift is not None:
            estimate = estimate + self._shift
        covariance = covariance + (self.hessian_noise + self.drift) * identity
        spread = covariance + self.observation_noise * torch.outer(estimate, estimate)
        innovation = observed @ spread @ observed.T + (self.noise - self.hessian_noise) * identity
        gain = torch.linalg.solve(innovation, observed @ covariance).T
        self._estimate = estimate + gain @ (gradient - observed @ estimate)
        self._covariance = (identity - gain @ observed) @ covariance
        self._shift = None
        return self._estimate


class Gain(NamedTuple):
    """Gain k_t and variance p_t of the estimate, where all covariances are multiples of the identity."""

    gain: float
    variance: float


def scalar_gains(noise: float, hessian_noise: float, drift: float, steps: int) -> list[Gain]:
    """k_t and p_t for t = 0..steps-1 from p_{-1} = σ_w² (DiSK, App. A.3); arguments as in `Kalman`."""
    gains, variance = [], noise
    for _ in range(steps):
        gain = (variance + hessian_noise + drift) / (variance + noise + drift)
        variance = (noise - hessian_noise) * gain
        gains.append(Gain(gain, variance))
    return gains


def steady_gain(noise: float, hessian_noise: float, drift: float) -> Gain:
    """The limits κ = k_∞ and p_∞ of `scalar_gains`."""
    error = hessian_noise + drift
    variance = (math.sqrt(error * (4 * noise - 3 * hessian_noise + drift)) - error) / 2
    return Gain(variance / (noise - hessian_noise), variance)


def gain_rate(noise: float, hessian_noise: float, drift: float) -> float:
    """Factor by which the distance of p_t from its limit shrinks in a step, eventually.

    The paper prints 3σ_H² where -σ_H² is right, so it agrees with this at σ_H² = 0 alone.
    """
    root = math.sqrt((hessian_noise + drift) * (4 * noise - 3 * hessian_noise + drift))
    sum_ = 2 * noise - hessian_noise + drift
    return (sum_ - root) / (sum_ + root)
