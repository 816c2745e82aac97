"""The accuracy table of a command line's runs."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from io import StringIO
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

COLUMNS = (
    "run",
    "test accuracy, last (%)",
    "best on test (%)",
    "eps",
    "delta",
    "noise multiplier",
    "steps",
    "status",
    "folder",
)


@dataclass(frozen=True)
class Row:
    """One run as the table shows it.

    Attributes:
        name: its overrides.
        summary: content of summary.json; empty where there is none.
        status: how it stands.
        reason: why, where it is not finished.
        folder: its record.
    """

    name: str
    summary: dict[str, Any]
    status: str
    reason: str | None
    folder: str

    def accuracy(self, which: str) -> float | None:
        """Test accuracy, "final" or "best" accuracy; None unless the run is finished."""
        found: float | None = self.summary.get("test_accuracy", {}).get(which) if self.status == "finished" else None
        return found

    def cells(self) -> list[str]:
        """Texts in the order of `COLUMNS`; a missing number is a dash. Unfinished runs show no accuracy."""
        summary = self.summary if self.status == "finished" else {}
        return [
            self.name,
            _text(self.accuracy("final"), lambda x: f"{100 * x:.2f}"),
            _text(self.accuracy("best"), lambda x: f"{100 * x:.2f}"),
            _text(summary.get("eps"), lambda x: f"{float(x):.4g}"),
            _text(summary.get("delta"), lambda x: f"{x:.3g}"),
            _text(summary.get("noise_multiplier"), lambda x: f"{x:.4f}"),
            _text(summary.get("steps"), str),
            self.status,
            self.folder,
        ]


def _text(value: Any, how: Any) -> str:
    return "–" if value is None else how(value)


def print_table(rows: list[Row], console: Console) -> None:
    """Print the runs, and below the table the folders and what went wrong."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in COLUMNS[:-1]:
        table.add_column(column, justify="left" if column in ("run", "status") else "right", overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row.cells()[:-1]))
    console.print()
    console.print(table)
    console.print()
    for row in rows:
        console.print(f"{row.name}: {row.folder}", highlight=False, markup=False, soft_wrap=True)


def as_csv(rows: list[Row]) -> str:
    """The table as CSV."""
    stream = StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(COLUMNS)
    writer.writerows(row.cells() for row in rows)
    return stream.getvalue()
