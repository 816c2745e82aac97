"""The record of a run: what a finished one holds, what is left of one that did not finish, and the options."""

import csv
import json
import os
import re
import shutil
import stat
import subprocess
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from importlib.metadata import version
from pathlib import Path
from typing import Any

import dp_accounting
import pytest
import torch
import yaml
from cli import CONF, STEPS, Outcome, only_record, raise_after, read, read_metrics, records, run, snapshot, status
from dp_accounting.pld import PLDAccountant
from helpers import composed, job_of
from hypothesis import given
from hypothesis import strategies as st

from dpbench.config import config_hash, resolved
from dpbench.config.registry import SCHEMAS
from dpbench.data import ImageDataset
from dpbench.errors import UserError
from dpbench.files import as_json, write_atomically
from dpbench.step import PrivateStep
from dpbench.tracking import provenance
from dpbench.tracking.published import Published
from dpbench.tracking.reading import Recorded
from dpbench.tracking.record import RecordError, RunRecord, rerun_of
from dpbench.tracking.status import Status

FILES = {"config.yaml", "ledger.json", "metrics.jsonl", "provenance.json", "status.json", "summary.json"}
RATE = 64 / 1437


# A finished run.


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    """The record of a run of DiSK, by the tight accountant."""
    results = tmp_path_factory.mktemp("finished")
    outcome = run(
        results, "algo=disk", "eps=4", "delta=1/N", "seed=3", "privacy.accountant=pld", "model.hidden=[8]", "model=mlp"
    )
    assert (outcome.code, outcome.err) == (0, "")
    return only_record(results)


def test_a_finished_record_holds_six_files_and_says_so(finished):
    assert {path.name for path in finished.iterdir()} == FILES
    assert read(finished, "status.json") == {"status": "finished"}
    assert finished.name == "3"


PLAIN = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
TEXTS = st.text() | st.text(alphabet='[]{},: \n"\\a')
CONTENT = st.recursive(
    PLAIN | TEXTS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4), max_leaves=30
)


@given(st.dictionaries(TEXTS, CONTENT, max_size=5))
def test_json_files_hold_what_they_were_given(content):
    assert json.loads(as_json(content)) == content


def test_json_files_have_a_line_for_each_value():
    content = {"releases": [{"noise_multipliers": [1.5, 2.5], "times": 2}, {"times": 0}], "none": []}
    assert as_json(content).splitlines() == [
        "{",
        ' "releases": [{"noise_multipliers":[1.5,2.5],"times":2},{"times":0}],',
        ' "none": []',
        "}",
    ]


def test_there_is_a_line_of_metrics_for_each_evaluation(finished):
    metrics = read_metrics(finished)
    assert [line["step"] for line in metrics] == [2, STEPS]
    assert [line["epoch"] for line in metrics] == pytest.approx([2 * RATE, STEPS * RATE])
    for line in metrics:
        assert line.keys() == {
            "step",
            "epoch",
            "train_loss",
            "gradient_norm",
            "above_threshold",
            "test_loss",
            "test_accuracy",
            "eps",
            "lr",
            "threshold",
            "seconds",
        }
        assert 0 <= line["test_accuracy"] <= 1
    assert 0 < metrics[0]["eps"] < metrics[1]["eps"]
    assert 0 < metrics[0]["seconds"] < metrics[1]["seconds"]


def test_the_summary_says_what_the_run_came_to(finished):
    summary = read(finished, "summary.json")
    metrics = read_metrics(finished)
    accuracies = [line["test_accuracy"] for line in metrics]
    assert summary["test_accuracy"] == {
        "final": accuracies[-1],
        "best": max(accuracies),
        "best_step": metrics[accuracies.index(max(accuracies))]["step"],
    }
    by_class = summary["test_accuracy_by_class"]
    of_class = ImageDataset().load(Path("nowhere"), download=False).test.labels.bincount().tolist()
    right = sum(accuracy * count for accuracy, count in zip(by_class, of_class, strict=True))
    assert right / sum(of_class) == pytest.approx(accuracies[-1])
    assert summary["test_loss"] == metrics[-1]["test_loss"]
    assert 0.99 * 4 < summary["eps"] == metrics[-1]["eps"] <= summary["target_eps"] == 4
    assert summary["delta"] == pytest.approx(1 / 1437)
    assert summary["sampling_rate"] == pytest.approx(RATE)
    expected = {
        "private": True,
        "clipped": True,
        "accountant": "pld",
        "sampler": "poisson",
        "steps": STEPS,
        "algorithm": "disk",
        "dataset": "digits",
        "model": "mlp",
        "seed": 3,
    }
    assert {key: summary[key] for key in expected} == expected
    assert "threshold_guards" not in summary


