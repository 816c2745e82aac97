"""Records as a store: damaged ones, the index that follows the files, many of them, and several writers."""

import json
import math
import os
import pwd
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from cli import ROOT, environment, read
from made_up_locks import held_elsewhere
from many_records import make
from results_command import DAY, age_by, change, results, rows

from dpbench import cache
from dpbench.claims.schema import METRICS
from dpbench.config import compose_each, config_hash, resolved
from dpbench.config.recorded import recorded_hash
from dpbench.files import jsonable, write_atomically
from dpbench.tracking import reading
from dpbench.tracking.columns import ABSENT
from dpbench.tracking.index import Index
from dpbench.tracking.lock import lock_of
from dpbench.tracking.reading import Recorded, read_settings
from dpbench.tracking.record import RunRecord
from dpbench.tracking.shapes import SCORES
from dpbench.tracking.status import Status

pytestmark = pytest.mark.usefixtures("own_cache")


def statuses(folder: Path) -> list[str]:
    return sorted(row["status"] for row in rows(results(folder, "list", "limit=0")))


def hashes(folder: Path) -> list[tuple[str, str]]:
    return sorted((row["hash"], row["seed"]) for row in rows(results(folder, "list", "limit=0")))


# Reading.

WRONG = [
    ("status.json", "[]", "expected an object"),
    ("status.json", "{", "is no JSON"),
    ("status.json", '{"status": "done"}', "status: expected one of running, finished,"),
    ("status.json", '{"status": ["finished"]}', "status: expected one of"),
    ("summary.json", "[1]", "expected an object"),
    ("summary.json", "null", "expected an object"),
    ("summary.json", "{}", "test_accuracy is missing"),
    ("summary.json", '{"test_accuracy": 0.5}', "test_accuracy: expected an object"),
    ("summary.json", '{"test_accuracy": {"best": 1}}', "test_accuracy: final is missing"),
    ("summary.json", '{"test_accuracy": {"final": null}}', "test_accuracy: final: expected a number"),
    ("summary.json", '{"test_accuracy": {"final": true}}', "test_accuracy: final: expected a number"),
    ("summary.json", '{"test_accuracy": {"final": 1}, "eps": "many"}', "eps: expected a number"),
    ("summary.json", '{"test_accuracy": {"final": 1}, "bleu": [1]}', "bleu: expected a number"),
    ("summary.json", 100_000 * "[", "is no JSON"),
    ("summary.json", '{"test_accuracy": {"final": 1}, "\\ud800": 1}', "is no JSON ('utf-8' codec can't encode"),
    ("status.json", '{"status": "failed", "reason": "\\udcff"}', "is no JSON ('utf-8' codec can't encode"),
    ("summary.json", None, "is missing"),
]


@pytest.mark.parametrize(("name", "content", "problem"), WRONG)
def test_a_record_of_a_wrong_shape_is_damaged(record, name, content, problem):
    (record / name).unlink() if content is None else (record / name).write_text(content)
    found = Recorded.read(record)
    assert (found.status, found.finished, found.summary) == ("damaged", False, {})
    assert found.damage is not None
    assert found.damage.startswith(f"{name}: {problem}")


RELEASE = '{"sampling_rate": 0.5, "noise_multipliers": [1], "count": 1, "beside": []}'


