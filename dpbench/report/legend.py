"""The legend of a picture, in rows below its panels."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from matplotlib.lines import Line2D

from dpbench.claims.computed_file import Style
from dpbench.report.palette import BASELINE, Look
from dpbench.report.picture import Picture, Plot

# Inches that an entry takes, and each of its letters.
ENTRY, LETTER = 0.42, 0.06

Entry = tuple[Line2D, str]


def rows_of(picture: Picture, looks: Mapping[str, Look], width: float) -> list[list[Entry]]:
    """The entries in rows.

    Args:
        picture: whose lines are told.
        looks: of its lines.
        width: that a row may have, in inches.
    """
    rows: list[list[Entry]] = []
    used = 0.0
    for handle, name in _entries(picture, looks):
        wide = ENTRY + LETTER * len(name)
        if not rows or used + wide > width:
            rows.append([])
            used = 0.0
        rows[-1].append((handle, name))
        used += wide
    return rows


def _entries(picture: Picture, looks: Mapping[str, Look]) -> Iterator[Entry]:
    """Each line, then hollow and filled marks where there are printed numbers."""
    plots = [panel for panel in picture.panels if isinstance(panel, Plot)]  # rankings have the names at their rows
    series = [one for plot in plots for one in plot.series if one.curve.x]
    ours = any(not one.curve.printed for one in series)
    if len(picture.names) > 1 or picture.methods:
        for name in dict.fromkeys(one.curve.name for one in series):
            of_name = [one for one in series if one.curve.name == name]
            look = looks[name]
            marked = any(one.curve.printed or one.marked for one in of_name)
            handle = Line2D([], [], color=look.colour, linestyle=look.dashes, marker=look.mark if marked else "")
            handle.set_markersize(4)
            if all(one.curve.style == Style.BARS for one in of_name):
                handle.set(linestyle="none", marker="s", markersize=6)
            if not ours:
                handle.set(markerfacecolor="none", linestyle=":", markersize=6)
            yield handle, name
    if any(one.curve.printed for one in series):
        hollow = Line2D([], [], color=BASELINE, linestyle="none", marker="o", markersize=6)
        hollow.set_markerfacecolor("none")
        yield hollow, "printed"
        if ours:
            yield Line2D([], [], color=BASELINE, marker="o", markersize=3.5), "ours"
