"""The index of all records below a results folder: a cache that follows the files by itself.

What it trusts, so that a look at many records takes one `stat` of each folder and no more:

- a hash's folder changes its time when a run is begun, removed, or put into the place of another one;
- a record's folder changes its time when one of its files is replaced, be it by its run or by what copies records, such
  as git. Those of one that is damaged or under way are read at every look, for more than its files tell how it stands;
- a time that is less than `UNSURE` older than the look at it says nothing: more may have happened at that time, by the
  clocks of two machines.
"""

from __future__ import annotations

import json
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from dpbench import cache
from dpbench.files import jsonable
from dpbench.sources import digest_of, sources_of
from dpbench.tracking import columns
from dpbench.tracking.columns import ABSENT, Columns, Kept
from dpbench.tracking.reading import Recorded, is_hash, is_seed
from dpbench.tracking.status import Status

UNSURE = 60 * 10**9  # ns
# So many changed records, or this part of all, are kept for the next look; fewer are read again sooner than written.
WORTH_KEEPING = 500
PART_WORTH_KEEPING = 0.1
# Times of a record's folder and of that of its hash, in nanoseconds; of one that says nothing, a time that never was.
FOLDER, RUN = "@folder", "@run"
_NEVER = -1
# Columns that are no settings; with a dot, all below.
OWN = ("hash", "seed", "status", "reason", "problems")
SUMMARY, PROVENANCE = "summary.", "provenance."

Progress = Callable[[int, int], object]


class _Found(NamedTuple):
    """A record that is to be read."""

    digest: str
    seed: str
    folder: int
    run: int


class Index:
    """What all records say, by column: settings by their dotted names, `summary.*`, `provenance.*`, and `OWN`.

    Attributes:
        runs: the folder of the records.
    """

    def __init__(self, results_dir: Path, progress: Progress | None = None) -> None:
        """Look at all records.

        Args:
            results_dir: folder of the records.
            progress: told how many of how many records have been read, now and then.
        """
        self.runs = results_dir / "runs"
        self._at = str(self.runs)
        self._progress = progress
        self._path = cache.place("records", [str(self.runs.absolute()), _fingerprint()], ".parquet")
        self._kept: Kept | None = None
        self._fresh = Columns()
        # Of each row, kept and fresh ones, whether it still counts or not.
        self._digests: list[str] = []
        self._seeds: list[int] = []
        self._times: dict[str, list[int]] = {FOLDER: [], RUN: []}
        self._unsettled: list[bool] = []  # those that are read at every look
        self._rows: list[int] = []  # those that count
        self._columns: dict[str, list[Any]] = {}
        self._changes = 0
        self._open()
        self.refresh()

    # What it holds.

    @property
    def size(self) -> int:
        """How many records there are."""
        return len(self._rows)

    @property
    def names(self) -> frozenset[str]:
        """Of all columns."""
        kept = self._kept.names if self._kept is not None else frozenset[str]()
        return frozenset(name for name in kept.union(self._fresh.names) if not name.startswith("@"))

    @property
    def settings(self) -> list[str]:
        """The columns that are settings, sorted."""
        return sorted(name for name in self.names if name not in OWN and not name.startswith((SUMMARY, PROVENANCE)))

    def column(self, name: str) -> list[Any]:
        """What each record says; `ABSENT` where it says nothing. Not to be changed."""
        if name not in self._columns:
            values = self._kept.values(name) if self._kept is not None else []
            values += self._fresh.values(name)
            self._columns[name] = [values[row] for row in self._rows]
        return self._columns[name]

    def folder(self, place: int) -> Path:
        """The folder of the record at a place of the columns."""
        row = self._rows[place]
        return self.runs / self._digests[row] / str(self._seeds[row])

    # Following the files.

    def _open(self) -> None:
        """Take what the last look kept."""
        if not self._path.exists():
            return
        try:
            kept = Kept(self._path)
            times = {name: kept.values(name) for name in self._times}
            digests, seeds = kept.values("hash"), kept.values("seed")
            status, problems = kept.values("status"), kept.values("problems")
        except (OSError, ValueError):  # damaged, or gone meanwhile: all is read again
            return
        self._kept, self._times, self._digests, self._seeds = kept, times, digests, seeds
        self._unsettled = [
            one == Status.RUNNING or problem is not ABSENT for one, problem in zip(status, problems, strict=True)
        ]
        self._rows = list(range(kept.size))

    def refresh(self) -> None:
        """Take notice of what is new, changed or gone."""
        now = time.time_ns()
        digests, folder = self._digests, self._times[FOLDER]
        rows: dict[str, list[int]] = defaultdict(list)
        for row in self._rows:
            rows[digests[row]].append(row)
        kept: list[int] = []
        unread: list[_Found] = []
        for digest, at in _folders(self.runs, is_hash):
            known = rows[digest]
            same = bool(known) and all(folder[row] == at for row in known)
            listing = self._times_of(known) if same else dict(_folders(self.runs / digest, is_seed))
            kept += self._look(now, digest, at, known, listing, unread)
        self._changes += len(self._rows) - len(kept)
        self._rows = sorted(kept)
        self._columns.clear()
        self._read(unread)
        if self._changes > min(WORTH_KEEPING, PART_WORTH_KEEPING * len(self._rows)):
            self._keep()

    def _times_of(self, rows: Iterable[int]) -> dict[str, int]:
        """Times of records' folders by their names, as they are now."""
        found = {}
        for row in rows:
            seed = str(self._seeds[row])
            try:
                found[seed] = os.stat(f"{self._at}/{self._digests[row]}/{seed}").st_mtime_ns
            except OSError:  # gone
                continue
        return found

    def _look(
        self, now: int, digest: str, at: int, rows: Iterable[int], listing: Mapping[str, int], unread: list[_Found]
    ) -> list[int]:
        """Which rows of a hash are as they were; records that are to be read are added to `unread`."""
        known = {str(self._seeds[row]): row for row in rows}
        folder, run = self._times[FOLDER], self._times[RUN]
        kept = []
        for seed, changed in listing.items():
            row = known.get(seed)
            if row is not None and changed == run[row] and not self._unsettled[row]:
                kept.append(row)
                if folder[row] != _trusted(at, now):
                    folder[row] = _trusted(at, now)
                    self._changes += 1
            else:
                unread.append(_Found(digest, seed, _trusted(at, now), _trusted(changed, now)))
        return kept

    def _read(self, unread: Sequence[_Found]) -> None:
        """Add the rows of records."""
        leaves = _Leaves()
        for count, found in enumerate(unread):
            if self._progress is not None and count % 100 == 0:
                self._progress(count, len(unread))
            record = Recorded.read(self.runs / found.digest / found.seed)
            if not record.exists:
                continue
            row = [*_row(record, leaves)]
            self._fresh.append([("hash", json.dumps(found.digest)), ("seed", str(int(found.seed))), *row])
            self._rows.append(len(self._digests))
            self._digests.append(found.digest)
            self._seeds.append(int(found.seed))
            self._times[FOLDER].append(found.folder)
            self._times[RUN].append(found.run)
            self._unsettled.append(record.status == Status.RUNNING or bool(record.problems))
            self._changes += 1
        if self._progress is not None and unread:
            self._progress(len(unread), len(unread))

    def _keep(self) -> None:
        """Write what is known for the next look, of this process or another one; the last one wins."""
        size = self._kept.size if self._kept is not None else 0
        parts = [(self._fresh.table(), [row - size for row in self._rows if row >= size])] if self._fresh.size else []
        if self._kept is not None:
            parts.append((self._kept.table(), [row for row in self._rows if row < size]))
        if not parts:
            return
        ordered = [row for row in self._rows if row >= size] + [row for row in self._rows if row < size]
        times = {name: [str(values[row]) for row in ordered] for name, values in self._times.items()}
        cache.replace(self._path, columns.as_parquet(parts, times))
        self._changes = 0


