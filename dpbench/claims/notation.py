"""The compact notation of conf/paper: overrides in a line, numbers as papers print them, tables as text."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cache

from dpbench.errors import UserError, require

NUMBER = r"[-+]?\d+(?:\.\d+)?(?:e[-+]?\d+)?"
PRINTED = re.compile(
    rf"(?:(?P<minutes>\d+)m(?P<seconds>\d+)s|(?P<value>{NUMBER}(?:/\d+)?))"
    rf"(?:\s*±\s*(?P<spread>{NUMBER}))?(?:\s*\({NUMBER}\))?(?:\s*x\s*\d+)?"
)
ABSENT = "–"
# Whole numbers up to this are written without an exponent.
PLAIN = 10**6
SETTING = re.compile(r"(?P<key>[a-z_][\w.]*)=(?P<value>\S+)")
BETWEEN = " / "

Overrides = dict[str, str]
# Overrides of one configuration, "key=value" each.
Candidate = tuple[str, ...]
Labels = tuple[str, ...]


def in_one_form(candidate: Candidate) -> Candidate:
    """A configuration with its settings in one order and its numbers in one notation; cells write as they like."""
    return tuple(sorted(map(_in_one_form, candidate)))


@cache
def _in_one_form(override: str) -> str:
    key, _, value = override.partition("=")
    try:
        return f"{key}={float(value)}"
    except ValueError:
        return override


@dataclass(frozen=True)
class Printed:
    """A number as a paper prints it.

    Attributes:
        value: the number; a time in seconds.
        spread: what stands behind ±, taken for the standard deviation over runs; None where nothing does.
        text: all of it as it is printed, with its zeros, and with the best of several runs or a factor behind it.
    """

    value: float
    spread: float | None = None
    text: str = field(default="", compare=False)


def parse_overrides(text: str, field: str) -> Overrides:
    """Overrides in one line, ``algo=disk eps=8``, by key. Several values of a key (``eps=1,2``) are a search."""
    require(isinstance(text, str), field, text, "settings in one line, such as algo=disk eps=8")
    found: Overrides = {}
    for word in text.split():
        match = SETTING.fullmatch(word)
        require(match is not None, field, word, "settings of the form key=value, separated by spaces")
        assert match is not None
        require(match["key"] not in found, field, word, "each setting once")
        found[match["key"]] = match["value"]
    return found


def settings_of(candidate: Candidate) -> Overrides:
    """The overrides of a candidate by key."""
    return {key: value for key, _, value in (override.partition("=") for override in candidate)}


def alternatives(value: str) -> tuple[str, ...]:
    """The values of an override, separated by commas outside brackets: ``[8,4]`` is one, ``8,4`` are two."""
    return tuple(re.split(r",(?![^\[]*\])", value))


def parse_printed(text: str, field: str) -> Printed | None:
    """One entry of a table; None for "N/A", where the paper says that it prints nothing.

    Written as in the paper: ``57.05``, ``57.05 ± 0.505``, ``56.68 ± 0.646 (57.65)``, ``3m6s x 10``, ``-92/58``.
    """
    if text == "N/A":
        return None
    match = PRINTED.fullmatch(text)
    require(match is not None, field, text, "a number as printed, such as 57.05 ± 0.505, or N/A, or –")
    assert match is not None
    seconds = match["minutes"] is not None
    value = 60.0 * int(match["minutes"]) + int(match["seconds"]) if seconds else float(Fraction(match["value"]))
    spread = match["spread"]
    return Printed(value, None if spread is None else float(spread), text)


def parse_grid(text: str, rows: Labels, columns: Labels, field: str) -> Mapping[tuple[Labels, Labels], str]:
    """A table as text: entries by row and column labels; ``–`` entries are left out.

    The first line names the row axes and then every column, ``eps / method | 60 | 120``; each further line is a row.

    Args:
        text: the table, columns separated by ``|``, labels of several axes by `` / ``.
        rows: names of the row axes.
        columns: names of the column axes.
        field: where the table stands, for messages.
    """
    lines = [[cell.strip() for cell in line.split("|")] for line in text.strip().splitlines() if line.strip()]
    head, *body = lines
    expected = BETWEEN.join(rows)
    require(head[0] == expected, field, head[0], f"the names of the row axes, {expected}")
    named = [_labels(cell, columns, field) for cell in head[1:]]
    require(len(set(named)) == len(named), field, head, "every column once")
    found: dict[tuple[Labels, Labels], str] = {}
    seen: set[Labels] = set()
    for line in body:
        row = _labels(line[0], rows, field)
        if row in seen:
            raise UserError("the row stands there twice", field=field, value=line[0])
        seen.add(row)
        if len(line) != len(head):
            raise UserError(
                f"expected {len(named)} entries, one for each column, found {len(line) - 1}", field=field, value=line[0]
            )
        found |= {(row, column): cell for column, cell in zip(named, line[1:], strict=True) if cell != ABSENT}
    return found


def _labels(text: str, axes: Labels, field: str) -> Labels:
    labels = tuple(part.strip() for part in text.split(BETWEEN)) if axes else ()
    require(len(labels) == len(axes), field, text, f"a label for each of {BETWEEN.join(axes)}")
    return labels


def number(value: float, unit: str) -> str:
    """A number of ours: per cents and points with two decimals, others with four digits, whole ones with all."""
    if unit in ("%", "points"):
        return f"{value:.2f}"
    return f"{value:.0f}" if value.is_integer() and abs(value) <= PLAIN else f"{value:.4g}"
