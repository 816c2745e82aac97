"""A finite filter whose taps are estimated while training."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from dpbench.errors import require
from dpbench.filters.base import Filter
from dpbench.history import History


@dataclass
class OnlineFIR(Filter):
    """ĝ_t = Σ_τ b_τ g_{t-τ} with b_τ = c_τ/Σ_s c_s, c_τ the auto-correlation at lag τ (DOPPLER, sec. 5.3).

    c_τ is estimated from private gradients and the known noise alone, as the quotient of the running means of
    ⟨g_t, g_{t-τ}⟩ - max(‖g_{t-τ}‖² - dσ², 0)/2 and of max(‖g_t‖² - dσ², smallest), so it costs no privacy. c_0 = 1/2 by
    definition, and a negative estimate counts as 0. Until `lags` gradients are known those there are share the weight.

    Attributes:
        lags: n_b from 0 to 1000, number of past gradients used and kept.
        smallest: ε_1 > 0, least squared norm that a gradient is taken to have.
    """

    remembers = ("_past", "_signals", "_products", "_powers")

    lags: int = 4
    smallest: float = 1e-3

    def __post_init__(self) -> None:
        require(0 <= self.lags <= 1000, "filter.lags", self.lags, "a whole number from 0 to 1000")
        require(0 < self.smallest < math.inf, "filter.smallest", self.smallest, "a finite number > 0")
        self._noise_variance = 0.0
        self._past = History(self.lags)  # g_{t-1}, g_{t-2}, ...
        self._signals: list[float] = []  # max(|g|² - dσ², 0) of each
        self._products = [0.0] * self.lags  # sums over steps, for τ = 1, 2, ...
        self._powers = [0.0] * self.lags

    @override
    def expect(self, noise_std: float) -> None:
        self._noise_variance = noise_std**2

    def correlations(self) -> list[float]:
        """Estimates of c_0, c_1, ..., at least 0."""
        later = zip(self._products, self._powers, strict=True)
        return [0.5, *(max(product / power, 0.0) if power > 0 else 0.0 for product, power in later)]

    def taps(self) -> list[float]:
        """b_0, b_1, ..., which sum to 1."""
        correlations = self.correlations()
        return [c / sum(correlations) for c in correlations]

    @override
    def apply(self, gradient: Tensor) -> Tensor:
        square, *products = torch.stack([gradient.square().sum(), *(gradient @ past for past in self._past)]).tolist()
        power = square - gradient.numel() * self._noise_variance
        for lag, (product, signal) in enumerate(zip(products, self._signals, strict=True)):
            self._products[lag] += product - signal / 2
            self._powers[lag] += max(power, self.smallest)
        taps = self.taps()[: 1 + len(self._past)]
        filtered = gradient * (taps[0] / sum(taps))
        for tap, past in zip(taps[1:], self._past, strict=True):
            filtered.add_(past, alpha=tap / sum(taps))
        self._past.push(gradient)
        self._signals = [max(power, 0.0), *self._signals][: self.lags]
        return filtered