def test_the_release_that_is_spoilt_below_is_one(record):
    (record / "ledger.json").write_text(f'{{"delta": 0.1, "releases": [{RELEASE}]}}')
    assert Recorded.read(record).complete().problems == {}


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("config.yaml", "- 1"),
        ("config.yaml", "{"),
        ("config.yaml", "optim: 3"),
        ("config.yaml", "overrides: {a: b}"),
        ("config.yaml", "dataset:\n  train_size: many"),
        ("config.yaml", f"privacy:\n  search_runs: 0x{'f' * 5000}"),
        ("config.yaml", "privacy:\n  search_runs: [8]"),
        ("ledger.json", "[]"),
        ("ledger.json", '{"delta": 0.1, "releases": [{}]}'),
        ("ledger.json", '{"delta": 0.1, "releases": {"count": 1}}'),
        ("ledger.json", '{"releases": []}'),
        ("ledger.json", '{"delta": null, "releases": []}'),
        ("ledger.json", '{"delta": 0.1, "accountant": ["rdp"], "releases": []}'),
        ("ledger.json", '{"delta": 0.1, "releases": [' + RELEASE.replace("[1]", '["inf"]') + "]}"),
        ("ledger.json", '{"delta": 0.1, "releases": [' + RELEASE.replace("0.5", "NaN") + "]}"),
        ("provenance.json", '{"versions": []}'),
        ("provenance.json", '{"\\ud800": 1}'),
        ("provenance.json", '{"wall_seconds": "long"}'),
        ("metrics.jsonl", "[1]\n"),
        ("metrics.jsonl", '{"epoch": []}\n'),
    ],
)
def test_another_file_of_a_wrong_shape_counts_as_missing(record, name, content):
    (record / name).write_text(content)
    found = Recorded.read(record).complete()
    assert found.finished
    assert list(found.problems) == [name]
    assert sum(map(bool, (found.settings, found.ledger, found.provenance, found.metrics))) == 3


def test_a_record_is_read_as_it_is_written(record):
    found = Recorded.read(record).complete()
    assert (found.status, found.damage) == ("finished", None)
    assert found.summary == read(record, "summary.json")
    assert found.ledger == read(record, "ledger.json")
    assert found.provenance == read(record, "provenance.json")
    assert found.settings == yaml.safe_load((record / "config.yaml").read_text())
    assert [line["step"] for line in found.metrics] == [2, 3]


def test_a_record_that_is_replaced_while_it_is_read_is_read_again(record, monkeypatch):
    """Its status was read, and its summary is that of the next attempt, which has none yet."""
    read_json, away = reading._json, record.with_name("away")

    def replaced(path, shape):
        if path.name == "summary.json" and not away.exists():
            shutil.copytree(record, away)
            path.unlink()
            found = read_json(path, shape)
            shutil.copy(away / path.name, path)
            return found
        return read_json(path, shape)

    monkeypatch.setattr(reading, "_json", replaced)
    found = Recorded.read(record)
    assert away.exists()
    assert (found.status, found.problems) == ("finished", {})


def test_a_run_that_ends_while_its_record_is_read_was_not_interrupted(record, monkeypatch):
    """Between the look at its status and that at its lock."""
    ended = (record / "status.json").read_text()
    (record / "status.json").write_text('{"status": "running"}')
    monkeypatch.setattr(reading, "is_held", lambda _: (record / "status.json").write_text(ended) == 0)
    assert Recorded.read(record).status == "finished"


def test_what_is_not_there_is_no_record(tmp_path):
    (tmp_path / "0").mkdir()
    for name in ("0", "1"):
        assert not Recorded.read(tmp_path / name).exists


@pytest.mark.parametrize(
    "text",
    [
        "a: 1\nb:\n- 1\n- 2\nc:\n  d: {e: [1, 2]}\n",
        "a: 'one\n\n  two'\nb: |\n  c: 1\n\n  d\n",
        '{"a": 1,\n"b": 2}\n',
        "# a comment\na: 1\n# another\nb: 2\na: 3\n",
        "'a': 1\n\"b c\": 2\n",
    ],
)
def test_settings_read_by_sections_are_those_of_the_whole_file(tmp_path, text):
    (tmp_path / "config.yaml").write_text(text)
    assert read_settings(tmp_path / "config.yaml") == yaml.safe_load(text)


def test_all_that_claims_are_about_has_to_be_a_number():
    assert set(METRICS) <= {*SCORES, "test_accuracy", "test_error", "validation_accuracy", "mismatched_accuracy"}


def test_entries_that_nobody_knows_yet_may_be_anything(record):
    for name in ("summary.json", "ledger.json", "provenance.json", "status.json"):
        change(record, name, lambda content: content | {"another": [{"of": "a later version"}]})
    found = Recorded.read(record).complete()
    assert (found.finished, found.problems) == (True, {})


# The hash, from what is recorded.

