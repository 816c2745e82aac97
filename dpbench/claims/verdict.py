"""The verdict on each claim: a printed value, an order or a trend, against what the records say."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cache
from itertools import chain
from pathlib import Path

from dpbench.claims.evidence import Measured
from dpbench.claims.needs import cost
from dpbench.claims.notation import number
from dpbench.claims.pairs import changes_of, distinct_pairs, sources
from dpbench.claims.schema import Artefact, Cell, Order, Trend, Words
from dpbench.wording import number_of

# Standard errors that a difference must exceed.
ERRORS = 2.0
# Of numbers that are compared with a bound.
ROUNDING = 1e-9


class Outcome(StrEnum):
    """What became of a claim."""

    REPRODUCED = "reproduced"
    AS_DERIVED = "as derived"
    ABOVE = "above"
    BELOW = "below"
    ORDER_HOLDS = "order holds"
    ORDER_FAILS = "order fails"
    ORDER_OPEN = "order within noise"
    TOO_FEW_SEEDS = "too few seeds"
    ACCOUNTING_DIFFERS = "accounting differs"
    NOT_RUN = "not run"
    FAILED = "failed"
    NOT_JUDGED = "not judged by numbers"


class Lack(StrEnum):
    """What a claim that was not run waits for."""

    QUOTED = "the paper quotes the number from another publication"
    NOT_REPRODUCIBLE = "not reproducible, as its page says why"
    RUNS = "runs are missing"
    WEIGHTS = "runs are missing, which need pretrained weights that can be fetched"
    UNPUBLISHED = "runs are missing, which need pretrained weights that nobody published"
    COMPUTATION = "not computed yet"


@dataclass(frozen=True)
class Finding:
    """The verdict on one claim.

    Attributes:
        artefact: its file below conf/paper.
        claim: in words.
        outcome: the verdict.
        detail: the numbers behind it, or what is missing.
        own: whether the claim is not the paper's, see `Order`.
        derived: whether the number is one that the paper does not print, see `Cell`.
        lack: why it was not run; None for other outcomes.
    """

    artefact: str
    claim: str
    outcome: Outcome
    detail: str
    own: bool = False
    derived: bool = False
    lack: Lack | None = None


Measure = Callable[[Cell], Measured]
Part = tuple[Cell, Measured]


def judge_value(artefact: Artefact, cell: Cell, measure: Measure) -> Finding | None:
    """The verdict on a printed value; None where nothing is printed.

    Reproduced means: within the larger of the cell's tolerance and two standard errors of the difference of the printed
    value. The paper's own standard error counts where it prints a spread, taken for that of as many
    runs as the cell asks for. A number that the paper does not print but that follows from what it prints is judged
    alike and counted apart; a setting that is taken over from the paper is no result, and none of ours.
    """
    if cell.printed is None:
        return None
    claim = f"{cell.place}: {_amount(cell.printed.value, cell)}"
    if cell.derived is not None:
        claim += f" (not printed, by {cell.derived})"
    if cell.quoted is not None:
        detail = f"quoted from {cell.quoted}; no run of the paper's"
        return Finding(artefact.where, claim, Outcome.NOT_RUN, detail, lack=Lack.QUOTED)
    parts = [(part, measure(part)) for part in sources(artefact, cell)]
    obstacle = _obstacle(artefact, claim, parts)
    if obstacle is not None:
        return obstacle
    found = [one for _, one in parts]
    value = cleared(found[0].mean - (found[1].mean if len(found) > 1 else 0.0), cell)
    error = math.hypot(*(_standard_error(one) for one in found), _printed_error(cell))
    allowed = max(cell.tolerance.points, ERRORS * error)
    difference = value - cell.printed.value
    by = "computed" if cell.metric == "computed" else f"over {number_of(len(found[0].values), 'run')}"
    # What rounding leaves of a difference is none, and of one that is just allowed is allowed.
    rounding = ROUNDING * max(allowed, abs(cell.printed.value))
    difference = 0.0 if abs(difference) <= rounding else difference
    near = abs(difference) <= allowed + rounding
    digits = 3 if near else _digits_apart(abs(difference), allowed)
    detail = f"{_own(value, cell)} {by}, {difference:+.{digits}g}, allowed ±{allowed:.{digits}g}"
    agreed = Outcome.REPRODUCED if cell.derived is None else Outcome.AS_DERIVED
    if cell.taken_over:
        agreed, detail = Outcome.NOT_JUDGED, "a setting, which the runs here take over as it is printed"
    outcome = agreed if near else Outcome.ABOVE if difference > 0 else Outcome.BELOW
    return _accounted(Finding(artefact.where, claim, outcome, detail, derived=cell.derived is not None), parts)


def cleared(value: float, cell: Cell) -> float:
    """A number of ours as it is shown: 0 where that is printed and only rounding is left beside the tolerance."""
    printed_zero = cell.printed is not None and cell.printed.value == 0
    return 0.0 if printed_zero and abs(value) <= ROUNDING * cell.tolerance.points else value


def _digits_apart(one: float, other: float) -> int:
    """How many digits tell two numbers apart, at least three."""
    return next(digits for digits in range(3, 18) if f"{one:.{digits}g}" != f"{other:.{digits}g}")


def judge_order(artefact: Artefact, order: Order, measure: Measure) -> Finding:
    """The verdict on an order, from the pairs of cells it is about.

    A pair bears it out where the difference exceeds its noise, contradicts it where it does so with the other sign, and
    is open between the two. A margin, or a distance to stay within, is met by the difference itself and missed where
    it is missed by more than noise; "at least" needs no more than not to be contradicted. Pairs that were run decide
    alone where those that were not could not change the verdict: one that contradicts is enough against an order
    claimed of all. The more pairs there are of which few decide, the more noise each is granted (`_Noise`). Pairs of
    the same runs, as of panels that share them, are one.
    """
    pairs = [(_part(above, measure), _part(below, measure)) for above, below in distinct_pairs(artefact, order)]
    run = [pair for pair in pairs if all(one.enough for _, one in pair)]
    asked = len(pairs) if order.pairs is None else order.pairs
    shares = 1 / (len(pairs) - asked + 1), 1 / asked
    verdicts = [
        _pair(order, above.mean - below.mean, _Noise(_error(cell, above), _error(other, below), *shares))
        for (cell, above), (other, below) in run
    ]
    holds, fails = verdicts.count(Outcome.ORDER_HOLDS), verdicts.count(Outcome.ORDER_FAILS)
    outcome = _verdict(holds, len(pairs) - fails, asked)
    if outcome == Outcome.ORDER_OPEN:
        obstacle = _obstacle(artefact, order.says, chain.from_iterable(pairs))
        if obstacle is not None:
            return obstacle
    left = len(run) - holds - fails
    detail = f"{_bound(order)}holds in {holds} of {len(pairs)} pairs, fails in {fails}, within noise in {left}"
    if len(run) < len(pairs):
        detail += f", not run in {len(pairs) - len(run)}"
    return _accounted(Finding(artefact.where, order.says, outcome, detail), chain.from_iterable(run))


def judge_trend(artefact: Artefact, trend: Trend, measure: Measure) -> Finding:
    """The verdict on a trend: the mean change from one end of the axis to the other, against its noise."""
    changes = tuple(changes_of(artefact, trend))
    parts = [_part(cell, measure) for change in changes for cell, _ in change]
    obstacle = _obstacle(artefact, trend.says, parts)
    if obstacle is not None:
        return obstacle
    sign = 1 if trend.rising else -1
    terms = [[(weight * sign, _number(cell, measure)) for cell, weight in change] for change in changes]
    mean = statistics.fmean(sum(weight * one.mean for weight, one in change) for change in terms)
    error = math.hypot(*(_error(*part).size for part in parts)) / len(terms)
    outcome = _sign(mean, ERRORS * error)
    detail = f"changes by {sign * mean:+.3g} on average over {len(terms)} places, noise ±{ERRORS * error:.3g}"
    return _accounted(Finding(artefact.where, trend.says, outcome, detail), parts)


def judge_words(artefact: Artefact, words: Words) -> Finding:
    """A claim that no number decides, with the reason."""
    return Finding(artefact.where, words.says, Outcome.NOT_JUDGED, words.why)


def _number(cell: Cell, measure: Measure) -> Measured:
    """What a cell contributes to an order: its runs' numbers, or the one that the paper quotes."""
    if cell.quoted is None or cell.printed is None:
        return measure(cell)
    return Measured((cell.printed.value,), 1, {})


