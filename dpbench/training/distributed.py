"""One run in several processes, as torchrun starts them.

Each process draws the same batch, computes the clipped sum over its own samples of it, and the sums are added up once a
step; losses and norms go to all. From there on all processes do the same arithmetic with the same noise, of the same
seeded generators or sent by rank 0, so that parameters, thresholds and ledgers stay equal and noise is in the sum once.
Where states are sharded, each moves its part of the parameters and they exchange these.

Before they exchange anything they meet (contact.py). In the meeting of a step each also says whether it was told to
end, or wants a checkpoint: so all do the same after that step.

A checkpoint is a file of rank 0 that has the parts of all: the others send theirs, and are given them when the run goes
on. So it is there as a whole or not at all, and rank 0 alone needs the folder.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from dpbench.data import Samples, Shard, Splits
from dpbench.errors import UserError
from dpbench.gradients import Clipped, Request
from dpbench.privacy.gaussian import GaussianSource, SeededGaussian
from dpbench.privacy.uniform import SeededUniform, UniformSource
from dpbench.training.contact import Contact
from dpbench.training.interruption import Occasion
from dpbench.training.shared_sources import DrawsFromTheLeader, NoiseFromTheLeader
from dpbench.training.team import Team

T = TypeVar("T")


class PartError(Exception):
    """A process has no part of a checkpoint to give, or no room for those of the others; all of them are told."""


class TorchTeam(Team):
    """Processes that torchrun started, joined in torch's default group.

    Attributes:
        contact: between them.
        occasion: what all do after the step whose sums were added up last.
    """

    def __init__(self, contact: Contact) -> None:
        self.rank, self.size = contact.rank, contact.size
        self.contact = contact
        self.occasion = Occasion()

    @property
    @override
    def lost(self) -> bool:
        return self.contact.lost

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
        return source if isinstance(source, SeededGaussian) else NoiseFromTheLeader(self.contact, source)

    @override
    def shared_draws(self, source: UniformSource) -> UniformSource:
        return source if isinstance(source, SeededUniform) else DrawsFromTheLeader(self.contact, source)

    @override
    def agreed(self, value: Tensor) -> Tensor:
        return self.contact.agreed(value)

    @override
    def sum(self, value: Tensor) -> Tensor:
        self.contact.meet("an evaluation")
        return self._add_up(value.clone())

    @override
    def exchange(self, parts: Sequence[Tensor]) -> None:
        self.contact.meet("an update")
        for rank, part in enumerate(parts):
            self.contact.overwrite(part, rank)

    @override
    def gather(self, value: T) -> list[T]:
        self.contact.meet("an exchange")
        return self.contact.tell(value)

    @override
    def in_turn(self, work: Callable[[], T]) -> T:
        if int(os.environ["LOCAL_RANK"]) == 0:
            found = work()
            self.contact.meet("reading data")
            return found
        self.contact.meet("reading data")
        return work()

    @override
    def begin(self) -> None:
        self.contact.begin()

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
            counts, wishes = self.contact.tell_at("a step", (count, wished), error)
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
        with self.contact.in_touch():
            dist.all_reduce(value)
        return value

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
        self.contact.meet("a checkpoint")
        told = self.contact.tell((0 if own is None else len(own), problem))
        for rank, (_, why) in enumerate(told):
            if why is not None:
                raise PartError(f"process {rank} of {self.size}: {why}")
        parts, full = [], None
        if self.leads:
            try:
                parts = [torch.empty(size, dtype=torch.uint8) for size, _ in told[1:]]
            except (RuntimeError, MemoryError) as error:
                full = str(error)
        if (why := self.contact.tell(full)[0]) is not None:
            raise PartError(why)
        with self.contact.in_touch():
            if own is not None:
                dist.send(own, 0, group=self.contact.words)
            for rank, part in enumerate(parts, start=1):
                dist.recv(part, rank, group=self.contact.words)
        return parts

    def hand_out(self, shared: Tensor, parts: Sequence[Tensor]) -> None:
        """Give the others what they need of a checkpoint, in place.

        Args:
            shared: bytes on the CPU, shape (n,), the same for all.
            parts: of each of the others, by rank; in the others their own one alone.
        """
        self.contact.meet("a checkpoint")
        with self.contact.in_touch():
            dist.broadcast(shared, src=0, group=self.contact.words)
            if self.leads:
                for rank, part in enumerate(parts, start=1):
                    dist.send(part, rank, group=self.contact.words)
            else:
                dist.recv(parts[0], 0, group=self.contact.words)
