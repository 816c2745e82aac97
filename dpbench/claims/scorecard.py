"""All verdicts: on one artefact, cell by cell, and counted: per artefact, per paper and overall."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from dpbench.claims.evidence import Evidence, Measured
from dpbench.claims.finding import Finding, Lack, Outcome
from dpbench.claims.pairs import sources
from dpbench.claims.schema import Artefact, Cell, Claim, Kind, Order, Trend, Words
from dpbench.claims.verdict import Measure, judge_order, judge_trend, judge_value, judge_words


@dataclass(frozen=True)
class Scorecard:
    """Claims by outcome.

    Attributes:
        findings: of every claim, in the order of the files.
    """

    findings: tuple[Finding, ...]

    @cached_property
    def counts(self) -> Mapping[Outcome, int]:
        """How many claims had each outcome, in the order of `Outcome`, without those of none."""
        counted = Counter(finding.outcome for finding in self.findings)
        return {outcome: counted[outcome] for outcome in Outcome if counted[outcome]}

    @property
    def in_words(self) -> str:
        """How many claims had each outcome: 2 reproduced, 1 below."""
        return ", ".join(f"{count} {outcome}" for outcome, count in self.counts.items())

    @cached_property
    def published(self) -> Scorecard:
        """The claims of the papers."""
        return Scorecard(tuple(finding for finding in self.findings if not finding.own))

    @cached_property
    def own(self) -> Scorecard:
        """The claims that are dpbench's own, about the papers; see `Order`."""
        return Scorecard(tuple(finding for finding in self.findings if finding.own))

    @cached_property
    def papers(self) -> Mapping[str, Scorecard]:
        """The scorecard of each paper, of what it claims itself."""
        return self._by(lambda where: where.split("/")[0])

    @cached_property
    def artefacts(self) -> Mapping[str, Scorecard]:
        """The scorecard of each table and figure, by its file below conf/paper, of what the paper claims there."""
        return self._by(lambda where: where)

    def _by(self, key: Callable[[str], str]) -> dict[str, Scorecard]:
        groups: dict[str, list[Finding]] = {}
        for finding in self.published.findings:
            groups.setdefault(key(finding.artefact), []).append(finding)
        return {name: Scorecard(tuple(found)) for name, found in groups.items()}


@dataclass(frozen=True)
class JudgedCell:
    """A cell with what was found.

    Attributes:
        cell: the cell.
        parts: what its runs came to; two where it is the difference of two cells, none where it is quoted or the
            artefact is not reproducible.
        finding: the verdict; None where nothing is printed.
    """

    cell: Cell
    parts: tuple[Measured, ...]
    finding: Finding | None


@dataclass(frozen=True)
class Judgement:
    """All that was found about an artefact.

    Attributes:
        cells: in the order of the artefact.
        claims: its orders, trends and words, with their verdicts.
        whole: the one finding about an artefact that is not reproducible; None for others.
    """

    cells: tuple[JudgedCell, ...]
    claims: tuple[tuple[Claim, Finding], ...]
    whole: Finding | None = None

    @property
    def findings(self) -> tuple[Finding, ...]:
        """Those on its printed values, then those on its claims."""
        if self.whole is not None:
            return (self.whole,)
        values = [judged.finding for judged in self.cells if judged.finding is not None]
        return (*values, *(finding for _, finding in self.claims))


def examine(artefact: Artefact, evidence: Evidence) -> Judgement:
    """What the records say about an artefact, cell by cell and claim by claim; each cell is looked up once."""
    if artefact.kind == Kind.NOT_REPRODUCIBLE:
        detail = f"not reproducible: {artefact.reason}"
        whole = Finding(artefact.where, artefact.title, Outcome.NOT_RUN, detail, lack=Lack.NOT_REPRODUCIBLE)
        return Judgement(tuple(JudgedCell(cell, (), None) for cell in artefact.cells), (), whole)
    computed = evidence.computed(artefact)
    known: dict[int, Measured] = {}

    def measure(cell: Cell) -> Measured:
        if id(cell) not in known:
            known[id(cell)] = evidence.measure(cell, computed)
        return known[id(cell)]

    cells = []
    for cell in artefact.cells:
        parts = () if cell.quoted is not None else tuple(measure(part) for part in sources(artefact, cell))
        cells.append(JudgedCell(cell, parts, judge_value(artefact, cell, measure)))
    return Judgement(tuple(cells), tuple((claim, _judge_claim(artefact, claim, measure)) for claim in artefact.claims))


def _judge_claim(artefact: Artefact, claim: Claim, measure: Measure) -> Finding:
    match claim:
        case Order():
            return replace(judge_order(artefact, claim, measure), own=claim.own)
        case Trend():
            return judge_trend(artefact, claim, measure)
        case Words():
            return judge_words(artefact, claim)