def _part(cell: Cell, measure: Measure) -> Part:
    return cell, _number(cell, measure)


@dataclass(frozen=True)
class _Error:
    """Of a mean.

    Attributes:
        size: its standard error.
        freedom: degrees of freedom of that; inf where it is not an estimate.
    """

    size: float
    freedom: float = math.inf


class _Noise:
    """How far two means must lie apart to say which is above.

    Two standard errors for one pair. Where k of m pairs would decide an order, chance has many tries: k - 1 of them may
    be as they seem, and then one error among the other m - k + 1 decides it. So much noise is granted to each that all
    together err no more often than one pair does (tests at 1/(m - k + 1) of the level; with fewer that are as they
    seem, more errors are needed, and as many come no more often, by Markov's inequality), by Student's distribution
    with Welch's degrees of freedom.

    Attributes:
        bearing_out: for a pair that is to bear the order out.
        contradicting: for one that is to contradict it.
    """

    def __init__(self, above: _Error, below: _Error, deciding_for: float, deciding_against: float) -> None:
        """Of one pair.

        Args:
            above: of the mean that is said to be above.
            below: of the other one.
            deciding_for: share of the level at which a pair bears the order out.
            deciding_against: the same where it contradicts it.
        """
        error = math.hypot(above.size, below.size)
        estimated = sum(one.size**4 / one.freedom for one in (above, below))
        freedom = error**4 / estimated if estimated > 0 else math.inf
        self.bearing_out = _errors_at(deciding_for, freedom) * error
        self.contradicting = _errors_at(deciding_against, freedom) * error


