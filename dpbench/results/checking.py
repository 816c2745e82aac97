"""All records looked at: what is wrong with each, what killed runs left, and moving either away."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from dpbench.errors import UserError
from dpbench.results.arguments import Arguments
from dpbench.results.integrity import NOT_BEGUN, problems_of
from dpbench.results.selection import Selection, no_such_hash
from dpbench.tracking.damage import set_aside
from dpbench.tracking.index import Progress
from dpbench.tracking.reading import KILLED, Recorded, is_hash, is_seed, seeds_of
from dpbench.tracking.status import FOR_GOOD, Status
from dpbench.wording import duration, number_of, seconds_of

INCOMPLETE = "a file that was never completed"


@dataclass(frozen=True)
class Fault:
    """Something that should not be as it is.

    Attributes:
        path: of a record, or of what lies beside one.
        problem: in words.
        movable: whether moving it away helps; a run that was killed is simply run again.
    """

    path: Path
    problem: str
    movable: bool = True


def check(arguments: Arguments, console: Console, progress: Progress | None = None) -> bool:
    """Print a line for everything that is wrong, and move it away if that was asked for.

    Args:
        arguments: which records, and what to do.
        console: for the lines.
        progress: told how many of how many hashes have been looked at.

    Returns:
        Whether nothing is wrong.
    """
    quiet, move = seconds_of("quiet", arguments.options["quiet"]), arguments.flag("quarantine")
    folders = _folders(arguments.results_dir / "runs", arguments.selection)
    for start, seed in arguments.selection.hashes:
        begin = [folder for folder in folders if folder.name.startswith(start)]
        if not begin:
            raise UserError(no_such_hash(start))
        if seed is not None and not any((folder / seed).is_dir() for folder in begin):
            raise UserError(f"{start}/{seed}: no record of that seed")
    wrong, records = 0, 0
    for count, folder in enumerate(folders):
        if progress is not None:
            progress(count, len(folders))
        seeds = _seeds(folder, arguments.selection)
        records += len(seeds)
        for fault in _faults(folder, seeds, quiet):
            wrong += 1
            moved = ""
            if move and fault.movable:
                moved = f"; moved to {set_aside(fault.path, arguments.results_dir)}"
            console.print(f"{fault.path.relative_to(arguments.results_dir)}: {fault.problem}{moved}")
    if progress is not None and folders:
        progress(len(folders), len(folders))
    hint = "; quarantine=true moves it away" if wrong and not move else ""
    found = f"{number_of(wrong, 'problem')} found" if wrong else "all is well"
    console.print(f"{number_of(records, 'record')} looked at: {found}{hint}")
    return not wrong


def _folders(runs: Path, selection: Selection) -> list[Path]:
    """The folders of hashes."""
    starts = tuple(start for start, _ in selection.hashes)
    found = sorted(folder for folder in runs.glob("*") if is_hash(folder.name) and folder.is_dir())
    return [folder for folder in found if not starts or folder.name.startswith(starts)]


def _seeds(folder: Path, selection: Selection) -> list[Path]:
    """The records below a hash that were asked for."""
    wanted = {seed for start, seed in selection.hashes if folder.name.startswith(start)}
    return [one for one in seeds_of(folder) if one.is_dir() and (not wanted or None in wanted or one.name in wanted)]


def _faults(folder: Path, seeds: list[Path], quiet: float) -> Iterator[Fault]:
    for record in seeds:
        yield from _of_record(record, quiet)
    for path in sorted(folder.iterdir()):
        if (fault := _beside(path, quiet)) is not None:
            yield fault


def _of_record(record: Path, quiet: float) -> Iterator[Fault]:
    """What is wrong with a record."""
    alive, found = _silence(record) < quiet, _problems(record)
    if found and not (alive and found == [NOT_BEGUN]):
        yield Fault(record, "; ".join(found))
    if alive:
        return
    if not found:
        recorded = Recorded.read(record)
        if recorded.word == Status.RUNNING or recorded.reason == KILLED:
            silence = duration(_silence(record))
            yield Fault(record, f"killed, nothing written for {silence}; it runs again next time", False)
        elif recorded.word in FOR_GOOD:  # killed between the last word of its record and their removal
            left = sorted(record.glob("checkpoint-*.pt"))
            yield from (Fault(path, "a checkpoint of a run that has ended") for path in left)
    yield from (Fault(part, INCOMPLETE) for part in _parts(record))


def _beside(path: Path, quiet: float) -> Fault | None:
    """What is wrong with something beside the records of a hash, or None."""
    seed, _, kind = path.name.removeprefix(".").partition(".")
    if not is_seed(seed) or _silence(path) < quiet:
        return None
    if path.name.startswith("."):
        return Fault(path, INCOMPLETE) if path.is_file() else None
    record = path.with_name(seed)
    if kind in ("rerun", "replaced") and path.with_name(f"{seed}.replaced").exists() and not record.exists():
        said = "a forced run was taking the place of the one before when it was killed; it takes it next time"
        return Fault(path, said, False)
    if kind == "rerun":
        # Between its evaluations a forced run renews the lock alone.
        others = [one for one in (record, path.with_name(f"{seed}.lock")) if one.exists()]
        if any(_silence(one) < quiet for one in others):
            return None
        status = Recorded.read(path).status or "nothing recorded"
        beside = "the record beside it stands" if record.exists() else "there is no other record of it"
        return Fault(path, f"a forced run that did not finish ({status}); {beside}")
    if kind == "replaced":
        return Fault(path, "a record that a forced run was replacing when it was killed")
    if kind.startswith("removed"):
        return Fault(path, "a record that was being removed")
    if kind == "refused":
        return Fault(path, "the note of a run that could not start, which nobody took")
    return None


def _problems(record: Path) -> list[str]:
    """What is wrong with a record, also at a second look: it may have been replaced during the first."""
    first = problems_of(Recorded.read(record))
    return problems_of(Recorded.read(record)) if first and record.is_dir() else []


def _parts(record: Path) -> list[Path]:
    """Files that are written under another name before they take the place of an older one."""
    return sorted(path for path in record.glob(".*.*") if path.is_file())


def _silence(path: Path) -> float:
    """Seconds since something was written at a path, below or beside it, such as a lock that a living run renews."""
    beside = [path, *path.parent.glob(f"{path.name.partition('.')[0]}.*")] if is_seed(path.name) else [path]
    newest = 0.0
    for one in beside:
        try:
            entries = [one, *one.iterdir()] if one.is_dir() else [one]
            newest = max(newest, *(os.stat(entry).st_mtime for entry in entries))
        except OSError:  # replaced meanwhile, so it is alive
            return 0.0
    return time.time() - newest
