"""python -m dpbench.results on the records of real runs of a second: listing, comparing, exporting, removing."""

import csv
import json
import math
import re
import shutil
import statistics
from decimal import Decimal
from io import StringIO
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from cli import Outcome, final_accuracy, only_record, read, records, run, status
from made_up_locks import held_elsewhere
from pyarrow import parquet
from results_command import age_by, change, results, rows
from scipy import stats

from dpbench.results.arguments import parse
from dpbench.results.comparison import difference_of_means, mean_and_spread
from dpbench.results.selection import Selection, column_of, same_value
from dpbench.tracking.published import Published


@pytest.fixture(scope="module")
def sweep(tmp_path_factory) -> Path:
    """DP-SGD and DiSK, two seeds each, at one learning rate; one run has failed, by what its record says."""
    folder = tmp_path_factory.mktemp("sweep")
    assert run(folder, "algo=dpsgd,disk", "seed=0,1", "optim.lr=0.5", "-m").code == 0
    assert run(folder, "algo=disk", "eps=inf", "optim.lr=0.25").code == 0
    failed = of_algorithm(folder, "disk", eps="inf")[0]
    (failed / "status.json").write_text('{"status": "failed", "reason": "the disk is on fire"}')
    age_by(folder)
    return folder


@pytest.fixture
def store(sweep, tmp_path) -> Path:
    """A copy that may be changed, with a cache of its own."""
    import shutil

    return shutil.copytree(sweep, tmp_path / "results")


def of_algorithm(folder: Path, name: str, eps: float | str = 8.0) -> list[Path]:
    found = {record: yaml.safe_load((record / "config.yaml").read_text()) for record in records(folder)}
    return [one for one, settings in found.items() if (settings["algo"]["name"], settings["eps"]) == (name, eps)]


def hashes(outcome: Outcome) -> set[tuple[str, str]]:
    return {(row["hash"], row["seed"]) for row in rows(outcome)}


def named(found: list[Path]) -> set[tuple[str, str]]:
    return {(record.parent.name, record.name) for record in found}


# Listing.


def test_a_list_has_a_row_for_each_record(sweep):
    outcome = results(sweep, "list")
    assert (outcome.code, outcome.err) == (0, "")
    assert hashes(outcome) == named(records(sweep))
    for row in rows(outcome):
        record = sweep / "runs" / row["hash"] / row["seed"]
        origin, finished = read(record, "provenance.json"), status(record) == "finished"
        assert row["status"] == status(record)
        assert row["accuracy"] == (f"{100 * final_accuracy(record):.2f}" if finished else "–")
        assert (row["algorithm"], row["dataset"], row["model"], row["steps"]) == (
            read(record, "summary.json")["algorithm"],
            "digits",
            "linear",
            "3",
        )
        assert row["commit"].rstrip("+") == (origin["commit"] or "–")[:8]
        assert row["commit"].endswith("+") == bool(origin["dirty"])
    assert outcome.out.endswith("5 runs: 4 finished, 1 failed\n")


@pytest.mark.parametrize(
    ("conditions", "count"),
    [
        ("algo=disk", 3),
        ("algo=disk,dpsgd status=finished", 4),
        ("algo!=disk", 2),
        ("eps=8", 4),
        ("eps=8.0 seed=1", 2),
        ("eps=8e0", 4),
        ("eps=inf", 1),
        ("eps<=8", 4),
        ("eps>8", 1),
        ("status=failed", 1),
        ("optim.lr=0.25,1", 1),
        ("optim.lr<0.5", 1),
        ("dataset=digits model=linear filter=none", 2),
        ("query.kind=TwoPoint seed=0", 2),
        ("delta=1/N^1.1", 5),
        ("delta<1e-3", 5),
        ("delta>=1e-3", 0),
        ("delta!=1e-5", 5),
        ("delta=0.00033635474216673706", 5),  # 1437^-1.1
        ("dataset.mean=[0.0]", 5),
        ("micro_batch=null device=cpu", 5),
        ("augmentation.flip=false", 5),
        ("summary.steps>=3", 5),
        ("accuracy>=0", 4),
        ("accuracy>1", 0),
        ("age>1d", 0),
        ("age<1d", 5),
        ("spent<=8", 4),
        ("eps=8 algo=dpsgd seed=3", 0),
    ],
)
def test_conditions_on_settings_and_results_choose_runs(sweep, conditions, count):
    outcome = results(sweep, "list", *conditions.split())
    assert outcome.code == 0
    if count:
        assert len(rows(outcome)) == count
    else:  # the condition is named that no run meets, of several
        assert outcome.out == f"no such runs: none has {conditions.split()[-1]}\n"


