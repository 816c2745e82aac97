"""Tables in Markdown."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence


def table(head: Sequence[str], rows: Iterable[Iterable[object]], *, numbers: Collection[str] = ()) -> str:
    """A table, a line for each row.

    Args:
        head: of the columns.
        rows: cells, each in one line; a bar in them is escaped.
        numbers: heads of the columns that are flush right.
    """
    rule = "|".join("---:" if name in numbers else "---" for name in head)
    return "\n".join([_line(head), f"|{rule}|", *map(_line, rows)])


def _line(cells: Iterable[object]) -> str:
    return "| " + " | ".join(str(cell).replace("|", "\\|") for cell in cells) + " |"
