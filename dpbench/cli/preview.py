"""plan=true: what a command line would run, and what it would cost."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.text import Text

from dpbench.config import Job, RunConfig, config_hash
from dpbench.config.own import own_errors_placed
from dpbench.console import new_table
from dpbench.devices import choose_device
from dpbench.reproduction.available import Available, missing_weights
from dpbench.reproduction.facts import facts_of_run
from dpbench.reproduction.times import Times
from dpbench.tracking.published import Published
from dpbench.training.budget import Budget, difference_in_words
from dpbench.training.calibrating import budgets
from dpbench.training.checkpoint import Checkpoints
from dpbench.training.estimate import MOST_SAMPLES, seconds_of_training
from dpbench.training.job_record import record_of
from dpbench.wording import duration

# Seconds by arithmetic above which a step is not timed on a CPU.
LONG_STEP = 2.0


def print_plan(jobs: list[Job], console: Console) -> None:
    """Print a line for each job; reads no data or weights and writes nothing but caches.

    Raises:
        UserError: a job would exceed its budget or can't reach it.
    """
    table = new_table()
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
    total, guessed = 0.0, False
    spent = budgets([job.config for job in jobs], console)
    for job, found in zip(jobs, spent, strict=True):
        config = job.config
        with own_errors_placed(config):
            seconds, guess = _seconds(config)
        taken, state = _standing(job)
        total += seconds * (1 - taken / config.steps)
        guessed = guessed or (guess and taken < config.steps)
        table.add_row(
            Text(job.name),
            config_hash(config),
            str(config.seed),
            str(config.steps),
            f"{config.sampling_rate:.4g}",
            f"{found.noise_multiplier:.4f}",
            duration(seconds),
            state,
        )
    console.print(table)
    for warning, names in _doubtful(jobs, spent).items():
        console.print(f"\n{warning}: {', '.join(names)}")
    for line in dict.fromkeys(line for job in jobs for line in _not_here(job.config)):
        console.print(f"\n{line}")
    if not total:
        console.print("\nNothing is left to run; force=true runs all of it anew.")
        return
    basis = ", large models estimated from operation counts" if guessed else ""
    left = "less than a second" if total < 1 else f"about {duration(total)}"
    console.print(f"\nTraining takes {left} on this machine, beside start and evaluations{basis}; nothing was run.")


def _doubtful(jobs: Sequence[Job], spent: Sequence[Budget]) -> dict[str, list[str]]:
    """Names of the runs whose eps does not hold, or is not the one asked for, by the reason in words."""
    names: dict[str, list[str]] = {}
    for job, found in zip(jobs, spent, strict=True):
        config = job.config
        if config.uncertified is not None and math.isfinite(config.eps):
            names.setdefault(f"NOT CERTIFIED: {config.uncertified}, eps does not hold", []).append(job.name)
        differs = difference_in_words(config, found)
        if differs is not None:
            names.setdefault(differs, []).append(job.name)
    return names


def _standing(job: Job) -> tuple[int, str]:
    """Steps that need not be taken any more, and the state of a run in words."""
    record = record_of(job)
    if job.config.force:
        return 0, "to run"
    if record.finished():
        return job.config.steps, "finished"
    step = next(iter(Checkpoints(record.folder).steps()), None)
    if job.config.privacy.secure_noise and Published.read(record.folder).step > (step or 0):
        return job.config.steps, "refused, for metrics of it were seen"
    return (0, "to run") if step is None else (step, f"goes on after step {step}")


def _seconds(config: RunConfig) -> tuple[float, bool]:
    """Seconds of training, and whether they are a guess: a few steps of a large model take minutes on a CPU."""
    if choose_device(config.device).type == "cpu":
        facts, times = facts_of_run(config), Times(config.device)
        step, _ = times.seconds_of_step(replace(facts, batch_size=min(facts.batch_size, MOST_SAMPLES)))
        if step > LONG_STEP:
            return times.seconds_of_step(facts)[0] * config.steps, True
    return seconds_of_training(config), False


def missing_data(config: RunConfig) -> list[str]:
    """Data that a run would read, and that are not on this machine and will not be fetched, a sentence each."""
    available = Available(Path(config.data.root), download=config.data.download)
    return [f"not here: {missing.what}; {missing.told}" for missing in available.missing_data(facts_of_run(config))]


def _not_here(config: RunConfig) -> list[str]:
    """What a run would read and is not on this machine, a sentence each."""
    lines = missing_data(config)
    weights = missing_weights(facts_of_run(config))
    if weights is not None:
        looks = "a run fetches them from the Hugging Face hub, as does: " if weights.fetched else ""
        lines.append(f"not here: {weights.what}; {looks}{weights.told}")
    return lines
