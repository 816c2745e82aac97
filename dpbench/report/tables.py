"""An artefact as Markdown and as CSV: printed, ours and verdict side by side, and below what explains them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from dpbench.claims import Cell, Kind, Outcome, Scorecard
from dpbench.claims.schema import Words
from dpbench.markdown import table
from dpbench.report.grid import Entry, Grid
from dpbench.report.layout import title_of
from dpbench.spreadsheet import csv_of
from dpbench.wording import NOTHING, number_of

COLUMNS = (
    "metric",
    "unit",
    "statistic",
    "printed",
    "printed_spread",
    "ours",
    "ours_spread",
    "runs",
    "runs_wanted",
    "verdict",
    "detail",
    "values",
    "seeds",
    "records",
    "eps_spent",
    "eps_published",
    "overrides",
)
POINTS = ("panel", "curve", "printed", "x", "y")


def as_markdown(grid: Grid, picture: str | None = None) -> str:
    """The whole page of an artefact.

    Args:
        grid: of the artefact.
        picture: file name of its picture; None where there is none.
    """
    artefact = grid.artefact
    parts = [f"# {title_of(artefact)}", f"Source: {artefact.source}. {_kind(grid)}", _summary(Scorecard(grid.findings))]
    if picture is not None:
        parts.append(f"![{title_of(artefact)}]({picture})")
    if grid.entries:
        parts += _table(grid)
    readings = [f"{text} ({source})" for source, text in artefact.readings.items()]
    remarks = () if grid.computed is None else grid.computed.remarks
    for title, body in (
        ("Claims", _claims(grid)),
        ("Remarks", _list(remarks)),
        ("How the numbers are chosen", _list(grid.selection)),
        ("Deviations", _list(artefact.deviations)),
        ("Readings", _list(readings)),
    ):
        if body:
            parts += [f"## {title}", body]
    if artefact.kind != Kind.NOT_REPRODUCIBLE:
        parts += ["## To reproduce", f"    {grid.command}"]
        parts += [f"It needs {grid.needs}"] if grid.needs is not None else []
    return "\n\n".join(parts) + "\n"


def _kind(grid: Grid) -> str:
    artefact = grid.artefact
    if artefact.kind == Kind.TRAINED:
        return "Trained."
    return f"{str(artefact.kind).capitalize()}: {artefact.reason}."


def _summary(card: Scorecard) -> str:
    """How many claims had each outcome, in a line: the paper's, then dpbench's own."""
    lines = []
    if card.published.findings:
        lines.append(f"**{number_of(len(card.published.findings), 'claim')}**: {card.published.in_words}.")
    if card.own.findings:
        lines.append(f"Of dpbench's own, **{number_of(len(card.own.findings), 'claim')}**: {card.own.in_words}.")
    return " ".join(lines) or "No claims."


def _list(lines: Iterable[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)


def _table(grid: Grid) -> Iterator[str]:
    """A line for each place; an axis with one label is told once, above."""
    axes = grid.artefact.axes
    wide = [axis for axis, labels in axes.items() if len(labels) > 1]
    fixed = ", ".join(f"{axis} {labels[0]}" for axis, labels in axes.items() if len(labels) == 1)
    unit = grid.unit
    told = [f"Numbers in {unit}."] if unit else []
    told += [f"All with {fixed}."] if fixed else []
    told += (
        ["Ours: mean ± sample standard deviation over n runs."] if any(entry.runs for entry in _entries(grid)) else []
    )
    if told:
        yield " ".join(told)
    rows = []
    for entry in _entries(grid):
        own = "" if unit is not None or entry.cell.unit == "" else f" {entry.cell.unit}"
        printed, ours = (text if text == NOTHING else text + own for text in (entry.printed, entry.ours))
        rows.append((*(entry.cell.at[axis] for axis in wide), printed, ours, entry.verdict, _note(entry)))
    yield table((*wide, "printed", "ours", "verdict", "note"), rows, numbers=("printed", "ours"))


def _entries(grid: Grid) -> Iterator[Entry]:
    for row in grid.rows:
        for column in grid.columns:
            entry = grid.at(row, column)
            if entry is not None:
                yield entry


def _note(entry: Entry) -> str:
    """What a reader of the line must know; what missing runs need stands below the table."""
    finding = entry.finding
    if entry.cell.quoted is not None:
        return f"quoted from {entry.cell.quoted}"
    if finding is None:
        return entry.remark or ""
    return "" if finding.outcome == Outcome.NOT_RUN else finding.detail


def _claims(grid: Grid) -> str:
    rows = []
    for claim, finding in grid.claims:
        contradicted = not isinstance(claim, Words) and not claim.printed
        says = f"{claim.says} *({grid.source_of_numbers} do not bear it out.)*" if contradicted else claim.says
        says += " *(Not the paper's own claim.)*" if finding.own else ""
        rows.append((says, finding.outcome, finding.detail))
    return table(("claim", "verdict", "note"), rows) if rows else ""


def as_csv(grid: Grid) -> str | None:
    """A line for each cell with exact numbers and its records; of curves without cells one for each point.

    Returns:
        None where there is neither.
    """
    if grid.entries:
        header = (*(f"at_{axis}" for axis in grid.artefact.axes), *COLUMNS)
        return csv_of([header, *map(_exact, _entries(grid))])
    if grid.computed is None or not grid.computed.panels:
        return None
    curves = [(panel.title, curve) for panel in grid.computed.panels for curve in panel.curves]
    points = [
        (title, curve.name, curve.printed, x, y)
        for title, curve in curves
        for x, y in zip(curve.x, curve.y, strict=True)
    ]
    return csv_of([POINTS, *points])


def _exact(entry: Entry) -> list[str]:
    cell, printed, finding = entry.cell, entry.cell.printed, entry.finding
    runs = entry.runs
    values = [value for part in entry.parts for value in part.values]
    return [
        *cell.at.values(),
        cell.metric,
        cell.unit,
        cell.statistic,
        _exactly(printed.value if printed is not None else None),
        _exactly(printed.spread if printed is not None else None),
        _exactly(entry.value),
        _exactly(entry.spread),
        str(entry.count),
        str(entry.wanted),
        "" if finding is None else str(finding.outcome),
        "" if finding is None else finding.detail,
        " ".join(map(repr, values)),
        " ".join(str(run.seed) for run in runs),
        " ".join(f"{run.folder.parent.name}/{run.folder.name}" for run in runs),
        " ".join(_exactly(run.eps) for run in runs if run.eps is not None),
        " ".join(_exactly(run.published_eps) for run in runs if run.published_eps is not None),
        _overrides(cell, entry),
    ]


def _overrides(cell: Cell, entry: Entry) -> str:
    """Those of the runs that count, or of all candidates while there are none."""
    found = [" ".join(part.overrides) for part in entry.parts if part.overrides is not None]
    if found:
        return " minus ".join(found)
    return " ".join(f"{key}={value}" for key, value in cell.overrides.items()) if cell.runs else ""


def _exactly(value: float | None) -> str:
    return "" if value is None else repr(value)
