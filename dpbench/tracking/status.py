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
# Those whose numbers are a result.
WITH_RESULT = (Status.FINISHED, Status.DIVERGED)
# What stands for the status of a run of which nothing is recorded.
NOT_RUN = "not run"


def status_in_words(status: str, reason: str | None) -> str:
    """How a run stands and why, as an error says it; the reason of a refusal speaks for itself."""
    return f"{status}: {reason or 'its record does not say why'}".removeprefix(f"{Status.REFUSED}: ")
