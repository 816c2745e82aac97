"""Learning curves, small enough to stand beside every configuration of a page."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from statistics import fmean

from markupsafe import Markup

from dpbench.wording import number_of

Points = Sequence[tuple[float, float]]

MOST_POINTS = 30
WIDTH, HEIGHT = 260, 120
LEFT, RIGHT, TOP, BOTTOM = 34, 252, 18, 98


def curve_svg(curves: Sequence[Points], name: str, unit: str, *, merged: bool) -> Markup | None:
    """A picture of a number by epoch, a line for each curve; None where no curve has two points.

    Args:
        curves: (epoch, number) of each run; numbers that are not finite are left out.
        name: of the number.
        unit: of the number, or nothing.
        merged: draw one line, the mean of all, instead.
    """
    finite = [found for curve in curves if len(found := _finite(curve)) > 1]
    drawn = _mean(finite) if merged else finite
    if not drawn:
        return None
    last = max(epoch for curve in drawn for epoch, _ in curve)
    low = min(value for curve in drawn for _, value in curve)
    high = max(value for curve in drawn for _, value in curve)
    spread = high - low or 1.0

    def place(epoch: float, value: float) -> str:
        right, up = epoch / (last or 1.0), (value - low) / spread
        return f"{LEFT + (RIGHT - LEFT) * right:.1f},{BOTTOM - (BOTTOM - TOP) * up:.1f}"

    def line(curve: Points) -> str:
        return f'<polyline points="{" ".join(place(*point) for point in _thinned(curve))}"/>'

    of = number_of(len(finite), "run")
    of = f"mean of {of}" if merged and len(finite) > 1 else of
    says = f"{name} by epoch, {of}: from {low:.4g} to {high:.4g}{unit}"
    title = f"{name}{f' ({unit.strip()})' if unit else ''}, {of}"
    return Markup(  # all texts are escaped or numbers
        f'<svg class="curve" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(says)}">'
        f'<path d="M{LEFT} {TOP}V{BOTTOM}H{RIGHT}"/>'
        f'<text x="2" y="10">{escape(title)}</text>'
        f'<text class="end" x="{LEFT - 4}" y="{TOP + 8}">{high:.3g}</text>'
        f'<text class="end" x="{LEFT - 4}" y="{BOTTOM}">{low:.3g}</text>'
        f'<text x="{LEFT}" y="{BOTTOM + 14}">0</text>'
        f'<text class="mid" x="{(LEFT + RIGHT) // 2}" y="{BOTTOM + 14}">epoch</text>'
        f'<text class="end" x="{RIGHT}" y="{BOTTOM + 14}">{last:.3g}</text>'
        f"{''.join(map(line, drawn))}</svg>"
    )


def _finite(curve: Points) -> Points:
    return [(epoch, value) for epoch, value in curve if math.isfinite(epoch) and math.isfinite(value)]


def _mean(curves: Sequence[Points]) -> Sequence[Points]:
    """The mean curve, as far as the shortest goes."""
    together = list(zip(*curves, strict=False))
    return [[(fmean(e for e, _ in at), fmean(v for _, v in at)) for at in together]] if together else []


def _thinned(curve: Points) -> Points:
    """At most so many points, evenly, the last among them."""
    if len(curve) <= MOST_POINTS:
        return curve
    step = (len(curve) - 1) / (MOST_POINTS - 1)
    return [curve[round(index * step)] for index in range(MOST_POINTS)]
