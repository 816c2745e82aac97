"""Papers and their tables and figures, ready to be laid out on a page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from markupsafe import Markup

from dpbench.claims import SECTIONS, Cell, Finding, Kind, Lack, Outcome, Scorecard, cost
from dpbench.claims.notation import Labels
from dpbench.report.grid import Entry, Grid, scorecard
from dpbench.report.inline_svg import inline_svg
from dpbench.report.layout import name_of, place_of
from dpbench.wording import number_of

FIGURE_LIMIT = 200_000
# Tables with more numbers are folded, and so are those of which nothing has been run.
UNFOLDED = 40

# What claims wait for, before all that it takes.
WAITING: dict[str, str] = {
    Lack.RUNS: "waiting for runs",
    Lack.UNPUBLISHED: "waiting for weights that nobody published, which have to be trained first, and for runs",
}

# Authors and year, and the number on arXiv.
REFERENCES = {
    "doppler": ("Zhang, Bu, Hong, Razaviyayn 2024", "2408.13460"),
    "disk": ("Zhang, Bu, Balle, Hong, Razaviyayn, Mirrokni 2024", "2410.03883"),
    "adp": ("Wu, Wang, Cristali, Gu, Willett 2021", "2110.07435"),
    "dp_pmlf": ("Xu, Ranbaduge, Wang, Rakotoarivelo, Smith 2025", "2511.08841"),
    "dc_sgd": ("Wei, Li, Gong, Chen 2025", "2503.22988"),
}


def anchor(where: str) -> str:
    """The id of an artefact's section, from its file below conf/paper."""
    return where.removesuffix(".yaml").replace("/", "-")


@dataclass(frozen=True)
class PaperView:
    """A paper with its tables and figures."""

    key: str
    artefacts: tuple[ArtefactView, ...]

    @property
    def name(self) -> str:
        """Of its method."""
        return SECTIONS[self.key]

    @property
    def reference(self) -> tuple[str, str] | None:
        """Authors with the year, and the number on arXiv; None for comparisons of our own."""
        return REFERENCES.get(self.key)

    @cached_property
    def score(self) -> Scorecard:
        """What it claims itself, by outcome."""
        return scorecard(view.grid for view in self.artefacts).published

    @cached_property
    def reasons(self) -> tuple[tuple[str, int], ...]:
        """Why claims have no runs, and how many of them."""
        waiting: dict[str, list[Cell]] = {Lack.RUNS: [], Lack.UNPUBLISHED: []}
        counted: Counter[str] = Counter()
        for view in self.artefacts:
            for entry in view.grid.entries.values():
                cell = entry.cell
                if cell.runs and entry.value is None and not view.grid.whole:
                    waiting[Lack.UNPUBLISHED if cell.unpublished else Lack.RUNS].append(cell)
            for finding in view.score.findings:
                if finding.lack is not None:
                    counted[_reason(finding)] += 1
        named = {lack: f"{WAITING[lack]}: {cost(cells).in_words()}" for lack, cells in waiting.items()}
        return tuple((named.get(reason, reason), count) for reason, count in counted.items())


def _reason(finding: Finding) -> str:
    match finding.lack:
        case Lack.RUNS | Lack.WEIGHTS:
            return Lack.RUNS
        case Lack.UNPUBLISHED:
            return Lack.UNPUBLISHED
        case Lack.QUOTED:
            return "quoted from another publication; the paper ran nothing there"
    return finding.detail


