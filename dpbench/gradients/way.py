"""Ways to per-sample gradients."""

from __future__ import annotations

from typing import Any, NamedTuple

from dpbench.gradients.functional import Gradients


class Books(NamedTuple):
    """Layers of known kinds keep books, and parameters outside of them are repeated per row: the fast way.

    Attributes:
        leading: dimensions between the row and those of a parameter that no known layer owns.
        draws: the model draws at random.
        channels_last: convolutions of images give their channels last.
    """

    leading: int
    draws: bool = False
    channels_last: bool = False

    def plain(self) -> dict[str, Any]:
        """The way, of plain values."""
        return self._asdict()


class Rows(NamedTuple):
    """All per-sample gradients are made and held.

    Attributes:
        gradients: makes them.
        by_plain_autograd: by one backward pass of the model itself for each sample, which is right by definition.
    """

    gradients: Gradients
    by_plain_autograd: bool

    @property
    def draws(self) -> bool:
        """The model may draw at random; of a way that is always right nobody asks."""
        return True

    def plain(self) -> dict[str, Any]:
        """The way without what makes the gradients, which belongs to a model."""
        return {"by_plain_autograd": self.by_plain_autograd}


Way = Books | Rows


class Settled(NamedTuple):
    """The way that was found.

    Attributes:
        way: the fastest one that agrees with autograd.
        complaint: what spoke against faster ones, or nothing.
    """

    way: Way
    complaint: str = ""
