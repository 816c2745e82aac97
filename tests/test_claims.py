"""The files of conf/paper: that they hold what the papers print, and that a wrong one is refused.

The specifications of the papers are no part of the project. Where a folder of them is there (`DPBENCH_SPECIFICATIONS`,
or `shared/papers` beside the checkout) every table in it is compared, number by number; the checksums below hold
anywhere.
"""

import ast
import itertools
import os
import re
import shutil
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

from dpbench.claims import PAPERS, Artefact, Cell, Kind, load_all, load_artefact
from dpbench.claims.needs import cost, of_artefact, runs_of
from dpbench.claims.notation import alternatives, parse_overrides, parse_printed
from dpbench.claims.pairs import changes_of, pairs_of, sources
from dpbench.claims.schema import Order, Trend
from dpbench.cli.help import help_text
from dpbench.config import compose_each, compose_jobs, conf_folder, config_hash, quoted
from dpbench.config.messages import GROUPS
from dpbench.errors import UserError
from dpbench.training.budget import budget

FILES = conf_folder() / "paper"
ROOT = Path(__file__).resolve().parents[1]
SPECIFICATIONS = Path(os.environ.get("DPBENCH_SPECIFICATIONS", ROOT.parent / "shared" / "papers"))


@cache
def artefacts() -> dict[str, Artefact]:
    return {f"{a.paper}/{a.name}": a for a in load_all(FILES)}


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
    "dc_sgd/text_2": (38, 15298985.39),
}


def checksum(artefact: Artefact) -> tuple[int, float]:
    printed = [cell.printed for cell in artefact.cells if cell.printed is not None]
    numbers = [x for p in printed for x in (p.value, p.spread, p.best, p.times) if x is not None]
    return len(printed), round(sum(place * x for place, x in enumerate(numbers, 1)), 6)


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


# The specifications, where they are there.


class Table(NamedTuple):
    """Where a table stands in a specification and in conf/paper."""

    artefact: str
    heading: str
    labels: Callable[[list[str]], tuple[str, ...]]
    first: int
    columns: int
    offset: int = 0


def eps_method(row: list[str]) -> tuple[str, ...]:
    return ("0.8" if row[0].startswith("0.9") else row[0], row[1])


def method(row: list[str]) -> tuple[str, ...]:
    return (row[0],)


def setting(row: list[str]) -> tuple[str, ...]:
    return (f"{row[0].replace('BERT-base', 'BERT')} {row[1]}", row[2])


def lora(row: list[str]) -> tuple[str, ...]:
    return (row[0], row[1].removesuffix(" (inf)"))


TABLES = [
    Table("doppler/table_3", "**Table 3", lambda row: (row[0].removesuffix(" (Li et al. 2021)"),), 1, 8),
    Table("disk/table_1", "### Table 1", method, 1, 7),
    Table("disk/table_3", "### Table 3", lora, 2, 8),
    Table("disk/table_4", "### Table 4", lambda row: (row[1], row[0]), 2, 5),
    Table("disk/table_5", "### Table 5", lambda row: (row[1], row[0]), 2, 6),
    Table("disk/table_6", "### Table 6", lambda row: (" ".join(row[:3]), row[3]), 4, 2),
    Table("disk/table_7", "### Table 7", method, 1, 2),
    Table("adp/table_1", "### Table 1", eps_method, 2, 9),
    Table("adp/table_2", "### Table 2", eps_method, 2, 6),
    Table("adp/table_2", "Second half:", eps_method, 2, 6, 6),
    Table("adp/table_3", "### Table 3", lambda row: (row[0].replace("1.0", "1"), row[1]), 2, 4),
    Table("adp/table_4", "### Table 4", eps_method, 2, 9),
    Table("adp/table_5", "### Table 5", eps_method, 2, 6),
    Table("adp/table_5", "| 6.4 | Gap | 1.31", eps_method, 2, 6, 6),
    Table("dp_pmlf/table_1", "### 5.1", method, 1, 8),
    Table("dp_pmlf/table_2", "### 5.2", method, 1, 8),
    Table("dp_pmlf/table_3", "### 5.3", method, 1, 8),
    Table("dp_pmlf/table_4", "### 5.4", lambda row: (row[0].split()[0],), 1, 8),
    Table("dc_sgd/table_1", "### Table I:", method, 1, 5),
    Table("dc_sgd/table_2", "### Table II:", setting, 3, 5),
    Table("dc_sgd/table_3", "### Table III:", setting, 3, 5),
    Table("dc_sgd/table_4", "### Table IV:", setting, 3, 5),
    Table("dc_sgd/table_5", "### Table V:", setting, 3, 5),
    Table("dc_sgd/table_8", "### Table VIII", setting, 3, 4),
]


