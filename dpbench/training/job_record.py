"""The record of a job's run: which it is, what settings it has, and how it tells that a run failed to begin."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dpbench.config import Job, RunConfig, config_hash, resolved
from dpbench.config.own import place_in
from dpbench.devices import out_of_memory
from dpbench.errors import UserError
from dpbench.files import jsonable
from dpbench.tracking import RunRecord, Status
from dpbench.tracking.reading import Recorded
from dpbench.tracking.record import CHECKPOINTS, RecordError, rerun_of

# Patterns of the files that outlast an attempt: another one may go on from them (the first of these), and must know of
# releases made.
OUTLASTING = (CHECKPOINTS, "provenance.json", "ledger.json")


def record_of(job: Job) -> RunRecord:
    """The record of a job's run, whether it exists or not."""
    return RunRecord(Path(job.config.results_dir), config_hash(job.config), job.config.seed)


def recorded_settings(job: Job) -> dict[str, Any]:
    """What config.yaml holds."""
    config = {**resolved(job.config), "choices": job.choices, "overrides": list(job.overrides)}
    return {key: jsonable(value) for key, value in config.items()}


def failed_to_begin(job: Job, record: RunRecord, reason: str, trace: str | None) -> None:
    """Record that an attempt at a run failed before its first step; what earlier ones left stays, forced or not."""
    left = Recorded.read(rerun_of(record.folder) if record.finished() else record.folder)
    record.start(recorded_settings(job), dict(left.provenance), keep=(*OUTLASTING, "metrics.jsonl", "summary.json"))
    record.set_status(Status.FAILED, reason, trace)


def fail(job: Job, reason: str, trace: str | None = None) -> None:
    """Record that a run failed outside of what was to record it, unless another process is at it or has finished it.

    What no record can tell, as on a full disk, is kept for this process.
    """
    record = record_of(job)
    try:
        if record.acquire() and (job.config.force or not record.finished()):
            failed_to_begin(job, record, reason, trace)
    except RecordError as error:
        record.keep_untold(f"{reason}; {error}")
    finally:
        record.lock.release()


def in_a_sentence(error: Exception, config: RunConfig) -> str:
    """Why a run failed, on one line, however many the error has."""
    said = " ".join(str(error).split())
    if isinstance(error, (RecordError, UserError)):
        return said
    if out_of_memory(error):
        return f"memory ran out ({said}); choose a smaller model or micro_batch, or a device with more memory"
    where = place_in(error, config)
    return f"{type(error).__name__}: {said}" + (f" ({where})" if where else "")
