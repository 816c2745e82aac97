"""A run in two processes that was stopped and goes on is the run that was never stopped, bit for bit."""

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cli import environment, raise_after, read, status
from resuming import (
    LONGER,
    SLOWLY,
    STEPS,
    DropoutMLP,
    FallingBackMLP,
    carried_out,
    checkpoints,
    flip,
    kill_at,
    noted,
    outcome,
    resumed_at,
    run_out_of_memory,
    signalled,
    stopped,
    tiny,
)
from team_resuming import Prepare, trained_together

from dpbench.config import RunConfig
from dpbench.config.schema import CheckpointTimes
from dpbench.tracking.damage import note_what_is_shown
from dpbench.tracking.published import Published
from dpbench.training.checkpoint import Checkpoints, packed, unpacked
from dpbench.training.interruption import Interruption, Occasion
from dpbench.training.resume import Training
from dpbench.training.team import Team

CPU = torch.device("cpu")
EVERY = CheckpointTimes(every_steps=2)
NONE = CheckpointTimes(every_seconds=None)


def full_in_parts() -> RunConfig:
    """Each process has augmentation, dropout and moments of its own; thresholds and averages they share."""
    drawn = ("augmentation=crop_flip", "augmentation.copies=1")
    in_parts = ("filter=lp3", "optim=sgd", "optim.momentum=0.9", "shard_states=true")
    return replace(tiny("algo=dcsgd_e", "averaging=exponential", *drawn, *in_parts), model=DropoutMLP())


