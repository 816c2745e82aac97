"""python -m dpbench.reproduce: what of the papers is done, what is missing, and running it within a budget."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from dpbench.cli.starting import starting
from dpbench.garbage import uncollected

with starting(), uncollected():
    from dpbench.claims import Artefact, load_all
    from dpbench.cli.command import FAILED, GOES_ON, OK, exit_code, run_command
    from dpbench.config import RunConfig, compose_each, in_grammar
    from dpbench.console import make_console
    from dpbench.devices import choose_device
    from dpbench.files import require_no_file, require_writable
    from dpbench.reproduction.arguments import HELP, Arguments, chosen, parse
    from dpbench.reproduction.plan import Planner
    from dpbench.reproduction.queue import Left, carry_out
    from dpbench.reproduction.show import print_plan, reasons
    from dpbench.tracking import tracker_line
    from dpbench.wording import duration, number_of

if TYPE_CHECKING:
    from dpbench.launch.launcher import Launcher
    from dpbench.reproduction.launching import Launch

console = make_console()
errors = make_console(stderr=True)


def main(typed: Sequence[str] | None = None) -> int:
    """Run a command line; returns the exit code."""
    return run_command(lambda words: _main(parse(words)), typed, lambda _: HELP, GOES_ON)


def _main(arguments: Arguments) -> int:
    (job,) = compose_each([arguments.passed_on], arguments.config_dirs)
    config, launcher = job.config, None
    if arguments.launcher is None:
        choose_device(config.device)
    else:
        from dpbench.launch.launcher import require_launcher

        require_launcher(arguments.launcher)
        launcher = _launcher(arguments, arguments.launcher)
        config.device = "auto"  # of the times of this machine: the runs may go where there are other devices
    with uncollected():
        artefacts = chosen(arguments, load_all(arguments.claims, arguments.papers))
    if arguments.smoke:
        from dpbench.reproduction.smoke import smoke

        return FAILED if smoke(artefacts, arguments.passed_on, config, console, arguments.config_dirs) else OK
    if arguments.plan:
        require_no_file(arguments.results_dir, "results_dir", "name another")
    else:
        require_writable(arguments.results_dir)
    with uncollected():
        planner = Planner(
            artefacts, arguments.results_dir, config, retry=arguments.retry, config_dirs=arguments.config_dirs
        )
        print_plan(planner, artefacts, console, cells=bool(arguments.artefacts))
    if arguments.plan:
        return OK
    return _reproduce(arguments, artefacts, planner, config, launcher)


def _reproduce(
    arguments: Arguments,
    artefacts: Sequence[Artefact],
    planner: Planner,
    config: RunConfig,
    launcher: Launcher | None,
) -> int:
    """Run what is missing, and write what came of it, whatever ended the running."""
    # What trains is imported late: a plan does without, and is there sooner.
    from dpbench.computed import compute_all
    from dpbench.report import build_grid, write_output
    from dpbench.report.grid import scorecard
    from dpbench.report.wandb import log_output
    from dpbench.reproduction.launching import Launch

    launch = Launch(arguments.results_dir, arguments.passed_on, launcher, console, arguments.config_dirs)
    interrupted: KeyboardInterrupt | None = None
    left: Left | None = None
    try:
        compute_all(arguments.results_dir, artefacts, console.print)
        console.print(tracker_line(config.tracker, arguments.results_dir))
        left = _carry_out(arguments, planner, launch)
    except KeyboardInterrupt as interruption:
        interrupted = interruption
        errors.print(GOES_ON, style="yellow")
    _print_outcome(launch, left, planner)
    # All of them, whichever were asked for: scorecard and page show them side by side.
    grids = [build_grid(artefact, planner.evidence, arguments.own_places) for artefact in load_all(arguments.claims)]
    if write_output(grids, arguments.results_dir, console.print):
        log_output(config.tracker, arguments.results_dir, grids, errors.print)
    console.print(f"Written: {arguments.results_dir / 'index.html'}, scorecard.md, and a folder for each paper.")
    asked = {artefact.where for artefact in artefacts}
    card = scorecard(grid for grid in grids if grid.artefact.where in asked)
    for what, of_these in (("Claims", card.published), ("dpbench's own claims", card.own)):
        if of_these.findings:
            console.print(f"{what}: {of_these.in_words}")
    if interrupted is not None:
        return exit_code(interrupted)
    return FAILED if launch.failures or launch.broken else OK


def _launcher(arguments: Arguments, name: str) -> Launcher:
    from dpbench.launch.launcher import Launcher

    where = f"results_dir={in_grammar(str(arguments.results_dir))}"
    return Launcher([f"hydra/launcher={name}", *arguments.launcher_settings, where], arguments.config_dirs)


def _carry_out(arguments: Arguments, planner: Planner, launch: Launch) -> Left:
    """Run what is missing; what other processes are at comes last, and may be followed by more."""
    end = math.inf if arguments.budget is None else time.monotonic() + arguments.budget
    while True:
        budget = None if arguments.budget is None else end - time.monotonic()
        left = carry_out(planner, budget, launch, together=arguments.launcher is not None)
        if not launch.elsewhere or time.monotonic() >= end:
            return left
        works, unbegun = launch.come_back(end)
        for work in works:
            planner.note(work.batch)
        for batch in unbegun:
            planner.put_back(batch)


def _print_outcome(launch: Launch, left: Left | None, planner: Planner) -> None:
    """What was run, what was not and why."""
    console.print(f"\n{number_of(launch.ended, 'run')} ended, {len(launch.failures)} failed.")
    if launch.elsewhere:
        console.print(f"Other processes are at {number_of(len(launch.elsewhere), 'run')}; they were not waited for.")
    for name, reason in launch.failures.items():
        errors.print(f"error: {reason} ({name})", style="red")
    if launch.broken is not None:
        errors.print(f"error: the launcher failed; what is recorded stays: {launch.broken}", style="red")
    for reason in reasons(planner):
        console.print(reason)
    if left is None or launch.broken is not None:
        return
    if left.cheapest is None:
        console.print("Nothing is left that can be run here.")
        return
    entry, each = left.cheapest.entry, left.cheapest.seconds / len(left.cheapest.batch.seeds)
    minutes = math.floor(each / 60) + 1  # more than it takes, for planning takes some of it
    console.print(
        f"{number_of(left.runs, 'run')} did not fit into the budget. Next is "
        f"{entry.artefact.where.removesuffix('.yaml')}, {entry.cell.place}: about {duration(each)} a run, so "
        f"budget={minutes}m is enough for one."
    )


if __name__ == "__main__":
    sys.exit(main())
