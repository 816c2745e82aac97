"""Clipped sums of several runs that differ in their seeds alone, in one forward and one backward pass.

The rows of all seeds go through the model as one batch, seed by seed, and the layers give each row the parameters of
its own seed (weights.py). Norms are those of the rows as ever; sums go over the rows of each seed. Nothing here adds
up over seeds, so that no seed can change another one.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Unpack

import torch
from torch import Tensor, nn

from dpbench.devices import may_be_out_of_memory, out_of_memory
from dpbench.errors import PlainWarning, UserError
from dpbench.gradients.clipped import Clipped, MicroBatch, Running
from dpbench.gradients.effects import changed_buffer
from dpbench.gradients.flat import FlatParameters
from dpbench.gradients.functional import one_by_one
from dpbench.gradients.layers import BY_SEED
from dpbench.gradients.loss import Loss
from dpbench.gradients.passes import PassOptions
from dpbench.gradients.per_sample import PerSampleGradients
from dpbench.gradients.recording import Parameters
from dpbench.gradients.replay import padded
from dpbench.gradients.request import Request
from dpbench.gradients.summands import Growing
from dpbench.gradients.tape import Tape
from dpbench.gradients.verify import (
    SAMPLES,
    Compared,
    Doubts,
    deviation,
    deviation_of_norms,
    deviation_of_sums,
    draws_at_random,
    is_due,
    nearby,
    undisturbed_copy,
    without_fast_paths,
)
from dpbench.gradients.way import Books
from dpbench.gradients.weights import StackedWeights
from dpbench.query import Point

# Seeds that are compared with autograd.
SEEDS = 3
BOOKS = Books(leading=0)


@dataclass
class _Share:
    """What one run has got of a step so far."""

    request: Request
    batch: Iterator[MicroBatch]
    running: Running
    error: Exception | None = None

    @classmethod
    def of(cls, request: Request) -> _Share:
        running = Running(request.gradients.flat.vector, remainder=request.remainder)
        return cls(request, iter(request.batch), running)

    def next(self) -> MicroBatch | None:
        """The next micro-batch that is not empty; None at the end, or where reading it fails."""
        while self.error is None:
            try:
                piece = next(self.batch, None)
            except Exception as error:
                self.error = error
                break
            if piece is None or len(piece[1]) > 0:
                return piece
        return None

    def compute(self, piece: MicroBatch) -> None:
        """Add a micro-batch, without regard to other runs."""
        try:
            self.running.add(self.request._replace(batch=[piece]).alone())
        except Exception as error:
            self.error = error

    def outcome(self) -> Clipped | Exception:
        return self.error or self.running.clipped()


class FusedGradients(PerSampleGradients):
    """The gradients of several runs whose models are built alike; made of any one of them.

    Attributes:
        rows: samples of all seeds that are computed at once.
    """

    def __init__(
        self, model: nn.Module, flat: FlatParameters, loss: Loss, *, rows: int = 128, **options: Unpack[PassOptions]
    ) -> None:
        """Nothing compared so far; all arguments but `rows`, which the class tells of, are as for `Passes`."""
        super().__init__(model, flat, loss, **options)
        self.rows = rows
        self._passes = 0
        self._compared_passes = Compared()
        self._one_by_one = False
        # Of the runs' gradients, whether their sums are those that they get alone.
        self._doubts = Doubts()

    def objection(self, inputs: Tensor, targets: Tensor) -> str | None:
        """Why this model's seeds can't share a pass; None where they can, which is tried out on these samples.

        The sums and norms of several seeds are compared with autograd's, sample by sample and in float64.
        """
        if self.owners.direct:
            return f"parameter {self.owners.direct[0]!r} is used outside of known layers"
        for layer, forward in self.owners.known:
            if forward not in BY_SEED:
                return f"{type(layer).__name__} takes one seed at a time"
        # Before the model has seen other samples, for something of its first ones may be what it keeps (settle.py).
        way = self.way([Point(1.0, self.flat.vector)], inputs, targets)
        if draws_at_random(self.model, self.losses, inputs[:1], targets[:1]):
            return "the model draws random numbers, which each seed has its own of"
        if (name := changed_buffer(self.model, self.losses, inputs[:1], targets[:1])) is not None:
            return f"a pass changes the model's buffer {name!r}, which each seed has its own of"
        if not isinstance(way, Books):
            return "the model falls back to materialised per-sample gradients"
        copy = undisturbed_copy(self.model)
        assert copy is not None  # its books were compared
        try:
            exact = inputs.double() if inputs.is_floating_point() else inputs
            return self._compared(copy.double(), exact, targets)
        except Exception as error:
            if out_of_memory(error):
                raise
            return f"{type(error).__name__}: {error}"

    def _compared(self, copy: nn.Module, inputs: Tensor, targets: Tensor) -> str | None:
        twin = FusedGradients(copy, FlatParameters(copy), self.loss, views=self.views)
        start, size = twin.flat.vector, len(twin.flat)
        weights = (1.5, -0.5)
        stacks = [torch.stack([nearby(start, SEEDS * j + s) for s in range(SEEDS)]) for j in range(len(weights))]
        which = torch.arange(SEEDS * SAMPLES, device=inputs.device) % len(targets)
        inputs, targets = inputs[which], targets[which]
        references = [start.new_zeros(SEEDS * size) for _ in which]
        with without_fast_paths():
            alone = one_by_one(copy, twin.flat, self.loss, self.views)
            for weight, stack in zip(weights, stacks, strict=True):
                for i, reference in enumerate(references):
                    seed = i // SAMPLES
                    with twin.flat.at(stack[seed]):
                        own = reference[seed * size : (seed + 1) * size]
                        own.add_(alone(inputs[i : i + 1], targets[i : i + 1])[1][0], alpha=weight)
            points = [Point(*pair) for pair in zip(weights, stacks, strict=True)]
            tape = twin.record_together(points, inputs, targets, start.new_ones(len(which)))
            return deviation(twin.flat, tape, references, SEEDS)

    def record_together(self, points: Sequence[Point], inputs: Tensor, targets: Tensor, counts: Tensor) -> Tape:
        """Per-sample gradients of one micro-batch of each of S seeds.

        Args:
            points: (weight, iterates) pairs, the iterates of all seeds, shape (S, d).
            inputs: (S B, ...), or (S B, K, ...), seed by seed.
            targets: (S B, ...).
            counts: 1 for each sample, 0 for padding, shape (S B,).
        """
        summands: dict[Parameters, Growing] = {}
        losses: list[Tensor] = []
        self.reads = set()
        seeds = len(points[0].iterate)
        for weight, iterates in points:
            values: dict[Tensor, Tensor] = dict(zip(self.flat.parameters, self.flat.views(iterates), strict=True))
            stacked = StackedWeights(values, seeds, grouped=iterates.is_cuda)
            weights = weight * counts
            found = self._keep_books(BOOKS, weights, len(points), inputs, targets, summands, stacked)
            losses.append(found.detach())
        return Tape(losses[0], self.flat, summands, self.owners.groups, seeds)

    def clipped_sums(self, requests: Sequence[Request]) -> list[Clipped | Exception]:
        """What each request would have got alone, to rounding; or the error that it would have raised."""
        shares = [_Share.of(request) for request in requests]
        self.flat.require_of(self.model)
        while True:
            pieces = [(share, piece) for share in shares if (piece := share.next()) is not None]
            if not pieces:
                return [share.outcome() for share in shares]
            start, longest = 0, max(len(targets) for _, (_, targets) in pieces)
            while start < longest:
                most = max(1, self.rows // len(pieces))
                part = slice(start, start + most)
                now = [(share, (x[part], y[part])) for share, (x, y) in pieces if len(y) > start and not share.error]
                if self._add(now):
                    start += most

    def _add(self, pieces: list[tuple[_Share, MicroBatch]]) -> bool:
        """Add the sums of these micro-batches to what the runs have; False if fewer rows at once must be tried."""
        weights = {tuple(point.weight for point in share.request.points) for share, _ in pieces}
        apart = any(share.request.apart or share.request.remainder for share, _ in pieces)
        if len(pieces) > 1 and len(weights) == 1 and not apart and not self._one_by_one:
            try:
                together = self._together(pieces)
            except Exception as error:
                if out_of_memory(error) and self.rows > len(pieces):
                    self.rows //= 2
                    return False
                # The fault of one run is no other's: alone, it is raised in the run that has it.
                warnings.warn(
                    f"seeds computed one by one ({type(error).__name__}: {error})", PlainWarning, stacklevel=2
                )
                together = [None] * len(pieces)
        else:
            together = [None] * len(pieces)
        if any(found is not None for found in together):
            self._passes += 1
            _, (inputs, targets) = pieces[0]
            rows = len(pieces) * max(len(targets) for _, (_, targets) in pieces)
            known = self._compared_passes.has_like(inputs, targets) and self._compared_passes.has_read(self.reads)
            doubted = any(share.request.gradients in self._doubts for share, _ in pieces)
            again = known and (is_due(self._passes) or doubted)
            if again or not known or rows > self._compared_passes.most:
                together = self._compared_with_alone(pieces, together, again)
                self._compared_passes.add(inputs, targets, rows, self.reads)
        for (share, piece), found in zip(pieces, together, strict=True):
            if found is None:
                share.compute(piece)
            else:
                share.running.add(found)
        return True

    def _compared_with_alone(
        self, pieces: list[tuple[_Share, MicroBatch]], together: list[Clipped | None], again: bool
    ) -> list[Clipped | None]:
        """What each run got of a pass, unless its own gradients are wrong or give something else.

        In the first pass, and the first for a shape of samples, for so many or in which a layer reads something new, of
        which nothing has been used, seeds then go on one by one. Where such passes are compared again, a run gets what
        it would get alone, and the next pass is compared, too (`Doubts`); where that deviates as well, it is the run's
        error.
        """
        outcomes = list(together)
        for place, ((share, piece), found) in enumerate(zip(pieces, together, strict=True)):
            if found is None:
                continue
            try:
                problem = self._problem_with(share.request, piece, found, again)
            except Exception as error:
                if not may_be_out_of_memory(error, len(piece[1])):
                    share.error = error
                continue
            wrong = self._doubts.note(share.request.gradients, deviates=problem is not None)
            if problem is None:
                continue
            if wrong:
                share.error = UserError(
                    f"a pass that several seeds share gives one what it would not get alone ({problem}), and so maybe "
                    "did some before it; train anew, one seed after the other, with fuse_seeds=false and force=true"
                )
            elif again:
                outcomes[place] = None
            else:
                warnings.warn(f"seeds computed one by one ({problem})", PlainWarning, stacklevel=2)
                self._one_by_one = True
                return [None] * len(pieces)
        return outcomes

    def _problem_with(self, request: Request, piece: MicroBatch, found: Clipped, again: bool) -> str | None:
        """How a run's sum over a micro-batch, or its norms, deviate from what it gets alone, or None.

        Raises:
            UserError: its own gradients are wrong.
        """
        inputs, targets = piece
        if again:  # else what it gets alone is compared where it is new
            request.gradients.require_right(request.points, inputs, targets, self._passes.bit_length() // 2)
        alone = request._replace(batch=[piece]).alone()
        of_parts = alone.norms.sum() if self.in_half else None
        problem = deviation_of_sums(request.gradients.flat, found.total, alone.total, of_parts=of_parts)
        # Where nothing is clipped, sums do not show whose the rows of a layer are.
        return problem or deviation_of_norms(found.norms, alone.norms, half=self.in_half)

    def _together(self, pieces: list[tuple[_Share, MicroBatch]]) -> list[Clipped | None]:
        """What each run gets; None where a gradient, or their sum, is not finite, which it had better see to alone."""
        requests = [share.request for share, _ in pieces]
        sizes = [len(targets) for _, (_, targets) in pieces]
        seeds, longest = len(pieces), max(sizes)
        inputs, targets = (torch.cat([padded(piece[i], longest) for _, piece in pieces]) for i in (0, 1))
        points = [
            Point(of_seeds[0].weight, torch.stack([point.iterate for point in of_seeds]))
            for of_seeds in zip(*(request.points for request in requests), strict=True)
        ]
        vector = self.flat.vector
        counts = torch.arange(longest, device=vector.device) < torch.tensor(sizes, device=vector.device).unsqueeze(1)
        tape = self.record_together(points, inputs, targets, counts.flatten().to(vector.dtype))
        while True:
            norms = tape.norms().view(-1, seeds, longest)
            factors = torch.zeros_like(norms)
            for s, (request, size) in enumerate(zip(requests, sizes, strict=True)):
                factors[:, s, :size] = request.factors(norms[:, s, :size])
            totals = tape.weighted_sum(factors.flatten(1))
            sound = tape.finite().view(seeds, longest).all(1) & totals.sum(1).isfinite()
            flags = torch.cat([tape.doubtful().view(1), sound])
            doubtful, *sound_seeds = flags.tolist()
            if not doubtful:
                break
            tape.refine()
        losses, whole = (t.view(seeds, longest) for t in (tape.losses, tape.whole_norms()))
        return [
            Clipped(totals[s], losses[s, : sizes[s]], whole[s, : sizes[s]]) if sound_seeds[s] else None
            for s in range(seeds)
        ]
