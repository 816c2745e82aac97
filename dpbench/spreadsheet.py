"""CSV files, which people open in spreadsheets."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable
from io import StringIO

NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)(e[-+]?\d+)?|[-+]?(inf|nan)", re.IGNORECASE)


def as_text(cell: str) -> str:
    """A cell that a spreadsheet takes for a text or a number, never for a formula that it carries out."""
    formula = cell.startswith(("=", "+", "-", "@", "\t", "\r")) and not NUMBER.fullmatch(cell)
    return f"'{cell}" if formula else cell


def csv_of(rows: Iterable[Iterable[object]]) -> str:
    """Rows as CSV, every cell `as_text`."""
    stream = StringIO()
    csv.writer(stream, lineterminator="\n").writerows([as_text(str(cell)) for cell in row] for row in rows)
    return stream.getvalue()
