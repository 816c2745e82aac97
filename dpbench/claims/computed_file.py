"""What a computed artefact consists of, and its file: <results_dir>/computed/<paper>/<artefact>.json."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from dpbench.files import jsonable, read_json, write_atomically


class Style(StrEnum):
    """How a curve is drawn; of steps each ordinate holds up to the next abscissa."""

    LINE = "line"
    STEPS = "steps"
    BARS = "bars"
    MARKS = "marks"


@dataclass(frozen=True)
class Axis:
    """An axis of a panel.

    Attributes:
        label: with its unit, as the paper has it.
        log: whether it is logarithmic.
    """

    label: str
    log: bool = False


@dataclass(frozen=True)
class Curve:
    """One curve.

    Attributes:
        name: for the legend.
        x: abscissae.
        y: ordinates, as many.
        style: how it is drawn.
        printed: whether these are numbers that the paper prints, drawn hollow, and not ours.
    """

    name: str
    x: tuple[float, ...]
    y: tuple[float, ...]
    style: Style = Style.LINE
    printed: bool = False


@dataclass(frozen=True)
class Panel:
    """One pair of axes with its curves."""

    title: str
    x: Axis
    y: Axis
    curves: tuple[Curve, ...]


@dataclass(frozen=True)
class Computed:
    """A computed artefact.

    Attributes:
        values: numbers by the place of their cell in words, `Cell.place`.
        panels: of a figure; none for a table.
        remarks: what a reader must know: chosen parameters that the paper does not give, agreement found.
        spent: eps of all runs of a search together, by its cell's place, where the printed eps covers the choice.
    """

    values: Mapping[str, float] = field(default_factory=dict)
    panels: tuple[Panel, ...] = ()
    remarks: tuple[str, ...] = ()
    spent: Mapping[str, float] = field(default_factory=dict)


def path_of(results_dir: Path, paper: str, name: str) -> Path:
    """Where an artefact's file lies."""
    return results_dir / "computed" / paper / f"{name}.json"


def write_computed(path: Path, computed: Computed, provenance: Mapping[str, Any]) -> None:
    """Write the file of an artefact, with where its numbers come from."""
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {**asdict(computed), "provenance": dict(provenance)}
    write_atomically(path, json.dumps(jsonable(content), indent=1) + "\n")


def read_computed(path: Path) -> Computed | None:
    """The artefact in a file; None where there is none yet."""
    content = read_json(path)
    if not content:
        return None
    panels = [
        Panel(
            panel["title"],
            Axis(**panel["x"]),
            Axis(**panel["y"]),
            tuple(
                Curve(
                    name=curve["name"],
                    x=tuple(map(float, curve["x"])),
                    y=tuple(map(float, curve["y"])),
                    style=Style(curve["style"]),
                    printed=curve["printed"],
                )
                for curve in panel["curves"]
            ),
        )
        for panel in content["panels"]
    ]
    values, spent = ({place: float(value) for place, value in content[name].items()} for name in ("values", "spent"))
    return Computed(values, tuple(panels), tuple(content["remarks"]), spent)
