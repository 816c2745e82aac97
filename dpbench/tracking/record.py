"""The folder of a run: <results_dir>/runs/<config hash>/<seed>/, each file replaced atomically."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from dpbench.files import as_json, jsonable, sync_files, write_atomically
from dpbench.tracking.damage import damage_of, set_aside
from dpbench.tracking.lock import Lock, lock_of
from dpbench.tracking.published import Published
from dpbench.tracking.reading import Recorded
from dpbench.tracking.status import NOT_RUN, Status

# Files that not every run leaves: weights of the last evaluation, recorded gradients, and all of its checkpoints, also
# those that are set aside.
MODEL = "model.safetensors"
GRADIENTS = "gradients.npz"
CHECKPOINTS = "checkpoint-*"


class RecordError(Exception):
    """A record can't be written; says in one sentence what of it, and why."""


class RunOutcome(NamedTuple):
    """What became of a run.

    Attributes:
        status: how it stands.
        reason: why, where it is not finished and something says so.
        record: what is recorded of it.
    """

    status: str
    reason: str | None
    record: Recorded


# Why runs of this process failed whose records could not even say so, by their folders.
_untold: dict[Path, str] = {}


def rerun_of(folder: Path) -> Path:
    """Where a forced run writes until it has finished, if there is a finished record in a folder."""
    return folder.with_name(f"{folder.name}.rerun")


def replaced_of(folder: Path) -> Path:
    """Where the record lies that a forced run takes the place of, until it is removed."""
    return folder.with_name(f"{folder.name}.replaced")


def _as_line(entry: dict[str, Any]) -> bytes:
    """Without spaces: people read the other files, and of these lines there are many."""
    return json.dumps(jsonable(entry), separators=(",", ":")).encode() + b"\n"


