"""Noise whose scale changes from step to step, by a plan made before training; independent in time."""

from __future__ import annotations

import math
from dataclasses import dataclass

from typing_extensions import override

from dpbench.errors import UserError, require
from dpbench.noise.base import Noise
from dpbench.stage import Course


@dataclass
class StepSizeNoise(Noise):
    """s_t = 1/sqrt(η_t) for step sizes η_t known before training: ADP-SGD (Wu et al. 2021, α_t² = b_t = 1/η_t).

    Of all scales at the same Σ 1/s_t² these let the least noise into the parameters. Any multiple of them is the same
    method, since the noise multiplier is solved for afterwards; so only the schedule counts, not ``optim.lr``.
    """

    @override
    def prepare(self, course: Course) -> None:
        if not all(0 < course.rate(step) < math.inf for step in range(course.steps)):
            raise UserError("noise=step_size needs a finite learning rate > 0 at every step; choose another schedule")
        super().prepare(course)

    @override
    def scale(self, step: int) -> float:
        return 1 / math.sqrt(self.course.rate(step))


@dataclass
class GrowingNoise(Noise):
    """s_t = (start + (t + 1) growth)^(1/4): ADP-SGD with AdaGrad-Norm steps (Wu et al. 2021, t = 0..T-1 here).

    AdaGrad-Norm's b_t², of which s_t⁴ would have to be the value, depends on the data; this is a guess of it made
    before training.

    Attributes:
        start: b_0² from 1e-12 to 1e12; 20 in the paper.
        growth: c from 0 to 1e12, guess of what each step adds (C in the paper); 1e-5 to 1 there.
    """

    start: float = 20.0
    growth: float = 1e-4

    def __post_init__(self) -> None:
        require(1e-12 <= self.start <= 1e12, "noise.start", self.start, "a number from 1e-12 to 1e12")
        require(0 <= self.growth <= 1e12, "noise.growth", self.growth, "a number from 0 to 1e12")

    @override
    def scale(self, step: int) -> float:
        return float((self.start + (step + 1) * self.growth) ** 0.25)


@dataclass
class DecayingNoise(Noise):
    """s_t = decay^(t/T): the noise of dynamic DP-SGD (Du et al. 2021), whose μ_t = μ_0 decay^(-t/T) is Δ_t/noise.

    Attributes:
        decay: scale that step T would have, over that of step 0, from 1e-6 to 1.
    """

    decay: float = 0.5

    def __post_init__(self) -> None:
        require(1e-6 <= self.decay <= 1, "noise.decay", self.decay, "a number from 1e-6 to 1")

    @override
    def scale(self, step: int) -> float:
        return float(self.decay ** (step / self.course.steps))
