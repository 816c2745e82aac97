"""One artefact as tables, figures and pages show it: printed, ours and verdict at every place, and why."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from dpbench.claims import (
    Artefact,
    Claim,
    Evidence,
    Finding,
    JudgedCell,
    Judgement,
    Kind,
    Outcome,
    Run,
    Scorecard,
    examine,
)
from dpbench.claims.computed_file import Computed
from dpbench.claims.needs import cost
from dpbench.claims.notation import Labels, number
from dpbench.claims.verdict import cleared
from dpbench.report.selection import selection_of
from dpbench.wording import NOTHING

COMMAND = ("python", "-m", "dpbench.reproduce")


@dataclass(frozen=True)
class Entry(JudgedCell):
    """One place of a grid, with what is shown of it."""

    @property
    def value(self) -> float | None:
        """Our number: the mean over runs, or the difference of two means; None where there is none yet."""
        if not self.parts or not all(part.values for part in self.parts):
            return None
        first, *second = (part.mean for part in self.parts)
        return first - sum(second)

    @property
    def spread(self) -> float | None:
        """Sample standard deviation over runs (of a difference: of independent runs); None for fewer than two."""
        spreads = [part.spread for part in self.parts if part.spread is not None]
        return math.hypot(*spreads) if spreads and len(spreads) == len(self.parts) else None

    @property
    def count(self) -> int:
        """How many runs our number is the mean of; of a difference the smaller number of both."""
        return min((len(part.values) for part in self.parts), default=0)

    @property
    def wanted(self) -> int:
        """How many runs the cell asks for."""
        return self.cell.seeds

    @property
    def runs(self) -> tuple[Run, ...]:
        """The runs behind our number, with their seeds and folders."""
        return tuple(run for part in self.parts for run in part.runs)

    @property
    def broken(self) -> Mapping[str, str]:
        """How runs ended that stand in the way of our number, by their folders."""
        return {folder: how for part in self.parts for folder, how in part.failures.items()}

    @property
    def computed(self) -> bool:
        """Whether the number is computed, and has no runs."""
        return self.cell.metric == "computed"

    @property
    def printed(self) -> str:
        """The number as the paper has it; a dash where it prints none, unless it can be worked out, which is said."""
        if self.cell.printed is None:
            return NOTHING
        return self.cell.printed.text if self.cell.derived is None else f"not printed; derived {self.cell.printed.text}"

    @property
    def ours(self) -> str:
        """Mean ± sample standard deviation (number of runs); a dash, or how runs ended, where there is none."""
        value = self.value
        if value is None:
            ended = sorted(set(self.broken.values()))
            return ", ".join(ended) if ended else NOTHING
        text = number(cleared(value, self.cell), self.cell.unit)
        if self.computed:
            return text
        if self.spread is not None:
            text += f" ± {number(self.spread, self.cell.unit)}"
        of = "" if self.count >= self.wanted else f" of {self.wanted}"
        return f"{text} (n = {self.count}{of})"

    @property
    def verdict(self) -> str:
        """The outcome in words; a dash where nothing is printed to compare with."""
        return NOTHING if self.finding is None else str(self.finding.outcome)

    @property
    def remark(self) -> str | None:
        """Which eps was really spent, where that is more than the one asked for or unknown; None where it isn't."""
        over = [eps for part in self.parts for eps in part.overspent.values()]
        told = [f"spends eps {max(over):.4g}"] if over else []
        searches = [eps for part in self.parts for eps in part.search_overspent.values()]
        told += [f"all runs of the search spend eps {max(searches):.4g}"] if searches else []
        told += ["eps not proven"] * any(part.unproven for part in self.parts)
        return ", ".join(told) or None