def _folders(parent: Path, wanted: Callable[[str], bool]) -> Iterator[tuple[str, int]]:
    """Folders with names that are wanted, with their times."""
    try:
        listing = os.scandir(parent)
    except OSError:
        return
    with listing:
        for entry in listing:
            try:
                if wanted(entry.name) and entry.is_dir():
                    yield entry.name, entry.stat().st_mtime_ns
            except OSError:  # removed meanwhile
                continue


def _trusted(at: int, now: int) -> int:
    """A time that tells a change from now on; else one that never was."""
    return at if now - at > UNSURE else _NEVER


class _Leaves:
    """The settings below one key by their dotted names, as JSON; found once for each group that records share."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, int], tuple[object, list[tuple[str, str]]]] = {}

    def __call__(self, name: str, value: Any) -> list[tuple[str, str]]:
        if not isinstance(value, dict):
            return [*_flat(name, value)]
        key = (name, id(value))
        if key not in self._known:
            self._known[key] = (value, [*_flat(name, value)])  # the group is kept, so that no other one gets its id
        return self._known[key][1]


def _row(record: Recorded, leaves: _Leaves) -> Iterator[tuple[str, str]]:
    """Names and JSON texts of what the index holds of a record."""
    settings, origin, _ = record.settings, record.provenance, record.ledger
    yield "status", json.dumps(record.status)
    if record.reason is not None:
        yield "reason", json.dumps(record.reason)
    if record.problems:
        yield "problems", json.dumps(record.problems)
    for name, value in settings.items():
        if name not in OWN and not f"{name}.".startswith((SUMMARY, PROVENANCE, "@")):
            yield from leaves(str(name), value)
    yield from _flat(SUMMARY.rstrip("."), record.so_far)
    yield from _flat(PROVENANCE.rstrip("."), origin)


def _flat(name: str, value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _flat(f"{name}.{key}", item)
    else:
        yield name, json.dumps(jsonable(value), default=str)


def _fingerprint() -> str:
    """Of the code that decides what the index holds: another version of it begins anew."""
    return digest_of(sources_of(__name__))
