"""Checking records, moving what is wrong away, and that a record of a wrong shape stops no other command."""

import json
import os
import shutil
from pathlib import Path

import pytest
import yaml
from cli import only_record, read, records, run, status
from made_up_papers import SEARCH, TABLE, loaded
from made_up_papers import record as made_up
from results_command import age_by, change, results

from dpbench.claims import Artefact, Evidence
from dpbench.config import RunConfig, compose_each
from dpbench.report import build_grid, write_output
from dpbench.report.run_records import read_runs
from dpbench.report.runs import Runs
from dpbench.reproduction.hashes import Hashes
from dpbench.reproduction.index import RecordIndex
from dpbench.reproduction.plan import Planner
from dpbench.reproduction.standing import State
from dpbench.tracking.record import RunRecord
from dpbench.tracking.status import Status


def edited(name: str, **entries):
    return lambda record: change(record, name, lambda content: content | entries)


def settings(**entries):
    def apply(record: Path) -> None:
        content = yaml.safe_load((record / "config.yaml").read_text()) | entries
        (record / "config.yaml").write_text(yaml.safe_dump(content))

    return apply


def without_last_line(record: Path) -> None:
    lines = (record / "metrics.jsonl").read_text().splitlines(keepends=True)
    (record / "metrics.jsonl").write_text("".join(lines[:-1]))


def twice_the_last_line(record: Path) -> None:
    lines = (record / "metrics.jsonl").read_text().splitlines(keepends=True)
    (record / "metrics.jsonl").write_text("".join([*lines, lines[-1]]))


def released(**entries: object):
    return lambda record: change(record, "ledger.json", lambda content: content["releases"][0].update(entries))


def best_of(accuracy: float):
    return lambda record: change(record, "summary.json", lambda content: content["test_accuracy"].update(best=accuracy))


def missing(name: str):
    return lambda record: (record / name).unlink()


DAMAGE = [
    (lambda record: (record / "summary.json").write_text("[]"), "summary.json: expected an object"),
    (lambda record: (record / "ledger.json").write_text("{"), "ledger.json: is no JSON"),
    (missing("status.json"), "status.json is missing"),
    (missing("summary.json"), "summary.json: is missing"),
    (missing("ledger.json"), "ledger.json is missing"),
    (missing("config.yaml"), "config.yaml is missing"),
    (missing("provenance.json"), "provenance.json is missing"),
    (missing("metrics.jsonl"), "metrics.jsonl is missing"),
    (without_last_line, "metrics.jsonl ends at step 2 of 3"),
    (lambda record: (record / "metrics.jsonl").write_text(""), "metrics.jsonl ends at step 0 of 3"),
    (twice_the_last_line, "metrics.jsonl has steps that do not grow"),
    (edited("summary.json", test_accuracy={"final": 0.25}), "summary.json has 0.25"),
    (edited("summary.json", steps=2), "summary.json has 2 steps, ledger.json 3 releases"),
    (edited("summary.json", eps=7.5), "summary.json has eps 7.5, ledger.json 7.99"),
    (edited("summary.json", delta=1e-9), "summary.json has delta 1e-09, ledger.json 0.00033"),
    (edited("summary.json", sampler="shuffled"), "summary.json has sampler shuffled, ledger.json poisson"),
    (edited("summary.json", noise_multiplier=9.0), "summary.json has noise_multiplier 9.0, ledger.json "),
    (edited("summary.json", dataset="mnist"), "summary.json has dataset mnist, config.yaml digits"),
    (edited("ledger.json", target_eps=9.0), "ledger.json has target_eps 9.0, config.yaml 8.0"),
    (edited("ledger.json", delta=1e-9), "ledger.json has delta 1e-09, config.yaml 0.00033"),
    (released(sampling_rate=0.5), "ledger.json has sampling rates 0.5, config.yaml 0.04"),
    (released(noise_multipliers=[0.1]), "ledger.json 0.1"),
    (best_of(0.0), "summary.json has a best accuracy of 0.0, below the last one"),
    (edited("summary.json", seed=1), "summary.json is of seed 1"),
    (edited("ledger.json", eps=8.1), "ledger.json spends eps 8.1 of 8.0"),
    (edited("ledger.json", planned=4), "status.json says finished, ledger.json has 3 of 4 releases"),
    (settings(seed=1), "config.yaml is of seed 1"),
    (settings(eps=4.0), "config.yaml is of the hash "),
    (settings(dataset={}), "config.yaml has settings that no run can have"),
]


