"""Checkpoints: which are of use, how they are written and when, and who may write them."""

import errno
import hashlib
import io
import os
import pickle
import re
import stat
import time
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from cli import raise_after, read, status
from helpers import composed
from resuming import carried_out, checkpoints, flip, outcome, resumed_at, stopped, tiny, whole, whole_as_patched

from dpbench.config import compose_jobs, config_hash
from dpbench.config.schema import CheckpointTimes
from dpbench.errors import UserError
from dpbench.step import PrivateStep
from dpbench.tracking.lock import LockLostError
from dpbench.tracking.record import RunRecord
from dpbench.training import checkpoint as format
from dpbench.training.checkpoint import Checkpoints, DamagedError
from dpbench.training.interruption import Interruption, Occasions
from dpbench.training.keeping import Keeper
from dpbench.training.resume import GLOBAL, Training

CPU = torch.device("cpu")


# Checkpoints that are of no use.


def cut(path):
    path.write_bytes(path.read_bytes()[:-1000])


def empty(path):
    path.write_bytes(b"")


def of_other_code(path):
    checkpoints = Checkpoints(path.parent)
    state = checkpoints.read(6, CPU)
    state["training"]["step"]["query"] = {"momentum": torch.zeros(3)}
    checkpoints.write(6, state)


def without_a_part(path):
    checkpoints = Checkpoints(path.parent)
    state = checkpoints.read(6, CPU)
    del state["training"]["averaging"]
    checkpoints.write(6, state)


def of_older_code(path):
    """Which kept torch's global generators alone."""
    checkpoints = Checkpoints(path.parent)
    state = checkpoints.read(6, CPU)
    state["training"]["stream of the model"] = state["training"].pop(GLOBAL)["torch"]
    checkpoints.write(6, state)


def without_its_device(path):
    checkpoints = Checkpoints(path.parent)
    state = checkpoints.read(6, CPU)
    del state["device"]
    checkpoints.write(6, state)


def of_another_shape(path):
    checkpoints = Checkpoints(path.parent)
    state = checkpoints.read(6, CPU)
    name, weight = next(iter(state["training"]["model"].items()))
    state["training"]["model"][name] = weight[:-1]
    checkpoints.write(6, state)


def of_another_run(path):
    checkpoints = Checkpoints(path.parent)
    checkpoints.write(6, {**checkpoints.read(6, CPU), "run": "0123456789ab/0"})


class Executes:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def that_executes(path):
    payload = pickle.dumps({"run": Executes(path.with_name("executed"))}, protocol=2)
    path.write_bytes(format.HEADER + hashlib.sha256(payload).digest() + payload)


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (cut, "is damaged: its checksum differs"),
        (flip, "is damaged: its checksum differs"),
        (empty, "is damaged"),
        (of_other_code, "step: ValueError: OnePoint keeps no state"),
        (without_a_part, "other parts (averaging)"),
        (of_older_code, "does not fit this code: other parts (stream of the model, streams of the model)"),
        (without_its_device, "does not fit this code: other contents (device)"),
        (of_another_shape, "has shape"),
        (of_another_run, "is of another run, 0123456789ab/0"),
        (that_executes, "can't be loaded"),
    ],
)
def test_a_checkpoint_of_no_use_is_set_aside_and_the_one_before_used(spoil, why, tmp_path):
    config = tiny()
    folder = stopped(config, tmp_path, 7)
    assert checkpoints(folder) == ["checkpoint-00000004.pt", "checkpoint-00000006.pt"]
    spoil(folder / "checkpoint-00000006.pt")
    _, said = carried_out(config, tmp_path)
    (line,) = [line for line in said.splitlines() if "set aside" in line]
    assert line.startswith("  the checkpoint of step 6 ")
    assert why in line
    assert not (folder / "executed").exists()
    assert resumed_at(folder) == [4]
    assert checkpoints(folder) == ["checkpoint-00000006.unusable"]
    assert outcome(folder) == whole(config, tmp_path)


