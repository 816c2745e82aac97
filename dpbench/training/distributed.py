"""One run in several processes, as torchrun starts them.

Each process draws the same batch, computes the clipped sum over its own samples of it, and the sums are added up once a
step; losses and norms go to all. From there on all processes do the same arithmetic with the same noise, of the same
seeded generators or sent by rank 0, so that parameters, thresholds and ledgers stay equal and noise is in the sum once.
Where states are sharded, each moves its part of the parameters and they exchange these.

Before the processes exchange anything they meet: each says where it is, whether it has failed, and a checksum of what
must be the same everywhere. So an error in one process is raised in all of them, wherever it occurred, and processes
that no longer agree stop instead of training different models. In the meeting of a step each also says whether it was
told to end, or wants a checkpoint: so all do the same after that step.

A checkpoint is a file of rank 0 that has the parts of all: the others send theirs, and are given them when the run goes
on. So it is there as a whole or not at all, and rank 0 alone needs the folder.
"""

from __future__ import annotations

import os
import traceback
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from dpbench.data import Samples, Shard, Splits
from dpbench.errors import UserError
from dpbench.gradients import Clipped, Request
from dpbench.privacy.gaussian import GaussianSource, SeededGaussian
from dpbench.privacy.uniform import SeededUniform, UniformSource
from dpbench.training.interruption import Occasion
from dpbench.training.team import ALONE, Team

T = TypeVar("T")
# How long a process waits for one that does not answer; one that has ended is noticed at once.
PATIENCE = timedelta(minutes=10)
# How long it waits where another one may have any amount of work to do: calibrating, reading data.
FOREVER = timedelta(days=365)


class RankError(RuntimeError):
    """Another process of the run failed, disagrees or is gone."""


class PartError(Exception):
    """A process has no part of a checkpoint to give, or no room for those of the others; all of them are told."""


_current: Team = ALONE


def current_team() -> Team:
    """The team that this process belongs to."""
    return _current