def test_a_value_that_is_spelled_like_one_of_a_run_is_named(sweep):
    assert results(sweep, "list", "algo=dsik").out == "no such runs: none has algo=dsik; did you mean disk?\n"
    assert results(sweep, "list", "algo=dsik,disc").out.endswith("; did you mean disk?\n")
    assert results(sweep, "list", "eps=9").out == "no such runs: none has eps=9\n"
    assert results(sweep, "list", "algo!=disk,dpsgd").out == "no such runs: none has algo!=disk,dpsgd\n"


def test_runs_are_named_by_the_beginning_of_their_hashes(sweep):
    record = of_algorithm(sweep, "disk")[0]
    digest = record.parent.name
    assert hashes(results(sweep, "list", digest[:6])) == {(digest, "0"), (digest, "1")}
    assert hashes(results(sweep, "list", f"{digest}/1")) == {(digest, "1")}


def test_a_seed_is_named_as_a_whole():
    columns = {"hash": ["ab12"] * 3, "seed": [10, 1, 21]}
    index = SimpleNamespace(size=3, column=columns.__getitem__)
    assert Selection.parse(["ab12/1"]).places(index) == [1]


def test_commas_within_brackets_separate_no_values():
    (condition,) = Selection.parse(["hidden=[8,4],[16]"]).conditions
    assert condition.values == ("[8,4]", "[16]")


def test_what_every_run_has_is_no_unknown_setting_though_no_record_has_it_yet():
    assert column_of(SimpleNamespace(names=(), size=2), "accuracy") == "summary.test_accuracy.final"


def test_a_seed_that_a_hash_does_not_have_is_said_to_be_missing(sweep):
    digest = records(sweep)[0].parent.name
    said = f"{digest}/99: no record of that seed"
    assert results(sweep, "check", f"{digest}/99").error() == said
    assert results(sweep, "list", f"{digest}/99").error().startswith(f"{said}; there is 0")


def test_rows_are_sorted_and_limited(sweep):
    by_accuracy = [float(row["accuracy"]) for row in rows(results(sweep, "list", "eps=8", "sort=accuracy"))]
    assert by_accuracy == sorted(by_accuracy)
    outcome = results(sweep, "list", "sort=-accuracy", "limit=2")
    assert [float(row["accuracy"]) for row in rows(outcome)] == sorted(by_accuracy)[::-1][:2]
    assert "5 runs: " in outcome.out
    assert "2 of them shown" in outcome.out
    assert [row["status"] for row in rows(results(sweep, "list", "sort=accuracy"))][-1] == "failed"
    began = [
        read(sweep / "runs" / row["hash"] / row["seed"], "provenance.json")["started"]
        for row in rows(results(sweep, "list"))
    ]
    assert began == sorted(began, reverse=True)


