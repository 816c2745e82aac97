"""What one run asks of the gradients in a step, and what it gets."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from torch import Tensor

from dpbench.gradients.clipped import Clipped
from dpbench.gradients.per_sample import PerSampleGradients
from dpbench.query import Point

# Inputs (b, ...) and targets (b, ...) of one micro-batch of a logical batch.
MicroBatch = tuple[Tensor, Tensor]


class Request(NamedTuple):
    """A clipped sum that is wanted; the fields are those of `PerSampleGradients.clipped_sum`.

    Attributes:
        gradients: of the run's model.
        points: the iterates.
        batch: the logical batch, which can be read once.
        factors: of the norms.
    """

    gradients: PerSampleGradients
    points: Sequence[Point]
    batch: Iterable[MicroBatch]
    factors: Callable[[Tensor], Tensor]

    def alone(self) -> Clipped:
        """The clipped sum, computed without regard to other runs."""
        return self.gradients.clipped_sum(self.points, self.batch, self.factors)
