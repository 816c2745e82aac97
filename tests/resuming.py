"""Runs that are stopped and go on, in this process, and what is to be the same in the end."""

import json
import os
import random
import signal
from dataclasses import dataclass, replace
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cli import SMALL, raise_after, read, status
from helpers import composed
from rich.console import Console
from torch import nn

from dpbench.config import Job, RunConfig
from dpbench.config.schema import CheckpointTimes
from dpbench.data import Dataset
from dpbench.gradients import PerSampleGradients
from dpbench.launch.execute import execute
from dpbench.models import MLP
from dpbench.step import PrivateStep
from dpbench.tracking.record import RunRecord
from dpbench.training import checkpoint
from dpbench.training.job_record import record_of

# Ten steps, evaluated after 3, 6, 9 and 10 of them.
STEPS = 10
TINY = (
    "device=cpu",
    "tracker=disabled",
    "privacy.accountant=rdp",
    "model=linear",
    "batch_size=144",
    "epochs=1",
    "eps=1000",
    "privacy.noise_multiplier=1",
    "evaluation.every_steps=3",
    "record_coordinates=5",
)
# Of orders and generators of samples, views, masks, noise and counts, thresholds, moments, averages. Twelve steps in
# three passes; step 6 is within the second.
FULL = (
    "algo=dcsgd_e",
    "privacy=shuffled",
    "augmentation=crop_flip",
    "augmentation.copies=1",
    "averaging=exponential",
    "batch_size=360",
    "epochs=3",
)
SPLITS = composed().dataset.load(Path("nowhere"), download=False)
SPLITS.test.images, SPLITS.test.labels = SPLITS.test.images[:100], SPLITS.test.labels[:100]

# A program whose steps take 0.2 seconds at least, of which there are twenty in a longer run.
SLOWLY = """
import sys, time
from dpbench.run import main
from dpbench.step import PrivateStep
take = PrivateStep.take
PrivateStep.take = lambda self, batch: (time.sleep(0.2), take(self, batch))[1]
sys.exit(main())
"""
LONGER = (*SMALL, "algo=disk", "epochs=0.87", "evaluation.every_steps=7", "keep_model=true")


# Before and after calls of these a process may be killed: about 80 points in ten steps.
POINTS = (
    (PrivateStep, "take"),
    (PrivateStep, "release"),
    (checkpoint.Checkpoints, "write"),
    (checkpoint.os, "replace"),
    (checkpoint, "sync_folder"),
    (RunRecord, "append_metrics"),
)


def kill_at(point: int) -> None:
    """Kill this process when it comes to the so-manieth point."""
    passed: list[int] = []

    def here() -> None:
        passed.append(1)
        if len(passed) == point:
            os.kill(os.getpid(), signal.SIGKILL)

    def watch(owner: object, name: str) -> None:
        original = getattr(owner, name)

        def call(*arguments: Any, **settings: Any) -> Any:
            here()
            found = original(*arguments, **settings)
            here()
            return found

        setattr(owner, name, call)

    for owner, name in POINTS:
        watch(owner, name)


class _DropoutOfOthers(nn.Module):
    """Drops the features that NumPy's global generator says, and scales the others by what Python's does."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training:
            return x
        return x * torch.from_numpy(np.random.random(x.shape[1:]) > 0.3).to(x) * random.gauss(1.0, 0.1)


@dataclass
class DropoutMLP(MLP):
    """Draws from the global generators in every step: torch's, and those of NumPy and Python if others are wanted."""

    others: bool = False

    def build(self, data: Dataset) -> nn.Module:
        drop = _DropoutOfOthers() if self.others else nn.Dropout(0.3)
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), drop, nn.Tanh(), nn.Linear(8, 10))


