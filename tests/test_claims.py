"""The files of conf/paper: that they hold what the papers print, and that a wrong one is refused.

The checksums hold anywhere; test_specifications.py compares number by number.
"""

import ast
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from specifications import FILES, PAPERS, ROOT, TABLES, all_of, artefacts, differences, specification

from dpbench.claims import Artefact, Cell, Kind, load_all, load_artefact
from dpbench.claims.needs import cost, runs_of
from dpbench.claims.notation import parse_overrides, parse_printed
from dpbench.claims.pairs import changes_of, pairs_of, sources
from dpbench.claims.schema import Order, Trend
from dpbench.cli.help import help_text
from dpbench.config import compose_each, compose_jobs
from dpbench.errors import UserError


def cell_at(artefact: Artefact, *labels: str) -> Cell:
    (cell,) = [cell for cell in artefact.cells if (*cell.row, *cell.column) == labels]
    return cell


# Every table and every figure has its file.

EXPECTED = {
    "doppler": (4, 12),
    "disk": (7, 8),
    "adp": (6, 8),
    "dp_pmlf": (5, 7),
    "dc_sgd": (8, 11),
}


@pytest.mark.parametrize("paper", PAPERS)
def test_every_table_and_figure_has_its_file(paper):
    tables, figures = EXPECTED[paper]
    named = [a.name for a in artefacts().values() if a.paper == paper and not a.name.startswith("text_")]
    names = {re.sub(r"[a-z]$", "", name) for name in named}
    assert names == {f"table_{n + 1}" for n in range(tables)} | {f"figure_{n + 1}" for n in range(figures)}


def test_every_file_says_where_it_comes_from_and_refers_to_its_own_specification():
    for artefact in artefacts().values():
        if artefact.paper not in PAPERS:
            continue
        assert artefact.source.startswith(f"{artefact.paper}.md ")
        assert all(reference.startswith(f"{artefact.paper}.md ") for reference in artefact.readings)
        if artefact.kind == Kind.TRAINED:
            assert artefact.readings, artefact.where
            assert any(cell.printed is not None for cell in artefact.cells) or artefact.claims, artefact.where


@pytest.mark.parametrize("name", [name for name, artefact in artefacts().items() if artefact.paper == "beyond"])
def test_a_panel_treats_all_methods_alike(name):
    artefact = artefacts()[name]
    assert (ROOT / artefact.source).is_file()
    assert not artefact.claims
    equal = ("dataset", "model", "batch_size", "epochs", "privacy.search_runs", "evaluation.every_epochs")
    assert {tuple(cell.overrides.get(key) for key in equal) for cell in artefact.cells} == {
        tuple(artefact.cells[0].overrides.get(key) for key in equal)
    }
    (candidates,) = {len(cell.candidates) for cell in artefact.cells}
    assert float(artefact.cells[0].overrides["privacy.search_runs"]) == candidates
    assert {cell.seeds for cell in artefact.cells} == {5}


@pytest.mark.parametrize("name", [name for name, artefact in artefacts().items() if artefact.paper == "beyond"])
def test_the_runs_of_a_search_in_a_panel_make_the_same_releases(name):
    """Of each method the candidates at both ends of its grid."""
    rows = {cell.row: cell for cell in artefacts()[name].cells}
    for cell in rows.values():
        one, other = compose_each([cell.candidates[0], cell.candidates[-1]])
        assert one.config.release_plan() == other.config.release_plan(), cell.place


