"""The contract of a filter, and the one that does nothing."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor
from typing_extensions import override

from dpbench.stage import Stage


@dataclass
class Filter(Stage, ABC):
    """Maps the private gradients of all steps so far to the gradient the optimizer gets.

    Attributes:
        elementwise: whether each coordinate of the result is made of that coordinate of the gradients alone.
    """

    elementwise: ClassVar[bool] = False

    def expect(self, noise_std: float) -> None:
        """Learn the standard deviation of the noise in each coordinate of the next gradient, which is public."""

    @abstractmethod
    def apply(self, gradient: Tensor) -> Tensor:
        """Filtered gradient of this step.

        Args:
            gradient: private gradient g_t, shape (d,). Kept as a copy, so the caller may overwrite it once the
                result is no longer needed.

        Returns:
            ĝ_t, shape (d,), valid until the next call and not to be written to: it may be the argument itself or
            the filter's memory.
        """


@dataclass
class Identity(Filter):
    """ĝ_t = g_t."""

    elementwise: ClassVar[bool] = True

    @override
    def apply(self, gradient: Tensor) -> Tensor:
        return gradient
