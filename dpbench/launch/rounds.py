"""Having runs carried out until each has ended: beside other commands, and through workers that are killed."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from rich.console import Console

from dpbench.config import Job
from dpbench.files import Stamp, stamp
from dpbench.launch.forced import SEEN, seen_since_it_began
from dpbench.tracking.lock import State, Watch
from dpbench.tracking.reading import DAMAGED, Recorded
from dpbench.tracking.status import Status
from dpbench.training.interruption import terminable
from dpbench.training.job_record import fail, record_of

# Times that the process of a run may be killed until the run counts as failed. After TOGETHER of them it is begun
# alone: a run that exhausts memory also kills its neighbours, which shall not pay for that.
ATTEMPTS = 4
TOGETHER = 2
# Times that the process of a run may be told to end, as by a cluster that wants its machine back. The run is left as
# interrupted then; it has lost little each time, so these are many.
STOPS = 50
# Times in a row that a launcher may come back with nothing begun.
FRUITLESS = 3
# Seconds between two looks at what others are at.
LOOK = 1.0
# Statuses of a run that is not to be begun again.
NOT_BEGUN_AGAIN = (Status.FINISHED, Status.DIVERGED, Status.FAILED, Status.INVALID, DAMAGED)

# Has jobs carried out, and returns the tracebacks of those that raised outside of their runs, by their places.
Start = Callable[[Sequence[Job]], Mapping[int, str]]


def always(job: Job) -> bool:
    """There is time for every job."""
    return True


def carry_through(
    jobs: Sequence[Job],
    start: Start,
    console: Console,
    *,
    end: float = math.inf,
    fits: Callable[[Job], bool] = always,
) -> list[Job]:
    """Have runs carried out until each has ended, by this command or by another one that is at it.

    What others are at comes last: once they have ended it their record counts, once they have gone it is begun here.

    Args:
        jobs: to be carried out; those that are finished already count as ended, unless forced.
        start: carries out jobs; it may leave some of them as they were.
        console: is told what is waited for and what is begun again.
        end: by `time.monotonic`, when to wait no longer; what others are at then stays with them.
        fits: whether there is time to begin a job now.

    Returns:
        What nobody is at and was not begun for want of time.

    Raises:
        KeyboardInterrupt: as `start` or the user does.
    """
    runs = [_Run(job) for job in jobs]
    fruitless = 0
    late: list[_Run] = []
    while waiting := [run for run in runs if run not in late and not run.ended()]:
        free = [run for run in waiting if run.free()]
        late += [run for run in free if not fits(run.job)]
        free = [run for run in free if run not in late]
        if not free and not all(run.ended() or run in late for run in waiting):
            if time.monotonic() >= end:
                break
            _wait(waiting, console, end)
            continue
        batch = [run for run in free if run.killed < TOGETHER] or free[:1]
        if not batch:
            continue
        for run in batch:
            run.begin()
        raised = start([run.job for run in batch])
        fruitful = [run.account(raised.get(place)) for place, run in enumerate(batch)]
        for run in batch:
            run.give_up_if_forced_and_seen()
        fruitless = 0 if any(fruitful) else fruitless + 1
        if fruitless == FRUITLESS:
            for run in batch:
                fail(run.job, f"its process ended {FRUITLESS} times before the run began")
            fruitless = 0
        again = [run for run in batch if run.killed and not run.ended()]
        if again:
            names = "; ".join(f"{run.job.name}, {run.killed} of {ATTEMPTS} attempts" for run in again)
            console.print(f"killed, and begun again: {names}", style="yellow")
    return [run.job for run in late]


def _wait(runs: Sequence[_Run], console: Console, end: float) -> None:
    """Wait until one of these runs, which others are at, has ended or is free."""
    holders = sorted({str(run.watch.seen.process) for run in runs if run.watch.seen is not None})
    console.print(f"waiting for others to end {len(runs)} of these runs: {', '.join(holders)}")
    with terminable():
        while time.monotonic() < end and not any(run.ended() or run.watch.look() != State.HELD for run in runs):
            time.sleep(LOOK)


class _Run:
    """A run of this command.

    Attributes:
        job: to be carried out.
        watch: of its lock.
        killed: how many processes were killed that this command had begun it in.
        stopped: how many of them were told to end, and could still say so.
    """

    def __init__(self, job: Job) -> None:
        self.job = job
        self._record = record_of(job)
        self.watch = Watch(self._record.lock.path)
        self.killed = 0
        self.stopped = 0
        self._begun = False
        self._first = self._stamp()
        self._last = self._first
        self._old_refusal = stamp(self._record.refusal)  # that nobody lived to take, and says nothing of now

    def ended(self) -> bool:
        """Whether there is nothing left to do: it is finished, could not be started, or ended since this began."""
        if (
            stamp(self._record.refusal) not in (None, self._old_refusal)
            or self._record.untold
            or self.stopped >= STOPS
            or (self._record.finished() and not self.job.config.force)
        ):
            return True
        return self._stamp() != self._first and Recorded.read(self._folder()).status in NOT_BEGUN_AGAIN

    def _folder(self) -> Path:
        """Of the record that this command asks for."""
        return self._record.latest() if self.job.config.force else self._record.folder

    def _stamp(self) -> Stamp:
        """Changes whenever a status is written."""
        return stamp(self._folder() / "status.json")

    def give_up_if_forced_and_seen(self) -> None:
        """A forced run begins anew whenever it is begun, which would release again what was seen since this began."""
        begun = self._stamp() != self._last
        if self.job.config.force and begun and seen_since_it_began(self.job) and not self.ended():
            fail(self.job, SEEN)

    def free(self) -> bool:
        """Whether it can be begun; takes the lock away from a holder who has gone."""
        state = self.watch.look()
        if state == State.STALE and self.watch.take_away():
            assert self.watch.seen is not None
            self._count(self.watch.seen.attempt)
            return not self.ended()
        return state == State.FREE

    def _count(self, killed: int) -> None:
        """Count processes that were killed, if any of this command was among them."""
        if not self._begun:
            return
        self.killed += killed
        if self.killed >= ATTEMPTS:
            fail(self.job, f"killed in {self.killed} attempts; perhaps there was too little memory")

    def begin(self) -> None:
        """Note how it stands before it is begun."""
        self._begun = True
        self._last = self._stamp()

    def account(self, raised: str | None) -> bool:
        """See what became of it, and record what its process could not; whether it was begun.

        Args:
            raised: the traceback of an error outside of the run.
        """
        if self.ended():
            return True
        if raised is not None:
            fail(self.job, raised.strip().splitlines()[-1], raised)
            return True
        killed = self.killed
        if not self.free() or self.killed > killed:
            return True  # others are at it, or it was killed
        begun = self._stamp() != self._last
        self.stopped += begun
        return begun
