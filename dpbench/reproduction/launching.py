"""Handing runs over: to this process, or to one of Hydra's launchers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hydra._internal.callbacks import Callbacks
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.utils import create_config_search_path
from hydra.core.global_hydra import GlobalHydra
from hydra.core.plugins import Plugins
from hydra.core.utils import setup_globals
from hydra.types import HydraContext, RunMode
from rich.console import Console

from dpbench.cli.job import train_job
from dpbench.config import Job, by_seed, compose_each, conf_folder, quoted
from dpbench.config.own import find_own_stages
from dpbench.config.schema import register
from dpbench.errors import UserError, require
from dpbench.reproduction.queue import Work
from dpbench.tracking import Status
from dpbench.training.execute import execute, record_of

ENDED = (Status.FINISHED, Status.DIVERGED)


class Launch:
    """Carries out runs, and counts how they end.

    Attributes:
        ended: runs that finished or diverged.
        failures: why runs failed or could not be started, by their names.
    """

    def __init__(self, results_dir: Path, passed_on: Sequence[str], launcher: str | None, console: Console) -> None:
        """Set up.

        Args:
            results_dir: folder of the records.
            passed_on: settings of all runs.
            launcher: of Hydra; None for this process.
            console: is told what runs.
        """
        self._results_dir = results_dir
        self._passed_on = tuple(passed_on)
        self._launcher = launcher
        self._console = console
        self.ended = 0
        self.failures: dict[str, str] = {}

    def __call__(self, wave: Sequence[Work]) -> None:
        """Carry out runs; how each ended is in its record."""
        jobs: list[Job] = []
        for work in wave:
            try:
                of_work = by_seed(compose_each([self._line(work)])[0])
            except UserError as error:
                self.failures[" ".join(work.batch.candidate)] = str(error)
                continue
            jobs += of_work
            if self._launcher is None:
                self._console.print(f"{work.entry.artefact.where.removesuffix('.yaml')}, {work.entry.cell.place}:")
                execute(of_work, self._console)
        if self._launcher is not None:
            launch([job.overrides for job in jobs], self._launcher, self._results_dir)
        for job in jobs:
            self._count(job)

    def _line(self, work: Work) -> tuple[str, ...]:
        """Overrides of the runs of a cell, the seeds last."""
        where = [f"results_dir={_text(str(self._results_dir))}"]
        if not any(line.startswith("tracker.group=") for line in self._passed_on):
            where.append(f"tracker.group={work.entry.artefact.paper}-{work.entry.artefact.name}")
        return (*work.batch.candidate, *self._passed_on, *where, f"seeds={list(work.batch.seeds)}".replace(" ", ""))

    def _count(self, job: Job) -> None:
        record = record_of(job)
        refusal = record.take_refusal()
        status = record.status()
        if refusal is None and status.get("status") in ENDED:
            self.ended += 1
            if status["status"] == Status.DIVERGED:
                self._console.print(f"  diverged, which is its result: {status.get('reason')}")
        else:
            reason = refusal or f"{status.get('status', 'not started')}: {status.get('reason', 'no record')}"
            self.failures[job.name] = reason
            self._console.print(f"  {reason}", style="red")


def require_launcher(launcher: str) -> None:
    """Raise `UserError` unless Hydra has a launcher of that name."""
    known = _loader().list_groups("hydra/launcher") + _loader().get_group_options("hydra/launcher")
    hint = "" if "joblib" in known else "; pip install dpbench[sweeps] brings joblib, ray and submitit"
    require(launcher in known, "launcher", launcher, f"one of {', '.join(known)}{hint}")


def launch(lines: Sequence[Sequence[str]], launcher: str, results_dir: Path) -> None:
    """Have a launcher of Hydra carry out runs, each a job of its own.

    Args:
        lines: overrides of each.
        launcher: its name in the group hydra/launcher.
        results_dir: folder of the records, below which it keeps what it writes itself.
    """
    setup_globals()
    loader = _loader()
    own = [f"hydra/launcher={launcher}", f"results_dir={_text(str(results_dir))}", "hydra.job.chdir=false"]
    config = loader.load_configuration("config", own, RunMode.MULTIRUN)
    GlobalHydra.instance().clear()
    context = HydraContext(config_loader=loader, callbacks=Callbacks())
    plugin = Plugins.instance().instantiate_launcher(hydra_context=context, task_function=train_job, config=config)
    plugin.launch([[quoted(override) for override in line] for line in lines], initial_job_idx=0)


def _loader() -> ConfigLoaderImpl:
    register()
    find_own_stages(())
    return ConfigLoaderImpl(config_search_path=create_config_search_path(str(conf_folder())))


def _text(value: str) -> str:
    """A value in Hydra's grammar, whatever signs it has."""
    escaped = value.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"
