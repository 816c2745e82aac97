"""A run that was stopped and goes on from a checkpoint is the run that was never stopped, bit for bit."""

import errno
import hashlib
import json
import math
import os
import pickle
import re
import shutil
import signal
import stat
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from cli import raise_after, read, read_metrics, run, status
from helpers import ALGORITHMS, composed
from resuming import (
    STEPS,
    DropoutMLP,
    FallingBackMLP,
    carried_out,
    checkpoints,
    flip,
    full,
    noted,
    outcome,
    resumed_at,
    run_out_of_memory,
    signalled,
    stopped,
    tiny,
    whole,
    whole_as_patched,
)
from safetensors.torch import load_file

from dpbench.averaging import Averaging
from dpbench.config import Job, compose_jobs, config_hash
from dpbench.config.schema import CheckpointTimes
from dpbench.errors import Terminated, UserError
from dpbench.filters import Exponential, Filter
from dpbench.gradients import FusedGradients, choice
from dpbench.gradients.choice import Chooser
from dpbench.launch import execute
from dpbench.launch.execute import fail
from dpbench.privacy import Ledger, calibrate
from dpbench.privacy.gaussian import SEEDED_NOISE
from dpbench.step import PrivateStep
from dpbench.tracking.lock import LockLostError
from dpbench.tracking.published import Published
from dpbench.tracking.record import RecordError, RunRecord
from dpbench.training import checkpoint as format
from dpbench.training.checkpoint import Checkpoints, DamagedError
from dpbench.training.interruption import Interruption, Occasions
from dpbench.training.preparing import Prepared
from dpbench.training.resume import GLOBAL, Training

CPU = torch.device("cpu")


# The same run, bit for bit.


@pytest.mark.parametrize("algo", ALGORITHMS)
def test_every_algorithm_goes_on_where_it_was(algo, tmp_path):
    config = tiny(f"algo={algo}")
    stopped(config, tmp_path, 7)
    (folder,), said = carried_out(config, tmp_path)
    assert resumed_at(folder) == [6]
    assert f"goes on after step 6 of {STEPS}" in said
    assert outcome(folder) == whole(config, tmp_path)


@pytest.fixture(scope="module")
def of_full(tmp_path_factory):
    return whole(full(), tmp_path_factory.mktemp("full"))


@pytest.mark.parametrize("at", [1, 3, 6, 7, 11])
def test_a_run_with_much_to_remember_goes_on_from_any_step(at, of_full, tmp_path):
    config = replace(full(), checkpoint=CheckpointTimes(every_steps=1))
    stopped(config, tmp_path, at, every=1)
    (folder,), _ = carried_out(config, tmp_path)
    assert resumed_at(folder) == [at]
    assert outcome(folder) == of_full


def test_a_run_goes_on_as_often_as_it_is_stopped(of_full, tmp_path):
    for at in (2, 5, 5, 10):
        stopped(full(), tmp_path, at)
    (folder,), _ = carried_out(full(), tmp_path)
    assert resumed_at(folder) == [2, 4, 4, 10]
    assert outcome(folder) == of_full


def goes_on(config, results):
    """The record of a run that was stopped and goes on after step 6."""
    stopped(config, results, 7)
    (folder,), said = carried_out(config, results)
    assert "goes on after step 6" in said
    assert "set aside" not in said
    return folder


def goes_on_to(want, config, results):
    """Whether such a run, which comes to its end, comes to what it would have come to."""
    folder = goes_on(config, results)
    assert (resumed_at(folder), status(folder)) == ([6], "finished")
    return outcome(folder) == want


@pytest.mark.parametrize("forgotten", [None, "python", "numpy"])
def test_a_model_that_draws_from_other_generators_goes_on_where_they_were(forgotten, tmp_path, monkeypatch):
    config = replace(tiny(), model=DropoutMLP(others=True))
    want = whole(config, tmp_path)
    load = Training.load_global_streams

    def load_others(self, state):
        now = self.remembering()[GLOBAL].state_dict()
        load(self, {name: now[name] if name == forgotten else state[name] for name in state})

    monkeypatch.setattr(Training, "load_global_streams", load_others)
    assert goes_on_to(want, config, tmp_path) == (forgotten is None)


@dataclass
class Forgetful(Filter):
    """The mean of the last gradients; what it keeps is in no state."""

    window: int = 2

    def __post_init__(self):
        self.last = []

    def apply(self, gradient):
        self.last = [gradient.clone(), *self.last][: self.window]
        self.steps = len(self.last)
        return torch.stack(self.last).mean(0)


@dataclass
class Remembering(Forgetful):
    """The same with a state."""

    def state_dict(self):
        return {"last": [gradient.clone() for gradient in self.last]}

    def load_state_dict(self, state):
        self.last = state["last"]


@pytest.mark.parametrize(("kind", "warned"), [(Forgetful, ["last", "steps"]), (Remembering, [])])
def test_a_stage_that_would_forget_is_named_at_the_first_checkpoint(tmp_path, kind, warned):
    config = replace(tiny(), filter=kind(), checkpoint=CheckpointTimes(every_steps=2))
    _, said = carried_out(config, tmp_path)
    assert re.findall(rf"warning: {kind.__name__} \(filter\) keeps (\w+) from step to step", said) == warned


@dataclass
class ForgetfulMean(Averaging):
    """The mean of all iterates; what it keeps is in no state."""

    def __post_init__(self):
        self.iterates = []

    def update(self, iterate):
        self.iterates.append(iterate.clone())

    def average(self, iterate):
        return torch.stack(self.iterates).mean(0) if self.iterates else iterate


def test_an_average_that_would_forget_is_named_too(tmp_path):
    config = replace(tiny(), averaging=ForgetfulMean(), checkpoint=CheckpointTimes(every_steps=2))
    _, said = carried_out(config, tmp_path)
    assert re.findall(r"warning: ForgetfulMean \(averaging\) keeps (\w+) from step to step", said) == ["iterates"]


PARTS = [
    "model",
    "step",
    "averaging",
    "sampler",
    "loop",
    "metrics",
    "ledger",
    "recorder",
    GLOBAL,
    "stream of samples",
    "stream of augmentation",
    "stream of noise",
    "stream of side noise",
]


