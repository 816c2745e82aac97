"""Stage 3, noise: the relative scale s_t of the noise of each step, and its correlation in time."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from dpbench.stage import Stage


@dataclass
class Noise(Stage):
    """Noise of standard deviation z s_t Δ on the sum, z being the noise multiplier and Δ the sensitivity."""

    def scale(self, step: int) -> float:
        """Relative scale s_t; must be known before training, for the plan is made of it."""
        raise NotImplementedError

    def draw(self, out: Tensor, generator: torch.Generator) -> Tensor:
        """Fill `out`, shape (d,), with this step's noise at unit variance and return it."""
        return out.normal_(generator=generator)


@dataclass
class ConstantNoise(Noise):
    """The same scale at every step, independent in time."""

    @override
    def scale(self, step: int) -> float:
        return 1.0