@pytest.fixture(scope="module")
def of_full(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return undisturbed(full_in_parts(), tmp_path_factory.mktemp("full"))


def undisturbed(config: RunConfig, results: Path) -> dict[str, Any]:
    came = trained_together(config, results / "whole")
    assert (status(came.folder), came.codes) == ("finished", [0, 0]), came.said
    return outcome(came.folder)


def stop(at: int, rank: int = 1) -> Prepare:
    """One process raises an error in the step after so many."""
    return lambda patch, own: raise_after(patch, at, RuntimeError("stopped")) if own == rank else None


def signals(at: int, *ranks: int, which: signal.Signals = signal.SIGTERM) -> Prepare:
    """Processes are told to end within the step after so many."""
    return lambda patch, own: signalled(patch, at, which) if own in ranks else None


def kill(at: int, rank: int) -> Prepare:
    """One process is killed when it comes to so many points."""
    return lambda _, own: kill_at(at) if own == rank else None


def halted(config: RunConfig, results: Path, at: int, every: CheckpointTimes = EVERY) -> Path:
    came = trained_together(config, results, stop(at), checkpoint=every)
    assert read(came.folder, "status.json")["reason"] == "RankError: in process 1 of 2: RuntimeError: stopped"
    return came.folder


def test_all_processes_end_after_the_same_step_and_go_on_from_there(of_full, tmp_path):
    """Told by a signal that reaches process 1 alone; then both."""
    came = trained_together(full_in_parts(), tmp_path, signals(3, 1), checkpoint=NONE)
    assert came.codes == [143, 0]
    assert read(came.folder, "status.json") == {"status": "interrupted", "reason": "by SIGTERM"}
    assert checkpoints(came.folder) == ["checkpoint-00000004.pt"]
    came = trained_together(full_in_parts(), tmp_path, signals(6, 0, 1, which=signal.SIGINT), checkpoint=NONE)
    assert came.codes == [130, 0]
    assert read(came.folder, "status.json") == {"status": "interrupted", "reason": "by the user"}
    assert checkpoints(came.folder) == ["checkpoint-00000004.pt", "checkpoint-00000007.pt"]
    came = trained_together(full_in_parts(), tmp_path)
    assert resumed_at(came.folder) == [4, 7]
    assert f"goes on after step 7 of {STEPS}" in came.said
    assert checkpoints(came.folder) == []
    assert outcome(came.folder) == of_full
    assert [len(part["ranks"]) for part in read(came.folder, "provenance.json")["resumed"]] == [2, 2]


def without(part: str) -> Prepare:
    """Process 1 goes on without what the checkpoint has of it."""

    def prepare(patch: pytest.MonkeyPatch, rank: int) -> None:
        load, begun = Training.load_state_dict, {}

        def forget(self: Training, state: Any) -> None:
            begun.update(self.own_state())
            load(self, {**state, **({} if part == "streams of the model" else {part: begun[part]})})

        if rank == 1:
            patch.setattr(Training, "load_state_dict", forget)
            if part == "streams of the model":
                patch.setattr(Training, "load_global_streams", lambda self, state: None)

    return prepare


@pytest.mark.slow
@pytest.mark.parametrize("part", ["streams of the model", "stream of augmentation"])
def test_a_process_that_forgets_what_is_its_own_makes_another_run(part, of_full, tmp_path):
    folder = halted(full_in_parts(), tmp_path, 7)
    trained_together(full_in_parts(), tmp_path, without(part))
    assert resumed_at(folder) == [6]
    assert outcome(folder) != of_full


def of_other_code_in_process_1(folder: Path) -> None:
    """What process 1 has of its own in the last checkpoint does not fit; the file is whole."""
    there = Checkpoints(folder)
    content = there.read(6, CPU)
    (part,) = content["others"]
    own = unpacked(part.numpy().data, CPU)
    own["training"]["step"]["filter"] = {"momentum": torch.zeros(3)}
    content["others"] = [torch.frombuffer(packed(own), dtype=torch.uint8)]
    there.write(6, content)


def damaged(folder: Path) -> None:
    flip(folder / "checkpoint-00000006.pt")


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (of_other_code_in_process_1, "does not fit this code, step: .* (process 1 of 2); set aside as"),
        pytest.param(damaged, "is damaged: its checksum differs; set aside as", marks=pytest.mark.slow),
    ],
)
def test_where_one_process_cant_go_on_all_go_on_from_the_checkpoint_before(spoil, why, of_full, tmp_path):
    folder = halted(full_in_parts(), tmp_path, 7)
    assert checkpoints(folder) == ["checkpoint-00000004.pt", "checkpoint-00000006.pt"]
    spoil(folder)
    came = trained_together(full_in_parts(), tmp_path)
    assert why.partition(" .* ")[0] in came.said
    assert why.rpartition(" .* ")[2] in came.said
    assert came.said.count("set aside") == 1
    assert resumed_at(folder) == [4]
    assert checkpoints(folder) == ["checkpoint-00000006.unusable"]
    assert outcome(folder) == of_full


@pytest.mark.parametrize("team_first", [True, False])
def test_as_many_processes_go_on_as_the_checkpoint_is_of(team_first, tmp_path):
    """What was seen, up to step 6, is drawn again by as many alone."""
    folder = halted(tiny(), tmp_path, 7) if team_first else stopped(tiny(), tmp_path, 7)
    before = outcome(folder)

    def refusal() -> str:
        if team_first:
            carried_out(tiny(), tmp_path)
            return folder.with_name("0.refused").read_text()
        return trained_together(tiny(), tmp_path).refusal or ""

    of_which = "2 processes, from which one process" if team_first else "one process, from which 2 processes"
    sentence = f"metrics of step 6 are published, and the checkpoint of step 6 is of {of_which} can't go on: start as"
    assert refusal().startswith(sentence)
    if team_first:
        said = trained_together(replace(tiny(), shard_states=True), tmp_path).refusal
        assert said is not None
        assert said.startswith("shard_states=true: this run was begun with shard_states=false, with which it can go on")
    assert checkpoints(folder) == ["checkpoint-00000004.pt", "checkpoint-00000006.pt"]
    for path in folder.glob("*.pt"):
        path.unlink()
    assert "the steps after step 0 would be other releases, beyond the run's eps" in refusal()
    assert outcome(folder) == before


