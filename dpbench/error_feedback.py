"""Clipping whose error comes back in later steps: DiceSGD (Zhang, Bu, Wu and Hong 2024)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from dpbench.clip import ThresholdClip
from dpbench.errors import require


@dataclass
class ErrorFeedbackClip(ThresholdClip):
    """v_t = (1/B) Σ_i clip(g_i, C_1) + clip(e_t, C_2), with e_{t+1} = e_t + (1/B) Σ_i g_i - v_t and e_0 = 0.

    NOT PRIVATE as far as is proven here. Noise is what the authors' code adds, sqrt(1 + 2 C_2/C_1) times that of DP-SGD
    with the same multiplier, and the ledger holds that multiplier. Runs are refused unless `uncertified` is set.

    e_t is made of un-clipped gradients and of which samples were drawn, and is never released. Let two data sets
    differ in one sample s, and fix all that was released and drawn. As e - clip(e, C_2) is non-expansive, the two e_t
    differ by at most Σ (‖g_s‖ - C_1)_+ / B over the steps that s took part in, which nothing here bounds, and the
    clipped ones by at most 2 C_2. So from then on each sum moves by up to 2 B C_2, whether s is drawn or not. That much
    can be proven: with noise of standard deviation σ on the sum, T steps are at most

        (eps_1 + eps_2, max(delta_1 + e^eps_1 delta_2, delta_2 + e^eps_2 delta_1))-private,

    the first pair that of DP-SGD with sampling, the second that of one Gaussian release with sensitivity
    2 B C_2 sqrt(T) (through the run whose error leaves s out, from either end). The published factor covers neither B
    nor T: a sample with a long gradient is found in the steps after it by more than the ledger says, as a test shows.

    Attributes:
        ratio: C_2/C_1, at least 1 with the authors.
        uncertified: that the eps of the run is not proven is accepted.
    """

    remembers = ("_error",)

    feeds_back: ClassVar[bool] = True

    ratio: float = 1.0
    uncertified: bool = False

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        require(1 <= self.ratio < math.inf, "clip.ratio", self.ratio, "a finite number >= 1")
        self._error: Tensor | None = None

    @override
    def sensitivity(self, threshold: float) -> float:
        """What the noise is made for, C_1 sqrt(1 + 2 C_2/C_1); no bound on the sum, see the class."""
        return threshold * math.sqrt(1 + 2 * self.ratio)

    @override
    def feed_back(self, total: Tensor, remainder: Tensor, threshold: float, batch: float) -> None:
        if self._error is None:
            self._error = torch.zeros_like(total)
        norm = float(torch.linalg.vector_norm(self._error, dtype=torch.float64))
        if not math.isfinite(norm):  # finite gradients can add up to more than float32 holds
            self._error.zero_()
            norm = 0.0
        share = min(1.0, self.ratio * threshold / norm) if norm > 0 else 1.0
        total.add_(self._error, alpha=share * batch)
        self._error.mul_(1 - share).add_(remainder, alpha=1 / batch)