@pytest.mark.parametrize("sign", ["", "-"])
def test_what_is_no_number_comes_last_and_leaves_the_others_in_order(sweep, tmp_path, sign):
    shutil.copytree(sweep / "runs", tmp_path / "runs")
    found = [one for one in records(tmp_path) if status(one) == "finished"]
    values = [3.0, "nan", 1.0, 2.0]
    for record, value in zip(found, values, strict=True):
        change(record, "summary.json", lambda summary, value=value: summary.update(test_loss=value))
    of = {one.parent.name + "/" + one.name: value for one, value in zip(found, values, strict=True)}
    shown = rows(results(tmp_path, "list", "status=finished", f"sort={sign}summary.test_loss"))
    want = [3.0, 2.0, 1.0] if sign else [1.0, 2.0, 3.0]
    assert [of[f"{row['hash']}/{row['seed']}"] for row in shown] == [*want, "nan"]


def test_further_columns_are_shown(sweep):
    shown = rows(results(sweep, "list", "columns=optim.lr,filter"))
    assert {(row["algorithm"], row["optim.lr"], row["filter"]) for row in shown} == {
        ("dpsgd", "0.5", "none"),
        ("disk", "0.5", "exponential"),
        ("disk", "0.25", "exponential"),
    }


def test_the_eps_spent_is_shown_and_said_not_to_be_proven_where_it_is_not(store):
    record, other = of_algorithm(store, "disk")
    for one in (record, other):
        change(one, "summary.json", lambda content: content | {"eps": 9.25, "private": False})
    assert results(store, "list", record.parent.name).out.count("9.25, not proven") == 2
    proven = of_algorithm(store, "dpsgd")[0]
    found = {row["spent"] for row in rows(results(store, "list", proven.parent.name))}
    assert found == {f"{read(proven, 'summary.json')['eps']:.4g}"}
    table = cells(results(store, "compare", "algo=disk", "eps=8", "vs", "algo=dpsgd"))
    assert table["eps spent"][0] == "9.25, not proven"
    assert "proven" not in table["eps spent"][1]


def test_the_eps_of_a_group_is_not_proven_where_that_of_one_of_its_runs_is_not(store):
    change(of_algorithm(store, "disk")[1], "summary.json", lambda content: content | {"private": False})
    table = cells(results(store, "compare", "algo=disk", "eps=8", "vs", "algo=dpsgd"))
    assert table["eps spent"][0].endswith(", not proven")
    assert "proven" not in table["eps spent"][1]


def test_what_a_search_spends_is_shown_beside_what_its_run_spends(tmp_path, monkeypatch):
    tables = []
    monkeypatch.setattr("dpbench.cli.outcome.log_table", lambda *_, **table: tables.append(table))
    outcome = run(tmp_path, "privacy.search_runs=8", "privacy.accountant=auto", "epochs=0.5", "eps=8", "-m")
    assert outcome.code == 0
    summary = read(only_record(tmp_path), "summary.json")
    alone, search = summary["eps"], summary["search_eps"]
    assert alone < 0.8 * search
    assert search == pytest.approx(8, rel=1e-2)
    assert "eps of the search" in outcome.out
    assert re.search(rf" {alone:.4g} +{search:.4g} .* finished", outcome.out)
    (written,) = tmp_path.glob("sweeps/*/table.csv")
    (cells,) = csv.DictReader(StringIO(written.read_text()))
    assert (float(cells["eps"]), float(cells["eps of the search"])) == (alone, search)
    (tracked,) = tables
    assert dict(zip(tracked["columns"], tracked["rows"][0], strict=True))["eps of the search"] == str(search)
    (row,) = rows(results(tmp_path, "list"))
    assert (row["spent"], row["search_eps"]) == (f"{alone:.4g}", f"{search:.4g}")


def test_without_a_search_nothing_is_said_of_one(results_of_a_run):
    assert "search" not in results(results_of_a_run, "list").out
    (row,) = rows(results(results_of_a_run, "list", "columns=search_eps"))
    assert row["search_eps"] == "–"


def test_a_wide_table_is_not_cut(sweep):
    names = ("provenance.command", "optim.lr", "filter", "clip.kind", "privacy.sampler", "dataset.suggested.batch_size")
    shown = results(sweep, "list", "columns=" + ",".join(names)).out
    assert "…" not in shown
    assert all(name in shown.splitlines()[0] for name in names)