def test_these_are_all_parts(tmp_path, monkeypatch):
    seen = []
    original = Training.state_dict
    monkeypatch.setattr(Training, "state_dict", lambda self: seen.append(original(self)) or seen[-1])
    stopped(full(), tmp_path, 2)
    assert set(seen[0]) == set(PARTS)


# By the account of what was released, whatever else would come of it.
FOUND_OUT = {
    "step": "BudgetError: all 12 planned releases are spent",
    "steps": "BudgetError: all 10 planned releases are spent",
    "ledger": "6 of 12 planned releases were made",
}


@pytest.mark.parametrize("part", PARTS)
def test_a_run_that_forgets_a_part_is_another_one(part, of_full, tmp_path, monkeypatch):
    if part == GLOBAL:
        monkeypatch.setattr(Training, "load_global_streams", lambda self, state: None)
    else:
        original = Training.remembering
        monkeypatch.setattr(
            Training, "remembering", lambda self: {n: found for n, found in original(self).items() if n != part}
        )
    if part in FOUND_OUT:
        assert FOUND_OUT[part] in read(goes_on(full(), tmp_path), "status.json")["reason"]
    else:
        assert not goes_on_to(of_full, full(), tmp_path)


@pytest.mark.parametrize(
    ("algo", "key"),
    [
        ("dpadam", "optimizer"),
        ("dpgalore", "optimizer"),
        ("dpsgd", "steps"),
        ("disk", "query"),
        ("disk", "filter"),
        ("dp_pmlf", "query"),
        ("doppler", "filter"),
        ("dicesgd", "clip"),
        ("dcsgd_e", "threshold"),
        ("dp_ftrl", "noise"),
    ],
)
def test_a_step_that_forgets_is_another_one(algo, key, tmp_path, monkeypatch):
    want = whole(tiny(f"algo={algo}"), tmp_path)
    save, load = PrivateStep.state_dict, PrivateStep.load_state_dict
    monkeypatch.setattr(PrivateStep, "state_dict", lambda self: {k: v for k, v in save(self).items() if k != key})
    monkeypatch.setattr(PrivateStep, "load_state_dict", lambda self, state: load(self, {**save(self), **state}))
    if key in FOUND_OUT:
        assert FOUND_OUT[key] in read(goes_on(tiny(f"algo={algo}"), tmp_path), "status.json")["reason"]
    else:
        assert not goes_on_to(want, tiny(f"algo={algo}"), tmp_path)


def test_eps_is_asked_for_in_the_same_portions(tmp_path, monkeypatch):
    """What PLDs compose to depends, in the last digits, on the order in which they are composed."""
    config = tiny("privacy.accountant=pld", "privacy.noise_multiplier=0.7", "eps=100")
    want = whole(config, tmp_path)
    assert goes_on_to(want, config, tmp_path / "ours")
    original = Ledger.load_state_dict
    monkeypatch.setattr(Ledger, "load_state_dict", lambda self, state, asked=(): original(self, state))
    assert not goes_on_to(want, config, tmp_path / "at once")


@pytest.mark.parametrize("left", ["checkpoint", "note"])
def test_a_run_that_takes_published_steps_again_has_spent_what_they_spent(tmp_path, left):
    config = tiny()
    spent = read_metrics(stopped(config, tmp_path, 7, every=4))[1]
    assert spent["step"] == 6
    if left == "note":
        shutil.rmtree(tmp_path / "runs" / config_hash(config) / "0")
    folder = stopped(config, tmp_path, 5 if left == "checkpoint" else 4, every=4)
    ledger, summary = read(folder, "ledger.json"), read(folder, "summary.json")
    assert (ledger["eps"], summary["eps"]) == (pytest.approx(spent["eps"]), ledger["eps"])
    assert sum(entry["count"] * len(entry["noise_multipliers"]) for entry in ledger["releases"]) == 6
    assert summary["steps"] == 6
    carried_out(config, tmp_path)
    assert outcome(folder) == whole(config, tmp_path)


CALIBRATED = ("privacy.noise_multiplier=null", "eps=3", "privacy.accountant=rdp")


@pytest.mark.parametrize("secure_noise", [False, True])
def test_a_process_that_fails_before_a_run_begins_leaves_what_the_run_has(tmp_path, secure_noise):
    config = tiny(f"privacy.secure_noise={str(secure_noise).lower()}")
    folder = stopped(config, tmp_path, 7)
    before = outcome(folder)
    origin = read(folder, "provenance.json")
    fail(Job((), replace(config, results_dir=str(tmp_path)), {}), "ImportError: libcudart.so")
    assert read(folder, "status.json")["reason"] == "ImportError: libcudart.so"
    assert checkpoints(folder) == ["checkpoint-00000004.pt", "checkpoint-00000006.pt"]
    assert (outcome(folder)["metrics"], read(folder, "provenance.json")) == (before["metrics"], origin)
    carried_out(config, tmp_path)
    assert resumed_at(folder) == [6]
    assert status(folder) == "finished"
    assert secure_noise or outcome(folder) == whole(config, tmp_path)


def test_a_seed_that_another_process_had_meanwhile_goes_on_from_there(tmp_path, monkeypatch):
    config = tiny(fuse_seeds=False)
    original, begun = execute._carry_out, []

    def meanwhile(execution, display, occasions):
        begun.append(execution.config.seed)
        if begun == [0]:
            with pytest.MonkeyPatch.context() as patch:
                raise_after(patch, 7, RuntimeError("stopped"))
                carried_out(config, tmp_path, seeds=(1,), checkpoint=CheckpointTimes(every_steps=2))
        original(execution, display, occasions)

    monkeypatch.setattr(execute, "_carry_out", meanwhile)
    (first, second), _ = carried_out(config, tmp_path, seeds=(0, 1))
    assert begun == [0, 1, 1]
    assert (status(first), status(second)) == ("finished", "finished")
    assert (resumed_at(first), resumed_at(second)) == ([], [6])


@contextmanager
def calibrated_by(factor):
    """Calibration of another version, whose multipliers are larger by a factor."""

    def other(*args):
        found = calibrate(*args)
        return replace(found, noise_multiplier=found.noise_multiplier * factor)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dpbench.training.budget.calibrate", other)
        yield