def test_the_summary_says_how_often_guards_of_a_threshold_fired(tmp_path):
    """Rule P's only one on the way fires where the noisy total is not positive: noise of this size decides its sign."""
    assert run(tmp_path, "algo=dcsgd_p", "threshold.histogram_noise=1e6").code == 0
    record = only_record(tmp_path)
    fired = read(record, "summary.json")["threshold_guards"]
    assert fired.keys() == {"total_not_positive", "range_bounded"}
    assert 0 < fired["total_not_positive"] <= STEPS
    assert fired["range_bounded"] == 0
    assert Recorded.read(record).problems == {}


def test_the_ledger_holds_every_release_and_what_they_cost(finished):
    ledger, summary = read(finished, "ledger.json"), read(finished, "summary.json")
    assert ledger["planned"] == STEPS
    assert ledger["releases"] == [
        {"sampling_rate": RATE, "noise_multipliers": [summary["noise_multiplier"]], "beside": [], "count": STEPS}
    ]
    assert ledger["neighbouring"] == "add or remove one sample"
    assert (ledger["sampler"], ledger["mechanism"], ledger["accountant"]) == ("poisson", "gaussian", "pld")

    accountant = PLDAccountant(value_discretization_interval=ledger["discretisation"])
    for release in ledger["releases"]:
        for multiplier in release["noise_multipliers"]:
            gaussian = dp_accounting.GaussianDpEvent(multiplier)
            sampled = dp_accounting.PoissonSampledDpEvent(release["sampling_rate"], gaussian)
            accountant.compose(sampled, release["count"])
    assert accountant.get_epsilon(ledger["delta"]) == pytest.approx(ledger["eps"], rel=1e-6)
    assert ledger["eps"] == summary["eps"]