# Number of printed values and their sum, each times its place in the file: 1, 2, ... .
CHECKSUMS: dict[str, tuple[int, float]] = {
    "doppler/figure_6": (140, 6816.855845),
    "doppler/table_2": (14, -22.462382),
    "doppler/table_3": (24, 26195.06),
    "doppler/table_4": (20, -45.525),
    "disk/figure_1": (7, 998.8),
    "disk/figure_2": (1, 41.8),
    "disk/figure_3": (36, 294.00662),
    "disk/figure_5": (5, 1307.21),
    "disk/figure_7": (4, 371.03),
    "disk/table_1": (28, 36199.1),
    "disk/table_3": (64, 189130.1),
    "disk/table_4": (25, 8609.511),
    "disk/table_5": (30, 7907.509),
    "disk/table_6": (72, 193841.18),
    "disk/table_7": (18, 0.000876),
    "disk/text_1": (6, 1404.0),
    "adp/figure_2": (18, 44603.387209),
    "adp/table_1": (135, 601299.739),
    "adp/table_2": (180, 1069624.776),
    "adp/table_3": (16, 49588.307),
    "adp/table_4": (128, 525767.621),
    "adp/table_5": (174, 980275.199),
    "adp/table_6": (24, 78387.24405),
    "adp/text_1": (5, 23.98),
    "adp/text_2": (36, 1152987.51444),
    "dp_pmlf/figure_2": (3, 240.0),
    "dp_pmlf/figure_4": (4, 698.8),
    "dp_pmlf/figure_5": (4, 555.4),
    "dp_pmlf/table_1": (32, 53356.77),
    "dp_pmlf/table_2": (32, 79349.66),
    "dp_pmlf/table_3": (32, 57564.6),
    "dp_pmlf/table_4": (64, 311043.43),
    "dp_pmlf/text_2": (39, 1372.410153),
    "dp_pmlf/text_3": (36, 2050.6101),
    "dc_sgd/figure_2": (6, -128.4),
    "dc_sgd/figure_3": (35, 14390.45),
    "dc_sgd/table_1": (20, 419727.0),
    "dc_sgd/table_2": (90, 239964.09),
    "dc_sgd/table_3": (90, 249395.22),
    "dc_sgd/table_4": (90, 557192.45),
    "dc_sgd/table_5": (90, 559727.55),
    "dc_sgd/table_8": (84, 464211.61),
    "dc_sgd/text_1": (126, 15190.095),
    "dc_sgd/text_2": (34, 14217953.5),
}


def test_a_linear_model_in_place_of_the_one_that_is_named_is_a_deviation():
    """DP-PMLF's tables and figures name a network for every data set; those of the notes (text_*) name none."""
    told = {}
    for name, artefact in artefacts().items():
        paper, _, which = name.partition("/")
        linear = {cell.overrides["dataset"] for cell in artefact.cells if cell.overrides.get("model") == "linear"}
        if paper == "dp_pmlf" and linear and not which.startswith("text"):
            (line,) = (line for line in artefact.deviations if "linear model" in line)
            told[which] = linear == {"mnist"} | ({"fashion_mnist"} if "Fashion-MNIST" in line else set())
    assert len(told) == 8
    assert all(told.values())


def checksum(artefact: Artefact) -> tuple[int, float]:
    printed = [cell.printed for cell in artefact.cells if cell.printed is not None]
    found = [x for one in printed for x in all_of(one)]
    return len(printed), round(sum(place * x for place, x in enumerate(found, 1)), 6)


@pytest.mark.parametrize("name", sorted(CHECKSUMS))
def test_the_printed_numbers_are_those_that_were_checked(name):
    count, total = checksum(artefacts()[name])
    assert count == CHECKSUMS[name][0]
    assert total == pytest.approx(CHECKSUMS[name][1], rel=1e-12)


def test_every_file_with_printed_numbers_has_a_checksum():
    assert {name for name, a in artefacts().items() if a.printed} == set(CHECKSUMS)


def test_printed_differences_are_those_of_the_printed_values():
    compared = 0
    for artefact in artefacts().values():
        for cell in artefact.cells:
            if cell.minus is None or cell.printed is None:
                continue
            first, second = (part.printed for part in sources(artefact, cell))
            assert first is not None
            assert second is not None
            assert cell.printed.value == pytest.approx(first.value - second.value, abs=0.0051), cell.place
            compared += 1
    assert compared == 45 + 60 + 38 + 54


def bears_out(order: Order, difference: float) -> bool:
    if order.within is not None:
        return abs(difference) <= order.within + 1e-9
    if order.margin is not None:
        return difference >= order.margin - 1e-9
    return difference >= 0 if order.at_least else difference > 0


def test_the_printed_numbers_bear_out_the_claims_but_those_that_say_so():
    """An order or trend with a wrong label or sign contradicts the paper's own numbers."""
    decided = 0
    for artefact in artefacts().values():
        for claim in artefact.claims:
            if isinstance(claim, Order):
                pairs = list(pairs_of(artefact, claim))
                assert pairs, claim.says
                if any(cell.printed is None for pair in pairs for cell in pair):
                    continue
                held = [bears_out(claim, above.printed.value - below.printed.value) for above, below in pairs]
                assert (sum(held) >= (claim.pairs or len(held))) == claim.printed, f"{artefact.where}: {claim.says}"
            elif isinstance(claim, Trend):
                changes = list(changes_of(artefact, claim))
                assert changes, claim.says
                if any(cell.printed is None for change in changes for cell, _ in change):
                    continue
                change = sum(sign * cell.printed.value for change in changes for cell, sign in change)
                assert (change > 0 if claim.rising else change < 0) == claim.printed, f"{artefact.where}: {claim.says}"
            else:
                continue
            decided += 1
    assert decided >= 60


