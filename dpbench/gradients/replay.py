"""Passes on a GPU as CUDA graphs: what a micro-batch launches is recorded once for each size, and replayed.

A pass of one micro-batch is hundreds of small kernels, which a GPU often carries out faster than Python asks for them.
Sizes are rounded up so that a few of them recur, whatever number of samples is drawn.
"""

from __future__ import annotations

import gc
import warnings
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dpbench.errors import UserError
from dpbench.gradients.buffers import Buffers, buffers_kept
from dpbench.gradients.flat import FlatParameters
from dpbench.gradients.tape import Tape, not_finite
from dpbench.gradients.verify import Doubts, is_due, modes_of
from dpbench.gradients.way import Way
from dpbench.query import Point

# Passes of a size that are launched one by one before it is recorded: they choose strategies and set libraries up.
LAUNCHED = 2
# Sizes that are recorded at most.
MOST_SIZES = 32
# Relative deviation beyond which a replay did not compute what the pass computes: both launch the same kernels.
LARGEST_DEVIATION = 1e-4

Record = Callable[[Sequence[Point], Tensor, Tensor], Tape]


class Place(NamedTuple):
    """Where the passes of a model are recorded, all of them, since they follow each other.

    Attributes:
        pool: names a pool of memory, which they share; torch has no public type for it.
        stream: of the model's GPU; torch's own is of the first GPU that the process records on.
    """

    pool: Any
    stream: torch.cuda.Stream

    @classmethod
    def new(cls) -> Place:
        """One on the current GPU."""
        return cls(torch.cuda.graph_pool_handle(), torch.cuda.Stream())


def rounded_up(count: int) -> int:
    """So many samples, or up to an eighth more."""
    step = 1 << max(0, count.bit_length() - 4)
    return -(-count // step) * step


def padded(t: Tensor, size: int) -> Tensor:
    """The rows of a tensor and then its first one again, `size` in all: it is a sample that the model can read."""
    if len(t) == size:
        return t
    layout = torch.empty_like(t[0]).stride()  # that of a sample, where it has no gaps
    filled = t.new_empty_strided((size, *t.shape[1:]), (t[0].numel(), *layout))
    filled[: len(t)] = t
    filled[len(t) :] = t[:1]
    return filled


def replayable(way: Way, inputs: Tensor) -> bool:
    """Whether passes may be replayed: on a GPU, of a model that draws nothing, since replays would draw otherwise."""
    return inputs.is_cuda and not way.draws


class Graph:
    """What a function launches, recorded.

    Attributes:
        outputs: what it gives, written anew by every replay.
    """

    def __init__(self, work: Callable[[], tuple[Tensor, ...]], place: Place) -> None:
        """Record the function, which is not needed afterwards.

        Args:
            work: has been launched before.
            place: where it is recorded.
        """
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, pool=place.pool, stream=place.stream):
            self.outputs = work()
        for output in self.outputs:  # so that it shows if a replay does nothing
            output.zero_()

    def replay(self) -> None:
        """Launch it again; what it reads must be where it was."""
        self._graph.replay()