def test_a_folder_without_records_is_said_to_have_none(tmp_path):
    outcome = results(tmp_path, "list", "algo=disk")
    assert (outcome.code, outcome.out) == (0, f"no runs below {tmp_path / 'runs'}\n")
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("words", ["list", "compare a=1 vs a=2", "export to=runs.csv", "check", "remove status=failed"])
def test_a_folder_that_is_not_there_is_refused(tmp_path, words):
    verb, *rest = words.split()
    outcome = results(tmp_path / "nowhere", verb, *rest)
    assert (outcome.code, outcome.out) == (2, "")
    assert outcome.error() == f"results_dir={tmp_path / 'nowhere'}: expected a folder that exists"
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(
    ("typed", "says"),
    [
        ("", "nothing typed: expected one of list, compare, export, check, remove first; --help tells what they do"),
        ("lst", "lst: expected one of list, compare,"),
        ("list optim.l=1", "optim.l: no record has such a setting; did you mean optim.lr"),
        ("list abc", "abc: expected setting=value, or at least four digits of a hash; see --help"),
        (
            "list accuracy",
            "accuracy: expected setting=value, or at least four digits of a hash; "
            "quote comparisons, as in 'accuracy>0.9'",
        ),
        ("list eps=", "eps=: expected setting=value"),
        ("list eps<high", "eps<high: expected a number, to compare with"),
        ("list eps==8", "eps==8: expected one sign, =, !=, <=, >=, <, >"),
        ("list accuracy>90", "accuracy>90: expected a share from 0 to 1, such as 0.9"),
        ("list status=done", "status=done: expected one of running, finished,"),
        ("list age=2d", "age=2d: expected a comparison, such as age<2d"),
        ("list age<2x", "age<2x: expected a time such as 90s, 30m, 2h or 1h30m"),
        ("list ffffffff", "ffffffff: no record has a hash that begins so"),
        ("list limit=few", "limit=few: expected a whole number, 0 for all"),
        ("list limit=1 limit=2", "limit=2: expected once"),
        ("list sort=nothing", "nothing: no record has such a setting"),
        ("list columns=nothing", "nothing: no record has such a setting"),
        ("list a=1 vs a=2", "vs: only compare takes several groups of runs"),
        ("compare algo=disk vs", "vs: expected hashes or settings on both of its sides"),
        ("compare algo=disk eps=8", "algo=disk eps=8: expected 2 to 8 configurations to compare, found 1"),
        ("compare algo=disk vs algo=none", "algo=none: no such runs"),
        ("export", "to='': expected a file that ends in .csv or .parquet, or wandb"),
        ("export to=/no/such/folder/x.csv", "to=/no/such/folder/x.csv: expected a file in a folder that exists"),
        ("check algo=disk", "algo=disk: check takes hashes alone"),
        ("check ffffffff", "ffffffff: no record has a hash that begins so"),
        ("check quarantine=1", "quarantine=1: expected true or false"),
        ("remove", "remove: expected hashes or settings that say which runs"),
        ("remove status=failed yes=please", "yes=please: expected true or false"),
    ],
)
def test_bad_input_is_refused_in_a_sentence(sweep, typed, says):
    from dpbench.results.__main__ import main

    if not typed:
        assert main([]) == 2
        return
    verb, *words = typed.split()
    outcome = results(sweep, verb, *words)
    assert outcome.code == 2
    assert outcome.error().startswith(says)


def test_help_tells_all_verbs_and_keys(sweep):
    from dpbench.results.arguments import VERBS

    outcome = results(sweep, "--help")
    assert outcome.code == 0
    for name, verb in VERBS.items():
        assert f"\n{name} " in outcome.out
        assert all(key in outcome.out for key in verb.options)


