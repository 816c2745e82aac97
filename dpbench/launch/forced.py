"""Forced runs begin anew whenever they are begun; not where metrics of the attempt before were seen."""

from __future__ import annotations

from collections.abc import Sequence

from dpbench.config import Job
from dpbench.tracking.published import note_of
from dpbench.tracking.reading import Recorded
from dpbench.tracking.status import Status
from dpbench.training.job_record import fail, record_of

# Why a run that was stopped is not begun again by the command that forced it.
SEEN = (
    "stopped after metrics of it were seen, and force=true would begin it anew, beyond its eps; "
    "the same command does so if nothing of them counts"
)


def give_up_if_forced_and_seen(jobs: Sequence[Job]) -> list[Job]:
    """Of jobs that a cluster has queued again, those to be begun again: not what is forced and was seen, see `SEEN`."""
    left = []
    for job in jobs:
        begun = Recorded.read(record_of(job).latest()).status in (Status.RUNNING, Status.INTERRUPTED)
        if job.config.force and begun and seen_since_it_began(job):
            fail(job, SEEN)
        else:
            left.append(job)
    return left


def seen_since_it_began(job: Job) -> bool:
    """Whether metrics were seen of the latest attempt at a run, and not only of one before it."""
    record = record_of(job)
    try:
        begun = (record.latest() / "config.yaml").stat().st_mtime_ns  # which is written when an attempt begins
        return note_of(record.folder).stat().st_mtime_ns > begun
    except OSError:
        return False
