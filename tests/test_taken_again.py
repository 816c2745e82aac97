"""Steps of which something was published are taken again as they were drawn, or not at all."""

import json
import math
import shutil
from contextlib import contextmanager
from dataclasses import asdict, replace

import pytest
import torch
from cli import read, status
from resuming import (
    STEPS,
    DropoutMLP,
    FallingBackMLP,
    carried_out,
    checkpoints,
    flip,
    noted,
    outcome,
    resumed_at,
    run_out_of_memory,
    stopped,
    tiny,
    whole,
    whole_as_patched,
)

from dpbench.config import Job, config_hash
from dpbench.gradients import choice
from dpbench.gradients.choice import Chooser
from dpbench.privacy.gaussian import SEEDED_NOISE
from dpbench.step import PrivateStep
from dpbench.tracking.published import Published
from dpbench.tracking.record import RecordError, RunRecord
from dpbench.training import repeating
from dpbench.training.checkpoint import Checkpoints
from dpbench.training.job_record import fail
from dpbench.training.resume import GLOBAL

CPU = torch.device("cpu")


# Without their checkpoints, or with older ones.


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
    assert note.startswith("device=cpu: metrics of step 6 are published, drawn on NVIDIA A100-SXM4-40GB; on cpu the")
    assert f"the steps after step {step} would be other releases, beyond the run's eps: go on there, take" in note
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
        assert note.startswith("seed=0: metrics of step 6 are published, its noise drawn by another version of dpbench")
    else:
        assert resumed_at(folder) == [6]


@pytest.mark.parametrize(("left", "refused"), [((), True), ((2,), True), ((6,), False)])
@pytest.mark.parametrize("changed", ["micro_batch", "processes", "channels_last"])
def test_published_steps_are_not_taken_again_where_a_model_would_draw_otherwise(tmp_path, left, refused, changed):
    """What augmentation and dropout draw for a sample hangs on which others are with it, and how it lies in memory."""
    folder = with_checkpoints(left, tmp_path)
    before = outcome(folder)
    chosen = {}
    if changed == "micro_batch":
        chosen = {"micro_batch": noted(folder)["micro_batch"] + 1}
    elif changed == "channels_last":
        assert noted(folder)["channels_last"] is False
        chosen = {"channels_last": True}
    else:
        noted(folder, processes=2)
    carried_out(replace(tiny(), **chosen), tmp_path)
    note = RunRecord(tmp_path, config_hash(tiny()), 0).take_refusal()
    if not refused:
        assert note is None
        assert resumed_at(folder) == [6]
        return
    assert "metrics of step 6 are published, computed " in note
    assert f"the steps after step {max(left, default=0)} would be other releases, beyond the run's eps" in note
    typed = [f"{name}={str(value).lower()}: metrics" for name, value in chosen.items()] or ["metrics"]
    assert note.startswith(f"{typed[0]} of step 6 are published, computed ")
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
        {"channels_last": 1},
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


def test_a_run_that_goes_on_has_the_micro_batch_of_its_checkpoint(tmp_path, monkeypatch):
    """Behind all that was seen, too: it would draw otherwise than the run that was never stopped."""
    folder = with_checkpoints((6,), tmp_path)
    found = noted(folder)["micro_batch"]
    monkeypatch.setattr("dpbench.training.assemble.fitting_micro_batch", lambda *_: found + 1)
    carried_out(tiny(), tmp_path)
    assert resumed_at(folder) == [6]
    origin = read(folder, "provenance.json")
    assert origin["micro_batch"] == found
    assert origin["resumed"][-1].get("micro_batch", found) == found


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
    drawn |= {
        "micro_batch": micro_batch,
        "channels_last": False,
        "processes": 1,
        "at_once": micro_batch,
        "strategies": strategies,
        "since": 0,
    }
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


def test_what_is_seen_of_a_forced_run_is_noted_though_more_was_seen_of_an_earlier_attempt(tmp_path):
    """By this a launcher knows that it must not begin it once more by itself."""
    folder = stopped(tiny(), tmp_path, 7)
    assert noted(folder)["step"] == 6
    stopped(replace(tiny(), force=True), tmp_path, 5)
    assert noted(folder)["step"] == 3


def test_a_run_that_has_finished_tells_itself_what_was_seen_of_it(tmp_path):
    folder = stopped(tiny(), tmp_path, 7)
    assert folder.with_name("0.published").exists()
    carried_out(tiny(), tmp_path)
    assert [path.name for path in folder.parent.iterdir()] == ["0"]


@pytest.mark.parametrize(
    ("changed", "value", "refused"),
    [
        ("device", "NVIDIA A100-SXM4-40GB", True),
        ("device", "cpu, 64 threads", False),
        ("channels_last", True, True),
        ("seeded_noise", SEEDED_NOISE - 1, True),
    ],
)
def test_a_finished_record_that_is_moved_away_leaves_what_was_seen(tmp_path, changed, value, refused):
    (folder,), _ = carried_out(tiny(), tmp_path)
    origin = read(folder, "provenance.json")
    (folder / "provenance.json").write_text(json.dumps({**origin, changed: value}))
    (folder / "metrics.jsonl").unlink()
    _, said = carried_out(tiny(), tmp_path)
    assert "its record is damaged" in said
    refusal = RunRecord(tmp_path, config_hash(tiny()), 0).take_refusal()
    assert (refusal is not None) == refused
    if refused:
        assert refusal.startswith(f"{changed}=") or changed == "seeded_noise"
        assert "metrics of step 10 are published, " in refusal
        assert "the steps after step 0 would be other releases" in refusal
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
    assert f"with {seen['micro_batch']} at a time, the steps after step {step} would be other releases" in note
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
    assert f"at a time step {at + 1} is another release, beyond the run's eps" in reason
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


@pytest.mark.parametrize("eps", ["1000", "inf"])
def test_on_a_gpu_a_checkpoint_comes_before_what_a_private_run_publishes(eps, tmp_path, monkeypatch):
    """Some sums have no fixed order there, as a CPU's, which this runs on, have; so the numbers are the same."""
    config = tiny(f"eps={eps}", *(["privacy.noise_multiplier=null"] if eps == "inf" else []))
    monkeypatch.setattr(repeating, "_in_fixed_order", lambda parts: False)
    folder = stopped(config, tmp_path, 8, every=None)
    assert checkpoints(folder) == ([] if eps == "inf" else ["checkpoint-00000003.pt", "checkpoint-00000006.pt"])
    carried_out(config, tmp_path)
    assert resumed_at(folder) == ([] if eps == "inf" else [6])
    assert outcome(folder) == whole(config, tmp_path)


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
    seen = {"damaged": "step 10", "unreadable note": "this run"}.get(loss, "step 6")
    assert f"metrics of {seen} are published" in refusal(tmp_path)
