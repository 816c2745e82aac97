"""What the papers' modules share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import cache

from dpbench.claims import Artefact, Cell
from dpbench.claims.computed_file import Curve, Style
from dpbench.config import RunConfig, compose_jobs

# Curves have at most about so many points: what a page shows.
POINTS = 400


def values_of(artefact: Artefact, number: Callable[[Cell], float]) -> Mapping[str, float]:
    """The numbers of an artefact's computed cells by their places; quoted ones are not ours to compute."""
    cells = [cell for cell in artefact.cells if cell.metric == "computed" and cell.quoted is None]
    return {cell.place: number(cell) for cell in cells}


@cache
def composed(*overrides: str) -> RunConfig:
    """The configuration of overrides; shared, so its stages are not to be run."""
    return compose_jobs(overrides, multirun=False)[0].config


def curve(name: str, x: Iterable[float], y: Iterable[float], style: Style = Style.LINE) -> Curve:
    """A curve of plain numbers."""
    return Curve(name, tuple(map(float, x)), tuple(map(float, y)), style)


def thinned(last: int) -> list[int]:
    """At most about `POINTS` whole numbers from 0 to `last`, both among them."""
    stride = max(1, last // POINTS)
    return [*range(0, last, stride), last]