CONFIGURATIONS = [
    "model=linear",
    "model=linear eps=inf clip=none",
    "model=linear delta=1e-5 evaluation.every_steps=7",
    "model=linear delta=1/N evaluation.every_epochs=null epochs=3",
    "model=linear privacy=shuffled evaluation.every_epochs=null batch_size=100",
    "model=linear privacy=cyclic noise=banded evaluation.every_epochs=0.3",
    "algo=doppler filter=butterworth optim.lr=1e-5",
    "dataset=mnist model=cnn5 algo=dp_pmlf schedule=cosine",
    "dataset=sst2 model=roberta_base_lora algo=disk",
    "algo=dcsgd_e seed=5 device=cpu",
]


@pytest.mark.parametrize("typed", CONFIGURATIONS)
def test_the_hash_follows_from_what_is_recorded(tmp_path, typed):
    (job,) = compose_each([typed.split()])
    settings = {**resolved(job.config), "choices": job.choices, "overrides": list(job.overrides)}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(jsonable(settings), sort_keys=False))
    found = read_settings(tmp_path / "config.yaml")
    assert found is not None
    assert recorded_hash(found) == config_hash(job.config)
    found["optim"] = {**found["optim"], "lr": 0.123}
    assert recorded_hash(found) != config_hash(job.config)


@pytest.mark.parametrize("missing", ["dataset", "delta", "evaluation", "batch_size"])
def test_settings_that_no_run_can_have_have_no_hash(record, missing):
    settings = yaml.safe_load((record / "config.yaml").read_text())
    del settings[missing]
    with pytest.raises(ValueError, match="has settings that no run can have"):
        recorded_hash(settings)


# The index follows the files.


def copy_of(record: Path, digest: str, seed: str = "0") -> Path:
    target = record.parents[1] / digest / seed
    shutil.copytree(record, target)
    return target


def test_new_and_removed_records_are_noticed(store, record):
    assert statuses(store) == ["finished"]
    other = copy_of(record, "0" * 12)
    copy_of(record, record.parent.name, "7")
    assert {(row["hash"], row["seed"]) for row in rows(results(store, "list"))} == {
        (record.parent.name, "0"),
        (record.parent.name, "7"),
        ("0" * 12, "0"),
    }
    shutil.rmtree(other.parent)
    shutil.rmtree(record)
    assert [(row["hash"], row["seed"]) for row in rows(results(store, "list"))] == [(record.parent.name, "7")]


def test_what_a_killed_run_spent_is_what_its_ledger_says(store, record):
    summary = read(record, "summary.json")
    (record / "summary.json").unlink()
    change(record, "status.json", lambda _: {"status": "running"})
    (row,) = rows(results(store, "list"))
    assert (row["status"], row["accuracy"]) == ("interrupted", "–")
    assert (row["spent"], row["steps"]) == (f"{summary['eps']:.4g}", "3")
    found = Recorded.read(record).so_far
    assert {name: found[name] for name in ("eps", "delta", "steps", "private")} == {
        name: summary[name] for name in ("eps", "delta", "steps", "private")
    }
    settings = yaml.safe_load((record / "config.yaml").read_text())
    settings["clip"]["uncertified"] = True
    (record / "config.yaml").write_text(yaml.safe_dump(settings))
    assert ", not proven" in results(store, "list").out
    settings["clip"]["uncertified"], settings["eps"] = False, math.inf
    (record / "config.yaml").write_text(yaml.safe_dump(settings))
    assert Recorded.read(record).so_far["private"] is False


def test_a_damaged_record_has_spent_nothing_that_is_known(store, record):
    (record / "summary.json").write_text("[]")
    (row,) = rows(results(store, "list"))
    assert (row["status"], row["spent"], row["steps"]) == ("damaged", "–", "–")


def test_a_ledger_of_a_wrong_shape_is_named_and_the_rest_counts(store, record):
    (record / "ledger.json").write_text('{"delta": 0.1, "releases": 3}')
    listed = results(store, "list")
    assert [row["status"] for row in rows(listed)] == ["finished"]
    said = f"warning: {record}: ledger.json: releases: expected a list; the rest of the record counts"
    assert " ".join(listed.err.split()) == said


