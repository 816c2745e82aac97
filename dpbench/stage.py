"""What the five stages of the private step have in common."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from dpbench.history import History

State = dict[str, Any]
COMPARED = (bool, int, float, str, list, tuple, dict, set, deque, type(None))


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
    Fields are checked in ``__post_init__``. What a stage learns while it runs lives in plain attributes; those that it
    names in `remembers` travel in its state, so that a resumed run is the run that was never stopped.

    Attributes:
        remembers: names of attributes that are None, tensors, plain values, lists and dictionaries of these, or a
            `History`; in the state they have no underscore before them.
    """

    remembers: ClassVar[tuple[str, ...]] = ()

    def state_dict(self) -> State:
        """Copies of everything the stage remembers between steps, as tensors and plain values."""
        return {name.removeprefix("_"): _copied(getattr(self, name)) for name in self.remembers}

    def load_state_dict(self, state: State) -> None:
        """Continue from a copy of a state that `state_dict` returned.

        Raises:
            ValueError: it is of a stage that remembers something else.
        """
        names = {name.removeprefix("_"): name for name in self.remembers}
        if state.keys() != names.keys():
            kept = ", ".join(sorted(names)) or "no state"
            raise ValueError(f"{type(self).__name__} keeps {kept}, got {sorted(state)}")
        for key, name in names.items():
            held = getattr(self, name)
            if isinstance(held, History):
                held.restore(state[key])
            else:
                setattr(self, name, _copied(state[key]))


class PlannedStage(Stage):
    """A stage that may rest on the course of the run."""

    _course: Course | None = None

    def prepare(self, course: Course) -> None:
        """Learn what is public about the run; called before anything else is asked of the stage."""
        self._course = course

    @property
    def course(self) -> Course:
        """What is public about the run.

        Raises:
            RuntimeError: the stage was told nothing of it.
        """
        if self._course is None:
            raise RuntimeError("prepare() was not called: the stage needs to know the run's course")
        return self._course


def is_own(kind: type) -> bool:
    """Whether a class is one's own, from outside the package."""
    return kind.__module__.partition(".")[0] != __package__.partition(".")[0]


def forgotten(stage: Stage, fresh: Stage) -> list[str]:
    """Attributes that a stage has changed while it ran, and that a run which goes on would not find: it gives no state.

    Args:
        stage: that has run.
        fresh: as it was before its first step.
    """
    if stage.remembers or type(stage).state_dict is not Stage.state_dict:
        return []
    before = vars(fresh)
    return [name for name, value in vars(stage).items() if name not in before or _differ(value, before[name])]


def _copied(value: Any) -> Any:
    if isinstance(value, History):
        return value.copies()
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, list):
        return [_copied(item) for item in value]
    if isinstance(value, dict):
        return {key: _copied(item) for key, item in value.items()}
    return value


def _differ(one: Any, other: Any) -> bool:
    """Whether two values are surely different; some can't be compared, such as functions with their copies."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return not torch.equal(one, other)
    if type(one) not in COMPARED:
        return type(one) is not type(other)
    try:
        return bool(one != other)
    except Exception:  # of a list of tensors, say; whatever the types of a stage of one's own raise
        return False


def same_state(one: Any, other: Any) -> bool:
    """Whether two nested states are the same bit for bit, so that NaN is the same as itself."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        same = one.shape == other.shape and one.dtype == other.dtype
        return same and torch.equal(_bits(one), _bits(other.to(one.device)))
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        return one.shape == other.shape and one.dtype == other.dtype and one.tobytes() == other.tobytes()
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(same_state(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(same_state, one, other))
    return bool(one == other or (one != one and other != other))


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8) if tensor.dim() > 0 else tensor.reshape(1).view(torch.uint8)
