"""Reading the private gradient where it leaves the private part of the step."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from dpbench.step import PrivateStep


class Tap:
    """A recorder that shows every private gradient g_t, shape (d,), to the attacker, and nothing before noise."""

    def __init__(self, show: Callable[[Tensor], None]) -> None:
        self._show = show

    @classmethod
    def into(cls, step: PrivateStep, show: Callable[[Tensor], None]) -> None:
        """Let a step be recorded by a tap."""
        step.recorder = cls(show)

    def unnoised(self, gradient: Tensor) -> None:
        """Not for the attacker."""

    def norms(self, norms: Tensor, error_weight: float) -> None:
        """Not for the attacker."""

    def private(self, gradient: Tensor) -> None:
        """Show g_t."""
        self._show(gradient)
