"""A run that was stopped and goes on from a checkpoint is the run that was never stopped, bit for bit."""

import errno
import json
import os
import re
import shutil
import signal
from contextlib import contextmanager
from dataclasses import dataclass, replace

import pytest
import torch
from cli import raise_after, read, read_metrics, status
from helpers import ALGORITHMS
from resuming import (
    STEPS,
    DropoutMLP,
    carried_out,
    checkpoints,
    full,
    outcome,
    resumed_at,
    stopped,
    tiny,
    whole,
    whole_as_patched,
)
from safetensors.torch import load_file

from dpbench.averaging import Averaging
from dpbench.config import Job, config_hash
from dpbench.config.schema import CheckpointTimes
from dpbench.errors import Terminated
from dpbench.filters import Exponential, Filter
from dpbench.gradients import FusedGradients
from dpbench.launch import execute
from dpbench.privacy import Ledger, calibrate
from dpbench.step import PrivateStep
from dpbench.training.checkpoint import Checkpoints
from dpbench.training.job_record import fail
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


@dataclass
class Naming(Forgetful):
    """The same, by name."""

    remembers = ("last", "steps")


@dataclass
class NamingOne(Forgetful):
    """The same but for one of them."""

    remembers = ("last",)


@pytest.mark.parametrize(
    ("kind", "warned"), [(Forgetful, ["last", "steps"]), (NamingOne, ["steps"]), (Remembering, []), (Naming, [])]
)
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


def test_a_provenance_of_a_wrong_shape_does_not_keep_a_run_from_going_on(tmp_path):
    folder = stopped(tiny(), tmp_path, 7)
    origin = read(folder, "provenance.json")
    (folder / "provenance.json").write_text(json.dumps({**origin, "resumed": None}))
    carried_out(tiny(), tmp_path)
    assert status(folder) == "finished"
    assert [part["step"] for part in read(folder, "provenance.json")["resumed"]] == [6]


def test_checkpoints_that_cannot_be_removed_end_no_run(tmp_path, monkeypatch):
    def stale(self):
        raise OSError(errno.ESTALE, "Stale file handle")

    monkeypatch.setattr(Checkpoints, "remove", stale)
    (folder,), _ = carried_out(tiny(checkpoint=CheckpointTimes(every_steps=2)), tmp_path)
    assert status(folder) == "finished"


# What is kept and taken up.


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


def test_a_stage_that_does_not_take_its_state_up_is_found_out(tmp_path, monkeypatch):
    config = tiny("algo=disk")
    folder = stopped(config, tmp_path, 7)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Exponential, "load_state_dict", lambda self, state: None)
        _, said = carried_out(config, tmp_path)
    assert said.count("step: not all of it is taken up") == 2
    assert resumed_at(folder) == []


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
