"""Colours that also colour-blind readers tell apart, most of Okabe and Ito; the same for a method in every figure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import cycle
from typing import Any, NamedTuple

import numpy as np
from matplotlib import colormaps
from matplotlib.colors import to_hex

# The words that a label has to contain, first match first; after them its colour. Baselines are grey, whatever their
# optimizer; other methods, such as one's own, get colours that are left.
METHODS = (
    (("PMLF", "released"), "#cc79a7"),
    (("w/o PM",), "#7f3b66"),
    (("w/o LF",), "#e0a9c8"),
    (("KF", "DiSK"), "#0072b2"),
    (("DC-SGD-E",), "#009e73"),
    (("DC-SGD-P",), "#56b4e9"),
    (("LP-", "NoisyLP", "DOPPLER"), "#e69f00"),
    (("ADP",), "#d55e00"),
    (("InnerOuter", "DP-FTRL"), "#332288"),
    (("Andrew",), "#8c564b"),
    (("Du", "AutoClip"), "#7a68a6"),
    (("AdamBC",), "#8a8a8a"),
    (("non-DP", "published"), "#000000"),
)
BASELINE, OF_BASELINES = "#555555", re.compile(r"^(DP|SGD|Noisy)")
WITHOUT_PRIVACY = ("AdamW", "Lora")
OTHERS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#555555")
DASHES = ("-", "--", "-.")
MARKS = "osD^vPX<>*h"


class Look(NamedTuple):
    """How a line is drawn.

    Attributes:
        colour: of line and marks.
        mark: matplotlib's letter for it.
        dashes: of the line, "-" for a solid one.
    """

    colour: str
    mark: str
    dashes: Any


def looks_of(names: Sequence[str], *, methods: bool) -> Mapping[str, Look]:
    """How each line is drawn, so that all differ; arguments as of `colours_of`."""
    colours, marks = colours_of(names, methods=methods), marks_of(names)
    dashes = dashes_of(names, colours)
    return {name: Look(colours[name], marks[name], dashes[name]) for name in names}


def colours_of(names: Sequence[str], *, methods: bool) -> Mapping[str, str]:
    """A colour for each line.

    Args:
        names: of the lines.
        methods: whether they are methods; else numbers get shades from dark to light, names one of a few each.
    """
    if methods:
        known = {name: _of_method(name) for name in names}
        left = cycle([one for one in OTHERS if one not in known.values() and one != BASELINE] or OTHERS)
        return {name: colour or next(left) for name, colour in known.items()}
    numbers = [name for name in names if "=" in name]
    places = np.linspace(0.0, 0.85, max(len(numbers), 2))
    shades = {name: to_hex(colormaps["viridis"](place)) for name, place in zip(numbers, places, strict=False)}
    # Beside shades, which are blue and green, the others begin with grey and red.
    left = cycle(reversed(OTHERS) if numbers else OTHERS)
    return {name: shades[name] if name in shades else next(left) for name in names}


def _of_method(name: str) -> str | None:
    if name in WITHOUT_PRIVACY:
        return "#000000"
    found = (colour for parts, colour in METHODS if any(_has(name, part) for part in parts))
    return next(found, BASELINE if OF_BASELINES.match(name) else None)


def _has(name: str, part: str) -> bool:
    """Whether a label contains something, not within a longer word: "Dual" is not "Du"."""
    return re.search(rf"{re.escape(part)}(?![a-z])", name) is not None


def dashes_of(names: Sequence[str], colours: Mapping[str, str]) -> Mapping[str, str]:
    """How lines are dashed: solid, but for further lines of a colour."""
    found: dict[str, str] = {}
    for name in names:
        before = sum(colours[other] == colours[name] for other in found)
        found[name] = DASHES[before % len(DASHES)]
    return found


def marks_of(names: Sequence[str]) -> Mapping[str, str]:
    """A mark for each line, by its place, so that lines of one colour differ."""
    return {name: MARKS[place % len(MARKS)] for place, name in enumerate(names)}
