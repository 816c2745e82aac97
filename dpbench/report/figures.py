"""Drawing: a picture becomes a matplotlib figure, its files have the same bytes for the same picture.

Widths are those of a phone, so that letters keep their size there; all else scales up.
"""

from __future__ import annotations

import io
import itertools
import math
import textwrap
from collections.abc import Sequence
from functools import cache
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, MaxNLocator, NullLocator
from PIL import Image

from dpbench.claims.computed_file import Style
from dpbench.claims.draw import numeric
from dpbench.report import compact_svg, palette, ranking, svg_text
from dpbench.report.legend import rows_of
from dpbench.report.picture import Map, Picture, Plot, Ranking, Series
from dpbench.sources import digest_of, sources_of

WIDTH = 4.1  # inches; 390 pixels of a phone at 96 to the inch
LEFT, RIGHT = 0.5, 0.13
PANEL = (1.35, 2.2)  # height of one panel among several, and of one alone
LETTERS = 54  # of the title's size, that fit into the width
PANEL_LETTERS = 27  # of a panel's title, where two stand side by side
LETTER = 0.055  # inches, of a tick's label
BAR = 0.6  # inches beside a map, for its scale
PIXELS = 200  # to the inch, of a PNG
COLOURS = 96  # of a PNG, all that a picture has but for the blurring of edges
STYLE: Any = {
    "font.family": svg_text.FONT,  # comes with matplotlib
    "font.size": 7.5,
    "axes.titlesize": 7.5,
    "axes.titley": 1.0,  # or each title is measured against all that could be above its axes
    "axes.labelsize": 7.5,
    "xtick.labelsize": 6.5,
    "ytick.labelsize": 6.5,
    "legend.fontsize": 7,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.6,
    "axes.grid": True,
    "grid.color": "#e4e4e4",
    "grid.linewidth": 0.5,
    "axes.axisbelow": True,
    "lines.linewidth": 1.2,
    "lines.markersize": 3.5,
    "svg.fonttype": "none",  # text, which `svg_text` makes take the same room everywhere
    "svg.hashsalt": "dpbench",
}


def fingerprint(picture: Picture) -> str:
    """Equal for pictures that are drawn alike: of their content, this program and matplotlib's version."""
    return digest_of((), picture, _program(), mpl.__version__)[:16]


@cache
def _program() -> str:
    """Of what draws."""
    return digest_of(sources_of(__name__))


def files_of(picture: Picture) -> tuple[bytes, bytes]:
    """The picture as SVG, which holds the fingerprint, and as PNG."""
    figure = draw(picture)
    svg, png = io.BytesIO(), io.BytesIO()
    with mpl.rc_context(STYLE):
        description = {"Date": None, "Creator": None, "Title": picture.title, "Description": fingerprint(picture)}
        figure.savefig(svg, format="svg", metadata=description)
        figure.savefig(png, format="png", dpi=PIXELS)
    small = io.BytesIO()
    Image.open(png).convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE).save(small, "png", optimize=True)
    return compact_svg.compact(svg_text.settled(svg.getvalue())), small.getvalue()


def draw(picture: Picture) -> Figure:
    """The figure: title, panels in one or two columns, legend below them."""
    with mpl.rc_context(STYLE):
        return _Drawing(picture).figure


