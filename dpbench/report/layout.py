"""Laying a picture out: which numbers of an artefact are drawn where, from its grid and its records."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Collection, Iterator, Mapping, Sequence

from dpbench.claims import SECTIONS, Artefact, Cell
from dpbench.claims.computed_file import Axis, Curve, Panel, Style
from dpbench.claims.draw import FREQUENCY, METHODS, THRESHOLD, VALUE, Draw, numeric
from dpbench.claims.notation import Labels
from dpbench.report.curves import expected_errors, learning_curve, power_spectra
from dpbench.report.grid import Entry, Grid
from dpbench.report.picture import Map, Picture, Plot, Ranking, Series

METRICS = {"bleu": "BLEU", "rouge_l": "ROUGE-L", "meteor": "METEOR", "nist": "NIST", "cider": "CIDEr"}
# Labels closer than this part of the axis run into each other; then it is logarithmic, as eps and sizes are chosen.
CLOSE = 0.1
# How far apart the marks of all lines at one name are, of the distance between names.
DODGE = 0.6
DODGE_OF_TWO = 0.2


def picture_of(grid: Grid) -> Picture | None:
    """What is drawn of an artefact: panels of its cells, and those that a program computed; None where there are none.

    Cells make panels where any of them has a number, printed or ours, and the file has a layout.
    """
    artefact, draw = grid.artefact, grid.artefact.draw
    panels: tuple[Plot | Map | Ranking, ...] = ()
    if draw is not None:
        panels = tuple(_rankings(grid, draw) if draw.x == VALUE else _panels(grid, draw))
    if not any(_drawn(panel) for panel in panels):
        panels = ()
    computed = () if grid.computed is None else tuple(_computed(panel) for panel in grid.computed.panels)
    if not panels and not computed:
        return None
    told = [_subtitle(grid, draw)] if draw is not None else []
    return Picture(
        title=title_of(artefact),
        subtitle="; ".join([*told, *(["computed"] if not told else ["other curves computed"] if computed else [])]),
        panels=(*panels, *computed),
        names=_names((*panels, *computed)),
        methods=METHODS in (artefact.axes if draw is None else (*draw.lines, draw.y)),
    )


def _computed(panel: Panel) -> Plot:
    return Plot(panel.title, panel.x, panel.y, tuple(Series(curve) for curve in panel.curves))


def name_of(where: str) -> str:
    """What its paper calls an artefact, from its file below conf/paper: "Table 1"."""
    return where.removesuffix(".yaml").partition("/")[2].replace("_", " ").capitalize()


def place_of(where: str) -> str:
    """Paper and artefact: "DiSK, Table 1"."""
    return f"{SECTIONS[where.partition('/')[0]]}, {name_of(where)}"


def heading_of(artefact: Artefact) -> str:
    """Artefact and title."""
    return f"{name_of(artefact.where)}: {artefact.title}"


def title_of(artefact: Artefact) -> str:
    """Paper, artefact and title."""
    return f"{place_of(artefact.where)}: {artefact.title}"


def metric_name(metric: str) -> str:
    """What a metric is called in a picture or above a column."""
    return METRICS.get(metric, metric.replace("_", " "))


def _subtitle(grid: Grid, draw: Draw) -> str:
    """How many runs the numbers rest on, and how many cells have none."""
    wanted = [entry for entry in grid.entries.values() if entry.cell.runs]
    there = [entry for entry in wanted if entry.value is not None]
    if not there:
        return "not run yet: printed values only" if grid.artefact.printed else "not run yet"
    counts = sorted({entry.count for entry in there})
    runs = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    several = f"mean ± standard deviation of {runs} runs" if counts[-1] > 1 else "one run each"
    if draw.y is not None and draw.x != VALUE and counts[-1] > 1:
        several = f"mean of {runs} runs"
    if draw.x == VALUE:
        several += " (◂: off the panel)"
    if grid.artefact.printed:
        several = f"ours: {several}"
    missing = len(wanted) - len(there)
    return several if not missing else f"{several}; {missing} of {len(wanted)} cells not run yet"


def _drawn(panel: Plot | Map | Ranking) -> bool:
    if isinstance(panel, Ranking):
        return any(value is not None for value in panel.values)
    if isinstance(panel, Map):
        return any(value is not None for row in panel.values for value in row)
    return any(series.curve.x for series in panel.series)


def _names(panels: Sequence[Plot | Map | Ranking]) -> Labels:
    if panels and isinstance(panels[0], Ranking):
        return panels[0].rows
    plots = [panel for panel in panels if isinstance(panel, Plot)]
    return tuple(dict.fromkeys(series.curve.name for plot in plots for series in plot.series))


def _by_panel(grid: Grid, draw: Draw) -> Iterator[tuple[str, dict[str, str], list[Entry]]]:
    """Title, place and entries of each panel that has any."""
    axes = grid.artefact.axes
    # A difference is no point among the numbers that it is the difference of.
    entries = [entry for entry in grid.entries.values() if entry.cell.minus is None]
    for labels in itertools.product(*(axes[axis] for axis in draw.panels)):
        at = dict(zip(draw.panels, labels, strict=True))
        inside = [entry for entry in entries if _is_at(entry.cell, at)]
        if inside:
            yield _words({axis: label for axis, label in at.items() if len(axes[axis]) > 1}), at, inside


def _panels(grid: Grid, draw: Draw) -> Iterator[Plot | Map]:
    axes = grid.artefact.axes
    for title, at, inside in _by_panel(grid, draw):
        if draw.y is not None:
            yield _map(inside, axes, draw, draw.y, title)
        elif draw.x == FREQUENCY:
            yield _spectra(inside, axes, draw, title, noise=all(axes[axis][0] == at[axis] for axis in at))
        elif draw.x == THRESHOLD:
            yield _errors(inside, axes, draw, title)
        elif draw.course:
            yield _course(inside, axes, draw, title)
        else:
            yield _over_axis(inside, axes, draw, title)


def _lines(entries: Sequence[Entry], axes: Mapping[str, Labels], draw: Draw) -> Iterator[tuple[str, list[Entry]]]:
    """The name of each line with its entries, in the order of the axes."""
    for labels in itertools.product(*(axes[axis] for axis in draw.lines)):
        at = dict(zip(draw.lines, labels, strict=True))
        yield _words(at) or "all", [entry for entry in entries if _is_at(entry.cell, at)]


def _is_at(cell: Cell, at: Mapping[str, str]) -> bool:
    return all(cell.at[axis] == label for axis, label in at.items())


def _words(at: Mapping[str, str]) -> str:
    """Labels in words; a number is told with its axis."""
    return ", ".join(f"{axis} = {label}" if numeric((label,)) else label for axis, label in at.items())


def _y_axis(entries: Sequence[Entry]) -> Axis:
    cells = {(entry.cell.metric, entry.cell.unit) for entry in entries}
    if len(cells) > 1:
        return Axis("")
    ((metric, unit),) = cells
    name = metric_name(metric)
    return Axis(f"{name} ({unit})" if unit == "%" else name)


def _over_axis(entries: Sequence[Entry], axes: Mapping[str, Labels], draw: Draw, title: str) -> Plot:
    labels = axes[draw.x]
    numbers = numeric(labels)
    places = {label: float(label) if numbers else float(i) for i, label in enumerate(labels)}
    lines = [(name, inside) for name, inside in _lines(entries, axes, draw) if inside]
    step = min(DODGE_OF_TWO, DODGE / max(len(lines) - 1, 1))
    printed, ours = [], []
    for place, (name, inside) in enumerate(lines):
        shift = 0.0 if numbers else step * (place - (len(lines) - 1) / 2)
        known = [(entry, places[entry.cell.at[draw.x]] + shift) for entry in inside]
        theirs = [(x, entry.cell.printed.value if entry.cell.printed is not None else None) for entry, x in known]
        printed.append(Series(_curve(name, theirs, printed=True), joined=numbers))
        found = _curve(name, [(x, entry.value) for entry, x in known])
        spreads = [entry.spread for entry, _ in known] if found.x else []
        spread = tuple(one or 0.0 for one in spreads) if any(one is not None for one in spreads) else None
        ours.append(Series(found, spread, joined=numbers))
    ticks = tuple((places[label], label) for label in labels)
    return Plot(
        title, Axis(draw.x, log=numbers and _crowded(places.values())), _y_axis(entries), (*printed, *ours), ticks
    )


def _crowded(places: Collection[float]) -> bool:
    """Whether labels at these places would run into each other on an axis that is not logarithmic."""
    ordered = sorted(places)
    closest = min((second - first for first, second in itertools.pairwise(ordered)), default=math.inf)
    return ordered[0] > 0 and closest < CLOSE * (ordered[-1] - ordered[0])


def _curve(name: str, points: Sequence[tuple[float, float | None]], *, printed: bool = False) -> Curve:
    """A line with a gap, which is NaN, where a number is missing; without points if there is none at all."""
    known = any(y is not None for _, y in points)
    ys = [math.nan if y is None else y for _, y in points]
    return Curve(name, tuple(x for x, _ in points) if known else (), tuple(ys) if known else (), Style.LINE, printed)


def _course(entries: Sequence[Entry], axes: Mapping[str, Labels], draw: Draw, title: str) -> Plot:
    """Learning curves; a printed number is that at the end, where the configuration says which epoch that is."""
    printed, ours = [], []
    for name, inside in _lines(entries, axes, draw):
        for entry in inside:
            end = entry.cell.overrides.get("epochs", "")
            if entry.cell.printed is not None and draw.x == "epoch" and numeric((end,)):
                printed.append(Series(_curve(name, [(float(end), entry.cell.printed.value)], printed=True)))
            if (found := learning_curve(entry.cell, entry.runs, draw.x)) is not None:
                curve = Curve(name, found.x, found.mean)
                ours.append(Series(curve, found.spread, band=True))
    return Plot(title, Axis(draw.x), _y_axis(entries), (*printed, *ours), from_zero=True)


def _spectra(entries: Sequence[Entry], axes: Mapping[str, Labels], draw: Draw, title: str, *, noise: bool) -> Plot:
    """Power over frequencies: gradient and noise of the first line in the first panel, in others of what is applied.

    Args:
        entries: of the panel.
        axes: of the artefact.
        draw: its layout.
        title: of the panel.
        noise: whether this is the first panel.
    """
    series = []
    for place, (name, inside) in enumerate(_lines(entries, axes, draw)):
        runs = [run for entry in inside for run in entry.runs]
        found = power_spectra(runs) if runs and (place == 0 or not noise) else None
        if found is None:
            continue
        powers = {"gradient": found.signal, "noise": found.noise} if noise else {name: found.applied}
        series += [Series(Curve(one, found.frequencies, power), band=True) for one, power in powers.items()]
    return Plot(title, Axis("frequency (cycles per step)"), Axis("power", log=True), tuple(series))


def _errors(entries: Sequence[Entry], axes: Mapping[str, Labels], draw: Draw, title: str) -> Plot:
    """Expected squared error of a gradient that is clipped, over thresholds."""
    lines = _lines(entries, axes, draw)
    found = {name: expected_errors([run for entry in inside for run in entry.runs]) for name, inside in lines}
    known = {name: one for name, one in found.items() if one is not None}
    # Labels of five digits would push that of the axis out of the picture.
    thousands = max((max(one.errors) for one in known.values()), default=0.0) >= 10_000
    series = []
    for name, (thresholds, errors) in known.items():
        values = tuple(error / 1000 for error in errors) if thousands else errors
        series.append(Series(Curve(name, thresholds, values), band=True))
    label = Axis("expected squared error" + (" / 1000" if thousands else ""))
    return Plot(title, Axis("threshold C"), label, tuple(series), from_zero=True)


def _map(entries: Sequence[Entry], axes: Mapping[str, Labels], draw: Draw, y: str, title: str) -> Map:
    """Our numbers as colours, or the printed ones where there are none of ours."""
    ours = {(entry.cell.at[y], entry.cell.at[draw.x]): entry.value for entry in entries}
    printed = {
        (entry.cell.at[y], entry.cell.at[draw.x]): entry.cell.printed.value
        for entry in entries
        if entry.cell.printed is not None
    }
    shown = ours if any(value is not None for value in ours.values()) else printed
    values = tuple(tuple(shown.get((row, column)) for column in axes[draw.x]) for row in axes[y])
    return Map(title, draw.x, y, axes[draw.x], axes[y], values, _y_axis(entries).label)


def _rankings(grid: Grid, draw: Draw) -> Iterator[Ranking]:
    """Our numbers by the labels of an axis, the best on the whole first; labels without a number are left out.

    The first label of the axis is what others are compared with.
    """
    assert draw.y is not None  # as parsed
    labels, panels = grid.artefact.axes[draw.y], list(_by_panel(grid, draw))
    found = [{entry.cell.at[draw.y]: entry for entry in inside if entry.value is not None} for _, _, inside in panels]

    def place(label: str) -> tuple[float, float]:
        """Whoever lacks a panel is behind, or the mean would be over the easier ones."""
        values = [entries[label].value or 0.0 for entries in found if label in entries]
        return (len(values), statistics.fmean(values))

    rows = tuple(sorted((label for label in labels if any(label in one for one in found)), key=place, reverse=True))
    for (title, _, inside), entries in zip(panels, found, strict=True):
        at = [entries.get(row) for row in rows]
        reference = entries.get(labels[0])
        yield Ranking(
            title,
            f"{_y_axis(inside).label}; dotted: {labels[0]}",
            rows,
            tuple(None if entry is None else entry.value for entry in at),
            tuple(None if entry is None else entry.spread for entry in at),
            None if reference is None else reference.value,
        )
