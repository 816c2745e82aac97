"""The written output on Weights & Biases: a run with tables and pictures, a report about them, a workspace of the runs.

Reports and workspaces are built here and saved by scripts/wandb_report.py, since W&B keeps them only for accounts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpbench.claims import SECTIONS, Outcome
from dpbench.config.schema import TrackerSettings
from dpbench.markdown import table
from dpbench.report.grid import Grid, scorecard
from dpbench.report.layout import heading_of, title_of
from dpbench.report.scorecard import OWN
from dpbench.report.selection import selection_of
from dpbench.tracking import log_once

if TYPE_CHECKING:
    import wandb_workspaces.reports.v2 as reports
    from wandb_workspaces.workspaces import Workspace

JOB_TYPE = "report"
COLUMNS = ("place", "printed", "ours", "verdict", "detail")


def log_output(
    settings: TrackerSettings, results_dir: Path, grids: Sequence[Grid], say: Callable[[str], object]
) -> bool:
    """Log the tables and pictures that `write_output` has written, and the scorecard, as a W&B run.

    Args:
        settings: of the tracker; offline where no key is known.
        results_dir: where the pictures are.
        grids: of the artefacts.
        say: told of a failure, which stops nothing.

    Returns:
        Whether W&B records.
    """

    def content() -> dict[str, Any]:
        import wandb

        logged: dict[str, Any] = {"scorecard": wandb.Table(columns=["paper", *map(str, Outcome)], data=_counts(grids))}
        for grid in grids:
            name = grid.artefact.stem
            logged[name] = wandb.Table(columns=list(COLUMNS), data=_lines(grid))
            picture = results_dir / f"{name}.png"
            if picture.exists():
                logged[f"{name}_picture"] = wandb.Image(str(picture), caption=title_of(grid.artefact))
        return logged

    return log_once(settings, results_dir, job_type=JOB_TYPE, name="tables and figures", content=content, say=say)


def _counts(grids: Sequence[Grid]) -> list[list[Any]]:
    """Claims of each paper by outcome, and dpbench's own."""
    card = scorecard(grids)
    named = {**{SECTIONS[key]: of_paper for key, of_paper in card.papers.items()}, OWN: card.own}
    return [[name, *(one.counts.get(outcome, 0) for outcome in Outcome)] for name, one in named.items()]


def _lines(grid: Grid) -> list[list[str]]:
    """Cells, then claims, with printed, ours and verdict."""
    cells = [
        [entry.cell.place, entry.printed, entry.ours, entry.verdict, entry.finding.detail if entry.finding else ""]
        for entry in grid.entries.values()
    ]
    findings = [grid.whole] if grid.whole is not None else [finding for _, finding in grid.claims]
    return cells + [[finding.claim, "", "", str(finding.outcome), finding.detail] for finding in findings]


def build_report(settings: TrackerSettings, grids: Sequence[Grid]) -> reports.Report:
    """The report: the scorecard, then each paper's tables and pictures as the last run of `log_output` logged them."""
    import wandb_workspaces.reports.v2 as reports
    from wandb_workspaces import expr

    # Without a project of its own a set has the runs of the report's.
    ours = reports.Runset(name="tables", filters=expr.And(expr.Metric("JobType") == JOB_TYPE))
    blocks: list[Any] = [
        reports.P("What five papers claim about private optimizers, and what runs under one ledger came to."),
        reports.TableOfContents(),
        reports.H1("Scorecard"),
        reports.MarkdownBlock(_scorecard(grids)),
    ]
    for paper, name in SECTIONS.items():
        own = [grid for grid in grids if grid.artefact.paper == paper]
        if not own:
            continue
        blocks.append(reports.H1(name))
        keys = [f"{paper}/{grid.artefact.name}_picture" for grid in own]
        blocks.append(reports.PanelGrid(runsets=[ours], panels=[reports.MediaBrowser(title=name, media_keys=keys)]))
        for grid in own:
            blocks += [
                reports.H2(heading_of(grid.artefact)),
                reports.MarkdownBlock(_section(grid)),
            ]
    return reports.Report(
        project=settings.project,
        entity=settings.entity or "",
        title="dpbench: printed and reproduced",
        description="Written by scripts/wandb_report.py from the records of runs.",
        blocks=blocks,
        width="fluid",
    )


def _scorecard(grids: Sequence[Grid]) -> str:
    return table(["paper", *Outcome], _counts(grids), numbers=tuple(Outcome))


def _section(grid: Grid) -> str:
    """An artefact in Markdown, with how its numbers are chosen."""
    chosen = "\n".join(f"- {line}" for line in selection_of(grid.artefact))
    return f"{table(COLUMNS, _lines(grid))}\n\n{chosen}\n\n`{grid.command}`"


def build_workspace(settings: TrackerSettings) -> Workspace:
    """The workspace of the training runs: accuracy, loss and eps over epochs, grouped by algorithm."""
    import wandb_workspaces.reports.v2 as reports
    from wandb_workspaces import expr, workspaces

    algorithm = reports.Config("algo.name")

    def line(metric: str, title: str) -> reports.LinePlot:
        return reports.LinePlot(title=title, x="epoch", y=[metric], groupby=algorithm, groupby_rangefunc="stddev")

    training = workspaces.Section(
        name="Training",
        panels=[
            line("test_accuracy", "Test accuracy"),
            line("test_loss", "Test loss"),
            line("train_loss", "Loss on drawn samples, not private"),
            line("gradient_norm", "Mean gradient norm before clipping, not private"),
            line("above_threshold", "Share of norms above the threshold, not private"),
            line("threshold", "Clipping threshold"),
            line("eps", "eps spent"),
        ],
        is_open=True,
    )
    ends = workspaces.Section(
        name="Ends",
        panels=[
            reports.BarPlot(title="Test accuracy after the last step", metrics=["test_accuracy"], groupby=algorithm),
            reports.ScatterPlot(title="Accuracy over eps", x="eps", y="test_accuracy"),
        ],
    )
    return workspaces.Workspace(
        entity=settings.entity or "",
        project=settings.project,
        name="dpbench",
        sections=[training, ends],
        runset_settings=workspaces.RunsetSettings(filters=expr.And(expr.Metric("JobType") == "train")),
    )
