"""The verdict on each claim: a printed value, an order or a trend, against what the records say."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path

from dpbench.claims.evidence import Measured
from dpbench.claims.finding import Finding, Lack, Outcome
from dpbench.claims.needs import cost
from dpbench.claims.notation import number
from dpbench.claims.pairs import changes_of, distinct_pairs, sources
from dpbench.claims.schema import Artefact, Cell, Order, Trend, Words
from dpbench.claims.standard_errors import ERRORS, Noise, error_of, printed_error, standard_error
from dpbench.wording import number_of

# Of numbers that are compared with a bound.
ROUNDING = 1e-9


Measure = Callable[[Cell], Measured]
Part = tuple[Cell, Measured]


def judge_value(artefact: Artefact, cell: Cell, measure: Measure) -> Finding | None:
    """The verdict on a printed value; None where nothing is printed.

    Reproduced means: within the larger of the cell's tolerance and two standard errors of the difference of the printed
    value. The paper's own standard error counts where it prints a spread, taken for that of as many runs as the cell
    asks for. A number that the paper does not print but that follows from what it prints is judged alike and counted
    apart; a setting that is taken over from the paper is no result, and none of ours.
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
    error = math.hypot(*(standard_error(one) for one in found), printed_error(cell))
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
    claimed of all. The more pairs there are of which few decide, the more noise each is granted (`Noise`). Pairs of
    the same runs, as of panels that share them, are one.
    """
    pairs = [(_part(above, measure), _part(below, measure)) for above, below in distinct_pairs(artefact, order)]
    run = [pair for pair in pairs if all(one.enough for _, one in pair)]
    asked = len(pairs) if order.pairs is None else order.pairs
    shares = 1 / (len(pairs) - asked + 1), 1 / asked
    verdicts = [
        _pair(order, above.mean - below.mean, Noise(error_of(cell, above), error_of(other, below), *shares))
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
    error = math.hypot(*(error_of(*part).size for part in parts)) / len(terms)
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


def _pair(order: Order, difference: float, noise: Noise) -> Outcome:
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


def _met(left: float, noise: Noise) -> Outcome:
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
    """A verdict under the eps that runs and searches really spent.

    Where that is more than printed it is another claim; so it is where nobody knows what they spent.
    """
    measured = [one for _, one in parts]
    over, searches = (_largest(one.overspent for one in measured), _largest(one.search_overspent for one in measured))
    told = [f"eps={asked:g} spends {spent:.4g}" for asked, spent in over.items()]
    told += [f"all runs of a search for eps={asked:g} spend {spent:.4g}" for asked, spent in searches.items()]
    told += ["eps not proven"] * any(one.unproven for one in measured)
    if not told:
        return finding
    detail = f"{', '.join(told)}; on the numbers alone: {finding.outcome} ({finding.detail})"
    return replace(finding, outcome=Outcome.ACCOUNTING_DIFFERS, detail=detail)


def _largest(found: Iterable[Mapping[float, float]]) -> dict[float, float]:
    """The largest eps spent, by that asked for."""
    largest: dict[float, float] = {}
    for over in found:
        for asked, spent in over.items():
            largest[asked] = max(spent, largest.get(asked, 0.0))
    return largest