def test_a_run_of_which_nothing_was_seen_begins_anew_in_another_number_of_processes(tmp_path):
    folder = stopped(tiny(), tmp_path, 2)
    came = trained_together(tiny(), tmp_path)
    assert "the checkpoint of step 2 is of one process, from which 2 processes can't go on; set aside as" in came.said
    assert (status(folder), resumed_at(folder)) == ("finished", [])
    assert checkpoints(folder) == ["checkpoint-00000002.unusable"]


def test_what_was_seen_is_computed_again_as_each_process_did(tmp_path):
    """There is no checkpoint, and metrics were seen up to step 6."""
    folder = halted(tiny(), tmp_path, 7, NONE)
    note = noted(folder)
    (other,) = note["others"]
    assert other == {name: note[name] for name in ("device", "micro_batch", "at_once", "strategies")}
    noted(folder, others=[{**other, "at_once": 5}])
    came = trained_together(tiny(), tmp_path)
    assert came.refusal is not None
    assert came.refusal.startswith("in process 1 of 2: micro_batch=null: metrics of step 6 are published, computed 5 ")
    noted(folder, others=[{**other, "micro_batch": 7, "at_once": 7}])
    trained_together(tiny(), tmp_path)
    assert status(folder) == "finished"
    ranks = read(folder, "provenance.json")["ranks"]
    assert [rank["micro_batch"] for rank in ranks] == [note["micro_batch"], 7]


@pytest.mark.filterwarnings("ignore:falling back to materialised")
def test_each_process_goes_on_by_the_way_that_it_took(tmp_path):
    """Process 0 fell back in step 5, and process 1 did not."""
    config = replace(tiny(), model=FallingBackMLP(most=85))
    want = undisturbed(config, tmp_path)
    folder = halted(config, tmp_path, 7)
    content = Checkpoints(folder).read(6, CPU)
    (part,) = content["others"]
    states = content["training"], unpacked(part.numpy().data, CPU)["training"]
    assert ["by_plain_autograd" in state["step"]["gradients"]["way"] for state in states] == [True, False]
    trained_together(config, tmp_path)
    assert resumed_at(folder) == [6]
    assert outcome(folder) == want


def memory_runs_out(at: int) -> Prepare:
    """Memory runs out in process 1, in the step after so many."""
    return lambda patch, rank: run_out_of_memory(patch, at) if rank == 1 else None


def both(*prepares: Prepare) -> Prepare:
    return lambda patch, rank: [prepare(patch, rank) for prepare in prepares]


def test_the_step_in_which_memory_ran_out_in_one_process_has_a_checkpoint_to_go_on_from(tmp_path):
    config = replace(tiny(), model=DropoutMLP())
    came = trained_together(config, tmp_path / "whole", memory_runs_out(4))
    want = outcome(came.folder)
    origin = read(came.folder, "provenance.json")
    first, second = (rank["at_once"] for rank in origin["ranks"])
    assert second < 100 < first == origin["micro_batch"]
    came = trained_together(config, tmp_path, both(memory_runs_out(4), stop(7, rank=0)), checkpoint=NONE)
    assert checkpoints(came.folder) == ["checkpoint-00000005.pt"]
    assert [noted(came.folder)["at_once"], noted(came.folder)["others"][0]["at_once"]] == [first, second]
    (kept,) = came.folder.glob("*.pt")
    content = kept.read_bytes()
    kept.unlink()
    refusal = trained_together(config, tmp_path).refusal
    assert refusal is not None
    assert f"process 1 of 2: micro_batch=null: metrics of step 6 are published, computed {second} samples" in refusal
    kept.write_bytes(content)
    trained_together(config, tmp_path)
    assert resumed_at(came.folder) == [5]
    assert outcome(came.folder) == want


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("own", "why"),
    [
        (lambda _: {"step": {1, 2}}, "training.step is a set; only tensors and plain"),
        (lambda _: torch.empty(10**15), ".*can't allocate memory: you tried"),  # as torch says it on a CPU
    ],
    ids=["set", "memory"],
)
def test_a_process_that_has_no_part_for_a_checkpoint_stops_no_run(own, why, rank, tmp_path):
    def unkept(patch: pytest.MonkeyPatch, each: int) -> None:
        if each == rank:
            patch.setattr(Training, "own_state" if rank else "state_dict", own)

    came = trained_together(tiny(), tmp_path, unkept, checkpoint=CheckpointTimes(every_steps=9))
    of_rank = "" if rank == 0 and "set" in why else f"process {rank} of 2: "
    assert re.search(f"no checkpoint of step 9, the run goes on: {of_rank}{why}", came.said)
    assert (status(came.folder), came.codes) == ("finished", [0, 0])