# Planted errors.


@pytest.fixture
def planted(tmp_path) -> Callable[..., Path]:
    """A copy of a file with a piece of its text replaced."""

    def plant(name: str, old: str, new: str) -> Path:
        path = tmp_path / name.split("/")[0] / f"{name.split('/')[1]}.yaml"
        path.parent.mkdir(exist_ok=True)
        text = (FILES / f"{name}.yaml").read_text()
        assert text.count(old) == 1, (old, text.count(old))
        path.write_text(text.replace(old, new))
        return path

    return plant


def test_a_changed_digit_is_caught(planted):
    changed = load_artefact(planted("adp/table_1", "44.93 ± 0.594", "44.93 ± 0.549"))
    assert checksum(changed) != pytest.approx(CHECKSUMS["adp/table_1"], rel=1e-12)


def test_a_changed_digit_is_seen_beside_the_specification(planted):
    changed = load_artefact(planted("adp/table_1", "44.93 ± 0.594", "44.93 ± 0.549"))
    (table,) = [table for table in TABLES if table.artefact == "adp/table_1"]
    (found,) = differences(changed, table, specification("adp"))
    assert "44.93 ± 0.594" in found


def test_swapped_rows_are_caught(planted):
    """Two rows with their labels exchanged: every number is still there, at the wrong place."""
    path = planted("dp_pmlf/table_1", "InnerOuter | 92.15", "Inner | 92.15")
    text = path.read_text()
    text = text.replace("\n  DP-PMLF    |", "\n  InnerOuter |").replace("\n  Inner |", "\n  DP-PMLF    |")
    path.write_text(text)
    swapped = load_artefact(path)
    assert checksum(swapped)[0] == CHECKSUMS["dp_pmlf/table_1"][0]
    assert checksum(swapped)[1] != pytest.approx(CHECKSUMS["dp_pmlf/table_1"][1], rel=1e-9)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("| 87.06    | 91.25", "| 87.06", "values=DPAdamBC: expected 8 entries, one for each column, found 7"),
        ("  DPAdamBC    | 82.39", "  DPAdamBB    | 82.39", "values, method=DPAdamBB: expected one of DPAdam, DPAdamBC"),
        ("  DPAdamBC    | 82.39", "  DPAdam      | 82.39", "values=DPAdam: the row stands there twice"),
        ("  DPAdamBC    | 82.39", "  DPAdamBC    | –", "values=DPAdamBC / 3 / MNLI: the table has no entry there"),
        ("85.29", "85,29", "values at DPAdamBC / 3 / QQP=85,29: expected a number as printed, such as"),
        ("method      | 3 / MNLI", "eps         | 3 / MNLI", "values=eps: expected the names of the row axes, method"),
        ("seeds: 3", "seeds: 3\nmetric: test_error", "metric=test_error: expected one of which more is better, where"),
        ("kind: trained", "kind: drawn", "kind=drawn: expected trained or computed or not reproducible"),
        ("kind: trained", "sort: trained", "sort=trained: expected one of the keys claims, columns, common"),
        ("seeds: 3", "seeds: three", "seeds=three: expected a whole number > 0"),
        ("    3: eps=3", "    3: eps", "columns.eps.3=eps: expected settings of the form key=value"),
        ("    3: eps=3", "    3: 3", "columns.eps.3=3: expected settings in one line, such as algo=disk eps=8"),
        ("    3: eps=3", "    3: eps=3 seed=0,1", "seed=0,1: expected settings without it; the key seeds"),
        ("    3: eps=3", "    3: [eps=3]", "columns.eps.3=[eps=3]: expected settings in one line, such as"),
        ("deviations:\n  - A", "deviations:\n  a:\n  - A", ": expected a list of sentences"),
        ("higher: {method: LP-DPAdamBC}\n    lower: {method: DPAdamBC}", "higher: {method: LP}\n    lower: {method: "
         "DPAdamBC}", "claims[0].higher.method=LP: expected one of DPAdam, DPAdamBC, LP-DPAdamBC"),
        ("within: 1.1", "within: 1.1\n    pairs: 15", "claims[1].pairs=15: expected a number of pairs among the"),
        ("within: 1.1", "within: 1.1\n    margin: 1", "claims[1].margin=1: expected only one of margin, within"),
        ("within: 1.1", "at_least: abc", "claims[1].at_least=abc: expected true or false"),
        ("within: 1.1", "own: sure", "claims[1].own=sure: expected true or false"),
        ("lower: {method: DPAdamBC}", "", "claims[0].lower=null: expected labels of an axis"),
        ("seeds: 3", "seeds: 3\ntolerance: {points: two}", "tolerance.points=two: expected a number >= 0"),
        ("within: 1.1", "within: near", "claims[1].within=near: expected a number"),
        ("within: 1.1", "pairs: 1.5", "claims[1].pairs=1.5: expected a whole number > 0"),
        ("lower: {method: DPAdamBC}", "lower: {method: LP-DPAdamBC}", "claims[0]=LP-DPAdamBC is above DPAdamBC"),
        ("    8: eps=8", "    3: eps=8", "line 16=3: expected each key once"),
        ("rows:\n", "rows: [\n", "file=table_3.yaml: expected YAML; "),
        ("rows:\n", "rows:\n  value: [a, b]\n", "rows=value: expected another name than epoch, step, frequency, thr"),
        ("hours: [1, 48]", "hours: [48, 1]", "needs.hours=(48, 1): expected least and most hours of one run"),
        ("quoted: Li", "copied: Li", "where[0]=method, copied: expected one of absent"),
    ],
)  # fmt: skip
def test_a_wrong_file_is_refused_with_one_sentence_naming_file_field_and_value(planted, old, new, message):
    with pytest.raises(UserError) as caught:
        load_artefact(planted("doppler/table_3", old, new))
    assert str(caught.value).startswith("doppler/table_3.yaml: ")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_claim_may_be_about_as_many_pairs_as_there_are(planted):
    text = "within: 1.1"
    assert load_artefact(planted("doppler/table_3", text, f"{text}\n    pairs: 8")).claims[1].pairs == 8
    with pytest.raises(UserError, match="among the 8 compared"):
        load_artefact(planted("doppler/table_3", text, f"{text}\n    pairs: 9"))


