"""What came of a command line's runs: a table, also as a file and for the tracker, and what went wrong."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from dpbench.cli.command import BAD_INPUT, FAILED, OK
from dpbench.cli.table import Row, as_csv
from dpbench.config import Job, names_apart
from dpbench.files import write_atomically
from dpbench.tracking import Status, log_table
from dpbench.tracking.record import MODEL
from dpbench.tracking.status import NOT_RUN, status_in_words
from dpbench.training.job_record import record_of

# Columns of the table in W&B, where a column has one type.
AS_WORDS = ("eps", "eps is proven", "eps as published", "eps of the search", "status")


def rows_of(jobs: Sequence[Job]) -> list[Row]:
    """What the records say of each job, named by what sets it apart from the others."""
    rows = []
    for job, name in zip(jobs, names_apart(jobs), strict=True):
        outcome = record_of(job).outcome(forced=job.config.force)
        folder = outcome.record.folder
        rows.append(
            Row(
                name=name,
                summary=outcome.record.so_far,
                status=outcome.status,
                reason=outcome.reason,
                folder=str(folder) if folder.exists() else None,
            )
        )
    return rows


def say_what_is_not_kept(finished: Sequence[Job], errors: Console) -> None:
    """Name the runs whose models were asked for only after they had finished."""
    without = [job for job in finished if job.config.keep_model and not (record_of(job).folder / MODEL).exists()]
    for job in without:
        errors.print(f"warning: {job.name} finished without keep_model; force=true runs it anew", style="yellow")


def keep_table(rows: Sequence[Row], jobs: Sequence[Job], folder: Path, group: str | None, errors: Console) -> bool:
    """Write the table of a sweep, and log it.

    Args:
        rows: of all runs.
        jobs: they are of.
        folder: of the sweep's own record.
        group: of the tracker.
        errors: is told where the table can't be written or logged.

    Returns:
        Whether it could be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / "table.csv", as_csv(rows))
    except OSError as error:
        errors.print(f"error: the table can't be written to {folder} ({error.strerror})", style="red")
        return False
    columns = ["run", *jobs[0].choices, "target eps", "seed", "test accuracy", "best on test", *AS_WORDS]
    cells = []
    for job, row in zip(jobs, rows, strict=True):
        own = [row.name, *job.choices.values(), str(job.config.eps), job.config.seed]
        values = row.values()
        cells.append([*own, row.accuracy("final"), row.accuracy("best"), *(str(values[name]) for name in AS_WORDS)])
    first = jobs[0].config
    settings, where = replace(first.tracker, group=group), Path(first.results_dir)
    log_table(settings, where, name=f"table-{group}", columns=columns, rows=cells, say=errors.print)
    return True


def complain(rows: Sequence[Row], errors: Console, *, launched: bool) -> int:
    """Say once what went wrong; the exit code tells which kind.

    Args:
        rows: of all runs.
        errors: is told.
        launched: whether the launcher did its work; where it did not, which has been said, some were not begun.
    """
    reasons: dict[str, list[Row]] = {}
    unfinished = [row for row in rows if row.status != Status.FINISHED]
    for row in unfinished:
        if launched or row.status != NOT_RUN or row.reason:
            reasons.setdefault(status_in_words(row.status, row.reason), []).append(row)
    for reason, those in reasons.items():
        which = "" if len(rows) == 1 else f" ({'; '.join(row.name for row in those)})"
        errors.print(f"error: {reason}{which}", style="red")
    if any(row.status == Status.REFUSED for row in rows):
        return BAD_INPUT
    return FAILED if unfinished else OK
