"""One run in several processes: what a team trains is compared with one process, and each rule of it is broken."""

import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cli import ROOT, SMALL, Outcome, environment, only_record, read, read_metrics, records, run
from helpers import composed
from scipy import stats
from team_worker import (
    APART,
    BATCH,
    CREWS,
    EQUAL,
    FAILING,
    MULTIPLIER,
    MUTANTS,
    NORM,
    OF_THREE,
    SHARDED,
    SWEPT,
    write_faulty,
)

from dpbench.config import compose_jobs, config_hash
from dpbench.data import Shard, Split
from dpbench.errors import UserError
from dpbench.privacy.gaussian import SEEDED_NOISE
from dpbench.tracking.published import Published
from dpbench.training.distributed import TorchTeam

Found = dict[str, Any]
# Relative to the largest weight: float32 sums in another order.
TOLERANCE = 1e-6
SCORES = ("bleu", "rouge_l", "meteor", "meteor_without_synonyms", "nist", "cider")
ASKED_FOR = ("DP-SGD", "DiSK", "DP-PMLF", "DC-SGD-E")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """By crew and rank, what each process found of each case; and the folder of a crew that was given a command."""
    folder = tmp_path_factory.mktemp("teams")
    worker = Path(__file__).with_name("team_worker.py")
    patience = max(crew.patience for crew in CREWS.values())
    done = subprocess.run(
        [sys.executable, worker, folder],
        env=environment(ROOT / "tests"),
        capture_output=True,
        text=True,
        timeout=20 * patience.total_seconds(),
    )
    assert done.returncode == 0, done.stderr
    found = {file.stem: torch.load(file, weights_only=False) for file in folder.glob("*.pt")}
    return {**found, "folder": folder}


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).abs().max() / b.abs().max().clamp(min=1))


# Equality with one process.


@pytest.mark.parametrize(
    ("crew", "name"), [*(("two", name) for name in EQUAL), *(("three", name) for name in OF_THREE)]
)
def test_a_team_trains_what_one_process_trains(found: Found, crew: str, name: str) -> None:
    alone, *team = [found["one-0"][name], *(found[f"{crew}-{rank}"][name] for rank in range(CREWS[crew].size))]
    for member in team:
        assert member["error"] == alone["error"]
        assert member["thresholds"] == pytest.approx(alone["thresholds"], rel=TOLERANCE)
        assert member["ledger"] == alone["ledger"]
        assert len(member["metrics"]) == len(alone["metrics"]) > 0
        for got, want in zip(member["metrics"], alone["metrics"], strict=True):
            if member is not team[0]:  # rank 0 alone scores what all have answered
                want = {name: value for name, value in want.items() if name not in SCORES}
            assert without_seconds(got) == pytest.approx(without_seconds(want), rel=TOLERANCE, nan_ok=True)
    if alone["error"] is None:
        for member in team:
            assert distance(member["weights"], alone["weights"]) < TOLERANCE
            assert distance(member["gradients"], alone["gradients"]) < TOLERANCE


def without_seconds(metrics: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if name != "seconds"}


@pytest.mark.parametrize("name", [*EQUAL, *APART])
def test_all_processes_have_the_same_bits(found: Found, name: str) -> None:
    first, second = (found[f"two-{rank}"][name] for rank in range(2))
    assert torch.equal(first["weights"].view(torch.int32), second["weights"].view(torch.int32))
    assert first["thresholds"] == second["thresholds"]
    assert first["ledger"] == second["ledger"]


def test_the_cases_are_what_they_are_called(found: Found) -> None:
    of_team, of_one = found["two-0"], found["one-0"]
    assert all(min(counts) > 0 for name in ASKED_FOR for counts in of_team[name]["batches"])
    assert len({tuple(counts) for counts in found["three-0"]["DP-SGD"]["batches"]}) > 1
    shares = of_team["empty shares"]["batches"]
    assert {(a > 0, b > 0) for a, b in shares} == {(False, False), (True, False), (False, True), (True, True)}
    assert set(map(tuple, of_team["no samples"]["batches"])) == {(0, 0)}
    assert of_one["diverged"]["error"].startswith("DivergedError: the test loss is")
    assert len(set(of_one["DC-SGD-E"]["thresholds"])) > 3
    assert len(set(of_one["adaptive quantiles"]["thresholds"])) > 3
    broken, whole = of_one["broken samples in process 1"], of_one["DC-SGD-E"]
    assert distance(broken["weights"], whole["weights"]) > 1e-3
    assert broken["batches"] == whole["batches"]


