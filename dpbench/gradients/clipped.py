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
        remainder: Σ_i (1 - factor_i) G_i over the samples whose gradients are finite, shape (d,); None where it was not
            asked for.
    """

    total: Tensor
    losses: Tensor
    norms: Tensor
    remainder: Tensor | None = None


class Running:
    """Adds up micro-batches, into the tensors of the first one."""

    def __init__(self, vector: Tensor, *, remainder: bool = False) -> None:
        self._like = vector
        self._total: Tensor | None = None
        self._remainder = torch.zeros_like(vector) if remainder else None
        self._losses = [vector.new_empty(0)]
        self._norms = [vector.new_empty(0)]

    def add(self, found: Clipped) -> None:
        """Add a micro-batch, whose tensors nobody else needs."""
        self._total = found.total if self._total is None else self._total.add_(found.total)
        if self._remainder is not None and found.remainder is not None:
            self._remainder += found.remainder
        self._losses.append(found.losses)
        self._norms.append(found.norms)

    def clipped(self) -> Clipped:
        """What the micro-batches came to together."""
        total = torch.zeros_like(self._like) if self._total is None else self._total
        return Clipped(total, torch.cat(self._losses), torch.cat(self._norms), self._remainder)
