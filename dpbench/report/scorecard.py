"""results/scorecard.md: every claim by outcome, overall, per paper and per artefact; what was not run is told first.

Claims that are dpbench's own, about the papers, have a row of their own and are in no other number.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

from dpbench.claims import SECTIONS, Kind, Outcome, Scorecard
from dpbench.claims.needs import cost
from dpbench.markdown import table
from dpbench.report.grid import Grid, command_of_all, runs_behind, scorecard
from dpbench.report.layout import heading_of
from dpbench.report.outcomes import BADGES
from dpbench.tracking.reading import Recorded
from dpbench.wording import number_of

# Outcomes in which our numbers bear a claim out, and those in which they were compared with it at all.
AGREES = (Outcome.REPRODUCED, Outcome.ORDER_HOLDS)
COMPARED = (*AGREES, Outcome.ABOVE, Outcome.BELOW, Outcome.ORDER_FAILS, Outcome.ORDER_OPEN, Outcome.ACCOUNTING_DIFFERS)
OWN = "dpbench's own claims"


def as_markdown(grids: Sequence[Grid]) -> str:
    """The scorecard of all artefacts."""
    card = scorecard(grids)
    paragraphs = [*_head(grids, card), *_reasons(card.published), *_papers(card), *_artefacts(grids, card)]
    return "\n\n".join(paragraphs) + "\n"


def _head(grids: Sequence[Grid], card: Scorecard) -> Iterator[str]:
    counts = card.published.counts
    yield "# Scorecard"
    yield from _compared(grids, card)
    repeats = repeated(grids)
    if repeats is not None:
        yield repeats
    origins = origins_of(grids)
    newest = newest_record(origins)
    if newest is not None:
        changed = sum(bool(origin.get("dirty")) for origin in origins)
        yield (
            f"Newest record: {newest}.\n"
            f"{changed:,} of {number_of(len(origins), 'run')} behind cells began with changes that were in no commit."
        )
    yield table(["outcome", "claims"], ((outcome, counts.get(outcome, 0)) for outcome in Outcome), numbers=["claims"])
    yield "What the outcomes mean:"
    yield "\n".join(f"- *{outcome}*: {badge.meaning}." for outcome, badge in BADGES.items())
    command = command_of_all(grids)
    yield f"The rules in full are in docs/reproducing.md. `{command}` runs what is missing and writes this page."


def _compared(grids: Sequence[Grid], card: Scorecard) -> Iterator[str]:
    """How many claims have been compared with numbers of ours, and how many of these agree: of each kind of claims."""
    claims = card.published
    judged = [finding for finding in claims.findings if finding.outcome in COMPARED]
    compared = [finding for finding in judged if not finding.derived]
    agrees = sum(finding.outcome in AGREES for finding in compared)
    reproduced = sum(finding.outcome == Outcome.REPRODUCED for finding in compared)
    trained = scorecard(grid for grid in grids if grid.artefact.kind == Kind.TRAINED).published
    by_training = sum(trained.counts.get(one, 0) for one in AGREES)
    tables = f"{len(card.artefacts)} {'table or figure' if len(card.artefacts) == 1 else 'tables and figures'}"
    yield (
        f"Of {len(claims.findings)} claims in {tables} {len(compared)} have been compared with numbers of ours; "
        f"{agrees} of these ({number_of(reproduced, 'number')} and {number_of(agrees - reproduced, 'order')}: which of "
        f"two numbers is the larger) are reproduced or hold, {by_training} by training and {agrees - by_training} by "
        f"computing. {claims.counts.get(Outcome.NOT_RUN, 0)} have not been run."
    )
    own = [finding.outcome for finding in card.own.findings if finding.outcome in COMPARED]
    if own:
        yield (
            f"Not among these are dpbench's own claims about the papers, {number_of(len(card.own.findings), 'order')}: "
            "what a method or its released code computes, what printed numbers imply, or a paper's claim, narrowed or "
            "carried over to other data. "
            f"{len(own)} of them have been compared, and {own.count(Outcome.ORDER_HOLDS)} hold."
        )
    derived = claims.counts.get(Outcome.AS_DERIVED, 0)
    if derived:
        unprinted = sum(finding.derived for finding in claims.findings)
        others = len(judged) - len(compared)
        but = f", and {others} do not" if others else ""
        yield (
            f"Among the {len(claims.findings)} are also {number_of(unprinted, 'number')} that no paper prints: "
            "they follow from its formulas, some at settings of ours, and do not count as compared. "
            f"{derived} agree with ours{but}."
        )


def repeated(grids: Iterable[Grid]) -> str | None:
    """How many numbers that training reproduced are the same one of the same runs in another table; None for none."""
    entries = [
        entry
        for grid in grids
        for entry in grid.entries.values()
        if entry.runs and entry.finding is not None and entry.finding.outcome == Outcome.REPRODUCED
    ]
    printed = [(entry.cell.printed.value, entry.cell.unit) for entry in entries if entry.cell.printed is not None]
    runs = [tuple(run.folder for run in entry.runs) for entry in entries]
    distinct = len(set(zip(printed, runs, strict=True)))
    if distinct == len(entries):
        return None
    return (
        f"The {number_of(len(entries), 'printed number')} reproduced by training are {distinct:,} distinct ones: "
        f"in {number_of(len(entries) - distinct, 'place')} the same runs reproduce the same number as in another."
    )


def origins_of(grids: Iterable[Grid]) -> list[Mapping[str, Any]]:
    """Where every run behind any number comes from, as its record says, each run once."""
    return [Recorded(folder).provenance for folder in runs_behind(grids)]


def newest_record(origins: Iterable[Mapping[str, Any]]) -> str | None:
    """When the newest run began, and at which commit; None where no record says."""
    dated = [origin for origin in origins if _is_stamp(origin.get("started"))]
    if not dated:
        return None
    newest = max(dated, key=lambda origin: (str(origin["started"]), str(origin.get("commit"))))
    changed = " with changes" if newest.get("dirty") else ""
    commit = str(newest.get("commit"))[:12]
    return f"{newest['started']}, commit {commit if commit.isalnum() else 'unknown'}{changed}"


def _is_stamp(text: object) -> bool:
    """Whether a text of a record is a time and nothing else, which Markdown would show as whatever it is."""
    try:
        datetime.fromisoformat(str(text))
    except ValueError:
        return False
    return True


def _reasons(card: Scorecard) -> Iterator[str]:
    waiting = Counter(finding.lack for finding in card.findings if finding.lack is not None)
    if waiting:
        yield "## Why claims have not been run"
        yield table(["reason", "claims"], waiting.most_common(), numbers=["claims"])


def _papers(card: Scorecard) -> Iterator[str]:
    yield "## Papers"
    papers = [(SECTIONS[paper], of_paper) for paper, of_paper in card.papers.items()]
    yield _counted([*papers, (OWN, card.own)] if card.own.findings else papers, card, "paper")


def _artefacts(grids: Sequence[Grid], card: Scorecard) -> Iterator[str]:
    for paper in dict.fromkeys(grid.artefact.paper for grid in grids):
        own = [grid for grid in grids if grid.artefact.paper == paper]
        yield f"## {SECTIONS[paper]}"
        trained = [grid.artefact for grid in own if grid.artefact.kind == Kind.TRAINED]
        yield f"All of it takes {cost(cell for artefact in trained for cell in artefact.cells).in_words()}."
        named = [(_link(grid), Scorecard(grid.findings).published) for grid in own]
        yield _counted(named, card.papers.get(paper, Scorecard(())), "table or figure")


def _link(grid: Grid) -> str:
    artefact = grid.artefact
    return f"[{heading_of(artefact)}]({artefact.stem}.md)"


def _counted(named: Sequence[tuple[str, Scorecard]], of_all: Scorecard, what: str) -> str:
    """A table of counts with the outcomes that occur."""
    outcomes = list(of_all.counts)
    rows = [[name, len(card.findings), *(card.counts.get(one, 0) for one in outcomes)] for name, card in named]
    return table([what, "claims", *outcomes], rows, numbers=["claims", *outcomes])
