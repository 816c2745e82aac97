"""What goes wrong during long runs: full disks, damaged records, numbers that are none, memory, W&B, clocks."""

import math
import resource
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr
from copy import deepcopy
from dataclasses import replace
from functools import cache
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import wandb
import yaml
from cli import SMALL, STEPS, Outcome, environment, only_record, read, read_metrics, records, run, snapshot, status
from rich.console import Console
from torch import nn
from wandb_log import offline_runs

from dpbench import clip as clips
from dpbench import run as command
from dpbench.cli.outcome import complain, rows_of
from dpbench.config import Job, compose_jobs
from dpbench.config.schema import TrackerSettings
from dpbench.error_feedback import ErrorFeedbackClip
from dpbench.gradients import FlatParameters, PerSampleGradients
from dpbench.launch.execute import execute
from dpbench.query import Point
from dpbench.stage import Course
from dpbench.step import PrivateStep
from dpbench.threshold import ExpectedErrorThreshold, PercentileThreshold, QuantileThreshold
from dpbench.tracking import open_tracker
from dpbench.tracking import record as recording
from dpbench.tracking import tracker as tracking
from dpbench.tracking.lock import Lock
from dpbench.tracking.tracker import Tracker
from dpbench.training.evaluation import Evaluation
from dpbench.training.execution import Execution
from dpbench.training.losses import per_sample_loss


@cache
def small_job(overrides: tuple[str, ...]) -> Job:
    (job,) = compose_jobs([*SMALL, "eps=inf", *overrides], multirun=False)
    return job


def carry_out(
    results: Path, *overrides: str, seeds: tuple[int, ...] = (0,), fuse: bool = False, force: bool = False
) -> Outcome:
    """What a command line does with its jobs once Hydra has composed them, which takes most of a small run's time."""
    job = small_job(overrides)
    jobs = []
    for seed in seeds:
        config = replace(deepcopy(job.config), seed=seed, results_dir=str(results), fuse_seeds=fuse, force=force)
        jobs.append(replace(job, config=config, overrides=(*overrides, f"seed={seed}")))
    told, err = StringIO(), StringIO()
    with redirect_stderr(err):
        execute(jobs, Console(file=told, width=1000))
        code = complain(rows_of(jobs), command.errors, launched=True)
    return Outcome(code, told.getvalue(), err.getvalue(), results)


# A full disk. What the kernel refuses here is a real write: the process may write no longer files.