def test_whole_records_are_well(store):
    outcome = results(store, "check")
    assert (outcome.code, outcome.out) == (0, "1 record looked at: all is well\n")


@pytest.mark.parametrize(("damage", "says"), DAMAGE)
def test_what_is_wrong_with_a_record_is_said_in_a_line(store, record, damage, says):
    damage(record)
    age_by(store, 7200)
    outcome = results(store, "check")
    assert outcome.code == 1
    (line, total) = outcome.out.splitlines()
    assert line.startswith(f"runs/{record.parent.name}/0: ")
    assert says in line
    assert total == "1 record looked at: 1 problem found; quarantine=true moves it away"


def test_an_eps_that_is_only_published_is_compared_with_its_own_target(store, record):
    edited("ledger.json", eps=20.0, published_eps=7.9)(record)
    edited("summary.json", eps=20.0)(record)
    assert results(store, "check").code == 0
    edited("ledger.json", published_eps=8.5)(record)
    assert "ledger.json spends eps 8.5 of 8.0" in results(store, "check").out


@pytest.mark.parametrize("word", ["failed", "interrupted", "diverged"])
def test_runs_that_ended_early_are_well(store, record, word):
    change(record, "status.json", lambda _: {"status": word})
    without_last_line(record)
    edited("summary.json", test_accuracy={"final": None, "best": None}, steps=2, eps=7.0)(record)
    edited("ledger.json", eps=7.0)(record)
    change(record, "ledger.json", lambda content: content["releases"][0].update(count=2))
    assert results(store, "check").code == 0


def test_what_is_quarantined_is_run_again(store, record):
    (record / "summary.json").write_text("[]")
    outcome = results(store, "check", "quarantine=true")
    assert outcome.code == 1
    moved = store / "quarantine" / record.parent.name / "0"
    assert outcome.out.splitlines()[0].endswith(f"; moved to {moved}")
    assert (moved / "summary.json").read_text() == "[]"
    assert not record.exists()
    assert run(store).code == 0
    assert status(record) == "finished"
    assert results(store, "check").code == 0
    (record / "summary.json").write_text("[]")
    assert results(store, "check", "quarantine=true").code == 1
    assert moved.exists()
    assert moved.with_name("0.2").exists()


def test_damage_without_the_word_stays_where_it_is(store, record):
    (record / "summary.json").write_text("[]")
    assert results(store, "check").code == 1
    assert record.exists()
    assert not (store / "quarantine").exists()


def leave(record: Path, kind: str) -> Path:
    """What a killed run leaves beside or in a record."""
    beside = record.with_name(f"{record.name}.{kind}")
    if kind == "part":
        beside = record / ".summary.json.x7ab2"
    if kind == "checkpoint":
        beside = record / "checkpoint-00000002.pt"
    if kind == "part beside":
        beside = record.with_name(f".{record.name}.published.x7ab2")
    if kind in ("part", "part beside", "checkpoint", "refused"):
        beside.write_text("left")
    else:
        shutil.copytree(record, beside)
        change(beside, "status.json", lambda _: {"status": "running"})
    return beside


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("part", "a file that was never completed"),
        ("part beside", "a file that was never completed"),
        ("checkpoint", "a checkpoint of a run that has ended"),
        ("rerun", "a forced run that did not finish (interrupted); the record beside it stands"),
        ("replaced", "a record that a forced run was replacing when it was killed"),
        ("removed-1", "a record that was being removed"),
        ("refused", "the note of a run that could not start, which nobody took"),
    ],
)
def test_leftovers_of_killed_runs_are_found_and_moved(store, record, kind, says):
    left = leave(record, kind)
    assert results(store, "check").code == 0, "it may belong to a run under way"
    age_by(store, 7200)
    outcome = results(store, "check", "quarantine=true")
    assert outcome.code == 1
    assert f"{left.relative_to(store)}: {says}; moved to " in outcome.out
    assert not left.exists()
    assert record.exists()
    assert results(store, "check").code == 0


