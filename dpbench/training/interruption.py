"""Ending early, and when to write checkpoints: after a step, where every run stands between two of them."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import FrameType, TracebackType
from typing import Any, NamedTuple

from dpbench.config.schema import CheckpointTimes
from dpbench.errors import Terminated
from dpbench.training.team import ALONE, Team

# Checkpoints that are due by time take at most this share of it, however long one takes. What else asks for some, as
# evaluations of a run with secure noise do, comes on top.
LARGEST_SHARE = 0.02
# Signals by which submitit may have been told to listen to SLURM; not every system has them.
CLUSTERS = ("SIGUSR1", "SIGUSR2")
NOTICE = b"\ninterrupted: ends after this step, with a checkpoint"
NOTICE_IF_FORCED = b"\ninterrupted: ends after this step, and with force=true begins anew"
AT_ONCE = b"; once more ends at once"
# Why runs end early, in words.
BY_CLUSTER, BY_SIGTERM, BY_USER = REASONS = ("by its cluster", "by SIGTERM", "by the user")


class StoppedError(Exception):
    """A run ends early, between two steps."""


class Interruption:
    """While it is entered, SIGTERM and the first SIGINT are noted, for runs to end after the step under way.

    So is the signal by which SLURM tells a job of submitit that its time is up: submitit, which would end the process
    within the step, queues the job again once its runs have ended. A second SIGINT is raised at once, as ever; not so
    where several processes train a run, which end after the same step, or are killed by torchrun where that takes
    long. Signals belong to the main thread: in others nothing changes, nor where one is ignored. What handled them
    before does so again afterwards.
    """

    def __init__(self, team: Team = ALONE, *, forced: bool = False) -> None:
        """Set up.

        Args:
            team: of this process; one that does not lead says nothing.
            forced: whether the same command would begin the runs anew.
        """
        self._alone, self._speaks = team.size == 1, team.leads
        self._notice = NOTICE_IF_FORCED if forced else NOTICE
        self._noted: type[KeyboardInterrupt] | None = None
        self._by_user = False
        self._told: type[KeyboardInterrupt] | None = None
        self._put_off: Callable[[], Any] | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Interruption:
        if threading.current_thread() is threading.main_thread():
            for which in (signal.SIGTERM, signal.SIGINT):
                if signal.getsignal(which) is not signal.SIG_IGN:
                    self._before[which] = signal.signal(which, self._note)
            for which in signal.Signals:
                if which.name in CLUSTERS and _is_of_submitit(signal.getsignal(which)):
                    self._before[which] = signal.signal(which, self._put_off_until_runs_have_ended)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for which, handler in self._before.items():
            signal.signal(which, signal.SIG_DFL if handler is None else handler)
        self._before.clear()

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGTERM:
            self._noted = self._noted or Terminated
        elif not self._by_user:
            self._by_user, self._noted = True, self._noted or KeyboardInterrupt
            if self._speaks:  # print may not be called here
                os.write(2, self._notice + (AT_ONCE if self._alone else b"") + b"\n")
        elif self._alone:
            raise KeyboardInterrupt

    def _put_off_until_runs_have_ended(self, number: int, frame: FrameType | None) -> None:
        self._put_off = partial(self._before[signal.Signals(number)], number, None)

    @property
    def reason(self) -> str | None:
        """Why runs are to end, in words; None while they are not."""
        if self._put_off is not None:
            return BY_CLUSTER
        if self._noted is None:
            return None
        return BY_SIGTERM if self._noted is Terminated else BY_USER

    def heed(self, reason: str) -> None:
        """Another process of the team was told to end, which ends the runs of this one, too."""
        self._told = KeyboardInterrupt if reason == BY_USER else Terminated

    def outlive_the_others(self) -> None:
        """SIGTERM means nothing from now on, also afterwards: torchrun sends it where a process has died.

        This one is about to end, and has yet to say why.
        """
        if signal.SIGTERM in self._before:
            self._before[signal.SIGTERM] = signal.SIG_IGN
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if self._noted is Terminated:
            self._noted = None

    def raise_noted(self) -> None:
        """Raise KeyboardInterrupt, Terminated, or what submitit does, if one was noted; once all runs have ended."""
        if self._put_off is not None:
            self._put_off()
            raise Terminated  # it is not this process that queues the job again
        if (noted := self._noted or self._told) is not None:
            raise noted


def _is_of_submitit(handler: Any) -> bool:
    return str(getattr(handler, "__module__", "")).startswith("submitit.")


@contextmanager
def terminable() -> Iterator[None]:
    """SIGTERM meanwhile raises Terminated, as SIGINT raises KeyboardInterrupt; no run of this process is under way."""
    ignored = signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    if ignored or threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, frame: FrameType | None) -> None:
        raise Terminated

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL if before is None else before)


class Occasion(NamedTuple):
    """What to do after a step.

    Attributes:
        write: a checkpoint.
        stop: why to end; None to go on.
    """

    write: bool = False
    stop: str | None = None

    def as_number(self) -> int:
        """For other processes."""
        return 2 * (0 if self.stop is None else 1 + REASONS.index(self.stop)) + self.write

    @classmethod
    def of_all(cls, numbers: Sequence[int]) -> Occasion:
        """What all processes do, of which each gives the number of what it wants itself."""
        stops = [REASONS[number // 2 - 1] for number in numbers if number > 1]
        return cls(bool(stops) or any(number % 2 for number in numbers), stops[0] if stops else None)


class Occasions:
    """Decides after each step what runs that go in step do, and decides it once for all of them.

    So they write checkpoints of the same steps, and end at the same one; one of the runs may have more. Time is the
    monotonic clock's.
    """

    def __init__(self, times: CheckpointTimes, interruption: Interruption) -> None:
        self._times = times
        self._interruption = interruption
        self._last = time.monotonic()
        self._cost = 0.0
        self._paid = -1
        self._decided = -1
        self._occasion = Occasion(False, None)

    def after(self, step: int) -> Occasion:
        """What to do after the first `step` steps."""
        if step != self._decided:
            stop = self._interruption.reason
            self._decided, self._occasion = step, Occasion(stop is not None or self._due(step), stop)
        return self._occasion

    def _due(self, step: int) -> bool:
        seconds, steps = self._times.every_seconds, self._times.every_steps
        if steps is not None and step % steps == 0:
            return True
        waited = time.monotonic() - self._last
        return seconds is not None and waited >= max(seconds, self._cost / LARGEST_SHARE)

    def heed(self, reason: str) -> None:
        """Another process of the team was told to end."""
        self._interruption.heed(reason)

    def written(self, seconds: float) -> None:
        """Writing the checkpoint of one of the runs took `seconds`, whether it succeeded or not.

        The cost of a step is the sum over its runs; it decides when the next checkpoint by time is due.
        """
        if self._paid != self._decided:
            self._paid, self._cost = self._decided, 0.0
        self._cost += seconds
        self._last = time.monotonic()