@contextmanager
def no_longer_files_than(size: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def full_from(patch: pytest.MonkeyPatch, name: str, nth: int, seed: str = "0") -> None:
    """From the n-th writing of a file of this seed's record on, nothing more of that record can be written."""
    original, seen = recording.write_atomically, []

    def write(path: Path, content: str | bytes) -> None:
        if path.parent.name.partition(".")[0] != seed:
            return original(path, content)
        seen.append(path.name)
        with no_longer_files_than(8 if seen.count(name) >= nth else 1 << 20):
            return original(path, content)

    patch.setattr(recording, "write_atomically", write)


def assert_no_half_files(record: Path) -> None:
    for path in record.iterdir():
        assert not path.name.startswith("."), f"{path.name} is left over"
        if path.suffix == ".json":
            assert isinstance(read(record, path.name), dict)
    if (record / "metrics.jsonl").exists():
        assert all(math.isfinite(line["test_loss"]) for line in read_metrics(record))
    if (record / "config.yaml").exists():
        assert "eps" in yaml.safe_load((record / "config.yaml").read_text())


# Every writing of every file of a record, in their order: the file, and how often it was written before.
WRITES = [
    ("status.json", 1),
    ("config.yaml", 1),
    ("provenance.json", 1),
    ("metrics.jsonl", 1),
    ("ledger.json", 1),
    ("metrics.jsonl", 2),
    ("ledger.json", 2),
    ("ledger.json", 3),
    ("summary.json", 1),
    ("gradients.npz", 1),
    ("provenance.json", 2),
    ("status.json", 2),
]


@pytest.mark.parametrize(("name", "nth"), WRITES)
def test_a_disk_that_fills_up_fails_the_run_in_a_sentence_and_leaves_the_others_alone(tmp_path, monkeypatch, name, nth):
    overrides = ("record_coordinates=5",)
    with monkeypatch.context() as patch:
        full_from(patch, name, nth)
        outcome = carry_out(tmp_path, *overrides, seeds=(0, 1))
    assert outcome.code == 1
    assert outcome.error().startswith(f"failed: {name} can't be written to {tmp_path}/runs/")
    assert outcome.error().endswith("/0 (File too large) (seed=0)")
    (first,) = tmp_path.glob("runs/*/0")
    assert_no_half_files(first)
    assert not (first / "status.json").exists() if (name, nth) == WRITES[0] else status(first) == "running"
    assert status(first.with_name("1")) == "finished"

    assert carry_out(tmp_path, *overrides, seeds=(0, 1)).code == 0
    assert status(first) == "finished"


@pytest.mark.parametrize("also", ["nothing", "record"])
def test_a_disk_that_is_full_when_a_run_begins_fails_the_run_in_a_sentence_too(tmp_path, monkeypatch, also):
    original = Lock._make

    def make(self: Lock, attempt: int) -> bool:
        with no_longer_files_than(0 if self.path.name == "0.lock" else 1 << 20):
            return original(self, attempt)

    monkeypatch.setattr(Lock, "_make", make)
    if also == "record":  # an error outside of the run, which has to be recorded by who launched it
        monkeypatch.setattr(Execution, "may_begin", lambda self: self.record.lock.acquire())
    outcome = run(tmp_path, "seed=0,1", "fuse_seeds=false", "-m")
    assert outcome.code == 1
    assert outcome.error().startswith("failed: ")
    assert "no lock can be made for " in outcome.error()
    assert outcome.error().endswith("/0 (File too large) (seed=0)")
    (second,) = tmp_path.glob("runs/*/1")
    assert status(second) == "finished"
    assert "seed=1: " in outcome.out


def test_only_one_file_that_cannot_be_written_is_told_of_by_the_record(tmp_path, monkeypatch):
    original = recording.write_atomically

    def write(path: Path, content: str | bytes) -> None:
        with no_longer_files_than(8 if path.name == "summary.json" else 1 << 20):
            original(path, content)

    monkeypatch.setattr(recording, "write_atomically", write)
    outcome = carry_out(tmp_path)
    record = only_record(tmp_path)
    assert outcome.code == 1
    assert status(record) == "failed"
    assert read(record, "status.json")["reason"] == outcome.error().removeprefix("failed: ")
    assert len(read_metrics(record)) == 2


@pytest.mark.parametrize(("name", "nth"), [("config.yaml", 1), ("metrics.jsonl", 1), ("summary.json", 1)])
def test_seeds_that_share_their_passes_are_spared_too(tmp_path, monkeypatch, name, nth):
    full_from(monkeypatch, name, nth)
    outcome = carry_out(tmp_path, seeds=(0, 1), fuse=True)
    assert outcome.code == 1
    assert f"{name} can't be written" in outcome.error()
    assert status(next(tmp_path.glob("runs/*/1"))) == "finished"


@pytest.fixture
def finished(tmp_path) -> Path:
    """The finished record of seed 0."""
    assert carry_out(tmp_path / "results").code == 0
    return only_record(tmp_path / "results")


def test_a_forced_run_on_a_full_disk_leaves_the_finished_record_and_is_an_error(finished, monkeypatch):
    record = finished
    before = snapshot(record)
    full_from(monkeypatch, "status.json", 1)
    outcome = carry_out(record.parents[2], force=True)
    assert outcome.code == 1
    assert outcome.error().startswith("failed: status.json can't be written")
    assert snapshot(record) == before


def test_a_forced_run_that_cannot_take_the_place_of_the_one_before_leaves_that_in_place(finished, monkeypatch):
    record = finished
    before = snapshot(record)
    rename = Path.rename

    def refuse(self: Path, target: Path) -> Path:
        if self.name.endswith(".rerun"):
            raise OSError(28, "No space left on device")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", refuse)
    outcome = carry_out(record.parents[2], force=True)
    assert outcome.code == 1
    assert "No space left on device" in outcome.error()
    assert snapshot(record) == before


def test_a_forced_run_that_is_killed_while_it_takes_the_place_of_the_one_before_takes_it_next_time(
    finished, monkeypatch
):
    record = finished
    rename = Path.rename

    def die(self: Path, target: Path) -> Path:
        if self.name.endswith(".rerun"):
            raise SystemExit
        return rename(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", die)
        with pytest.raises(SystemExit):
            carry_out(record.parents[2], force=True)
    assert {path.name for path in record.parent.iterdir()} >= {"0.rerun", "0.replaced"}
    assert not record.exists()
    forced = read(record.with_name("0.rerun"), "provenance.json")
    assert carry_out(record.parents[2]).code == 0
    assert status(record) == "finished"
    assert read(record, "provenance.json") == forced
    assert not record.with_name("0.replaced").exists()


def test_a_disk_that_is_full_before_the_first_run_is_bad_input(tmp_path):
    with no_longer_files_than(1000):
        outcome = run(tmp_path / "results", "eps=inf")
    assert outcome.code == 2
    assert outcome.error().startswith(f"results_dir={tmp_path / 'results'}: can't be written (File too large)")
    assert records(tmp_path / "results") == []


def test_a_table_that_cannot_be_written_is_an_error_though_its_runs_are_finished(tmp_path, monkeypatch):
    original = recording.write_atomically

    def write(path: Path, content: str | bytes) -> None:
        with no_longer_files_than(8):
            original(path, content)

    monkeypatch.setattr("dpbench.cli.outcome.write_atomically", write)
    outcome = run(tmp_path, "-m", "eps=inf", "seed=0,1")
    assert outcome.code == 1
    assert outcome.error().startswith("the table can't be written")
    assert [status(record) for record in records(tmp_path)] == ["finished"] * 2
    assert list(tmp_path.glob("sweeps/*/table.csv")) == []


# A damaged record.


def truncated(content: bytes) -> bytes:
    return content[:-5]


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "truncated": truncated,
    "empty": lambda _: b"",
    "garbage": lambda _: bytes(range(256)),
    "another kind": lambda _: b"[1, 2]",
    "too deep": lambda _: b"[" * 100_000,
}
FILES = ("status.json", "summary.json", "ledger.json", "provenance.json", "metrics.jsonl", "config.yaml")
# A truncated text may be whole by chance, as a YAML file without its last settings is.
CASES = [(name, how) for name in FILES for how in DAMAGE if (name, how) != ("config.yaml", "truncated")]


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    results = tmp_path_factory.mktemp("whole")
    assert carry_out(results).code == 0
    return results


@pytest.mark.parametrize(("name", "how"), CASES)
def test_a_damaged_record_is_told_of_once_kept_aside_and_its_run_made_again(whole, tmp_path, name, how):
    results = shutil.copytree(whole, tmp_path / "results")
    record = only_record(results)
    damaged = DAMAGE[how]((record / name).read_bytes())
    (record / name).write_bytes(damaged)

    outcome = carry_out(results)
    assert (outcome.code, outcome.err) == (0, "")
    aside = results / "quarantine" / record.parent.name / "0"
    assert f"its record is damaged ({name}" in outcome.out
    assert f"kept in {aside}" in outcome.out
    assert (aside / name).read_bytes() == damaged
    assert status(record) == "finished"

    before = snapshot(results)
    assert "record is damaged" not in carry_out(results).out
    assert snapshot(results) == before


def test_a_finished_record_that_lacks_a_file_is_damaged(whole, tmp_path):
    results = shutil.copytree(whole, tmp_path / "results")
    (only_record(results) / "summary.json").unlink()
    assert "summary.json: is missing" in carry_out(results).out
    assert (only_record(results) / "summary.json").exists()


def test_a_finished_record_that_lacks_an_evaluation_is_damaged(whole, tmp_path):
    results = shutil.copytree(whole, tmp_path / "results")
    metrics = only_record(results) / "metrics.jsonl"
    metrics.write_text("".join(metrics.read_text().splitlines(keepends=True)[:-1]))
    assert "metrics.jsonl ends at step 2 of 3" in carry_out(results).out
    assert len(read_metrics(only_record(results))) == 2


def test_records_damaged_twice_are_both_kept(whole, tmp_path):
    results = shutil.copytree(whole, tmp_path / "results")
    record = only_record(results)
    for content in ("first", "second"):
        (record / "status.json").write_text(content)
        assert carry_out(results).code == 0
    kept = (results / "quarantine" / record.parent.name).glob("*/status.json")
    assert sorted(path.read_text() for path in kept) == ["first", "second"]


def test_a_forced_run_keeps_a_damaged_record_aside_too(whole, tmp_path):
    results = shutil.copytree(whole, tmp_path / "results")
    (only_record(results) / "summary.json").write_text("{")
    assert carry_out(results, force=True).code == 0
    assert status(only_record(results)) == "finished"
    assert len(list(results.glob("quarantine/*/0/summary.json"))) == 1


def test_a_damaged_record_that_cannot_be_moved_stays_and_is_an_error(whole, tmp_path):
    results = shutil.copytree(whole, tmp_path / "results")
    (only_record(results) / "status.json").write_text("{")
    before = snapshot(results / "runs")
    (results / "quarantine").write_text("in the way")
    outcome = carry_out(results)
    assert outcome.code == 1
    assert "the damaged record can't be moved" in outcome.error()
    assert snapshot(results / "runs") == before


# Numbers that are none.

BROKEN = (math.nan, math.inf, -math.inf, 3e38, 1e25)
CLIPS = {
    "threshold": clips.ThresholdClip,
    "automatic": clips.AutomaticClip,
    "automatic_exact": lambda **settings: clips.AutomaticClip(stabiliser=0.0, **settings),
    "normalised": clips.NormalisedClip,
    "psac": clips.PSAClip,
    "error_feedback": ErrorFeedbackClip,
}


def small_model() -> tuple[nn.Module, PerSampleGradients]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    return model, PerSampleGradients(model, FlatParameters(model), per_sample_loss)


def samples(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(count, 4, generator=generator), torch.arange(count) % 3


@pytest.mark.parametrize("scope", ["flat", "per_layer"])
@pytest.mark.parametrize("bad", BROKEN)
@pytest.mark.parametrize("name", CLIPS)
def test_a_broken_sample_moves_what_is_released_by_no_more_than_the_bound(name, bad, scope):
    model = small_model()[0]
    model[0].bias.data.fill_(0.1)
    gradients = PerSampleGradients(model, FlatParameters(model), per_sample_loss, per_layer=scope == "per_layer")
    clip, threshold = CLIPS[name](scope=scope), 0.7
    x, y = samples(6)
    x[2] = bad
    rest = torch.tensor([0, 1, 3, 4, 5])
    here = gradients.flat.vector.clone()
    points = [Point(1.5, here), Point(-0.5, here + 0.1)]  # as of DiSK

    def clipped(x: torch.Tensor, y: torch.Tensor) -> Any:
        return gradients.clipped_sum(
            points, [(x, y)], lambda norms: clip.factors(norms, threshold), remainder=clip.feeds_back
        )

    found, without = clipped(x, y), clipped(x[rest], y[rest])
    assert found.total.isfinite().all()
    bound = threshold if name == "error_feedback" else clip.sensitivity(threshold)
    assert float((found.total - without.total).double().norm()) <= bound * (1 + 1e-5)
    assert not found.norms.isnan().any()
    assert found.norms[rest].isfinite().all()
    if not math.isfinite(found.norms[2]):  # left out: what is fed back knows nothing of it
        torch.testing.assert_close(found.total, without.total)
        if clip.feeds_back:
            torch.testing.assert_close(found.remainder, without.remainder)


def test_a_sample_that_is_broken_in_one_layer_adds_nothing_to_the_others():
    model = small_model()[0]
    with torch.no_grad():
        model[0].weight.zero_()
        model[2].weight.mul_(100)  # which takes the first layer's gradient, and that one alone, beyond all numbers
    gradients = PerSampleGradients(model, FlatParameters(model), per_sample_loss, per_layer=True)
    x, y = samples(4)
    x[2] = 3e38
    points = [Point(1.0, gradients.flat.vector)]
    rest = torch.tensor([0, 1, 3])
    seen: list[torch.Tensor] = []

    def factors(norms: torch.Tensor) -> torch.Tensor:
        seen.append(norms.clone())
        return clips.ThresholdClip(scope="per_layer").factors(norms, 0.7)

    found = gradients.clipped_sum(points, [(x, y)], factors)
    first, *others = seen[0][:, 2]
    assert first.isinf()
    assert all(norm.isfinite() for norm in others)
    without = gradients.clipped_sum(points, [(x[rest], y[rest])], factors)
    torch.testing.assert_close(found.total, without.total)


def test_without_a_sample_that_is_not_broken_only_noise_is_released():
    _, gradients = small_model()
    x, y = samples(4)
    found = gradients.clipped_sum([Point(1.0, gradients.flat.vector)], [(x * math.nan, y)], torch.ones_like)
    assert bool((found.total == 0).all())
    assert bool(found.norms.isinf().all())


COURSE = Course(steps=10, batch=4.0, rate=lambda step: 1.0)


@pytest.mark.parametrize("bad", [math.inf, 3e38])
@pytest.mark.parametrize("kind", [ExpectedErrorThreshold, PercentileThreshold, QuantileThreshold])
def test_a_broken_sample_moves_a_threshold_s_release_by_no_more_than_any_other(kind, bad):
    norms = torch.tensor([0.2, 0.9, 1.7])
    released = []
    for seen in (norms, torch.cat([norms, torch.tensor([bad])])):
        threshold = kind()
        threshold.prepare(COURSE)
        threshold.observe(seen)
        released.append(np.atleast_1d(threshold._sum if kind is QuantileThreshold else threshold._counts.numpy()))
        threshold.release(None, error_weight=1e-4)
        assert 0 < threshold.value(1) < math.inf
    assert np.linalg.norm(released[1] - released[0]) <= (0.5 if kind is QuantileThreshold else 1.0)


@pytest.mark.parametrize("kind", [ExpectedErrorThreshold, PercentileThreshold, QuantileThreshold])
def test_thresholds_stay_numbers_where_all_samples_are_broken(kind):
    threshold = kind(rate=1e4) if kind is QuantileThreshold else kind()
    threshold.prepare(COURSE)
    for weight in (0.0, 1e-4, 1e300, math.inf):
        threshold.observe(torch.full((8,), math.inf))
        threshold.release(None, error_weight=weight)
        assert 0 < threshold.value(1) < math.inf


def poison(patch: pytest.MonkeyPatch, steps: int, value: float) -> None:
    """From this step on the filter gives one number that is none."""
    original = PrivateStep.take

    def call(self: PrivateStep, batch: Any) -> Any:
        if self.steps + 1 == steps:
            apply = self.filter.apply

            def spoilt(gradient: torch.Tensor) -> torch.Tensor:
                filtered = apply(gradient).clone()
                filtered[-1] = value
                return filtered

            self.filter.apply = spoilt
        return original(self, batch)

    patch.setattr(PrivateStep, "take", call)


STAGES_OF_ALL_KINDS = (
    "algo=dpsgd",
    "algo=dpsgd optim=adam",
    "algo=disk",
    "algo=dp_pmlf",
    "algo=doppler",
    "algo=doppler optim=galore optim.interval=1 model=mlp",
    "algo=dcsgd_e",
    "threshold=quantile",
    "clip=error_feedback clip.uncertified=true",
    "averaging=exponential",
    "optim=adagrad_norm",
    "optim=filtered_adam filter=f1",
)


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("overrides", STAGES_OF_ALL_KINDS)
def test_a_number_that_is_none_ends_a_run_at_its_step_as_diverged(tmp_path, monkeypatch, overrides, value):
    poison(monkeypatch, 2, value)
    outcome = carry_out(tmp_path, *overrides.split(), "eps=8", "evaluation.every_steps=1")
    record = only_record(tmp_path)
    assert outcome.code == 1
    assert outcome.error() == "diverged: a parameter is no finite number after 2 steps"
    assert status(record) == "diverged"
    assert [line["step"] for line in read_metrics(record)] == [1]
    ledger, summary = read(record, "ledger.json"), read(record, "summary.json")
    assert sum(release["count"] for release in ledger["releases"]) == 2
    # The data decided where it ended, so no fewer than all releases that were planned bound what it tells.
    assert ledger["eps"] == summary["eps"]
    assert 0.99 * 8 <= ledger["eps"] <= 8


def test_a_run_whose_loss_does_not_tell_of_broken_weights_is_not_finished(tmp_path, monkeypatch):
    poison(monkeypatch, STEPS, math.nan)
    monkeypatch.setattr("dpbench.training.loop.evaluate", lambda *_: Evaluation(0.5, 0.9, (0.9,)))
    assert carry_out(tmp_path).code == 1
    assert status(only_record(tmp_path)) == "diverged"


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_loss_that_is_none_ends_a_run_and_its_evaluation_is_kept(tmp_path, monkeypatch, loss):
    monkeypatch.setattr("dpbench.training.loop.evaluate", lambda *_: Evaluation(loss, 0.1, (0.1,)))
    outcome = carry_out(tmp_path)
    assert outcome.error() == f"diverged: the test loss is {loss} after 2 steps"
    assert [line["test_loss"] for line in read_metrics(only_record(tmp_path))] == [str(loss)]


def test_an_average_that_overflows_is_diverged(tmp_path, monkeypatch):
    monkeypatch.setattr("dpbench.averaging.ExponentialAveraging.average", lambda _, iterate: iterate * math.inf)
    outcome = carry_out(tmp_path, "averaging=exponential")
    assert outcome.error() == "diverged: an average of parameters is no finite number after 2 steps"


# Memory that runs out.


class Tight(nn.Module):
    """What a layer does on a device that holds so few samples."""

    def __init__(self, most: int, error: Exception) -> None:
        super().__init__()
        self.most, self.error, self.refused = most, error, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if len(x) > self.most:
            self.refused += 1
            raise self.error
        return x


OUT_OF_MEMORY = (
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    MemoryError("Unable to allocate 2.00 GiB"),
    RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 2147483648 bytes"),
)


@pytest.mark.parametrize("error", OUT_OF_MEMORY, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("most", [1, 3, 4])
def test_where_memory_runs_out_smaller_micro_batches_give_the_same_sum(most, error):
    x, y = samples(16)
    plain, reference = small_model()
    tight = Tight(16, error)
    model = nn.Sequential(tight, *deepcopy(plain))
    gradients = PerSampleGradients(model, FlatParameters(model), per_sample_loss)
    bound = clips.ThresholdClip()
    here = [Point(1.0, gradients.flat.vector.clone())]
    gradients.clipped_sum(here, [(x, y)], lambda norms: bound.factors(norms, 0.5))
    tight.most = most
    found = gradients.clipped_sum(here, [(x, y)], lambda norms: bound.factors(norms, 0.5))
    wanted = reference.clipped_sum(here, [(x, y)], lambda norms: bound.factors(norms, 0.5))
    torch.testing.assert_close(found.total, wanted.total)
    torch.testing.assert_close(found.norms, wanted.norms)
    assert tight.refused == {1: 4, 3: 3, 4: 2}[most]  # 16 and each half that is too much, once
    gradients.clipped_sum(here, [(x, y)], lambda norms: bound.factors(norms, 0.5))
    assert tight.refused == {1: 4, 3: 3, 4: 2}[most]


def limit_memory(patch: pytest.MonkeyPatch, most: int, error: Exception, steps: int = 0) -> list[int]:
    """From this step on, gradients of more samples at once than this do not fit."""
    original, computed = PerSampleGradients.way, []

    def way(self: PerSampleGradients, points: Any, inputs: torch.Tensor, targets: torch.Tensor) -> Any:
        computed.append(len(targets))
        if len(targets) > most and len(computed) > steps:
            raise error
        return original(self, points, inputs, targets)

    patch.setattr(PerSampleGradients, "way", way)
    return computed


@pytest.mark.parametrize("error", OUT_OF_MEMORY, ids=lambda error: type(error).__name__)
def test_a_run_goes_on_with_smaller_micro_batches_to_the_same_result(whole, tmp_path, monkeypatch, error):
    computed = limit_memory(monkeypatch, 8, error, steps=1)
    assert carry_out(tmp_path).code == 0
    assert computed[0] > 32
    assert max(computed[-8:]) <= 8
    for line, wanted in zip(read_metrics(only_record(tmp_path)), read_metrics(only_record(whole)), strict=True):
        assert line["test_loss"] == pytest.approx(wanted["test_loss"], rel=1e-5)


@pytest.mark.parametrize("error", OUT_OF_MEMORY, ids=lambda error: type(error).__name__)
def test_where_not_even_one_sample_fits_a_run_fails_in_a_sentence(tmp_path, monkeypatch, error):
    limit_memory(monkeypatch, 0, error)
    outcome = carry_out(tmp_path)
    assert outcome.code == 1
    assert outcome.error().startswith(f"failed: memory ran out ({str(error)[:20]}")
    assert outcome.error().endswith("; choose a smaller model or micro_batch, or a device with more memory")
    assert status(only_record(tmp_path)) == "failed"


def test_a_model_that_does_not_fit_fails_in_a_sentence(tmp_path, monkeypatch):
    def refuse(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 2.00 GiB")

    monkeypatch.setattr("dpbench.training.preparing.assemble", refuse)
    outcome = carry_out(tmp_path)
    assert outcome.error().startswith("failed: memory ran out (CUDA out of memory. Tried to allocate 2.00 GiB)")
    assert status(only_record(tmp_path)) == "failed"


# W&B that is down or slow.


class Remote:
    """A W&B run on a server that does what it is told to."""

    def __init__(self, **does: Callable[[], object]) -> None:
        self.does = does
        self.logged: list[int] = []
        self.summary: dict[str, Any] = {}

    def _do(self, what: str) -> None:
        self.does.get(what, lambda: None)()

    def define_metric(self, *_: Any, **__: Any) -> None:
        pass

    def log(self, _: dict[str, float], step: int) -> None:
        self._do("log")
        self.logged.append(step)

    def finish(self, **_: Any) -> None:
        self._do("finish")


def gone() -> None:
    raise ConnectionError("the server\nis gone")


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """W&B as a process finds it; what hangs does so until the test is over."""
    over = threading.Event()
    monkeypatch.setattr(tracking, "_service", tracking.Service())
    yield over
    over.set()


ONLINE = ("tracker=wandb", "tracker.mode=online", "evaluation.every_steps=1")


@pytest.mark.parametrize("what", ["init", "log", "finish"])
def test_a_tracker_that_raises_costs_a_line_and_nothing_else(tmp_path, monkeypatch, service, what):
    remote = Remote(**{what: gone})
    monkeypatch.setattr(wandb, "init", lambda **_: gone() if what == "init" else remote)
    outcome = carry_out(tmp_path, *ONLINE)
    assert (outcome.code, outcome.err) == (0, "")
    lines = [line for line in outcome.out.splitlines() if "W&B" in line]
    does = {"init": "start"}.get(what, what)
    assert lines == [f"W&B failed to {does} (ConnectionError: the server is gone); the run goes on without it"]
    assert len(read_metrics(only_record(tmp_path))) == STEPS


@pytest.mark.parametrize("what", ["init", "log", "finish"])
def test_a_tracker_that_hangs_costs_its_patience_once(tmp_path, monkeypatch, service, what):
    remote, begun = Remote(**{what: service.wait}), []

    def init(**_: Any) -> Remote:
        begun.append(what)
        if what == "init":
            service.wait()
        return remote

    monkeypatch.setattr(wandb, "init", init)
    monkeypatch.setattr(tracking, "PATIENCE", 0.3)
    outcome = carry_out(tmp_path, *ONLINE, seeds=(0, 1, 2))
    assert outcome.code == 0
    lines = [line for line in outcome.out.splitlines() if "W&B" in line]
    assert lines == ["W&B does not answer for 0.3 s; the run goes on without it"]
    assert begun == [what]
    assert [len(read_metrics(record)) for record in records(tmp_path)] == [STEPS] * 3


@pytest.mark.parametrize("fused", [True, False])
def test_w_and_b_is_waited_for_once_all_seeds_are_recorded(tmp_path, monkeypatch, service, fused):
    """Else the first of them would keep the others from their checkpoints where all are to end at once."""
    found = []
    monkeypatch.setattr(wandb, "init", lambda **_: Remote())
    monkeypatch.setattr(Tracker, "wait", lambda _: found.append([*map(status, tmp_path.glob("runs/*/[0-9]"))]))
    assert carry_out(tmp_path, *ONLINE, seeds=(0, 1, 2), fuse=fused).code == 0
    assert found == [["finished"] * 3] * 3


def test_training_does_not_wait_for_a_slow_tracker(monkeypatch, service):
    monkeypatch.setattr(tracking, "PATIENCE", 30.0)
    answer = threading.Event()
    remote = Remote(log=answer.wait)
    tracker = Tracker(lambda: remote, pytest.fail)
    for step in range(100):
        tracker.log({"test_loss": 1.0}, step)
    assert remote.logged == []
    answer.set()
    tracker.finish({"eps": 1.0}, succeeded=True)
    tracker.wait()
    assert remote.logged == list(range(100))
    assert remote.summary == {"eps": 1.0}


def test_where_going_online_fails_once_all_runs_of_the_process_are_recorded_here(tmp_path, monkeypatch, service):
    modes = []

    def init(mode: str, **_: Any) -> Remote:
        modes.append(mode)
        if mode == "online":
            raise wandb.errors.CommError("Timed out\nConsider more time")
        return Remote()

    monkeypatch.setattr(wandb, "init", init)
    outcome = carry_out(tmp_path, *ONLINE, seeds=(0, 1, 2))
    assert outcome.code == 0
    assert modes == ["online", "offline", "offline", "offline"]
    (line,) = [line for line in outcome.out.splitlines() if "W&B" in line]
    assert line.startswith("W&B can't go online (Timed out); this run and those after it are recorded in")


def test_a_server_that_vanishes_costs_no_run_that_is_under_way(tmp_path, monkeypatch, service):
    """Recording the next run here would end those that are under way on W&B."""
    settings, said, ended = TrackerSettings(mode="online"), [], []
    remotes = [Remote(), wandb.errors.CommError("gone")]

    def init(mode: str, **_: Any) -> Remote:
        assert mode == "online"
        remote = remotes.pop(0)
        if isinstance(remote, Exception):
            raise remote
        return remote

    monkeypatch.setattr(wandb, "init", init)
    monkeypatch.setattr(wandb, "teardown", lambda: ended.append(True))
    first, _ = [open_tracker(settings, tmp_path, name="run", config={}, tags=(), say=said.append) for _ in range(2)]
    first.log({"test_loss": 1.0}, 1)
    first.finish({}, succeeded=True)
    first.wait()
    assert said == ["W&B failed to start (CommError: gone); the run goes on without it"]
    assert not ended


def test_waiting_for_w_and_b_ends_also_where_it_would_wait_for_ever(monkeypatch, tmp_path, service):
    given = []

    def init(settings: wandb.Settings, **_: Any) -> Remote:
        given.append((settings.init_timeout, settings.finish_timeout))
        return Remote()

    monkeypatch.setattr(wandb, "init", init)
    for name in ("WANDB_INIT_TIMEOUT", "WANDB_FINISH_TIMEOUT"):
        monkeypatch.delenv(name, raising=False)
    assert carry_out(tmp_path, *ONLINE).code == 0
    assert given == [(30.0, 60.0)]


@pytest.mark.slow
@pytest.mark.parametrize("answers", [False, None], ids=["silent", "closed"])
def test_a_server_that_is_not_there_costs_no_run_and_nothing_of_its_record(tmp_path, answers):
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        if answers is False:
            server.listen(100)  # accepts, and says nothing
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        own = {f"WANDB_{name}_DIR": str(tmp_path / "home") for name in ("CONFIG", "CACHE", "DATA", "ARTIFACT")}
        settings = {
            **{name: value for name, value in environment().items() if not name.startswith("WANDB_")},
            **own,
            "WANDB_BASE_URL": url,
            "WANDB_API_KEY": 40 * "0",
            "WANDB_INIT_TIMEOUT": "2",
        }
        line = [
            sys.executable,
            "-m",
            "dpbench.run",
            f"results_dir={tmp_path}",
            *SMALL,
            "eps=inf",
            *ONLINE,
            "seeds=2",
            "-m",
        ]
        done = subprocess.run(line, env=settings, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0
    (said,) = [line for line in done.stdout.splitlines() if "W&B" in line and not line.startswith("W&B: online")]
    assert "W&B can't go online" in said
    assert [status(record) for record in records(tmp_path)] == ["finished"] * 2
    written = [run for run in offline_runs(tmp_path) if run.run.job_type == "train"]
    assert [[line["step"] for line in run.history] for run in written] == [list(range(1, STEPS + 1))] * 2
    assert [run.exit_code for run in written] == [0, 0]


# Clocks that jump.


def test_no_duration_follows_a_clock_that_is_set_back(tmp_path, monkeypatch):
    now = [1e9]

    def back() -> float:
        now[0] -= 3600
        return now[0]

    monkeypatch.setattr(time, "time", back)
    assert carry_out(tmp_path).code == 0
    record = only_record(tmp_path)
    first, last = read_metrics(record)
    assert 0 < first["seconds"] < last["seconds"] < 60
    assert 0 < read(record, "provenance.json")["wall_seconds"] < 60


def test_sweeps_that_begin_at_the_same_time_have_folders_of_their_own(tmp_path, monkeypatch):
    monkeypatch.setattr(time, "strftime", lambda _: "2026-10-25_02-30-00")
    names = [command._name_of_sweep(tmp_path / "sweeps") for _ in range(3)]
    assert names == ["2026-10-25_02-30-00", "2026-10-25_02-30-00_2", "2026-10-25_02-30-00_3"]
    assert sorted(path.name for path in (tmp_path / "sweeps").iterdir()) == names


def test_a_sweep_after_the_clock_was_set_back_keeps_the_table_of_the_one_before(tmp_path, monkeypatch):
    monkeypatch.setattr(time, "strftime", lambda _: "2026-10-25_02-30-00")
    for seeds in ("0,1", "2,3"):
        assert run(tmp_path, "-m", "eps=inf", f"seed={seeds}").code == 0
    tables = sorted(tmp_path.glob("sweeps/*/table.csv"))
    assert [path.parent.name for path in tables] == ["2026-10-25_02-30-00", "2026-10-25_02-30-00_2"]
    assert ["seed=0," in path.read_text() for path in tables] == [True, False]