@pytest.mark.parametrize("settled", [False, True])
def test_a_run_under_way_is_looked_at_again(store, record, settled):
    change(record, "status.json", lambda _: {"status": "running"})
    held_elsewhere(lock_of(record))
    if settled:
        age_by(store)
    assert statuses(store) == ["running"]
    found = RunRecord(store, record.parent.name, 0)
    found.set_status(Status.FAILED, "broken")
    assert statuses(store) == ["failed"]
    found.set_status(Status.FINISHED)
    assert statuses(store) == ["finished"]


def test_a_run_that_has_just_begun_is_listed_before_its_settings_are_there(store, record):
    for path in record.iterdir():
        if path.name != "status.json":
            path.unlink()
    change(record, "status.json", lambda _: {"status": "running"})
    held_elsewhere(lock_of(record))
    (row,) = rows(results(store, "list"))
    assert (row["status"], row["algorithm"], row["eps"], row["age"]) == ("running", "–", "–", "–")


@pytest.mark.parametrize("settled", [False, True])
def test_a_forced_run_that_replaces_a_record_is_noticed(store, record, settled):
    accuracy = rows(results(store, "list"))[0]["accuracy"]
    if settled:
        age_by(store)
        results(store, "list")
    forced = RunRecord(store, record.parent.name, 0)
    forced.start(yaml.safe_load((record / "config.yaml").read_text()), {})
    forced.write("summary.json", {"test_accuracy": {"final": 0.125}, "steps": 3})
    assert rows(results(store, "list"))[0]["accuracy"] == accuracy
    forced.set_status(Status.FINISHED)
    assert rows(results(store, "list"))[0]["accuracy"] == "12.50" != accuracy


def test_a_run_whose_process_has_gone_is_listed_as_interrupted(store, record):
    """Its record does not change: another process takes the lock away."""
    change(record, "status.json", lambda _: {"status": "running"})
    held_elsewhere(lock_of(record))
    age_by(store)
    assert statuses(store) == ["running"]
    lock_of(record).unlink()
    assert statuses(store) == ["interrupted"]


@pytest.mark.parametrize("name", ["summary.json", "config.yaml"])
@pytest.mark.parametrize("copied", [False, True])
def test_files_that_are_replaced_in_a_finished_record_are_noticed(store, record, name, copied):
    """As git does, or who copies an older record with its times; the folder above stays as it is."""
    age_by(store)
    (before,) = rows(results(store, "list"))
    age = record.parent.stat().st_mtime_ns
    content = (record / name).read_text()
    changed = content.replace('"final":', '"final":0.125,"was":').replace("eps: 8.0", "eps: 4.0")
    write_atomically(record / name, changed)
    if copied:
        age_by(record, 3 * DAY)
    assert changed != content
    assert record.parent.stat().st_mtime_ns == age
    (after,) = rows(results(store, "list"))
    shown = {"summary.json": "accuracy", "config.yaml": "eps"}[name]
    assert after[shown] != before[shown]


def test_a_damaged_record_is_looked_at_until_it_is_repaired(store, record):
    content = (record / "summary.json").read_text()
    (record / "summary.json").write_text("[]")
    age_by(store)
    assert statuses(store) == ["damaged"]
    lasting = Index(store)
    (record / "summary.json").write_text(content)
    assert statuses(store) == ["finished"]
    lasting.refresh()
    assert lasting.column("status") == ["finished"]


def test_what_is_known_is_not_read_again(store, monkeypatch):
    shown = hashes(store)
    monkeypatch.setattr(Recorded, "read", None)
    assert hashes(store) == shown != []


def test_the_index_keeps_values_as_they_are_recorded(store, record):
    """Null is a value, and not the same as none."""
    fresh, kept = Index(store), Index(store)
    settings = yaml.safe_load((record / "config.yaml").read_text())
    assert settings["micro_batch"] is None
    for index in (fresh, kept):
        assert index.column("micro_batch") == [None]
        assert index.column("dataset.mean") == [settings["dataset"]["mean"]]
        assert index.column("no.such") == [ABSENT]
    assert {name: kept.column(name) for name in kept.names} == {name: fresh.column(name) for name in fresh.names}