@cache
def _errors_at(share: float, freedom: float) -> float:
    """How many standard errors are exceeded by chance in so small a share of the cases in which two are."""
    if share == 1:
        return ERRORS
    from scipy.special import ndtr, ndtri, stdtr, stdtrit  # takes a while, which most commands have no use for

    if math.isinf(freedom):
        return float(-ndtri(share * ndtr(-ERRORS)))
    return float(-stdtrit(freedom, share * stdtr(freedom, -ERRORS)))


def _pair(order: Order, difference: float, noise: _Noise) -> Outcome:
    if order.within is not None:
        return _met(order.within - abs(difference), noise)
    if order.margin is not None:
        return _met(difference - order.margin, noise)
    if order.at_least:
        return _either(difference >= -noise.contradicting)
    if -noise.contradicting <= difference <= noise.bearing_out:
        return Outcome.ORDER_OPEN
    return _either(difference > 0)


def _bound(order: Order) -> str:
    """What the difference of a pair has to keep to, where that is more than its sign."""
    if order.within is not None:
        return f"within {order.within:g}: "
    return f"by {order.margin:g} or more: " if order.margin is not None else ""


def _met(left: float, noise: _Noise) -> Outcome:
    """Of a bound, of which so much is left; what rounding leaves of a number that is just on it is nothing."""
    if left >= -ROUNDING:
        return Outcome.ORDER_HOLDS
    return Outcome.ORDER_OPEN if -left <= noise.contradicting else Outcome.ORDER_FAILS


def _either(holds: bool) -> Outcome:
    return Outcome.ORDER_HOLDS if holds else Outcome.ORDER_FAILS


def _sign(difference: float, noise: float) -> Outcome:
    if abs(difference) <= noise:
        return Outcome.ORDER_OPEN
    return _either(difference > 0)


