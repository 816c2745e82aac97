"""What the five stages of the private step have in common."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

State = dict[str, Any]


class Course(NamedTuple):
    """What is public about a run before it starts.

    Attributes:
        steps: T, number of steps.
        batch: expected batch size B.
        rate: factor on the learning rate at step t = 0..T-1.
        epoch: steps in which each sample takes part once, where the sampler passes over the data; else 0.
    """

    steps: int
    batch: float
    rate: Callable[[int], float]
    epoch: int = 0


class Stage:
    """A stage of the private step.

    Each stage is a dataclass whose fields are its configuration: composing a config makes the stage itself.
    Fields are checked in ``__post_init__``. What a stage learns while it runs lives in plain attributes and
    travels in its state, so that a resumed run is the run that was never stopped.
    """

    def state_dict(self) -> State:
        """Everything the stage remembers between steps, as tensors and plain values."""
        return {}

    def load_state_dict(self, state: State) -> None:
        """Continue from a state that `state_dict` returned."""
        if state:
            raise ValueError(f"{type(self).__name__} keeps no state, got {sorted(state)}")