def test_a_run_keeps_the_noise_multiplier_that_it_was_begun_with(tmp_path):
    config = tiny(*CALIBRATED)
    with calibrated_by(1.001):
        want = whole_as_patched(config, tmp_path)
        stopped(config, tmp_path, 7)
    (folder,), _ = carried_out(config, tmp_path)
    assert resumed_at(folder) == [6]
    assert outcome(folder) == want


@pytest.mark.parametrize(("factor", "kept"), [(0.99, True), (0.99, False), (1.001, False)])
def test_no_release_is_made_again_with_the_same_noise_at_another_multiplier(tmp_path, factor, kept):
    """From z n + S and z' n + S anybody has S; at 0.99 z the run would spend more than its eps."""
    config = tiny(*CALIBRATED)
    with calibrated_by(factor):
        folder = stopped(config, tmp_path, 7)
    for path in () if kept else folder.glob("*.pt"):
        path.unlink()
    before = outcome(folder)
    carried_out(config, tmp_path)  # a second attempt, and a third
    carried_out(config, tmp_path)
    refusal = folder.with_name("0.refused").read_text()
    assert refusal.startswith("seed=0: this run made releases at noise multiplier ")
    assert "would show what it hides; take another seed" in refusal
    assert outcome(folder) == before
    (other,), _ = carried_out(config, tmp_path, seeds=(1,))
    assert status(other) == "finished"


def test_a_run_that_spent_more_than_its_eps_is_invalid(tmp_path):
    """A calibration that was cached by another account, say, gives too little noise."""
    with calibrated_by(0.9):
        (folder,), _ = carried_out(tiny(*CALIBRATED), tmp_path)
    found = read(folder, "status.json")
    assert found["status"] == "invalid"
    assert re.fullmatch(r"eps=3\.\d+ was spent, more than eps=3: its noise .* another account", found["reason"])


def test_seconds_of_all_parts_are_added_up(tmp_path):
    config = tiny()
    stopped(config, tmp_path, 7)
    state = Checkpoints(next(tmp_path.glob("runs/*/0"))).read(6, CPU)
    state["training"]["loop"]["seconds"] = 1000.0
    Checkpoints(next(tmp_path.glob("runs/*/0"))).write(6, state)
    (folder,), _ = carried_out(config, tmp_path)
    origin = read(folder, "provenance.json")
    assert 1000 < origin["wall_seconds"] < 1100
    assert 1000 < json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])["seconds"] < 1100
    assert set(origin["resumed"][0]) <= {"step", "started", "command", "dirty", "commit"}


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


def test_a_run_begun_on_another_kind_of_device_is_left_alone(tmp_path):
    config = tiny()
    folder = stopped(config, tmp_path, 7)
    there = Checkpoints(folder)
    there.write(6, {**there.read(6, CPU), "device": "cuda"})
    carried_out(config, tmp_path)
    note = RunRecord(tmp_path, config_hash(config), 0).take_refusal()
    assert note == "device=cpu: this run was begun on cuda, where it can go on; force=true starts it anew"
    assert checkpoints(folder) == ["checkpoint-00000004.pt", "checkpoint-00000006.pt"]


@pytest.mark.parametrize(("left", "refused"), [((), True), ((2,), True), ((6,), False)])
def test_published_steps_are_not_taken_again_on_another_kind_of_device(tmp_path, left, refused):
    """There the same seed draws other batches and other noise. All metrics were published up to step 6."""
    config = tiny()
    folder = with_checkpoints(left, tmp_path)
    assert noted(folder)["device"] == "cpu"
    noted(folder, device="NVIDIA A100-SXM4-40GB")
    before = outcome(folder)
    carried_out(config, tmp_path)
    note = RunRecord(tmp_path, config_hash(config), 0).take_refusal()
    if not refused:
        assert note is None
        assert resumed_at(folder) == [6]
        return
    step = max(left, default=0)
    assert note.startswith("device=cpu: a run on NVIDIA A100-SXM4-40GB has published metrics of step 6; here the steps")
    assert f"after step {step} would draw other batches and noise" in note
    assert outcome(folder) == before


def with_checkpoints(left, results, **settings):
    """The folder of a run that stopped after step 7, with these checkpoints alone."""
    config = replace(tiny(), **settings)
    folder = stopped(config, results, 7)
    for path in folder.glob("checkpoint-*.pt"):
        if int(path.stem.rpartition("-")[2]) not in left:
            path.unlink()
    if left == (2,):  # as if only that one could be read
        there = stopped(config, results / "other", 3)
        shutil.copy(there / "checkpoint-00000002.pt", folder)
    return folder


@pytest.mark.parametrize(("left", "refused"), [((), True), ((2,), True), ((6,), False)])
def test_published_steps_are_not_taken_again_with_noise_of_another_version(tmp_path, left, refused):
    folder = with_checkpoints(left, tmp_path)
    noted(folder, noise=SEEDED_NOISE - 1)
    carried_out(tiny(), tmp_path)
    note = RunRecord(tmp_path, config_hash(tiny()), 0).take_refusal()
    assert (note is not None) == refused
    if refused:
        assert note.startswith("seed=0: another version of dpbench has published metrics of step 6 of this run;")
    else:
        assert resumed_at(folder) == [6]


@pytest.mark.parametrize(("left", "refused"), [((), True), ((2,), True), ((6,), False)])
@pytest.mark.parametrize("changed", ["micro_batch", "processes"])
def test_published_steps_are_not_taken_again_with_other_samples_together(tmp_path, left, refused, changed):
    """What augmentation and dropout draw for a sample hangs on them."""
    folder = with_checkpoints(left, tmp_path)
    before = outcome(folder)
    chosen = {}
    if changed == "micro_batch":
        chosen = {"micro_batch": noted(folder)["micro_batch"] + 1}
    else:
        noted(folder, processes=2)
    carried_out(replace(tiny(), **chosen), tmp_path)
    note = RunRecord(tmp_path, config_hash(tiny()), 0).take_refusal()
    if not refused:
        assert note is None
        assert resumed_at(folder) == [6]
        return
    assert "metrics of step 6 are published, computed " in note
    assert f"the steps after step {max(left, default=0)} would be other releases with the same noise" in note
    assert note.startswith(f"micro_batch={chosen['micro_batch']}: " if chosen else "metrics of step 6")
    assert "by 2 processes; by one process" in note or chosen
    assert outcome(folder) == before


