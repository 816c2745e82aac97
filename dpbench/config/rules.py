"""Numbers of a run that follow from its settings, wherever these are read from."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

DELTA_RULE = re.compile(r"1/N(\^(?P<power>\d+(\.\d+)?))?")


def trained_on(dataset: Mapping[str, Any]) -> int:
    """N, the samples that a run trains on, of the settings of its data set; older records set none aside."""
    return int(dataset["train_size"]) - int(dataset.get("validation_size") or 0)


def delta_of(delta: Any, size: int) -> float:
    """Delta as a number; NaN for what is neither one nor a rule.

    Args:
        delta: a number, or a rule in the number of training samples, such as 1/N^1.1.
        size: N.
    """
    if isinstance(delta, str):
        rule = DELTA_RULE.fullmatch(delta.replace(" ", ""))
        return float(size ** -float(rule["power"] or 1)) if rule else math.nan
    return float(delta) if isinstance(delta, (int, float)) else math.nan


def evaluated_every(every_steps: int | None, every_epochs: float | None, rate: float, steps: int) -> int:
    """Steps from one evaluation to the next; the last step is evaluated in any case.

    Args:
        every_steps: as set; None where passes over the data count.
        every_epochs: as set; None for no evaluation but the last.
        rate: sampling rate q = B/N.
        steps: T.
    """
    if every_steps is not None:
        return every_steps
    return steps if every_epochs is None else max(1, round(every_epochs / rate))