@dataclass(frozen=True)
class Grid:
    """A table or figure with all that was found about it.

    Attributes:
        artefact: what the paper has.
        rows: labels on the row axes, of every row that has a cell; one row without labels where there are no row axes.
        columns: likewise.
        entries: by labels of row and column; places that the artefact lacks are missing.
        judgement: all findings.
        computed: numbers, panels and remarks of a computed artefact; None where it is trained or not computed yet.
        options: words of the command beside the artefact: where claims, records and options of one's own lie.
    """

    artefact: Artefact
    rows: tuple[Labels, ...]
    columns: tuple[Labels, ...]
    entries: Mapping[tuple[Labels, Labels], Entry]
    judgement: Judgement
    computed: Computed | None
    options: tuple[str, ...] = ()

    @property
    def row_axes(self) -> Labels:
        """Names of the row axes, one for each label of a row."""
        return tuple(self.artefact.rows)

    @property
    def column_axes(self) -> Labels:
        """Names of the column axes."""
        return tuple(self.artefact.columns)

    def at(self, row: Labels, column: Labels) -> Entry | None:
        """The entry at a place; None where the artefact has none."""
        return self.entries.get((row, column))

    @property
    def findings(self) -> tuple[Finding, ...]:
        """All verdicts: on values, then on claims."""
        return self.judgement.findings

    @property
    def claims(self) -> tuple[tuple[Claim, Finding], ...]:
        """Orders, trends and words with their verdicts; `claim.printed`: whether the paper bears them out."""
        return self.judgement.claims

    @property
    def source_of_numbers(self) -> str:
        """What the numbers are that bear claims out or don't: printed by the paper, or worked out from it."""
        printed = any(cell.printed is not None and cell.derived is None for cell in self.artefact.cells)
        return "The numbers that the paper prints" if printed else "The numbers worked out from what the paper prints"

    @property
    def whole(self) -> Finding | None:
        """The one finding about an artefact that is not reproducible."""
        return self.judgement.whole

    @property
    def has_numbers(self) -> bool:
        """Whether there is any number of ours."""
        return any(entry.value is not None for entry in self.entries.values())

    @property
    def unit(self) -> str | None:
        """The unit of all entries; None where they differ."""
        units = {entry.cell.unit for entry in self.entries.values()}
        return units.pop() if len(units) == 1 else None

    @property
    def needs(self) -> str | None:
        """What all runs take, in sentences, and where their hours are estimated; None for what is not trained."""
        if self.artefact.kind != Kind.TRAINED:
            return None
        found = cost(self.artefact.cells)
        sources = f" The hours are estimated in {' and '.join(found.sources)}." if found.sources else ""
        return f"{found.in_words()}.{sources}"

    @property
    def selection(self) -> tuple[str, ...]:
        """How the numbers are chosen: at which evaluation, among how many configurations, on which data."""
        return selection_of(self.artefact)

    @property
    def command(self) -> str:
        """What reproduces the artefact."""
        asked = (f"paper={self.artefact.paper}", f"artefact={self.artefact.name}")
        return shlex.join((*COMMAND, *asked, *self.options))

    @property
    def open(self) -> int:
        """How many findings wait for runs."""
        return sum(finding.outcome in (Outcome.NOT_RUN, Outcome.TOO_FEW_SEEDS) for finding in self.findings)


def command_of_all(grids: Sequence[Grid]) -> str:
    """What runs whatever is missing, and writes all of it anew."""
    return shlex.join((*COMMAND, *(grids[0].options if grids else ())))


def build_grid(artefact: Artefact, evidence: Evidence, options: tuple[str, ...] = ()) -> Grid:
    """Everything to show about an artefact, from the records as they are now.

    Args:
        artefact: what the paper has.
        evidence: the records.
        options: see `Grid`.
    """
    judgement = examine(artefact, evidence)
    entries = {
        (judged.cell.row, judged.cell.column): Entry(judged.cell, judged.parts, judged.finding)
        for judged in judgement.cells
    }
    return Grid(
        artefact=artefact,
        rows=tuple(dict.fromkeys(row for row, _ in entries)),
        columns=_in_order(artefact, {column for _, column in entries}),
        entries=entries,
        judgement=judgement,
        computed=evidence.computed(artefact),
        options=options,
    )


def _in_order(artefact: Artefact, columns: set[Labels]) -> tuple[Labels, ...]:
    """Columns as the axes list them; a row that lacks some must not change their order."""
    places = [{label: place for place, label in enumerate(labels)} for labels in artefact.columns.values()]

    def place(column: Labels) -> list[int]:
        return [of_axis[label] for of_axis, label in zip(places, column, strict=True)]

    return tuple(sorted(columns, key=place))


def runs_behind(grids: Iterable[Grid]) -> set[Path]:
    """The folders of all runs behind any number of ours."""
    return {run.folder for grid in grids for entry in grid.entries.values() for run in entry.runs}


def scorecard(grids: Iterable[Grid]) -> Scorecard:
    """All claims of artefacts, by outcome."""
    return Scorecard(tuple(finding for grid in grids for finding in grid.findings))