def test_help_of_a_verb_is_of_that_one_alone(sweep):
    from dpbench.results.arguments import VERBS

    for name, verb in VERBS.items():
        shown = results(sweep, name, "--help").out
        assert shown.startswith(f"python -m dpbench.results {name} ")
        assert {word for word in VERBS if f"dpbench.results {word} " in shown} == {name}
        assert [word for word in VERBS if f"\n{word} " in shown] == [name]
        assert all(key in shown for key in verb.options)
        assert ("SETTING is" in shown) == (name != "check")


@pytest.mark.parametrize(
    ("held", "typed", "same"),
    [
        (0.5, "0.50", True),
        (True, "true", True),
        (True, "True", True),
        (None, "null", True),
        (None, "0", False),
        ("none", "none", True),
        ("none", "null", False),
        ([8, 4], "[8,4]", True),
        ("inf", "inf", True),
        ("1/N", "1/N^1.1", False),
        ([0.0], "[0]", True),
        ([0.0, 1], "[0]", False),
        ([], "[]", True),
        ([1], "1", False),
        (1, "1e0", True),
    ],
)
def test_values_are_equal_however_they_were_typed(held, typed, same):
    assert same_value(held, typed) == same


# Comparing.


def cells(outcome: Outcome) -> dict[str, list[str]]:
    """Rows of a comparison by their names."""
    lines = [line for line in outcome.out.splitlines()[1:] if line.strip()]
    split = [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in lines]
    return {name: values for name, *values in split}


def as_printed(values: list[float]) -> str:
    spread = Decimal(statistics.stdev(values))
    if not spread:
        return f"{statistics.fmean(values):.5g}"
    place = Decimal(1).scaleb(spread.adjusted() - 1)  # the second digit of the deviation
    return f"{Decimal(statistics.fmean(values)).quantize(place)} ± {spread.quantize(place)}"


@pytest.mark.parametrize(
    ("values", "shown"),
    [
        ([], "–"),
        ([0.5], "0.5"),
        ([1.0, 1.0], "1"),
        ([1.0, 2.0, 3.0], "2.0 ± 1.0"),
        ([88.0, 90.0, 86.5], "88.2 ± 1.8"),
        ([100.0, 200.0, 300.0], "200 ± 100"),
        ([0.01, 0.012], "0.0110 ± 0.0014"),
        ([1.0, 1.0001], "1 ± 7.1e-05"),
        ([1.0, float("inf")], "inf"),
    ],
)
def test_a_mean_ends_where_its_deviation_does(values, shown):
    assert mean_and_spread(values) == shown


def test_configurations_are_compared_by_what_differs(sweep):
    groups = [of_algorithm(sweep, name) for name in ("dpsgd", "disk")]
    outcome = results(sweep, "compare", *(group[0].parent.name for group in groups))
    found = cells(outcome)
    head = outcome.out.splitlines()[0].split()
    groups.sort(key=lambda group: head.index(group[0].parent.name))
    assert found["finished runs (n)"] == ["2", "2"]
    assert found["test accuracy, last (%)"] == [
        as_printed([100 * final_accuracy(one) for one in group]) for group in groups
    ]
    assert found["best on test (%)"] == [
        as_printed([100 * read(one, "summary.json")["test_accuracy"]["best"] for one in group]) for group in groups
    ]
    kinds = [yaml.safe_load((group[0] / "config.yaml").read_text())["query"]["kind"] for group in groups]
    assert found["query.kind"] == kinds
    assert not {"optim.lr", "eps", "seed", "algo.name", "results_dir", "dataset.name"} & found.keys()
    assert not any(name.startswith("configurations") for name in found)


@pytest.mark.parametrize("others", [[80.0, 81.5, 79.0], [80.0, 85.0], [80.0, 80.0, 80.5]])
def test_the_interval_of_a_difference_is_that_of_scipy(others):
    values = [83.0, 84.1, 82.6, 85.0]
    wanted = stats.ttest_ind(values, others, equal_var=False).confidence_interval(0.95)
    assert difference_of_means(values, others) == pytest.approx((wanted.low, wanted.high), rel=1e-9)


