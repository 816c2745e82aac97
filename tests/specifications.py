"""The files of conf/paper, and the specifications of the papers, which are no part of the project.

Where a folder of them is there (`DPBENCH_SPECIFICATIONS`, or `shared/papers` beside the checkout) every table in it is
compared with the files, number by number.
"""

import itertools
import os
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest
from cli import ROOT

from dpbench.claims import SECTIONS, Artefact, load_all
from dpbench.claims.notation import Printed
from dpbench.config import conf_folder

FILES = conf_folder() / "paper"
# Without comparisons of our own, which print no numbers.
PAPERS = tuple(folder for folder in SECTIONS if folder != "beyond")
SPECIFICATIONS = Path(os.environ.get("DPBENCH_SPECIFICATIONS", ROOT.parent / "shared" / "papers"))


@cache
def artefacts() -> dict[str, Artefact]:
    return {f"{a.paper}/{a.name}": a for a in load_all(FILES)}


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


def all_of(printed: Printed) -> list[float]:
    """The numbers of a printed one: its value, its spread, the best of several runs, a factor behind it."""
    return [printed.value, *numbers(printed.text.partition(" ")[2])]


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
            if cell is None or (all_of(printed) if printed is not None else []) != numbers(text):
                found.append(f"{place}: {text}")
    return found