def test_a_folder_of_claims_that_is_no_paper_is_refused(tmp_path):
    for name in ("beyond", "mine"):
        (tmp_path / name).mkdir()
    shutil.copy(FILES / "doppler" / "table_3.yaml", tmp_path / "beyond" / "table_3.yaml")
    assert [artefact.where for artefact in load_all(tmp_path)] == ["beyond/table_3.yaml"]  # a folder may hold notes
    shutil.copy(FILES / "doppler" / "table_3.yaml", tmp_path / "mine" / "table_3.yaml")
    with pytest.raises(UserError, match=r"claims=.*/mine: expected one of doppler, disk, adp, dp_pmlf, dc_sgd, beyond"):
        load_all(tmp_path)


def test_a_missing_row_is_caught_by_the_grid_or_by_the_count(planted):
    path = planted("adp/table_1", "  0.8 / DP     | 56.12", "  gone | 56.12")
    path.write_text("".join(line for line in path.read_text().splitlines(True) if not line.startswith("  gone")))
    with pytest.raises(UserError, match=r"values=0.8 / DP / 0.5 / 60: the table has no entry there"):
        load_artefact(path)
    sparse = planted("dc_sgd/table_2", "  CNN MNIST / 4        | 93.84  | 93.75    | 94.70    | 93.54  | 93.65\n", "")
    assert checksum(load_artefact(sparse))[0] == 85


# The notation.


def test_overrides_are_read_by_key_and_searched_where_they_have_several_values():
    found = parse_overrides("algo=disk model.hidden=[8,4] optim.lr=0.1,0.2 clip=threshold", "common")
    assert found == {"algo": "disk", "model.hidden": "[8,4]", "optim.lr": "0.1,0.2", "clip": "threshold"}
    cell = cell_at(artefacts()["dc_sgd/table_4"], "ResNet34 SVHN", "8", "Andrew")
    assert len(cell.candidates) == 45
    assert runs_of(cell) == 45 + 4
    assert {"algo.quantile=0.1", "algo.rate=0.3"} <= set(cell.candidates[4])


