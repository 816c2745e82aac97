"""Runs from their configurations to their records."""

from __future__ import annotations

import math
import time
import traceback
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from dpbench.config import Job, config_hash, resolved
from dpbench.data import Splits
from dpbench.errors import UserError
from dpbench.privacy import Ledger
from dpbench.spectra import GradientRecorder
from dpbench.tracking import RunRecord, Status, Tracker, open_tracker
from dpbench.tracking.provenance import provenance
from dpbench.tracking.record import jsonable
from dpbench.training.assemble import Assembly, assemble
from dpbench.training.budget import budget, in_words, open_ledger
from dpbench.training.devices import choose_device, describe, prepare_device
from dpbench.training.display import Display
from dpbench.training.fusing import fused_gradients
from dpbench.training.lockstep import Steps, alone, together
from dpbench.training.loop import DivergedError, Metrics, train
from dpbench.training.randomness import global_stream


def record_of(job: Job) -> RunRecord:
    """The record of a job's run, whether it exists or not."""
    return RunRecord(Path(job.config.results_dir), config_hash(job.config), job.config.seed)


def execute(jobs: Sequence[Job], console: Console, splits: Splits | None = None) -> None:
    """Run jobs, unless they are finished already, and record each whatever happens.

    Jobs that differ in their seeds alone share their passes where the first one's `fuse_seeds` lets them.
    Only KeyboardInterrupt leaves, after the records say so.

    Args:
        jobs: of one data set.
        console: is told how they go.
        splits: data in the place of what the jobs would load.
    """
    console.print(_name(jobs), style="bold")
    ready: list[_Execution] = []
    for job in jobs:
        record = record_of(job)
        if record.finished() and not job.config.force:
            console.print(f"  finished already: {record.folder} (force=true runs it again)")
            continue
        execution = _Execution(job, record, console)
        if execution.prepare(ready[0].prepared.splits if ready else splits):
            ready.append(execution)
    if len(ready) > 1 and _fused(ready, console):
        return
    for execution in ready:
        if len(jobs) > 1:
            console.print(execution.job.name, style="bold")
        with Display(console, execution.config.steps) as display, global_stream(execution.config.seed, "model"):
            alone(execution.train(display))


def _name(jobs: Sequence[Job]) -> str:
    """What the user typed for these jobs, with all seeds where they differ."""
    if len(jobs) == 1:
        return jobs[0].name
    seeds = ",".join(str(job.config.seed) for job in jobs)
    lines = [f"seed={seeds}" if line.startswith("seed=") else line for line in jobs[0].overrides]
    return replace(jobs[0], overrides=tuple(lines)).name


def _fused(ready: Sequence[_Execution], console: Console) -> bool:
    """Carry out runs that share their passes; False, and nothing is done, where they had better not."""
    config = ready[0].config
    fused, why = fused_gradients(config, [run.prepared.parts for run in ready], ready[0].prepared.splits)
    if fused is None:
        if config.fuse_seeds is True:
            console.print(f"  seeds run one after the other: {why}")
        return False
    console.print(f"  {len(ready)} seeds at once ({why})")
    with Display(console, config.steps) as display:
        together([run.train(display, seeds_at_once=len(ready)) for run in ready], fused.clipped_sums)
    return True


class Prepared(NamedTuple):
    """Everything that training needs."""

    parts: Assembly
    splits: Splits
    ledger: Ledger
    origin: dict[str, Any]