@pytest.mark.parametrize("others", [[], [1.0], [1.0, float("nan")], [83.0, 83.0]])
def test_a_difference_without_a_known_spread_has_no_interval(others):
    assert difference_of_means([83.0, 83.0], others) is None


def test_two_configurations_are_compared_by_the_interval_of_their_difference(sweep):
    groups = [of_algorithm(sweep, name) for name in ("dpsgd", "disk")]
    digests = [group[0].parent.name for group in groups]
    outcome = results(sweep, "compare", digests[0], "vs", digests[1])
    first, second = ([100 * final_accuracy(one) for one in group] for group in groups)
    wanted = stats.ttest_ind(second, first, equal_var=False).confidence_interval(0.95)
    difference = f"{statistics.fmean(second) - statistics.fmean(first):.2f} points"
    interval = f"95 % interval {wanted.low:.2f} to {wanted.high:.2f} (Welch)"
    line = f"test accuracy, {digests[1]} less {digests[0]}: {difference}, {interval}"
    assert line in outcome.out.splitlines()
    assert "Welch" not in results(sweep, "compare", digests[0], "vs", digests[1], "vs", digests[0]).out


def test_groups_of_runs_are_compared(sweep):
    outcome = results(sweep, "compare", "algo=disk", "vs", "algo=dpsgd", "eps=8")
    found = cells(outcome)
    assert outcome.out.splitlines()[0].split("  ")[-2:] != []
    assert found["finished runs (n)"] == ["2", "2"]
    assert found["failed"] == ["1", "–"]
    assert "configurations, averaged over" not in found  # the run of the other one has failed
    assert found["eps"] == ["8, inf", "8"] or found["eps"] == ["inf, 8", "8"]
    disk = [100 * final_accuracy(one) for one in of_algorithm(sweep, "disk")]
    assert found["test accuracy, last (%)"][0] == as_printed(disk)
    assert "data sets" not in outcome.out
    assert "Means over" not in outcome.out


def test_the_eps_of_runs_that_spent_different_ones_is_a_range_and_pointed_out(store):
    (without,) = of_algorithm(store, "disk", eps="inf")
    change(without, "status.json", lambda content: {"status": "finished"})
    outcome = results(store, "compare", "algo=disk", "vs", "algo=dpsgd")
    spent = {f"{read(one, 'summary.json')['eps']:.4g}" for one in of_algorithm(store, "disk")}
    assert cells(outcome)["eps spent"][0] == f"{spent.pop()} to inf"
    assert cells(outcome)["configurations, averaged over"] == ["2", "1"]
    several = [line for line in outcome.out.splitlines() if line.startswith("Means over several configurations")]
    assert [line.rpartition(" in ")[2] for line in several] == ["algo=disk"]
    assert "Welch" not in outcome.out, "spread over configurations is no noise"
    assert outcome.out.splitlines()[-1] == "Means over several values of eps say little: add eps=... to algo=disk"


def test_means_over_several_data_sets_are_pointed_out(store):
    changed = of_algorithm(store, "disk")[0] / "config.yaml"
    changed.write_text(re.sub(r"(?m)^(dataset:\n(?:  .*\n)*?  name: ).*$", r"\1other", changed.read_text()))
    outcome = results(store, "compare", "algo=disk", "vs", "algo=dpsgd")
    assert outcome.out.splitlines()[-1] == "Means over several data sets say little: add dataset=... to algo=disk"


def test_a_group_of_which_nothing_has_finished_differs_in_nothing_yet(sweep):
    outcome = results(sweep, "compare", "eps=inf", "vs", "algo=dpsgd")
    assert cells(outcome)["finished runs (n)"] == ["0", "2"]
    assert "The groups differ" not in outcome.out