def _verdict(holds: int, possible: int, asked: int) -> Outcome:
    """An order over all pairs; open where those within noise, or not run, decide it."""
    if holds >= asked:
        return Outcome.ORDER_HOLDS
    return Outcome.ORDER_FAILS if possible < asked else Outcome.ORDER_OPEN


def _amount(value: float, cell: Cell) -> str:
    digits = 6 if cell.metric == "computed" else 4
    return f"{value:.{digits}g} {cell.unit}".strip()


def _own(value: float, cell: Cell) -> str:
    """An amount of ours, as tables show it."""
    return _amount(value, cell) if cell.metric == "computed" else f"{number(value, cell.unit)} {cell.unit}".strip()


def _standard_error(one: Measured) -> float:
    return 0.0 if one.spread is None else one.spread / math.sqrt(len(one.values))


def _error(cell: Cell, one: Measured) -> _Error:
    """Of the mean of a cell that is compared with another one.

    The spread of a single run is not known: two standard errors of it are taken to be the tolerance of its number.
    """
    if one.runs and one.spread is None:
        return _Error(cell.tolerance.points / ERRORS)
    return _Error(_standard_error(one), len(one.values) - 1 or math.inf)


def _printed_error(cell: Cell) -> float:
    spread = cell.printed.spread if cell.printed is not None else None
    return 0.0 if spread is None else spread / math.sqrt(cell.seeds)


def _obstacle(artefact: Artefact, claim: str, parts: Iterable[Part]) -> Finding | None:
    """Why a claim can't be judged yet, the gravest reason first; None if it can."""
    distinct = {cell.place: (cell, one) for cell, one in parts}
    short = [(cell, one) for cell, one in distinct.values() if not one.enough]
    if not short:
        return None
    broken = {folder: how for _, one in short for folder, how in one.failures.items()}
    unstarted = [cell for cell, one in short if not one.values or one.missing]
    if broken:
        # Folders as seen from the results, which are read elsewhere than they were made.
        told = [f"{how} ({'/'.join(Path(folder).parts[-3:])})" for folder, how in sorted(broken.items())]
        detail = ", ".join(told[:3]) + (f" and {len(told) - 3} more" if len(told) > 3 else "")
        return Finding(artefact.where, claim, Outcome.FAILED, detail)
    if unstarted:
        if all(cell.metric == "computed" for cell in unstarted):
            return Finding(artefact.where, claim, Outcome.NOT_RUN, "not computed yet", lack=Lack.COMPUTATION)
        needed = f"needs {cost(unstarted).in_words()}"
        return Finding(artefact.where, claim, Outcome.NOT_RUN, needed, lack=_lack_of_runs(unstarted))
    cell, one = short[0]
    detail = f"{len(one.values)} of {one.wanted} runs at {cell.place}, mean {_own(one.mean, cell)}"
    return Finding(artefact.where, claim, Outcome.TOO_FEW_SEEDS, detail)


def _lack_of_runs(cells: Sequence[Cell]) -> Lack:
    """What cells wait for that have not been run, the hardest to come by."""
    if any(cell.unpublished for cell in cells):
        return Lack.UNPUBLISHED
    return Lack.WEIGHTS if any(cell.needs.weights is not None for cell in cells) else Lack.RUNS


def _accounted(finding: Finding, parts: Iterable[Part]) -> Finding:
    """A verdict under the eps that the runs really spent: where that is more than printed, it is another claim."""
    over: dict[float, float] = {}
    for _, one in parts:
        for asked, spent in one.overspent.items():
            over[asked] = max(spent, over.get(asked, 0.0))
    if not over:
        return finding
    told = ", ".join(f"eps={asked:g} spends {spent:.4g}" for asked, spent in over.items())
    detail = f"{told}; on the numbers alone: {finding.outcome} ({finding.detail})"
    return replace(finding, outcome=Outcome.ACCOUNTING_DIFFERS, detail=detail)
