"""A table of runs."""

from __future__ import annotations

import difflib
import math
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from dpbench.console import make_console, new_table, print_whole
from dpbench.errors import require, show
from dpbench.results.arguments import Arguments
from dpbench.results.selection import Condition, age, column_of, values_of
from dpbench.tracking.columns import ABSENT
from dpbench.tracking.index import Index
from dpbench.tracking.proven import UNPROVEN, is_proven
from dpbench.tracking.reading import DAMAGED, tell
from dpbench.tracking.shapes import is_number
from dpbench.wording import NOTHING, duration, number_of

COLUMNS = (
    *("algorithm", "dataset", "model", "eps", "spent", "search_eps"),
    *("seed", "status", "accuracy", "steps", "commit", "age"),
)
# Left out where no run has a value.
OPTIONAL = ("search_eps",)
TEXTS = ("algorithm", "dataset", "model", "status", "commit", "hash")
# More damaged records than these are counted, not named.
NAMED = 20


def print_list(index: Index, arguments: Arguments, console: Console) -> None:
    """Print the runs that were asked for, and below the table how they stand.

    Raises:
        UserError: a setting that no record has, or an option with a value that it can't have.
    """
    limit = arguments.options["limit"]
    require(limit.isdecimal(), "limit", limit, "a whole number, 0 for all")
    further = tuple(name for name in arguments.options["columns"].split(",") if name)
    for name in further:
        column_of(index, name)
    warn(index)
    places = in_order(index, arguments.selection.places(index), arguments.options["sort"])
    shown = places[: int(limit)] if int(limit) else places
    if not places:
        console.print(f"no such runs{_alone(index, arguments)}" if index.size else f"no runs below {index.runs}")
        return
    print_whole(table_of(index, shown, further), console)
    console.print()
    standing = Counter(index.column("status")[place] for place in places)
    counted = ", ".join(f"{count:,} {status}" for status, count in standing.most_common())
    rest = f"; {len(shown):,} of them shown, limit=0 shows all" if len(shown) < len(places) else ""
    console.print(f"{number_of(len(places), 'run')}: {counted}{rest}")


def _alone(index: Index, arguments: Arguments) -> str:
    """The conditions that no run meets."""
    unmet = [one for one in arguments.selection.conditions if not any(one.met(index))]
    if not unmet:
        return ""
    near = dict.fromkeys(word for one in unmet for word in _near(index, one))
    hint = f"; did you mean {', '.join(near)}?" if near else ""
    return f": none has {', '.join(one.text for one in unmet)}{hint}"


def _near(index: Index, condition: Condition) -> list[str]:
    """Of values that records have those that are spelled like the ones which a condition asks for."""
    if condition.sign != "=":
        return []
    held = {value for value in index.column(column_of(index, condition.key)) if isinstance(value, str)}
    return [word for typed in condition.values for word in difflib.get_close_matches(typed, held, n=1)]


def in_order(index: Index, places: Sequence[int], by: str) -> list[int]:
    """Places sorted by a setting; records without it, or with what is no number (NaN), come last.

    Args:
        index: of the records.
        places: of some of them.
        by: name of the setting, with - before it from the largest to the smallest.
    """
    key = by.removeprefix("-")
    values = values_of(index, key)
    # The youngest began last; records write times in one zone, so that they sort as texts.
    backwards = by.startswith("-") != (key == "age")
    present = [place for place in places if not _is_nothing(values[place])]
    absent = [place for place in places if _is_nothing(values[place])]
    texts = all(isinstance(values[place], str) for place in present)
    rank = values.__getitem__ if texts else lambda place: _rank(values[place])
    return sorted(present, key=rank, reverse=backwards) + absent


def _is_nothing(value: Any) -> bool:
    return value is ABSENT or value is None or (is_number(value) and math.isnan(float(value)))


def _rank(value: Any) -> tuple[int, float, str]:
    """Numbers before texts."""
    return (0, float(value), "") if is_number(value) else (1, 0.0, show(value))


def table_of(index: Index, places: Sequence[int], further: Sequence[str] = ()) -> Table:
    """A row for each of these records."""
    table = new_table()
    now = datetime.now(UTC)
    asked = (*COLUMNS, *(name for name in further if name not in COLUMNS), "hash")
    cells = {name: _column(index, name, places, now) for name in asked}
    cells["spent"] = [
        text + UNPROVEN if is_unproven(index, place) else text
        for text, place in zip(cells["spent"], places, strict=True)
    ]
    dirty = index.column("provenance.dirty")
    cells["commit"] = [
        text + "+" if dirty[place] is True else text for text, place in zip(cells["commit"], places, strict=True)
    ]
    for name in set(OPTIONAL).difference(further):
        if set(cells[name]) <= {NOTHING}:
            del cells[name]
    for name in cells:
        table.add_column(
            "accuracy (%)" if name == "accuracy" else name,
            justify="left" if name in TEXTS else "right",
            no_wrap=True,
        )
    for row in zip(*cells.values(), strict=True):
        table.add_row(*(Text(text) for text in row))
    return table


def is_unproven(index: Index, place: int) -> bool:
    """Whether a record has an eps that is no guarantee."""
    spent, private = index.column("summary.eps")[place], index.column("summary.private")[place]
    return is_number(spent) and not is_proven({"eps": spent, "private": private is not False})


def _column(index: Index, name: str, places: Sequence[int], now: datetime) -> list[str]:
    values = index.column("hash") if name == "hash" else values_of(index, name)
    return [_cell(name, values[place], now) for place in places]


def _cell(name: str, value: Any, now: datetime) -> str:
    if value is ABSENT or value is None:
        return NOTHING
    if name in ("spent", "search_eps"):
        return f"{float(value):.4g}" if is_number(value) else NOTHING
    if name in ("accuracy", "best"):
        return f"{100 * float(value):.2f}" if is_number(value) else NOTHING
    if name == "commit":
        return str(value)[:8]
    if name == "age":
        seconds = age(value, now)
        return duration(seconds) if seconds is not None else NOTHING
    return f"{value:.6g}" if isinstance(value, float) else show(value)


def warn(index: Index) -> None:
    """Name the records that are damaged."""
    problems, status = index.column("problems"), index.column("status")
    damaged = [place for place, problem in enumerate(problems) if problem is not ABSENT]
    for place in damaged[:NAMED]:
        tell(index.folder(place), problems[place], damaged=status[place] == DAMAGED)
    if len(damaged) > NAMED:
        rest = f"warning: {len(damaged) - NAMED:,} more records are damaged; check names them all"
        make_console(stderr=True).print(rest, style="yellow")
