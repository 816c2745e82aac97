"""What the processes of a run say to each other: that they have come somewhere, that they have failed, what comes next.

Before the processes exchange anything they meet: each says where it is, whether it has failed, and a checksum of what
must be the same everywhere. So an error in one process is raised in all of them, wherever it occurred, and processes
that no longer agree stop instead of training different models.
"""

from __future__ import annotations

import traceback
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from dpbench.errors import UserError

T = TypeVar("T")
# How long a process waits for one that does not answer; one that has ended is noticed at once.
PATIENCE = timedelta(minutes=10)
# How long it waits where another one may have any amount of work to do: calibrating, reading data.
FOREVER = timedelta(days=365)


class RankError(RuntimeError):
    """Another process of the run failed, disagrees or is gone."""


class Contact:
    """The words between processes that torch's default group joins.

    Attributes:
        rank: of this process; rank 0 leads.
        size: number of processes.
        lost: see `Team.lost`.
    """

    def __init__(self, patience: timedelta) -> None:
        """Set up, in all processes at once.

        Args:
            patience: how long to wait for one that does not answer.
        """
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.lost = False
        self._impatient = _on_the_cpu(patience)
        self._patient = _on_the_cpu(FOREVER)
        self._checksum = 0
        self._busy = False
        self._preparing = True
        self._all_know = False  # that the run has failed

    @property
    def leads(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    @property
    def words(self) -> dist.ProcessGroup:
        """For what is said: on the CPU, whatever the device, so that it never waits for work under way on a GPU.

        All processes change from one to the other at the same meeting.
        """
        return self._patient if self._preparing else self._impatient

    @contextmanager
    def in_touch(self) -> Iterator[None]:
        """While processes exchange something: what breaks it off is `RankError`."""
        if self.lost:
            raise RankError("lost contact with another process of the run")
        try:
            yield
        except RuntimeError as error:
            self.lost = self._all_know = True
            raise RankError("another process of the run has ended or does not answer") from error

    def tell(self, value: T) -> list[T]:
        """Tell all processes something; what all of them tell, by rank."""
        told: list[Any] = [None] * self.size
        with self.in_touch():
            dist.all_gather_object(told, value, group=self.words)
        return told

    def overwrite(self, value: Tensor, rank: int) -> Tensor:
        """Overwrite a tensor by that of one process."""
        with self.in_touch():
            dist.broadcast(value, src=rank)
        return value

    def agreed(self, value: Tensor) -> Tensor:
        """A value that must be the same in all processes; where it is not, the next meeting raises `RankError`."""
        bits = value.view(torch.int64 if value.element_size() == 8 else torch.int32)
        # A sum of integers is exact in any order. Python's have no end, the message has 64 bits.
        self._checksum = (31 * self._checksum + len(bits) + int(bits.sum(dtype=torch.int64))) % 2**63
        return value

    def meet(self, where: str, error: Exception | None = None) -> None:
        """Wait until all processes have come here, none has failed and all agree.

        Args:
            where: in words.
            error: by which this process has failed; it may then be anywhere.

        Raises:
            Exception: the error that was given, in this process.
            RankError: in the others; or another process is somewhere else, disagrees or is gone.
        """
        self.tell_at(where, (0, 0), error)

    def tell_at(self, where: str, told: tuple[int, int], error: Exception | None) -> list[list[int]]:
        """See `meet`; returns what all processes tell by two numbers, each by rank."""
        checksum, self._checksum = self._checksum, 0
        own = torch.tensor([error is not None, zlib.crc32(where.encode()), checksum, *told])
        rows = [torch.empty_like(own) for _ in range(self.size)]
        with self.in_touch():
            dist.all_gather(rows, own, group=self.words)
        found = torch.stack(rows)
        if bool(found[:, 0].any()) or bool((found[:, 1:3] != found[0, 1:3]).any()):
            self._all_know = True
            of_all = self.tell((where, None if error is None else _in_words(error)))
            raise error or _explained(of_all)
        numbers: list[list[int]] = found[:, 3:].T.tolist()
        return numbers

    def begin(self) -> None:
        """This process is ready to train; wait until all are, and from there on for nobody longer than `patience`."""
        self.meet("the start of the run")
        self._preparing = False

    def announce(self, instruction: object) -> None:
        """Rank 0: let the others take part in a run."""
        self._take_up()
        self._broadcast(instruction)

    def next_instruction(self) -> Any:
        """The others: what rank 0 announces next; None where there is no more to do."""
        instruction = self._broadcast(None)
        if instruction is not None:
            self._take_up()
        return instruction

    def _take_up(self) -> None:
        self._busy, self._preparing, self._all_know, self._checksum = True, True, False, 0

    def _broadcast(self, instruction: object) -> object:
        box = [instruction]
        with self.in_touch():
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