def test_dropout_and_augmentation_differ_between_processes(found: Found) -> None:
    first, second = (found[f"two-{rank}"]["augmented"] for rank in range(2))
    assert first["error"] is None
    assert first["draw"] != second["draw"]
    assert first["draw"] == found["one-0"]["augmented"]["draw"] != found["one-0"]["DP-SGD"]["draw"]


# States in parts.


@pytest.mark.parametrize("name", SHARDED)
@pytest.mark.parametrize("crew", ["two", "three"])
def test_states_in_parts_make_the_same_run(found: Found, crew: str, name: str) -> None:
    members = [found[f"{crew}-{rank}"][f"{name} in parts"] for rank in range(CREWS[crew].size)]
    whole = found["one-0"][name]
    for member in members:
        assert member["error"] is None
        assert distance(member["weights"], whole["weights"]) < TOLERANCE
        assert member["ledger"] == whole["ledger"]
        assert torch.equal(member["weights"], members[0]["weights"])
    if crew == "two":
        assert torch.equal(members[0]["weights"], found["two-0"][name]["weights"])
    # Each process remembers its part; the count of steps, where there is one, is everybody's.
    kept = [member["state"] for member in members]
    assert whole["state"] == 0 or max(kept) < 0.6 * whole["state"]
    assert sum(kept) >= whole["state"] * (1 - 1e-2)


def test_parts_of_what_works_on_the_whole_are_refused() -> None:
    for settings in (["algo=dpgalore"], ["algo=doppler", "filter=online_fir"]):
        with pytest.raises(UserError, match=r"shard_states=true: .* does not work element by element"):
            compose_jobs([*settings, "shard_states=true"], multirun=False)


def test_how_processes_share_is_no_part_of_a_run() -> None:
    hashes = {config_hash(composed(*extra)) for extra in ((), ("shard_states=true",))}
    assert len(hashes) == 1


# Noise.


def variance(case: dict[str, Any]) -> float:
    """Of g_t over steps and coordinates, in units of what the step promises where no sample takes part."""
    return float(case["gradients"].double().var(correction=0)) / (MULTIPLIER * NORM / BATCH) ** 2


def in_bounds(case: dict[str, Any]) -> bool:
    """Whether the variance is what it should be, which happens by chance in all but one of a million cases if it is."""
    count = case["gradients"].numel()
    low, high = stats.chi2.ppf([5e-7, 1 - 5e-7], count) / count
    return bool(low < variance(case) < high)


@pytest.mark.parametrize("name", ["no samples", "secure noise alone"])
def test_noise_is_added_once(found: Found, name: str) -> None:
    assert found["two-0"][name]["gradients"].numel() > 25_000
    assert in_bounds(found["two-0"][name])
    assert in_bounds(found["one-0"]["no samples"])


def test_noise_of_each_process_would_be_noticed(found: Found) -> None:
    broken = found["two-0"]["noise by each"]
    assert not in_bounds(broken)
    assert variance(broken) == pytest.approx(2, rel=0.05)


# Mutants.


@pytest.mark.parametrize(
    ("name", "of"),
    [
        ("mean of means", "DP-SGD"),
        ("sampling apart, unnoticed", "DP-SGD"),
        ("all rows everywhere", "DP-SGD"),
        ("own norms, unnoticed", "DC-SGD-E"),
    ],
)
def test_a_wrong_reduction_would_be_noticed(found: Found, name: str, of: str) -> None:
    assert found["two-0"][name]["error"] is None
    assert distance(found["two-0"][name]["weights"], found["one-0"][of]["weights"]) > 1e-3


@pytest.mark.parametrize(
    ("name", "of"), [("own evaluation", ["test_loss", "perplexity"]), ("answers of the other", ["bleu", "cider"])]
)
def test_a_wrong_evaluation_would_be_noticed(found: Found, name: str, of: list[str]) -> None:
    (*_, got), (*_, want) = found["two-0"][name]["metrics"], found["one-0"]["language model"]["metrics"]
    assert {key for key in want if key in SCORES} > {"bleu", "rouge_l", "nist", "cider"}
    assert found["two-0"][name]["error"] is None
    for key in of:
        assert abs(got[key] / want[key] - 1) > 1e-3


@pytest.mark.parametrize("name", ["sampling apart", "own norms"])
def test_processes_that_no_longer_agree_stop(found: Found, name: str) -> None:
    for rank in range(2):
        assert "no longer have the same parameters or batches" in found[f"two-{rank}"][name]["error"]