def test_what_is_left_of_a_note_goes_with_its_record(store, record):
    left = leave(record, "part beside")
    other = record.with_name(".1.published.x7ab2")
    other.write_text("of another seed")
    assert results(store, "remove", f"{record.parent.name}/0", "yes=true").code == 0
    assert not left.exists()
    assert other.exists()


def test_a_forced_run_that_did_not_finish_may_be_all_there_is(store, record):
    leave(record, "rerun")
    shutil.rmtree(record)
    age_by(store, 7200)
    outcome = results(store, "check")
    assert "a forced run that did not finish (interrupted); there is no other record of it\n" in outcome.out


def test_the_checkpoint_of_a_run_that_goes_on_is_nothing_to_find(store, record):
    change(record, "status.json", lambda _: {"status": "interrupted"})
    left = leave(record, "checkpoint")
    age_by(store, 7200)
    assert results(store, "check", "quarantine=true").code == 0
    assert left.exists()


def test_what_a_forced_run_was_killed_in_the_middle_of_is_left_to_it(store, record):
    rerun, replaced = leave(record, "rerun"), leave(record, "replaced")
    shutil.rmtree(record)
    age_by(store, 7200)
    outcome = results(store, "check", "quarantine=true")
    assert outcome.code == 1
    for left in (rerun, replaced):
        said = "a forced run was taking the place of the one before when it was killed; it takes it next time"
        assert f"{left.relative_to(store)}: {said}\n" in outcome.out
        assert left.exists()


def test_a_run_that_was_killed_is_told_from_one_under_way(store, record):
    change(record, "status.json", lambda _: {"status": "running"})
    os.utime(record)
    assert results(store, "check").code == 0
    age_by(store, 7200)
    outcome = results(store, "check", "quarantine=true")
    assert outcome.code == 1
    assert "killed, nothing written for " in outcome.out
    assert record.exists(), "it runs again without being moved"
    assert results(store, "check", "quiet=3d").code == 0
    record.with_name("0.lock").write_text("")  # what a living run renews
    assert results(store, "check").code == 0


def test_only_what_is_named_is_looked_at(store, record):
    shutil.copytree(record, record.with_name("3"))
    digest = record.parent.name
    assert results(store, "check", f"{digest}/0").out == "1 record looked at: all is well\n"
    assert results(store, "check", digest).code == 1, "the copy is of seed 0"
    assert results(store, "check", "ffff").error() == "ffff: no record has a hash that begins so"
    shutil.copytree(record, record.parents[1] / ("0" * 12) / "0")
    both = results(store, "check", f"{digest}/0", "0000").out
    assert "\n2 records looked at: 1 problem found" in both, "the copy is of another hash"


# Other commands.

SPOILT = [
    ("status.json", "[]"),
    ("status.json", "3"),
    ("summary.json", "[]"),
    ("summary.json", '{"test_accuracy": []}'),
    ("summary.json", '{"test_accuracy": {"best": 0.5}}'),
    ("summary.json", '{"test_accuracy": {"final": {}}}'),
    ("summary.json", '{"test_accuracy": {"final": 0.5}, "eps": []}'),
    ("ledger.json", "[[]]"),
    ("ledger.json", '{"releases": 3}'),
    ("provenance.json", '"word"'),
    ("provenance.json", '{"started": 3, "versions": [], "wall_seconds": {}, "device": []}'),
    ("metrics.jsonl", "3\n[]\n"),
    ("metrics.jsonl", '{"epoch": 1, "test_accuracy": {}}\n'),
    ("config.yaml", "- a\n"),
    ("config.yaml", "overrides: 3\nchoices: []\ndataset: word\nfilter: []\n"),
]


