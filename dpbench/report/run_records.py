"""Reading the records of the runs behind the numbers of a page; a missing or damaged file counts for nothing."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from dpbench.report.grid import Grid
from dpbench.report.run_curve import Points
from dpbench.report.runs import Configuration, Made, Runs, RunView
from dpbench.tracking.record import read_json

_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times as fast, where PyYAML was built with it


def read_runs(grids: Iterable[Grid]) -> Runs:
    """The runs behind the numbers of these artefacts, and those that ended badly in their place."""
    folders: dict[str, set[Path]] = {}
    users: dict[str, dict[str, None]] = {}
    for grid in grids:
        for entry in grid.entries.values():
            for folder in (*(run.folder for run in entry.runs), *map(Path, entry.broken)):
                folders.setdefault(folder.parent.name, set()).add(folder)
                users.setdefault(folder.parent.name, {})[grid.artefact.where] = None
    made: dict[Made, int] = {}
    found = [_configuration(digest, folders[digest], tuple(users[digest]), made) for digest in folders]
    return Runs(tuple(found), tuple(made))


def _configuration(
    digest: str, folders: Iterable[Path], artefacts: tuple[str, ...], made: dict[Made, int]
) -> Configuration:
    ordered = sorted(folders, key=lambda folder: int(folder.name))
    config = next((content for folder in ordered if (content := _yaml(folder / "config.yaml"))), {})
    ledger = next((content for folder in ordered if (content := read_json(folder / "ledger.json"))), {})
    return Configuration(digest, tuple(_run(folder, made) for folder in ordered), config, ledger, artefacts)


def _run(folder: Path, made: dict[Made, int]) -> RunView:
    status, origin = read_json(folder / "status.json"), read_json(folder / "provenance.json")
    reason = status.get("reason")
    return RunView(
        seed=int(folder.name),
        status=str(status.get("status", "unknown")) + (f": {reason}" if reason else ""),
        summary=read_json(folder / "summary.json"),
        seconds=origin.get("wall_seconds"),
        made=made.setdefault(Made.of(origin), len(made) + 1) if origin else None,
        points=_points(folder / "metrics.jsonl"),
    )


def _points(path: Path) -> Points:
    """(epoch, test accuracy in per cent), or test losses where there are no accuracies; none where unreadable."""
    try:
        lines = json.loads(f"[{','.join(path.read_text().splitlines())}]")
    except (OSError, ValueError):
        return ()
    return _curve(lines, "test_accuracy", 100.0) or _curve(lines, "test_loss", 1.0)


def _curve(lines: Iterable[Mapping[str, Any]], name: str, factor: float) -> Points:
    both = ((line.get("epoch"), line.get(name)) for line in lines)
    return [(float(epoch), factor * float(value)) for epoch, value in both if epoch is not None and value is not None]


def _yaml(path: Path) -> Mapping[str, Any]:
    try:
        content = yaml.load(path.read_text(), Loader=_Loader)
    except (OSError, yaml.YAMLError):
        return {}
    return content if isinstance(content, dict) else {}