class _Mixing(nn.Module):
    """Makes samples depend on each other, in batches of more than so many."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most = most

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x - 9 * x.mean(0) if len(x) > self.most else x


@dataclass
class FallingBackMLP(DropoutMLP):
    """Takes the fast way to gradients until a batch shows that it mixes samples; the other way draws other masks.

    That is in step 6; later batches are smaller.
    """

    most: int = 161

    def build(self, data: Dataset) -> nn.Module:
        return nn.Sequential(_Mixing(self.most), nn.Dropout(0.1), super().build(data))


def tiny(*overrides: str, **settings: Any) -> RunConfig:
    """A small run; what several runs have in common is composed once."""
    return replace(composed(*TINY, *overrides), keep_model=True, **settings)


def full() -> RunConfig:
    """A run in which every part has something to remember."""
    return replace(tiny(*FULL), model=DropoutMLP())


def carried_out(
    config: RunConfig, results: Path, seeds: tuple[int, ...] = (0,), **settings: Any
) -> tuple[list[Path], str]:
    """The folders of these runs, carried out as far as they go, and what was said of them."""
    said = StringIO()
    jobs = [Job((), replace(config, results_dir=str(results), seed=seed, **settings), {}) for seed in seeds]
    execute(jobs, Console(file=said, width=300), SPLITS.to(torch.device(config.device)))
    return [record_of(job).folder for job in jobs], said.getvalue()


def stopped(config: RunConfig, results: Path, step: int, every: int | None = 2) -> Path:
    """The folder of a run that fails after so many steps, with a checkpoint after every second one."""
    with pytest.MonkeyPatch.context() as patch:
        raise_after(patch, step, RuntimeError("stopped"))
        (folder,), said = carried_out(config, results, checkpoint=CheckpointTimes(every_steps=every))
    again = folder.with_name("0.rerun")
    folder = again if again.exists() else folder
    assert read(folder, "status.json")["reason"] == "RuntimeError: stopped", said
    return folder


def signalled(patch: pytest.MonkeyPatch, after: int, *signals: signal.Signals) -> None:
    """Let the process get signals within the step that follows so many."""
    original = PrivateStep.request

    def request(self: PrivateStep, *arguments: Any) -> Any:
        if self.steps == after:
            for each in signals:
                os.kill(os.getpid(), each)
        return original(self, *arguments)

    patch.setattr(PrivateStep, "request", request)


def run_out_of_memory(patch: pytest.MonkeyPatch, after: int) -> None:
    """Let memory run out in the step that follows so many, once, and after all was drawn."""
    record, take, now = PerSampleGradients.record_by, PrivateStep.take, list[int]()

    def taken(self: PrivateStep, batch: Any) -> Any:
        now[:] = [self.steps]
        return take(self, batch)

    def limited(self: PerSampleGradients, *arguments: Any) -> Any:
        tape = record(self, *arguments)
        if now == [after] and self.most is None:
            now.clear()
            raise torch.OutOfMemoryError("CUDA out of memory")
        return tape

    patch.setattr(PrivateStep, "take", taken)
    patch.setattr(PerSampleGradients, "record_by", limited)


def outcome(folder: Path) -> dict[str, Any]:
    """Everything in a record that is no time, place or provenance; the weights bit for bit."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        del line["seconds"]
    names = ("status.json", "ledger.json", "summary.json", "model.safetensors", "gradients.npz")
    return {"metrics": lines, **{name: (folder / name).read_bytes() for name in names if (folder / name).exists()}}


_WHOLE: dict[str, dict[str, Any]] = {}


def whole(config: RunConfig, results: Path, **settings: Any) -> dict[str, Any]:
    """What comes of a run that is never stopped and in which nothing is patched; it is carried out once."""
    key = repr((config, settings))
    if key not in _WHOLE:
        _WHOLE[key] = whole_as_patched(config, results, **settings)
    return _WHOLE[key]


def whole_as_patched(config: RunConfig, results: Path, **settings: Any) -> dict[str, Any]:
    """The same with what is patched now."""
    (folder,), said = carried_out(config, results / "whole", **settings)
    assert status(folder) == "finished", said
    found = outcome(folder)
    assert {"model.safetensors", "gradients.npz"} < found.keys()
    return found


def noted(folder: Path, **changes: Any) -> dict[str, Any]:
    """The note beside a record of what was seen of its run, after changes to it."""
    note = folder.with_name(f"{folder.name}.published")
    content: dict[str, Any] = json.loads(note.read_text()) | changes
    note.write_text(json.dumps(content))
    return content


def resumed_at(folder: Path) -> list[int]:
    return [part["step"] for part in read(folder, "provenance.json").get("resumed", [])]


def checkpoints(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("*checkpoint*"))


def flip(path: Path) -> None:
    """Change a bit in the middle of a file."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
