"""What it takes to run an artefact: data, weights, graphics processor time."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from dpbench.claims.notation import Candidate
from dpbench.claims.schema import Cell
from dpbench.wording import number_of


@dataclass(frozen=True)
class Requirement:
    """What cells need together.

    Attributes:
        datasets: by name.
        weights: of pretrained models, by name.
        runs: trainings; the winner of a search is run again with further seeds.
        hours: least and most hours on a GPU; None where the specification estimates none of the runs.
        unknown: runs without an estimate.
        sources: of the estimates.
    """

    datasets: tuple[str, ...]
    weights: tuple[str, ...]
    runs: int
    hours: tuple[float, float] | None
    unknown: int
    sources: tuple[str, ...]

    def in_words(self) -> str:
        """One line: what it needs, and how long it takes."""
        parts = [f"data {', '.join(self.datasets)}"] if self.datasets else []
        parts += [f"weights {', '.join(self.weights)}"] if self.weights else []
        parts.append(number_of(self.runs, "run"))
        if self.hours is None:
            parts.append("GPU time not estimated")
        else:
            least, most = (f"{hours:.3g}" if hours < 1000 else f"{hours:,.0f}" for hours in self.hours)
            span = f"{least} GPU hours" if least == most else f"{least} to {most} GPU hours"
            parts.append(span if not self.unknown else f"{span} for {self.runs - self.unknown:,} of them")
        return "; ".join(parts)


def runs_of(cell: Cell) -> int:
    """Trainings behind a cell: every candidate of a search once, and its winner with all seeds."""
    return len(cell.candidates) + cell.seeds - 1 if cell.runs else 0


def cost(cells: Iterable[Cell]) -> Requirement:
    """What cells take together; runs that several of them share are counted once."""
    distinct: dict[tuple[Candidate, ...], Cell] = {}
    for cell in cells:
        if cell.runs:
            known = distinct.setdefault(cell.candidates, cell)
            if cell.seeds > known.seeds:
                distinct[cell.candidates] = cell
    found = list(distinct.values())
    timed = [(runs_of(cell), cell.needs.hours) for cell in found if cell.needs.hours is not None]
    hours = (sum(runs * span[0] for runs, span in timed), sum(runs * span[1] for runs, span in timed))
    runs = sum(runs_of(cell) for cell in found)
    return Requirement(
        datasets=tuple(sorted({cell.overrides["dataset"] for cell in found if "dataset" in cell.overrides})),
        weights=tuple(sorted({cell.needs.weights for cell in found if cell.needs.weights is not None})),
        runs=runs,
        hours=hours if timed else None,
        unknown=runs - sum(count for count, _ in timed),
        sources=tuple(sorted({cell.needs.source for cell in found if cell.needs.source is not None})),
    )
