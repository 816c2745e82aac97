"""How runs stand."""

from __future__ import annotations

from enum import StrEnum


class Status(StrEnum):
    """How a run stands; refused is one that could not start, of which there is no record."""

    RUNNING = "running"
    FINISHED = "finished"
    INTERRUPTED = "interrupted"
    DIVERGED = "diverged"
    FAILED = "failed"
    INVALID = "invalid"
    REFUSED = "refused"


# Ways in which a run ends for good; it needs no checkpoints then.
FOR_GOOD = (Status.FINISHED, Status.DIVERGED, Status.INVALID)
