"""python -m dpbench.run: one training run, or a sweep with -m."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain, count
from pathlib import Path

from dpbench.cli.starting import starting
from dpbench.garbage import uncollected

with starting(), uncollected():  # torch alone makes half a million objects that stay
    from hydra.errors import HydraException

    from dpbench.cli.command import BAD_INPUT, BEGINS_ANEW, FAILED, GOES_ON, OK, exit_code, folders_of, run_command
    from dpbench.cli.flags import parse, refuse_launcher, refuse_other_folders, written_out
    from dpbench.cli.help import help_text
    from dpbench.cli.outcome import complain, keep_table, rows_of, say_what_is_not_kept
    from dpbench.cli.preview import missing_data, print_plan
    from dpbench.cli.table import print_means, print_table
    from dpbench.config import Job, compose_jobs, in_grammar, require_same_releases
    from dpbench.config.own import find_own_stages
    from dpbench.config.registry import register
    from dpbench.console import make_console
    from dpbench.errors import UserError
    from dpbench.files import require_no_file, require_writable
    from dpbench.launch.launcher import Launcher, LauncherError, launcher_of
    from dpbench.launch.rounds import carry_through
    from dpbench.launch.starts import StartWith, fuses, hand_over, start_by_hydra, start_by_launcher, start_here
    from dpbench.tracking import Status, tracker_line
    from dpbench.training.calibrating import budgets
    from dpbench.training.distributed import TorchTeam
    from dpbench.training.following import follow
    from dpbench.training.job_record import record_of
    from dpbench.training.torchrun import torchrun_team
    from dpbench.wording import number_of

console = make_console()
errors = make_console(stderr=True)


def main(typed: Sequence[str] | None = None) -> int:
    """Run a command line; returns the exit code."""
    with starting():
        register()
    return run_command(_team, typed, lambda words: help_text(folders_of(parse(words))), GOES_ON)


def _team(typed: list[str]) -> int:
    with torchrun_team() as team:
        return _follow(team, typed) if isinstance(team, TorchTeam) and not team.leads else _main(typed)


def _main(typed: list[str]) -> int:
    options = parse(typed)
    folders = folders_of(options)
    flags = [argument for argument in typed if argument not in options.overrides]
    overrides = written_out(options.overrides, multirun=options.multirun)
    if options.info or options.hydra_help or options.shell_completion:
        find_own_stages(folders)
        try:
            hand_over(flags, [] if options.hydra_help else overrides)  # which is about Hydra alone, and knows no run
        except HydraException:
            compose_jobs(overrides, multirun=options.multirun, config_dirs=folders)  # says what is wrong
            raise
        return OK
    refuse_launcher(overrides)
    refuse_other_folders(overrides)
    with uncollected():
        jobs = compose_jobs(overrides, multirun=options.multirun, config_dirs=folders)
    if options.cfg:
        hand_over(flags, overrides)
        return OK
    _refuse_twins(jobs)
    require_same_releases(jobs)
    hydras = [line for line in overrides if line.lstrip("+").startswith("hydra")]
    where = f"results_dir={in_grammar(jobs[0].config.results_dir)}"

    def launcher(*settings: str) -> Launcher:
        return Launcher([*hydras, where, *settings], folders)

    if hydras:
        launcher()  # refuses what is wrong with it before any run begins
    elsewhere = launcher_of(hydras)
    if elsewhere is not None and not options.multirun:
        raise UserError(f"{elsewhere}: takes a sweep; add -m")
    if jobs[0].config.plan:
        require_no_file(jobs[0].config.results_dir, "results_dir", "name another")
        print_plan(jobs, console)
        return OK

    def start_for(sweep: str | None) -> StartWith:
        if sweep is None:
            return partial(start_by_hydra, flags, overrides) if hydras else start_here
        # Not by a reference to results_dir, which each run has as it was typed, with ~ for a home.
        folder = in_grammar(str(Path(jobs[0].config.results_dir) / "sweeps" / sweep))
        return partial(start_by_launcher, launcher(f"hydra.sweep.dir={folder}"), fuses(jobs, hydras))

    try:
        return _run(jobs, start_for, multirun=options.multirun, here=elsewhere is None)
    except KeyboardInterrupt as interruption:
        errors.print(BEGINS_ANEW if any(job.config.force for job in jobs) else GOES_ON, style="yellow")
        return exit_code(interruption)


def _follow(team: TorchTeam, typed: list[str]) -> int:
    """Take part in what rank 0 does, which says all there is to say."""
    try:
        follow(team, folders_of(parse(typed)))
    except KeyboardInterrupt as interruption:
        return exit_code(interruption)
    except UserError:
        return BAD_INPUT
    return FAILED if team.lost else OK


def _refuse_twins(jobs: list[Job]) -> None:
    """Two names for one run in a sweep are most likely a slip."""
    seen: dict[Path, Job] = {}
    for job in jobs:
        twin = seen.setdefault(record_of(job).folder, job)
        if twin is not job:
            names = [twin.name, job.name]
            if twin.name == job.name and (apart := set(twin.overrides) ^ set(job.overrides)):
                names = [" ".join(line for line in each.overrides if line in apart) for each in (twin, job)]
            raise UserError(f"{' and '.join(names)} are the same run; drop one")


def _run(jobs: list[Job], start_for: Callable[[str | None], StartWith], *, multirun: bool, here: bool) -> int:
    """Carry out jobs and say what came of them.

    Args:
        jobs: of the command line.
        start_for: given the name of the sweep, if they are one, what carries out some of them.
        multirun: whether they are one.
        here: whether they are carried out on this machine.
    """
    first = jobs[0].config
    results = Path(first.results_dir)
    require_writable(results)
    waiting: list[Job] = []
    finished: list[Job] = []
    for job in jobs:
        (waiting if job.config.force or not record_of(job).finished() else finished).append(job)
    budgets([job.config for job in waiting], console)  # refuses here what can't be calibrated; the results are cached
    sweep = _name_of_sweep(results / "sweeps") if multirun and waiting else None
    start = start_for(sweep)
    group = first.tracker.group or (f"sweep-{sweep}" if sweep else None)
    interrupted: KeyboardInterrupt | None = None
    launched = True
    if waiting:
        if sweep:
            console.print(f"{number_of(len(jobs), 'run')}, {len(finished)} of them finished already")
            if here:
                _warn_of_missing_data(waiting)
        console.print(tracker_line(first.tracker, results))
        own = [f"tracker.group={group}"] if group and not first.tracker.group else []
        try:
            carry_through(waiting, partial(start, own), console)
        except KeyboardInterrupt as interruption:
            interrupted = interruption
        except LauncherError as error:
            launched = False
            errors.print(f"error: the launcher failed; what is recorded stays: {error}", style="red")
    else:
        which = f"all {len(jobs)} runs are" if len(jobs) > 1 else "the run is"
        console.print(f"{which} finished already; force=true runs {'them' if len(jobs) > 1 else 'it'} anew")
    say_what_is_not_kept(finished, errors)
    rows = rows_of(jobs)
    if any(row.status != Status.REFUSED for row in rows):  # where nothing ran, a sentence says all
        print_table(rows, console)
        print_means(rows, console)
    kept = True
    if sweep and any(row.summary for row in rows):
        kept = keep_table(rows, jobs, results / "sweeps" / sweep, group, errors)
    if interrupted is not None:
        raise interrupted
    return complain(rows, errors, launched=launched) or (OK if kept else FAILED)


def _warn_of_missing_data(jobs: list[Job]) -> None:
    """Say what some of these runs lack; where all lack something, the first that is begun is refused at once."""
    missing = [missing_data(job.config) for job in jobs]
    if not all(missing):
        for line in dict.fromkeys(chain(*missing)):
            errors.print(f"warning: {line}; its runs will be refused when their turn comes", style="yellow")


def _name_of_sweep(sweeps: Path) -> str:
    """The time, and a number where it has been before: of two sweeps begun at once, or when the clock is set back."""
    now = time.strftime("%Y-%m-%d_%H-%M-%S")
    for name in chain([now], (f"{now}_{number}" for number in count(2))):
        try:
            (sweeps / name).mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError as error:
            raise UserError(
                f"no folder for the sweep can be made in it ({error.strerror})",
                field="results_dir",
                value=sweeps.parent,
            ) from error
        return name
    raise AssertionError("there is always another number")


if __name__ == "__main__":
    sys.exit(main())
