"""What every noise promises, and noise of one scale."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from torch import Tensor
from typing_extensions import override

from dpbench.privacy.correlation import Correlation
from dpbench.privacy.gaussian import GaussianSource
from dpbench.stage import PlannedStage


@dataclass
class Noise(PlannedStage, ABC):
    """Noise of standard deviation z s_t Δ on the sum, z being the noise multiplier and Δ the sensitivity.

    A noise tells s_t, and draws at scale 1; the step multiplies by z s_t Δ and adds (dpbench/step.py).
    """

    @property
    def correlation(self) -> Correlation | None:
        """How steps are correlated, None where they are independent; the plan is made of it."""
        return None

    @abstractmethod
    def scale(self, step: int) -> float:
        """Relative scale s_t; must be known before training, for the plan is made of it."""

    def claimed_scale(self, step: int) -> float:
        """The scale that a publication's accountant takes it for; differs from `scale` where noise is understated."""
        return self.scale(step)

    def deviation(self, step: int) -> float:
        """Standard deviation of what `draw` gives at a step, in units of what the plan takes the noise for; public."""
        return 1.0

    def draw(self, out: Tensor, source: GaussianSource) -> Tensor:
        """Fill `out`, shape (d,), with the noise of the next step at scale 1 and return it. Called once a step."""
        return source.fill(out)


@dataclass
class ConstantNoise(Noise):
    """The same scale at every step, independent in time."""

    @override
    def scale(self, step: int) -> float:
        return 1.0
