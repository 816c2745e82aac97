"""How the numbers of an artefact are chosen, which is part of what they mean: disclosed beside every table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from dpbench.claims import Artefact, Cell
from dpbench.claims.notation import alternatives

# Settings by which a search is charged to eps: the noise that a publication gives for it, and the runs expected of it.
NOISE, SEARCH = "privacy.noise_multiplier", "privacy.search_runs"


def selection_of(artefact: Artefact) -> tuple[str, ...]:
    """At which evaluation numbers are taken, and among how many configurations, on which data; none without runs."""
    cells = [cell for cell in artefact.cells if cell.runs and cell.overrides]
    if not cells:
        return ()
    return (*_evaluation(cells), *_search(cells))


def _evaluation(cells: Sequence[Cell]) -> list[str]:
    counted = Counter(cell.statistic for cell in cells)
    words = {
        "last": "the number after the last step; nothing is chosen among evaluations",
        "best": "the best of each run's evaluations, which is a choice made on test data",
    }
    if len(counted) == 1:
        return [f"Evaluation: {words[cells[0].statistic]}."]
    return [f"Evaluation, {count} of {len(cells)} cells: {words[statistic]}." for statistic, count in counted.items()]


def _search(cells: Sequence[Cell]) -> list[str]:
    searched = [cell for cell in cells if len(cell.candidates) > 1]
    if not searched:
        return ["Hyper-parameters: one configuration for each cell, as the file has it; no search here."]
    grids = Counter(_grid_of(cell) for cell in searched)
    lines = []
    for (keys, size, data), count in grids.items():
        lines.append(
            f"Hyper-parameters, {count} of {len(cells)} cells: the best of {size} configurations ({keys}), tuned on "
            f"{data} data with the first seed; the winner runs with all seeds, and the first one counts, too."
        )
    by_noise, by_search = (sum(key in cell.overrides for cell in searched) for key in (NOISE, SEARCH))
    free = len(searched) - by_noise - by_search
    for count, how in (
        (by_noise, "counted as the paper does, by a larger noise multiplier"),
        (
            by_search,
            "charged as a random search of that size; the grid was gone through, which spends more",
        ),
        (free, "not counted in eps"),
    ):
        if count:
            lines.append(f"Cost of tuning: in {count} of {len(searched)} searches {how}.")
    return lines


def _grid_of(cell: Cell) -> tuple[str, int, str]:
    """The settings that are searched with their values, how many configurations, and the data they are tuned on."""
    choices = {key: alternatives(value) for key, value in cell.overrides.items()}
    keys = "; ".join(f"{key} {', '.join(values)}" for key, values in choices.items() if len(values) > 1)
    return keys, len(cell.candidates), "validation" if cell.judged_by.startswith("validation") else "test"
