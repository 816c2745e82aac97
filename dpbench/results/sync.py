"""Recorded runs on Weights & Biases: what a run would have logged while it trained.

The id of a run there is its hash and seed, so what is sent twice is one run, whoever sends it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from dpbench.config.identity import name_of
from dpbench.config.schema import TrackerSettings
from dpbench.errors import UserError
from dpbench.results.arguments import Arguments
from dpbench.tracking.columns import ABSENT
from dpbench.tracking.index import Index
from dpbench.tracking.reading import Recorded
from dpbench.tracking.shapes import is_number
from dpbench.tracking.status import Status
from dpbench.tracking.wandb import UNREACHABLE, open_tracker
from dpbench.tracking.wandb_mode import Mode, choose_mode
from dpbench.wording import number_of

# Runs of which it is known what they came to.
WITH_OUTCOME = (Status.FINISHED, Status.DIVERGED, Status.FAILED, Status.INVALID)
# Modes of the tracker in which W&B has no run, or not under an account.
NOT_THERE = ("disabled", "offline")


def sync(index: Index, arguments: Arguments, say: Callable[[str], object]) -> bool:
    """Send the runs that were asked for; whether W&B took all of them.

    Raises:
        UserError: W&B is disabled here.
    """
    options, results_dir = arguments.options, arguments.results_dir
    asked = TrackerSettings(mode=options["mode"])
    mode, why = choose_mode(asked)
    if mode == "disabled":
        raise UserError(f"W&B is disabled ({why})", field="mode", value=options["mode"])
    status, modes = index.column("status"), index.column("tracker.mode")
    places = [place for place in arguments.selection.places(index) if status[place] in WITH_OUTCOME]
    if not any(one.key.startswith("tracker.") for one in arguments.selection.conditions):
        tracked = [place for place in places if modes[place] not in (*NOT_THERE, ABSENT)]
        places = [place for place in places if place not in set(tracked)]
        if tracked:
            left_out = number_of(len(tracked), "run")
            say(f"{left_out} left out, which W&B may have recorded while running; tracker.mode=auto selects them")
    failures: list[str] = []

    def failed(line: str) -> None:
        failures.append(line)
        say(line)

    sent = there = kept = 0
    now: Mode = mode
    for place in places:
        record = Recorded.read(index.folder(place))
        if record.status not in WITH_OUTCOME or (now == "offline" and _there(record, results_dir)):
            there += 1
            continue
        say(f"{id_of(record.folder)}: {_name(record)}")
        before = len(failures)
        _send(record, mode, options, results_dir, failed)
        now, why = choose_mode(asked)
        if now == "disabled":  # it does not come back from a call
            break
        told = failures[before:]
        sent += now == mode and not told
        # Where its server can't be reached, the first to find out says so.
        kept += now != mode and all(line.startswith(UNREACHABLE) for line in told)
    here = f"written to {results_dir / 'wandb'}; wandb sync sends them"
    counts = [f"{number_of(sent, 'run')} {'sent' if mode == 'online' else here}"]
    counts += [f"{kept} {here}"] * (kept > 0)
    counts += [f"{there} of {len(places)} were there already"]
    failing = len(places) - sent - there - kept
    counts += [f"{failing} not sent"] * (failing > 0)
    say(f"{'; '.join(counts)}. W&B: {mode} ({why})")
    return not failures


def id_of(folder: Path) -> str:
    """The id of a run on W&B, from the folder of its record."""
    return f"{folder.parent.name}-{folder.name}"


def _there(record: Recorded, results_dir: Path) -> bool:
    """Whether W&B has written this run here since it ended."""
    try:
        ended = (record.folder / "status.json").stat().st_mtime
        written = [path.stat().st_mtime for path in results_dir.glob(f"wandb/offline-run-*-{id_of(record.folder)}")]
    except OSError:
        return False
    return max(written, default=0.0) >= ended


def _send(
    record: Recorded, mode: str, options: dict[str, str], results_dir: Path, failed: Callable[[str], object]
) -> None:
    settings = dict(record.settings)
    own: dict[str, Any] = settings.get("tracker") or {}
    tracker = open_tracker(
        TrackerSettings(
            mode=mode,
            project=options["project"] or own.get("project") or "dpbench",
            entity=options["entity"] or own.get("entity"),
            group=own.get("group"),
            tags=list(own.get("tags") or ()),
        ),
        results_dir,
        name=_name(record),
        config={**settings, "hash": record.folder.parent.name},
        tags=[str((settings.get(group) or {}).get("name")) for group in ("algo", "dataset", "model")],
        say=failed,
        run_id=id_of(record.folder),
    )
    for line in record.metrics:
        numbers = {name: float(value) for name, value in line.items() if is_number(value)}
        tracker.log(numbers, int(line["step"]))
    tracker.finish(dict(record.summary), succeeded=record.finished)
    tracker.wait()


def _name(record: Recorded) -> str:
    """What was typed for a run, without what does not change it; its hash where the record doesn't say."""
    typed: Sequence[str] = record.settings.get("overrides") or ()
    if not record.settings:
        return id_of(record.folder)
    return name_of(typed)
