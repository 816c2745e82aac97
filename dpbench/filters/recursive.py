"""Linear recursive low-pass filters with start-up correction: DOPPLER."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count, islice
from typing import ClassVar

import numpy as np
from torch import Tensor
from typing_extensions import override

from dpbench.errors import PlainWarning, require
from dpbench.filters.base import Filter
from dpbench.history import History

# Steps by which the response to a constant is near its end, or to be seen on its way there.
STARTING_UP = 1000
# Unit of rounding of float32, in which taps are applied, and the share of a gain that it may change.
UNIT, LARGEST_CHANGE = 2.0**-24, 0.1


@dataclass
class RecursiveLowPass(Filter):
    """m_t = -Σ_{τ≥1} a_τ m_{t-τ} + Σ_{τ≥0} b_τ g_{t-τ}, divided by the filter's response to the constant 1.

    The division makes ĝ_t a weighted sum of g_0..g_t whose weights sum to one at every step, so the first step
    is the unfiltered one (DOPPLER, Zhang et al. 2024, Alg. 2). Equal to
    ``lfilter(b, [1, *a], g) / lfilter(b, [1, *a], ones)``. Memory: len(a) + len(b) - 1 vectors of shape (d,).
    Taps are applied in the type of the gradients, so those whose filter float32 does not keep are refused.

    Attributes:
        b: feed-forward taps b_0, b_1, ...; b_0 is not zero.
        a: feedback taps a_1, a_2, ... (a_0 = 1 is left out); all poles lie inside the unit circle.
    """

    remembers = ("_inputs", "_outputs", "_ones", "_responses")

    elementwise: ClassVar[bool] = True

    b: list[float] = field(default_factory=lambda: [1.0])
    a: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        usable = bool(self.b) and self.b[0] != 0 and bool(np.all(np.isfinite(self.b)))
        require(usable, "filter.b", list(self.b), "finite taps whose first is not 0")
        # Roots are computed: one on the unit circle may come out just inside it.
        stable = bool(np.all(np.isfinite(self.a))) and bool(np.all(np.abs(np.roots([1.0, *self.a])) < 1 - 1e-9))
        inside = "feedback taps of a stable filter (all poles inside the unit circle)"
        require(stable, "filter.a", list(self.a), inside)
        change = _change_by_rounding(self.a)
        told = f"feedback taps whose filter float32 keeps; rounding these can change a gain by {change:.0%}"
        require(change <= LARGEST_CHANGE, "filter.a", list(self.a), told)
        require(abs(sum(self.b)) > 1e-9, "filter.b", list(self.b), "taps that do not sum to 0: a constant must pass")
        starting_up = islice(_responses(self.b, self.a), STARTING_UP + len(self.b))
        vanished = next((step for step, response in enumerate(starting_up) if abs(response) < 1e-12), None)
        allowed = f"taps whose response to a constant, by which it is divided, vanishes at no step, here at {vanished}"
        require(vanished is None, "filter.b", list(self.b), allowed)
        if abs(sum(self.b) - sum(self.a) - 1) > 1e-6:
            warnings.warn(
                f"filter.b={list(self.b)}, filter.a={list(self.a)}: the gain at frequency zero is not 1; "
                "the start-up correction divides it out, so only the ratios within b matter",
                PlainWarning,
                stacklevel=2,
            )
        self._inputs = History(len(self.b) - 1)  # g_{t-1}, g_{t-2}, ...
        self._outputs = History(len(self.a))  # uncorrected m_{t-1}, m_{t-2}, ...
        self._ones: list[float] = []
        self._responses: list[float] = []

    @override
    def apply(self, gradient: Tensor) -> Tensor:
        output = gradient * self.b[0]
        response = self.b[0]
        for tap, past, one in zip(self.b[1:], self._inputs, self._ones, strict=False):
            output.add_(past, alpha=tap)
            response += tap * one
        for tap, past, past_response in zip(self.a, self._outputs, self._responses, strict=False):
            output.add_(past, alpha=-tap)
            response -= tap * past_response
        self._inputs.push(gradient)
        self._outputs.push(output)
        self._ones = [1.0, *self._ones][: len(self.b) - 1]
        self._responses = [response, *self._responses][: len(self.a)]
        return output / response


def _change_by_rounding(a: Sequence[float]) -> float:
    """Largest share by which rounding the feedback taps to float32 can change a gain, of all frequencies.

    It changes the denominator A(z) = 1 + Σ a_τ z^-τ by at most the unit of rounding times 1 + Σ |a_τ|. Where that is
    less than |A| all around the unit circle, A keeps as many zeros inside (Rouché): the filter stays stable.
    """
    taps = np.array([1.0, *a])
    # |A| is smallest next to a pole.
    angles = np.concatenate([np.linspace(0, np.pi, 1025), np.angle(np.roots(taps))])
    least = float(np.abs(np.polyval(taps, np.exp(1j * angles))).min())
    return UNIT * float(np.abs(taps).sum()) / least if least > 0 else np.inf


def _responses(b: Sequence[float], a: Sequence[float]) -> Iterator[float]:
    """What the filter makes of the constant 1 at steps 0, 1, ..., uncorrected."""
    past: list[float] = []
    forward = 0.0
    for step in count():
        forward += b[step] if step < len(b) else 0.0
        response = forward - sum(tap * value for tap, value in zip(a, past, strict=False))
        yield response
        past = [response, *past][: len(a)]
