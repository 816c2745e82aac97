"""What a launcher carries out for each job, in this process or in another one."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Sequence

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from dpbench.config import Job, by_seed, chosen, load
from dpbench.config.registry import register
from dpbench.console import make_console
from dpbench.launch.execute import execute
from dpbench.launch.forced import give_up_if_forced_and_seen
from dpbench.tracking.lock import outlive
from dpbench.tracking.process import Process
from dpbench.tracking.provenance import working_for
from dpbench.training.job_record import record_of


def train_job(composed: DictConfig, launcher: Process, command: Sequence[str]) -> str | None:
    """Train the run that Hydra composed, or those of its seeds; how they ended is in their records.

    Args:
        composed: by Hydra.
        launcher: the process of the command. A signal that ends the work of another one is not to end it, too.
        command: its words, which records are to show.

    Returns:
        The traceback of what went wrong outside of the runs, of which there is no record; None where nothing did.
    """
    if Process.this() != launcher:
        # Names W&B's service of the command, which may be on another machine, or have ended before this begins.
        os.environ.pop("WANDB_SERVICE", None)
    with working_for(command):
        return _told(lambda: _train(_of_hydra(composed)), launcher)


def train_here(job: Job) -> str | None:
    """Train the run of a job that this process composed, see `train_job`."""
    return _told(lambda: _train(job), Process.this())


def _told(work: Callable[[], None], launcher: Process) -> str | None:
    try:
        work()
    except KeyboardInterrupt:
        if Process.this() == launcher:
            raise
    except Exception:
        return traceback.format_exc()  # as text: an exception that goes to another process leaves its traceback behind
    return None


def _of_hydra(composed: DictConfig) -> Job:
    register()
    runtime = HydraConfig.get()
    OmegaConf.set_struct(composed, False)
    # The group of a sweep is set by the command, not typed.
    typed = tuple(line for line in runtime.overrides.task if not line.startswith("tracker.group=sweep-"))
    choices = chosen(runtime.runtime.choices)
    return Job(typed, load(composed, choices), choices)


def _train(job: Job) -> None:
    jobs = by_seed(job)
    if os.environ.get("SLURM_RESTART_COUNT", "0") != "0":
        # Most likely this very job was killed on another machine, where nobody can ask after its process.
        for one in jobs:
            outlive(record_of(one).lock.path)
        jobs = give_up_if_forced_and_seen(jobs)
    if jobs:
        execute(jobs, make_console())
