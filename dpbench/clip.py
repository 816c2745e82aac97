"""Stage 2, clip: turns per-sample norms into factors that bound each sample's contribution."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from dpbench.errors import require
from dpbench.stage import Stage

# Below this a squared norm loses precision in float32, so a factor C/norm could exceed its bound.
SMALLEST_NORM = 1e-15

SCOPES = ("flat", "per_layer")


@dataclass
class Clip(Stage, ABC):
    """Bounds each sample's vector v by a factor of its norm.

    Formal guarantee: for every threshold C from 1e-15 to 1e15 and every finite or infinite norm, the scaled vector
    has Euclidean norm at most ``sensitivity(C)``, up to the rounding of one float32 product; adding or removing one
    sample changes the clipped sum by at most that much.

    | norm of the sample | factor                                             |
    |--------------------|----------------------------------------------------|
    | 0                  | finite; the contribution is 0                      |
    | inf                | 0: the sample contributes nothing                  |
    | NaN                | never asked for: gradients/tape.py says inf for it |

    Attributes:
        scope: "flat", one norm over all parameters; or "per_layer", one per layer, each with the threshold
            C/sqrt(number of layers), so that the whole vector keeps the bound C.
        feeds_back: whether what is left over of the vectors comes back in later steps, for which no bound is proven.
    """

    feeds_back: ClassVar[bool] = False

    scope: str = "flat"

    def __post_init__(self) -> None:
        require(self.scope in SCOPES, "clip.scope", self.scope, f"one of {', '.join(SCOPES)}")

    @abstractmethod
    def factors(self, norms: Tensor, threshold: float) -> Tensor:
        """Factors of each group of parameters and sample.

        Args:
            norms: per-sample norms, shape (G, B): G parameter groups (1 when flat), B samples.
            threshold: C_t of the whole vector.

        Returns:
            Shape (G, B).
        """

    def sensitivity(self, threshold: float) -> float:
        """Largest norm that one sample's scaled vector can have."""
        return threshold

    def kept_whole(self, threshold: float) -> float:
        """Factor of a vector that is short enough not to be clipped: 1 unless the result is scaled."""
        return 1.0

    def feed_back(self, total: Tensor, remainder: Tensor, threshold: float, batch: float) -> None:
        """Add what was left over in earlier steps to the clipped sum; called once a step where the class feeds back.

        Args:
            total: Σ_i factor_i G_i, shape (d,), changed in place.
            remainder: Σ_i (1 - factor_i) G_i of this step, shape (d,).
            threshold: C_t.
            batch: expected batch size.
        """


class GroupClip(Clip):
    """Each of G groups of parameters is bounded by itself, to C/sqrt(G), so that the whole vector keeps the bound C."""

    @override
    def factors(self, norms: Tensor, threshold: float) -> Tensor:
        return self._factors(norms, threshold / math.sqrt(len(norms)))

    @abstractmethod
    def _factors(self, norms: Tensor, bound: float) -> Tensor:
        """Factors for the bound of a group, of the norms' shape."""


@dataclass
class ThresholdClip(GroupClip):
    """v min(1, C/‖v‖): long vectors are shortened to C, short ones stay (Abadi et al. 2016)."""

    @override
    def _factors(self, norms: Tensor, bound: float) -> Tensor:
        return (bound / norms.clamp(min=SMALLEST_NORM)).clamp(max=1.0)


@dataclass
class AutomaticClip(GroupClip):
    """v C/(‖v‖ + s): every vector is scaled to about C (Bu et al. 2023; AUTO-S, or AUTO-V where s = 0).

    Attributes:
        stabiliser: s; 0.01 in the authors' library, 0 to normalise exactly (a zero vector then stays zero).
    """

    stabiliser: float = 0.01

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 <= self.stabiliser < math.inf, "clip.stabiliser", self.stabiliser, "a finite number >= 0")

    @override
    def _factors(self, norms: Tensor, bound: float) -> Tensor:
        shifted = norms + self.stabiliser
        return torch.where(shifted > SMALLEST_NORM, bound / shifted, 0.0)


@dataclass
class NormalisedClip(ThresholdClip):
    """(v/C) min(1, C/‖v‖): clipped to C, then divided by C, so the norm is at most 1 (De et al. 2022)."""

    @override
    def factors(self, norms: Tensor, threshold: float) -> Tensor:
        return super().factors(norms, threshold) / threshold

    @override
    def sensitivity(self, threshold: float) -> float:
        return 1.0

    @override
    def kept_whole(self, threshold: float) -> float:
        return 1 / threshold


@dataclass
class PSAClip(GroupClip):
    """v C/(‖v‖ + r/(‖v‖ + r)): DP-PSAC (Xia et al. 2023). Short vectors keep a bounded weight.

    The weight C/(‖v‖ + r/(‖v‖ + r)) is C for a vanishing vector, at most C/(2 sqrt(r) - r), reached where
    ‖v‖ = sqrt(r) - r, and about C/‖v‖ for a long one.

    Attributes:
        regulariser: r, from 1e-6 to 1; 0.1 at most in the paper.
    """

    regulariser: float = 0.1

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        require(1e-6 <= self.regulariser <= 1, "clip.regulariser", self.regulariser, "a number from 1e-6 to 1")

    @override
    def _factors(self, norms: Tensor, bound: float) -> Tensor:
        return bound / (norms + self.regulariser / (norms + self.regulariser))


@dataclass
class NoClip(GroupClip):
    """v unchanged. Without a bound there is no private release: valid for eps=inf only."""

    @override
    def _factors(self, norms: Tensor, bound: float) -> Tensor:
        return torch.ones_like(norms)

    @override
    def sensitivity(self, threshold: float) -> float:
        return math.inf