class Replay:
    """A recorded pass, with what is asked of a tape; every tensor it gives is the caller's own.

    Attributes:
        replays: how many there were.
    """

    def __init__(
        self,
        record: Record,
        flat: FlatParameters,
        points: Sequence[Point],
        inputs: Tensor,
        targets: Tensor,
        place: Place,
    ) -> None:
        """Record a pass, which has been launched before with tensors like these.

        Args:
            record: makes the tape of a pass.
            flat: the parameters.
            points: as for `PerSampleGradients.record`.
            inputs: as for `PerSampleGradients.record`.
            targets: as for `PerSampleGradients.record`.
            place: where it is recorded.
        """
        # What other passes have let go of makes room.
        gc.collect()
        self.replays = 0
        # All that the kernels read must stay where it is, as the vector of the parameters does.
        own_inputs, own_targets = self._inputs, self._targets = inputs.clone(), targets.clone()
        self._iterates = [None if point.iterate is flat.vector else point.iterate.clone() for point in points]
        own = [
            Point(point.weight, flat.vector if iterate is None else iterate)
            for point, iterate in zip(points, self._iterates, strict=True)
        ]
        tape: Tape

        def to_norms() -> tuple[Tensor, ...]:
            nonlocal tape
            tape = record(own, own_inputs, own_targets)
            return tape.norms(), tape.whole_norms(), tape.finite(), tape.doubtful(), tape.losses

        self._to_norms = Graph(to_norms, place)
        self._norms, self._whole_norms, self._finite, self._doubtful, self._losses = self._to_norms.outputs
        factors = self._factors = torch.zeros_like(self._norms)
        # The tape is let go afterwards: only this graph, which always follows the other, reads what it holds.
        self._to_sum = Graph(lambda: (tape.weighted_sum(factors),), place)
        (self._total,) = self._to_sum.outputs

    def __call__(self, points: Sequence[Point], inputs: Tensor, targets: Tensor) -> Replay:
        """The pass with other numbers."""
        self._inputs.copy_(inputs)
        self._targets.copy_(targets)
        for own, point in zip(self._iterates, points, strict=True):
            if own is not None:
                own.copy_(point.iterate)
        self._to_norms.replay()
        self.replays += 1
        return self

    @property
    def losses(self) -> Tensor:
        """As of a tape."""
        return self._losses.clone()

    def norms(self) -> Tensor:
        """As of a tape."""
        return self._norms.clone()

    def whole_norms(self) -> Tensor:
        """As of a tape."""
        return self._whole_norms.clone()

    def finite(self) -> Tensor:
        """As of a tape."""
        return self._finite.clone()

    def doubtful(self) -> Tensor:
        """As of a tape."""
        return self._doubtful.clone()

    def overflows(self, sums: Sequence[Tensor]) -> Tensor:
        """As of a tape."""
        return not_finite(sums)

    def weighted_sum(self, factors: Tensor) -> Tensor:
        """As of a tape."""
        self._factors.copy_(factors)
        self._to_sum.replay()
        return self._total.clone()

    def deviates_from(self, tape: Tape) -> bool:
        """Whether the last replay computed something else than the same pass, launched kernel by kernel."""
        norms, want = self.norms(), tape.norms()
        factors = torch.linspace(-1, 1, norms.numel(), dtype=norms.dtype, device=norms.device).view_as(norms)
        both = (norms, want), (self.weighted_sum(factors), tape.weighted_sum(factors)), (self.losses, tape.losses)
        for have, expected in both:
            finite = expected.isfinite()
            if bool((finite != have.isfinite()).any()):
                return True
            have, expected = have[finite].double(), expected[finite].double()
            if bool((have - expected).norm() > LARGEST_DEVIATION * expected.norm()):
                return True
        return False