@pytest.fixture(scope="module")
def reproduced(tmp_path_factory) -> tuple[tuple[Artefact, ...], RunConfig, Path]:
    """A table of four cells with two seeds each, settings of its planner, and the eight records."""
    folder = tmp_path_factory.mktemp("reproduced")
    artefacts = loaded(folder, table_1=TABLE)
    lines = [cell.candidates[0] for cell in artefacts[0].cells]
    *jobs, device = compose_each([*lines, ("device=cpu",)])
    for job in jobs:
        for seed in (0, 1):
            one = made_up(folder / "results", job, seed, 0.6)
            (one / "metrics.jsonl").write_text('{"step": 1, "epoch": 1, "test_accuracy": 0.6}\n')
            (one / "provenance.json").write_text(json.dumps({"started": "2026-01-01T00:00:00+00:00"}))
    return artefacts, device.config, folder / "results"


@pytest.mark.parametrize(("name", "content"), SPOILT)
def test_a_record_of_a_wrong_shape_stops_no_other_command(reproduced, tmp_path, capsys, name, content):
    """Of eight runs one is spoilt: the others are listed, judged, reported and planned as ever."""
    artefacts, config, made = reproduced
    folder = shutil.copytree(made, tmp_path / "results")
    hashes = Hashes(RecordIndex(folder))
    spoilt = folder / "runs" / hashes.of(artefacts[0].cells[0].candidates[0]) / "0"
    (spoilt / name).write_text(content)
    counts = name not in ("status.json", "summary.json")

    listed = results(folder, "list")
    assert listed.code == 0
    assert "8 runs: " in listed.out
    assert ("8 finished" if counts else "7 finished, 1 damaged") in listed.out

    planner = Planner(artefacts, folder, config, retry=False)
    states = [entry.standing.state for entry in planner.entries]
    # What says finished and is damaged is not run again before it was moved away; what says nothing is.
    first = State.DONE if counts else State.PARTLY if name == "status.json" else State.FAILED
    assert states == [first, State.DONE, State.DONE, State.DONE]
    grid = build_grid(artefacts[0], Evidence(folder, hashes))
    assert write_output([grid], folder, lambda _: None)
    found: Runs = read_runs([grid], folder)
    assert found.count in (7, 8)
    for configuration in found.configurations:
        assert configuration.settings is not None
        assert configuration.command.startswith("python -m dpbench.run")
        _ = configuration.spent, configuration.guarantee

    warnings = [line for line in capsys.readouterr().err.splitlines() if str(spoilt) in line]
    assert len([line for line in (*warnings, *listed.err.splitlines()) if "warning: " in line]) <= 1
    if name in ("status.json", "summary.json"):
        assert f"warning: {spoilt}: {name}: " in listed.err
    assert results(folder, "check").code == 1


def test_a_finished_run_without_a_valid_summary_is_run_again(store, record):
    change(record, "summary.json", lambda content: {**content, "test_accuracy": [1]})
    outcome = run(store)
    assert outcome.code == 0
    assert "damaged (summary.json: test_accuracy: expected an object)" in outcome.out
    assert status(record) == "finished"


def test_a_status_of_a_wrong_shape_is_that_of_a_run_to_be_repeated(store, record):
    (record / "status.json").write_text('["finished"]')
    assert run(store).code == 0
    assert read(record, "status.json") == {"status": "finished"}