def test_groups_on_different_models_are_pointed_out(store):
    for record in of_algorithm(store, "disk"):
        changed = record / "config.yaml"
        changed.write_text(re.sub(r"(?m)^(model:\n(?:  .*\n)*?  name: ).*$", r"\1other", changed.read_text()))
    outcome = results(store, "compare", "algo=disk", "eps=8", "vs", "algo=dpsgd")
    assert outcome.out.splitlines()[-1] == "The groups differ in their models."
    assert "data sets" not in outcome.out


# Exporting.


def test_a_csv_file_has_all_settings_results_and_origins(sweep, tmp_path):
    outcome = results(sweep, "export", "eps=8", f"to={tmp_path / 'runs.csv'}")
    assert (outcome.code, outcome.out) == (0, f"4 runs written to {tmp_path / 'runs.csv'}\n")
    with (tmp_path / "runs.csv").open() as stream:
        table = list(csv.DictReader(stream))
    assert len(table) == 4
    for row in table:
        record = sweep / "runs" / row["hash"] / row["seed"]
        settings, summary = yaml.safe_load((record / "config.yaml").read_text()), read(record, "summary.json")
        assert row["status"] == "finished"
        assert float(row["optim.lr"]) == settings["optim"]["lr"]
        assert (row["optim.kind"], row["micro_batch"]) == (settings["optim"]["kind"], "")
        assert json.loads(row["dataset.mean"]) == settings["dataset"]["mean"]
        assert json.loads(row["overrides"]) == settings["overrides"]
        assert float(row["summary.test_accuracy.final"]) == summary["test_accuracy"]["final"]
        assert row["summary.private"] == "true"
        assert row["provenance.started"] == read(record, "provenance.json")["started"]


def test_a_parquet_file_has_types(sweep, tmp_path):
    assert results(sweep, "export", f"to={tmp_path / 'runs.parquet'}").code == 0
    table = parquet.read_table(tmp_path / "runs.parquet")
    assert table.num_rows == 5
    types = {name: str(table.schema.field(name).type) for name in table.column_names}
    assert (types["eps"], types["seed"], types["augmentation.flip"], types["algo.name"]) == (
        "double",
        "int64",
        "bool",
        "string",
    )
    assert sorted(table["eps"].to_pylist()) == [8.0, 8.0, 8.0, 8.0, math.inf]
    of_run = dict(
        zip(
            zip(table["hash"].to_pylist(), table["seed"].to_pylist(), strict=True),
            table["summary.eps"].to_pylist(),
            strict=True,
        )
    )
    for record in records(sweep):
        assert of_run[record.parent.name, int(record.name)] == float(read(record, "summary.json")["eps"])


# Removing.


def test_nothing_is_removed_before_it_was_shown_and_agreed_to(store):
    before = records(store)
    outcome = results(store, "remove", "status=failed")
    assert outcome.code == 0
    assert len(rows(outcome)) == 1
    assert "1 run would be removed by yes=true" in outcome.out
    assert records(store) == before


def test_a_run_under_way_goes_only_where_it_was_named(store):
    (found,) = [folder for folder in (store / "runs").glob("*/*") if '"failed"' in (folder / "status.json").read_text()]
    change(found, "status.json", lambda _: {"status": "running"})
    held_elsewhere(found.with_name(f"{found.name}.lock"))
    outcome = results(store, "remove", "algo=disk", "yes=true")
    assert "finished and running stay: such runs go only if named by hash or by their status" in outcome.out
    assert found.exists()
    assert results(store, "remove", "status=running", "yes=true").out.endswith("1 run removed\n")
    assert not found.exists()


def test_what_failed_is_removed(store):
    (failed,) = of_algorithm(store, "disk", eps="inf")
    outcome = results(store, "remove", "status=failed,interrupted,diverged", "yes=true")
    assert outcome.out.endswith("1 run removed\n")
    assert not failed.parent.exists()  # nor does a note stay of a run without privacy
    assert len(records(store)) == 4
    assert "4 runs: 4 finished\n" in results(store, "list").out


