"""Hydra's launchers, which carry out jobs in this process or in others, here or on other machines."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import BrokenExecutor
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

from hydra._internal.callbacks import Callbacks
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.global_hydra import GlobalHydra
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus, setup_globals
from hydra.errors import HydraException
from hydra.types import HydraContext, RunMode
from joblib import cpu_count, effective_n_jobs
from omegaconf import DictConfig

from dpbench.config.files import loader_of
from dpbench.config.messages import explain, no_such_setting, unknown_setting
from dpbench.config.own import find_own_stages
from dpbench.config.registry import register
from dpbench.errors import require
from dpbench.launch.job import train_job
from dpbench.tracking.process import Process
from dpbench.tracking.provenance import command_line
from dpbench.training.interruption import terminable

THREADS = "OMP_NUM_THREADS"
# Jobs of an array of SLURM's, which by default takes no more than MaxArraySize=1001.
LONGEST_ARRAY = 1000


class LauncherError(Exception):
    """A launcher that could not do its work, whatever the jobs are."""


class Launcher:
    """Carries out jobs, by the launcher that Hydra's settings name, until each has ended somehow.

    A worker that is killed ends its own job, and with joblib those of the other workers, too; nothing is raised then,
    for what became of each run is in its record.
    """

    def __init__(self, settings: Sequence[str], config_dirs: Sequence[Path] = ()) -> None:
        """Set up.

        Args:
            settings: overrides of hydra.* and of results_dir, below which it keeps what it writes itself.
            config_dirs: further folders searched for options, before the project's own.

        Raises:
            UserError: there is no such launcher here, it has no such setting, or none of that value.
        """
        self._loader = _loader(config_dirs)
        for line in settings:
            if line.startswith("hydra/launcher="):
                _require_known(self._loader, "hydra/launcher", line.partition("=")[2])
        try:
            self._config = _composed(self._loader, settings)
        except HydraException as error:
            bad = unknown_setting(error, [line.lstrip("+") for line in settings])
            if bad is not None:
                rest = [line for line in settings if line.lstrip("+") != bad]
                raise no_such_setting(bad, _composed(self._loader, rest)) from error
            raise explain(error, settings) from error
        finally:
            GlobalHydra.instance().clear()
        workers = self._config.hydra.launcher.get("n_jobs")
        require(workers != 0, "hydra.launcher.n_jobs", workers, "a whole number other than 0")

    def __call__(self, lines: Sequence[Sequence[str]]) -> list[str | None]:
        """Carry out jobs.

        Args:
            lines: overrides of each, in Hydra's grammar.

        Returns:
            Of each the traceback of what it raised, where that is known.

        Raises:
            LauncherError: the launcher itself failed.
        """
        setup_globals()
        config = deepcopy(self._config)
        context = HydraContext(config_loader=self._loader, callbacks=Callbacks(config))
        task = partial(train_job, launcher=Process.this(), command=command_line())
        at_once = _share_cores(config.hydra.launcher, len(lines))
        raised: list[str | None] = []
        for first in range(0, len(lines), at_once):
            jobs = lines[first : first + at_once]
            found: Sequence[JobReturn | BaseException | None]
            try:
                plugin = Plugins.instance().instantiate_launcher(
                    hydra_context=context, task_function=task, config=config
                )
                with terminable(), _every_outcome(str(config.hydra.launcher["_target_"])):
                    found = plugin.launch([list(line) for line in jobs], initial_job_idx=first)
            except BrokenExecutor:  # joblib's, when a worker was killed
                found = [None] * len(jobs)
            except Exception as error:
                raise LauncherError(f"{type(error).__name__}: {error}") from error
            raised += map(_raised, found)
        return raised


def launcher_of(overrides: Sequence[str]) -> str | None:
    """The override that hands runs to other processes; None where they are carried out in this one."""
    chosen = (line for line in overrides if line.startswith("hydra/launcher=") and line != "hydra/launcher=basic")
    return next(chosen, None)


def require_launcher(launcher: str) -> None:
    """Raise `UserError` unless Hydra has a launcher of that name."""
    _require_known(_loader(()), "launcher", launcher)


def _require_known(loader: ConfigLoaderImpl, field: str, launcher: str) -> None:
    known = loader.list_groups("hydra/launcher") + loader.get_group_options("hydra/launcher")
    hint = "" if "joblib" in known else "; pip install dpbench[sweeps] brings joblib, ray and submitit"
    require(launcher in known, field, launcher, f"one of {', '.join(known)}{hint}")


def _composed(loader: ConfigLoaderImpl, settings: Sequence[str]) -> DictConfig:
    return loader.load_configuration("config", [*settings, "hydra.job.chdir=false"], RunMode.MULTIRUN)


def _loader(config_dirs: Sequence[Path]) -> ConfigLoaderImpl:
    register()
    find_own_stages(config_dirs)
    return loader_of(config_dirs)


def _share_cores(settings: DictConfig, jobs: int) -> int:
    """Let workers on this machine divide its cores among them; how many jobs are to be launched at once.

    joblib gives each of its workers as many threads as there are cores for it, ray one. submitit's local jobs would
    begin all at once, each with all cores; of its jobs for SLURM a longer array than that takes is refused as a whole.
    """
    if "n_jobs" in settings:
        wanted: int = effective_n_jobs(settings.n_jobs)
        settings.n_jobs = min(wanted, max(jobs, 2))  # one job would run in this process, and could take it along
    if str(settings["_target_"]).endswith(".submitit_launcher.LocalLauncher"):
        each = settings.cpus_per_task or 1
        at_once: int = max(1, min(cpu_count() // each, jobs))
        os.environ.setdefault(THREADS, str(max(1, cpu_count() // at_once)))
        return at_once
    if str(settings["_target_"]).endswith(".submitit_launcher.SlurmLauncher"):
        return LONGEST_ARRAY
    return jobs


@contextmanager
def _every_outcome(target: str) -> Iterator[None]:
    """Let the launchers of submitit and ray wait for all jobs: as they are, they give up at the first that was killed.

    Both ask one job after the other for its result. Here that comes without raising: a job whose process ended without
    a word has None, one that raised outside of the run its error.
    """
    owner: Any
    if ".hydra_submitit_launcher." in target:
        import submitit

        owner, name, outcome = submitit.Job, "results", _results_of_submitit
    elif ".hydra_ray_launcher." in target:
        import ray

        owner, name, outcome = ray, "get", _result_of_ray
    else:
        yield
        return
    ask = getattr(owner, name)
    setattr(owner, name, lambda job: outcome(ask, job))
    try:
        yield
    finally:
        setattr(owner, name, ask)


def _results_of_submitit(ask: Callable[[Any], Any], job: Any) -> list[Any]:
    from submitit.core.utils import FailedJobError, UncompletedJobError

    try:
        return list(ask(job))
    except FailedJobError as error:
        return [error]
    except UncompletedJobError:
        return [None]


def _result_of_ray(ask: Callable[[Any], Any], job: Any) -> Any:
    from ray.exceptions import RayError, RayTaskError

    try:
        return ask(job)
    except RayTaskError as error:
        return error
    except RayError:
        return None


def _raised(outcome: JobReturn | BaseException | None) -> str | None:
    if isinstance(outcome, JobReturn):
        returned = outcome._return_value
        if outcome.status != JobStatus.FAILED:
            return returned if isinstance(returned, str) else None
        outcome = returned if isinstance(returned, BaseException) else None
    return None if outcome is None else "".join(traceback.format_exception(outcome))
