"""python -m dpbench.data: which data sets are here, and whether their files are whole."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from dpbench.cli.command import OK, run_command
from dpbench.console import make_console, new_table
from dpbench.data.catalogue import SOURCES
from dpbench.data.sources import ELSEWHERE, State
from dpbench.errors import UserError, require
from dpbench.files import require_no_file
from dpbench.wording import folder_of

DAMAGED = 1
COMMANDS = ("list", "check")


HELP = """\
python -m dpbench.data [list | check] [NAME ...] [data.root=FOLDER]

Which data sets are here, and whether their files are whole. All data sets if none is named.

  list       (default) a line for each: present, can be downloaded, needs a licence, or damaged, at a glance
  check      compares all files with known sums and counts; one that is not here fails only if it is named
  data.root  default: the environment variable DPBENCH_DATA, else .data

Exit codes: 0, 1 something is damaged or missing, 2 bad input, 130 interrupted.
"""


def main(typed: Sequence[str] | None = None) -> int:
    """Run a command line; returns the exit code."""
    return run_command(_main, typed, lambda _: HELP, "interrupted; nothing was changed")


def _main(words: list[str]) -> int:
    names, root = [], os.environ.get("DPBENCH_DATA", ".data")
    for word in words:
        key, separator, value = word.partition("=")
        if separator and (key != "data.root" or not value):
            raise UserError(f"{word}: expected data.root=FOLDER, the one setting there is")
        if separator:
            root = value
        else:
            names.append(word)
    folder = folder_of("DPBENCH_DATA", root)
    command = names.pop(0) if names and names[0] in COMMANDS else "list"
    for name in names:
        require(name in SOURCES, "name", name, f"one of {', '.join(SOURCES)}, after {' or '.join(COMMANDS)}")
    console = make_console()
    require_no_file(folder, "data.root", f"{ELSEWHERE} at one")
    if command == "list":
        return _list(names or list(SOURCES), folder, console)
    return _check(names, folder, console)


def _list(names: list[str], root: Path, console: Console) -> int:
    """A line for each data set, from what is there at a glance, and below the table what there is to say."""
    table = new_table()
    for column in ("name", "data set", "train", "test", "state"):
        table.add_column(column, justify="right" if column in ("train", "test") else "left")
    states = {name: SOURCES[name].state(root) for name in names}
    for name, (state, _) in states.items():
        source = SOURCES[name]
        table.add_row(name, source.title, f"{source.train:,}", f"{source.test:,}", str(state))
    console.print(f"Data root: {root}\n")
    console.print(table)
    console.print()
    for name, (_, text) in states.items():
        if text:
            console.print(f"{name}: {text}")
    return DAMAGED if any(state == State.DAMAGED for state, _ in states.values()) else OK


def _check(names: list[str], root: Path, console: Console) -> int:
    """Compare all files with what is known of them; data sets that are not here fail only if they were named."""
    code = OK
    for name in names or list(SOURCES):
        problems = SOURCES[name].problems(root, thorough=True)
        if problems and not names and SOURCES[name].state(root)[0] in (State.DOWNLOADABLE, State.LICENSED):
            console.print(f"{name}: not here")
            continue
        for problem in problems:
            console.print(f"{name}: {problem.text}")
        if problems:
            code = DAMAGED
        else:
            console.print(f"{name}: whole")
    return code


if __name__ == "__main__":
    sys.exit(main())
