"""What each file of a record looks like, so that valid JSON of another shape is told from a record.

A shape takes a value and says what is wrong with it, in words such as "eps: expected a number"; None where nothing is.
Entries that a shape does not name may be anything: records of other versions of this code have others.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from typing import Any

Shape = Callable[[Any], str | None]

# How records write numbers that JSON has none for.
NOT_FINITE = ("inf", "-inf", "nan")


def is_number(value: Any) -> bool:
    """Whether a value is a number, or the word for one that JSON can't hold."""
    if isinstance(value, str):
        return value in NOT_FINITE
    if isinstance(value, int):  # of any size in JSON
        return not isinstance(value, bool) and abs(value) <= sys.float_info.max
    return isinstance(value, float)


def of(check: Callable[[Any], bool], expected: str) -> Shape:
    """A value that passes a check."""
    return lambda value: None if check(value) else f"expected {expected}"


def maybe(shape: Shape) -> Shape:
    """A value of this shape, or null."""
    return lambda value: None if value is None else shape(value)


def list_of(shape: Shape) -> Shape:
    """A list of such values."""

    def complaint(value: Any) -> str | None:
        if not isinstance(value, list):
            return "expected a list"
        return _first(("item " + str(place), shape(item)) for place, item in enumerate(value, 1))

    return complaint


def entries(shapes: Mapping[str, Shape], required: tuple[str, ...] = (), others: Shape | None = None) -> Shape:
    """An object whose entries have shapes by their names.

    Args:
        shapes: of entries that may be there.
        required: those that must be.
        others: of entries that `shapes` doesn't name; None for any.
    """

    def complaint(value: Any) -> str | None:
        if not isinstance(value, dict):
            return "expected an object"
        for name in required:
            if name not in value:
                return f"{name} is missing"
        found = ((str(name), shapes.get(name, others), item) for name, item in value.items())
        return _first((name, shape(item)) for name, shape, item in found if shape is not None)

    return complaint


def _first(complaints: Any) -> str | None:
    return next((f"{name}: {complaint}" for name, complaint in complaints if complaint is not None), None)


NUMBER = of(is_number, "a number")
FINITE = of(lambda value: is_number(value) and not isinstance(value, str) and math.isfinite(value), "a finite number")
WHOLE = of(lambda value: isinstance(value, int) and is_number(value), "a whole number")
WORD = of(lambda value: isinstance(value, str), "a text")
SWITCH = of(lambda value: isinstance(value, bool), "true or false")
OBJECT = entries({})

# What claims may be about, besides accuracy: each a number of a run's end, or of an evaluation.
SCORES = (
    "test_loss",
    "validation_loss",
    "gradient_norm",
    "bleu",
    "rouge_l",
    "meteor",
    "meteor_without_synonyms",
    "nist",
    "cider",
    "perplexity",
)
_NUMBERS = (*SCORES, "eps", "target_eps", "published_eps", "search_eps", "delta", "noise_multiplier", "sampling_rate")


def status(words: tuple[str, ...]) -> Shape:
    """Of status.json, whose status is one of these words."""
    word = of(lambda value: value in words, f"one of {', '.join(words)}")
    return entries({"status": word, "reason": maybe(WORD), "traceback": maybe(WORD)}, required=("status",))


def summary(*, finished: bool) -> Shape:
    """Of summary.json; a finished run has an accuracy."""
    number = NUMBER if finished else maybe(NUMBER)
    accuracy = entries({"final": number, "best": maybe(NUMBER), "best_step": maybe(NUMBER)}, required=("final",))
    return entries(
        {
            **dict.fromkeys(_NUMBERS, maybe(NUMBER)),
            "test_accuracy": accuracy,
            "test_accuracy_by_class": maybe(list_of(maybe(NUMBER))),
            "threshold_guards": entries({}, others=WHOLE),
            "steps": WHOLE,
            "seed": WHOLE,
            "private": SWITCH,
            "clipped": SWITCH,
        },
        required=("test_accuracy",) if finished else (),
    )


