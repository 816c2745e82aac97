"""Ways to carry out the jobs of a command line: here, through Hydra where its settings are set, by its launcher.

Each is a `StartWith` once its first arguments are given.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence

import hydra
from omegaconf import DictConfig

from dpbench.config import Job, conf_folder, quoted
from dpbench.launch.job import train_here, train_job
from dpbench.launch.launcher import Launcher, launcher_of
from dpbench.tracking.process import Process
from dpbench.tracking.provenance import command_line

# Carries out some jobs with further overrides for all of them; with those given it is a Start of rounds.py.
StartWith = Callable[[list[str], Sequence[Job]], Mapping[int, str]]


def start_here(own: list[str], jobs: Sequence[Job]) -> dict[int, str]:
    """Carry out the one job of a command line, in this process; it is no part of a sweep and has nothing of its own."""
    assert not own
    traces = map(train_here, jobs)
    return {place: trace for place, trace in enumerate(traces) if trace is not None}


def start_by_hydra(flags: list[str], overrides: list[str], own: list[str], jobs: Sequence[Job]) -> dict[int, str]:
    """Let Hydra carry out the one job of a command line that has settings of Hydra's, in this process."""
    raised = hand_over(flags, [*overrides, *own])
    return dict.fromkeys(range(len(jobs)), raised) if raised else {}


def start_by_launcher(launcher: Launcher, fused: bool, own: list[str], jobs: Sequence[Job]) -> dict[int, str]:
    """Carry out jobs of a sweep through Hydra's launcher."""
    places: dict[tuple[str, ...], list[int]] = {}
    for place, job in enumerate(jobs):
        line = tuple("seeds" if fused and one.startswith("seed=") else one for one in job.overrides)
        places.setdefault(line, []).append(place)
    lines = []
    for line, of_line in places.items():
        seeds = f"seeds=[{','.join(str(jobs[place].config.seed) for place in of_line)}]"
        lines.append([*(seeds if one == "seeds" else one for one in line), *own])
    raised = zip(places.values(), launcher(lines), strict=True)
    return {place: trace for of_line, trace in raised if trace is not None for place in of_line}


def fuses(jobs: Sequence[Job], hydras: Sequence[str]) -> bool:
    """Whether jobs that differ in their seeds alone become one; a launcher of several processes has to be told to.

    Which seeds share their passes is decided in that job.

    Args:
        jobs: of a sweep.
        hydras: settings of Hydra's.
    """
    fuse = jobs[0].config.fuse_seeds
    several = len({job.config.seed for job in jobs}) > 1
    return bool(several and fuse and not (launcher_of(hydras) and fuse == "auto"))


def hand_over(flags: list[str], overrides: list[str]) -> str | None:
    """Let Hydra have the command line; the traceback of what was raised outside of the run, if anything was."""
    typed, command, raised = sys.argv, command_line(), []

    def task(composed: DictConfig) -> None:
        raised.append(train_job(composed, Process.this(), command))

    # Overrides first: a flag that may have a value, as --info, would take one for it.
    sys.argv = [typed[0], *map(quoted, overrides), *flags]
    try:
        hydra.main(version_base="1.3", config_path=str(conf_folder()), config_name="config")(task)()
    finally:
        sys.argv = typed
    return raised[0] if raised else None
