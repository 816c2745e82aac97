"""Groups of runs side by side: the settings that differ, and results as mean ± standard deviation over their runs."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.text import Text

from dpbench.console import new_table
from dpbench.errors import UserError, show
from dpbench.results.arguments import Arguments
from dpbench.results.listing import is_unproven, warn
from dpbench.tracking.columns import ABSENT
from dpbench.tracking.index import SUMMARY, Index
from dpbench.tracking.proven import UNPROVEN
from dpbench.tracking.shapes import is_number
from dpbench.tracking.status import Status
from dpbench.wording import NOTHING

# More columns than these are no table.
MOST = 8
# A mean and its deviation end at the same digit if that is not behind this one.
MOST_DECIMALS = 4
# So many values of one setting are written out.
WRITTEN_OUT = 4
# Numbers of summary.json that are of the configuration, or shown by another name.
NOT_RESULTS = ("delta", "sampling_rate", "seed", "target_eps", "test_accuracy.best_step")
NAMES = {
    "test_accuracy.final": "test accuracy, last (%)",
    "test_accuracy.best": "best on test (%)",
    "eps": "eps spent",
    "published_eps": "eps as published",
}
FIRST = tuple(NAMES)


@dataclass(frozen=True)
class Group:
    """Runs that are one column.

    Attributes:
        name: its head.
        places: of their records in the index.
    """

    name: str
    places: tuple[int, ...]


def print_comparison(index: Index, arguments: Arguments, console: Console) -> None:
    """Print the groups that were asked for, or each configuration of the runs that were.

    Raises:
        UserError: there are not two groups with runs, or too many.
    """
    warn(index)
    groups = groups_of(index, arguments)
    table = new_table()
    table.add_column("")
    for group in groups:
        table.add_column(Text(group.name), justify="right", overflow="fold")
    for name, cells in (*_runs(index, groups), *_results(index, groups)):
        table.add_row(name, *cells)
    differing = [*differences(index, groups)]
    if differing:
        table.add_section()
        table.add_row()
    for name, cells in differing:
        table.add_row(Text(name), *map(Text, cells))
    console.print(table)
    console.print("\nmean ± sample standard deviation over finished runs" + ("" if differing else "; settings agree"))
    if difference := _difference(index, groups):
        console.print(difference)
    searched = [group.name for group in groups if _configurations(index, group) > 1]
    if searched:
        console.print(
            f"Means over several configurations, such as the candidates of a search, are of no one of them: name the "
            f"hashes that results list shows, or further settings, in {', '.join(searched)}"
        )
    for what, name, column in (
        ("values of eps", "eps", "eps"),
        ("data sets", "dataset", "dataset.name"),
        ("models", "model", "model.name"),
    ):
        held = [{index.column(column)[place] for place in _finished(index, group)} for group in groups]
        if mixed := [group.name for group, values in zip(groups, held, strict=True) if len(values) > 1]:
            console.print(f"Means over several {what} say little: add {name}=... to {', '.join(mixed)}")
        elif len(set.union(*held)) > 1:
            console.print(f"The groups differ in their {what}.")


def groups_of(index: Index, arguments: Arguments) -> list[Group]:
    """The columns of a comparison."""
    if len(arguments.selections) > 1:
        groups = [Group(one.text, tuple(one.places(index))) for one in arguments.selections]
        for group in groups:
            if not group.places:
                raise UserError(f"{group.name}: no such runs")
    else:
        of_hash: dict[str, list[int]] = {}
        digests = index.column("hash")
        for place in arguments.selection.places(index):
            of_hash.setdefault(digests[place], []).append(place)
        starts = [start for start, _ in arguments.selection.hashes]

        def typed(digest: str) -> tuple[int, str]:
            """Where its hash was typed; those of settings alone go by their hashes."""
            return next((i for i, start in enumerate(starts) if digest.startswith(start)), 0), digest

        groups = [Group(digest, tuple(of_hash[digest])) for digest in sorted(of_hash, key=typed)]
    if not 2 <= len(groups) <= MOST:
        raise UserError(
            f"{arguments.selection.text or 'all runs'}: expected 2 to {MOST} configurations to compare, found "
            f"{len(groups)}; name hashes or settings, or groups of runs with vs between them"
        )
    return groups


def _runs(index: Index, groups: Sequence[Group]) -> Iterator[tuple[str, list[str]]]:
    status = index.column("status")
    counts = [Counter(status[place] for place in group.places) for group in groups]
    yield "finished runs (n)", [str(count[Status.FINISHED]) for count in counts]
    configurations = [_configurations(index, group) for group in groups]
    if max(configurations) > 1:
        yield "configurations, averaged over", [str(count) for count in configurations]
    others = sorted({word for count in counts for word in count} - {Status.FINISHED})
    for word in others:
        yield word, [str(count[word] or NOTHING) for count in counts]


def _configurations(index: Index, group: Group) -> int:
    digests = index.column("hash")
    return len({digests[place] for place in _finished(index, group)})


def _results(index: Index, groups: Sequence[Group]) -> Iterator[tuple[str, list[str]]]:
    """Numbers of summaries that some finished run has."""
    names = {name.removeprefix(SUMMARY) for name in index.names if name.startswith(SUMMARY)}
    for name in (*FIRST, *sorted(names.difference(FIRST, NOT_RESULTS))):
        found = [_numbers(index, group, SUMMARY + name) for group in groups]
        if name in names and any(found):
            factor = 100.0 if "accuracy" in name else 1.0
            shown = NAMES.get(name, f"{name} (%)" if factor > 1 else name)
            cells = [mean_and_spread([factor * one for one in values]) for values in found]
            if name == "eps":
                cells = [from_to(values) + _unproven(index, group) for values, group in zip(found, groups, strict=True)]
            yield shown, cells


def _difference(index: Index, groups: Sequence[Group]) -> str | None:
    """How far the accuracies of two configurations lie apart, in a line; None where no spread is known."""
    if len(groups) != 2 or max(_configurations(index, group) for group in groups) > 1:
        return None
    first, second = ([100 * one for one in _numbers(index, group, SUMMARY + "test_accuracy.final")] for group in groups)
    interval = difference_of_means(second, first)
    if interval is None:
        return None
    low, high = interval
    names = f"{groups[1].name} less {groups[0].name}"
    return f"test accuracy, {names}: {(low + high) / 2:.2f} points, 95 % interval {low:.2f} to {high:.2f} (Welch)"


def difference_of_means(values: Sequence[float], others: Sequence[float]) -> tuple[float, float] | None:
    """Ends of the 95 % interval of the mean of some numbers less that of others, by Student's distribution.

    Variances may differ: Welch's degrees of freedom. None where either has fewer than two finite numbers, or all are
    alike.
    """
    if min(len(values), len(others)) < 2 or not all(map(math.isfinite, (*values, *others))):
        return None
    squares = [statistics.variance(one) / len(one) for one in (values, others)]
    if not sum(squares):
        return None
    from scipy.special import stdtrit  # takes a while to import

    estimated = sum(square**2 / (len(one) - 1) for square, one in zip(squares, (values, others), strict=True))
    reach = float(stdtrit(sum(squares) ** 2 / estimated, 0.975)) * math.sqrt(sum(squares))
    difference = statistics.fmean(values) - statistics.fmean(others)
    return difference - reach, difference + reach


def _unproven(index: Index, group: Group) -> str:
    """What stands behind the eps of a group with runs whose eps is no guarantee."""
    return UNPROVEN if any(is_unproven(index, place) for place in _finished(index, group)) else ""


def _numbers(index: Index, group: Group, name: str) -> list[float]:
    values = index.column(name)
    return [float(values[place]) for place in _finished(index, group) if is_number(values[place])]


def _finished(index: Index, group: Group) -> list[int]:
    status = index.column("status")
    return [place for place in group.places if status[place] == Status.FINISHED]


def mean_and_spread(values: Sequence[float]) -> str:
    """Mean ± sample standard deviation (n - 1), without it where that is none or no number; a dash for none.

    Both end at the same digit, the second one of the deviation; where that is too small for it, each ends at its own.
    """
    if not values:
        return NOTHING
    mean = statistics.fmean(values)
    spread = statistics.stdev(values) if len(set(values)) > 1 and all(map(math.isfinite, values)) else 0.0
    decimals = 1 - math.floor(math.log10(spread)) if spread else None
    if decimals is None or decimals > MOST_DECIMALS:
        return f"{mean:.5g} ± {spread:.2g}" if spread else f"{mean:.5g}"
    return f"{mean:.{max(decimals, 0)}f} ± {spread:.{max(decimals, 0)}f}"


def from_to(values: Sequence[float]) -> str:
    """The least and the largest, one number where they are shown alike; a dash for none."""
    return " to ".join(dict.fromkeys(f"{bound(values):.4g}" for bound in (min, max))) if values else NOTHING


def differences(index: Index, groups: Sequence[Group]) -> Iterator[tuple[str, list[str]]]:
    """The settings that can change the numbers of a run and are not the same in all groups, with their values."""
    from dpbench.config.identity import is_identity  # takes seconds to import

    for name in filter(is_identity, index.settings):
        held = index.column(name)
        cells = [_written({_text(held[place]): None for place in group.places}) for group in groups]
        if len(set(cells)) > 1:
            yield name, cells


def _text(value: object) -> str:
    return NOTHING if value is ABSENT else show(value)


def _written(values: dict[str, None]) -> str:
    """All values in one group, in their order; only how many there are where they are many."""
    return ", ".join(values) if len(values) <= WRITTEN_OUT else f"{len(values)} values"
