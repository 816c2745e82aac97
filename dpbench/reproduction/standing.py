"""Which runs a cell still asks for, as `Evidence` judges it: all candidates once, then the winner with all seeds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from functools import partial

from dpbench.claims import Cell, Evidence, Measured
from dpbench.claims.evidence import best_of
from dpbench.claims.notation import Candidate
from dpbench.tracking.status import Status

# Runs that ended so may be tried once more; those that diverged would do so again.
MAY_BE_RETRIED = (Status.FAILED, Status.INVALID)


class State(StrEnum):
    """How a cell stands."""

    DONE = "done"
    PARTLY = "partly"
    MISSING = "missing"
    FAILED = "failed"
    BLOCKED = "not run"


@dataclass(frozen=True)
class Batch:
    """Runs that differ in their seeds alone."""

    candidate: Candidate
    seeds: tuple[int, ...]


@dataclass(frozen=True)
class Standing:
    """What is there of a cell, and what is missing.

    Attributes:
        state: see `State`.
        batches: runs that it asks for now.
        later: how many more it will ask for, once its search has a winner.
        reason: why it is not run, or how it failed.
    """

    state: State
    batches: tuple[Batch, ...] = ()
    later: int = 0
    reason: str | None = None

    @property
    def runs(self) -> int:
        """How many are missing."""
        return sum(len(batch.seeds) for batch in self.batches) + self.later


def standing_of(
    cell: Cell, evidence: Evidence, may_retry: Callable[[Candidate, int], bool], lacking: str | None
) -> Standing:
    """How a cell stands.

    Args:
        cell: one that is trained.
        evidence: looks up its records.
        may_retry: whether the run of a candidate with a seed is to be tried again if it failed.
        lacking: what it needs that is not here, in words.
    """
    found = {candidate: evidence.runs(cell, candidate) for candidate in cell.candidates}
    lost = {one: _lost(runs, partial(may_retry, one)) for one, runs in found.items()}
    first = [candidate for candidate, runs in found.items() if runs.first is None and 0 not in lost[candidate]]
    if len(found) > 1 and first:
        batches, later = [Batch(candidate, (0,)) for candidate in first], cell.seeds - 1
    else:
        winner = best_of(found.values())
        candidate = next(candidate for candidate, runs in found.items() if runs is winner)
        missing = [seed for seed in range(cell.seeds) if seed not in lost[candidate].union(winner.seeds)]
        batches, later = ([Batch(candidate, tuple(missing))] if missing else []), 0
        if not batches:
            in_the_way = (winner,) if winner.values else found.values()  # else all candidates lost their first seed
            broken = {how for runs in in_the_way for how in runs.broken.values()}
            return Standing(State.DONE) if winner.enough else Standing(State.FAILED, reason=", ".join(sorted(broken)))
    if lacking is not None:
        return Standing(State.BLOCKED, tuple(batches), later, lacking)
    started = any(runs.values for runs in found.values())
    return Standing(State.PARTLY if started else State.MISSING, tuple(batches), later)


def _lost(runs: Measured, may_retry: Callable[[int], bool]) -> frozenset[int]:
    """Seeds whose runs ended without a number, and stay so; none is replaced by another seed."""
    return frozenset(seed for seed, how in runs.lost.items() if not (how in MAY_BE_RETRIED and may_retry(seed)))
