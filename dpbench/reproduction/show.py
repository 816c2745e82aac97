"""A plan as text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from dpbench.claims import Artefact, Kind
from dpbench.console import new_table
from dpbench.reproduction.plan import Entry, Planner
from dpbench.reproduction.standing import State
from dpbench.wording import NOTHING, duration, number_of


def print_plan(planner: Planner, artefacts: Sequence[Artefact], console: Console, *, cells: bool) -> None:
    """Print a line for each artefact, or each of its cells, and what all that can be run here takes together."""
    if cells:
        for artefact in artefacts:
            own = [entry for entry in planner.entries if entry.artefact is artefact]
            console.print(f"{artefact.where}: {artefact.title}", style="bold")
            if own:
                console.print(_of_cells(planner, own))
            else:
                console.print(f"  {_without_cells(artefact)}")
    else:
        console.print(_of_artefacts(planner, artefacts))
    console.print()
    _print_total(planner, console)


def _of_artefacts(planner: Planner, artefacts: Sequence[Artefact]) -> Table:
    table = _table(left=("artefact", "estimated from", "not run or failed"), right=(*_STATES, "runs", "time here"))
    for artefact in artefacts:
        own = [entry for entry in planner.entries if entry.artefact is artefact]
        if not own:
            table.add_row(Text(artefact.stem), *[""] * (len(_STATES) + 2), "", str(artefact.kind))
            continue
        line = planner.line(own)
        table.add_row(
            Text(artefact.stem),
            *(str(line.states[state] or NOTHING) for state in _STATES.values()),
            str(line.runs or NOTHING),
            duration(line.seconds) if line.runs else NOTHING,
            line.basis.in_words() if line.basis is not None else "",
            Text(_in_words(line.reasons)),
        )
    return table


_STATES = {str(state): state for state in State}


def _of_cells(planner: Planner, entries: Sequence[Entry]) -> Table:
    table = _table(left=("cell", "state", "estimated from"), right=("runs missing", "time here"))
    for entry in entries:
        runs = entry.standing.runs
        seconds, basis = planner.seconds_of_run(entry)
        reason = f": {entry.standing.reason}" if entry.standing.reason else ""
        table.add_row(
            Text(entry.cell.place),
            str(runs or NOTHING),
            duration(runs * seconds) if runs else NOTHING,
            Text(f"{entry.standing.state}{reason}"),
            basis.in_words() if runs else "",
        )
    return table


def _table(*, left: Sequence[str], right: Sequence[str]) -> Table:
    """A table whose first column is text, then numbers, then the rest of the text."""
    table = new_table()
    table.add_column(left[0], overflow="fold")
    for name in right:
        table.add_column(name, justify="right")
    for name in left[1:]:
        table.add_column(name, overflow="fold")
    return table


def _without_cells(artefact: Artefact) -> str:
    """What there is to say of an artefact that no training makes."""
    if artefact.kind == Kind.TRAINED:
        return "nothing of its own is trained"
    return f"{artefact.kind}: {artefact.reason}"


def _print_total(planner: Planner, console: Console) -> None:
    line = planner.line(planner.entries)
    counted = ", ".join(f"{line.states[state]} {state}" for state in State if line.states[state])
    console.print(f"{number_of(len(planner.entries), 'trained cell')}: {counted or 'none'}.")
    for reason in reasons(planner):
        console.print(reason)
    if line.runs:
        worst = f", estimated from {line.basis.in_words()}" if line.basis is not None else ""
        what, time = number_of(line.runs, "run"), duration(line.seconds)
        console.print(f"What can be run here: {what}, about {time} on this device{worst}.")


def reasons(planner: Planner) -> list[str]:
    """Why cells are not run, each reason once."""
    blocked = Counter(e.standing.reason for e in planner.entries if e.standing.state == State.BLOCKED)
    return [f"not run: needs {reason} ({number_of(count, 'cell')})" for reason, count in blocked.most_common()]


def _in_words(counted: Counter[str]) -> str:
    return "; ".join(f"{reason} ({count})" for reason, count in counted.most_common())