def test_every_mutant_is_tested() -> None:
    noticed = {"noise by each", "mean of means", "all rows everywhere", "own evaluation", "answers of the other"}
    noticed |= {f"{name}{how}" for name in ("sampling apart", "own norms") for how in ("", ", unnoticed")}
    assert set(MUTANTS) == noticed


# Errors.


@pytest.mark.parametrize("name", FAILING)
def test_an_error_in_one_process_is_raised_in_all(found: Found, name: str) -> None:
    first, second = (found[f"two-{rank}"][name] for rank in range(2))
    own, others = (first, second) if name.endswith("process 0") else (second, first)
    assert own["error"] == "RuntimeError: broken on purpose"
    rank = 0 if own is first else 1
    assert others["error"] == f"RankError: in process {rank} of 2: RuntimeError: broken on purpose"
    assert max(first["seconds"], second["seconds"]) < CREWS["two"].patience.total_seconds()


def test_a_process_that_does_not_answer_is_not_waited_for_for_ever(found: Found) -> None:
    assert "stuck-1" not in found
    assert found["stuck-0"]["stuck"]["error"] == "RankError: another process of the run has ended or does not answer"
    waited = found["stuck-0"]["stuck"]["seconds"] - CREWS["stuck"].patience.total_seconds()
    assert waited < CREWS["two"].patience.total_seconds()


# Shards.


@pytest.mark.parametrize("size", [2, 3, 5])
def test_shards_are_a_partition(size: int) -> None:
    labels = torch.arange(17)
    split = Split.raw(labels.float().unsqueeze(1), labels)
    shards = [Shard(split, rank, size) for rank in range(size)]
    assert {len(shard) for shard in shards} == {17}
    drawn = torch.tensor([3, 16, 0, 7, 8])
    for indices, pieces in (
        (torch.arange(17), [[*s.everything(2)] for s in shards]),
        (drawn, [[*s.batches(drawn, 2)] for s in shards]),
    ):
        rows = [pair for batches in pieces for pair in batches]
        assert all(0 < len(targets) <= 2 for _, targets in rows)
        assert all(torch.equal(inputs.squeeze(1).long(), targets) for inputs, targets in rows)
        assert sorted(int(i) for _, targets in rows for i in targets) == sorted(indices.tolist())
        # Each has the same samples whatever was drawn.
        for rank, batches in enumerate(pieces):
            assert all(int(i) % size == rank for _, targets in batches for i in targets)


# GPUs, of which there may be none here.


def test_each_process_takes_a_gpu_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    team = TorchTeam.__new__(TorchTeam)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    for rank, device in enumerate(("cuda", "cuda", "cpu")):
        monkeypatch.setenv("LOCAL_RANK", str(rank))
        assert team.device(torch.device(device)) == torch.device(device)
    with pytest.raises(UserError, match="3 processes here, where torch can use 2 GPUs"):
        team.device(torch.device("cuda"))
    with pytest.raises(UserError, match="device=cuda:1: each process takes a GPU of its own"):
        team.device(torch.device("cuda:1"))


# The command.


