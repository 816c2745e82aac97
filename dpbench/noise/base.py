"""Stage 3, noise: the relative scale s_t of the noise of each step, and its correlation in time."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from typing_extensions import override

from dpbench.privacy.gaussian import GaussianSource
from dpbench.stage import Course, Stage


@dataclass
class Noise(Stage):
    """Noise of standard deviation z s_t Δ on the sum, z being the noise multiplier and Δ the sensitivity."""

    def prepare(self, course: Course) -> None:
        """Learn what is public about the run; called before anything else is asked of the stage."""

    def scale(self, step: int) -> float:
        """Relative scale s_t; must be known before training, for the plan is made of it."""
        raise NotImplementedError

    def claimed_scale(self, step: int) -> float:
        """The scale that a publication's accountant takes it for; differs from `scale` where noise is understated."""
        return self.scale(step)

    def draw(self, out: Tensor, source: GaussianSource) -> Tensor:
        """Fill `out`, shape (d,), with this step's noise at unit variance and return it."""
        return source.fill(out)


@dataclass
class ConstantNoise(Noise):
    """The same scale at every step, independent in time."""

    @override
    def scale(self, step: int) -> float:
        return 1.0
