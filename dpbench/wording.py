"""Numbers, times and other values as a person says them."""

from __future__ import annotations

import re
from pathlib import Path

from dpbench.errors import require

# Where there is nothing to say.
NOTHING = "–"
UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
TIME = re.compile(r"(\d+(\.\d+)?[smhd])+")


def number_of(count: int, noun: str) -> str:
    """So many of a thing, whose plural ends in s: 1 run, 2,345 runs."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def is_decimal(text: str) -> bool:
    """Whether a text is a number as `float` reads it."""
    try:
        float(text)
    except ValueError:
        return False
    return True


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


def flag_of(field: str, typed: str) -> bool:
    """What true and false stand for.

    Raises:
        UserError: it is neither.
    """
    require(typed in ("true", "false"), field, typed, "true or false")
    return typed == "true"


def folder_of(field: str, typed: str) -> Path:
    """The folder of a name, in which ~ is one's own.

    Raises:
        UserError: there is no name.
    """
    require(bool(typed), field, "''", "the name of a folder")
    return Path(typed).expanduser()
