"""Whole runs of several seeds in one process: their records, what ends one of them, and the command line."""

import re
import weakref
from dataclasses import dataclass, replace
from unittest.mock import Mock

import pytest
import torch
import yaml
from cli import SMALL, STEPS, hash_of, only_record, read, read_metrics, records, run, snapshot, status
from resuming import carried_out, outcome, tiny
from safetensors.torch import load
from small_models import PassCounter

from dpbench.config import compose_jobs, config_hash
from dpbench.errors import UserError
from dpbench.garbage import uncollected
from dpbench.gradients import FusedGradients, Request
from dpbench.launch import execute
from dpbench.launch.starts import fuses
from dpbench.models import Linear
from dpbench.randomness import stream_seed
from dpbench.step import PrivateStep
from dpbench.training import fusing, preparing

FUSED = ("-m", "seed=0,1,2", "fuse_seeds=true")
APART = ("-m", "seed=0,1,2", "fuse_seeds=false")
RUNS = {
    "disk": ("algo=disk", "augmentation=crop_flip", "augmentation.copies=2"),
    "rarely a sample": ("clip.scope=per_layer", "model=mlp", "optim=adam", "batch_size=1", "epochs=0.01"),
    "half": ("precision=bfloat16", "model=mlp", "eps=inf"),
}
HERE = re.compile(r"seconds|fuse_seeds|results_dir|tracker.group")


def close(got, want, path=""):
    """Equal records: numbers to rounding, all else exactly."""
    if HERE.search(path):
        return
    assert type(got) is type(want), path
    if isinstance(got, dict):
        assert got.keys() == want.keys(), path
        for key in got:
            close(got[key], want[key], f"{path}.{key}")
    elif isinstance(got, float):
        tolerance = 1e-2 if "bfloat16" in path else 1e-5
        assert got == pytest.approx(want, rel=tolerance, abs=tolerance, nan_ok=True), path
    elif isinstance(got, list):
        for i, pair in enumerate(zip(got, want, strict=True)):
            close(*pair, f"{path}.{i}")
    else:
        assert got == want, path


@pytest.mark.parametrize("name", [*list(RUNS)[:2], pytest.param("half", marks=pytest.mark.slow)])
def test_records_of_seeds_in_one_process_are_those_of_separate_runs(name, tmp_path):
    fused, apart = (run(tmp_path / str(i), *how, *RUNS[name]) for i, how in enumerate((FUSED, APART)))
    assert (fused.code, fused.err, apart.code) == (0, "", 0)
    assert "3 seeds at once (fuse_seeds=true)" in fused.out
    pairs = list(zip(records(fused.results), records(apart.results), strict=True))
    assert len(pairs) == 3
    for got, want in pairs:
        assert got.relative_to(fused.results) == want.relative_to(apart.results)
        assert {file.name for file in got.iterdir()} == {file.name for file in want.iterdir()}
        assert read(got, "ledger.json") == read(want, "ledger.json")
        assert read(got, "status.json") == read(want, "status.json") == {"status": "finished"}
        mark = "bfloat16" if name == "half" else ""
        close(read_metrics(got), read_metrics(want), mark)
        close(read(got, "summary.json"), read(want, "summary.json"), mark)
        settings = [yaml.safe_load((record / "config.yaml").read_text()) for record in (got, want)]
        for each in settings:
            each["overrides"] = [line for line in each["overrides"] if not HERE.search(line)]
        close(*settings)
        origins = [read(record, "provenance.json") for record in (got, want)]
        assert [origin.pop("seeds_at_once") for origin in origins] == [3, 1]
        assert origins[0].keys() == origins[1].keys()


def seed_of(step):
    """The seed that a step belongs to, told by its noise."""
    return {stream_seed(s, "noise", hash_of(*SMALL)) % 2**64: s for s in range(3)}[
        step.noise_source.generator.initial_seed()
    ]


@pytest.fixture(scope="module")
def apart(tmp_path_factory):
    return run(tmp_path_factory.mktemp("apart"), *APART)


def after_steps(monkeypatch, steps, seed, action):
    original = PrivateStep.take

    def take(self, batch):
        if self.steps == steps and seed_of(self) == seed:
            action(self)
        return original(self, batch)

    monkeypatch.setattr(PrivateStep, "take", take)


def by_number(outcome):
    return {int(record.name): record for record in records(outcome.results)}