# dc_sgd.md 4.4: points of the search with Adam; with SGD each is tried at 20 learning rates (table 5).
GRIDS = {"DP-SGD": 10, "DC-SGD-P": 9, "DC-SGD-E": 1, "Andrew": 45, "Du": 90}


@pytest.mark.parametrize(("table", "rates"), [("dc_sgd/table_4", 1), ("dc_sgd/table_5", 20)])
def test_searches_of_dc_sgd_have_the_size_that_they_are_charged_for(table, rates):
    """dc_sgd.md, T23."""
    cells = [cell for cell in artefacts()[table].cells if cell.runs]
    assert {(cell.at["method"], len(cell.candidates)) for cell in cells} == {
        (method, points * rates) for method, points in GRIDS.items()
    }
    tried = {float(rate) for cell in cells for rate in cell.overrides["optim.lr"].split(",")}
    assert sorted(tried) == pytest.approx([1e-5 * 2**i for i in range(20)] if rates > 1 else [0.001])


def test_printed_numbers_are_read_as_they_stand():
    printed = parse_printed("56.68 ± 0.646 (57.65)", "x")
    assert (printed.value, printed.spread, printed.text) == (56.68, 0.646, "56.68 ± 0.646 (57.65)")
    assert parse_printed("3m6s x 10", "x").value == 186
    assert parse_printed("-92/58", "x").value == -92 / 58
    assert parse_printed("6.3e-7", "x").value == 6.3e-7
    assert parse_printed("N/A", "x") is None


@pytest.mark.parametrize(
    ("artefact", "labels", "overrides"),
    [
        ("dp_pmlf/table_1", ("DP-PMLF", "CIFAR-100", "8"), {"filter": "lp6", "dataset": "cifar100", "eps": "8"}),
        ("dp_pmlf/table_1", ("DP-PMLF", "MNIST", "8"), {"filter": "momentum", "model": "linear", "delta": "1/N"}),
        ("dp_pmlf/table_1", ("DPSGD", "MNIST", "1"), {"filter": None, "algo": "dpsgd", "epochs": "25"}),
        ("adp/table_2", ("0.8", "ADP", "5", "200"), {"eps": "12.8", "threshold.norm": "5", "epochs": "200"}),
        ("adp/table_3", ("1", "DP", "3.2"), {"epochs": "59.693", "noise.growth": None, "noise": "constant"}),
        ("adp/table_3", ("2.5", "ADP", "6.4"), {"noise.growth": "1e-5,1e-4,1e-3,1e-2,1e-1,1"}),
        ("dc_sgd/table_2", ("BERT QNLI", "2", "Du"), {"privacy.noise_multiplier": "3.249", "epochs": "5"}),
        ("dc_sgd/table_3", ("ResNet18 CIFAR10", "2", "DC-SGD-P"), {"threshold.histogram_noise": "8"}),
        ("dc_sgd/table_8", ("LSTM NAMES", "4", "AutoClip"), {"clip": "automatic", "optim": "adam"}),
        ("disk/figure_8a", ("0.5", "(1-kappa)/kappa"), {"algo.gamma": "1", "algo.kappa": "0.5"}),
        ("disk/figure_6b", ("DOPPLER", "2"), {"query": "one_point", "optim": "adam"}),
        ("disk/table_6", ("QNLI FT RoBERTa-base", "1", "DiSK"), {"schedule.warmup": "0", "dataset.max_length": "256"}),
        ("dp_pmlf/figure_3", ("w/o PM", "b", "3"), {"model": "linear", "dataset.mean": "[0]"}),
        ("doppler/figure_4", ("DPGaLore", "LP", "2"), {"algo": "lp_dpgalore", "filter": "first_v2", "eps": "2"}),
    ],
)
def test_cells_are_expanded_into_the_runs_behind_them(artefact, labels, overrides):
    cell = cell_at(artefacts()[artefact], *labels)
    assert {key: cell.overrides.get(key) for key in overrides} == overrides


