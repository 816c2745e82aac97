"""Results that took time and need not be found twice: files below DPBENCH_CACHE, most of them small and JSON.

Best effort: a cache that can't be read or written costs time, nothing else.
"""

from __future__ import annotations

import hashlib
import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from dpbench.files import write_atomically


def folder() -> Path:
    """DPBENCH_CACHE, or dpbench in the user's cache folder; of a user without a home one in which nothing can be."""
    if own := os.environ.get("DPBENCH_CACHE"):
        return Path(own)
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "dpbench"
    except RuntimeError:  # in a container, whose user may have neither HOME nor an entry in passwd
        return Path(os.devnull) / "dpbench"


def place(kind: str, key: object, suffix: str = ".json") -> Path:
    """Where the file of a result lies, if there is one."""
    digest = hashlib.sha256(json.dumps(key).encode()).hexdigest()[:24]
    return folder() / kind / f"{digest}{suffix}"


def read(kind: str, key: object) -> Any:
    """What was written under a key, JSON-serialisable, for this kind of result; None if nothing was."""
    try:
        return json.loads(place(kind, key).read_text())
    except (OSError, ValueError):
        return None


def write(kind: str, key: object, value: Any) -> None:
    """Keep a result."""
    replace(place(kind, key), json.dumps(value).encode())


def replace(path: Path, content: bytes) -> None:
    """Keep the file of a result; readers see the old one or the new one, whole."""
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, content)