@pytest.mark.parametrize("text", ["", "3", "[]", "null", '"6"', '{"device": "cpu"}', '{"step": "six"}'])
def test_a_note_that_can_not_be_read_speaks_of_all_steps(tmp_path, text):
    (tmp_path / "0.published").write_text(text)
    assert Published.read(tmp_path / "0") == Published(step=math.inf)
    assert not Published.read(tmp_path / "0").readable


def test_a_note_of_an_older_version_says_what_it_has(tmp_path):
    (tmp_path / "0.published").write_text('{"step": 6, "device": "cpu", "noise_multiplier": 1.5}')
    assert Published.read(tmp_path / "0") == Published(6, "cpu", noise_multiplier=1.5)


def test_what_was_seen_and_nobody_can_tell_how_it_was_drawn_is_not_released_again(tmp_path):
    folder = with_checkpoints((), tmp_path)
    before = outcome(folder)
    folder.with_name("0.published").write_text("{")
    carried_out(tiny(), tmp_path)
    refusal = RunRecord(tmp_path, config_hash(tiny()), 0).take_refusal()
    assert refusal.startswith("seed=0: metrics of this run are published, and what its note beside the record says")
    assert outcome(folder) == before
    carried_out(tiny(), tmp_path, force=True)
    assert status(folder) == "finished"


@pytest.mark.parametrize("otherwise", [True, False])
def test_steps_that_were_drawn_otherwise_than_the_last_ones_seen_are_not_taken_again(tmp_path, otherwise):
    """Up to step 4 with other micro-batches than after it, which alone are noted; then the checkpoints are lost."""
    folder = stopped(tiny(), tmp_path, 5)
    chosen = {"micro_batch": read(folder, "provenance.json")["micro_batch"] + 1} if otherwise else {}
    stopped(replace(tiny(), **chosen), tmp_path, 7)
    assert resumed_at(folder) == [4]
    seen = noted(folder)
    assert (seen["step"], seen["since"]) == (6, 4 if otherwise else 0)
    for path in folder.glob("checkpoint-*.pt"):
        path.unlink()
    carried_out(replace(tiny(), **chosen), tmp_path)
    refusal = RunRecord(tmp_path, config_hash(tiny()), 0).take_refusal()
    assert (refusal is not None) == otherwise
    if otherwise:
        assert "until step 4 it drew on another kind of device" in refusal
        assert "the steps after step 0 might be other releases" in refusal
    else:
        assert status(folder) == "finished"


def test_what_could_not_be_noted_is_seen_by_nobody(tmp_path, monkeypatch):
    """As on a full disk: the steps behind it may be taken again."""
    publish = RunRecord.publish

    def full(self, published):
        if published.step == 6:
            raise RecordError("nothing can be written beside it")
        publish(self, published)

    monkeypatch.setattr(RunRecord, "publish", full)
    (folder,), _ = carried_out(tiny(), tmp_path)
    assert status(folder) == "failed"
    (line,) = outcome(folder)["metrics"]
    assert line["step"] == 3
    assert read(folder, "summary.json")["test_accuracy"]["final"] == line["test_accuracy"]


def test_who_has_lost_the_run_leaves_the_checkpoints_of_others_alone(tmp_path):
    there = Checkpoints(tmp_path)
    for step in (1, 2):
        there.write(step, {"x": step})

    def lost():
        raise LockLostError("taken over")

    with pytest.raises(LockLostError):
        there.write(3, {"x": 3}, lost)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-00000001.pt", "checkpoint-00000002.pt"]


def test_the_note_stays_where_the_disk_may_not_have_the_record(tmp_path, monkeypatch):
    def fail(folder):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("dpbench.tracking.record.sync_files", fail)
    (folder,), _ = carried_out(tiny(), tmp_path)
    assert status(folder) == "finished"
    assert noted(folder)["step"] == STEPS


@pytest.mark.parametrize(
    "wrong",
    [
        {"step": "six"},
        {"device": 3},
        {"noise": 1.5},
        {"noise_multiplier": "much"},
        {"micro_batch": [3]},
        {"processes": True},
        {"strategies": 3},
        {"strategies": {"a layer": ["hold", "grouped"]}},
        {"others": []},
        {"others": [{"device": "cpu"}]},
        {"processes": 3},
        {"processes": None},
    ],
    ids=json.dumps,
)
def test_a_note_of_other_values_speaks_of_all_steps(tmp_path, wrong):
    other = {"device": "cpu", "micro_batch": 8, "at_once": 4, "strategies": {"a layer": ["hold", "grouped", 32]}}
    seen = Published(6, noise=3, noise_multiplier=1.5, processes=2, **other, others=[other])
    seen.write(tmp_path / "0")
    assert Published.read(tmp_path / "0") == seen
    (tmp_path / "0.published").write_text(json.dumps(asdict(seen) | wrong))
    assert Published.read(tmp_path / "0") == Published(step=math.inf)


def test_a_run_that_begins_again_has_the_micro_batch_that_was_seen(tmp_path):
    """One that is found, not chosen, may be another when memory is."""
    folder = with_checkpoints((), tmp_path)
    noted(folder, micro_batch=3, at_once=3)
    carried_out(tiny(), tmp_path)
    assert status(folder) == "finished"
    assert read(folder, "provenance.json")["micro_batch"] == 3