@pytest.mark.parametrize(
    ("table", "labels", "joint"),
    [  # dc_sgd.md 2.7, before the split into gradient and histogram or count
        ("table_2", ("CNN MNIST", "4", "DC-SGD-P"), 1.779),
        ("table_2", ("ResNet18 CIFAR10", "2", "DC-SGD-P"), 4.943),
        ("table_2", ("ResNet18 CIFAR10", "2", "Andrew"), 6.231),
        ("table_2", ("ResNet18 SVHN", "8", "Du"), 1.350),
        ("table_3", ("ResNet18 CIFAR10", "2", "DC-SGD-P"), 2.123),
        ("table_3", ("CNN MNIST", "2", "Andrew"), 2.995),
    ],
)
def test_gradient_and_histogram_have_together_the_noise_that_tuning_leaves(table, labels, joint):
    cell = cell_at(artefacts()[f"dc_sgd/{table}"], *labels)
    (job,) = compose_jobs(cell.candidates[0], multirun=False)
    plan = job.config.release_plan().scaled(job.config.privacy.noise_multiplier)
    assert {round(run.release.joint.noise_multiplier, 3) for run in plan.runs} == {joint}


LAYERS = """
title: Layers
kind: trained
source: adp.md 5
seeds: 3
unit: s
common: a=common b=common c=common d=common e=common
rows:
  method:
    one: b=row c=row d=row e=row
columns:
  eps:
    1: c=column d=column e=column
    2: c=column d=column e=column
where:
  - {method: one, unit: early, set: d=early e=early, points: 5}
  - {eps: 2, unit: late, set: d=late, points: 7}
each:
  e: |
    method | 1 | 2
    one    | – | each
values: not printed
"""


def test_what_is_said_nearer_to_a_cell_wins(tmp_path):
    """Rows over what is common, columns over rows, `where` over both, its later lines first, then `each`."""
    path = tmp_path / "adp" / "layers.yaml"
    path.parent.mkdir()
    path.write_text(LAYERS)
    first, second = load_artefact(path).cells
    assert first.overrides == parse_overrides("a=common b=row c=column d=early e=early", "")
    assert second.overrides == parse_overrides("a=common b=row c=column d=late e=each", "")
    assert [(cell.unit, cell.tolerance.points) for cell in (first, second)] == [("early", 5), ("late", 7)]


def test_what_an_artefact_needs_is_counted_with_shared_runs_once():
    table = artefacts()["doppler/table_3"]
    needs = cost(table.cells)
    assert needs.datasets == ("mnli", "qnli", "qqp", "sst2")
    assert needs.weights == ("roberta-base",)
    assert needs.runs == 16 * (5 + 2)
    assert needs.hours == (112, 112 * 48)
    one = cost([cell_at(table, "DPAdamBC", "3", "SST-2")])
    assert one.in_words() == "data sst2; weights roberta-base; 7 runs; 7 to 336 GPU hours"
    assert cost([cell_at(table, "DPAdam", "3", "SST-2")]).runs == 0
    shared = [artefacts()["adp/table_1"], artefacts()["adp/table_4"]]
    together = cost(cell for artefact in shared for cell in artefact.cells)
    assert together.runs == cost(shared[0].cells).runs == 90 * 5
    assert together.hours is None
    assert "GPU time not estimated" in together.in_words()


# Beside the rest of the program.


def test_claims_know_records_and_nothing_of_training():
    records = tuple(f"dpbench.tracking.{module}" for module in ("proven", "reading", "safe_yaml", "status"))
    allowed = ("dpbench.claims", "dpbench.errors", "dpbench.files", "dpbench.wording", *records)
    for path in (ROOT / "dpbench" / "claims").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            module = node.module if isinstance(node, ast.ImportFrom) else None
            if module is not None and module.startswith("dpbench"):
                assert module.startswith(allowed), (path.name, module)
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            assert not [name for name in names if name.startswith("dpbench") or name == "torch"]


def test_the_papers_are_no_group_of_options():
    groups = help_text().split("SETTINGS")[0]
    assert "paper" not in [line.strip() for line in groups.splitlines()]
    with pytest.raises(UserError):
        compose_jobs(["paper=adp"], multirun=False)


def test_a_paper_without_files_is_refused(tmp_path):
    shutil.copytree(FILES / "doppler", tmp_path / "doppler")
    with pytest.raises(UserError, match="disk"):
        load_all(tmp_path, ("doppler", "disk"))
    with pytest.raises(UserError, match="a folder with folders of papers"):
        load_all(tmp_path / "doppler")
