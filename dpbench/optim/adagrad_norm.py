"""AdaGrad-Norm: one step size for all parameters, from the norms of the gradients so far."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT
from typing_extensions import override

from dpbench.errors import require
from dpbench.optim.base import Optimizer


class AdaGradNormSteps(torch.optim.Optimizer):
    """b_{t+1}² = b_t² + max(β_t n_t, ν); θ moves by -(lr/b_{t+1}) ĝ_t, with β_t = max(β/((t mod period) + 1), 1).

    n_t is ‖g_t‖² of the unfiltered private gradient less d σ_t², what the noise adds to it on average; or the square
    of ``unnoised_norm`` where the group has that key. Weight decay is decoupled. One parameter group.
    """

    def __init__(self, params: ParamsT, **settings: Any) -> None:
        super().__init__(params, {**settings, "noise_std": 0.0, "steps": 0})

    @override
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Take a step with the gradients as they are."""
        self.step_filtered(lambda gradient: gradient)

    @torch.no_grad()
    def step_filtered(self, smooth: Callable[[Tensor], Tensor]) -> None:
        """Take a step; see `PlacesFilter`."""
        (group,) = self.param_groups
        parameters: list[Tensor] = [p for p in group["params"] if p.grad is not None]
        gradient = torch.cat([p.grad.reshape(-1) for p in parameters if p.grad is not None])
        if "unnoised_norm" in group:
            squared = group["unnoised_norm"] ** 2
        else:
            squared = float(gradient.square().sum()) - len(gradient) * group["noise_std"] ** 2
        amplification = max(group["amplification"] / (group["steps"] % group["period"] + 1), 1.0)
        group["accumulated"] += max(amplification * squared, group["floor"])
        group["steps"] += 1
        rate = group["lr"] / math.sqrt(group["accumulated"])
        moves = smooth(gradient).split([p.numel() for p in parameters])
        for parameter, move in zip(parameters, moves, strict=True):
            parameter.mul_(1 - rate * group["weight_decay"])
            parameter.add_(move.view_as(parameter), alpha=-rate)


@dataclass
class AdaGradNorm(Optimizer):
    """AdaGrad-Norm steps (Wu et al. 2021, sec. 5.2) whose norms are those of the private gradient.

    That is post-processing; the paper takes them from the un-noised one (`UncertifiedAdaGradNorm`).

    Attributes:
        start: b_0² > 0.
        floor: ν > 0, least that a step adds.
        amplification: β >= 1, factor on the squared norm, which decays to 1 within a period.
        period: steps after which the factor starts again; an epoch in the paper.
    """

    start: float = 20.0
    floor: float = 1e-5
    amplification: float = 1.0
    period: int = 195

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 < self.start < math.inf, "optim.start", self.start, "a finite number > 0")
        require(0 < self.floor < math.inf, "optim.floor", self.floor, "a finite number > 0")
        require(1 <= self.amplification < math.inf, "optim.amplification", self.amplification, "a finite number >= 1")
        require(self.period >= 1, "optim.period", self.period, "a whole number >= 1")

    @override
    def build(self, parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
        return AdaGradNormSteps(parameters, **self._settings())

    def _settings(self) -> dict[str, Any]:
        return {
            "lr": self.lr,
            "weight_decay": self.weight_decay,
            "accumulated": self.start,
            "floor": self.floor,
            "amplification": self.amplification,
            "period": self.period,
        }


@dataclass
class UncertifiedAdaGradNorm(AdaGradNorm):
    """AdaGrad-Norm steps as published: from the norm of the un-noised clipped mean of the current batch.

    NOT PRIVATE as far as is proven: every iterate depends on that norm, and neither the paper's proof nor the ledger
    covers it. For runs that compare with the paper's numbers; refused unless `uncertified` is set.

    Attributes:
        uncertified: that the eps of the run is not proven is accepted.
    """

    uncertified: bool = False

    @override
    def _settings(self) -> dict[str, Any]:
        return {**super()._settings(), "unnoised_norm": 0.0}
