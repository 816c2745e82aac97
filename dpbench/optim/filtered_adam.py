"""Adam whose first moment is the filter of the run: LP-DPAdam and LP-DPAdamBC."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT
from typing_extensions import override

from dpbench.errors import require
from dpbench.optim.base import Optimizer


class FilteredAdamSteps(torch.optim.Optimizer):
    """v_t = β v_{t-1} + (1 - β) g_t² of the private gradient; θ moves by -lr ĝ_t / root_t, ĝ_t the filtered one.

    root_t = max(sqrt(max(v_t/(1 - β^{t+1}) - n_t, 0)), floor), element by element. n_t is 0, or what the noise adds to
    the moment on average: the same average of the noise variances, which is the variance where that is constant.
    Weight decay is decoupled. One parameter group.
    """

    def __init__(
        self, params: ParamsT, *, lr: float, weight_decay: float, beta2: float, floor: float, noise_correction: bool
    ) -> None:
        settings = {"beta2": beta2, "floor": floor, "noise_correction": noise_correction}
        memory = {"noise_std": 0.0, "noise_moment": 0.0, "steps": 0}
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, **settings, **memory})

    @override
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Take a step with the gradients as they are."""
        self.step_filtered(lambda gradient: gradient)

    @torch.no_grad()
    def step_filtered(self, smooth: Callable[[Tensor], Tensor]) -> None:
        """Take a step; see `PlacesFilter`."""
        (group,) = self.param_groups
        group["steps"] += 1
        beta2 = group["beta2"]
        group["noise_moment"] = beta2 * group["noise_moment"] + (1 - beta2) * group["noise_std"] ** 2
        parameters: list[Tensor] = [p for p in group["params"] if p.grad is not None]
        coordinates = [self.into(p) for p in parameters]
        smoothed = smooth(torch.cat([c.reshape(-1) for c in coordinates])).split([c.numel() for c in coordinates])
        for parameter, gradient, mean in zip(parameters, coordinates, smoothed, strict=True):
            direction = mean.view_as(gradient) / self._root(group, parameter, gradient)
            parameter.mul_(1 - group["lr"] * group["weight_decay"])
            parameter.add_(self.out_of(parameter, direction), alpha=-group["lr"])

    def into(self, parameter: Tensor) -> Tensor:
        """The parameter's gradient in the coordinates in which moments and filter live."""
        assert parameter.grad is not None
        return parameter.grad

    def out_of(self, parameter: Tensor, direction: Tensor) -> Tensor:
        """A direction in those coordinates as a change of the parameter."""
        return direction

    def _root(self, group: dict[str, Any], parameter: Tensor, gradient: Tensor) -> Tensor:
        state, beta2 = self.state[parameter], group["beta2"]
        if "second_moment" not in state:
            state["second_moment"] = torch.zeros_like(gradient)
        moment = state["second_moment"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        noise = group["noise_moment"] if group["noise_correction"] else 0.0
        unbiased: Tensor = (moment - noise) / (1 - beta2 ** group["steps"])
        return unbiased.clamp_(min=0).sqrt_().clamp_(min=group["floor"])


@dataclass
class FilteredAdam(Optimizer):
    """DOPPLER's Adam (Zhang et al. 2024, Alg. 3): the filter takes the place of the first moment.

    The second moment is that of the unfiltered private gradient, and the denominator is max(sqrt(v̂), floor). With
    filter=momentum it is Adam with beta1 = 0.9 but for that denominator; with filter=none it has no first moment.

    Attributes:
        beta2: decay of the second moment, in [0, 1).
        floor: smallest denominator, > 0.
    """

    elementwise: ClassVar[bool] = True
    noise_correction: ClassVar[bool] = False

    beta2: float = 0.999
    floor: float = 1e-5

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 <= self.beta2 < 1, "optim.beta2", self.beta2, "a number in [0, 1)")
        require(0 < self.floor < math.inf, "optim.floor", self.floor, "a finite number > 0")

    @override
    def build(self, parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
        return FilteredAdamSteps(
            parameters,
            lr=self.lr,
            weight_decay=self.weight_decay,
            beta2=self.beta2,
            floor=self.floor,
            noise_correction=self.noise_correction,
        )


@dataclass
class AdamBC(FilteredAdam):
    """`FilteredAdam` that takes the variance of the privacy noise out of the second moment (Tang et al. 2024).

    The denominator is sqrt(max(v̂ - σ², floor²)), σ² the variance of the noise in each coordinate of g_t; where that
    changes from step to step, its corrected average over them, as v̂ is of g_t². Their DP-AdamBC is this with
    filter=momentum. The variance is public: multiplier, sensitivity and expected batch size make it.
    """

    noise_correction: ClassVar[bool] = True

    floor: float = 1e-4
