"""GaLore: moments and filter in a low-dimensional space of each matrix's gradient."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT
from typing_extensions import override

from dpbench.errors import require
from dpbench.optim.filtered_adam import FilteredAdam, FilteredAdamSteps


class GaLoreSteps(FilteredAdamSteps):
    """`FilteredAdamSteps` on P_t^T G_t instead of G_t; the parameter moves by scale P_t times the direction.

    P_t holds the first `rank` singular vectors of the private gradient on the shorter side of the matrix, and is
    renewed every `interval` steps. What is remembered in the old coordinates is kept as it is. A tensor of more than
    two dimensions is taken as a matrix of dimension 0 by the rest; one of fewer is not projected.
    """

    def __init__(self, params: ParamsT, *, rank: int, interval: int, scale: float, **settings: Any) -> None:
        super().__init__(params, noise_correction=False, **settings)
        self.param_groups[0].update(rank=rank, interval=interval, scale=scale)

    @override
    def into(self, parameter: Tensor) -> Tensor:
        gradient = super().into(parameter)
        if gradient.dim() < 2:
            return gradient
        (group,) = self.param_groups
        matrix, state = gradient.flatten(1), self.state[parameter]
        if (group["steps"] - 1) % group["interval"] == 0:
            state["projector"] = _vectors(matrix)[:, : group["rank"]].contiguous()
        projector: Tensor = state["projector"]
        return projector.T @ matrix if _shorter_first(matrix) else matrix @ projector

    @override
    def out_of(self, parameter: Tensor, direction: Tensor) -> Tensor:
        if parameter.dim() < 2:
            return direction
        projector: Tensor = self.state[parameter]["projector"]
        matrix = projector @ direction if _shorter_first(parameter.flatten(1)) else direction @ projector.T
        return matrix.view_as(parameter).mul_(self.param_groups[0]["scale"])


def _vectors(matrix: Tensor) -> Tensor:
    """Singular vectors on the shorter side of a matrix; NaN where it holds what is no number."""
    try:
        left, _, right = torch.linalg.svd(matrix, full_matrices=False)
    except RuntimeError:  # that it does not converge
        if matrix.isfinite().all():
            raise
        return matrix.new_full((min(matrix.shape),) * 2, torch.nan)
    vectors: Tensor = left if _shorter_first(matrix) else right.T
    return vectors


def _shorter_first(matrix: Tensor) -> bool:
    return matrix.shape[0] < matrix.shape[1]


@dataclass
class GaLore(FilteredAdam):
    """GaLore (Zhao et al. 2024) as DOPPLER uses it (Zhang et al. 2024, Alg. 3): `FilteredAdam` in a smaller space.

    The projector is made from the private gradient, so it costs no privacy.

    Attributes:
        rank: r >= 1, dimension of the space; a shorter side of at most r is only rotated.
        interval: I >= 1, steps between renewals of the projector.
        scale: factor on the change of projected parameters, > 0.
    """

    elementwise: ClassVar[bool] = False

    rank: int = 128
    interval: int = 50
    scale: float = 1.0

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.rank >= 1, "optim.rank", self.rank, "a whole number >= 1")
        require(self.interval >= 1, "optim.interval", self.interval, "a whole number >= 1")
        require(0 < self.scale < math.inf, "optim.scale", self.scale, "a finite number > 0")

    @override
    def build(self, parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
        return GaLoreSteps(
            parameters,
            rank=self.rank,
            interval=self.interval,
            scale=self.scale,
            lr=self.lr,
            weight_decay=self.weight_decay,
            beta2=self.beta2,
            floor=self.floor,
        )
