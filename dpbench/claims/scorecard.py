"""All verdicts, counted: per artefact, per paper and overall."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

from dpbench.claims.evidence import Evidence, Measured
from dpbench.claims.schema import Artefact, Cell, Kind, Order, Trend, Words
from dpbench.claims.verdict import Finding, Outcome, judge_order, judge_trend, judge_value, judge_words


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

    @cached_property
    def papers(self) -> Mapping[str, Scorecard]:
        """The scorecard of each paper."""
        return self._by(lambda where: where.split("/")[0])

    @cached_property
    def artefacts(self) -> Mapping[str, Scorecard]:
        """The scorecard of each table and figure, by its file below conf/paper."""
        return self._by(lambda where: where)

    def _by(self, key: Callable[[str], str]) -> dict[str, Scorecard]:
        groups: dict[str, list[Finding]] = {}
        for finding in self.findings:
            groups.setdefault(key(finding.artefact), []).append(finding)
        return {name: Scorecard(tuple(found)) for name, found in groups.items()}


def judge(artefact: Artefact, evidence: Evidence) -> tuple[Finding, ...]:
    """The verdicts on all that an artefact claims: its printed values, then its orders, trends and words."""
    if artefact.kind == Kind.NOT_REPRODUCIBLE:
        return (Finding(artefact.where, artefact.title, Outcome.NOT_RUN, f"not reproducible: {artefact.reason}"),)
    known: dict[int, Measured] = {}

    def measure(cell: Cell) -> Measured:
        if id(cell) not in known:
            known[id(cell)] = evidence.measure(artefact, cell)
        return known[id(cell)]

    values = [judge_value(artefact, cell, measure) for cell in artefact.cells]
    findings = [finding for finding in values if finding is not None]
    for claim in artefact.claims:
        match claim:
            case Order():
                findings.append(judge_order(artefact, claim, measure))
            case Trend():
                findings.append(judge_trend(artefact, claim, measure))
            case Words():
                findings.append(judge_words(artefact, claim))
    return tuple(findings)


def score(artefacts: Iterable[Artefact], evidence: Evidence) -> Scorecard:
    """The scorecard of artefacts."""
    return Scorecard(tuple(finding for artefact in artefacts for finding in judge(artefact, evidence)))