def test_without_any_of_use_a_run_starts_from_the_beginning(tmp_path):
    config = tiny("algo=disk")
    folder = stopped(config, tmp_path, 7)
    for path in folder.glob("*.pt"):
        flip(path)
    carried_out(config, tmp_path)
    assert resumed_at(folder) == []
    assert checkpoints(folder) == ["checkpoint-00000004.unusable", "checkpoint-00000006.unusable"]
    assert outcome(folder) == whole(config, tmp_path)


def test_any_flipped_byte_is_found(tmp_path):
    there = Checkpoints(tmp_path)
    there.write(1, {"tensor": torch.arange(5), "number": 0.5, "none": None})
    content = there.path(1).read_bytes()
    for at in range(0, len(content), 7):
        there.path(1).write_bytes(content[:at] + bytes([content[at] ^ 16]) + content[at + 1 :])
        with pytest.raises(DamagedError, match=r"damaged|format"):
            there.read(1, CPU)


def test_what_holds_no_state_is_of_no_use(tmp_path):
    there = Checkpoints(tmp_path)
    there.write(1, [torch.arange(5)])  # type: ignore[arg-type]
    with pytest.raises(DamagedError, match="holds no state"):
        there.read(1, CPU)


def test_a_run_begun_on_another_kind_of_device_is_left_alone(tmp_path):
    config = tiny()
    folder = stopped(config, tmp_path, 7)
    there = Checkpoints(folder)
    there.write(6, {**there.read(6, CPU), "device": "cuda"})
    carried_out(config, tmp_path)
    note = RunRecord(tmp_path, config_hash(config), 0).take_refusal()
    assert note == "device=cpu: this run was begun on cuda, where it can go on; force=true starts it anew"
    assert checkpoints(folder) == ["checkpoint-00000004.pt", "checkpoint-00000006.pt"]


# Writing.


def test_the_last_two_are_kept_and_none_when_the_run_has_finished(tmp_path):
    config = tiny()
    folder = stopped(config, tmp_path, 9, every=1)
    assert checkpoints(folder) == ["checkpoint-00000008.pt", "checkpoint-00000009.pt"]
    assert all(path.stat().st_mode & 0o077 == 0 for path in folder.glob("*.pt"))
    carried_out(config, tmp_path)
    assert checkpoints(folder) == []


def test_none_is_left_of_a_run_that_diverged(tmp_path, monkeypatch):
    original = PrivateStep.take

    def broken(self, batch):
        self.gradients.flat.vector.fill_(torch.nan)
        return original(self, batch)

    monkeypatch.setattr(PrivateStep, "take", broken)
    (folder,), _ = carried_out(tiny(), tmp_path, checkpoint=CheckpointTimes(every_steps=1))
    assert status(folder) == "diverged"
    assert checkpoints(folder) == []


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_full_disk_leaves_the_checkpoint_before_and_the_run_goes_on(call, tmp_path, monkeypatch):
    original, calls = getattr(os, call), []

    def full(*arguments):
        if "checkpoint" in str(arguments[0]) or call == "fsync":
            calls.append(arguments)
            if len(calls) > 2:
                raise OSError(errno.ENOSPC, "No space left on device")
        return original(*arguments)

    config = tiny()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(f"dpbench.training.checkpoint.os.{call}", full)
        raise_after(patch, 9, RuntimeError("stopped"))
        (folder,), said = carried_out(config, tmp_path, checkpoint=CheckpointTimes(every_steps=1))
    assert "  no checkpoint of step 3, the run goes on: [Errno 28] No space left on device" in said
    assert checkpoints(folder)[-1] == f"checkpoint-0000000{1 if call == 'fsync' else 2}.pt"
    carried_out(config, tmp_path)
    assert outcome(folder) == whole(config, tmp_path)


def on_a_gpu():
    raise torch.OutOfMemoryError("CUDA out of memory")


def on_a_cpu():
    """By what torch raises there, which is no error of a kind of its own."""
    torch.empty(10**15)


