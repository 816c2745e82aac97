"""Command lines of dpbench.results in this process, and records that are spoilt for it."""

import json
import os
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

from cli import Outcome

from dpbench.results.__main__ import main

DAY = 86400.0


def results(folder: Path, verb: str, *arguments: str) -> Outcome:
    out, err = StringIO(), StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = main([verb, f"results_dir={folder}", *arguments])
    return Outcome(code, out.getvalue(), err.getvalue(), folder)


def rows(outcome: Outcome) -> list[dict[str, str]]:
    """The table that was printed, by the names of its columns; no cell has a space but ages."""
    head, *lines = outcome.out.partition("\n\n")[0].splitlines()
    names = head.replace("accuracy (%)", "accuracy").split()
    found = []
    for line in lines:
        cells = line.split()
        place = names.index("age")
        while len(cells) > len(names):
            cells[place : place + 2] = [f"{cells[place]} {cells[place + 1]}"]
        found.append(dict(zip(names, cells, strict=True)))
    return found


def change(record: Path, name: str, edit: Callable[[Any], Any]) -> None:
    """Write what an edit makes of a JSON file of a record."""
    content = json.loads((record / name).read_text())
    edited = edit(content)
    (record / name).write_text(json.dumps(content if edited is None else edited))


def age_by(folder: Path, seconds: float = DAY) -> None:
    """Let everything below a folder have been written so long ago."""
    for path in (*folder.rglob("*"), folder):
        times = path.stat().st_mtime - seconds
        os.utime(path, (times, times))
