"""What the five stages of the private step have in common."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dpbench.state import Remembering

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


class Stage(Remembering):
    """A stage of the private step.

    Each stage is a dataclass whose fields are its configuration: composing a config makes the stage itself.
    Fields are checked in ``__post_init__``. What a stage learns while it runs lives in plain attributes; those that it
    names in `remembers` travel in its state, so that a resumed run is the run that was never stopped.
    """


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
    """Attributes that a stage has changed while it ran, and that a run which goes on would not find, by their names.

    None of a stage whose class writes its state itself, which may have them in another form.

    Args:
        stage: that has run.
        fresh: as it was before its first step.
    """
    if type(stage).state_dict is not Stage.state_dict:
        return []
    before = vars(fresh)
    return [
        name
        for name, value in vars(stage).items()
        if name not in stage.remembers and (name not in before or _differ(value, before[name]))
    ]


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