def test_a_record_of_several_processes_that_is_moved_away_leaves_how_each_computed_it(record):
    origin = read(record, "provenance.json")
    ranks = [{"device": f"cpu, {at_once} threads", "micro_batch": 8, "at_once": at_once} for at_once in (8, 4, 2)]
    changed = {**origin, "processes": 3, "micro_batch": 8, "at_once": 8, "ranks": ranks}
    (record / "provenance.json").write_text(json.dumps(changed))
    note_what_is_shown(record)
    seen = Published.read(record)
    assert (seen.processes, seen.at_once, seen.of(0)) == (3, 8, seen)
    others = [seen.of(rank) for rank in (1, 2)]
    assert [other.at_once for other in others] == [4, 2]
    assert {(other.device, other.micro_batch, other.since) for other in others} == {("cpu", 8, 0)}


# Signals, as all processes hear of them.


def test_all_do_what_any_wants():
    nothing, write, stop = Occasion(), Occasion(write=True), Occasion(stop="by SIGTERM")
    for wishes, want in (
        ([nothing, nothing], nothing),
        ([nothing, write], write),
        ([nothing, stop, Occasion(True, "by the user")], Occasion(True, "by SIGTERM")),
        ([write, Occasion(stop="by its cluster")], Occasion(True, "by its cluster")),
    ):
        assert Occasion.of_all([wish.as_number() for wish in wishes]) == want


class Two(Team):
    size = 2


def test_one_of_several_processes_ends_after_its_step_however_often_it_is_told_to(capfd):
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        interruption = Interruption(Two())
        with interruption:
            for _ in range(2):
                os.kill(os.getpid(), signal.SIGINT)
        assert interruption.reason == "by the user"
        with pytest.raises(KeyboardInterrupt):
            interruption.raise_noted()
    finally:
        signal.signal(signal.SIGINT, before)
    assert capfd.readouterr().err == "\ninterrupted: ends after this step, with a checkpoint\n"


def test_sigterm_means_nothing_to_who_has_yet_to_say_that_another_process_died():
    before = signal.getsignal(signal.SIGTERM)
    try:
        interruption = Interruption(Two())
        with interruption:
            os.kill(os.getpid(), signal.SIGTERM)
            assert interruption.reason == "by SIGTERM"
            interruption.outlive_the_others()
        interruption.raise_noted()
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, before)


# Kills.

KILLED = {
    "DP-SGD": ("algo=dpsgd",),
    "DiSK in parts": ("algo=disk", "shard_states=true"),
    "DC-SGD-E": ("algo=dcsgd_e",),
    "filtered Adam in parts": ("algo=lp_dpadam", "shard_states=true"),
    "DP-FTRL": ("algo=dp_ftrl",),
}


