"""How the samples of a step are drawn."""

from __future__ import annotations

import torch
from torch import Tensor


class PoissonSampler:
    """Each sample takes part in each step with probability q, independently.

    Neighbouring relation: add or remove one sample. The size of a batch varies and may be 0.

    Attributes:
        size: number of samples N.
        rate: sampling rate q in (0, 1].
    """

    def __init__(self, size: int, rate: float, generator: torch.Generator) -> None:
        self.size = size
        self.rate = rate
        self._generator = generator
        # Double precision: a float32 draw rounds q to a multiple of 2^-24.
        self._draws = torch.empty(size, dtype=torch.float64, device=generator.device)

    def draw(self) -> Tensor:
        """Indices of the next batch, ascending, shape (B,), int64, on the generator's device."""
        return (self._draws.uniform_(generator=self._generator) < self.rate).nonzero().squeeze(1)
