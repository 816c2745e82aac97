"""Carrying out what is missing: the cells that need least time first, so that verdicts come early."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from dpbench.reproduction.plan import Entry, Planner
from dpbench.reproduction.standing import Batch


@dataclass(frozen=True)
class Work:
    """Runs of one cell that are begun together.

    Attributes:
        entry: the cell.
        batch: the runs.
        seconds: that they are expected to take.
    """

    entry: Entry
    batch: Batch
    seconds: float


@dataclass(frozen=True)
class Left:
    """What was not begun for want of time.

    Attributes:
        runs: how many there are, each counted once, as a plan counts them.
        cheapest: that would be begun first; None where nothing is left.
    """

    runs: int
    cheapest: Work | None


def carry_out(
    planner: Planner, budget: float | None, carry: Callable[[Sequence[Work]], None], *, together: bool
) -> Left:
    """Carry out runs until nothing is left that is expected to end within the budget.

    Every run is begun at most once. Estimates, and which cells come next, follow what has been recorded by then.

    Args:
        planner: knows what is missing.
        budget: seconds; None for no end.
        carry: carries out runs; how they ended is in their records.
        together: hand over all runs that fit into what is left of the budget, as if they ran one after the other;
            else those of one cell and candidate.
    """
    end = math.inf if budget is None else time.monotonic() + budget
    while wave := _wave(planner, end - time.monotonic(), together=together):
        try:
            carry(wave)
        finally:  # what an interruption leaves is looked at, too
            for work in wave:
                planner.note(work.batch)
    works = (work for entry in _open(planner) for work in _works(planner, entry))
    cheapest = next((work for work in works if _untried(planner, work)), None)
    return Left(planner.line(planner.entries).runs if cheapest else 0, cheapest)


def _open(planner: Planner) -> list[Entry]:
    """Cells of which runs can be begun, the one that needs least time first."""
    return sorted((entry for entry in planner.entries if entry.runnable), key=planner.seconds)


def _works(planner: Planner, entry: Entry) -> Iterator[Work]:
    """The runs of a cell."""
    each, _ = planner.seconds_of_run(entry)
    for batch in entry.standing.batches:
        yield Work(entry, batch, each * len(batch.seeds))


def _untried(planner: Planner, work: Work) -> list[tuple[str, int]]:
    """Of these runs those that have not been begun by this process, each by what it is and its seed."""
    run = planner.run_of(work.batch.candidate)
    return [(run, seed) for seed in work.batch.seeds if (run, seed) not in planner.tried]


def _wave(planner: Planner, left: float, *, together: bool) -> list[Work]:
    """The next runs to be carried out."""
    wave: list[Work] = []
    begun: set[tuple[str, int]] = set()
    for entry in _open(planner):
        planner.look(entry)
        for work in _works(planner, entry):
            each = work.seconds / len(work.batch.seeds)
            if left < each:
                continue
            runs = [run for run in _untried(planner, work) if run not in begun]
            fitting = runs if math.isinf(left) else runs[: max(0, int(left // each))]
            if not fitting:
                continue
            seeds = tuple(seed for _, seed in fitting)
            fits = Work(entry, Batch(work.batch.candidate, seeds), each * len(seeds))
            if not together:
                return [fits]
            wave.append(fits)
            begun.update(fitting)
            left -= fits.seconds
    return wave
