"""The accuracy table of a command line's runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from rich.console import Console
from rich.text import Text

from dpbench.console import new_table
from dpbench.errors import visible
from dpbench.spreadsheet import csv_of
from dpbench.tracking.proven import UNPROVEN, is_proven
from dpbench.tracking.status import Status
from dpbench.wording import NOTHING

COLUMNS = (
    "run",
    "validation accuracy, last (%)",
    "test accuracy, last (%)",
    "best on test (%)",
    "eps",
    "eps as published",
    "eps of the search",
    "delta",
    "noise multiplier",
    "steps",
    "status",
    "folder",
)

# Left out of the printed table where no run has a value.
OPTIONAL = ("validation accuracy, last (%)", "eps as published", "eps of the search")


@dataclass(frozen=True)
class Row:
    """One run as the table shows it.

    Attributes:
        name: its overrides.
        summary: content of summary.json, or what else the record says in its words; empty where there is nothing.
        status: how it stands.
        reason: why, where it is not finished.
        folder: its record; None where there is none.
    """

    name: str
    summary: Mapping[str, Any]
    status: str
    reason: str | None
    folder: str | None

    def accuracy(self, which: str) -> float | None:
        """Test accuracy, "final" or "best" accuracy; None unless the run is finished."""
        if self.status != Status.FINISHED:
            return None
        found: float | None = self.summary.get("test_accuracy", {}).get(which)
        return found

    @property
    def validated(self) -> float | None:
        """Validation accuracy; None unless the run is finished, and where nothing was set aside for it."""
        found: float | None = self.summary.get("validation_accuracy")
        return found if self.status == Status.FINISHED else None

    @property
    def proven(self) -> str | None:
        """Whether its eps is a guarantee, as a word; None where it has none."""
        return None if self.summary.get("eps") is None else str(is_proven(self.summary)).lower()

    def values(self) -> dict[str, Any]:
        """What the run came to, in full, by the names of columns; None where there is nothing."""
        summary = self.summary
        return {
            "run": self.name,
            "validation accuracy, last (%)": _percent(self.validated),
            "test accuracy, last (%)": _percent(self.accuracy("final")),
            "best on test (%)": _percent(self.accuracy("best")),
            "eps": summary.get("eps"),
            "eps is proven": self.proven,
            "eps as published": summary.get("published_eps"),
            "eps of the search": summary.get("search_eps"),
            "delta": summary.get("delta"),
            "noise multiplier": summary.get("noise_multiplier"),
            "steps": summary.get("steps"),
            "status": self.status,
            "folder": self.folder,
        }

    def cells(self) -> list[str]:
        """Texts in the order of `COLUMNS`; a missing number is a dash. Unfinished runs show no accuracy."""
        found = self.values()
        unproven = UNPROVEN if found["eps is proven"] == "false" else ""
        shown = {
            "validation accuracy, last (%)": lambda x: f"{x:.2f}",
            "test accuracy, last (%)": lambda x: f"{x:.2f}",
            "best on test (%)": lambda x: f"{x:.2f}",
            "eps": lambda x: f"{float(x):.4g}{unproven}",
            "eps as published": lambda x: f"accounting differs: {float(x):.4g}",
            "eps of the search": lambda x: f"{float(x):.4g}",
            "delta": lambda x: f"{float(x):.3g}",
            "noise multiplier": lambda x: f"{float(x):.4f}",
        }
        return [NOTHING if found[name] is None else shown.get(name, str)(found[name]) for name in COLUMNS]


def _percent(fraction: float | None) -> float | None:
    return None if fraction is None else round(100 * fraction, 6)


def print_table(rows: list[Row], console: Console) -> None:
    """Print the runs, below their folders, which may be many."""
    table = new_table()
    cells = [row.cells() for row in rows]
    shown = [i for i, name in enumerate(COLUMNS[:-1]) if name not in OPTIONAL or any(c[i] != NOTHING for c in cells)]
    for i in shown:
        left = COLUMNS[i] in ("run", "status")
        table.add_column(COLUMNS[i], justify="left" if left else "right", overflow="fold")
    for of_row in cells:
        table.add_row(*(Text(visible(of_row[i])) for i in shown))
    if folders := [f"{row.name}: {row.folder}" for row in rows if row.folder is not None]:
        console.print()
    for line in folders:
        console.print(visible(line))
    console.print()
    console.print(table)


def print_means(rows: list[Row], console: Console) -> None:
    """Print mean ± sample standard deviation of each configuration, where several runs of one have finished."""
    of_run: dict[str, list[Row]] = {}
    for row in rows:
        if row.folder is not None and row.accuracy("final") is not None:
            of_run.setdefault(str(Path(row.folder).parent), []).append(row)
    if all(len(group) < 2 for group in of_run.values()):
        return
    table = new_table()
    table.add_column("mean over seeds", overflow="fold")
    table.add_column("test accuracy, last (%), ± standard deviation", justify="right")
    table.add_column("seeds", justify="right")
    for group in of_run.values():
        name = " ".join(word for word in group[0].name.split() if not word.startswith("seed=")) or "all runs"
        accuracies = [100 * value for row in group if (value := row.accuracy("final")) is not None]
        spread = f" ± {stdev(accuracies):.2f}" if len(group) > 1 else ""
        table.add_row(Text(visible(name)), f"{fmean(accuracies):.2f}{spread}", str(len(group)))
    console.print()
    console.print(table)


def as_csv(rows: Sequence[Row]) -> str:
    """The table as CSV: numbers in full, cells that are empty where there is none."""
    values = [row.values() for row in rows]
    return csv_of([values[0], *(["" if value is None else value for value in each.values()] for each in values)])