def test_a_search_goes_on_beside_a_damaged_record(tmp_path):
    artefacts = loaded(tmp_path, table_2=SEARCH)
    jobs = compose_each(artefacts[0].cells[0].candidates)
    for job in jobs:
        made_up(tmp_path / "results", job, 0, 0.6)
    folder = made_up(tmp_path / "results", jobs[1], 0, 0.9)
    (folder / "summary.json").write_text("[]")
    evidence = Evidence(tmp_path / "results", Hashes(RecordIndex(tmp_path / "results")))
    measured = evidence.measure(artefacts[0].cells[0], None)
    assert measured.values == (60.0,)
    assert measured.broken == {str(folder): "damaged"}


def test_a_forced_run_that_is_under_way_is_no_leftover(store, record):
    forced = RunRecord(store, record.parent.name, 0)
    forced.start({}, {})
    assert results(store, "check").code == 0
    forced.set_status(Status.RUNNING)
    assert len(records(store)) == 2
    assert results(store, "check").code == 0


def test_a_forced_run_that_lives_is_no_leftover_however_long_it_has_written_nothing(store, record):
    forced = RunRecord(store, record.parent.name, 0)
    assert forced.acquire()
    forced.start({}, {})
    age_by(forced.working)
    assert results(store, "check", "quarantine=true").code == 0
    forced.set_status(Status.RUNNING)
    forced.lock.release()


@pytest.mark.parametrize("damaged", ["evaluation", "ledger"])
def test_a_record_whose_entries_lack_what_they_are_of_is_kept_aside_and_its_run_made_again(store, record, damaged):
    if damaged == "evaluation":
        text = (record / "metrics.jsonl").read_text()
        (record / "metrics.jsonl").write_text(text + "{}\n")
    else:
        change(record, "ledger.json", lambda ledger: ledger["releases"][0].update(noise_multipliers=[]))
        (record / "metrics.jsonl").unlink()
    assert run(store).code == 0
    assert status(record) == "finished"
    assert (store / "quarantine" / record.parent.name / record.name).is_dir()


@pytest.mark.parametrize("word", ["failed", "interrupted", "diverged", "invalid"])
def test_files_of_a_run_that_ended_early_contradict_each_other_all_the_same(store, record, word):
    change(record, "status.json", lambda _: {"status": word})
    edited("summary.json", eps=7.5)(record)
    age_by(store, 7200)
    outcome = results(store, "check")
    assert outcome.code == 1
    assert "summary.json has eps 7.5, ledger.json 7.99" in outcome.out


@pytest.mark.parametrize(("entry", "factor"), [("target_eps", 1.001), ("delta", 1.001), ("target_eps", 1 - 1e-6)])
def test_an_entry_that_is_hardly_another_is_another(store, record, entry, factor):
    for name in ("ledger.json", "summary.json"):
        change(record, name, lambda content: content.update({entry: content[entry] * factor}))
    age_by(store, 7200)
    out = results(store, "check").out
    assert f"ledger.json has {entry} " in out
    assert f"summary.json has {entry} " in out


def test_one_release_at_another_sampling_rate_is_found_among_right_ones(store, record):
    def split(content):
        (entry,) = content["releases"]
        content["releases"] = [entry | {"count": entry["count"] - 1}, entry | {"count": 1, "sampling_rate": 0.5}]

    change(record, "ledger.json", split)
    age_by(store, 7200)
    assert "ledger.json has sampling rates 0.04" in results(store, "check").out


def test_a_summary_by_another_accountant_than_the_ledger_is_found(store, record):
    edited("summary.json", accountant="gdp")(record)
    age_by(store, 7200)
    assert "summary.json has accountant gdp, ledger.json rdp" in results(store, "check").out


def test_a_multiplier_that_was_given_is_that_of_the_record(tmp_path):
    assert run(tmp_path, "privacy.noise_multiplier=4.0").code == 0
    record = only_record(tmp_path)
    edited("summary.json", noise_multiplier=2.0)(record)
    change(record, "ledger.json", lambda content: content["releases"][0].update(noise_multipliers=[2.0]))
    age_by(tmp_path, 7200)
    assert "summary.json has noise_multiplier 2.0, config.yaml 4.0" in results(tmp_path, "check").out