def specification(paper: str) -> list[str]:
    path = SPECIFICATIONS / f"{paper}.md"
    if not path.is_file():
        pytest.skip(f"no specification {path}; DPBENCH_SPECIFICATIONS names the folder")
    return path.read_text().splitlines()


def split(line: str) -> list[str]:
    return [cell.strip().replace("**", "") for cell in line.strip().strip("|").split("|")]


def first_table(lines: list[str], heading: str) -> list[list[str]]:
    """The rows of the first table behind a line, without head and rule."""
    start = next(i for i, line in enumerate(lines) if line.startswith(heading))
    rest = itertools.dropwhile(lambda line: not line.startswith("|"), lines[start + 1 :])
    return [split(line) for line in itertools.takewhile(lambda line: line.startswith("|"), rest)][2:]


def numbers(text: str) -> list[float]:
    """The numbers of an entry as a reader sees them, without what says at which eps it was published."""
    text = re.sub(r"\((at )?eps [\d.]+\)", "", text)
    if match := re.fullmatch(r"(\d+)m(\d+)s( x (\d+))?", text):
        return [60 * float(match[1]) + float(match[2]), *([float(match[4])] if match[4] else [])]
    return [float(number) for number in re.findall(r"-?\d+(?:\.\d+)?(?:e-\d+)?", text.replace("+-", "±"))]


def differences(artefact: Artefact, table: Table, lines: list[str]) -> list[str]:
    """Every entry of a table of a specification that a file has otherwise, or not at all."""
    found = []
    named = list(itertools.product(*artefact.columns.values()))[table.offset :]
    cells = {(cell.row, cell.column): cell for cell in artefact.cells}
    for row in first_table(lines, table.heading):
        for column, text in zip(named, row[table.first : table.first + table.columns], strict=False):
            place = (table.labels(row), column)
            cell = cells.get(place)
            printed = cell.printed if cell is not None else None
            values = (printed.value, printed.spread, printed.best, printed.times) if printed is not None else ()
            if cell is None or [x for x in values if x is not None] != numbers(text):
                found.append(f"{place}: {text}")
    return found


@pytest.mark.parametrize("table", TABLES, ids=lambda table: f"{table.artefact}+{table.offset}")
def test_a_table_of_the_specification_stands_in_its_file_number_by_number(table):
    artefact = artefacts()[table.artefact]
    lines = specification(artefact.paper)
    assert len(first_table(lines, table.heading)) >= 3
    assert differences(artefact, table, lines) == []


@pytest.mark.parametrize("name", sorted({table.artefact for table in TABLES}))
def test_a_file_has_no_numbers_that_its_specification_lacks(name):
    artefact = artefacts()[name]
    lines = specification(artefact.paper)
    tables = [table for table in TABLES if table.artefact == name]
    rows = sum(len(first_table(lines, table.heading)) * table.columns for table in tables)
    assert len(artefact.cells) == rows


@pytest.mark.parametrize(("name", "heading"), [("table_2", "**Table 2"), ("table_4", "**Table 4")])
def test_the_taps_of_the_filters_are_those_of_the_specification(name, heading):
    artefact = artefacts()[f"doppler/{name}"]
    for row in first_table(specification("doppler"), heading):
        for letter, text in zip("ba", row[1:], strict=True):
            *_, scale = re.split(r"/(?=\d)", text + "/1" if not re.search(r"/\d", text) else text)
            taps = [x / float(scale) for x in numbers(re.sub(r"/\d+", "", text))]
            cells = [c for c in artefact.cells if c.row == (row[0],) and c.column[0].startswith(letter)]
            assert [cell.printed.value for cell in cells] == pytest.approx(taps, rel=1e-15)