def assert_others_as_ever(outcome, apart, seed):
    for other in {0, 1, 2} - {seed}:
        assert status(by_number(outcome)[other]) == "finished"
        close(read_metrics(by_number(outcome)[other]), read_metrics(by_number(apart)[other]))


@pytest.mark.parametrize("seed", [0, 1])
def test_a_seed_that_diverges_leaves_the_others(tmp_path, monkeypatch, apart, seed):
    after_steps(monkeypatch, 1, seed, lambda step: step.gradients.flat.vector.fill_(float("nan")))
    outcome = run(tmp_path, *FUSED)
    assert outcome.code == 1
    assert read(by_number(outcome)[seed], "status.json") == {
        "status": "diverged",
        "reason": "a parameter is no finite number after 2 steps",
    }
    assert_others_as_ever(outcome, apart, seed)


def test_a_seed_that_fails_leaves_the_others(tmp_path, monkeypatch, apart):
    def fail(step):
        raise RuntimeError("broken on purpose")

    after_steps(monkeypatch, 2, 1, fail)
    outcome = run(tmp_path, *FUSED)
    assert outcome.code == 1
    failed = read(by_number(outcome)[1], "status.json")
    assert (failed["status"], failed["reason"]) == ("failed", "RuntimeError: broken on purpose")
    assert read(by_number(outcome)[1], "summary.json")["steps"] == 2
    assert_others_as_ever(outcome, apart, 1)


def test_an_interrupt_in_one_seed_ends_all_with_records_that_say_so(tmp_path, monkeypatch):
    def interrupt(step):
        raise KeyboardInterrupt

    after_steps(monkeypatch, 2, 1, interrupt)
    assert_interrupted(run(tmp_path, *FUSED))


def test_an_interrupt_in_a_shared_pass_ends_all_with_records_that_say_so(tmp_path, monkeypatch):
    raise_in_third_pass(monkeypatch, FusedGradients, "clipped_sums", KeyboardInterrupt)
    assert_interrupted(run(tmp_path, *FUSED))


# As submitit does where the signal of a cluster comes, which is in a pass more often than not.
@pytest.mark.parametrize(
    ("typed", "owner", "name"),
    [(FUSED, FusedGradients, "clipped_sums"), ((), Request, "alone")],
    ids=["shared", "lone"],
)
def test_an_exit_in_a_pass_ends_all_with_records_that_say_so(tmp_path, monkeypatch, typed, owner, name):
    raise_in_third_pass(monkeypatch, owner, name, SystemExit)
    with pytest.raises(SystemExit):
        run(tmp_path, *typed)
    for record in records(tmp_path):
        assert_said(record, "its process was told to end")
    assert len(records(tmp_path)) == (3 if owner is FusedGradients else 1)


def raise_in_third_pass(patch, owner, name, error):
    original, calls = getattr(owner, name), []

    def third(self, *requests):
        calls.append(1)
        if len(calls) == 3:
            raise error
        return original(self, *requests)

    patch.setattr(owner, name, third)


def assert_interrupted(outcome):
    assert outcome.code == 130
    for record in by_number(outcome).values():
        assert_said(record, "by the user")
    assert len(by_number(outcome)) == 3


def assert_said(record, reason):
    assert read(record, "status.json") == {"status": "interrupted", "reason": reason}
    assert read(record, "summary.json")["steps"] in (1, 2)
    assert read(record, "ledger.json")["releases"][0]["count"] == read(record, "summary.json")["steps"]


def test_finished_seeds_are_not_run_again(results_of_a_run):
    record = only_record(results_of_a_run)
    before = snapshot(record)
    outcome = run(results_of_a_run, "-m", "seeds=3", "fuse_seeds=true")
    assert outcome.code == 0
    assert snapshot(record) == before
    assert {n: read(r, "provenance.json")["seeds_at_once"] for n, r in by_number(outcome).items()} == {0: 1, 1: 2, 2: 2}


def count(calls, of):
    return lambda *arguments: (calls.append(1), of(*arguments))[1]


@pytest.mark.parametrize(("share", "at_once"), [(0.5, 2), (2.0, 1)])
def test_by_default_seeds_share_passes_where_that_is_faster(tmp_path, monkeypatch, share, at_once):
    monkeypatch.setattr(fusing, "_share_of_time", lambda *_: share)
    outcome = run(tmp_path, "-m", "seeds=2")
    assert outcome.code == 0
    assert [read(record, "provenance.json")["seeds_at_once"] for record in records(tmp_path)] == [at_once] * 2