@dataclass(frozen=True)
class ArtefactView:
    """A table or figure, ready to be laid out.

    Attributes:
        grid: all that was found about it.
        results_dir: holds its picture and its files.
        shown: hashes of the configurations whose runs have details on the page.
    """

    grid: Grid
    results_dir: Path
    shown: frozenset[str]

    @property
    def name(self) -> str:
        """As the paper has it: "Table 1"."""
        return name_of(self.grid.artefact.where)

    @property
    def anchor(self) -> str:
        """The id of its section."""
        return anchor(self.grid.artefact.where)

    @cached_property
    def score(self) -> Scorecard:
        """What the paper claims in it, by outcome."""
        return scorecard([self.grid]).published

    @cached_property
    def own(self) -> Scorecard:
        """What dpbench itself claims about it, by outcome."""
        return scorecard([self.grid]).own

    @property
    def folded(self) -> bool:
        """Whether its table is shown on demand only."""
        return len(self.grid.entries) > UNFOLDED or not self.grid.has_numbers

    @property
    def trained(self) -> bool:
        """Whether runs are behind it."""
        return self.grid.artefact.kind == Kind.TRAINED

    @cached_property
    def file(self) -> Path:
        """Its table and picture below the page, without suffix."""
        return Path(self.grid.artefact.stem)

    @property
    def files(self) -> list[str]:
        """What lies beside the page, to be linked to."""
        return [
            f"{self.file}.{kind}" for kind in ("csv", "svg") if (self.results_dir / f"{self.file}.{kind}").is_file()
        ]

    @property
    def drawn_from(self) -> str:
        """What its picture shows, as the words before it or below it have it."""
        if not self.trained:
            return "computed here"
        if self.grid.has_numbers:
            return "drawn from our runs"
        if self.grid.computed is not None:
            return "curves computed here, nothing has been run yet"
        return "printed values only, nothing has been run yet"

    @cached_property
    def figure(self) -> Markup | None:
        """Its picture; None where there is none, or it is so large that it is linked to alone."""
        picture = inline_svg(
            self.results_dir / f"{self.file}.svg",
            f"{self.anchor}-",
            f"{place_of(self.grid.artefact.where)}, {self.drawn_from}: {self.grid.artefact.title}",
        )
        return picture if picture is not None and len(picture) <= FIGURE_LIMIT else None

    @cached_property
    def head(self) -> list[list[tuple[str, int]]]:
        """The header: for each column axis its labels, and how many columns each spans."""
        return [[cell for cell in line if cell[1]] for line in zip(*spans(self.grid.columns), strict=True)]

    @cached_property
    def body(self) -> list[tuple[list[tuple[str, int]], list[Entry | None]]]:
        """Row by row its labels, with how many rows each spans, and its entries."""
        heads = spans(self.grid.rows)
        return [
            ([cell for cell in head if cell[1]], [self.grid.at(row, column) for column in self.grid.columns])
            for head, row in zip(heads, self.grid.rows, strict=True)
        ]

    def run_of(self, entry: Entry) -> str | None:
        """The hash of the configuration that a number rests on; None for several, or where no details are shown."""
        digests = {run.folder.parent.name for run in entry.runs} & self.shown
        return digests.pop() if len(digests) == 1 else None

    @cached_property
    def values(self) -> list[tuple[Outcome, str, str]]:
        """Verdicts on printed numbers with their details, those that say the same in one line."""
        judged: list[tuple[Outcome, str, str]] = []
        waiting: Counter[str] = Counter()
        for entry in self.grid.entries.values():
            finding = entry.finding
            if finding is not None and finding.outcome != Outcome.NOT_RUN:
                judged.append((finding.outcome, finding.claim, finding.detail))
            elif finding is not None:
                waiting[finding.detail] += 1
        numbers = [(Outcome.NOT_RUN, number_of(count, "printed number"), detail) for detail, count in waiting.items()]
        return judged + numbers


def spans(labels: Sequence[Labels]) -> list[list[tuple[str, int]]]:
    """For every place its label on each axis, and over how many places it goes on; 0 where an earlier one covers it."""
    found: list[list[tuple[str, int]]] = [[(label, 1) for label in place] for place in labels]
    for axis in range(len(labels[0]) if labels else 0):
        first = 0
        for place in range(1, len(labels)):
            # A label of an inner axis goes on only as long as those of the outer ones do.
            if labels[place][: axis + 1] == labels[first][: axis + 1] and axis + 1 < len(labels[place]):
                found[first][axis] = (found[first][axis][0], place - first + 1)
                found[place][axis] = (labels[place][axis], 0)
            else:
                first = place
    return found
