"""The folder of a run: <results_dir>/runs/<config hash>/<seed>/, each file replaced atomically."""

from __future__ import annotations

import json
import math
import os
import shutil
import tempfile
from enum import StrEnum
from pathlib import Path
from typing import Any

import yaml

from dpbench.errors import UserError


class Status(StrEnum):
    """How a run stands; refused is one that could not start, of which there is no record."""

    RUNNING = "running"
    FINISHED = "finished"
    INTERRUPTED = "interrupted"
    DIVERGED = "diverged"
    FAILED = "failed"
    INVALID = "invalid"
    REFUSED = "refused"


def jsonable(value: Any) -> Any:
    """Plain values with infinities and NaN as strings, which JSON has no numbers for."""
    if isinstance(value, dict):
        return {key: jsonable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [jsonable(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def write_atomically(path: Path, content: str | bytes) -> None:
    """Replace a file as a whole: a reader sees the old content or the new one, never a part."""
    handle, part = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(content.encode() if isinstance(content, str) else content)
        os.chmod(part, 0o644)
        os.replace(part, path)
    except BaseException:
        Path(part).unlink(missing_ok=True)
        raise


def require_writable(folder: Path) -> None:
    """Raise `UserError` unless files can be made in a folder, which is made where it is missing."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise UserError(
            f"can't be written ({error.strerror}); name a folder that can", field="results_dir", value=folder
        ) from error


def read_json(path: Path) -> dict[str, Any]:
    """A JSON file of a record; empty where there is none or it can't be read."""
    try:
        content: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return content


class RunRecord:
    """Reads and writes the folder of one run.

    A finished record stays as it is while a forced second run is under way: that one goes to a folder beside it
    and takes its place when it has finished.

    Attributes:
        folder: where the finished record lies.
    """

    def __init__(self, results_dir: Path, config_hash: str, seed: int) -> None:
        self.folder = results_dir / "runs" / config_hash / str(seed)
        self._working = self.folder
        self._metrics: list[dict[str, Any]] = []

    def status(self) -> dict[str, Any]:
        """The content of status.json; empty where there is none."""
        return read_json(self.folder / "status.json")

    def finished(self) -> bool:
        """Whether a finished record is there."""
        return self.status().get("status") == Status.FINISHED

    def latest(self) -> Path:
        """The folder of the latest attempt: that of a forced run which has not finished, or the record's."""
        rerun = self._rerun_folder()
        return rerun if rerun.exists() else self.folder

    def _rerun_folder(self) -> Path:
        return self.folder.with_name(f"{self.folder.name}.rerun")

    def start(self, settings: dict[str, Any], provenance: dict[str, Any]) -> None:
        """Begin a run; what an unfinished one left is removed, a finished one stays until this one has finished."""
        self._working = self._rerun_folder() if self.finished() else self.folder
        shutil.rmtree(self._working, ignore_errors=True)
        self._working.mkdir(parents=True)
        self._metrics = []
        self.set_status(Status.RUNNING)
        write_atomically(self._working / "config.yaml", yaml.safe_dump(settings, sort_keys=False))
        self.write("provenance.json", provenance)

    def refuse(self, reason: str) -> None:
        """Leave a note, for the command that asked for the run, that it could not start. No record is touched."""
        self._refusal().parent.mkdir(parents=True, exist_ok=True)
        write_atomically(self._refusal(), reason)

    def take_refusal(self) -> str | None:
        """The note that `refuse` left, which this removes: a run that never started leaves nothing."""
        note = self._refusal()
        if not note.exists():
            return None
        reason = note.read_text()
        note.unlink()
        if not any(note.parent.iterdir()):
            note.parent.rmdir()
        return reason

    def _refusal(self) -> Path:
        return self.folder.with_name(f"{self.folder.name}.refused")

    def write(self, name: str, content: dict[str, Any]) -> None:
        """Write a JSON file."""
        write_atomically(self._working / name, json.dumps(jsonable(content), indent=2) + "\n")

    def write_bytes(self, name: str, content: bytes) -> None:
        """Write a file that is no text."""
        write_atomically(self._working / name, content)

    def append_metrics(self, line: dict[str, Any]) -> None:
        """Add a line to metrics.jsonl."""
        self._metrics.append(line)
        lines = "".join(json.dumps(jsonable(entry)) + "\n" for entry in self._metrics)
        write_atomically(self._working / "metrics.jsonl", lines)

    def set_status(self, status: Status, reason: str | None = None, trace: str | None = None) -> None:
        """Write status.json; the status "finished" puts a forced run in the place of the one before it."""
        content = {"status": str(status), "reason": reason, "traceback": trace}
        self.write("status.json", {key: value for key, value in content.items() if value is not None})
        if status == Status.FINISHED and self._working != self.folder:
            replaced = self.folder.with_name(f"{self.folder.name}.replaced")
            shutil.rmtree(replaced, ignore_errors=True)
            self.folder.rename(replaced)
            self._working.rename(self.folder)
            shutil.rmtree(replaced)
            self._working = self.folder
