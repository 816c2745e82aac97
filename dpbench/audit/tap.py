"""Reading the private gradient where it leaves the private part of the step."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from typing_extensions import override

from dpbench.filters import Filter
from dpbench.stage import State
from dpbench.step import PrivateStep


class Tap(Filter):
    """Shows every private gradient g_t, shape (d,), to the attacker, then lets the step's own filter have it."""

    def __init__(self, filter: Filter, show: Callable[[Tensor], None]) -> None:
        self._filter = filter
        self._show = show

    @classmethod
    def into(cls, step: PrivateStep, show: Callable[[Tensor], None]) -> None:
        """Put a tap in front of a step's filter."""
        step.filter = cls(step.filter, show)

    @override
    def apply(self, gradient: Tensor) -> Tensor:
        self._show(gradient)
        return self._filter.apply(gradient)

    @override
    def state_dict(self) -> State:
        return self._filter.state_dict()

    @override
    def load_state_dict(self, state: State) -> None:
        self._filter.load_state_dict(state)