def all_tables(lines: list[str]) -> Iterator[list[str]]:
    """The lines of the tables of the section of tables and figures, without derived ones."""
    start = next(i for i, line in enumerate(lines) if re.match(r"## 5\. ", line))
    derived = False
    for line in itertools.takewhile(lambda line: not line.startswith("## 6"), lines[start:]):
        if line.startswith("#"):
            derived = "[D]" in line
        if line.startswith("|") and not derived:
            yield split(re.sub(r"\[(D|derived)\].*", "", line))


NAMES = re.compile(r"(?i)(CIFAR-?|GPT-|SST-|CNN-|E2|F1|ResNet-?|WRN-|eps |Fig\.? |Figs\.? |\bN )\s*\d+(-\d+)?")
# Derived columns that carry no mark of their own.
DERIVED = {"disk": "check [derived; N from common knowledge]"}


@pytest.mark.parametrize("paper", PAPERS)
def test_every_number_in_the_tables_of_the_specification_stands_in_some_file_of_the_paper(paper):
    text = " ".join(path.read_text() for path in (FILES / paper).glob("*.yaml"))
    known = {float(x) for x in re.findall(r"(?<![\d.])\d*\.?\d+(?:e-?\d+)?", text)}
    missing = set()
    skipped = None
    for row in all_tables(specification(paper)):
        if DERIVED.get(paper) in row or any("[derived" in cell for cell in row):
            skipped = len(row) - 1
        elif skipped is not None and len(row) <= skipped:
            skipped = None
        cells = row[:skipped] if skipped is not None else row
        for cell in cells:
            for found in re.findall(r"(?<![\w.])\d*\.?\d+(?:e-?\d+)?(?![\w])", NAMES.sub("", cell)):
                if float(found) not in known:
                    missing.add((found, cell))
    assert missing == set()


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
        ("kind: trained", "kind: drawn", "kind=drawn: expected trained or computed or not reproducible"),
        ("kind: trained", "sort: trained", "sort=trained: expected one of the keys claims, columns, common"),
        ("seeds: 3", "seeds: three", "seeds=three: expected a whole number > 0"),
        ("    3: eps=3", "    3: eps", "columns.eps.3=eps: expected settings of the form key=value"),
        ("higher: {method: LP-DPAdamBC}\n    lower: {method: DPAdamBC}", "higher: {method: LP}\n    lower: {method: "
         "DPAdamBC}", "claims[0].higher.method=LP: expected one of DPAdam, DPAdamBC, LP-DPAdamBC"),
        ("within: 1.1", "within: 1.1\n    margin: 1", "claims[1].margin=1: expected only one of margin, within"),
        ("lower: {method: DPAdamBC}", "lower: {method: LP-DPAdamBC}", "claims[0]=LP-DPAdamBC is above DPAdamBC"),
        ("    8: eps=8", "    3: eps=8", "line 16=3: expected each key once"),
        ("rows:\n", "rows: [\n", "file=table_3.yaml: expected YAML; "),
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
    assert (printed.value, printed.spread, printed.best, printed.times) == (56.68, 0.646, 57.65, None)
    printed = parse_printed("3m6s x 10", "x")
    assert (printed.value, printed.times) == (186, 10)
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
        ("adp/table_3", ("1", "DP", "3.2"), {"optim.amplification": "1", "noise.growth": None, "noise": "constant"}),
        ("adp/table_3", ("2.5", "ADP", "6.4"), {"optim.amplification": "1", "noise.growth": "1e-2"}),
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
    (job,) = compose_jobs([quoted(line) for line in cell.candidates[0]], multirun=False)
    plan = job.config.release_plan().scaled(job.config.privacy.noise_multiplier)
    assert {round(run.release.joint.noise_multiplier, 3) for run in plan.runs} == {joint}


