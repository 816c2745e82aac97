"""The noise of means: their standard errors, and how far two of them must lie apart to say which is above."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

from dpbench.claims.evidence import Measured
from dpbench.claims.schema import Cell

# Standard errors that a difference must exceed.
ERRORS = 2.0


@dataclass(frozen=True)
class StandardError:
    """Of a mean.

    Attributes:
        size: its standard error.
        freedom: degrees of freedom of that; inf where it is not an estimate.
    """

    size: float
    freedom: float = math.inf


def standard_error(one: Measured) -> float:
    """Of a mean over runs; 0 where there is no spread."""
    return 0.0 if one.spread is None else one.spread / math.sqrt(len(one.values))


def error_of(cell: Cell, one: Measured) -> StandardError:
    """Of the mean of a cell that is compared with another one.

    The spread of a single run is not known: two standard errors of it are taken to be the tolerance of its number.
    """
    if one.runs and one.spread is None:
        return StandardError(cell.tolerance.points / ERRORS)
    return StandardError(standard_error(one), len(one.values) - 1 or math.inf)


def printed_error(cell: Cell) -> float:
    """Of a printed mean, taken to be over as many runs as the cell asks for; 0 where no spread is printed."""
    spread = cell.printed.spread if cell.printed is not None else None
    return 0.0 if spread is None else spread / math.sqrt(cell.seeds)


class Noise:
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

    def __init__(
        self, above: StandardError, below: StandardError, deciding_for: float, deciding_against: float
    ) -> None:
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
        self.bearing_out = errors_at(deciding_for, freedom) * error
        self.contradicting = errors_at(deciding_against, freedom) * error


@cache
def errors_at(share: float, freedom: float) -> float:
    """How many standard errors are exceeded by chance in so small a share of the cases in which two are."""
    if share == 1:
        return ERRORS
    from scipy.special import ndtr, ndtri, stdtr, stdtrit  # takes a while, which most commands have no use for

    if math.isinf(freedom):
        return float(-ndtri(share * ndtr(-ERRORS)))
    return float(-stdtrit(freedom, share * stdtr(freedom, -ERRORS)))
