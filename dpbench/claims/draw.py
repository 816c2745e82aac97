"""How a trained artefact is drawn: which axis is x, which make lines, which panels."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dpbench.claims.notation import Labels
from dpbench.errors import require

# What x may be besides an axis: the course of a run, by its evaluations; of recorded gradients their frequencies, or
# thresholds that might clip them.
COURSE = ("epoch", "step")
FREQUENCY = "frequency"
THRESHOLD = "threshold"
# With y: each label of that axis is a row, its number a mark in it.
VALUE = "value"
NOT_AXES = (*COURSE, FREQUENCY, THRESHOLD, VALUE)
NONE = "none"
METHODS = "method"


@dataclass(frozen=True)
class Draw:
    """A figure's layout; each axis of the artefact stands in one place.

    Attributes:
        x: an axis; or "epoch" or "step" for learning curves, "frequency" for spectra, "threshold" for the expected
            errors of clipped gradients, "value" for a ranking.
        lines: axes whose labels are lines in a panel.
        panels: axes whose labels are panels.
        y: an axis, for a map in which colour is the number, or for the rows of a ranking; then there are no lines.
    """

    x: str
    lines: Labels
    panels: Labels
    y: str | None = None

    @property
    def course(self) -> bool:
        """Whether it shows learning curves."""
        return self.x in COURSE


def numeric(labels: Labels) -> bool:
    """Whether all labels of an axis are finite numbers."""
    try:
        return all(math.isfinite(float(label)) for label in labels)
    except ValueError:
        return False


def default_draw(axes: Mapping[str, Labels]) -> Draw | None:
    """The layout of an artefact whose file does not say; None where there is but a single number.

    An axis of numbers is x, eps before others; else one of names. The axis of methods makes lines, or the first that
    is left; the rest are panels. An axis with one label distinguishes nothing, and is x only if nothing else can be.
    """
    wide = [axis for axis, labels in axes.items() if len(labels) > 1]
    if not wide:
        return None
    numbers = sorted((axis for axis in wide if numeric(axes[axis])), key=lambda axis: axis != "eps")
    names = sorted(wide, key=lambda axis: axis == METHODS)
    x = (numbers or names)[0]
    left = sorted((axis for axis in wide if axis != x), key=lambda axis: axis != METHODS)
    lines = tuple(left[:1])
    return Draw(x, lines, tuple(axis for axis in axes if axis != x and axis not in lines))


def parse_draw(content: Any, axes: Mapping[str, Labels]) -> Draw | None:
    """The layout that a file asks for, ``{x: eps, lines: method, panels: data}``; axes not named are panels.

    Args:
        content: of the key; the word none for an artefact that no record can draw.
        axes: of the artefact, with their labels.
    """
    if content == NONE:
        return None
    require(isinstance(content, dict), "draw", content, f"a mapping with x, lines, panels or y, or {NONE}")
    for key in content:
        require(
            key in ("x", "y", "lines", "panels"), f"draw.{key}", content[key], "one of the keys x, y, lines, panels"
        )
    x, y = str(content.get("x")), content.get("y")
    known = f"one of the axes {', '.join(axes)}"
    require(x in (*axes, *NOT_AXES), "draw.x", x, f"{known}, or {', '.join(NOT_AXES)}")
    fits = x != VALUE if y is None else y in axes and x in (*axes, VALUE)
    require(fits, "draw.y", y, f"{known}, where x is one too or {VALUE}")
    lines, panels = (_names(content.get(key), f"draw.{key}", axes) for key in ("lines", "panels"))
    require(y is None or not lines, "draw.lines", ", ".join(lines), "no lines in a picture that has y")
    used = [axis for axis in (x, y, *lines, *panels) if axis in axes]
    for axis in used:
        require(used.count(axis) == 1, "draw", axis, "each axis in one place")
    return Draw(x, lines, (*panels, *(axis for axis in axes if axis not in used)), y)


def _names(value: Any, field: str, axes: Mapping[str, Labels]) -> Labels:
    names = tuple(map(str, value)) if isinstance(value, list) else () if value is None else (str(value),)
    for name in names:
        require(name in axes, field, name, f"one of the axes {', '.join(axes)}")
    return names
