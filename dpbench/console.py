"""Where commands print, and how they say what they found."""

from __future__ import annotations

import re
import sys
from io import TextIOWrapper
from typing import Any

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text
from typing_extensions import override

from dpbench.errors import require, visible

UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
WIDEST = 10_000
TIME = re.compile(r"(\d+(\.\d+)?[smhd])+")


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


def print_whole(table: Table, console: Console) -> None:
    """Print a table as wide as its content: what is cut off nobody can read or search, and a terminal folds lines."""
    before = console.width
    console.width = max(before, Measurement.get(console, console.options.update(width=WIDEST), table).maximum)
    try:
        console.print(table, crop=False)
    finally:
        console.width = before


def duration(seconds: float) -> str:
    """Seconds as a person would say them."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    if seconds < 3 * 86400:
        return f"{seconds / 3600:.1f} h"
    return f"{seconds / 86400:,.0f} days"


def seconds_of(field: str, typed: str) -> float:
    """The seconds of a time such as 1h30m.

    Raises:
        UserError: it is no time.
    """
    require(TIME.fullmatch(typed) is not None, field, typed, "a time such as 90s, 30m, 2h or 1h30m")
    return sum(float(number) * UNITS[unit] for number, unit in re.findall(r"([\d.]+)([smhd])", typed))