class _Execution:
    """The state of one run while it is carried out."""

    prepared: Prepared

    def __init__(self, job: Job, record: RunRecord, console: Console) -> None:
        self.config = job.config
        self.job = job
        self.record = record
        self.console = console
        self.metrics: list[Metrics] = []

    def prepare(self, splits: Splits | None) -> bool:
        """Make everything that training needs; whether that went well. Bad input leaves no record.

        Args:
            splits: data, if they are not to be loaded.
        """
        try:
            self.prepared = self._prepare(splits)
        except UserError as error:
            self.record.refuse(str(error))
        except Exception as error:  # while it was prepared; what happens in training is recorded there
            self.record.start(self.settings(), {})
            self.record.set_status(Status.FAILED, f"{type(error).__name__}: {error}", traceback.format_exc())
        else:
            return True
        return False

    def _prepare(self, splits: Splits | None) -> Prepared:
        config = self.config
        device = choose_device(config.device)
        prepare_device(device)
        found = budget(config)
        ledger = open_ledger(config, found.noise_multiplier, found.published_eps)
        parts = assemble(config, device, found.noise_multiplier, ledger)
        if splits is None:
            loaded = config.dataset.load(Path(config.data.root), download=config.data.download)
            splits = loaded.to(device)
            self.console.print(f"  {in_words(config, found)}; {describe(device)}")
        return Prepared(parts, splits, ledger, {**provenance(device), "micro_batch": parts.micro_batch})

    def train(self, display: Display, seeds_at_once: int = 1) -> Steps[Status]:
        """Train, and record how it ended, whatever happens; to be carried out by lockstep.py."""
        parts, splits, ledger, origin = self.prepared
        origin = {**origin, "seeds_at_once": seeds_at_once}
        self.record.start(self.settings(), origin)
        status, reason, trace = Status.FAILED, None, None
        start = time.perf_counter()
        tracker: Tracker | None = None
        try:
            tracker = self._tracker()
            yield from self._steps(parts, splits, ledger, tracker, display)
            status = Status.FINISHED if ledger.complete() else Status.INVALID
            reason = None if ledger.complete() else f"{len(ledger)} of {len(ledger.plan)} planned releases were made"
        except KeyboardInterrupt:
            status, reason = Status.INTERRUPTED, "by the user"
            raise
        except DivergedError as error:
            status, reason = Status.DIVERGED, str(error)
        except Exception as error:
            reason, trace = f"{type(error).__name__}: {error}", traceback.format_exc()
        finally:
            recorded = Status.FAILED  # unless all that a record consists of is written
            try:
                summary = self._summary(ledger, parts.step.noise_multiplier)
                self.record.write("ledger.json", {**ledger.state_dict(), "eps": ledger.epsilon()})
                self.record.write("summary.json", summary)
                if isinstance(parts.step.recorder, GradientRecorder):
                    self.record.write_bytes("gradients.npz", parts.step.recorder.archive())
                wall = round(time.perf_counter() - start, 3)
                self.record.write("provenance.json", {**origin, "wall_seconds": wall})
                recorded = status
            finally:
                self.record.set_status(recorded, reason, trace)
            if tracker is not None:
                tracker.finish(jsonable(summary), succeeded=status == Status.FINISHED)
        return status

    def settings(self) -> dict[str, Any]:
        """What config.yaml holds."""
        config = {**resolved(self.config), "choices": self.job.choices, "overrides": list(self.job.overrides)}
        return {key: jsonable(value) for key, value in config.items()}

    def _tracker(self) -> Tracker:
        config = self.config
        return open_tracker(
            config.tracker,
            Path(config.results_dir),
            name=self.job.name,
            config={**self.settings(), "hash": self.record.folder.parent.name},
            tags=[str(config.algo["name"]), config.dataset.name, config.model.name],
            say=self.console.print,
        )

    def _steps(
        self, parts: Assembly, splits: Splits, ledger: Ledger, tracker: Tracker, display: Display
    ) -> Steps[None]:
        def on_evaluation(metrics: Metrics) -> None:
            self.metrics.append(metrics)
            self.record.append_metrics(metrics.as_dict())
            self.record.write("ledger.json", {**ledger.state_dict(), "eps": metrics.eps})
            tracker.log(metrics.as_dict(), metrics.step)
            display.evaluation(metrics)

        with display.watching():
            yield from train(self.config, parts, splits, ledger, on_step=display.step, on_evaluation=on_evaluation)

    def _summary(self, ledger: Ledger, multiplier: float) -> dict[str, Any]:
        """What the run came to. `best` is the largest test accuracy of all evaluations: a choice made on test data."""
        config = self.config
        last = self.metrics[-1] if self.metrics else None
        best = max(self.metrics, key=lambda m: m.test_accuracy, default=None)
        return {
            "test_accuracy": {
                "final": last.test_accuracy if last else None,
                "best": best.test_accuracy if best else None,
                "best_step": best.step if best else None,
            },
            "test_accuracy_by_class": last.class_accuracy if last else None,
            "test_loss": last.test_loss if last else None,
            **(last.more if last else {}),
            "eps": ledger.epsilon(),
            "target_eps": config.eps,
            "delta": config.delta_value,
            "private": math.isfinite(config.eps) and config.uncertified is None,
            "clipped": math.isfinite(config.clip.sensitivity(1.0)),
            "accountant": ledger.accountant,
            "sampler": config.privacy.sampler,
            "published_eps": ledger.published_eps,
            "noise_multiplier": multiplier,
            "steps": len(ledger),
            "sampling_rate": config.sampling_rate,
            "algorithm": config.algo["name"],
            "dataset": config.dataset.name,
            "model": config.model.name,
            "seed": config.seed,
        }