@contextmanager
def timing_that_prefers(place):
    """Of the strategies for each layer, whatever they take."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(choice, "WORTH_TIMING", 0)
        patch.setattr(choice, "HOPELESS_COST", math.inf)
        patch.setattr(Chooser, "_fastest", lambda self, key, use, term, points, candidates: candidates[place])
        yield


@pytest.mark.parametrize("left", [(), (2,), (6,)])
@pytest.mark.parametrize("known", [True, False])
def test_published_steps_are_taken_again_with_the_strategies_that_were_in_force(left, known, tmp_path):
    """Others round otherwise: the same noise would be in two sums that differ. Metrics were published up to step 6."""
    with timing_that_prefers(0):
        folder, want = with_checkpoints(left, tmp_path), whole_as_patched(tiny(), tmp_path)
    with timing_that_prefers(-1):
        assert whole_as_patched(tiny(), tmp_path / "timed") != want
        strategies = noted(folder)["strategies"]
        assert len(strategies) > 0
        if not known:
            noted(folder, strategies=None)
        carried_out(tiny(), tmp_path)
    assert status(folder) == "finished"
    assert (outcome(folder) == want) == (known or left != ())


@pytest.mark.filterwarnings("ignore:falling back to materialised")
@pytest.mark.parametrize("left", [(), (2,), (6,)])
def test_a_run_that_fell_back_on_its_way_goes_on_by_the_way_that_it_took(left, tmp_path):
    """In step 6, up to which metrics were published: on the fast way dropout would draw other masks."""
    folder = with_checkpoints(left, tmp_path, model=FallingBackMLP())
    ways = {}
    for path in folder.glob("checkpoint-*.pt"):
        step = int(path.stem.rpartition("-")[2])
        ways[step] = Checkpoints(folder).read(step, CPU)["training"]["step"]["gradients"]["way"]
    fast = {"leading": 1, "draws": True, "channels_last": False}
    assert ways == {step: fast if step < 6 else {"by_plain_autograd": True} for step in left}
    config = replace(tiny(), model=FallingBackMLP())
    carried_out(config, tmp_path)
    assert resumed_at(folder) == list(left)
    assert outcome(folder) == whole(config, tmp_path)


@pytest.mark.parametrize("changed", [{"device": "NVIDIA A100-SXM4-40GB"}, {"noise": 1}, {"noise_multiplier": 1.01}])
def test_an_attempt_that_fails_in_between_takes_nothing_of_what_is_remembered(tmp_path, changed):
    """It begins anew where the first attempt drew, and its record, which takes the other's place, ends earlier."""
    folder = with_checkpoints((), tmp_path)
    drawn = {"device": "cpu", "noise": SEEDED_NOISE, "noise_multiplier": 1.0}
    strategies = noted(folder)["strategies"]
    micro_batch = read(folder, "provenance.json")["micro_batch"]
    drawn |= {"micro_batch": micro_batch, "processes": 1, "at_once": micro_batch, "strategies": strategies, "since": 0}
    drawn["others"] = None
    assert noted(folder) == {"step": 6, **drawn}
    stopped(tiny(), tmp_path, 4, every=None)
    assert [line["step"] for line in outcome(folder)["metrics"]] == [3]
    assert noted(folder)["step"] == 6
    noted(folder, **changed)
    carried_out(tiny(), tmp_path)
    refusal = RunRecord(tmp_path, config_hash(tiny()), 0).take_refusal()
    assert refusal is not None
    assert "metrics of step 6" in refusal or "noise multiplier 1.01" in refusal
    carried_out(tiny(), tmp_path, force=True)
    assert status(folder) == "finished"


def test_a_run_that_has_finished_tells_itself_what_was_seen_of_it(tmp_path):
    folder = stopped(tiny(), tmp_path, 7)
    assert folder.with_name("0.published").exists()
    carried_out(tiny(), tmp_path)
    assert [path.name for path in folder.parent.iterdir()] == ["0"]


@pytest.mark.parametrize(("device", "refused"), [("NVIDIA A100-SXM4-40GB", True), ("cpu, 64 threads", False)])
def test_a_finished_record_that_is_moved_away_leaves_what_was_seen(tmp_path, device, refused):
    (folder,), _ = carried_out(tiny(), tmp_path)
    origin = read(folder, "provenance.json")
    (folder / "provenance.json").write_text(json.dumps({**origin, "device": device}))
    (folder / "metrics.jsonl").unlink()
    _, said = carried_out(tiny(), tmp_path)
    assert "its record is damaged" in said
    refusal = RunRecord(tmp_path, config_hash(tiny()), 0).take_refusal()
    assert (refusal is not None) == refused
    if refused:
        assert "has published metrics of step 10; here the steps after step 0" in refusal
    else:
        assert status(folder) == "finished"


@pytest.mark.parametrize("secure_noise", [False, True])
def test_a_record_of_which_nothing_was_seen_leaves_no_note_where_it_is_moved_away(tmp_path, secure_noise):
    config = tiny(f"privacy.secure_noise={str(secure_noise).lower()}")
    folder = stopped(config, tmp_path, 2, every=None)
    (folder / "status.json").unlink()
    RunRecord(tmp_path, config_hash(config), 0).set_aside()
    assert not list(folder.parent.iterdir())
    carried_out(config, tmp_path)
    assert status(folder) == "finished"


# Memory that runs out: from that step on, dropout draws for other samples together.


@contextmanager
def memory_running_out(after):
    with pytest.MonkeyPatch.context() as patch:
        run_out_of_memory(patch, after)
        yield


def dropping():
    return replace(tiny(), model=DropoutMLP())


def refused(results):
    """What is said of a run that does not go on, which leaves its record as it was."""
    (folder,) = results.glob("runs/*/0")
    before = outcome(folder)
    carried_out(dropping(), results)
    assert outcome(folder) == before
    return RunRecord(results, config_hash(dropping()), 0).take_refusal()


def test_the_step_in_which_memory_ran_out_has_a_checkpoint_to_go_on_from(tmp_path):
    with memory_running_out(4):
        want = whole_as_patched(dropping(), tmp_path)
        folder = stopped(dropping(), tmp_path, 7, every=None)
    assert checkpoints(folder) == ["checkpoint-00000005.pt"]
    assert noted(folder)["at_once"] < 100 < noted(folder)["micro_batch"]
    stopped(dropping(), tmp_path, 7, every=None)
    assert checkpoints(folder) == ["checkpoint-00000005.pt"]  # no other one: memory did not run out again
    carried_out(dropping(), tmp_path)
    assert resumed_at(folder) == [5, 5]
    assert outcome(folder) == want
    assert want != whole(dropping(), tmp_path / "with memory")