def test_the_share_of_time_is_measured_once(monkeypatch, tmp_path):
    monkeypatch.setenv("DPBENCH_CACHE", str(tmp_path / "cache"))
    assert run(tmp_path / "first", "-m", "seeds=2").code == 0
    monkeypatch.setattr(FusedGradients, "clipped_sums", count(calls := [], FusedGradients.clipped_sums))
    assert run(tmp_path / "second", "-m", "seeds=2").code == 0
    assert len(calls) <= STEPS


def test_seeds_whose_passes_take_long_go_one_by_one(tmp_path, monkeypatch):
    monkeypatch.setattr(fusing, "_seconds_of_a_pass", lambda *_: 0.3)
    monkeypatch.setattr(FusedGradients, "objection", lambda *_: pytest.fail("compared"))
    assert run(tmp_path, "-m", "seeds=2").code == 0
    assert [read(record, "provenance.json")["seeds_at_once"] for record in records(tmp_path)] == [1, 1]


def test_runs_that_go_one_by_one_are_made_one_by_one(tmp_path, monkeypatch):
    """What one of them takes of a device's memory is free for the next, and is not counted with it."""
    made: list[weakref.ref] = []
    original = preparing.assemble

    def assemble(*arguments, **named):
        alive.append(sum(one() is not None for one in made))
        found = original(*arguments, **named)
        made.append(weakref.ref(found.model))
        return found

    alive: list[int] = []
    carried_out(tiny(), tmp_path / "first", (0,))  # imports what is left to be imported, which keeps the caller
    monkeypatch.setattr(preparing, "assemble", assemble)
    with uncollected():
        carried_out(tiny(), tmp_path / "apart", (0, 1, 2), fuse_seeds=False)
    assert alive == [0, 0, 0]


@dataclass
class CountingModel(Linear):
    def build(self, data):
        return PassCounter()


def test_what_is_tried_out_before_a_run_leaves_no_trace_in_it(tmp_path):
    """How many samples fit, and whether seeds had better share their passes."""
    config = replace(tiny(), model=CountingModel(), micro_batch=None)
    of_both = [
        [outcome(folder) for folder in carried_out(config, tmp_path / how, (0, 1), fuse_seeds=fuse)[0]]
        for how, fuse in (("tried", "auto"), ("apart", False))
    ]
    assert of_both[0] == of_both[1]
    assert [float(load(each["model.safetensors"])["passes"]) for each in of_both[0]] == [10, 10]


def test_a_model_that_can_not_share_passes_runs_seed_by_seed_and_says_why(tmp_path, monkeypatch):
    monkeypatch.setattr(FusedGradients, "objection", lambda *_: "there is a reason")
    outcome = run(tmp_path, *FUSED)
    assert outcome.code == 0
    assert "seeds run one after the other: there is a reason" in outcome.out
    assert [read(record, "provenance.json")["seeds_at_once"] for record in records(tmp_path)] == [1] * 3


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("no memory"), UserError("unfit"), RuntimeError("broken")], ids=str
)
def test_what_fails_while_sharing_is_tried_out_ends_no_run(tmp_path, monkeypatch, error):
    monkeypatch.setattr(FusedGradients, "objection", Mock(side_effect=error))
    outcome = run(tmp_path, *FUSED)
    assert outcome.code == 0
    assert f"seeds run one after the other: {type(error).__name__}: {error}" in outcome.out
    assert [read(record, "provenance.json")["seeds_at_once"] for record in records(tmp_path)] == [1] * 3


def test_seeds_share_neither_models_nor_noise_nor_ledgers(tmp_path, monkeypatch):
    seen = []
    original = execute.fused_gradients

    def fused_gradients(config, parts, splits):
        seen.extend(parts)
        return original(config, parts, splits)

    monkeypatch.setattr(execute, "fused_gradients", fused_gradients)
    assert run(tmp_path, *FUSED).code == 0
    assert len({id(parts.model) for parts in seen}) == 3
    assert len({parts.step.noise_source.generator.initial_seed() for parts in seen}) == 3
    assert len({id(parts.step.ledger) for parts in seen}) == 3