def test_what_an_artefact_needs_is_counted_with_shared_runs_once():
    table = artefacts()["doppler/table_3"]
    needs = of_artefact(table)
    assert needs.datasets == ("mnli", "qnli", "qqp", "sst2")
    assert needs.weights == ("roberta-base",)
    assert needs.runs == 16 * (5 + 2)
    assert needs.hours == (112, 112 * 48)
    one = cost([cell_at(table, "DPAdamBC", "3", "SST-2")])
    assert one.in_words() == "data sst2; weights roberta-base; 7 runs; 7 to 336 GPU hours"
    assert cost([cell_at(table, "DPAdam", "3", "SST-2")]).runs == 0
    shared = [artefacts()["adp/table_1"], artefacts()["adp/table_4"]]
    together = cost(cell for artefact in shared for cell in artefact.cells)
    assert together.runs == of_artefact(shared[0]).runs == 90 * 5
    assert together.hours is None
    assert "GPU time not estimated" in together.in_words()


# Every cell is a run that the program knows.


@cache
def with_runs() -> dict[str, list[Cell]]:
    """The cells of each file that have runs of their own."""
    found = {name: [cell for cell in artefact.cells if cell.runs] for name, artefact in artefacts().items()}
    return {name: cells for name, cells in found.items() if cells}


def options(cell: Cell) -> set[str]:
    """The options of groups that a cell chooses, model=linear."""
    return {f"{key}={one}" for key, value in cell.overrides.items() if key in GROUPS for one in alternatives(value)}


def test_every_option_that_a_cell_chooses_is_there():
    chosen = {option for cells in with_runs().values() for cell in cells for option in options(cell)}
    assert chosen <= {f"{group}={file.stem}" for group in GROUPS for file in (conf_folder() / group).glob("*.yaml")}


def traits(cell: Cell) -> set[tuple[str, ...]]:
    """What decides whether a cell composes: its options, and each setting beside those that may bring it."""
    chosen = options(cell)
    keys = [key for key in cell.overrides if key not in GROUPS]
    bring = {(o, key) for o in chosen for key in keys if o.split("=")[0] in (key.split(".")[0], "algo")}
    fits = {tuple(sorted(o for o in chosen if o.startswith(("model=", "dataset="))))}
    return bring | fits | {(option,) for option in chosen}


@cache
def first_of_their_kind() -> dict[str, list[Cell]]:
    """Cells of each paper that set something beside an option as no cell before them does."""
    seen: set[tuple[str, ...]] = set()
    found: dict[str, list[Cell]] = {}
    for name, cells in with_runs().items():
        for cell in cells:
            if not traits(cell) <= seen:
                seen |= traits(cell)
                found.setdefault(name.split("/")[0], []).append(cell)
    return found


def two_with_most(cells: list[Cell]) -> list[Cell]:
    """The cell with most traits, and that with most beside those."""
    one = max(cells, key=lambda cell: len(traits(cell)))
    return [one, max(cells, key=lambda cell: len(traits(cell) - traits(one)))]


def compose(cells: list[Cell]) -> None:
    """Of a search its first candidate."""
    for cell in cells:
        compose_jobs([quoted(line) for line in cell.candidates[0]], multirun=False)


@pytest.mark.parametrize("paper", [*PAPERS, "beyond"])
def test_cells_of_every_paper_compose(paper):
    compose(two_with_most(first_of_their_kind()[paper]))


@pytest.mark.slow
@pytest.mark.parametrize("paper", [*PAPERS, "beyond"])
def test_every_kind_of_cell_composes(paper):
    """A cell for each setting beside each option; all cells are the next test."""
    compose(first_of_their_kind()[paper])


@pytest.mark.slow
@pytest.mark.parametrize("name", with_runs())
def test_every_cell_composes_and_calibrates_and_is_a_run_of_its_own(name):
    """Of a search both ends. Two that are the same run have the same value wherever both say one."""
    candidates = sorted({end for cell in with_runs()[name] for end in (cell.candidates[0], cell.candidates[-1])})
    same: dict[str, dict[str, str]] = {}
    for candidate, job in zip(candidates, compose_each(candidates), strict=True):
        assert budget(job.config).noise_multiplier >= 0
        typed = dict(line.split("=", 1) for line in candidate)
        other = same.setdefault(config_hash(job.config), typed)
        names = {key for key in typed.keys() & other.keys() if typed[key] != other[key]}
        assert names <= {"algo"}, (typed, other)


def test_claims_know_records_and_nothing_of_training():
    records = ("dpbench.tracking.record", "dpbench.tracking.reading", "dpbench.tracking.status")
    allowed = ("dpbench.claims", "dpbench.errors", *records)
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