@pytest.mark.parametrize("left", [(), (4,)])
@pytest.mark.parametrize("known", [True, False])
def test_published_steps_are_not_taken_again_from_before_memory_ran_out(left, known, tmp_path):
    with memory_running_out(4):
        folder = stopped(dropping(), tmp_path, 7, every=4)
    assert checkpoints(folder) == ["checkpoint-00000004.pt", "checkpoint-00000005.pt"]
    for path in folder.glob("*.pt"):
        if int(path.stem.rpartition("-")[2]) not in left:
            path.unlink()
    if not known:
        noted(folder, at_once=None)
        carried_out(dropping(), tmp_path)
        assert status(folder) == "finished"
        return
    note, step, seen = refused(tmp_path), max(left, default=0), noted(folder)
    assert note.startswith(f"micro_batch=null: metrics of step 6 are published, computed {seen['at_once']} samples at")
    assert f"the steps after step {step}, with {seen['micro_batch']} at a time, would be other releases" in note
    carried_out(dropping(), tmp_path, force=True)
    assert status(folder) == "finished"


@pytest.mark.parametrize(("at", "fails"), [(4, True), (5, True), (6, False)])
def test_memory_that_runs_out_where_published_steps_are_taken_again_ends_the_attempt(at, fails, tmp_path):
    """Steps up to 6 were published, and step 4 has a checkpoint."""
    folder = stopped(dropping(), tmp_path, 7, every=4)
    with memory_running_out(at):
        carried_out(dropping(), tmp_path)
    if not fails:
        assert status(folder) == "finished"
        return
    reason = read(folder, "status.json")["reason"]
    assert reason.startswith("micro_batch=null: metrics of step 6 are published, computed ")
    assert f"at a time step {at + 1} is another release with the same noise" in reason
    assert [line["step"] for line in outcome(folder)["metrics"]] == [3]
    assert checkpoints(folder) == ["checkpoint-00000004.pt"]
    carried_out(dropping(), tmp_path)
    assert outcome(folder) == whole(dropping(), tmp_path)


def test_memory_that_runs_out_ends_no_forced_run(tmp_path):
    folder = stopped(dropping(), tmp_path, 7, every=None)
    with memory_running_out(2):
        carried_out(dropping(), tmp_path, force=True)
    assert status(folder) == "finished"


def test_a_finished_record_that_is_moved_away_leaves_that_memory_ran_out(tmp_path):
    with memory_running_out(4):
        (folder,), _ = carried_out(dropping(), tmp_path)
    assert read(folder, "provenance.json")["at_once"] < 100
    (folder / "metrics.jsonl").unlink()
    carried_out(dropping(), tmp_path)
    note = RunRecord(tmp_path, config_hash(dropping()), 0).take_refusal()
    assert note.startswith("micro_batch=null: metrics of step 10 are published")


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


def test_memory_that_runs_out_for_a_checkpoint_leaves_the_one_before_and_the_run_goes_on(tmp_path, monkeypatch):
    original, config = Training.state_dict, tiny()

    def full(self):
        if self.parts.step.steps == 3:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return original(self)

    monkeypatch.setattr(Training, "state_dict", full)
    (folder,), said = carried_out(config, tmp_path, checkpoint=CheckpointTimes(every_steps=1))
    assert "  no checkpoint of step 3, the run goes on: CUDA out of memory" in said
    assert "no checkpoint of step 4" not in said
    assert status(folder) == "finished"


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


# Signals.


