"""Jobs carried out: one by one, seeds that share their passes, or together with other processes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace

from rich.console import Console

from dpbench.config import Job, RunConfig, config_hash
from dpbench.data import Splits
from dpbench.randomness import global_stream
from dpbench.training.display import Display
from dpbench.training.distributed import TorchTeam
from dpbench.training.execution import Execution
from dpbench.training.following import lead
from dpbench.training.fusing import fused_gradients
from dpbench.training.interruption import Interruption, Occasions
from dpbench.training.job_record import record_of
from dpbench.training.lockstep import alone, together
from dpbench.training.torchrun import current_team


def execute(jobs: Sequence[Job], console: Console, splits: Splits | None = None) -> None:
    """Run jobs, unless they are finished already or another process is at them, and record each whatever happens.

    Jobs that differ in their seeds alone share their passes where the first one's `fuse_seeds` lets them.
    Only KeyboardInterrupt and what submitit raises leave, after the records say so. Where torchrun started several
    processes, they train each run together, and this one leads.

    Args:
        jobs: of one data set.
        console: is told how they go.
        splits: data in the place of what the jobs would load.
    """
    console.print(_name(jobs), style="bold")
    team, fuse = current_team(), jobs[0].config.fuse_seeds
    may_share = len(jobs) > 1 and fuse is not False and team.size == 1
    with ExitStack() as locks:
        ready = _ready(jobs, console, splits, locks, one_by_one=not may_share)
        if fuse is True and len(ready) > 1 and team.size > 1:
            _say_apart("several processes train each", console)
        interruption = Interruption(team, forced=any(job.config.force for job in jobs))
        with interruption:
            try:
                for runs in _at_one_step(ready) if may_share else filter(None, [ready]):
                    if not may_share or len(runs) == 1 or not _fused(runs, console, interruption):
                        _one_by_one(runs, console, interruption, named=len(jobs) > 1)
                    interruption.raise_noted()
            finally:  # once all of them are recorded
                for execution in ready:
                    execution.wait_for_tracker()
            interruption.raise_noted()


def _ready(
    jobs: Sequence[Job], console: Console, splits: Splits | None, locks: ExitStack, *, one_by_one: bool
) -> list[Execution]:
    """Those that this process may run, and can; of several that go one by one the first alone is prepared by now."""
    ready: list[Execution] = []
    for job in jobs:
        execution = Execution(job, record_of(job), console)
        locks.callback(execution.record.lock.release)
        if not execution.may_begin() or not execution.clear_damage():
            continue
        later = ready and one_by_one
        if later or execution.prepare(ready[0].prepared.splits if ready else splits):
            ready.append(execution)
    return ready


def _one_by_one(runs: Sequence[Execution], console: Console, interruption: Interruption, *, named: bool) -> None:
    splits = runs[0].prepared.splits
    for waiting in runs[1:]:  # others may have them meanwhile, and their parts would only take memory
        waiting.give_up()
    for number, execution in enumerate(runs):
        if named:
            console.print(execution.job.name, style="bold")
        if not execution.may_begin() or (number > 0 and not execution.prepare(splits)):
            continue
        config = execution.config
        try:
            if execution.bring_in_others():
                stream = global_stream(config.seed, "model", config_hash(config))
                with _display(config, console) as display, stream:
                    _carry_out(execution, display, Occasions(config.checkpoint, interruption))
        finally:
            if execution.team.lost:
                interruption.outlive_the_others()
        execution.give_up()
        interruption.raise_noted()


def _carry_out(execution: Execution, display: Display, occasions: Occasions) -> None:
    """Train, in this process or together with others."""
    steps, team = execution.carry_out(display, occasions), execution.team
    if isinstance(team, TorchTeam):
        lead(team, steps, lambda: execution.wish(occasions))
    else:
        alone(steps)


def _at_one_step(ready: Sequence[Execution]) -> list[list[Execution]]:
    """The runs in groups of those that have taken equally many steps: only these can go in step."""
    groups: dict[int, list[Execution]] = {}
    for execution in ready:
        groups.setdefault(execution.prepared.training.parts.step.steps, []).append(execution)
    return list(groups.values())


def _display(config: RunConfig, console: Console) -> Display:
    return Display(console, config.steps, proven=config.uncertified is None or math.isinf(config.eps))


def _name(jobs: Sequence[Job]) -> str:
    """What the user typed for these jobs, with all seeds where they differ."""
    if len(jobs) == 1:
        return jobs[0].name
    seeds = ",".join(str(job.config.seed) for job in jobs)
    lines = [f"seed={seeds}" if line.startswith("seed=") else line for line in jobs[0].overrides]
    return replace(jobs[0], overrides=tuple(lines)).name


def _say_apart(why: str, console: Console) -> None:
    console.print(f"  seeds run one after the other: {why}")


def _fused(ready: Sequence[Execution], console: Console, interruption: Interruption) -> bool:
    """Carry out runs that share their passes; False, and nothing is done, where they had better not."""
    config = ready[0].config
    fused, why = fused_gradients(config, [run.prepared.training.parts for run in ready], ready[0].prepared.splits)
    if fused is None:
        if config.fuse_seeds is True:
            _say_apart(why, console)
        return False
    console.print(f"  {len(ready)} seeds at once ({why})")
    occasions = Occasions(config.checkpoint, interruption)
    # These models draw nothing; what is set all the same is undone.
    with _display(config, console) as display, global_stream(config.seed, "model", config_hash(config)):
        together([run.carry_out(display, occasions, seeds_at_once=len(ready)) for run in ready], fused.clipped_sums)
    return True
