"""Values of settings as they are typed and as records hold them, so that the two can be compared."""

from __future__ import annotations

import re
from typing import Any

NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)(e[-+]?\d+)?|[-+]?inf", re.IGNORECASE)
WORD = re.compile(r"[A-Za-z][\w./-]*")
# Words that a yes-or-no setting takes for true and false.
SWITCHES = {"true": 1.0, "false": 0.0}
AMBIGUOUS = {"yes", "no", "on", "off", "y", "n", "none"}
# A value about which nothing can be said: it may be any.
ANY = object()


def canonical(value: Any) -> Any:
    """A setting as it can be compared however it was typed: numbers and yes-or-no as floats; `ANY` where unsure."""
    if isinstance(value, bool | int | float):
        return float(value)
    if value is None:
        return None
    if not isinstance(value, str) or value.lower() in AMBIGUOUS:
        return ANY
    if value.lower() == "null":
        return None
    if value.lower() in SWITCHES:
        return SWITCHES[value.lower()]
    if NUMBER.fullmatch(value):
        return float(value)
    return value if WORD.fullmatch(value) else ANY
