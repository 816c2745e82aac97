"""Whether the eps of a record is a guarantee."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

# Behind an eps that the noisy sums alone would spend, in a run that releases more.
UNPROVEN = ", not proven"


def is_proven(summary: Mapping[str, Any]) -> bool:
    """Whether the eps of a summary is a guarantee; without noise it claims none."""
    return bool(summary.get("private", True)) or not math.isfinite(float(summary.get("eps", math.inf)))
