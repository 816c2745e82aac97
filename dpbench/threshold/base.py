"""What every threshold promises, and thresholds that are known before training."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from torch import Tensor
from typing_extensions import override

from dpbench.errors import require
from dpbench.privacy.gaussian import GaussianSource
from dpbench.privacy.plan import Part
from dpbench.stage import PlannedStage

# Beyond these a factor is no normal float32 for some norm whose square is one.
SMALLEST, LARGEST = 1e-15, 1e15


@dataclass
class Threshold(PlannedStage, ABC):
    """Gives C_t for each step."""

    @property
    def beside(self) -> tuple[Part, ...]:
        """What the stage releases of each batch beside the clipped sum."""
        return ()

    @abstractmethod
    def value(self, step: int) -> float:
        """C_t at step t, counted from 0; from 1e-15 to 1e15, so that float32 factors keep the clip's promise."""

    def observe(self, norms: Tensor) -> None:
        """See the norms of the step's samples, shape (B,), inf for broken ones; what it makes of them is not private.

        Only called where `beside` names a release.
        """

    def release(self, source: GaussianSource | None, error_weight: float) -> None:
        """Add noise to what was observed, and set the next threshold; called once a step, after the ledger's entry.

        Args:
            source: of noise at unit variance; None where the run adds none.
            error_weight: K = d (noise in a coordinate of g_t, in units of gradients, over C_t)², so that K C² is the
                expected square of the noise in all d coordinates at threshold C; public.
        """

    def guarded(self) -> dict[str, int]:
        """How often each guard of its rule has fired so far, by name; empty where there is none."""
        return {}


@dataclass
class FixedThreshold(Threshold):
    """The same C at every step.

    Attributes:
        norm: C.
    """

    norm: float = 1.0

    def __post_init__(self) -> None:
        require(SMALLEST <= self.norm <= LARGEST, "threshold.norm", self.norm, "a number from 1e-15 to 1e15")

    @override
    def value(self, step: int) -> float:
        return self.norm


@dataclass
class DecayingThreshold(Threshold):
    """C_t = C_0 decay^(t/T): the threshold of dynamic DP-SGD (Du et al. 2021).

    Attributes:
        norm: C_0.
        decay: threshold that step T would have, over C_0, in (0, 1].
    """

    norm: float = 1.0
    decay: float = 0.5

    def __post_init__(self) -> None:
        require(0 < self.decay <= 1, "threshold.decay", self.decay, "a number in (0, 1]")
        ends = SMALLEST / self.decay
        require(ends <= self.norm <= LARGEST, "threshold.norm", self.norm, f"a number from {ends:g} to 1e15")

    @override
    def value(self, step: int) -> float:
        return float(self.norm * self.decay ** (step / self.course.steps))