@pytest.mark.parametrize("age", [0, 30])
def test_a_time_that_is_too_young_is_not_trusted(store, record, age):
    """Another record may have come in the same moment as the one that was seen, by the clock of another machine."""
    now = time.time() - age
    os.utime(record.parent, (now, now))
    assert len(rows(results(store, "list"))) == 1
    copy_of(record, record.parent.name, "1")
    os.utime(record.parent, (now, now))
    assert len(rows(results(store, "list"))) == 2


@pytest.mark.parametrize("content", [b"", b"PAR1", b"no index at all"])
def test_an_index_that_is_damaged_is_made_anew(store, content):
    shown = hashes(store)
    (kept,) = (cache.folder() / "records").iterdir()
    kept.write_bytes(content)
    assert hashes(store) == shown != []


def test_without_a_place_for_a_cache_all_is_read(store, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("DPBENCH_CACHE", str(tmp_path / "file"))
    assert statuses(store) == ["finished"]


def test_what_else_lies_beside_records_is_none(store, record):
    (record.parent / "0.lock").write_text("{}")
    (record.parent / "1.lock").mkdir()
    (record.parent / "0.rerun").mkdir()
    for name in ("٣", "007", "-1"):
        shutil.copytree(record, record.parent / name)
    shutil.copytree(record, record.parents[1] / "notes" / "0")
    (record.parent / "2").write_text("")
    (record / "checkpoint").mkdir()
    (record / "checkpoint" / "step.pt").write_bytes(b"\x00")
    (record.parent.parent / "README").write_text("")
    (record.parent.parent / "empty").mkdir()
    assert statuses(store) == ["finished"]
    assert results(store, "check").code == 0


def test_one_index_serves_the_reproduction_and_this_command(store, record, monkeypatch):
    from dpbench.reproduction.index import RecordIndex

    statuses(store)
    monkeypatch.setattr(Recorded, "read", None)
    index, digest = RecordIndex(store), record.parent.name
    assert list(index.digests) == [digest]
    settings = index.settings_of(digest)
    assert settings["optim.kind"] == "SGD"
    assert "summary.eps" not in settings


# Many.


def test_two_thousand_records_are_listed_from_the_index(store, record, tmp_path, monkeypatch):
    many = tmp_path / "many"
    make(many, record, 2000, seeds=2)
    first = results(many, "list", "limit=3")
    assert "2,000 runs: " in first.out
    assert "new or changed records to read: 2,000" in first.err
    wanted = 0
    for folder in many.glob("runs/*/*"):
        settings = yaml.load((folder / "config.yaml").read_text(), Loader=yaml.CSafeLoader)
        status = read(folder, "status.json")["status"]
        wanted += (settings["algo"]["name"], settings["eps"], status) == ("disk", 2.0, "finished")
    unfinished = sum(read(folder, "status.json")["status"] != "finished" for folder in many.glob("runs/*/*"))
    assert 0 < unfinished < 200
    monkeypatch.setattr(Recorded, "read", None)
    found = results(many, "list", "algo=disk", "eps=2", "status=finished", "limit=0")
    assert len(rows(found)) == wanted > 10


def test_a_list_does_not_wait_for_what_trains(store):
    """Nothing that takes long to import, and no package that only other commands need."""
    statuses(store)
    command = [sys.executable, "-X", "importtime", "-m", "dpbench.results", "list", f"results_dir={store}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=True)
    imported = {line.split("|")[-1].strip() for line in done.stderr.splitlines() if line.startswith("import time:")}
    assert "pyarrow.parquet" in imported
    heads = {name.partition(".")[0] for name in imported}
    assert not heads & {"torch", "wandb", "hydra", "omegaconf", "scipy", "pandas", "matplotlib"}
    assert "1 run: 1 finished" in done.stdout


def seconds(*arguments: str) -> float:
    """Processor time of a command, user and system; the least of three."""
    found = []
    for _ in range(3):
        before = os.times()
        subprocess.run(
            [sys.executable, "-m", "dpbench.results", *arguments], cwd=ROOT, check=True, stdout=subprocess.DEVNULL
        )
        after = os.times()
        found.append(after.children_user + after.children_system - before.children_user - before.children_system)
    return min(found)


@pytest.mark.slow
def test_a_hundred_thousand_records_are_listed_and_filtered_in_two_seconds(record, tmp_path):
    many = tmp_path / "many"
    make(many, record, 100_000)
    try:
        Index(many)
        where = f"results_dir={many}"
        assert seconds("list", where) < 2
        assert seconds("list", where, "algo=disk", "eps=2,4", "optim.lr<1", "accuracy>0.8", "sort=-accuracy") < 2
    finally:
        shutil.rmtree(many)


# Several writers.

WRITER = """
import random, sys
from pathlib import Path
from dpbench.tracking.record import RunRecord
from dpbench.tracking.status import Status
folder, name, settings = Path(sys.argv[1]), int(sys.argv[2]), {"eps": 1.0, "algo": {"name": "disk"}, "overrides": []}
for number in range(60):
    record = RunRecord(folder, f"{name:04x}{number % 20:08x}", 0)
    assert record.lock.acquire()
    record.start(settings, {"started": "2026-01-01T00:00:00+00:00"})
    for step in (1, 2, 3):
        record.append_metrics({"step": step, "epoch": step, "test_accuracy": 0.1 * step})
    record.write("ledger.json", {"delta": 1e-5, "releases": []})
    record.write("summary.json", {"test_accuracy": {"final": 0.3, "best": 0.3, "best_step": 3}, "steps": 3})
    record.set_status(random.Random(number).choice([Status.FINISHED, Status.FINISHED, Status.FAILED]))
    record.lock.release()
"""


def test_lists_while_processes_write_show_whole_records_alone(tmp_path):
    """Each writer begins, finishes, fails and replaces twenty records, again and again."""
    folder = tmp_path / "results"
    folder.mkdir()
    writers = [
        subprocess.Popen([sys.executable, "-c", WRITER, str(folder), str(name)], env=environment()) for name in range(3)
    ]
    shown = 0
    while any(writer.poll() is None for writer in writers):
        outcome = results(folder, "list", "limit=0")
        assert (outcome.code, outcome.err) == (0, "")
        if "no runs" in outcome.out:
            continue
        for row in rows(outcome):
            shown += 1
            assert row["status"] in ("running", "finished", "failed")
            assert row["accuracy"] == ("30.00" if row["status"] == "finished" else "–")
            # Without a summary, as many as the ledger has releases; 0 before the first.
            assert row["steps"] in (("3",) if row["status"] == "finished" else ("3", "0", "–"))
    assert [writer.returncode for writer in writers] == [0, 0, 0]
    assert shown > 0
    assert len(rows(results(folder, "list", "limit=0"))) == 60
    kept = [json.loads((one / "status.json").read_text())["status"] for one in folder.glob("runs/*/0")]
    assert statuses(folder) == sorted(kept)


def test_a_user_without_a_home_has_no_cache(monkeypatch):
    """As in a container, whose user may have neither HOME nor an entry in passwd."""

    def nobody(uid: int) -> None:
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    for name in ("HOME", "XDG_CACHE_HOME", "DPBENCH_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", nobody)
    cache.write("kind", "key", 1)
    assert cache.read("kind", "key") is None
    assert not cache.place("kind", "key").exists()


def test_an_empty_name_of_a_cache_is_none(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for name in ("XDG_CACHE_HOME", "DPBENCH_CACHE"):
        monkeypatch.setenv(name, "")
    cache.write("kind", "key", 1)
    assert [path.name for path in tmp_path.iterdir()] == ["home"]


def test_a_result_that_cannot_be_kept_leaves_nothing(tmp_path, monkeypatch):
    def refuses(*_):
        raise OSError("disk quota exceeded")

    monkeypatch.setenv("DPBENCH_CACHE", str(tmp_path))
    monkeypatch.setattr(os, "replace", refuses)
    cache.write("kind", "key", 1)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
