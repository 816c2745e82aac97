"""A verdict on one claim, and the words for it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


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