def test_finished_runs_go_only_if_named(store):
    digest = of_algorithm(store, "disk")[0].parent.name
    outcome = results(store, "remove", "algo=disk", "yes=true")
    assert "2 finished stay: such runs go only if named by hash or by their status" in outcome.out
    assert outcome.out.endswith("1 run removed\n")
    assert len(records(store)) == 4
    assert results(store, "remove", f"{digest}/1", "yes=true").out.endswith("1 run removed\n")
    assert (store / "runs" / digest / "0").is_dir()
    assert Published.read(store / "runs" / digest / "1").step > 0  # what was seen stays seen
    assert results(store, "remove", "algo=dpsgd", "status=finished", "yes=true").out.endswith("2 runs removed\n")
    assert named(records(store)) == {(digest, "0")}


@pytest.mark.parametrize("held", [False, True])
def test_what_an_unfinished_forced_run_left_goes_with_the_record_unless_one_is_under_way(store, held):
    record = of_algorithm(store, "disk")[0]
    rerun, replaced = (shutil.copytree(record, record.with_name(f"{record.name}.{of}")) for of in ("rerun", "replaced"))
    if held:
        held_elsewhere(record.with_name(f"{record.name}.lock"))
    outcome = results(store, "remove", f"{record.parent.name}/{record.name}", "yes=true")
    assert outcome.out.endswith("1 run removed\n")
    assert not record.exists()
    assert rerun.exists() == replaced.exists() == held


@pytest.mark.parametrize("left", [0, 1])
def test_a_record_of_which_nothing_can_be_noted_gives_up_what_is_bulky_and_then_stays(store, monkeypatch, left):
    """On a full disk, which may be why it is removed."""
    record = of_algorithm(store, "disk")[0]
    (record / "gradients.npz").write_bytes(bytes(1000))
    write, refused = Published.write, []

    def full(self, path):
        if len(refused) <= left or (record / "gradients.npz").exists():
            refused.append(path)
            raise OSError(28, "No space left on device")
        write(self, path)

    monkeypatch.setattr(Published, "write", full)
    outcome = results(store, "remove", f"{record.parent.name}/{record.name}", "yes=true")
    assert record.is_dir() == (left == 1)
    assert not (record / "gradients.npz").exists()
    if left:
        assert outcome.code == 2
        assert "what was seen of it can't be noted (No space left on device), so it stays" in outcome.err
    else:
        assert outcome.out.endswith("1 run removed\n")


def test_a_run_that_has_changed_since_it_was_shown_stays(store, monkeypatch):
    from dpbench.results import removal

    (failed,) = of_algorithm(store, "disk", eps="inf")
    monkeypatch.setattr(removal, "table_of", lambda *_: change(failed, "status.json", lambda _: {"status": "running"}))
    outcome = results(store, "remove", "status=failed", "yes=true")
    assert outcome.out.endswith("0 runs removed; 1 kept, changed meanwhile\n")
    assert failed.exists()


def test_a_run_that_cannot_be_removed_is_named(store, monkeypatch):
    (failed,) = of_algorithm(store, "disk", eps="inf")

    def refused(self, target):
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "rename", refused)
    outcome = results(store, "remove", "status=failed", "yes=true")
    assert (outcome.code, outcome.error()) == (2, f"{failed}: can't be read or written (Permission denied)")
    assert failed.exists()


def test_arguments_are_read():
    found = parse(["compare", "algo=disk", "eps<=8", "vs", "5c6f3/1", "results_dir=x"])
    assert (found.verb, found.results_dir, [one.text for one in found.selections]) == (
        "compare",
        Path("x"),
        ["algo=disk eps<=8", "5c6f3/1"],
    )
    assert found.selections[1].hashes == (("5c6f3", "1"),)
    assert [(one.key, one.sign, one.values) for one in found.selections[0].conditions] == [
        ("algo", "=", ("disk",)),
        ("eps", "<=", ("8",)),
    ]
