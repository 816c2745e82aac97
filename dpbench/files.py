"""Files as records and results are kept: JSON that people can read, replaced as a whole."""

from __future__ import annotations

import json
import math
import os
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

from dpbench.errors import UserError

# Bytes that must be free where records go; a full disk still lets one make empty files.
SMALLEST_ROOM = 1 << 16

# Of files of weights.
OF_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth")
# See `stamp`.
Stamp = tuple[int, int] | None


def names_weights_file(source: str) -> bool:
    """Whether a source of weights can be but a file or folder, be it there or not, and nothing on a hub."""
    path = Path(source)
    return path.is_absolute() or source.startswith((".", "~")) or path.suffix in OF_WEIGHTS


def jsonable(value: Any) -> Any:
    """Plain values with infinities and NaN as strings, which JSON has no numbers for."""
    if isinstance(value, dict):
        return {key: jsonable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [jsonable(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def as_json(content: dict[str, Any]) -> str:
    """A JSON file to be read by people, of which there are many: a line for each value of an object."""
    values = {key: json.dumps(value, separators=(",", ":")) for key, value in jsonable(content).items()}
    lines = (f" {json.dumps(key)}: {value}" for key, value in values.items())
    return "{\n" + ",\n".join(lines) + "\n}\n"


def write_atomically(path: Path, content: str | bytes, *, durably: bool = False) -> None:
    """Replace a file as a whole: a reader sees the old content or the new one, never a part.

    Args:
        path: of the file.
        content: the new one.
        durably: return when the disk has it, so that it is there even after a power cut.
    """
    handle, part = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(content.encode() if isinstance(content, str) else content)
            if durably:
                stream.flush()
                os.fsync(stream.fileno())
        os.chmod(part, 0o644)
        os.replace(part, path)
        if durably:
            sync_folder(path.parent)
    except BaseException:
        Path(part).unlink(missing_ok=True)
        raise


def sync_files(folder: Path) -> None:
    """Let the disk have the files of a folder, which were written before.

    Raises:
        OSError: it can't.
    """
    for path in folder.iterdir():
        opened = os.open(path, os.O_RDONLY)
        try:
            os.fsync(opened)
        finally:
            os.close(opened)
    sync_folder(folder)


def sync_folder(folder: Path) -> None:
    """Let the disk have the names that a folder holds, where its file system can be told so."""
    opened = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):
            os.fsync(opened)
    finally:
        os.close(opened)


def require_writable(folder: Path) -> None:
    """Raise `UserError` unless files can be written to a folder, which is made where it is missing."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as stream:
            stream.write(bytes(SMALLEST_ROOM))
    except OSError as error:
        raise UserError(
            f"can't be written ({error.strerror}); name a folder that can", field="results_dir", value=folder
        ) from error


def require_no_file(folder: str | Path, field: str, remedy: str) -> None:
    """Raise `UserError` where something else stands in a folder's place; it need not exist.

    Args:
        folder: where files are looked for.
        field: the setting that names it.
        remedy: ends the sentence.
    """
    if os.path.lexists(folder) and not os.path.isdir(folder):
        raise UserError(f"is no folder; {remedy}", field=field, value=folder)


def stamp(path: Path) -> Stamp:
    """Tells whether a file was replaced, or a folder or a file right in it; None where there is nothing."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns


def read_json(path: Path) -> dict[str, Any]:
    """A JSON file that holds an object; empty where there is none or it can't be read."""
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}