class TorchTeam(Team):
    """Processes that torchrun started, joined in torch's default group.

    Attributes:
        lost: whether another process has ended or does not answer, after which there is nothing left to do together.
        occasion: what all do after the step whose sums were added up last.
    """

    def __init__(self, patience: timedelta = PATIENCE) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.lost = False
        self.occasion = Occasion()
        self._impatient = _on_the_cpu(patience)
        self._patient = _on_the_cpu(FOREVER)
        self._checksum = 0
        self._busy = False
        self._preparing = True
        self._all_know = False  # that the run has failed

    @override
    def device(self, chosen: torch.device) -> torch.device:
        if ":" in str(chosen):
            raise UserError("each process takes a GPU of its own; use auto, cuda or cpu", field="device", value=chosen)
        count = torch.cuda.device_count()
        if chosen.type == "cuda" and int(os.environ["LOCAL_RANK"]) >= count:
            started = os.environ["LOCAL_WORLD_SIZE"]
            message = f"torchrun started {started} processes here, where torch can use {count} GPUs; start as many"
            raise UserError(message, field="device", value=chosen)
        return chosen

    @override
    def shares(self, splits: Splits) -> Splits:
        def share(split: Samples) -> Shard:
            return Shard(split, self.rank, self.size)

        others: dict[str, Samples] = {name: share(split) for name, split in splits.others.items()}
        return Splits(share(splits.train), share(splits.test), others, splits.prompts)

    @override
    def shared_noise(self, source: GaussianSource) -> GaussianSource:
        # A seeded source gives the same everywhere anyway.
        return source if isinstance(source, SeededGaussian) else _NoiseFromTheLeader(self, source)

    @override
    def shared_draws(self, source: UniformSource) -> UniformSource:
        return source if isinstance(source, SeededUniform) else _DrawsFromTheLeader(self, source)

    @override
    def agreed(self, value: Tensor) -> Tensor:
        bits = value.view(torch.int64 if value.element_size() == 8 else torch.int32)
        # A sum of integers is exact in any order. Python's have no end, the message has 64 bits.
        self._checksum = (31 * self._checksum + len(bits) + int(bits.sum(dtype=torch.int64))) % 2**63
        return value

    @override
    def sum(self, value: Tensor) -> Tensor:
        self.meet("an evaluation")
        return self._add_up(value.clone())

    @override
    def exchange(self, parts: Sequence[Tensor]) -> None:
        self.meet("an update")
        for rank, part in enumerate(parts):
            self.overwrite(part, rank)

    @override
    def gather(self, value: T) -> list[T]:
        self.meet("an exchange")
        return self._tell(value)

    @override
    def in_turn(self, work: Callable[[], T]) -> T:
        if int(os.environ["LOCAL_RANK"]) == 0:
            found = work()
            self.meet("reading data")
            return found
        self.meet("reading data")
        return work()

    @override
    def begin(self) -> None:
        self.meet("the start of the run")
        self._preparing = False

    def overwrite(self, value: Tensor, rank: int) -> Tensor:
        """Overwrite a tensor by that of one process."""
        with self._in_touch():
            dist.broadcast(value, src=rank)
        return value

    def clipped_sums(
        self, requests: Sequence[Request], wish: Callable[[], Occasion] = Occasion
    ) -> list[Clipped | Exception]:
        """What the one request comes to over the samples of all processes; see `lockstep.Compute`.

        Args:
            requests: one.
            wish: what this process wants to do after the step.
        """
        (request,) = requests
        own, error = None, None
        try:
            own = request.alone()
        except Exception as found:
            error = found
        try:
            self.agreed(request.gradients.flat.vector)
            count, wished = 0 if own is None else len(own.losses), wish().as_number()
            counts, wishes = self._meet("a step", (count, wished), error)
            self.occasion = Occasion.of_all(wishes)
            assert own is not None, "a meeting raises what it is told of"
            return [self._added_up(own, counts)]
        except Exception as found:
            return [found]

    def _added_up(self, own: Clipped, counts: list[int]) -> Clipped:
        """The sums over all processes; losses and norms one process after the other, in the same order everywhere."""
        remainder = None if own.remainder is None else self._add_up(own.remainder)
        # Each has zeros where the others have their numbers, so the sum is what they are: 0 + x = x, also where x is
        # infinite or not a number.
        of_samples = own.losses.new_zeros(2, sum(counts))
        before = sum(counts[: self.rank])
        of_samples[:, before : before + counts[self.rank]] = torch.stack([own.losses, own.norms])
        losses, norms = self._add_up(of_samples)
        return Clipped(self._add_up(own.total), losses, norms, remainder)

    def _add_up(self, value: Tensor) -> Tensor:
        """The sum over all processes, in place and the same bit for bit in all of them."""
        with self._in_touch():
            dist.all_reduce(value)
        return value

    @property
    def _words(self) -> dist.ProcessGroup:
        """For what is said: on the CPU, whatever the device, so that it never waits for work under way on a GPU.

        All processes change from one to the other at the same meeting.
        """
        return self._patient if self._preparing else self._impatient

    def _tell(self, value: T) -> list[T]:
        told: list[Any] = [None] * self.size
        with self._in_touch():
            dist.all_gather_object(told, value, group=self._words)
        return told

    def meet(self, where: str, error: Exception | None = None) -> None:
        """Wait until all processes have come here, none has failed and all agree.

        Args:
            where: in words.
            error: by which this process has failed; it may then be anywhere.

        Raises:
            Exception: the error that was given, in this process.
            RankError: in the others; or another process is somewhere else, disagrees or is gone.
        """
        self._meet(where, (0, 0), error)

    def _meet(self, where: str, told: tuple[int, int], error: Exception | None) -> list[list[int]]:
        """See `meet`; returns what all processes tell by two numbers, each by rank."""
        checksum, self._checksum = self._checksum, 0
        own = torch.tensor([error is not None, zlib.crc32(where.encode()), checksum, *told])
        rows = [torch.empty_like(own) for _ in range(self.size)]
        with self._in_touch():
            dist.all_gather(rows, own, group=self._words)
        found = torch.stack(rows)
        if bool(found[:, 0].any()) or bool((found[:, 1:3] != found[0, 1:3]).any()):
            self._all_know = True
            of_all = self._tell((where, None if error is None else _in_words(error)))
            raise error or _explained(of_all)
        numbers: list[list[int]] = found[:, 3:].T.tolist()
        return numbers

    def collect(self, own: Tensor | None = None, problem: str | None = None) -> list[Tensor]:
        """Let rank 0 have the parts that the others have of a checkpoint.

        Args:
            own: bytes on the CPU, shape (n,); None in rank 0.
            problem: why there are none.

        Returns:
            In rank 0 the parts of the others, by rank.

        Raises:
            PartError: in all processes, where one has none or rank 0 no room for them.
        """
        self.meet("a checkpoint")
        told = self._tell((0 if own is None else len(own), problem))
        for rank, (_, why) in enumerate(told):
            if why is not None:
                raise PartError(f"process {rank} of {self.size}: {why}")
        parts, full = [], None
        if self.leads:
            try:
                parts = [torch.empty(size, dtype=torch.uint8) for size, _ in told[1:]]
            except (RuntimeError, MemoryError) as error:
                full = str(error)
        if (why := self._tell(full)[0]) is not None:
            raise PartError(why)
        with self._in_touch():
            if own is not None:
                dist.send(own, 0, group=self._words)
            for rank, part in enumerate(parts, start=1):
                dist.recv(part, rank, group=self._words)
        return parts

    def hand_out(self, shared: Tensor, parts: Sequence[Tensor]) -> None:
        """Give the others what they need of a checkpoint, in place.

        Args:
            shared: bytes on the CPU, shape (n,), the same for all.
            parts: of each of the others, by rank; in the others their own one alone.
        """
        self.meet("a checkpoint")
        with self._in_touch():
            dist.broadcast(shared, src=0, group=self._words)
            if self.leads:
                for rank, part in enumerate(parts, start=1):
                    dist.send(part, rank, group=self._words)
            else:
                dist.recv(parts[0], 0, group=self._words)

    @contextmanager
    def _in_touch(self) -> Iterator[None]:
        if self.lost:
            raise RankError("lost contact with another process of the run")
        try:
            yield
        except RuntimeError as error:
            self.lost = self._all_know = True
            raise RankError("another process of the run has ended or does not answer") from error

    def announce(self, order: object) -> None:
        """Rank 0: let the others take part in a run."""
        self._begin()
        self._broadcast(order)

    def next_order(self) -> Any:
        """The others: what rank 0 announces next; None where there is no more to do."""
        order = self._broadcast(None)
        if order is not None:
            self._begin()
        return order

    def _begin(self) -> None:
        self._busy, self._preparing, self._all_know, self._checksum = True, True, False, 0

    def _broadcast(self, order: object) -> object:
        box = [order]
        with self._in_touch():
            dist.broadcast_object_list(box, src=0, group=self._patient)
        return box[0]

    def end(self, error: Exception | None) -> None:
        """The run is over in this process, by an error if there is one, which the others are told unless they know."""
        if not self._all_know:
            self._checksum = 0
            with suppress(Exception):  # what went wrong elsewhere after the last step changes nothing here
                self.meet("the end of the run", error)
        self._busy = self.lost

    def leave(self) -> None:
        """Let the others go, and part."""
        if self._busy or self.lost:  # interrupted: the others notice when this process has ended
            return
        with suppress(RankError):  # who is gone already needs not be let go
            if self.leads:
                self._broadcast(None)
            dist.destroy_process_group()