@pytest.mark.parametrize(
    ("runs_out", "said_of_it"), [(on_a_gpu, "CUDA out of memory"), (on_a_cpu, "can't allocate memory: you tried")]
)
def test_memory_that_runs_out_for_a_checkpoint_leaves_the_one_before_and_the_run_goes_on(
    runs_out, said_of_it, tmp_path, monkeypatch
):
    original, config = Training.state_dict, tiny()

    def full(self):
        if self.parts.step.steps == 3:
            runs_out()
        return original(self)

    monkeypatch.setattr(Training, "state_dict", full)
    (folder,), said = carried_out(config, tmp_path, checkpoint=CheckpointTimes(every_steps=1))
    assert re.search(rf"^  no checkpoint of step 3, the run goes on: .*{said_of_it}", said, re.MULTILINE)
    assert "no checkpoint of step 4" not in said
    assert status(folder) == "finished"


@pytest.mark.parametrize("writes", [0, 1, 5])
def test_memory_that_runs_out_for_the_bytes_of_a_checkpoint_is_told_as_that(writes, monkeypatch):
    """Which torch tells as a file that can't be ended, unless it comes late enough."""

    class Full(io.BytesIO):
        left = writes

        def write(self, content):
            self.left -= 1
            if self.left < 0:
                raise MemoryError
            return super().write(content)

    monkeypatch.setattr(format.io, "BytesIO", Full)
    with pytest.raises(MemoryError, match="memory ran out"):
        format.packed({"x": torch.zeros(100_000)})


def test_an_error_that_is_none_of_memory_fails_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr(Training, "state_dict", Mock(side_effect=RuntimeError("a shape is wrong")))
    (folder,), said = carried_out(tiny(), tmp_path, checkpoint=CheckpointTimes(every_steps=1))
    assert read(folder, "status.json")["reason"].startswith("RuntimeError: a shape is wrong")
    assert "no checkpoint" not in said