_PART = entries({"name": WORD, "noise_multiplier": FINITE}, required=("name", "noise_multiplier"))
_RELEASES = {
    "sampling_rate": FINITE,
    "noise_multipliers": list_of(FINITE),
    "count": WHOLE,
    "beside": list_of(_PART),
}
LEDGER = entries(
    {
        **dict.fromkeys(("eps", "target_eps", "published_eps"), maybe(NUMBER)),
        **dict.fromkeys(("neighbouring", "sampler", "accountant", "correlation"), maybe(WORD)),
        "delta": FINITE,
        "planned": WHOLE,
        "releases": list_of(entries(_RELEASES, required=tuple(_RELEASES))),
    },
    required=("delta", "releases"),
)
_RANKS = list_of(entries({"device": WORD, "micro_batch": WHOLE, "at_once": WHOLE}))
PROVENANCE = entries(
    {
        **dict.fromkeys(("started", "commit", "device", "python", "platform", "cuda"), maybe(WORD)),
        "dirty": maybe(SWITCH),
        "versions": maybe(entries({}, others=maybe(WORD))),
        "wall_seconds": maybe(NUMBER),
        "seeds_at_once": WHOLE,
        "seeded_noise": WHOLE,
        "channels_last": SWITCH,
        "ranks": _RANKS,
        "resumed": list_of(entries({"step": WHOLE, "device": maybe(WORD), "ranks": _RANKS}, required=("step",))),
    }
)
_MEASURED = (*SCORES, "train_loss", "above_threshold", "test_accuracy", "eps", "lr", "threshold", "seconds")
EVALUATION = entries({**dict.fromkeys(_MEASURED, maybe(NUMBER)), "step": WHOLE, "epoch": NUMBER}, required=("step",))
_STAGES = (
    *("query", "clip", "threshold", "noise", "filter", "optim", "schedule", "averaging", "model"),
    *("augmentation", "evaluation", "data", "tracker", "algo"),
)
SETTINGS = entries(
    {
        **dict.fromkeys(_STAGES, OBJECT),
        "dataset": entries({"name": WORD, "train_size": WHOLE, "validation_size": maybe(WHOLE)}),
        "privacy": entries({"search_runs": maybe(FINITE)}),
        "choices": entries({}, others=WORD),
        "overrides": list_of(WORD),
        "eps": NUMBER,
        "seed": WHOLE,
    }
)
# Kind, method and chunk, as gradients/choice.py has them.
_STRATEGY = of(
    lambda value: isinstance(value, list) and [type(part) for part in value] == [str, str, int], "a strategy"
)
_OF_PROCESS = {
    "device": maybe(WORD),
    "micro_batch": maybe(WHOLE),
    "at_once": maybe(WHOLE),
    "strategies": maybe(entries({}, others=_STRATEGY)),
}
_NOTE = {
    **_OF_PROCESS,
    "step": NUMBER,
    "noise": maybe(WHOLE),
    "noise_multiplier": maybe(NUMBER),
    "channels_last": maybe(SWITCH),
    "processes": maybe(WHOLE),
    "since": maybe(WHOLE),
    "others": maybe(list_of(entries(_OF_PROCESS, required=tuple(_OF_PROCESS)))),
}
# Notes of older versions have less.
NOTE = entries(_NOTE, required=("step",))
_FINDING = {
    **dict.fromkeys(("attack", "attacked"), WORD),
    **dict.fromkeys(("claimed_eps", "eps_at_least"), NUMBER),
    "violated": SWITCH,
}
AUDIT = entries(
    {
        "run": WORD,
        "verdict": WORD,
        "confidence": NUMBER,
        "findings": list_of(entries(_FINDING, required=tuple(_FINDING))),
    },
    required=("run", "verdict", "confidence", "findings"),
)