def write_text(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def committed(folder: Path, *names: str) -> str:
    """The commit of these files in a repository of their own."""

    def git(*arguments: str) -> str:
        settings = ("-c", "user.name=a", "-c", "user.email=a@example.org")
        done = subprocess.run(["git", *settings, *arguments], cwd=folder, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    for name in names:
        write_text(folder / name, "as committed")
    git("init", "-q")
    git("add", ".")
    git("commit", "-q", "-m", "first")
    return git("rev-parse", "HEAD")


@pytest.mark.parametrize(
    ("written", "dirty"),
    [
        (None, False),
        ("results/scorecard.md", False),  # by an earlier run
        ("notes.txt", False),
        ("conf/config.yaml", True),
        ("dpbench/step.py", True),
        ("dpbench/clip/own.py", True),  # not in git yet, and imported all the same
    ],
)
def test_a_checkout_is_modified_where_what_computes_differs_from_its_commit(tmp_path, monkeypatch, written, dirty):
    source = "dpbench/tracking/provenance.py"
    commit = committed(tmp_path, source, "dpbench/step.py", "conf/config.yaml", "results/scorecard.md")
    if written is not None:
        write_text(tmp_path / written, "changed")
    monkeypatch.setattr(provenance, "__file__", str(tmp_path / source))
    origin = provenance.provenance(torch.device("cpu"))
    assert origin["commit"] == commit
    assert origin["dirty"] is dirty


@pytest.mark.parametrize("ignored", ["", ".venv"])
def test_a_package_installed_within_a_project_of_others_is_of_no_commit_of_theirs(tmp_path, monkeypatch, ignored):
    commit = committed(tmp_path, "theirs.py")
    write_text(tmp_path / ".gitignore", ignored)
    source = tmp_path / ".venv" / "lib" / "dpbench" / "tracking" / "provenance.py"
    write_text(source, "as installed")
    monkeypatch.setattr(provenance, "__file__", str(source))
    assert provenance._git("rev-parse", "HEAD") == commit
    origin = provenance.provenance(torch.device("cpu"))
    assert (origin["commit"], origin["dirty"]) == (None, None)


def test_the_provenance_names_code_versions_and_machine(finished):
    origin = read(finished, "provenance.json")
    assert origin["commit"] is None or re.fullmatch(r"[0-9a-f]{40}", origin["commit"])
    assert origin["dirty"] in (None, True, False)
    started = datetime.fromisoformat(origin["started"])
    assert started.tzinfo is not None
    assert timedelta(0) <= datetime.now(UTC) - started < timedelta(hours=1)
    assert origin["versions"]["torch"] == version("torch")
    assert origin["versions"]["dp-accounting"] == version("dp-accounting")
    assert "algo=disk" in origin["command"]
    assert origin["device"].startswith("cpu")
    assert origin["wall_seconds"] > 0
    assert {"python", "platform", "cuda"} <= origin.keys()


def recorded(record: Path) -> dict[str, Any]:
    return yaml.safe_load((record / "config.yaml").read_text())


def test_what_was_typed_composes_back_to_the_recorded_run(finished):
    config = composed(*recorded(finished)["overrides"])
    assert (config_hash(config), str(config.seed)) == (finished.parent.name, finished.name)


def leaves(settings: dict[str, Any], path: str = "") -> Iterator[str]:
    """Every setting of a nested dictionary as an override."""
    for key, value in settings.items():
        if isinstance(value, dict):
            yield from leaves(value, f"{path}{key}.")
        elif key != "kind":
            text = "null" if value is None else f"'{value}'" if isinstance(value, str) else str(value)
            yield f"{path}{key}={text}"


def test_the_recorded_settings_alone_describe_the_run(finished):
    settings = recorded(finished)
    choices, typed = settings.pop("choices"), settings.pop("overrides")
    assert "eps=4" in typed
    config = composed(*(f"{group}={option}" for group, option in choices.items()), *leaves(settings))
    assert config_hash(config) == finished.parent.name
    assert resolved(config) == settings


# Runs that do not finish.


@pytest.fixture(scope="module")
def half_failed(tmp_path_factory) -> tuple[Outcome, list[dict[str, Any]]]:
    """A sweep whose first run raises before its last step, and the table it would send to the tracker."""
    table = []

    def keep(*_: Any, columns: list[str], rows: list[list[Any]], **__: Any) -> None:
        table.extend(dict(zip(columns, row, strict=True)) for row in rows)

    with pytest.MonkeyPatch.context() as patch:
        raise_after(patch, STEPS - 1, RuntimeError("the disk is on fire"), query="TwoPoint")
        patch.setattr("dpbench.cli.outcome.log_table", keep)
        return run(tmp_path_factory.mktemp("failed"), "algo=disk,dpsgd", "-m"), table


def by_algorithm(results: Path) -> dict[str, Path]:
    return {recorded(record)["algo"]["name"]: record for record in records(results)}


def test_a_run_that_raises_is_recorded_as_failed_with_its_traceback(half_failed):
    record = by_algorithm(half_failed[0].results)["disk"]
    found = read(record, "status.json")
    assert (found["status"], found["reason"]) == ("failed", "RuntimeError: the disk is on fire")
    assert "Traceback (most recent call last)" in found["traceback"]
    assert "in train\n" in found["traceback"]
    assert {path.name for path in record.iterdir()} == FILES
    assert sum(release["count"] for release in read(record, "ledger.json")["releases"]) == STEPS - 1


def test_the_other_runs_of_a_sweep_go_on_after_one_has_failed(half_failed):
    assert status(by_algorithm(half_failed[0].results)["dpsgd"]) == "finished"


def test_a_sweep_with_a_failed_run_says_which_and_exits_with_1(half_failed):
    outcome = half_failed[0]
    assert outcome.code == 1
    assert outcome.error() == "failed: RuntimeError: the disk is on fire (algo=disk)"


def test_a_table_shows_what_a_run_that_failed_spent_but_no_accuracy(half_failed):
    outcome, tracked = half_failed
    (path,) = outcome.results.glob("sweeps/*/table.csv")
    with path.open(newline="") as stream:
        (row,) = [row for row in csv.DictReader(stream) if row["run"] == "algo=disk"]
    summary = read(by_algorithm(outcome.results)["disk"], "summary.json")
    assert (row["test accuracy, last (%)"], row["best on test (%)"], row["status"]) == ("", "", "failed")
    assert (float(row["eps"]), float(row["delta"])) == (summary["eps"], summary["delta"])
    assert (float(row["noise multiplier"]), int(row["steps"])) == (summary["noise_multiplier"], STEPS - 1)
    shown = {row["run"]: (row["test accuracy"], row["status"]) for row in tracked}
    assert shown["algo=dpsgd"][0] is not None
    assert shown["algo=disk"] == (None, "failed")


def test_an_interrupted_run_is_recorded_and_trained_again_next_time(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        raise_after(patch, STEPS - 1, KeyboardInterrupt())
        outcome = run(tmp_path)
    record = only_record(tmp_path)
    assert outcome.code == 130
    assert read(record, "status.json") == {"status": "interrupted", "reason": "by the user"}
    ledger, summary = read(record, "ledger.json"), read(record, "summary.json")
    assert sum(release["count"] for release in ledger["releases"]) == summary["steps"] == STEPS - 1
    assert 0 < ledger["eps"] == summary["eps"] < 8

    assert run(tmp_path).code == 0
    assert only_record(tmp_path) == record
    assert status(record) == "finished"
    assert read(record, "summary.json")["steps"] == len(read_metrics(record)) + 1 == STEPS


def test_an_interruption_stops_the_sweep_and_is_said_in_one_line(tmp_path, monkeypatch):
    raise_after(monkeypatch, 1, KeyboardInterrupt())
    outcome = run(tmp_path, "-m", "eps=8,inf")
    assert outcome.code == 130
    assert len(records(tmp_path)) == 1
    assert "Traceback" not in outcome.out + outcome.err
    assert re.fullmatch(r"[^\n]*interrupted[^\n]*\n", outcome.err)


def test_an_interrupted_forced_run_leaves_the_finished_record(results_of_a_run, monkeypatch):
    record = only_record(results_of_a_run)
    before = snapshot(record)
    with monkeypatch.context() as patch:
        raise_after(patch, STEPS - 1, KeyboardInterrupt())
        assert run(results_of_a_run, "force=true").code == 130
    assert snapshot(record) == before
    monkeypatch.setattr(PrivateStep, "take", lambda *_: pytest.fail("trained"))
    assert run(results_of_a_run).code == 0


def test_a_failed_forced_run_leaves_the_finished_record_and_is_an_error(results_of_a_run, monkeypatch):
    record = only_record(results_of_a_run)
    before = snapshot(record)
    raise_after(monkeypatch, STEPS - 1, RuntimeError("the disk is on fire"))
    outcome = run(results_of_a_run, "force=true")
    assert snapshot(record) == before
    assert outcome.code == 1
    assert "the disk is on fire" in outcome.error()


@pytest.mark.parametrize("fails", [False, True])
def test_what_an_older_forced_run_left_is_not_taken_for_the_one_that_is_begun_now(results_of_a_run, monkeypatch, fails):
    """Where the finished record is gone, the run is begun once in its place, and ends there."""
    record, take, begun = only_record(results_of_a_run), PrivateStep.take, []
    with monkeypatch.context() as patch:
        raise_after(patch, STEPS - 1, KeyboardInterrupt())
        assert run(results_of_a_run, "force=true").code == 130
    assert record.with_name("0.rerun").exists()
    shutil.rmtree(record)

    def counted(self: PrivateStep, batch: Any) -> Any:
        begun.extend([self] * (self.steps == 0))
        if len(begun) > 1:
            pytest.fail("begun again")
        if fails and self.steps == STEPS - 1:
            raise RuntimeError("the disk is on fire")
        return take(self, batch)

    monkeypatch.setattr(PrivateStep, "take", counted)
    assert run(results_of_a_run, "force=true").code == int(fails)
    assert status(record) == ("failed" if fails else "finished")
    assert not record.with_name("0.rerun").exists()


def test_a_forced_run_takes_its_place_also_where_the_record_before_was_removed_meanwhile(results_of_a_run, monkeypatch):
    record, take = only_record(results_of_a_run), PrivateStep.take

    def removes(self: PrivateStep, batch: Any) -> Any:
        shutil.rmtree(record, ignore_errors=True)
        return take(self, batch)

    monkeypatch.setattr(PrivateStep, "take", removes)
    assert run(results_of_a_run, "force=true").code == 0
    assert only_record(results_of_a_run) == record
    assert status(record) == "finished"


def test_a_loss_that_is_not_a_number_is_recorded_as_diverged(tmp_path):
    outcome = run(tmp_path, "eps=inf", "clip=none", "optim.lr=1e38")
    record = only_record(tmp_path)
    assert outcome.code == 1
    assert outcome.error().startswith("diverged: ")
    assert status(record) == "diverged"
    assert re.search(r"test loss is (nan|inf) after 2 steps", read(record, "status.json")["reason"])
    assert [line["test_loss"] in ("nan", "inf") for line in read_metrics(record)] == [True]


def test_a_run_that_was_killed_is_trained_again(results_of_a_run):
    record = only_record(results_of_a_run)
    (record / "status.json").write_text('{"status": "running"}')
    (record / "left over").write_text("")
    assert run(results_of_a_run).code == 0
    assert status(record) == "finished"
    assert {path.name for path in record.iterdir()} == FILES


# Files are replaced as a whole.


@pytest.mark.parametrize("error", [OSError("no space left"), KeyboardInterrupt()], ids=repr)
def test_a_file_that_cannot_be_replaced_stays_as_it_was(tmp_path, monkeypatch, error):
    def fail(*_: object) -> None:
        raise error

    path = tmp_path / "summary.json"
    write_atomically(path, "old")
    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(type(error)):
        write_atomically(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_what_was_seen_of_a_run_is_on_the_disk_before_it_is_shown(tmp_path, monkeypatch):
    """The content before the name that readers find it by, and the folder that holds the name after it."""
    done = []
    sync, replace = os.fsync, os.replace

    def synced(opened):
        done.append("folder" if stat.S_ISDIR(os.fstat(opened).st_mode) else "content")
        sync(opened)

    def replaced(part, path):
        done.append("name")
        replace(part, path)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", replaced)
    Published(step=12).write(tmp_path / "0")
    assert done == ["content", "name", "folder"]
    assert Published.read(tmp_path / "0").step == 12


def test_a_file_whose_text_cannot_be_written_to_its_end_is_not_there(tmp_path):
    with pytest.raises(UnicodeEncodeError):
        write_atomically(tmp_path / "summary.json", 100_000 * "a" + "\ud800")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("rerun", [True, False])
def test_a_forced_run_that_was_killed_while_it_took_its_place_takes_it_next_time(tmp_path, rerun):
    """The one before it was away already, which comes back where the forced one is gone."""
    record = RunRecord(tmp_path, "0" * 12, 0)
    found = {"replaced": "before", **({"rerun": "anew"} if rerun else {})}
    for suffix, content in found.items():
        folder = record.folder.with_name(f"0.{suffix}")
        folder.mkdir(parents=True)
        (folder / "summary.json").write_text(content)
    assert record.acquire()
    record.lock.release()
    assert (record.folder / "summary.json").read_text() == ("anew" if rerun else "before")
    assert sorted(path.name for path in record.folder.parent.iterdir() if path.is_dir()) == ["0"]


def test_a_record_that_cannot_be_replaced_stays_where_it_was(tmp_path, monkeypatch):
    record = RunRecord(tmp_path, "0" * 12, 0)
    record.folder.mkdir(parents=True)
    (record.folder / "summary.json").write_text("before")
    record.working = rerun_of(record.folder)
    record.working.mkdir()
    rename = Path.rename

    def refused(path, to):
        if path == rerun_of(record.folder):
            raise OSError(5, "no such luck")
        return rename(path, to)

    monkeypatch.setattr(Path, "rename", refused)
    with pytest.raises(RecordError, match=r"can't be replaced in .*no such luck"):
        record.set_status(Status.FINISHED)
    assert (record.folder / "summary.json").read_text() == "before"


# Every option.

OPTIONS = sorted(f"{path.parent.name}={path.stem}" for path in CONF.glob("*/*.yaml"))
# What an option needs besides itself.
NEEDS = {
    "clip=error_feedback": ["clip.uncertified=true"],
    "clip=none": ["eps=inf"],
    "noise=banded": ["privacy=cyclic"],
    "noise=tree": ["privacy=cyclic"],
    "optim=adagrad_norm_uncertified": ["optim.uncertified=true"],
    "model=cnn5": ["dataset=mnist"],
    "model=cnn_abadi": ["dataset=mnist"],
    "model=cnn_small": ["dataset=mnist"],
    "model=cnn_small_grey": ["dataset=mnist"],
    "model=bert_base": ["dataset=sst2"],
    "model=gpt2": ["dataset=e2e"],
    "model=lstm": ["dataset=names"],
    "model=roberta_base": ["dataset=sst2"],
    "model=roberta_base_lora": ["dataset=sst2"],
    "model=roberta_large": ["dataset=sst2"],
    "model=roberta_large_lora": ["dataset=sst2"],
    "model=text_small": ["dataset=sst2"],
    "threshold=dcsgd_e": ["clip=threshold"],
}
# Options that are another one with other settings.
ANOTHER = {
    "tracker=disabled": "wandb",
    **dict.fromkeys(("privacy=cyclic", "privacy=fixed_size", "privacy=shuffled", "privacy=as_published"), "poisson"),
    "model=roberta_base_lora": "roberta_base",
    "model=roberta_large_lora": "roberta_large",
}


@pytest.mark.parametrize("option", OPTIONS)
def test_every_option_composes(option):
    job = job_of(option, *NEEDS.get(option, []))
    group, name = option.split("=")
    assert job.choices[group] == name
    assert job.config.steps == len(job.config.release_plan()) > 0
    assert re.fullmatch(r"[0-9a-f]{12}", config_hash(job.config))


def schemas_named_in(path: Path) -> list[tuple[str, str]]:
    """Group and name of the schemas in a file's defaults list."""
    defaults = yaml.safe_load(path.read_text()).get("defaults", [])
    pairs = [pair for entry in defaults if isinstance(entry, dict) for pair in entry.items()]
    found = [(re.fullmatch(r"/schema/(\w+)(@[\w.]+)?", key), name) for key, name in pairs]
    return [(match[1], name) for match, name in found if match]


@pytest.mark.parametrize("option", [option for option in OPTIONS if not option.startswith("algo=")])
def test_every_option_of_a_stage_has_a_schema_of_its_group(option):
    group, name = option.split("=")
    path = CONF / group / f"{ANOTHER.get(option, name)}.yaml"
    ((of, schema),) = schemas_named_in(path)
    assert of == group
    assert schema in SCHEMAS[group]


def test_every_schema_has_an_option():
    named = {pair for path in CONF.glob("*/*.yaml") for pair in schemas_named_in(path)}
    assert named == {(group, name) for group, names in SCHEMAS.items() for name in names}


def test_a_refused_forced_run_leaves_the_finished_record_and_is_an_error(results_of_a_run, monkeypatch):
    record = only_record(results_of_a_run)
    before = snapshot(record)
    monkeypatch.setattr("dpbench.training.preparing.device_of_this_process", refuse_device)
    outcome = run(results_of_a_run, "force=true")
    assert outcome.code == 2
    assert outcome.error() == "device=cpu: no such device"
    assert snapshot(record) == before


def refuse_device(name: str) -> None:
    raise UserError("no such device", field="device", value=name)


def test_a_refused_run_leaves_what_an_interrupted_one_recorded(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        raise_after(patch, STEPS - 1, KeyboardInterrupt())
        run(tmp_path)
    before = snapshot(only_record(tmp_path))
    monkeypatch.setattr("dpbench.training.preparing.device_of_this_process", refuse_device)
    assert run(tmp_path).code == 2
    assert snapshot(only_record(tmp_path)) == before


def test_a_run_that_fails_while_it_is_prepared_is_recorded_with_its_traceback(tmp_path, monkeypatch):
    def fail(*_: object) -> None:
        raise RuntimeError("CUDA error: device-side assert triggered")

    monkeypatch.setattr("dpbench.training.preparing.assemble", fail)
    outcome = run(tmp_path)
    assert outcome.code == 1
    assert outcome.error() == "failed: RuntimeError: CUDA error: device-side assert triggered"
    recorded = read(only_record(tmp_path), "status.json")
    assert "in fail" in recorded["traceback"]


def test_a_run_whose_summary_cannot_be_written_is_not_finished_and_keeps_its_metrics(tmp_path, monkeypatch):
    write = RunRecord.write

    def full(self: RunRecord, name: str, content: dict[str, Any]) -> None:
        if name == "summary.json":
            raise OSError("no space left on device")
        write(self, name, content)

    monkeypatch.setattr(RunRecord, "write", full)
    assert run(tmp_path).code == 1
    record = only_record(tmp_path)
    assert status(record) == "failed"
    assert len(read_metrics(record)) > 0
