"""The contract of an optimizer's configuration, and what an optimizer may ask of the step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor

from dpbench.errors import require

# float32 holds little more.
LARGEST = 1e38


@dataclass
class Optimizer(ABC):
    """Hyper-parameters of an optimizer; `build` makes it for given parameters.

    Attributes:
        elementwise: whether each element of a parameter moves by that element of the gradients alone.
        lr: learning rate; the schedule multiplies it.
        weight_decay: coefficient of the penalty on weights; AdamW, filtered Adam and AdaGrad-Norm shrink them apart.
    """

    elementwise: ClassVar[bool] = False

    lr: float = 0.1
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        require(0 < self.lr <= LARGEST, "optim.lr", self.lr, f"a number > 0, at most {LARGEST:g}")
        decay = self.weight_decay
        require(0 <= decay <= LARGEST, "optim.weight_decay", decay, f"a number from 0 to {LARGEST:g}")

    @abstractmethod
    def build(self, parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
        """The torch optimizer over these parameters."""


@runtime_checkable
class PlacesFilter(Protocol):
    """A torch optimizer that puts the filter where its algorithm wants it, instead of in front of itself.

    Any optimizer may further have keys in its parameter groups that the step writes before it, as a scheduler writes
    ``lr``: see `update.tell`.
    """

    def step_filtered(self, smooth: Callable[[Tensor], Tensor]) -> None:
        """Take a step where the parameters' ``.grad`` hold the private gradient g_t, not yet filtered.

        Args:
            smooth: the filter; to be called once, with a vector whose length is the same at every step. The result
                is valid until the next call and must not be written to.
        """
