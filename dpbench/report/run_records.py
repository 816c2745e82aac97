"""Reading the records of the runs behind the numbers of a page; a missing or damaged file counts for nothing."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from dpbench.privacy.tail import END, END_BEFORE, END_ON_GPU_BEFORE, LONGER_SINCE
from dpbench.report.grid import Grid
from dpbench.report.run_curve import Points
from dpbench.report.runs import Configuration, Made, Runs, RunView, in_a_line
from dpbench.tracking.reading import Recorded, read_audits


def read_runs(grids: Sequence[Grid], results_dir: Path) -> Runs:
    """The runs behind the numbers of these artefacts, and those that ended badly in their place.

    Args:
        grids: all artefacts.
        results_dir: has the audits.
    """
    audits: dict[str, list[str]] = {}
    for audit in read_audits(results_dir):
        audits.setdefault(audit["run"], []).append(in_a_line(audit))
    folders: dict[str, set[Path]] = {}
    users: dict[str, dict[str, None]] = {}
    for grid in grids:
        for entry in grid.entries.values():
            for folder in (*(run.folder for run in entry.runs), *map(Path, entry.broken)):
                folders.setdefault(folder.parent.name, set()).add(folder)
                users.setdefault(folder.parent.name, {})[grid.artefact.where] = None
    made: dict[Made, int] = {}
    places = tuple(word for word in (grids[0].options if grids else ()) if not word.startswith("claims="))
    found = [
        replace(
            _configuration(digest, folders[digest], tuple(users[digest]), made, tuple(audits.get(digest, ()))),
            places=places,
        )
        for digest in folders
    ]
    return Runs(tuple(found), tuple(made))


def _configuration(
    digest: str, folders: Iterable[Path], artefacts: tuple[str, ...], made: dict[Made, int], audits: tuple[str, ...]
) -> Configuration:
    ordered = sorted(folders, key=lambda folder: int(folder.name))
    records = [Recorded.read(folder).complete().warn() for folder in ordered]
    config = next((record.settings for record in records if record.settings), {})
    ledger = next((record.ledger for record in records if record.ledger), {})
    return Configuration(digest, tuple(_run(record, made) for record in records), config, ledger, artefacts, audits)


def _run(record: Recorded, made: dict[Made, int]) -> RunView:
    origin = record.provenance
    return RunView(
        seed=int(record.folder.name),
        status=(record.status or "unknown") + (f": {record.reason}" if record.reason else ""),
        summary=record.summary,
        seconds=origin.get("wall_seconds"),
        made=made.setdefault(Made.of(origin), len(made) + 1) if origin else None,
        points=_points(record.metrics),
        noise_end=_noise_end(record),
    )


def _noise_end(record: Recorded) -> float:
    """Standard deviations at which the noise of a run ends: earlier in those from before `LONGER_SINCE`."""
    origin = record.provenance
    if (record.settings.get("privacy") or {}).get("secure_noise"):
        return math.inf
    if "seeded_noise" in origin or str(origin.get("started", "")) >= LONGER_SINCE:
        return END
    return END_ON_GPU_BEFORE if origin.get("cuda") else END_BEFORE


def _points(lines: Iterable[Mapping[str, Any]]) -> Points:
    """(epoch, test accuracy in per cent), or test losses where there are no accuracies; none where unreadable."""
    return _curve(lines, "test_accuracy", 100.0) or _curve(lines, "test_loss", 1.0)


def _curve(lines: Iterable[Mapping[str, Any]], name: str, factor: float) -> Points:
    both = ((line.get("epoch"), line.get(name)) for line in lines)
    return [(float(epoch), factor * float(value)) for epoch, value in both if epoch is not None and value is not None]
