"""The types that the files of conf/paper become: artefacts, their cells, and the claims about them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property

from dpbench.claims.draw import Draw
from dpbench.claims.notation import Candidate, Labels, Overrides, Printed, alternatives
from dpbench.errors import require
from dpbench.files import names_weights_file

# The folders of conf/paper and what they are called: the papers, by their methods, and comparisons of our own, which
# print no numbers.
SECTIONS = {
    "doppler": "DOPPLER",
    "disk": "DiSK",
    "adp": "ADP",
    "dp_pmlf": "DP-PMLF",
    "dc_sgd": "DC-SGD",
    "beyond": "Beyond the papers",
}
STATISTICS = ("last", "best")
# What a number may be of: entries of summary.json, numbers that a program computes, and what has no record.
METRICS = (
    "test_accuracy",
    "test_error",
    "validation_accuracy",
    "mismatched_accuracy",
    "test_loss",
    "validation_loss",
    "gradient_norm",
    "bleu",
    "rouge_l",
    "meteor",
    "nist",
    "cider",
)
WITHOUT_RUNS = ("computed", "selected", "wall_seconds")
LESS_IS_BETTER = ("test_error", "test_loss", "validation_loss")
VALIDATION_ACCURACY = "validation_accuracy"
# The setting with which a run has one.
VALIDATION_SIZE = "dataset.validation_size"


class Kind(StrEnum):
    """How an artefact comes about."""

    TRAINED = "trained"
    COMPUTED = "computed"
    NOT_REPRODUCIBLE = "not reproducible"


@dataclass(frozen=True)
class Tolerance:
    """How far a reproduced number may lie from the printed one, if that is more than noise.

    Attributes:
        points: in the unit of the number.
    """

    points: float = 1.0

    def __post_init__(self) -> None:
        require(0 <= self.points < math.inf, "tolerance.points", self.points, "a number >= 0")


@dataclass(frozen=True)
class Needs:
    """What a run takes besides its data set.

    Attributes:
        weights: of a pretrained model, by name.
        hours: on a GPU, least and most of one run; None where the notes have no estimate.
        source: of the estimate.
    """

    weights: str | None = None
    hours: tuple[float, float] | None = None
    source: str | None = None

    def __post_init__(self) -> None:
        hours = self.hours
        valid = hours is None or 0 < hours[0] <= hours[1] < math.inf
        require(valid, "needs.hours", hours, "least and most hours of one run, both > 0")
        require((hours is None) == (self.source is None), "needs.source", self.source, "where the estimate stands")


@dataclass(frozen=True)
class Cell:
    """One number of an artefact, printed or not, with the runs behind it.

    Attributes:
        at: label on every axis.
        row: its labels on the row axes.
        column: its labels on the column axes.
        overrides: of `python -m dpbench.run`, without seed; several values of a key are searched.
        printed: the number; None where the paper has none or the file does not know it.
        metric: what of the record is compared, such as "test_accuracy".
        unit: of the printed number, "%" or the like; records hold accuracies as fractions.
        statistic: "last" or "best" over the run's evaluations (a choice made on test data); the mean over seeds of it.
        seeds: how many runs the mean is taken of.
        tolerance: of the comparison.
        needs: of each run.
        minus: axis, label and label: the number is the difference of two other cells, which have the runs.
        quoted: the publication that the paper took the number from; no run of this cell is asked for.
        derived: where the number was worked out from what the paper prints, for it prints no number there; else None.
        taken_over: whether it is no result but a setting, which runs here take over from the paper.
    """

    at: Mapping[str, str]
    row: Labels
    column: Labels
    overrides: Overrides
    printed: Printed | None
    metric: str
    unit: str
    statistic: str
    seeds: int
    tolerance: Tolerance
    needs: Needs
    minus: tuple[str, str, str] | None = None
    quoted: str | None = None
    derived: str | None = None
    taken_over: bool = False

    def __post_init__(self) -> None:
        known = METRICS + WITHOUT_RUNS
        require(self.metric in known, "metric", self.metric, f"one of {', '.join(known)}")
        unknown = self.runs and self.metric == VALIDATION_ACCURACY and not self._validated
        require(not unknown, "metric", self.metric, f"one that the runs have, which are without {VALIDATION_SIZE}")
        searched = self.judged_by in LESS_IS_BETTER and len(self.candidates) > 1
        require(not searched, "metric", self.metric, "one of which more is better, where settings are searched")

    @property
    def runs(self) -> bool:
        """Whether the cell has runs of its own."""
        return self.minus is None and self.quoted is None and self.metric not in WITHOUT_RUNS

    @property
    def judged_by(self) -> str:
        """What a search is decided by: accuracy on samples set aside for validation if there are any, else `metric`."""
        return VALIDATION_ACCURACY if self._validated else self.metric

    @property
    def _validated(self) -> bool:
        return self.overrides.get(VALIDATION_SIZE, "null") != "null"

    @property
    def unpublished(self) -> bool:
        """Whether its runs begin with weights that are on no hub: the file that is named has to be made."""
        return self.runs and names_weights_file(self.overrides.get("model.pretrained", ""))

    @cached_property
    def candidates(self) -> tuple[Candidate, ...]:
        """Overrides of every configuration to be tried; one unless the cell is the best of a search."""
        choices = [[f"{key}={one}" for one in alternatives(value)] for key, value in self.overrides.items()]
        return tuple(itertools.product(*choices))

    @property
    def place(self) -> str:
        """Where in the artefact it stands, in words."""
        return ", ".join(f"{axis} {label}" for axis, label in self.at.items()) or "its only cell"


Selection = Mapping[str, tuple[str, ...]]


@dataclass(frozen=True)
class Order:
    """Some cells lie above others that differ from them only in the labels named.

    Attributes:
        says: the claim in words.
        higher: labels of the cells above, by axis.
        lower: labels of the cells below, on the same axes.
        at: cells that the claim is about, by axis; all labels of an axis that is not named.
        pairs: in how many pairs it is claimed; None for all.
        margin: by how much at least, in the unit of the numbers; None for any amount.
        within: the two lie within so much of each other, whichever is above; excludes `margin`.
        at_least: "not below" instead of "above".
        printed: whether the numbers that the paper prints bear it out; several claims of the papers fail there.
        own: whether it is not the paper's, but one about its method, its released code, what its numbers show without a
            word of it, or what is left of its claim.
    """

    says: str
    higher: Selection
    lower: Selection
    at: Selection = field(default_factory=dict)
    pairs: int | None = None
    margin: float | None = None
    within: float | None = None
    at_least: bool = False
    printed: bool = True
    own: bool = False

    def __post_init__(self) -> None:
        require(set(self.higher) == set(self.lower), "lower", ", ".join(self.lower), f"axes {', '.join(self.higher)}")
        exclusive = sum((self.margin is not None, self.within is not None, self.at_least)) <= 1
        require(exclusive, "margin", self.margin, "only one of margin, within and at_least")
        require(self.pairs is None or self.pairs > 0, "pairs", self.pairs, "a whole number > 0")


@dataclass(frozen=True)
class Trend:
    """A number, or the difference of two, is larger at the end of an axis than at its start, on average.

    Attributes:
        says: the claim in words.
        along: the axis.
        ends: its label at the start and at the end.
        rising: whether it is larger at the end; False for smaller.
        of: axis and two labels, the second taken off the first; None for the cells' own numbers.
        at: cells that the claim is about.
        printed: whether the numbers that the paper prints bear it out.
    """

    says: str
    along: str
    ends: tuple[str, str]
    rising: bool
    of: tuple[str, str, str] | None = None
    at: Selection = field(default_factory=dict)
    printed: bool = True


@dataclass(frozen=True)
class Words:
    """A claim that no number decides.

    Attributes:
        says: the claim.
        why: why no record decides it, or where it is proved.
    """

    says: str
    why: str


Claim = Order | Trend | Words


@dataclass(frozen=True)
class Artefact:
    """One table or figure.

    Attributes:
        paper: name of the paper.
        name: of the artefact, "table_1".
        title: in a few words.
        kind: how it comes about.
        reason: why it is not reproducible, or how a computed one is.
        source: section of the notes (docs/reproducing.md).
        rows: label by label, the row axes.
        columns: likewise the column axes.
        cells: in the order of rows, then columns.
        printed: whether numbers are known, printed or derived; False for curves of which only the picture shows values.
        claims: beside those that the printed numbers are.
        deviations: where runs do something else than the paper, with the reference.
        readings: what the paper leaves open, by reference to the specification.
        draw: how its picture is laid out; None where there is none to be made of records.
    """

    paper: str
    name: str
    title: str
    kind: Kind
    reason: str | None
    source: str
    rows: Mapping[str, Labels]
    columns: Mapping[str, Labels]
    cells: tuple[Cell, ...]
    printed: bool
    claims: tuple[Claim, ...]
    deviations: tuple[str, ...]
    readings: Mapping[str, str]
    draw: Draw | None = None

    @property
    def stem(self) -> str:
        """What its files are called below conf/paper and in results: "disk/table_1"."""
        return f"{self.paper}/{self.name}"

    @property
    def where(self) -> str:
        """Its file below conf/paper."""
        return f"{self.stem}.yaml"

    @property
    def axes(self) -> Mapping[str, Labels]:
        """All axes, rows first."""
        return {**self.rows, **self.columns}

    def select(self, at: Selection) -> tuple[Cell, ...]:
        """The cells whose labels are among those named, by axis."""
        return tuple(cell for cell in self.cells if all(cell.at[axis] in labels for axis, labels in at.items()))