@pytest.mark.parametrize(
    "name", [name if name == "DiSK in parts" else pytest.param(name, marks=pytest.mark.slow) for name in KILLED]
)
def test_a_run_survives_kills_of_its_processes(name, tmp_path):
    config, draws = tiny(*KILLED[name]), random.Random(name)
    want = undisturbed(config, tmp_path)
    for rank in (1, 0):
        points = draws.randint(15, 25) if rank == 0 else draws.randint(9, 15)
        came = trained_together(config, tmp_path, kill(points, rank), checkpoint=EVERY)
        assert came.codes[rank] == -signal.SIGKILL
        reason = "RankError: another process of the run has ended or does not answer"
        assert rank == 0 or read(came.folder, "status.json")["reason"] == reason
    came = trained_together(config, tmp_path)
    assert len(resumed_at(came.folder)) >= 1
    assert outcome(came.folder) == want


@pytest.mark.slow
def test_three_processes_go_on_too(tmp_path):
    config = full_in_parts()
    came = trained_together(config, tmp_path / "whole", size=3)
    want = outcome(came.folder)
    came = trained_together(config, tmp_path, signals(4, 2), size=3, checkpoint=NONE)
    assert checkpoints(came.folder) == ["checkpoint-00000005.pt"]
    came = trained_together(config, tmp_path, size=3)
    assert (resumed_at(came.folder), came.codes) == ([5], [0, 0, 0])
    assert outcome(came.folder) == want


@pytest.mark.slow
def test_with_secure_noise_several_processes_go_on_behind_what_was_published(tmp_path):
    secure = tiny("algo=dcsgd_e", "privacy.secure_noise=true", "shard_states=true")
    folder = halted(secure, tmp_path, 8, NONE)
    assert checkpoints(folder) == ["checkpoint-00000003.pt", "checkpoint-00000006.pt"]
    trained_together(secure, tmp_path)
    assert (status(folder), resumed_at(folder)) == ("finished", [6])
    assert read(folder, "ledger.json")["releases"][0]["count"] == STEPS


@pytest.mark.slow
def test_a_run_that_diverges_in_several_processes_notes_how_it_was_computed_and_keeps_no_checkpoint(tmp_path):
    config = tiny("algo=dpsgd", "optim.lr=1e38")
    came = trained_together(config, tmp_path, checkpoint=CheckpointTimes(every_steps=1))
    assert (status(came.folder), came.codes) == ("diverged", [0, 0])
    assert checkpoints(came.folder) == []
    assert len(noted(came.folder)["others"]) == 1


IN_PARTS = (*LONGER, "shard_states=true", "checkpoint.every_steps=3")


def begun(folder: Path) -> subprocess.Popen[str]:
    """A command of two processes."""
    (folder / "slowly.py").write_text(SLOWLY)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    return subprocess.Popen(
        [*launcher, str(folder / "slowly.py"), f"results_dir={folder}", *IN_PARTS],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def finished(folder: Path) -> tuple[str, Path]:
    folder.mkdir(exist_ok=True)
    process = begun(folder)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    (record,) = folder.glob("runs/*/0")
    return out, record


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT])
def test_a_command_of_torchrun_that_is_told_to_end_goes_on(how, tmp_path):
    process = begun(tmp_path)
    end = time.monotonic() + 120
    while not list(tmp_path.glob("runs/*/*/checkpoint-*.pt")):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end
        time.sleep(0.01)
    process.send_signal(how)
    _, err = process.communicate(timeout=60)
    assert "interrupted; finished work is kept, and the same command goes on from there\n" in err
    assert err.count("interrupted: ends after this step, with a checkpoint\n") == (how == signal.SIGINT)
    (record,) = tmp_path.glob("runs/*/0")
    reason = "by SIGTERM" if how == signal.SIGTERM else "by the user"
    assert read(record, "status.json") == {"status": "interrupted", "reason": reason}
    assert checkpoints(record)[-1] == f"checkpoint-{read(record, 'summary.json')['steps']:08d}.pt"
    out, record = finished(tmp_path)
    assert "goes on after step" in out
    assert outcome(record) == outcome(finished(tmp_path / "whole")[1])
