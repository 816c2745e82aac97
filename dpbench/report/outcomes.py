"""How a page shows an outcome: by colour, by sign and in words, so that no reader needs the colour."""

from __future__ import annotations

from dataclasses import dataclass

from dpbench.claims import Outcome


@dataclass(frozen=True)
class Look:
    """The looks of an outcome.

    Attributes:
        sign: one character.
        tone: "good", "bad", "open" or "none", a class of the style sheet.
        meaning: when a claim has this outcome.
    """

    sign: str
    tone: str
    meaning: str


LOOKS = {
    Outcome.REPRODUCED: Look(
        "✓", "good", "our mean lies within the tolerance of the printed number: mostly a point, or two standard errors"
    ),
    Outcome.AS_DERIVED: Look("=", "none", "our number agrees with one that the paper determines but does not print"),
    Outcome.ABOVE: Look("▲", "open", "our mean lies above the printed number by more than that"),
    Outcome.BELOW: Look("▼", "bad", "our mean lies below the printed number by more than that"),
    Outcome.ORDER_HOLDS: Look(
        "✓",
        "good",
        "a difference or change is what is claimed by more than its noise; a stated amount is met by the difference "
        "itself, and “not below” is not contradicted",
    ),
    Outcome.ORDER_FAILS: Look("✗", "bad", "the contrary by more than noise, or a stated amount missed by more than it"),
    Outcome.ORDER_OPEN: Look(
        "≈", "open", "numbers that differ from one another, or from a stated amount, by noise alone"
    ),
    Outcome.TOO_FEW_SEEDS: Look("…", "open", "some runs have finished, fewer than the number is the mean of"),
    Outcome.ACCOUNTING_DIFFERS: Look(
        "≠",
        "open",
        "the runs spend more eps than the paper says, or nobody knows how much, so that numbers do not decide",
    ),
    Outcome.NOT_RUN: Look("○", "none", "no runs yet; the entry lists what they need"),
    Outcome.FAILED: Look("!", "bad", "runs ended in an error, diverged, or are not what was planned"),
    Outcome.NOT_JUDGED: Look("–", "none", "a claim in words, or a setting that our runs take over as printed"),
}