@pytest.fixture
def heeded() -> Iterator[None]:
    """SIGINT interrupts, also where a shell started these tests in the background, which ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("heeded")
@pytest.mark.parametrize(
    ("which", "error", "reason"),
    [(signal.SIGTERM, Terminated, "by SIGTERM"), (signal.SIGINT, KeyboardInterrupt, "by the user")],
)
def test_a_signal_ends_a_run_after_the_step_with_a_checkpoint(which, error, reason, tmp_path):
    config, handlers = tiny("algo=disk"), [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)]
    with pytest.MonkeyPatch.context() as patch:
        signalled(patch, 4, which)
        with pytest.raises(error):
            carried_out(config, tmp_path)
    (folder,) = tmp_path.glob("runs/*/0")
    assert read(folder, "status.json") == {"status": "interrupted", "reason": reason}
    assert read(folder, "ledger.json")["releases"][0]["count"] == 5
    assert checkpoints(folder) == ["checkpoint-00000005.pt"]
    assert [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)] == handlers
    carried_out(config, tmp_path)
    assert resumed_at(folder) == [5]
    assert outcome(folder) == whole(config, tmp_path)


@pytest.mark.usefixtures("heeded")
def test_a_second_interrupt_ends_a_run_at_once(tmp_path):
    with pytest.MonkeyPatch.context() as patch:
        signalled(patch, 4, signal.SIGINT, signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            carried_out(tiny(), tmp_path)
    (folder,) = tmp_path.glob("runs/*/0")
    assert read(folder, "status.json") == {"status": "interrupted", "reason": "by the user"}
    assert read(folder, "summary.json")["steps"] == 4
    assert checkpoints(folder) == []


@pytest.mark.parametrize(
    ("minutes", "error", "words"), [(240, SystemExit, "-1"), (0, Exception, "timed-out")], ids=["again", "for good"]
)
@pytest.mark.parametrize("told", [(signal.SIGUSR2,), (signal.SIGTERM, signal.SIGUSR2)], ids=["alone", "after SIGTERM"])
def test_submitit_queues_a_job_again_once_its_run_has_written_a_checkpoint(minutes, error, words, told, tmp_path):
    environments = pytest.importorskip("submitit.core.job_environment")
    utils = pytest.importorskip("submitit.core.utils")
    requeued: list[int] = []
    job = utils.DelayedSubmission(len)
    job._timeout_min = minutes
    cluster = SimpleNamespace(global_rank=0, _requeue=requeued.append)
    handler = environments.SignalHandler(cluster, None, job).checkpoint_and_try_requeue
    before, config = signal.signal(signal.SIGUSR2, handler), tiny()
    try:
        with pytest.MonkeyPatch.context() as patch:
            signalled(patch, 4, *told)
            with pytest.raises(error, match=words):
                carried_out(config, tmp_path)
        assert signal.getsignal(signal.SIGUSR2) == handler
    finally:
        signal.signal(signal.SIGUSR2, before)
    assert len(requeued) == (minutes > 0)
    (folder,) = tmp_path.glob("runs/*/0")
    assert read(folder, "status.json") == {"status": "interrupted", "reason": "by its cluster"}
    assert checkpoints(folder) == ["checkpoint-00000005.pt"]
    carried_out(config, tmp_path)
    assert resumed_at(folder) == [5]
    assert outcome(folder) == whole(config, tmp_path)


def test_handlers_of_others_are_left_alone():
    seen: list[int] = []
    before = signal.signal(signal.SIGUSR2, lambda number, frame: seen.append(number))
    try:
        interruption = Interruption()
        with interruption:
            os.kill(os.getpid(), signal.SIGUSR2)
        assert seen == [signal.SIGUSR2]
        assert interruption.reason is None
    finally:
        signal.signal(signal.SIGUSR2, before)


def test_ignored_signals_stay_ignored():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with Interruption():
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_run_in_another_thread_leaves_signals_alone(tmp_path):
    found = []
    thread = threading.Thread(target=lambda: found.append(carried_out(tiny(), tmp_path)))
    thread.start()
    thread.join()
    assert status(found[0][0][0]) == "finished"


def test_a_command_that_is_terminated_says_so_in_its_exit_code_and_begins_no_other_run(tmp_path, monkeypatch):
    with pytest.MonkeyPatch.context() as patch:
        signalled(patch, 1, signal.SIGTERM)
        outcome = run(tmp_path, "algo=dpsgd,disk", "-m")
    assert outcome.code == 143
    assert outcome.err == "interrupted; finished work is kept, and the same command goes on from there\n"
    assert len(list(tmp_path.glob("runs/*/0"))) == 1
    outcome = run(tmp_path, "algo=dpsgd,disk", "-m")
    assert outcome.code == 0
    assert "goes on after step 2 of 3" in outcome.out


# Several seeds at once.

SEEDS = (0, 1, 2)


def together(results, **settings):
    return carried_out(tiny("algo=disk"), results, SEEDS, fuse_seeds=True, **settings)


@pytest.fixture(scope="module")
def of_seeds(tmp_path_factory):
    folders, said = together(tmp_path_factory.mktemp("seeds"))
    assert "3 seeds at once" in said
    return [outcome(folder) for folder in folders]


@pytest.mark.parametrize("seed", SEEDS)
def test_seeds_in_step_are_stopped_at_one_step_and_go_on_together(seed, of_seeds, tmp_path):
    """The signal comes in the step of this seed."""
    original, calls = PrivateStep.take, []

    def take(self, batch):
        calls.append(1)
        if len(calls) == 3 * 4 + seed + 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return original(self, batch)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PrivateStep, "take", take)
        with pytest.raises(Terminated):
            together(tmp_path)
    folders, said = together(tmp_path)
    assert said.count("goes on after step") == 3
    assert "3 seeds at once" in said
    assert len({tuple(resumed_at(folder)) for folder in folders}) == 1
    assert [outcome(folder) for folder in folders] == of_seeds


def test_seeds_that_stand_at_different_steps_share_passes_with_their_like_alone(of_seeds, tmp_path):
    with pytest.MonkeyPatch.context() as patch:
        raise_after(patch, 7, RuntimeError("stopped"))
        folders, _ = together(tmp_path, checkpoint=CheckpointTimes(every_steps=2))
    (folders[1] / "checkpoint-00000006.pt").unlink()
    with pytest.MonkeyPatch.context() as patch:
        sizes, original = set(), FusedGradients.clipped_sums
        patch.setattr(FusedGradients, "clipped_sums", lambda self, r: (sizes.add(len(r)), original(self, r))[1])
        folders, said = together(tmp_path)
    assert "2 seeds at once" in said
    assert sizes == {2}
    assert [resumed_at(folder) for folder in folders] == [[6], [4], [6]]
    for folder, want in zip(folders, of_seeds, strict=True):
        got = outcome(folder)
        assert got["ledger.json"] == want["ledger.json"]
        for mine, other in zip(got["metrics"], want["metrics"], strict=True):
            assert mine == pytest.approx(other, rel=1e-5)  # other passes, other rounding


# Forced runs.


def test_a_forced_run_starts_from_the_beginning(tmp_path):
    config = tiny()
    folder = stopped(config, tmp_path, 7)
    _, said = carried_out(config, tmp_path, force=True)
    assert "goes on" not in said
    assert resumed_at(folder) == []
    assert checkpoints(folder) == []
    assert outcome(folder) == whole(config, tmp_path)


def test_a_forced_run_that_is_stopped_leaves_no_older_checkpoint_to_go_on_from(tmp_path):
    config = tiny()
    stopped(config, tmp_path, 7)
    folder = stopped(replace(config, force=True), tmp_path, 3)
    assert checkpoints(folder) == ["checkpoint-00000002.pt"]
    carried_out(config, tmp_path)
    assert resumed_at(folder) == [2]
    assert outcome(folder) == whole(config, tmp_path)


def test_a_forced_second_run_keeps_its_checkpoints_apart_from_the_finished_record(tmp_path):
    config = tiny()
    (folder,), _ = carried_out(config, tmp_path)
    want, forced = outcome(folder), replace(config, force=True)
    again = stopped(forced, tmp_path, 7)
    assert again.name == "0.rerun"
    assert checkpoints(again) == ["checkpoint-00000004.pt", "checkpoint-00000006.pt"]
    assert checkpoints(folder) == []
    assert "finished already" in carried_out(config, tmp_path)[1]
    carried_out(forced, tmp_path)
    assert not again.exists()
    assert resumed_at(folder) == []
    assert checkpoints(folder) == []
    assert outcome(folder) == want


# Noise that can't be drawn again.


def secure():
    return tiny("privacy.secure_noise=true")


def test_with_secure_noise_a_checkpoint_comes_before_everything_published(tmp_path, monkeypatch):
    original, published = RunRecord.append_metrics, []

    def append(self, line):
        published.append((line["step"], Checkpoints(self.working).steps()[0]))
        original(self, line)

    monkeypatch.setattr(RunRecord, "append_metrics", append)
    (folder,), _ = carried_out(secure(), tmp_path)
    assert published == [(3, 3), (6, 6), (9, 9), (10, 10)]
    assert status(folder) == "finished"


def test_with_secure_noise_a_run_goes_on_behind_what_was_published(tmp_path):
    folder = stopped(secure(), tmp_path, 8, every=None)
    before = (folder / "metrics.jsonl").read_text().splitlines()
    carried_out(secure(), tmp_path)
    assert resumed_at(folder) == [6]
    after = (folder / "metrics.jsonl").read_text().splitlines()
    assert after[0] == before[0]
    one, other = (json.loads(lines[1]) for lines in (before, after))
    assert one | {"seconds": 0} == other | {"seconds": 0}  # evaluated again, at the same iterate
    assert read(folder, "ledger.json")["releases"][0]["count"] == STEPS


def test_with_secure_noise_a_checkpoint_has_nothing_that_samples_or_noise_follow_from(tmp_path):
    streams = {}
    for config in (secure(), tiny("privacy.secure_noise=false")):
        folder = stopped(config, tmp_path, 8, every=3)
        content = Checkpoints(folder).read(Checkpoints(folder).steps()[0], torch.device("cpu"))
        streams[config.privacy.secure_noise] = {name for name in content["training"] if name.startswith("stream")}
    assert streams[True] == {"stream of augmentation", GLOBAL}
    assert streams[False] - streams[True] == {"stream of samples", "stream of noise", "stream of side noise"}


@pytest.mark.parametrize("left", [0, 1])
def test_with_secure_noise_published_steps_are_not_taken_again(left, tmp_path):
    folder = stopped(secure(), tmp_path, 8, every=None)
    for path in sorted(folder.glob("*.pt"))[left:]:
        flip(path)
    carried_out(secure(), tmp_path)
    note = RunRecord(tmp_path, config_hash(secure()), 0).take_refusal()
    assert note is not None
    assert note.startswith("privacy.secure_noise=true: metrics of step 6 are published")
    assert f"after step {3 * left} would be releases" in note
    assert read(folder, "status.json")["status"] == "failed"
    carried_out(secure(), tmp_path, force=True)
    assert status(folder) == "finished"


def refusal(tmp_path):
    carried_out(secure(), tmp_path)
    return RunRecord(tmp_path, config_hash(secure()), 0).take_refusal() or ""


def test_with_secure_noise_a_run_that_diverged_between_evaluations_is_not_begun_anew(tmp_path, monkeypatch):
    original = PrivateStep.take

    def broken(self, batch):
        self.gradients.flat.vector.fill_(torch.nan)
        return original(self, batch)

    with monkeypatch.context() as patch:
        patch.setattr(PrivateStep, "take", broken)
        (folder,), _ = carried_out(secure(), tmp_path)
    assert read(folder, "status.json")["reason"].endswith("is no finite number after 1 step")
    assert refusal(tmp_path).startswith("privacy.secure_noise=true: metrics of step 1 are published")


@pytest.mark.parametrize("loss", ["removed", "recorded as failed", "unreadable metrics", "damaged", "unreadable note"])
def test_with_secure_noise_published_steps_are_remembered_whatever_becomes_of_the_record(loss, tmp_path):
    job = Job((), replace(secure(), results_dir=str(tmp_path)), {})
    if loss == "damaged":
        (folder,), _ = carried_out(secure(), tmp_path)
        (folder / "ledger.json").write_text("{")
    else:
        folder = stopped(secure(), tmp_path, 8, every=None)
    if loss == "removed":
        shutil.rmtree(folder)
    elif loss == "recorded as failed":
        fail(job, "its process was killed")
    elif loss == "unreadable metrics":
        (folder / "metrics.jsonl").write_bytes(b"\xff")
    elif loss == "unreadable note":
        folder.with_name("0.published").write_text("")
    for path in folder.glob("*.pt"):
        path.unlink()
    last = {"damaged": "10", "unreadable note": "inf"}.get(loss, "6")
    assert f"metrics of step {last} are published" in refusal(tmp_path)


# Settings.


def test_the_weights_kept_are_those_evaluated(tmp_path):
    config = replace(tiny("averaging=exponential"), keep_model=True)
    with pytest.MonkeyPatch.context() as patch:
        ended = []
        original = Prepared.__new__
        patch.setattr(Prepared, "__new__", lambda cls, *a: ended.append(original(cls, *a)) or ended[-1])
        (folder,), _ = carried_out(config, tmp_path)
    parts = ended[0].training.parts
    kept = load_file(folder / "model.safetensors")
    vector = torch.cat([kept[name].flatten() for name in parts.step.gradients.flat.names])
    assert torch.equal(vector, parts.averaging.average(parts.step.gradients.flat.vector))
    assert not torch.equal(vector, parts.step.gradients.flat.vector)


def test_by_default_no_weights_are_kept(tmp_path):
    (folder,), _ = carried_out(replace(tiny(), keep_model=False), tmp_path)
    assert not (folder / "model.safetensors").exists()


def test_when_checkpoints_are_written_is_no_part_of_a_run():
    typed = ["checkpoint.every_seconds=5", "checkpoint.every_steps=3", "keep_model=true"]
    (job,) = compose_jobs(typed, multirun=False)
    assert config_hash(job.config) == config_hash(composed())
    assert job.name == "defaults"


@pytest.mark.parametrize("typed", ["checkpoint.every_seconds=0", "checkpoint.every_steps=-1"])
def test_times_are_positive(typed):
    with pytest.raises(UserError, match=r"^checkpoint\.every_.*=.*: expected"):
        composed(typed)


def test_a_stage_that_does_not_take_its_state_up_is_found_out(tmp_path, monkeypatch):
    config = tiny("algo=disk")
    folder = stopped(config, tmp_path, 7)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Exponential, "load_state_dict", lambda self, state: None)
        _, said = carried_out(config, tmp_path)
    assert said.count("step: not all of it is taken up") == 2
    assert resumed_at(folder) == []
