"""The clipping threshold C_t."""

from __future__ import annotations

from dataclasses import dataclass

from typing_extensions import override

from dpbench.errors import require
from dpbench.stage import Stage


@dataclass
class Threshold(Stage):
    """Gives C_t for each step."""

    def value(self, step: int) -> float:
        """C_t at step t, counted from 0; from 1e-30 to 1e30, so that float32 factors keep the clip's promise."""
        raise NotImplementedError


@dataclass
class FixedThreshold(Threshold):
    """The same C at every step.

    Attributes:
        norm: C.
    """

    norm: float = 1.0

    def __post_init__(self) -> None:
        require(1e-30 <= self.norm <= 1e30, "threshold.norm", self.norm, "a number from 1e-30 to 1e30")

    @override
    def value(self, step: int) -> float:
        return self.norm
