"""python -m dpbench.data: which data sets are here, and whether their files are whole."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from dpbench.cli.console import make_console
from dpbench.data.catalogue import SOURCES
from dpbench.data.sources import State

OK, DAMAGED, BAD_INPUT = 0, 1, 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line; returns the exit code: 0, 1 where something is damaged or missing, 2 for bad input."""
    parser = argparse.ArgumentParser(prog="python -m dpbench.data", description=__doc__)
    parser.add_argument("command", nargs="?", choices=("list", "check"), default="list")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"data sets ({', '.join(SOURCES)}); all if none")
    default = os.environ.get("DPBENCH_DATA", ".data")
    parser.add_argument("--root", type=Path, default=Path(default), help="data root (default: %(default)s)")
    options = parser.parse_args(arguments)
    unknown = [name for name in options.names if name not in SOURCES]
    if unknown:
        print(f"error: {unknown[0]}: expected one of {', '.join(SOURCES)}", file=sys.stderr)
        return BAD_INPUT
    console = make_console()
    if options.command == "list":
        return _list(options.names or list(SOURCES), options.root, console)
    return _check(options.names, options.root, console)


def _list(names: list[str], root: Path, console: Console) -> int:
    """A line for each data set, from what is there at a glance, and below the table what there is to say."""
    table = Table(box=None, pad_edge=False, header_style="bold")
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
