"""The content of a picture, numbers and words only."""

from __future__ import annotations

from dataclasses import dataclass

from dpbench.claims.computed_file import Axis, Curve, Style
from dpbench.claims.notation import Labels

MARKED = 40  # points of a line that are marked one by one


@dataclass(frozen=True)
class Series:
    """One line of marks.

    Attributes:
        curve: name, numbers and style; `printed` for numbers that the paper prints, drawn hollow.
        spread: standard deviation at each point; None where there is none to show.
        band: whether the curve is one over a course: a band for the spread, and no marks.
        joined: whether marks are joined by a line.
    """

    curve: Curve
    spread: tuple[float, ...] | None = None
    band: bool = False
    joined: bool = True

    @property
    def marked(self) -> bool:
        """Whether points are marked: not where they are too many, nor on curves over a course."""
        style, count = self.curve.style, len(self.curve.x)
        return style in (Style.MARKS, Style.BARS) or (style == Style.LINE and not self.band and count <= MARKED)


@dataclass(frozen=True)
class Plot:
    """A pair of axes with lines.

    Attributes:
        title: which panel it is; empty where there is one.
        x: its axis.
        y: likewise.
        series: the lines, printed numbers before ours.
        ticks: places and labels on the x axis; None for those that drawing chooses.
        from_zero: whether the x axis begins at zero.
    """

    title: str
    x: Axis
    y: Axis
    series: tuple[Series, ...]
    ticks: tuple[tuple[float, str], ...] | None = None
    from_zero: bool = False


@dataclass(frozen=True)
class Map:
    """Numbers as colours.

    Attributes:
        title: which panel it is; empty where there is one.
        x: name of the axis from left to right.
        y: name of the axis from bottom to top.
        columns: labels along x.
        rows: labels along y.
        values: number at each row and column; None where there is none.
        label: what the numbers are.
    """

    title: str
    x: str
    y: str
    columns: Labels
    rows: Labels
    values: tuple[tuple[float | None, ...], ...]
    label: str


@dataclass(frozen=True)
class Ranking:
    """Names from top to bottom with a number each; panels of a picture stand side by side and share the names.

    Attributes:
        title: which panel it is; empty where there is one.
        label: what the numbers and the line at the reference are.
        rows: the names, the same in each panel.
        values: number of each; None where there is none.
        spreads: standard deviation of each; None where there is none.
        reference: the number that others are compared with; None where it is missing.
    """

    title: str
    label: str
    rows: Labels
    values: tuple[float | None, ...]
    spreads: tuple[float | None, ...]
    reference: float | None


@dataclass(frozen=True)
class Picture:
    """A figure.

    Attributes:
        title: paper, artefact and what it shows.
        subtitle: how much of it is there.
        panels: all of one kind.
        names: of the lines, in the order of the legend.
        methods: whether lines are methods, which have the same colours in all pictures.
    """

    title: str
    subtitle: str
    panels: tuple[Plot | Map | Ranking, ...]
    names: Labels
    methods: bool
