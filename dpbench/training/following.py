"""Rank 0 leads a run of several processes; the others follow: the same training, without record and console."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dpbench.config import Job, RunConfig, compose_jobs, config_hash
from dpbench.devices import choose_device, describe, out_of_memory, prepare_device
from dpbench.errors import UserError
from dpbench.randomness import global_stream
from dpbench.tracking import Status
from dpbench.tracking.published import Published
from dpbench.training.assemble import Assembly, assemble
from dpbench.training.budget import open_ledger
from dpbench.training.checkpoint import DamagedError, can_not_be_had, packed, unpacked
from dpbench.training.contact import RankError
from dpbench.training.distributed import PartError, TorchTeam
from dpbench.training.interruption import Interruption, Occasion, StoppedError
from dpbench.training.keeping import Found
from dpbench.training.loading import load_splits
from dpbench.training.lockstep import Steps, together
from dpbench.training.loop import DivergedError, Metrics, Progress, train
from dpbench.training.repeating import Repeats, computed_by
from dpbench.training.resume import GLOBAL, MisfitError, Training, joined
from dpbench.training.slices import Slice
from dpbench.training.team import Team


class Instruction(NamedTuple):
    """What rank 0 tells the others of a run.

    Attributes:
        overrides: of the job, from which each composes it.
        hash: what the configuration must come to.
        noise_multiplier: as rank 0 calibrated it.
        published_eps: what a publication's rule states, see `Ledger`.
        seen: what was seen of the run.
        sizes: of the checkpoint that it goes on from the bytes that all get, and those of each one's own part, by rank;
            none where it begins.
    """

    overrides: tuple[str, ...]
    hash: str
    noise_multiplier: float
    published_eps: float | None
    seen: Published
    sizes: tuple[int, ...]


class Standing(NamedTuple):
    """How a process stands that has joined a run.

    Attributes:
        about: what the provenance says of it.
        computed_by: see `Published.others`.
        same: whether it goes on as the checkpoint says that it drew before.
        misfit: why it can't go on from the checkpoint, in words that go on from "the checkpoint of step 12".
        refused: why it must not go on, or begin.
    """

    about: dict[str, str | int]
    computed_by: dict[str, Any]
    same: bool = True
    misfit: str | None = None
    refused: str | None = None

    @property
    def ready(self) -> bool:
        """Whether it can train."""
        return self.misfit is None and self.refused is None


def call_together(
    team: TorchTeam, job: Job, training: Training, found: Found | None, seen: Published
) -> list[Standing]:
    """Let the others come to where this process, which is rank 0, stands in a run.

    Args:
        team: of this process.
        job: the run.
        training: as it is here.
        found: in the checkpoint that it goes on from; None at its beginning.
        seen: of the run.

    Returns:
        How all stand, by rank. If one is not ready, the others wait for another instruction.
    """
    handed = [] if found is None else [_bytes_of(training.shared_state()), *found.others]
    multiplier, ledger = training.parts.step.noise_multiplier, training.ledger
    sizes = tuple(map(len, handed))
    team.contact.announce(
        Instruction(job.overrides, config_hash(job.config), multiplier, ledger.published_eps, seen, sizes)
    )
    try:
        team.in_turn(lambda: None)  # the others read their data now
        if handed:
            team.hand_out(handed[0], handed[1:])
        standings = team.gather(Standing(about(training.parts), computed_by(training.parts)))
    except Exception as error:
        team.contact.end(error)
        raise
    if not all(standing.ready for standing in standings):
        team.contact.end(None)
    return standings


def lead(team: TorchTeam, steps: Steps[Status], wish: Callable[[], Occasion]) -> Status:
    """Carry out a run together with the followers, all of which stand where this process does.

    Args:
        team: of this process, which is rank 0.
        steps: the run, which records its errors itself and returns how it ended.
        wish: what this process wants to do after the step under way.
    """
    try:
        (status,) = together([steps], partial(team.clipped_sums, wish=wish))
    except Exception as error:
        team.contact.end(error)
        raise
    team.contact.end(RuntimeError("recorded by process 0") if status is Status.FAILED else None)
    return status


def follow(team: TorchTeam, config_dirs: Sequence[Path]) -> None:
    """Take part in the runs that rank 0 announces, until it announces no more.

    Errors are told to rank 0, which records them and says so. A signal that comes while a run trains ends it in all
    processes; rank 0 then ends the command.

    Args:
        team: of this process, which is not rank 0.
        config_dirs: further folders searched for options.
    """
    warnings.simplefilter("ignore")  # rank 0 has the same to say
    interruption = Interruption(team)
    with suppress(RankError):  # rank 0 is gone, and torchrun says so
        while (instruction := team.contact.next_instruction()) is not None:
            try:
                _take_part(team, instruction, config_dirs, interruption)
            except Exception as error:
                team.contact.end(error)
            else:
                team.contact.end(None)


def _take_part(
    team: TorchTeam, instruction: Instruction, config_dirs: Sequence[Path], interruption: Interruption
) -> None:
    (job,) = compose_jobs(instruction.overrides, multirun=False, config_dirs=config_dirs)
    config = job.config
    if config_hash(config) != instruction.hash:
        raise UserError("the same settings are another run here; all machines need the same code and options")
    device = team.device(choose_device(config.device))
    prepare_device(device)
    ledger = open_ledger(config, instruction.noise_multiplier, instruction.published_eps)
    parts = assemble(config, device, instruction.noise_multiplier, ledger)
    join(team, parts, config)
    # Before anything is sent: a process that has no room says so.
    handed = [torch.empty(instruction.sizes[part], dtype=torch.uint8) for part in (0, team.rank) if instruction.sizes]
    loaded = team.in_turn(lambda: load_splits(config, device))
    splits = team.shares(loaded)
    follower = _Follower(team, config, Training(parts, ledger, Progress.start(config, splits, team), []), interruption)
    if handed:
        team.hand_out(handed[0], handed[1:])
    standing = follower.stand(handed, instruction.seen.of(team.rank))
    del handed
    if not all(each.ready for each in team.gather(standing)):
        return
    steps = train(
        config,
        parts,
        splits,
        ledger,
        team=team,
        on_step=follower.on_step,
        on_evaluation=follower.on_evaluation,
        progress=follower.training.progress,
    )
    with interruption, global_stream(config.seed, "model", team.stream(instruction.hash)):
        follower.load_global_streams()
        try:
            with suppress(StoppedError):
                together([steps], partial(team.clipped_sums, wish=follower.wish))
        except DivergedError:  # in all processes alike; rank 0 notes it
            team.gather(computed_by(parts))


class _Follower:
    """What a process does beside training that is not rank 0."""

    def __init__(self, team: TorchTeam, config: RunConfig, training: Training, interruption: Interruption) -> None:
        self.training = training
        self._team = team
        self._config = config
        self._interruption = interruption
        self._repeats = Repeats(config, team.size)
        self._streams: Any = None

    def stand(self, handed: Sequence[Tensor], seen: Published) -> Standing:
        """Go on from a checkpoint, if there is one, as far as what was seen allows that.

        Args:
            handed: bytes of what all share of it, and of this process's own part; nothing where the run begins.
            seen: of the run.
        """
        parts, same, misfit, refused = self.training.parts, True, None, None
        try:
            if handed:
                same = self._go_on(*handed)
            self._repeats.take_over(seen, parts, parts.step.steps)
        except (DamagedError, MisfitError) as error:
            misfit = f"{error} (process {self._team.rank} of {self._team.size})"
        except Exception as error:
            if not isinstance(error, UserError) and not out_of_memory(error):
                raise
            refused = f"in process {self._team.rank} of {self._team.size}: {error}"
        return Standing(about(parts), computed_by(parts), same, misfit, refused)

    def _go_on(self, shared: Tensor, own: Tensor) -> bool:
        """Continue from a checkpoint; whether this process draws as it did before."""
        device, parts = self.training.progress.loss_sum.device, self.training.parts
        of_all, part = (unpacked(content.numpy().data, device) for content in (shared, own))
        self.training.load_state_dict(joined(of_all, part["training"]))
        if self._config.micro_batch is None:
            parts.micro_batch = part["conditions"]["micro_batch"]
        self._repeats.kept(parts)
        self._streams = part["training"][GLOBAL]
        return bool(part["conditions"] == self._repeats.conditions(parts))

    def load_global_streams(self) -> None:
        """Let the global generators go on where they were, if the run goes on."""
        if self._streams is not None:
            self.training.load_global_streams(self._streams)

    def wish(self) -> Occasion:
        """What this process wants to do after the step under way."""
        return Occasion(self._repeats.memory_ran_out(self.training.parts), self._interruption.reason)

    def on_step(self, step: int) -> None:
        """Do what all do after a step."""
        self._repeats.check(self.training.parts, step)
        occasion = self._team.occasion
        if occasion.write:
            self._give_part()
        if occasion.stop is not None:
            raise StoppedError(occasion.stop)

    def _give_part(self) -> None:
        """Send rank 0 this process's part of a checkpoint, or why there is none, which rank 0 says."""
        parts, own, problem = self.training.parts, None, None
        self._repeats.kept(parts)
        try:
            own = _bytes_of({"conditions": self._repeats.conditions(parts), "training": self.training.own_state()})
        except Exception as error:
            if not can_not_be_had(error):
                raise
            problem = str(error)
        with suppress(PartError):
            self._team.collect(own, problem)

    def on_evaluation(self, metrics: Metrics) -> None:
        """Tell rank 0 how this process computed what is about to be seen."""
        self._team.gather(computed_by(self.training.parts))


def join(team: Team, parts: Assembly, config: RunConfig) -> None:
    """Turn a run that was just put together into this process's part of it."""
    step = parts.step
    step.noise_source, step.side_source = team.shared_noise(step.noise_source), team.shared_noise(step.side_source)
    if not team.leads:
        step.recorder = None
    if config.shard_states and team.size > 1:
        step.moved = own = Slice(step.gradients.flat, team)
        step.optimizer = config.optim.build([own.parameter])


def about(parts: Assembly) -> dict[str, str | int]:
    """What the provenance says of each process."""
    device = describe(parts.step.gradients.flat.vector.device)
    return {"device": device, "micro_batch": parts.micro_batch, "at_once": parts.at_once}


def _bytes_of(state: dict[str, Any]) -> Tensor:
    """A state as bytes that can be sent, shape (n,)."""
    return torch.frombuffer(packed(state), dtype=torch.uint8)
