"""results/index.html: all verdicts, tables, figures, runs and methods on one page, which needs nothing else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from dpbench.claims import SECTIONS
from dpbench.config import conf_folder
from dpbench.privacy.guarantee import NOT_COUNTED
from dpbench.privacy.tail import LONGER_SINCE
from dpbench.report.grid import Grid, command_of_all, runs_behind, scorecard
from dpbench.report.layout import metric_name, place_of
from dpbench.report.method_pages import method_pages
from dpbench.report.outcomes import BADGES
from dpbench.report.run_curve import curve_svg
from dpbench.report.run_records import read_runs
from dpbench.report.runs import Configuration, Runs
from dpbench.report.scorecard import repeated
from dpbench.report.shared_styles import share_styles
from dpbench.report.views import ArtefactView, PaperView, anchor

# A page of some 10 MB still opens on a phone; tables and verdicts of all papers take 2 to 3 of them.
RUNS_LIMIT = 5_000_000


def page(grids: Sequence[Grid], results_dir: Path) -> str:
    """The page as HTML.

    Args:
        grids: all tables and figures that it shows.
        results_dir: holds their pictures, <paper>/<artefact>.svg, so these are to be drawn before.
    """
    template = _environment().get_template("page.html.jinja")
    runs = read_runs(grids, results_dir)
    shown = _details(runs, template.environment)
    behind = runs_behind(grids)
    views = [ArtefactView(grid, results_dir, frozenset(shown)) for grid in grids]
    drawn = {view.anchor: view.figure for view in views if view.figure is not None}
    figures, figure_styles = share_styles(list(drawn.values()), "drawn")
    papers = [PaperView(key, tuple(view for view in views if view.grid.artefact.paper == key)) for key in SECTIONS]
    return template.render(
        papers=[paper for paper in papers if paper.artefacts],
        overall=scorecard(grids),
        command=command_of_all(grids),
        repeated=repeated(grids),
        looks=BADGES,
        behind=behind,
        configurations={folder.parent for folder in behind},
        runs=runs,
        figures=dict(zip(drawn, map(Markup, figures), strict=True)),
        figure_styles=Markup(figure_styles),
        shown=shown,
        left_out=len(runs.configurations) - len(shown),
        limit=RUNS_LIMIT // 1_000_000,
        not_counted=NOT_COUNTED,
        longer_since=LONGER_SINCE,
        methods=method_pages(conf_folder().parent / "docs" / "methods"),
    )


def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("dpbench.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"anchor": anchor, "called": place_of, "metric": metric_name}
    return environment


def _details(runs: Runs, environment: Environment) -> Mapping[str, Markup]:
    """The details of configurations by their hash, as many as fit; where they don't, with smaller curves first."""
    template: Any = environment.get_template("run.html.jinja").module
    curves = {one.digest: _curve(one) for one in runs.configurations}
    texts: dict[str, Markup] = {}
    for group in runs.groups:
        for one in group.configurations:
            texts[one.digest] = template.details(one, group, curves[one.digest])
    if sum(map(len, texts.values())) > RUNS_LIMIT:
        for one in runs.configurations:
            curve = curves[one.digest]
            if curve is not None:
                texts[one.digest] = texts[one.digest].replace(curve, _curve(one, merged=True) or "")
    sizes = accumulate(map(len, texts.values()))
    return {digest: text for (digest, text), size in zip(texts.items(), sizes, strict=True) if size <= RUNS_LIMIT}


def _curve(one: Configuration, *, merged: bool = False) -> Markup | None:
    name, unit = one.score
    return curve_svg([run.points for run in one.runs], name, unit, merged=merged)