@pytest.mark.parametrize("where", ["dpbench.training.checkpoint.restored", "dpbench.step.PrivateStep.load_state_dict"])
def test_memory_that_runs_out_while_a_checkpoint_is_read_costs_no_checkpoint(where, tmp_path):
    config = tiny()
    want = whole(config, tmp_path)
    folder = stopped(config, tmp_path, 5)
    before = checkpoints(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(where, Mock(side_effect=torch.OutOfMemoryError("CUDA out of memory")))
        carried_out(config, tmp_path)
    assert read(folder, "status.json")["reason"].startswith("memory ran out (CUDA out of memory)")
    assert checkpoints(folder) == before
    carried_out(config, tmp_path)
    assert outcome(folder) == want


def test_a_file_system_that_syncs_no_folders_has_checkpoints_too(tmp_path, monkeypatch):
    original = os.fsync

    def of_files_alone(handle):
        if stat.S_ISDIR(os.fstat(handle).st_mode):
            raise OSError(errno.EINVAL, "Invalid argument")
        original(handle)

    monkeypatch.setattr(os, "fsync", of_files_alone)
    for step in (1, 2, 3):
        Checkpoints(tmp_path).write(step, {"x": step})
    assert checkpoints(tmp_path) == ["checkpoint-00000002.pt", "checkpoint-00000003.pt"]


def test_what_can_not_be_loaded_again_is_not_written(tmp_path):
    with pytest.raises(TypeError, match=r"step\.filter\.0 is a set; only tensors and plain values"):
        Checkpoints(tmp_path).write(1, {"step": {"filter": [{1, 2}]}})
    assert list(tmp_path.iterdir()) == []


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def test_checkpoints_are_due_by_the_monotonic_clock_and_take_little_of_the_time(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(time, "monotonic", clock)
    monkeypatch.setattr(time, "time", lambda: pytest.fail("a clock that jumps"))
    occasions = Occasions(CheckpointTimes(every_seconds=10), Interruption())
    due = []
    for step in range(1, 60):
        clock.now += 1
        if occasions.after(step).write:
            due.append(step)
            occasions.written(0.5 if len(due) == 2 else 0.1)
    assert due == [10, 20, 45, 55]  # half a second is 2 % of 25


def test_checkpoints_that_others_ask_for_put_those_that_are_due_by_time_off_but_not_for_ever(monkeypatch):
    """A run with secure noise has one before each evaluation. Each takes 10 s, which is 2 % of 500 s."""
    clock = Clock()
    monkeypatch.setattr(time, "monotonic", clock)
    occasions, due = Occasions(CheckpointTimes(every_seconds=300), Interruption()), []
    for step in range(1, 41):
        clock.now += 100
        if occasions.after(step).write:
            due.append(step)
        if due[-1:] == [step] or step % 9 == 0:
            occasions.written(10)
    # The first after 300 s, the others after 500 s without one; 9, 18, 27 and 36 come on top.
    assert due == [3, 8, 14, 23, 32]


def test_checkpoints_of_runs_in_step_are_paid_for_together(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(time, "monotonic", clock)
    occasions, due = Occasions(CheckpointTimes(every_seconds=10), Interruption()), []
    for step in range(1, 100):
        clock.now += 1
        wanted = [occasions.after(step).write for _ in range(4)]
        assert len({*wanted}) == 1
        if wanted[0]:
            due.append(step)
            for _ in wanted:
                occasions.written(0.125)
    assert due == [10, 35, 60, 85]  # half a second is 2 % of 25


@pytest.mark.parametrize("secure", [False, True])
def test_a_run_with_secure_noise_writes_checkpoints_by_time_as_well(secure, tmp_path, monkeypatch):
    clock, take, write, written = Clock(), PrivateStep.take, Keeper.write, []

    def taken(self, batch):
        clock.now += 100
        return take(self, batch)

    def timed(self, training, step, tracker):
        written.append(step)
        write(self, training, step, tracker)
        return 10.0

    monkeypatch.setattr("dpbench.training.interruption.time", SimpleNamespace(monotonic=clock))
    monkeypatch.setattr(PrivateStep, "take", taken)
    monkeypatch.setattr(Keeper, "write", timed)
    config = tiny("batch_size=48", "evaluation.every_steps=9", f"privacy.secure_noise={str(secure).lower()}")
    carried_out(config, tmp_path, checkpoint=CheckpointTimes(every_seconds=300))
    assert config.steps == 30
    assert written == ([3, 8, 9, 14, 18, 23, 27, 30] if secure else [3, 8, 13, 18, 23, 28])


def test_runs_in_step_are_told_the_same_about_a_step(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(time, "monotonic", clock)
    occasions = Occasions(CheckpointTimes(every_seconds=10, every_steps=None), Interruption())
    clock.now = 9
    first = occasions.after(1)
    clock.now = 11
    assert occasions.after(1) == first == (False, None)
    assert occasions.after(2) == occasions.after(2) == (True, None)


def test_by_default_a_short_run_writes_none(tmp_path, monkeypatch):
    monkeypatch.setattr(Checkpoints, "write", lambda *_: pytest.fail("written"))
    assert tiny().checkpoint == CheckpointTimes(every_seconds=600, every_steps=None)
    whole_as_patched(tiny(), tmp_path)


def test_who_has_lost_the_run_leaves_the_checkpoints_of_others_alone(tmp_path):
    there = Checkpoints(tmp_path)
    for step in (1, 2):
        there.write(step, {"x": step})

    def lost():
        raise LockLostError("taken over")

    with pytest.raises(LockLostError):
        there.write(3, {"x": 3}, lost)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-00000001.pt", "checkpoint-00000002.pt"]


def test_when_checkpoints_are_written_is_no_part_of_a_run():
    typed = ["checkpoint.every_seconds=5", "checkpoint.every_steps=3", "keep_model=true"]
    (job,) = compose_jobs(typed, multirun=False)
    assert config_hash(job.config) == config_hash(composed())
    assert job.name == "defaults"


@pytest.mark.parametrize("typed", ["checkpoint.every_seconds=0", "checkpoint.every_steps=-1"])
def test_times_are_positive(typed):
    with pytest.raises(UserError, match=r"^checkpoint\.every_.*=.*: expected"):
        composed(typed)
