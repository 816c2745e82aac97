"""That the files of conf/paper hold what the specifications of the papers say, where these are there."""

import itertools
import re
from collections.abc import Iterator

import pytest
from specifications import FILES, PAPERS, TABLES, artefacts, differences, first_table, numbers, specification, split


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


def test_what_the_specification_calls_validation_is_of_that_split():
    (title,) = (line for line in specification("disk") if line.startswith("### Table 5"))
    assert "validation perplexity: lower is better" in title
    found = [cell for cell in artefacts()["disk/table_5"].cells if "perplexity" in cell.column]
    assert len(found) == 5
    assert {cell.metric for cell in found} == {"validation_loss"}


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
