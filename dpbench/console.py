"""Where commands print."""

from __future__ import annotations

import sys
from io import TextIOWrapper
from typing import Any

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text
from typing_extensions import override

from dpbench.errors import visible

WIDEST = 10_000


def make_console(*, stderr: bool = False) -> Console:
    """A console that does not fold lines where there is no terminal to fold for."""
    stream = sys.stderr if stderr else sys.stdout
    if isinstance(stream, TextIOWrapper) and stream.errors == "strict":
        stream.reconfigure(errors="replace")  # in an encoding that lacks a sign, another one is better than none
    width = None if stream.isatty() else 160
    return _Console(stderr=stderr, soft_wrap=True, markup=False, emoji=False, highlight=False, width=width)


class _Console(Console):
    """A console that neutralises control characters of text from anywhere: a record, a file, a name that was typed."""

    @override
    def render_str(self, text: str, **settings: Any) -> Text:
        return super().render_str("\n".join(map(visible, text.split("\n"))), **settings)


def new_table() -> Table:
    """A table as all commands print them: no lines, a bold head."""
    return Table(box=None, pad_edge=False, header_style="bold")


def print_whole(table: Table, console: Console) -> None:
    """Print a table as wide as its content: what is cut off nobody can read or search, and a terminal folds lines."""
    before = console.width
    console.width = max(before, Measurement.get(console, console.options.update(width=WIDEST), table).maximum)
    try:
        console.print(table, crop=False)
    finally:
        console.width = before
