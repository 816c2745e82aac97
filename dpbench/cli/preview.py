"""plan=true: what a command line would run, and what it would cost."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from dpbench.cli.console import duration
from dpbench.config import Job, config_hash
from dpbench.training.budget import budget
from dpbench.training.estimate import seconds_of_training
from dpbench.training.execution import record_of


def print_plan(jobs: list[Job], console: Console) -> None:
    """Print a line for each job; reads no data and writes nothing but the calibration cache.

    Raises:
        UserError: a job would exceed its budget or can't reach it.
    """
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in (
        "run",
        "hash",
        "seed",
        "steps",
        "sampling rate",
        "noise multiplier",
        "estimated time",
        "state",
    ):
        table.add_column(column, justify="left" if column in ("run", "hash", "state") else "right", overflow="fold")
    total = 0.0
    for job in jobs:
        config = job.config
        multiplier = budget(config).noise_multiplier
        seconds = seconds_of_training(config)
        finished = record_of(job).finished() and not config.force
        total += 0 if finished else seconds
        table.add_row(
            Text(job.name),
            config_hash(config),
            str(config.seed),
            str(config.steps),
            f"{config.sampling_rate:.4g}",
            f"{multiplier:.4f}",
            duration(seconds),
            "finished" if finished else "to run",
        )
    console.print(table)
    for config in {job.config.dataset.name: job.config for job in jobs}.values():
        problems = config.dataset.source.problems(Path(config.data.root), thorough=False)
        if problems and not config.data.download:
            console.print(f"\ndataset={config.dataset.name} is not complete here: {problems[0].text}", markup=False)
    console.print(f"\nAbout {duration(total)} on this machine, without evaluations; nothing was run.")