class RunRecord:
    """Reads and writes the folder of one run.

    A finished record stays as it is while a forced second run is under way: that one goes to a folder beside it
    and takes its place when it has finished. Who holds the lock and loses it gets `LockLostError` in place of writing.

    Attributes:
        folder: where the finished record lies.
        working: where the run under way writes.
        lock: of the run; to be held by who writes where others might.
    """

    def __init__(self, results_dir: Path, config_hash: str, seed: int) -> None:
        self.folder = results_dir / "runs" / config_hash / str(seed)
        self.lock = Lock(lock_of(self.folder))
        self.working = self.folder
        self._metrics: list[bytes] = []

    def outcome(self, *, forced: bool) -> RunOutcome:
        """What became of the run that a command asked for; takes the notes of `refuse` and `keep_untold`.

        Args:
            forced: whether it was to be run anew, so that its latest attempt counts.
        """
        found = Recorded.read(self.latest() if forced else self.folder)
        if refusal := self.take_refusal():
            return RunOutcome(Status.REFUSED, refusal, found)
        if untold := _untold.pop(self.folder.absolute(), None):
            return RunOutcome(Status.FAILED, untold, found)
        return RunOutcome(found.status or NOT_RUN, found.reason or found.damage, found)

    def finished(self) -> bool:
        """Whether a finished record is there, and whole."""
        found = Recorded.read(self.folder)
        return found.finished and damage_of(found) is None

    def damage(self) -> str | None:
        """What of the record can't be read or is missing though it says that it is finished; None for nothing."""
        return damage_of(Recorded.read(self.folder))

    def set_aside(self) -> Path:
        """Move a damaged record to <results_dir>/quarantine/, where nothing reads it; returns where it is.

        Raises:
            RecordError: it can't be moved.
        """
        with self._explained("the damaged record can't be moved from"):
            return set_aside(self.folder, self.folder.parents[2])

    def latest(self) -> Path:
        """The folder of the latest attempt: that of a forced run which has not finished, or the record's."""
        rerun = rerun_of(self.folder)
        return rerun if rerun.exists() else self.folder

    def acquire(self) -> bool:
        """Take the run's lock, unless another process has it; whether it is held now.

        Where a forced run was killed while it took the place of the one before, it takes that now.

        Raises:
            RecordError: its file can't be written, or the place not be taken.
        """
        with self._explained("no lock can be made for"):
            held = self.lock.acquire()
        replaced = replaced_of(self.folder)
        if held and replaced.exists() and not self.folder.exists():
            with self._explained("the run before can't be replaced in"):
                rerun = rerun_of(self.folder)
                (rerun if rerun.exists() else replaced).rename(self.folder)
            shutil.rmtree(replaced, ignore_errors=True)
        return held

    def start(
        self,
        settings: dict[str, Any],
        provenance: dict[str, Any],
        *,
        metrics: Iterable[dict[str, Any]] = (),
        keep: Sequence[str] = (),
    ) -> None:
        """Begin a run; what an unfinished one left is removed, a finished one stays until this one has finished.

        Args:
            settings: of config.yaml.
            provenance: of provenance.json.
            metrics: lines of metrics.jsonl, of a run that goes on.
            keep: patterns of files that are not removed.

        Raises:
            RecordError: it can't be written, here as in the methods below.
        """
        self.require_lock()
        rerun = rerun_of(self.folder)
        self.working = rerun if self.finished() else self.folder
        with self._explained("nothing can be written to"):
            self.refusal.unlink(missing_ok=True)  # of an earlier try, which whoever asked for it did not live to take
            if self.working == self.folder and rerun.exists():  # beside a finished record that is gone now
                shutil.rmtree(rerun)
            self.working.mkdir(parents=True, exist_ok=True)
            for path in self.working.iterdir():
                if not any(map(path.match, keep)):
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
        self._metrics = [_as_line(entry) for entry in metrics]
        self.set_status(Status.RUNNING)
        if self._metrics:
            self._write_metrics()
        self.write_bytes("config.yaml", yaml.safe_dump(settings, sort_keys=False).encode())
        self.write("provenance.json", provenance)

    @property
    def refusal(self) -> Path:
        """Where `refuse` leaves its note."""
        return self.folder.with_name(f"{self.folder.name}.refused")

    def refuse(self, reason: str) -> None:
        """Leave a note, for the command that asked for the run, that it could not start. No record is touched."""
        with self._explained("nothing can be written to"):
            self.refusal.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(self.refusal, reason)

    def keep_untold(self, reason: str) -> None:
        """Keep for this process why the run failed, which its record can't say."""
        _untold[self.folder.absolute()] = reason

    @property
    def untold(self) -> bool:
        """Whether `keep_untold` kept something."""
        return self.folder.absolute() in _untold

    def take_refusal(self) -> str | None:
        """The note that `refuse` left, which this removes: a run that never started leaves nothing."""
        note = self.refusal
        try:
            reason = note.read_text()
        except FileNotFoundError:
            return None
        note.unlink(missing_ok=True)
        with suppress(OSError):  # another seed's record, or its lock, is there
            note.parent.rmdir()
        return reason

    def publish(self, published: Published) -> None:
        """Note beside the record what is about to be seen."""
        self.require_lock()
        with self._explained("nothing can be written beside"):
            published.write(self.folder)

    def write(self, name: str, content: dict[str, Any]) -> None:
        """Write a JSON file."""
        self.write_bytes(name, as_json(content).encode())

    def write_bytes(self, name: str, content: bytes) -> None:
        """Write a file, whatever it holds."""
        self.require_lock()
        with self._explained(f"{name} can't be written to"):
            write_atomically(self.working / name, content)

    def require_lock(self) -> None:
        """Raise `LockLostError` where the lock was held and another process has taken it."""
        if self.lock.held:
            with self._explained("no lock can be read for"):
                self.lock.check()

    def append_metrics(self, line: dict[str, Any]) -> None:
        """Add a line to metrics.jsonl."""
        self._metrics.append(_as_line(line))
        self._write_metrics()

    def _write_metrics(self) -> None:
        self.write_bytes("metrics.jsonl", b"".join(self._metrics))

    def settle(self) -> None:
        """Have the disk hold what was written, before what else speaks of the run is removed."""
        with self._explained("what was written can't be kept in"):
            sync_files(self.folder)

    def set_status(self, status: Status, reason: str | None = None, trace: str | None = None) -> None:
        """Write status.json; the status "finished" puts a forced run in the place of the one before it."""
        content = {"status": str(status), "reason": reason, "traceback": trace}
        self.write("status.json", {key: value for key, value in content.items() if value is not None})
        if status == Status.FINISHED and self.working != self.folder:
            with self._explained("the run before can't be replaced in"):
                self._replace()

    def _replace(self) -> None:
        replaced = replaced_of(self.folder)
        shutil.rmtree(replaced, ignore_errors=True)
        with suppress(FileNotFoundError):  # it was removed meanwhile
            self.folder.rename(replaced)
        try:
            self.working.rename(self.folder)
        except OSError:
            if replaced.exists():
                replaced.rename(self.folder)
            raise
        shutil.rmtree(replaced, ignore_errors=True)
        self.working = self.folder

    @contextmanager
    def _explained(self, what: str) -> Iterator[None]:
        """Raise `RecordError` where the disk refuses."""
        try:
            yield
        except OSError as error:
            raise RecordError(f"{what} {self.working} ({error.strerror or error})") from error
