"""Rank 0 leads a run of several processes; the others follow: the same training, without record and console."""

from __future__ import annotations

import signal
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from dpbench.config import Job, RunConfig, compose_jobs, config_hash
from dpbench.devices import choose_device, describe, prepare_device
from dpbench.errors import UserError
from dpbench.randomness import global_stream
from dpbench.tracking import Status
from dpbench.training.assemble import Assembly, assemble
from dpbench.training.budget import open_ledger
from dpbench.training.distributed import RankError, TorchTeam
from dpbench.training.lockstep import Steps, together
from dpbench.training.loop import DivergedError, train
from dpbench.training.slices import Slice
from dpbench.training.team import Team


class Order(NamedTuple):
    """What rank 0 tells the others of a run.

    Attributes:
        overrides: of the job, from which each composes it.
        hash: what the configuration must come to.
        noise_multiplier: as rank 0 calibrated it.
    """

    overrides: tuple[str, ...]
    hash: str
    noise_multiplier: float


def lead(team: TorchTeam, job: Job, noise_multiplier: float, steps: Steps[Status]) -> Status:
    """Carry out a run together with the followers.

    Args:
        team: of this process, which is rank 0.
        job: the run.
        noise_multiplier: z.
        steps: the run, which records its errors itself and returns how it ended.
    """
    with _outliving_the_others(team):
        team.announce(Order(job.overrides, config_hash(job.config), noise_multiplier))
        try:
            (status,) = together([steps], team.clipped_sums)
        except Exception as error:
            team.end(error)
            raise
        team.end(RuntimeError("recorded by process 0") if status is Status.FAILED else None)
    return status


@contextmanager
def _outliving_the_others(team: TorchTeam) -> Iterator[None]:
    """Let rank 0 record how a run ended when torchrun ends all processes because one of them has died.

    The next meeting fails then, which ends the run; torchrun waits for that.
    """
    before = signal.getsignal(signal.SIGTERM)
    if before is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        yield
    finally:
        if not team.lost:  # else this process is about to end, and has yet to say why
            signal.signal(signal.SIGTERM, before)


def follow(team: TorchTeam, config_dirs: Sequence[Path]) -> None:
    """Take part in the runs that rank 0 announces, until it announces no more.

    Errors are told to rank 0, which records them and says so.

    Args:
        team: of this process, which is not rank 0.
        config_dirs: further folders searched for options.
    """
    warnings.simplefilter("ignore")  # rank 0 has the same to say
    with suppress(RankError):  # rank 0 is gone, and torchrun says so
        while (order := team.next_order()) is not None:
            try:
                _take_part(team, order, config_dirs)
            except Exception as error:
                team.end(error)
            else:
                team.end(None)


def _take_part(team: TorchTeam, order: Order, config_dirs: Sequence[Path]) -> None:
    (job,) = compose_jobs(order.overrides, multirun=False, config_dirs=config_dirs)
    config = job.config
    if config_hash(config) != order.hash:
        raise UserError("the same settings are another run here; all machines need the same code and options")
    device = team.device(choose_device(config.device))
    prepare_device(device)
    ledger = open_ledger(config, order.noise_multiplier)
    parts = assemble(config, device, order.noise_multiplier, ledger)
    join(team, parts, config)
    loaded = team.in_turn(lambda: config.dataset.load(Path(config.data.root), download=config.data.download))
    splits = team.shares(loaded.to(device))
    team.gather(about(parts))
    steps = train(config, parts, splits, ledger, team=team, on_step=_nothing, on_evaluation=_nothing)
    # A run diverges in all processes alike.
    with global_stream(config.seed, "model", team.stream(order.hash)), suppress(DivergedError):
        together([steps], team.clipped_sums)


def join(team: Team, parts: Assembly, config: RunConfig) -> None:
    """Make of a run, as it was put together, this process's part in it."""
    step = parts.step
    step.noise_source, step.side_source = team.shared_noise(step.noise_source), team.shared_noise(step.side_source)
    if not team.leads:
        step.recorder = None
    if config.shard_states and team.size > 1:
        step.moved = own = Slice(step.gradients.flat, team)
        step.optimizer = config.optim.build([own.parameter])


def about(parts: Assembly) -> dict[str, str | int]:
    """What the provenance says of each process."""
    return {"device": describe(parts.step.gradients.flat.vector.device), "micro_batch": parts.micro_batch}


def _nothing(_: object) -> None:
    """What a follower shows of its progress."""