def test_what_a_model_draws_differs_between_runs_of_one_seed(tmp_path, monkeypatch):
    """Two runs are released, and eps of both adds up only where their masks are independent, too."""
    original, seen = execute._carry_out, []

    def watched(execution, *others):
        seen.append((execution.config.eps, torch.initial_seed()))
        original(execution, *others)

    monkeypatch.setattr(execute, "_carry_out", watched)
    assert run(tmp_path, "eps=4,8", "-m").code == 0
    assert run(tmp_path, "eps=4", "force=true").code == 0
    (one, first), (two, second), (again, third) = seen
    assert (one, two, again) == (4, 8, 4)
    assert first == third != second


def test_global_generators_are_left_as_they_were(tmp_path):
    before = torch.get_rng_state()
    assert run(tmp_path, *FUSED).code == 0
    assert torch.equal(torch.get_rng_state(), before)


def test_each_group_of_a_sweep_is_one_job(tmp_path):
    outcome = run(tmp_path, "-m", "eps=8,inf", "seeds=2", "fuse_seeds=true")
    assert outcome.code == 0
    assert outcome.out.count("2 seeds at once") == 2
    table = next(tmp_path.glob("sweeps/*/table.csv")).read_text()
    assert re.findall(r"^eps=\w+ seed=\d", table, re.MULTILINE) == [
        "eps=8 seed=0",
        "eps=8 seed=1",
        "eps=inf seed=0",
        "eps=inf seed=1",
    ]
    assert len(records(tmp_path)) == 4


# The command line.


def test_seeds_is_short_for_a_sweep(tmp_path):
    short, long = (run(tmp_path, "-m", typed, "plan=true") for typed in ("seeds=3", "seed=0,1,2"))
    assert short.code == 0
    strip = re.compile(r"\d+ s")
    assert strip.sub("", short.out) == strip.sub("", long.out)


@pytest.mark.parametrize("typed", ["seeds=0", "seeds=-1", "seeds=2.5", "seeds=[1,2]", "seeds=many", "seeds=100001"])
def test_seeds_is_a_number(tmp_path, typed):
    outcome = run(tmp_path, "-m", typed)
    assert outcome.code == 2
    assert outcome.error() == f"{typed}: expected a whole number from 1 to 100,000; name other seeds by seed=3,5,8"


def test_seeds_and_seed_exclude_each_other(tmp_path):
    outcome = run(tmp_path, "-m", "seeds=2", "seed=7")
    assert (outcome.code, outcome.error()[:5]) == (2, "seeds")


def test_of_two_seeds_without_seeds_the_last_counts_as_of_any_setting(tmp_path):
    outcome = run(tmp_path, "seed=7", "seed=8", "plan=true")
    assert (outcome.code, outcome.err) == (0, "")
    assert re.search(r" 8 +\d", outcome.out)


def test_seeds_without_the_flag_of_a_sweep_is_refused(tmp_path):
    outcome = run(tmp_path, "seeds=2")
    assert outcome.code == 2
    assert "add -m" in outcome.error()


@pytest.mark.parametrize("typed", ["maybe", "1", "0"])
def test_fuse_seeds_is_one_of_three(tmp_path, typed):
    outcome = run(tmp_path, "-m", "seeds=2", f"fuse_seeds={typed}", "plan=true")
    assert (outcome.code, outcome.error()) == (2, f"fuse_seeds={typed}: expected auto, true or false")


def test_how_seeds_are_carried_out_is_no_part_of_a_run():
    hashes = {hash_of(*SMALL), config_hash(compose_jobs([*SMALL, "fuse_seeds=true"], multirun=False)[0].config)}
    assert len(hashes) == 1


@pytest.mark.parametrize(
    ("typed", "one_job"),
    [
        ([], True),
        (["hydra/launcher=basic"], True),
        (["hydra/launcher=joblib"], False),
        (["hydra/launcher=joblib", "fuse_seeds=true"], True),
        (["fuse_seeds=false"], False),
    ],
)
def test_launchers_of_several_processes_keep_seeds_apart_unless_told(typed, one_job):
    own = [line for line in typed if not line.startswith("hydra")]
    jobs = compose_jobs(["seed=4,2", *own], multirun=True)
    assert fuses(jobs, [line for line in typed if line.startswith("hydra")]) == one_job
