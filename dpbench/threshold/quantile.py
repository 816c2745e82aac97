"""The threshold that follows a quantile of the norms (Andrew et al. 2021)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from dpbench.errors import require
from dpbench.privacy.gaussian import GaussianSource, add_noise
from dpbench.privacy.plan import Part
from dpbench.threshold.base import LARGEST, SMALLEST, Threshold

SENSITIVITY = 0.5
MOST = math.log(LARGEST / SMALLEST)


@dataclass
class QuantileThreshold(Threshold):
    """C_{t+1} = C_t exp(-rate (share - p)), share being the noisy share of samples whose norms are at most C_t.

    What is released is Σ_i (b_i - 1/2) over the batch, b_i = 1 where the norm is at most C_t: so centred, one sample
    changes it by 1/2. The share is that over the expected batch size, plus 1/2.

    Attributes:
        norm: C_0.
        quantile: p, share of samples that are to stay unclipped.
        rate: η_C.
        count_noise: standard deviation of the noise over the expected batch size B; 1/20 with Andrew et al.
    """

    remembers = ("_threshold",)

    norm: float = 1.0
    quantile: float = 0.5
    rate: float = 0.2
    count_noise: float = 0.05

    def __post_init__(self) -> None:
        require(SMALLEST <= self.norm <= LARGEST, "threshold.norm", self.norm, "a number from 1e-15 to 1e15")
        require(0 <= self.quantile <= 1, "threshold.quantile", self.quantile, "a number in [0, 1]")
        require(0 < self.rate < math.inf, "threshold.rate", self.rate, "a finite number > 0")
        require(0 < self.count_noise < math.inf, "threshold.count_noise", self.count_noise, "a finite number > 0")
        self._threshold = self.norm
        self._sum = 0.0

    @property
    def _batch(self) -> float:
        return self.course.batch

    @property
    @override
    def beside(self) -> tuple[Part, ...]:
        return (Part("share of unclipped samples", self.count_noise * self._batch / SENSITIVITY),)

    @override
    def value(self, step: int) -> float:
        return self._threshold

    @override
    def observe(self, norms: Tensor) -> None:
        self._sum += float((norms <= self._threshold).double().sub(SENSITIVITY).sum())

    @override
    def release(self, source: GaussianSource | None, error_weight: float) -> None:
        total, self._sum = torch.tensor([self._sum], dtype=torch.float64, device="cpu"), 0.0
        if source is not None:
            add_noise(total, source.fill(torch.empty_like(total)), self.count_noise * self._batch, source)
        share = float(total) / self._batch + SENSITIVITY
        # Further than from one end of the range to the other it never goes.
        move = min(max(-self.rate * (share - self.quantile), -MOST), MOST)
        self._threshold = min(max(self._threshold * math.exp(move), SMALLEST), LARGEST)
