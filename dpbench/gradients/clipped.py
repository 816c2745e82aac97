"""A clipped sum, and adding up those of micro-batches."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Clipped(NamedTuple):
    """What a batch came to; losses and norms are not private.

    Attributes:
        total: Σ_i factor_i G_i, shape (d,).
        losses: of each sample, shape (B,).
        norms: ‖G_i‖ over all parameters, shape (B,); inf where it is not finite.
    """

    total: Tensor
    losses: Tensor
    norms: Tensor


class Running:
    """Adds up micro-batches."""

    def __init__(self, vector: Tensor) -> None:
        self._total = torch.zeros_like(vector)
        self._losses = [vector.new_empty(0)]
        self._norms = [vector.new_empty(0)]

    def add(self, found: Clipped) -> None:
        """Add a micro-batch."""
        self._total += found.total
        self._losses.append(found.losses)
        self._norms.append(found.norms)

    def clipped(self) -> Clipped:
        """What the micro-batches came to together."""
        return Clipped(self._total, torch.cat(self._losses), torch.cat(self._norms))
