"""Carrying out runs that halt in each step for a clipped sum: one alone, or several in step with each other."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Generic, TypeVar

from dpbench.gradients import Clipped, Request

T = TypeVar("T")
# A run that yields what it asks of the gradients, is sent what it asked for, and returns a T.
Steps = Generator[Request, Clipped, T]
# Computes what several runs ask for; an error takes the place of what one of them can't get.
Compute = Callable[[Sequence[Request]], Sequence[Clipped | Exception]]


def alone(steps: Steps[T]) -> T:
    """Carry out one run and return what it returns."""
    return together([steps], _one_by_one)[0]


def _one_by_one(requests: Sequence[Request]) -> list[Clipped | Exception]:
    found: list[Clipped | Exception] = []
    for request in requests:
        try:
            found.append(request.alone())
        except Exception as error:
            found.append(error)
    return found


def together(runs: Sequence[Steps[T]], compute: Compute) -> list[T]:
    """Carry out several runs, one step of each at a time.

    An error is raised in the run that it belongs to; the others go on. What ends the process is raised in all of them.

    Args:
        runs: not yet started.
        compute: answers the requests of one step.

    Returns:
        What the runs return.

    Raises:
        KeyboardInterrupt: after each run has had the chance to say so; SystemExit likewise.
        Exception: the first that a run let out, after all others have ended.
    """
    running = [_Run(steps) for steps in runs]
    try:
        for run in running:
            run.resume(None)
        while asking := [(run, run.request) for run in running if run.request is not None]:
            found = compute([request for _, request in asking])
            for (run, _), outcome in zip(asking, found, strict=True):
                run.resume(outcome)
    except (KeyboardInterrupt, SystemExit) as end:
        for run in running:
            run.interrupt(type(end))
        raise
    return [run.result() for run in running]


class _Run(Generic[T]):
    """One run, between two of its steps.

    Attributes:
        request: what it asks for; None before the first step and after the last.
    """

    def __init__(self, steps: Steps[T]) -> None:
        self.request: Request | None = None
        self._steps = steps
        self._end: StopIteration | Exception | None = None

    def resume(self, outcome: Clipped | Exception | None) -> None:
        """Go on to the next request, with what the last one came to."""
        try:
            if isinstance(outcome, Exception):
                self.request = self._steps.throw(outcome)
            elif outcome is None:
                self.request = next(self._steps)
            else:
                self.request = self._steps.send(outcome)
        except StopIteration as end:
            # Its traceback leads back here, which would keep all that the run has in memory beyond its end.
            self.request, self._end = None, end.with_traceback(None)
        except Exception as end:
            self.request, self._end = None, end

    def interrupt(self, kind: type[BaseException]) -> None:
        """Raise what ends the process where the run stands, unless it has ended."""
        if self.request is None:
            return
        try:
            self._steps.throw(kind())
        except (KeyboardInterrupt, SystemExit, Exception):  # the one for all is raised by the caller
            self.request = None

    def result(self) -> T:
        """What the run returned, or raises what it let out."""
        if isinstance(self._end, StopIteration):
            value: T = self._end.value
            return value
        assert self._end is not None
        raise self._end
