"""torch's own optimizers."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

import torch
from typing_extensions import override

from dpbench.errors import require
from dpbench.optim.base import Optimizer


@dataclass
class SGD(Optimizer):
    """torch.optim.SGD.

    Attributes:
        momentum: heavy-ball coefficient in [0, 1).
    """

    elementwise: ClassVar[bool] = True

    momentum: float = 0.0

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 <= self.momentum < 1, "optim.momentum", self.momentum, "a number in [0, 1)")

    @override
    def build(self, parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=self.lr, momentum=self.momentum, weight_decay=self.weight_decay)


@dataclass
class Adam(Optimizer):
    """torch.optim.Adam.

    Attributes:
        beta1: decay of the first moment, in [0, 1).
        beta2: decay of the second moment, in [0, 1).
        eps: added to the root of the second moment; > 0.
    """

    elementwise: ClassVar[bool] = True
    _torch_class: ClassVar[type[torch.optim.Adam]] = torch.optim.Adam

    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 <= self.beta1 < 1, "optim.beta1", self.beta1, "a number in [0, 1)")
        require(0 <= self.beta2 < 1, "optim.beta2", self.beta2, "a number in [0, 1)")
        require(0 < self.eps < math.inf, "optim.eps", self.eps, "a finite number > 0")

    @override
    def build(self, parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
        betas = (self.beta1, self.beta2)
        return self._torch_class(parameters, lr=self.lr, betas=betas, eps=self.eps, weight_decay=self.weight_decay)


@dataclass
class AdamW(Adam):
    """torch.optim.AdamW: Adam with decoupled weight decay."""

    _torch_class = torch.optim.AdamW
