"""Results that took time and need not be found twice: small JSON files below DPBENCH_CACHE.

Best effort: a cache that can't be read or written costs time, nothing else.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any


def folder() -> Path:
    """DPBENCH_CACHE, or dpbench in the user's cache folder."""
    default = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "dpbench"
    return Path(os.environ.get("DPBENCH_CACHE", default))


def _path(kind: str, key: object) -> Path:
    digest = hashlib.sha256(json.dumps(key).encode()).hexdigest()[:24]
    return folder() / kind / f"{digest}.json"


def read(kind: str, key: object) -> Any:
    """What was written under a key, JSON-serialisable, for this kind of result; None if nothing was."""
    try:
        return json.loads(_path(kind, key).read_text())
    except (OSError, ValueError):
        return None


def write(kind: str, key: object, value: Any) -> None:
    """Keep a result."""
    path = _path(kind, key)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(f".{os.getpid()}.part")
        part.write_text(json.dumps(value))
        part.replace(path)
    except OSError:
        pass