class _Drawing:
    """Lays out in inches from the top, for nothing may overlap whatever the number of lines of text."""

    def __init__(self, picture: Picture) -> None:
        self.picture = picture
        self.looks = palette.looks_of(picture.names, methods=picture.methods)
        title = textwrap.wrap(picture.title, LETTERS)
        subtitle = textwrap.wrap(picture.subtitle, LETTERS + 14)
        count = len(picture.panels)
        ranked = isinstance(picture.panels[0], Ranking)
        self.columns = columns = count if ranked else 1 if count == 1 or isinstance(picture.panels[0], Map) else 2
        rows = -(-count // columns)
        height = self._height(columns)
        top = 0.1 + 0.15 * len(title) + 0.13 * len(subtitle) + 0.12
        head, foot = self._head(), self._foot()
        legend = rows_of(picture, self.looks, WIDTH - 0.2)
        total = top + rows * (head + height + foot) + 0.16 * len(legend) + 0.1
        self.figure = Figure(figsize=(WIDTH, total), facecolor="white")
        self.total = total
        y = 0.1
        for line in title:
            y += 0.15
            self._text(line, y, weight="bold", size=8)
        for line in subtitle:
            y += 0.13
            self._text(line, y, color="#666666", size=6.8)
        for place, panel in enumerate(picture.panels):
            left, width = self._across(place % columns, panel)
            upper = top + (place // columns) * (head + height + foot) + head
            box = (left / WIDTH, 1 - (upper + height) / total, width / WIDTH, height / total)
            axes = self.figure.add_axes(box)
            if panel.title:
                axes.set_title("\n".join(self._title_of(panel)), loc="left", pad=3)
            if isinstance(panel, Map):
                self._map(axes, panel)
            elif isinstance(panel, Ranking):
                ranking.draw_ranking(axes, panel, self.looks, width=width, named=place == 0)
            else:
                self._plot(axes, panel)
        if isinstance(picture.panels[0], Ranking):
            # Once for all: panels are too narrow for it.
            middle = (ranking.margin_of(picture.panels[0]) + WIDTH) / 2 / WIDTH
            self.figure.text(middle, 0.1 / total, picture.panels[0].label, ha="center", va="bottom")
        self._legend(legend, top + rows * (head + height + foot))

    def _across(self, column: int, panel: Plot | Map | Ranking) -> tuple[float, float]:
        """Left end and width of the panels of a column."""
        if isinstance(panel, Ranking):
            names = ranking.margin_of(panel)
            width = (WIDTH - names - self.columns * RIGHT) / self.columns
            return names + column * (width + RIGHT), width
        width = (WIDTH - self.columns * (LEFT + RIGHT)) / self.columns
        return column * (LEFT + width + RIGHT) + LEFT, width

    def _height(self, columns: int) -> float:
        panel = self.picture.panels[0]
        if isinstance(panel, Map):
            return max(1.2, 0.24 * len(panel.rows))
        if isinstance(panel, Ranking):
            return ranking.height_of(panel)
        return PANEL[columns == 1]

    def _title_of(self, panel: Plot | Map | Ranking) -> list[str]:
        """The lines of a panel's title."""
        return textwrap.wrap(panel.title, LETTERS if self.columns == 1 else PANEL_LETTERS)

    def _head(self) -> float:
        """Room for the titles above panels."""
        lines = max(len(self._title_of(panel)) for panel in self.picture.panels)
        return 0.08 + 0.12 * lines

    def _foot(self) -> float:
        """Room for the labels below a panel, which stand upright where there are many."""
        panel = self.picture.panels[0]
        if isinstance(panel, Map):
            return 0.42 if not _upright(panel) else 0.35 + LETTER * max(map(len, panel.columns))
        if isinstance(panel, Ranking):
            return 0.32
        lines = max((label.count("\n") for label in self._tick_labels(panel, 2)), default=0)
        return 0.42 + 0.1 * lines

    def _text(self, text: str, y: float, **how: Any) -> None:
        self.figure.text(0.1 / WIDTH, 1 - y / self.total, text, va="baseline", ha="left", **how)

    def _plot(self, axes: Axes, plot: Plot) -> None:
        for series in plot.series:
            if series.curve.x:
                self._series(axes, series)
        if plot.x.log:
            axes.set_xscale("log")
        if plot.y.log:
            axes.set_yscale("log")
        else:
            axes.yaxis.set_major_locator(MaxNLocator(5))
        axes.margins(x=0.06, y=0.1)
        values = [y for series in plot.series for y in series.curve.y if math.isfinite(y)]
        if not values:
            axes.text(0.5, 0.5, "no number yet", transform=axes.transAxes, ha="center", color=palette.BASELINE)
            axes.set_yticks([])
        elif min(values) == max(values) and not plot.y.log:
            axes.set_ylim(values[0] - (abs(values[0]) / 10 or 1), values[0] + (abs(values[0]) / 10 or 1))
        if plot.ticks is not None:
            axes.xaxis.set_major_locator(FixedLocator([place for place, _ in plot.ticks]))
            axes.xaxis.set_minor_locator(NullLocator())
            axes.set_xticklabels(self._tick_labels(plot, self.columns))
            self._keep_in_view(axes, plot)
        elif not values:
            axes.set_xticks([])
            axes.set_xticks([], minor=True)
        elif not plot.x.log:
            if plot.from_zero:
                axes.set_xlim(left=0, right=max((x for one in plot.series for x in one.curve.x), default=1) * 1.05)
            axes.xaxis.set_major_locator(MaxNLocator(4))
        axes.set_xlabel(plot.x.label, labelpad=1.5)
        axes.set_ylabel(plot.y.label, labelpad=2)

    @staticmethod
    def _tick_labels(plot: Plot, columns: int) -> list[str]:
        """Names are cut into lines of the room that each has; of crowded numbers every second is left out."""
        ticks = [label for _, label in plot.ticks or ()]
        room = int((WIDTH / columns - LEFT - RIGHT) / (LETTER * max(len(ticks), 1)))
        longest = max(map(len, ticks), default=0)
        if numeric(tuple(ticks)):
            return ticks if longest < room else [label if place % 2 == 0 else "" for place, label in enumerate(ticks)]
        return ticks if longest <= room else ["\n".join(textwrap.wrap(label, max(room, 5))) for label in ticks]

    @staticmethod
    def _keep_in_view(axes: Axes, plot: Plot) -> None:
        """All labels of the axis, also where no number is yet."""
        places = [place for place, _ in plot.ticks or ()]
        low, high = min(places), max(places)
        if plot.x.log:
            room = (high / low) ** 0.06
            axes.set_xlim(low / room, high * room)
        else:
            room = 0.06 * (high - low) if all(series.joined for series in plot.series) else 0.5
            axes.set_xlim(low - (room or 0.5), high + (room or 0.5))

    def _series(self, axes: Axes, series: Series) -> None:
        curve = series.curve
        colour, mark, dashes = self.looks[curve.name]
        if curve.style == Style.BARS:
            axes.bar(curve.x, curve.y, color=colour, width=_bar_width(curve.x), alpha=0.7)
            return
        joined = curve.style in (Style.LINE, Style.STEPS) and series.joined
        how: dict[str, Any] = {"color": colour, "drawstyle": "steps-post" if curve.style == Style.STEPS else "default"}
        if curve.printed:
            how |= {"marker": mark, "markerfacecolor": "none", "markersize": 6, "markeredgewidth": 0.9}
            how |= {"linestyle": ":" if joined else "none", "linewidth": 0.7, "zorder": 2}
            axes.plot(curve.x, curve.y, **how)
            return
        how |= {"linestyle": dashes if joined else "none", "zorder": 3}
        if series.marked:
            how["marker"] = mark
        axes.plot(curve.x, curve.y, **how)
        if series.spread is None:
            return
        if series.band:
            low = [y - spread for y, spread in zip(curve.y, series.spread, strict=True)]
            high = [y + spread for y, spread in zip(curve.y, series.spread, strict=True)]
            axes.fill_between(curve.x, low, high, color=colour, alpha=0.18, linewidth=0, zorder=1)
        else:
            axes.errorbar(
                curve.x, curve.y, series.spread, fmt="none", ecolor=colour, elinewidth=0.8, capsize=1.8, capthick=0.8
            )

    def _map(self, axes: Axes, panel: Map) -> None:
        values = [[float("nan") if value is None else value for value in row] for row in panel.values]
        image = axes.imshow(values, cmap="cividis", aspect="auto", origin="lower", interpolation="nearest")
        axes.grid(visible=False)
        axes.set_xticks(range(len(panel.columns)), panel.columns, rotation=90 if _upright(panel) else 0)
        axes.set_yticks(range(len(panel.rows)), panel.rows)
        axes.set_xlabel(panel.x)
        axes.set_ylabel(panel.y)
        box = axes.get_position()
        axes.set_position((box.x0, box.y0, box.width - BAR / WIDTH, box.height))
        beside = (box.x1 - (BAR - 0.08) / WIDTH, box.y0, 0.1 / WIDTH, box.height)
        bar = self.figure.colorbar(image, cax=self.figure.add_axes(beside))
        bar.set_label(panel.label)
        bar.outline.set_visible(False)

    def _legend(self, rows: Sequence[Sequence[tuple[Line2D, str]]], y: float) -> None:
        for row in rows:
            self.figure.legend(
                [handle for handle, _ in row],
                [name for _, name in row],
                loc="upper left",
                bbox_to_anchor=(0.02, 1 - y / self.total),
                ncols=len(row),
                frameon=False,
                handlelength=1.8,
                columnspacing=1.2,
                borderpad=0,
                borderaxespad=0,
            )
            y += 0.16


def _upright(panel: Map) -> bool:
    """Whether the labels below a map stand upright, as they would run into each other."""
    room = (WIDTH - LEFT - RIGHT - BAR) / len(panel.columns)
    return LETTER * (max(map(len, panel.columns)) + 1) > room


def _bar_width(places: Sequence[float]) -> float:
    ordered = sorted(places)
    gaps = [second - first for first, second in itertools.pairwise(ordered)]
    return 0.8 * min(gaps, default=1.0)
