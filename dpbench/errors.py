"""What commands say in a sentence: errors a person can act on, which end them, warnings, and signals."""

from __future__ import annotations

from typing import Any

from typing_extensions import override


class Terminated(KeyboardInterrupt):
    """The process was told to end by SIGTERM, as by a scheduler that takes the machine back."""


class PlainWarning(UserWarning):
    """Something a user should know of a run that goes on all the same; commands print it as one line."""


class UserError(Exception):
    """Bad input, in a sentence that names the field, the value and what is allowed; commands exit with code 2.

    Attributes:
        field: dotted path of the setting at fault, such as ``query.kappa``; None where there is no single one.
        value: what it was set to.
    """

    def __init__(self, message: str, *, field: str | None = None, value: Any = None) -> None:
        self.field = field
        self.value = value
        self.message = visible(" ".join(message.split()))
        super().__init__(str(self))

    @override
    def __str__(self) -> str:
        return self.message if self.field is None else f"{self.field}={show(self.value)}: {self.message}"


def show(value: Any) -> str:
    """A value as one would type it: 8 for 8.0, null for None; numbers with ten digits, if they need as many."""
    if isinstance(value, list):
        return f"[{', '.join(map(show, value))}]"
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    if isinstance(value, float):
        return short if float(short := f"{value:g}") == value else f"{value:.10g}"
    return visible(str(value))


def visible(text: str) -> str:
    """A text on one line that does nothing to a terminal: control characters are written out, as in a string."""
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


def require(condition: bool, field: str, value: Any, allowed: str) -> None:
    """Raise `UserError` "field=value: expected <allowed>" unless the condition holds."""
    if not condition:
        raise UserError(f"expected {allowed}", field=field, value=value)


def require_text(text: str, *, field: str | None = None) -> None:
    """Raise `UserError` unless a text can be written down: the name of a file need not be in any encoding."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        if field is None:
            raise UserError(f"{text}: expected text in UTF-8") from error
        raise UserError("expected text in UTF-8", field=field, value=text) from error
