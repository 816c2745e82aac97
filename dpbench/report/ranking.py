"""Drawing rankings: a row for each name, its number a mark with a bar of one standard deviation."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from dpbench.report.palette import BASELINE, Look
from dpbench.report.picture import Ranking

ROW = 0.145  # inches
LETTER = 0.058  # inches, of a name
DIGIT, APART = 0.055, 0.08  # inches, of a tick's label and between two of them
# A mark this many times as far below the middle as the best one is above it leaves the panel; an arrow has its number.
FAR = 4.0


def height_of(panel: Ranking) -> float:
    """Inches that the rows take."""
    return ROW * max(len(panel.rows), 4)


def margin_of(panel: Ranking) -> float:
    """Inches that the names take, left of the first panel."""
    return 0.15 + LETTER * max(map(len, panel.rows))


def draw_ranking(axes: Axes, panel: Ranking, looks: Mapping[str, Look], *, width: float, named: bool) -> None:
    """Draw a panel into axes.

    Args:
        axes: empty ones.
        panel: what to draw.
        looks: of the names.
        width: of the axes, in inches.
        named: whether the names stand beside it.
    """
    known = sorted(value for value in panel.values if value is not None)
    edge = _edge(known)
    for place, (name, value, spread) in enumerate(zip(panel.rows, panel.values, panel.spreads, strict=True)):
        colour = looks[name].colour
        if value is None:
            continue
        if value < edge:
            axes.annotate(f"◂ {value:.3g}", (0.02, place), xycoords=("axes fraction", "data"), va="center", size=6)
            continue
        if spread is not None:
            axes.plot([value - spread, value + spread], [place, place], color=colour, linewidth=0.9)
        axes.plot([value], [place], color=colour, marker="o", linestyle="none")
    if panel.reference is not None:
        axes.axvline(panel.reference, color=BASELINE, linewidth=0.7, linestyle=":", zorder=1)
    shown = [
        end
        for value, spread in zip(panel.values, panel.spreads, strict=True)
        if value is not None and value >= edge
        for end in (value - (spread or 0.0), value + (spread or 0.0))
    ]
    if shown:
        room = 0.08 * (max(shown) - min(shown)) or 1.0
        axes.set_xlim(min(shown) - room, max(shown) + room)
    axes.set_ylim(len(panel.rows) - 0.4, -0.6)
    axes.set_yticks(range(len(panel.rows)), panel.rows if named else [""] * len(panel.rows))
    axes.tick_params(axis="y", length=0)
    axes.xaxis.set_major_locator(_ticks(*axes.get_xlim(), width))


def _ticks(low: float, high: float, width: float) -> MaxNLocator:
    """At most three intervals, fewer where labels would touch."""
    for intervals in (3, 2):
        locator = MaxNLocator(intervals)
        ticks = [value for value in locator.tick_values(low, high) if low <= value <= high]
        label = DIGIT * max(len(f"{value:g}") for value in ticks)
        if len(ticks) < 2 or (ticks[1] - ticks[0]) / (high - low) * width >= label + APART:
            break
    return locator


def _edge(known: list[float]) -> float:
    """What the panel shows at least; numbers are in ascending order."""
    if len(known) < 4:
        return float("-inf")
    middle = known[len(known) // 2]
    far = middle - FAR * max(known[-1] - middle, 1e-9)
    return next((upper for lower, upper in pairwise(known) if lower < far <= upper), known[0])
