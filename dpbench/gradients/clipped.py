"""A clipped sum: from a pass, and added up over micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from dpbench.gradients.tape import Tape

# Inputs (b, ...) and targets (b, ...) of one micro-batch of a logical batch.
MicroBatch = tuple[Tensor, Tensor]
# Maps norms of shape (G, B), inf for broken samples, to factors of that shape.
Factors = Callable[[Tensor], Tensor]


class Clipped(NamedTuple):
    """What a batch came to; losses and norms are not private.

    Attributes:
        total: Σ_i factor_i G_i, shape (d,).
        losses: of each sample, shape (B,).
        norms: ‖G_i‖ over all parameters, shape (B,); inf where its square is not finite.
        remainder: Σ_i (1 - factor_i) G_i over the samples whose gradients are finite, shape (d,); None where it was not
            asked for.
    """

    total: Tensor
    losses: Tensor
    norms: Tensor
    remainder: Tensor | None = None


class Pass(Protocol):
    """What is asked of a tape, and of a replay that stands for one."""

    @property
    def losses(self) -> Tensor:
        """Shape (B,)."""

    def norms(self) -> Tensor:
        """Shape (G, B)."""

    def whole_norms(self) -> Tensor:
        """Shape (B,)."""

    def finite(self) -> Tensor:
        """Shape (B,)."""

    def doubtful(self) -> Tensor:
        """A flag."""

    def overflows(self, sums: Sequence[Tensor]) -> Tensor:
        """A flag."""

    def weighted_sum(self, factors: Tensor) -> Tensor:
        """Shape (d,)."""


class Soundness(NamedTuple):
    """Whether a clipped sum can be trusted.

    Attributes:
        whole: all samples have finite gradients.
        doubtful: norms may be wrong.
        overflows: a sum is not finite, and might be in double precision.
    """

    whole: bool
    doubtful: bool
    overflows: bool

    @property
    def is_right(self) -> bool:
        """Whether nothing is to be done about it."""
        return self.whole and not self.doubtful and not self.overflows


def clipped_at_once(found: Pass, count: int, factors: Factors, remainder: bool) -> tuple[Clipped, Soundness]:
    """The clipped sum of the first `count` samples of a pass, as it is, and whether it is right."""
    weights = factors(found.norms()[:, :count])
    spare = found.finite().numel() - count
    total = found.weighted_sum(F.pad(weights, (0, spare)))
    rest = found.weighted_sum(F.pad(1 - weights, (0, spare))) if remainder else None
    sums = [total] if rest is None else [total, rest]
    # The only synchronisation with a GPU, when all work of the micro-batch is under way.
    flags = torch.stack([found.finite().all(), found.doubtful(), found.overflows(sums)]).tolist()
    return Clipped(total, found.losses[:count], found.whole_norms()[:count], rest), Soundness(*flags)


def clipped_by(tape: Tape, count: int, factors: Factors, remainder: bool) -> Clipped:
    """The clipped sum of the first `count` samples of a tape, whatever their numbers are like."""
    while True:
        found, sound = clipped_at_once(tape, count, factors, remainder)
        if sound.doubtful:
            tape.refine()
        elif sound.whole and sound.overflows:
            tape.sum_precisely()
        else:
            break
    if sound.whole:
        return found
    # Not computed anew without them: what the others then draw at random would depend on their number.
    finite, weights = tape.finite(), factors(tape.norms()[:, :count])
    tape.leave_out_broken()

    def sums() -> list[Tensor]:
        both = [weights, 1 - weights] if remainder else [weights]
        return [tape.weighted_sum(F.pad(each, (0, len(finite) - count)).where(finite, 0.0)) for each in both]

    total, *rest = sums()
    if bool(tape.overflows([total, *rest])):
        tape.sum_precisely()
        total, *rest = sums()
    return found._replace(total=total, remainder=rest[0] if rest else None)


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