def torchrun(results: Path, *arguments: str, size: int = 2, settings: tuple[str, ...] = SMALL) -> Outcome:
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={size}", "-m", "dpbench.run"]
    done = subprocess.run(
        [*command, f"results_dir={results}", *settings, *arguments],
        env=environment(),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    return Outcome(done.returncode, done.stdout, done.stderr, results)


def errors(outcome: Outcome) -> list[str]:
    """What the command says, without what torchrun adds."""
    return [line for line in outcome.err.splitlines() if line.startswith("error: ")]


@pytest.fixture(scope="module")
def commanded(found: Found) -> Path:
    """What a sweep leaves that two processes were given, one run of which breaks in process 1."""
    return found["folder"]


def by_status(results: Path) -> dict[str, Path]:
    return {read(record, "status.json")["status"]: record for record in records(results)}


def test_a_run_of_several_processes_leaves_the_record_of_one(commanded: Path, tmp_path: Path) -> None:
    assert run(tmp_path, *SWEPT).code == 0
    one, two = only_record(tmp_path), by_status(commanded / "results")["finished"]
    assert one.relative_to(tmp_path) == two.relative_to(commanded / "results")
    assert_same_record(two, one)


def assert_same_record(two: Path, one: Path) -> None:
    for got, want in zip(read_metrics(two), read_metrics(one), strict=True):
        assert without_seconds(got) == pytest.approx(without_seconds(want), rel=TOLERANCE)
    assert read(two, "ledger.json") == read(one, "ledger.json")
    assert read(two, "status.json") == {"status": "finished"}
    origin = read(two, "provenance.json")
    assert origin["processes"] == len(origin["ranks"]) == 2
    same = dict.fromkeys(("micro_batch", "at_once"), origin["micro_batch"])
    assert origin["ranks"] == [{"device": "cpu, 1 threads", **same}] * 2
    assert read(one, "provenance.json")["processes"] == 1


def test_an_error_in_one_process_fails_its_run_and_the_sweep_goes_on(commanded: Path) -> None:
    reason = "RankError: in process 1 of 2: RuntimeError: broken on purpose"
    assert (commanded / "command-0.err").read_text() == f"error: failed: {reason} (filter=raise)\n"
    assert [torch.load(commanded / f"command-{rank}.pt") for rank in range(2)] == [1, 0]
    failed = read(by_status(commanded / "results")["failed"], "status.json")
    assert failed["reason"] == reason
    assert "in apply" in failed["traceback"]  # where it occurred, in the other process
    assert len(list(commanded.glob("results/sweeps/*/table.csv"))) == 1


def test_only_rank_0_speaks(commanded: Path) -> None:
    said = (commanded / "command-0.out").read_text()
    assert said.count("noise multiplier 0") == 2
    assert "2 processes" in said
    assert (commanded / "command-1.out").read_text() == ""
    assert (commanded / "command-1.err").read_text() == ""


@pytest.mark.slow
def test_torchrun_starts_such_processes(tmp_path: Path) -> None:
    assert run(tmp_path / "one", *SWEPT).code == 0
    outcome = torchrun(tmp_path / "two", *SWEPT)
    assert (outcome.code, errors(outcome)) == (0, [])
    assert_same_record(only_record(tmp_path / "two"), only_record(tmp_path / "one"))


@pytest.mark.slow
def test_a_process_that_dies_ends_the_run_with_a_record_that_says_so(tmp_path: Path) -> None:
    write_faulty(tmp_path / "own")
    start = time.monotonic()
    outcome = torchrun(tmp_path, "-cd", str(tmp_path / "own"), "filter=kill")
    reason = "RankError: another process of the run has ended or does not answer"
    assert (outcome.code, errors(outcome)) == (1, [f"error: failed: {reason}"])
    assert read(only_record(tmp_path), "status.json")["reason"] == reason
    assert time.monotonic() - start < 100


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("eps=-1",), "eps=-1: expected a number > 0, or inf to train without noise"),
        (("dataset=mnist", "data.root=nowhere"), "data.root=nowhere: "),
        (("seed=0,1", "-m", "hydra/launcher=joblib"), "hydra/launcher=joblib: under torchrun"),
        (("device=cuda:1",), "device=cuda:1: "),
    ],
)
def test_bad_input_is_refused_once(tmp_path: Path, arguments: tuple[str, ...], sentence: str) -> None:
    outcome = torchrun(tmp_path, *arguments)
    assert outcome.code == 1  # of torchrun, whatever that of the command is
    (said,) = errors(outcome)
    assert said.startswith(f"error: {sentence}")
    assert "exitcode  : 2" in outcome.err
    assert records(tmp_path) == []


@pytest.mark.slow
@pytest.mark.parametrize("changed", ["device", "multiplier"])
def test_releases_that_were_seen_are_not_made_otherwise(tmp_path: Path, changed: str) -> None:
    """As one process refuses it: the run was killed after its first evaluation."""
    assert run(tmp_path, *SMALL).code == 0
    record = only_record(tmp_path)
    (record / "status.json").write_text('{"status": "running"}')
    (record / "summary.json").unlink()
    seen = Published(2, "cpu", SEEDED_NOISE, read(record, "ledger.json")["releases"][0]["noise_multipliers"][0])
    if changed == "device":
        seen = replace(seen, device="NVIDIA A100-SXM4-40GB")
    else:
        seen = replace(seen, noise_multiplier=1.01 * seen.noise_multiplier)
    seen.write(record)
    outcome = torchrun(tmp_path)
    assert outcome.code == 1
    says = {
        "device": "would be other releases, beyond the run's eps",
        "multiplier": "the same noise at two multipliers",
    }
    assert says[changed] in errors(outcome)[0]
    assert not (record / "summary.json").exists()


@pytest.mark.slow
def test_seeds_go_one_by_one(tmp_path: Path) -> None:
    outcome = torchrun(tmp_path, "-m", "seeds=2", "fuse_seeds=true")
    assert outcome.code == 0
    assert "seeds run one after the other: several processes train each" in outcome.out
    assert [read(record, "provenance.json")["seeds_at_once"] for record in records(tmp_path)] == [1, 1]
