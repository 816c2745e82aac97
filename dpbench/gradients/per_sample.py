"""Per-sample gradients of Σ_j w_j f(θ_j; x_i): their norms, and their weighted sums."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from typing import Any, Self, Unpack

from torch import Tensor, nn

from dpbench.devices import may_be_out_of_memory, require_exact_products, require_no_autocast
from dpbench.errors import PlainWarning, UserError
from dpbench.gradients.buffers import Buffers, buffers_kept
from dpbench.gradients.clipped import Clipped, Factors, MicroBatch, Running, clipped_at_once, clipped_by
from dpbench.gradients.flat import FlatParameters
from dpbench.gradients.loss import Loss
from dpbench.gradients.passes import Passes, PassOptions, generators_of
from dpbench.gradients.recording import Read
from dpbench.gradients.replay import Replays, padded, replayable, rounded_up
from dpbench.gradients.settle import UNDECIDED, problem_in_batch, settle
from dpbench.gradients.tape import Tape
from dpbench.gradients.verify import Compared, is_due, modes_of
from dpbench.gradients.way import Books, Rows, Way
from dpbench.query import Point
from dpbench.state import State


class PerSampleGradients(Passes):
    """Computes tapes of a model, by a way that it finds, and clipped sums.

    One forward pass, and one backward pass that makes output gradients only, per iterate. Layers of known kinds
    (layers.py) keep books; parameters outside such layers are repeated per sample. Before books are relied on they
    are compared with autograd, sample by sample and in float64; a model whose books are wrong, or that has other
    layers with parameters, takes `torch.func`, or one backward pass per sample, and says so.

    Attributes:
        most: samples that are computed at once at most, since memory ran out; None where it never did.
    """

    def __init__(self, model: nn.Module, flat: FlatParameters, loss: Loss, **options: Unpack[PassOptions]) -> None:
        """Find out which layers have parameters to train; all arguments are as for `Passes`.

        Raises:
            UserError: a layer mixes samples, or a GPU is not to compute exactly.
        """
        require_exact_products(flat.vector.device)
        super().__init__(model, flat, loss, **options)
        self._way: Way | None = None
        self._modes = modes_of(model)
        self._samples_compared = 0
        self._batches = 0
        self._compared_batches = Compared()
        self._resumed = False
        self.most: int | None = None
        self._replays = Replays(model, flat)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """A copy of the model with gradients of its own: what is bound to the model is made anew for the copy."""
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        vars(copied).update({k: deepcopy(v, memo) for k, v in vars(self).items() if k != "_replays"})
        copied._replays = Replays(copied.model, copied.flat)
        if isinstance(copied._way, Rows):
            copied._way = copied.way_of(copied._way.plain())
        return copied

    def clipped_sum(
        self,
        points: Sequence[Point],
        batch: Iterable[MicroBatch],
        factors: Factors,
        *,
        remainder: bool = False,
    ) -> Clipped:
        """Σ_i factor_i G_i over a logical batch.

        A sample whose gradient, or the square of its norm, is not finite adds nothing, whatever its factor: one broken
        sample can neither stop training nor exceed its bound. Where memory runs out, a micro-batch is halved, and so
        are those that follow.

        Args:
            points: (weight, iterate) pairs; iterates have shape (d,).
            batch: inputs and targets of micro-batches; no sample at all gives zero.
            factors: maps norms of shape (G, B), inf for broken samples, to factors of that shape.
            remainder: also sum what the factors leave over.

        Raises:
            TypeError: a micro-batch is no pair of tensors.
            UserError: the model trains other parameters than the flat ones, or autocast is on.
        """
        self.flat.require_of(self.model)
        require_no_autocast(self.flat.vector.device)
        running = Running(self.flat.vector, remainder=remainder)
        before = Buffers(self.model)
        for part in batch:
            waiting = [_pair(part)]
            while waiting:
                x, y = waiting.pop(0)
                if not len(y):
                    continue
                if self.most is not None and len(y) > self.most:
                    waiting = list(zip(x.split(self.most), y.split(self.most), strict=True)) + waiting
                    continue
                before.restore()  # to a counter a logical batch is one, else it would tell how many samples were drawn
                found = self._sum_if_it_fits(points, x, y, factors, remainder, before)
                if found is None:
                    self.most = len(y) // 2
                    waiting.insert(0, (x, y))
                else:
                    running.add(found)
        return running.clipped()

    def _sum_if_it_fits(
        self,
        points: Sequence[Point],
        inputs: Tensor,
        targets: Tensor,
        factors: Factors,
        remainder: bool,
        buffers: Buffers,
    ) -> Clipped | None:
        """The sum of a micro-batch of more than no samples; None if memory ran out and halving may help.

        A pass that is made again finds these buffers.
        """
        count, generators = len(targets), generators_of(inputs)
        before: State | None = None
        try:
            way = self.way(points, inputs, targets)
            if way.draws:
                before = generators.state_dict()
            if replayable(way, inputs):
                size = rounded_up(count)
                inputs, targets = padded(inputs, size), padded(targets, size)
                replay = self._replays.of(way, partial(self.record_by, way), points, inputs, targets)
                if replay is not None:
                    found, sound = clipped_at_once(replay, count, factors, remainder)
                    if sound.is_right:
                        return found
                    buffers.restore()
            return clipped_by(self._record(way, points, inputs, targets, buffers), count, factors, remainder)
        except (RuntimeError, MemoryError) as error:
            if count == 1 or not may_be_out_of_memory(error, count):
                raise
        if before is not None:  # what is drawn hangs on the micro-batches alone, not on where memory ran out
            generators.load_state_dict(before)
        return None

    def state_dict(self) -> State:
        """What decides how gradients are rounded, and what a model draws for each sample: all but the model.

        That is strategies, the micro-batches that fit, and the way, with what it was compared with: what follows may
        change it.
        """
        return {
            "strategies": self._chooser.state_dict(),
            "most": self.most,
            "way": None if self._way is None else self._way.plain(),
            "modes": list(self._modes),
            "samples_compared": self._samples_compared,
            "batches": self._batches,
            "compared_batches": self._compared_batches.state_dict(),
        }

    def load_state_dict(self, state: State) -> None:
        """Go on as the state was saved; the next batch is compared, for this process may have other code."""
        self._chooser.load_state_dict(state["strategies"])
        self.most = state["most"]
        self._way = None if state["way"] is None else self.way_of(state["way"])
        self._modes = tuple(state["modes"])
        self._samples_compared, self._batches = state["samples_compared"], state["batches"]
        self._compared_batches.load_state_dict(state["compared_batches"])
        self._resumed = self._way is not None

    @contextmanager
    def undisturbed(self) -> Iterator[None]:
        """Passes that are none of training's leave no trace in these gradients or the buffers of the model."""
        before = self.state_dict()
        try:
            with buffers_kept(self.model):
                yield
        finally:
            self.load_state_dict(before)
            self._replays = Replays(self.model, self.flat)  # those are of strategies that may be chosen otherwise

    def record(self, points: Sequence[Point], inputs: Tensor, targets: Tensor) -> Tape:
        """Per-sample gradients of one micro-batch; valid until the parameters change.

        Args:
            points: (weight, iterate) pairs; iterates have shape (d,).
            inputs: (B, ...), B > 0, or (B, K, ...) with K > 1 views of each sample.
            targets: (B, ...).

        Raises:
            UserError: gradients of this batch are wrong, though those of batches before were right; the model trains
                other parameters than the flat ones; or autocast is on.
        """
        self.flat.require_of(self.model)
        require_no_autocast(self.flat.vector.device)
        return self._record(self.way(points, inputs, targets), points, inputs, targets, Buffers(self.model))

    def _record(self, way: Way, points: Sequence[Point], inputs: Tensor, targets: Tensor, buffers: Buffers) -> Tape:
        """What a way gives, or where it fails or is wrong another one, which finds these buffers.

        What layers read shows in the pass alone. Where that is new, though samples have the shape of those before, it
        follows the data or a draw, and the batch is compared.
        """
        try:
            tape = self.record_by(way, points, inputs, targets)
        except Exception as error:
            if may_be_out_of_memory(error, len(targets)) or (isinstance(way, Rows) and way.by_plain_autograd):
                raise
            buffers.restore()
            tape = self.record_by(self.one_by_one(), points, inputs, targets)
            self._fall_back(f"{type(error).__name__}: {error}")
            return tape
        if self._compared_batches.has_read(self.reads):
            return tape
        found = self._way_compared(points, inputs, targets, self.reads)
        if found is way:
            return tape
        buffers.restore()
        return self.record_by(found, points, inputs, targets)

    def way(self, points: Sequence[Point], inputs: Tensor, targets: Tensor) -> Way:
        """The way for a micro-batch: that of those before, which is compared with autograd now and then.

        So it is in the first one, and where samples have another shape or there are more of them, since what a model
        does may hang on either: another way is then taken if it is wrong. It is found anew for another mode. (A batch
        in which layers read something new is compared after its pass.) All arguments are as for `record`.

        Raises:
            UserError: gradients of this batch are wrong, though those of batches before were right.
        """
        modes = modes_of(self.model)
        # One sample alone can't tell of what depends on others.
        if self._way is None or modes != self._modes or (self._samples_compared == 1 and len(inputs) > 1):
            found = settle(self, inputs, targets)
            if found is None:
                return self._undecided()
            self._way, self._samples_compared, self._batches = found.way, len(inputs), 0
            self._modes, self._compared_batches, self._resumed = modes, Compared(), False
            if found.complaint:
                self._fall_back(found.complaint, found.way)
        if isinstance(self._way, Rows) and self._way.by_plain_autograd:
            return self._way
        due = self._batches + 1
        known, most = self._compared_batches.has_like(inputs, targets), self._compared_batches.most
        if known and (is_due(due) or self._resumed):
            self.require_right(points, inputs[:most], targets[:most], due.bit_length() // 2)
            self._resumed = False
        if not known or len(targets) > most:
            way = self._way_compared(points, inputs, targets, set())
            if way is not self._way:
                return way
        self._batches = due
        return self._way

    def _way_compared(self, points: Sequence[Point], inputs: Tensor, targets: Tensor, reads: set[Read]) -> Way:
        """The way for a batch of a kind that was not compared so far: that of those before if it is right.

        Else it is another one from now on; where gradients are not finite it is another one for this batch alone.

        Args:
            points: as for `record`.
            inputs: as for `record`.
            targets: as for `record`.
            reads: what layers have read in its own pass.
        """
        assert self._way is not None
        problem = problem_in_batch(self, self._way, points, inputs, targets, 0)
        if problem not in (None, UNDECIDED) and isinstance(self._way, Books) and self._way.channels_last:
            # The model may depend on the layout, as one does that views maps as vectors.
            self._way = self._way._replace(channels_last=False)
            problem = problem_in_batch(self, self._way, points, inputs, targets, 0)
        if problem == UNDECIDED:
            return self._undecided()
        if problem is not None:
            self._fall_back(problem)
        self._compared_batches.add(inputs, targets, len(targets), self.reads | reads)
        return self._way

    def require_right(self, points: Sequence[Point], inputs: Tensor, targets: Tensor, seed: int) -> None:
        """Raise `UserError` where the way that was found is wrong for a micro-batch.

        Args:
            points: as for `record`.
            inputs: as for `record`.
            targets: as for `record`.
            seed: of what it is compared at.
        """
        if self._way is None or (isinstance(self._way, Rows) and self._way.by_plain_autograd):
            return
        problem = problem_in_batch(self, self._way, points, inputs, targets, seed)
        if problem not in (None, UNDECIDED):
            raise UserError(
                f"the model's per-sample gradients, which were right in its first batches, are wrong in this one "
                f"({problem}), and maybe in some before it: the rows that a layer reads may follow the data, or "
                "inputs be too large for float32; change the model or scale inputs, and train anew with force=true"
            )

    def compare_anew(self) -> None:
        """Find way and strategies anew with the next micro-batch, since those before were no real samples."""
        self._way = None
        self._chooser.choices.clear()

    def _undecided(self) -> Way:
        """The way for a batch whose gradients can't be compared."""
        warnings.warn(
            "gradients of the first samples of a batch, with which fast ways are compared, are not finite: such a "
            "batch takes one backward pass per sample, which is slower",
            PlainWarning,
            stacklevel=4,
        )
        return self.one_by_one()

    def _fall_back(self, complaint: str, way: Way | None = None) -> None:
        self._way = way or self.one_by_one()
        warnings.warn(
            "falling back to materialised per-sample gradients for this model: slower, and all of them are held in "
            f"memory ({complaint})",
            PlainWarning,
            stacklevel=4,
        )


def _pair(part: MicroBatch) -> MicroBatch:
    """A micro-batch, if it is one."""
    if not isinstance(part, Sequence) or len(part) != 2 or not all(isinstance(one, Tensor) for one in part):
        raise TypeError(
            "a micro-batch is a pair of two tensors, inputs (B, ...) and targets (B, ...); where a model takes several "
            "inputs, make one tensor of them that its forward() takes apart"
        )
    return part
