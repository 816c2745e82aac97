"""What one run asks of the gradients in a step, and what it gets."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from dpbench.gradients.buffers import Buffers
from dpbench.gradients.clipped import Clipped, Factors, MicroBatch, Running
from dpbench.gradients.passes import generators_of
from dpbench.gradients.per_sample import PerSampleGradients
from dpbench.query import Point


class Request(NamedTuple):
    """A clipped sum that is wanted of `PerSampleGradients.clipped_sum`, which most of the fields go to.

    Attributes:
        gradients: of the run's model.
        points: the iterates.
        batch: the logical batch, which can be read once.
        factors: of the norms.
        apart: sum the clipped gradients of the points, each clipped by itself, rather than clip their sum.
        remainder: also sum what the factors leave over; not together with `apart`.
    """

    gradients: PerSampleGradients
    points: Sequence[Point]
    batch: Iterable[MicroBatch]
    factors: Factors
    apart: bool = False
    remainder: bool = False

    def alone(self) -> Clipped:
        """The clipped sum, computed without regard to other runs; losses and norms of the first point if apart."""
        if not self.apart:
            return self.gradients.clipped_sum(self.points, self.batch, self.factors, remainder=self.remainder)
        running = Running(self.gradients.flat.vector)
        buffers, generators = Buffers(self.gradients.model), generators_of(self.gradients.flat.vector)
        for micro_batch in self.batch:
            buffers.restore()  # see clipped_sum
            before, found = generators.state_dict(), []
            for point in self.points:
                generators.load_state_dict(before)  # the same masks at all iterates
                found.append(self.gradients.clipped_sum([point], [micro_batch], self.factors))
            total = torch.stack([part.total for part in found]).sum(0)
            running.add(found[0]._replace(total=total))
        return running.clipped()
