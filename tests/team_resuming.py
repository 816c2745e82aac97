"""Runs that several processes train, in processes forked from this one as torchrun would start them."""

import importlib
import os
import signal
import sys
import traceback
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from resuming import SPLITS
from rich.console import Console
from team_worker import exit_code, free_ports

from dpbench.config import Job, RunConfig
from dpbench.launch.execute import execute
from dpbench.training import following
from dpbench.training.distributed import TorchTeam
from dpbench.training.job_record import record_of
from dpbench.training.torchrun import torchrun_team

# Done in each process before it joins the others, given its rank.
Prepare = Callable[[pytest.MonkeyPatch, int], object]
PATIENCE = timedelta(seconds=60)


class Came(NamedTuple):
    """What an attempt came to.

    Attributes:
        folder: of the record.
        said: by rank 0.
        codes: exit codes of the processes, by rank; negative for signals.
        refusal: the note that the run could not start.
    """

    folder: Path
    said: str
    codes: list[int]
    refusal: str | None


def nothing(patch: pytest.MonkeyPatch, rank: int) -> None:
    pass


def trained_together(
    config: RunConfig, results: Path, prepare: Prepare = nothing, *, size: int = 2, **settings: Any
) -> Came:
    """Carry out a run in so many processes, as far as it goes."""
    importlib.import_module("torch._dynamo")  # once, instead of in each process where an optimizer steps
    results.mkdir(parents=True, exist_ok=True)
    job = Job((), replace(config, results_dir=str(results), **settings), {})
    (port,), said = free_ports(1), results / "said.txt"
    children = [_forked(job, rank, size, port, said, prepare) for rank in range(size)]
    codes = [exit_code(child) for child in children]
    record = record_of(job)
    return Came(record.folder, said.read_text(), codes, record.take_refusal())


def _forked(job: Job, rank: int, size: int, port: int, said: Path, prepare: Prepare) -> int:
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_PORT": port}
        os.environ.update({name: str(value) for name, value in own.items()})
        os.environ.update(MASTER_ADDR="127.0.0.1", TORCHELASTIC_RUN_ID="test")
        signal.signal(signal.SIGINT, signal.default_int_handler)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(type(job.config.dataset), "load", lambda *_, **__: SPLITS)
            # Where there is no such folder, for rank 0 alone needs one.
            apart = replace(job, config=replace(job.config, results_dir="/proc/nowhere"))
            patch.setattr(following, "compose_jobs", lambda *_, **__: [apart])
            prepare(patch, rank)
            with torchrun_team(PATIENCE) as team:
                assert isinstance(team, TorchTeam)
                if team.leads:
                    with said.open("w") as file:
                        execute([job], Console(file=file, width=400))
                else:
                    following.follow(team, [])
        code = 0
    except KeyboardInterrupt as end:
        code = 143 if type(end).__name__ == "Terminated" else 130
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)