def _on_the_cpu(patience: timedelta) -> dist.ProcessGroup:
    group = dist.new_group(backend="gloo", timeout=patience)
    assert isinstance(group, dist.ProcessGroup), "all processes are in it"
    return group


class _NoiseFromTheLeader(GaussianSource):
    """Noise of rank 0's source for all, sent over the network as it is."""

    def __init__(self, team: TorchTeam, source: GaussianSource) -> None:
        self._team = team
        self._source = source

    @override
    def fill(self, out: Tensor) -> Tensor:
        if self._team.leads:
            self._source.fill(out)
        self._team.meet("noise")
        return self._team.overwrite(out, 0)


class _DrawsFromTheLeader(UniformSource):
    """What rank 0's source draws for all, sent over the network as it is."""

    def __init__(self, team: TorchTeam, source: UniformSource) -> None:
        self.device = source.device
        self._team = team
        self._source = source

    @override
    def fill(self, out: Tensor) -> Tensor:
        if self._team.leads:
            self._source.fill(out)
        self._team.meet("a draw of samples")
        return self._team.overwrite(out, 0)

    @override
    def order(self, size: int) -> Tensor:
        if self._team.leads:
            order = self._source.order(size)
        else:
            order = torch.empty(size, dtype=torch.int64, device=self.device)
        self._team.meet("a draw of samples")
        return self._team.overwrite(order, 0)


def _in_words(error: Exception) -> tuple[str, str]:
    """What the others say of an error, and where it occurred."""
    text = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
    return text, "".join(traceback.format_exception(error))


def _explained(told: Sequence[tuple[str, tuple[str, str] | None]]) -> RankError:
    """What the processes told each other, as an error."""
    for rank, (_, failure) in enumerate(told):
        if failure is not None:
            error = RankError(f"in process {rank} of {len(told)}: {failure[0]}")
            error.add_note(failure[1])
            return error
    places = [place for place, _ in told]
    if len(set(places)) > 1:
        listed = ", ".join(f"process {rank} at {place}" for rank, place in enumerate(places))
        return RankError(f"the processes are no longer in step: {listed}")
    return RankError(
        "the processes no longer have the same parameters or batches; they need devices and libraries of one kind"
    )


@contextmanager
def torchrun_team(patience: timedelta = PATIENCE) -> Iterator[Team]:
    """The team of the processes that torchrun started; without it, or where there is one alone, `ALONE`.

    Args:
        patience: how long to wait for one that does not answer.
    """
    global _current
    if not dist.is_torchelastic_launched() or int(os.environ["WORLD_SIZE"]) == 1:
        yield ALONE
        return
    gpus = torch.cuda.device_count()
    if gpus:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % gpus)
    dist.init_process_group("cpu:gloo,cuda:nccl" if gpus else "gloo", timeout=patience)
    team = TorchTeam(patience)
    _current = team
    try:
        yield team
    finally:
        _current = ALONE
        team.leave()
