"""How a page shows an outcome: by colour, by sign and in words, so that no reader needs the colour."""

from __future__ import annotations

from dataclasses import dataclass

from dpbench.claims import Outcome


@dataclass(frozen=True)
class Badge:
    """What stands for an outcome.

    Attributes:
        sign: one character.
        tone: "good", "bad", "open" or "none", a class of the style sheet.
        meaning: when a claim has this outcome.
    """

    sign: str
    tone: str
    meaning: str


BADGES = {
    Outcome.REPRODUCED: Badge(
        "✓", "good", "our mean lies within the tolerance of the printed number: mostly a point, or two standard errors"
    ),
    Outcome.AS_DERIVED: Badge("=", "none", "our number agrees with one that the paper determines but does not print"),
    Outcome.ABOVE: Badge("▲", "open", "our mean lies above the printed number by more than that"),
    Outcome.BELOW: Badge("▼", "bad", "our mean lies below the printed number by more than that"),
    Outcome.ORDER_HOLDS: Badge(
        "✓",
        "good",
        "a difference or change is what is claimed by more than its noise; a stated amount is met by the difference "
        "itself, and “not below” is not contradicted",
    ),
    Outcome.ORDER_FAILS: Badge(
        "✗", "bad", "the contrary by more than noise, or a stated amount missed by more than it"
    ),
    Outcome.ORDER_OPEN: Badge(
        "≈", "open", "numbers that differ from one another, or from a stated amount, by noise alone"
    ),
    Outcome.TOO_FEW_SEEDS: Badge("…", "open", "some runs have finished, fewer than the number is the mean of"),
    Outcome.ACCOUNTING_DIFFERS: Badge(
        "≠",
        "open",
        "the runs spend more eps than the paper says, or nobody knows how much, so that numbers do not decide",
    ),
    Outcome.NOT_RUN: Badge("○", "none", "no runs yet; the entry lists what they need"),
    Outcome.FAILED: Badge("!", "bad", "runs ended in an error, diverged, or are not what was planned"),
    Outcome.NOT_JUDGED: Badge("–", "none", "a claim in words, or a setting that our runs take over as printed"),
}
