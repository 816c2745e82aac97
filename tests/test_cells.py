"""That every cell of the papers is a run that the program knows."""

from functools import cache

import pytest
from specifications import PAPERS, artefacts

from dpbench.claims import Cell
from dpbench.claims.notation import alternatives
from dpbench.config import compose_each, conf_folder, config_hash
from dpbench.config.messages import GROUPS
from dpbench.training.budget import budget


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


@pytest.mark.parametrize("paper", [*PAPERS, "beyond"])
def test_every_kind_of_cell_composes(paper):
    """A cell for each setting beside each option, of a search its first candidate; all cells are the next test."""
    cells = first_of_their_kind()[paper]
    assert len(compose_each([cell.candidates[0] for cell in cells])) == len(cells) > 0


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
