"""Removing records; what goes is shown first."""

from __future__ import annotations

import contextlib
import shutil
import time
from pathlib import Path

from rich.console import Console

from dpbench.errors import UserError
from dpbench.results.arguments import Arguments
from dpbench.results.listing import table_of
from dpbench.tracking.damage import note_what_is_shown
from dpbench.tracking.index import Index
from dpbench.tracking.lock import is_held, lock_of
from dpbench.tracking.reading import Recorded
from dpbench.tracking.record import CHECKPOINTS, GRADIENTS, MODEL, replaced_of, rerun_of
from dpbench.tracking.status import Status
from dpbench.wording import number_of

# Large files of a record that say nothing of what was seen.
BULKY = (CHECKPOINTS, MODEL, GRADIENTS)
# What goes only where it was named: by its hash, or by its status.
NAMED_ONLY = (Status.FINISHED, Status.RUNNING)


def remove(index: Index, arguments: Arguments, console: Console) -> None:
    """Show what would be removed, and remove it if that was asked for.

    Raises:
        UserError: nothing says which records.
    """
    selection, yes = arguments.selection, arguments.flag("yes")
    if not selection.hashes and not selection.conditions:
        raise UserError("remove: expected hashes or settings that say which runs, such as status=failed,interrupted")
    status = index.column("status")
    found = selection.places(index)
    spared = [
        place
        for place in found
        if status[place] in NAMED_ONLY and not selection.hashes and not selection.names_status(status[place])
    ]
    places = [place for place in found if place not in set(spared)]
    if places:
        console.print(table_of(index, places))
        console.print()
    if spared:
        words = " and ".join(sorted({status[place] for place in spared}))
        console.print(f"{len(spared):,} {words} stay: such runs go only if named by hash or by their status")
    if not yes:
        console.print(f"{number_of(len(places), 'run')} would be removed by yes=true")
        return
    removed = sum(_remove(index.folder(place), status[place]) for place in places)
    changed = f"; {len(places) - removed:,} kept, changed meanwhile" if removed < len(places) else ""
    console.print(f"{number_of(removed, 'run')} removed{changed}")


def _remove(folder: Path, status: str) -> bool:
    """Remove a record that still has a status: it is gone in one step, and its files after that.

    What a forced second run left that did not finish goes along, unless one is under way.
    """
    if Recorded.read(folder).status != status:
        return False
    try:
        note_what_is_shown(folder)
    except OSError:  # the disk is full, which may be why it is removed
        for path in (each for pattern in BULKY for each in folder.glob(pattern)):
            path.unlink(missing_ok=True)
        try:
            note_what_is_shown(folder)
        except OSError as error:
            raise UserError(f"{folder}: what was seen of it can't be noted ({error.strerror}), so it stays") from error
    going = folder.with_name(f"{folder.name}.removed-{time.time_ns()}")
    try:
        folder.rename(going)
    except FileNotFoundError:
        return False
    shutil.rmtree(going, ignore_errors=True)
    if not is_held(lock_of(folder)):  # one that begins from now on writes where the record was
        for left in (rerun_of(folder), replaced_of(folder)):
            shutil.rmtree(left, ignore_errors=True)
        for part in folder.parent.glob(f".{folder.name}.*"):  # of notes that a kill cut short
            part.unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # other seeds are there
        folder.parent.rmdir()
    return True