class Replays:
    """The recorded passes of a model, one for each size and kind of query that came up a few times."""

    def __init__(self, model: nn.Module, flat: FlatParameters) -> None:
        """Nothing so far.

        Args:
            model: any model.
            flat: its parameters.
        """
        self._model, self._flat = model, flat
        self._launched: Counter[Hashable] = Counter()
        self._recorded: dict[Hashable, Replay] = {}
        self._kept: list[Tensor] = []
        self._doubts = Doubts()
        self._place: Place | None = None
        # Samples at all points of the largest one, whose memory the others use, too.
        self._largest = 0
        self._possible = True

    def of(self, way: Way, record: Record, points: Sequence[Point], inputs: Tensor, targets: Tensor) -> Replay | None:
        """This pass, which `record` launches by its way, replayed; None where it is to be launched.

        Now and then a replay is compared with what it stands for, as gradients are with autograd's. Where they differ
        the pass is launched, and the next replay is compared, too (`Doubts`). Points and samples are as for
        `PerSampleGradients.record`.

        Raises:
            UserError: two replays on end, of which there were some before, computed something else.
        """
        if not self._possible:
            return None
        flat = self._flat
        query = tuple((point.weight, point.iterate is flat.vector) for point in points)
        key = (way, modes_of(self._model), query, *map(_layout, (inputs, targets, flat.vector)))
        with _on_its_device(inputs):
            if key not in self._recorded and not self._record(key, record, points, inputs, targets):
                return None
            replay = self._recorded[key]
            if is_due(replay.replays + 1) or key in self._doubts:
                return self._compared(key, record, points, inputs, targets)
            return replay(points, inputs, targets)

    def _record(self, key: Hashable, record: Record, points: Sequence[Point], inputs: Tensor, targets: Tensor) -> bool:
        """Record a pass if it has come up often enough and there is room; whether it is recorded."""
        self._launched[key] += 1
        if self._launched[key] <= LAUNCHED or len(self._recorded) >= MOST_SIZES:
            return False
        size = len(points) * len(targets)
        if size > self._largest and not _room():
            return False
        if self._place is None:
            self._place = Place.new()
        # What is not trained stays where it is, too, though the model may get other tensors in its place.
        buffers = list(self._model.buffers())
        self._kept += [*buffers, *(p for p in self._model.parameters() if not p.requires_grad)]
        try:
            with _waiting_refused(), buffers_kept(self._model):
                record(points, inputs, targets)
                if any(now is not own for now, own in zip(self._model.buffers(), buffers, strict=True)):
                    raise RuntimeError("a pass puts other tensors in the place of buffers, which a replay would not")
            with _undone_if_it_fails(), buffers_kept(self._model):
                self._recorded[key] = Replay(record, self._flat, points, inputs, targets, self._place)
        except Exception:  # what can't be replayed, for this or that it waits for the GPU, or memory ran out
            self._give_up()
            return False
        self._largest = max(self._largest, size)
        return True

    def _compared(
        self, key: Hashable, record: Record, points: Sequence[Point], inputs: Tensor, targets: Tensor
    ) -> Replay | None:
        """A pass, replayed and compared with itself, launched; None where they differ, and buffers are as before."""
        replay = self._recorded[key]
        before = Buffers(self._model)
        replay(points, inputs, targets)
        after = Buffers(self._model)
        before.restore()
        with buffers_kept(self._model):
            deviates = replay.deviates_from(record(points, inputs, targets))
        if self._doubts.note(key, deviates=deviates):
            raise UserError(
                "replaying the model's passes gives other gradients than the passes themselves, and maybe gave them "
                "before: what it computes must follow from its parameters, buffers and input alone; change that, and "
                "train anew with force=true"
            )
        if not deviates:
            after.restore()
            return replay
        if replay.replays == 1:
            self._give_up()
        return None

    def _give_up(self) -> None:
        """Replay nothing any more, and let go of the memory of all recordings, which passes that are launched need."""
        self._possible = False
        self._recorded.clear()
        self._kept.clear()
        self._place = None


def _layout(t: Tensor) -> Hashable:
    return t.shape, t.stride(), t.dtype


def _on_its_device(t: Tensor) -> AbstractContextManager[object]:
    """The context in which streams, events and graphs are those of a tensor's GPU, of which there may be several."""
    return torch.cuda.device(t.device) if t.is_cuda else nullcontext()


@contextmanager
def _waiting_refused() -> Iterator[None]:
    """Let whatever waits for the GPU raise an error, since it can't be recorded."""
    mode = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():  # that not everything is noticed
        warnings.simplefilter("ignore")
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(mode)


@contextmanager
def _undone_if_it_fails() -> Iterator[None]:
    """Of a recording that fails, torch leaves its generator and the current stream in the middle."""
    generator = torch.cuda.default_generators[torch.cuda.current_device()]
    before = generator.clone_state()
    with torch.cuda.stream(torch.cuda.current_stream()):
        try:
            yield
        except Exception:
            generator.graphsafe_set_state(before)
            raise


def _room() -> bool:
    """Whether the GPU has as much free memory as this process holds, of which a recording may need as much again."""
    free, _ = torch.cuda.mem_get_info()
    return free >= torch.cuda.memory_reserved()
