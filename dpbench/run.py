"""python -m dpbench.run: one training run, or a sweep with -m."""

from __future__ import annotations

import sys
import time
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, count
from pathlib import Path
from typing import NoReturn

from dpbench.cli.starting import starting
from dpbench.garbage import uncollected

with starting(), uncollected():  # torch alone makes half a million objects that stay
    import hydra
    from hydra._internal.utils import get_args_parser
    from hydra.errors import HydraException
    from omegaconf import DictConfig

    from dpbench.cli.command import BAD_INPUT, GOES_ON, OK, exit_code, run_command
    from dpbench.cli.help import help_text
    from dpbench.cli.preview import print_plan
    from dpbench.cli.table import Row, as_csv, print_means, print_table
    from dpbench.config import Job, compose_jobs, conf_folder, in_grammar, quoted, require_same_releases
    from dpbench.config.compose import ADD_M, MOST_JOBS
    from dpbench.config.own import find_own_stages
    from dpbench.config.schema import register
    from dpbench.console import make_console
    from dpbench.errors import UserError, require
    from dpbench.files import require_writable, write_atomically
    from dpbench.launch.job import train_here, train_job
    from dpbench.launch.launcher import Launcher, LauncherError
    from dpbench.launch.rounds import carry_through
    from dpbench.tracking import Status, log_table, tracker_line
    from dpbench.tracking.process import Process
    from dpbench.tracking.reading import Recorded
    from dpbench.tracking.record import MODEL
    from dpbench.training.calibrating import budgets
    from dpbench.training.distributed import TorchTeam, current_team, torchrun_team
    from dpbench.training.execution import record_of
    from dpbench.training.following import follow

FAILED = 1
NOT_RUN = "not run"
NO_REASON = "its record does not say why"
# Carries out some jobs with further overrides for all of them; with those given it is a Start of rounds.py.
StartWith = Callable[[list[str], Sequence[Job]], Mapping[int, str]]

console = make_console()
errors = make_console(stderr=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line; returns the exit code."""
    with starting():
        register()
    words = sys.argv[1:] if arguments is None else arguments
    return run_command(_team, arguments, lambda: help_text(_folders(_flags([*words]))), GOES_ON)


def _team(typed: list[str]) -> int:
    with torchrun_team() as team:
        return _follow(team, typed) if isinstance(team, TorchTeam) and not team.leads else _main(typed)


def _main(typed: list[str]) -> int:
    options = _flags(typed)
    flags = [argument for argument in typed if argument not in options.overrides]
    overrides = [_written_out(override, multirun=options.multirun) for override in options.overrides]
    if overrides != options.overrides and sum(line.startswith("seed=") for line in overrides) > 1:
        raise UserError("seeds=N stands for seed=0,...,N-1; give seed or seeds, not both")
    if options.info or options.hydra_help or options.shell_completion:
        find_own_stages(_folders(options))
        try:
            _launch(flags, [] if options.hydra_help else overrides)  # which is about Hydra alone, and knows no run
        except HydraException:
            compose_jobs(overrides, multirun=options.multirun, config_dirs=_folders(options))  # says what is wrong
            raise
        return OK
    _refuse_launcher(overrides)
    _refuse_other_folders(overrides)
    with uncollected():
        jobs = compose_jobs(overrides, multirun=options.multirun, config_dirs=_folders(options))
    if options.cfg:
        _launch(flags, overrides)
        return OK
    _refuse_twins(jobs)
    require_same_releases(jobs)
    hydras = [line for line in overrides if line.lstrip("+").startswith("hydra")]
    where = f"results_dir={in_grammar(jobs[0].config.results_dir)}"

    def launcher(*settings: str) -> Launcher:
        return Launcher([*hydras, where, *settings], _folders(options))

    if hydras:
        launcher()  # refuses what is wrong with it before any run begins
    elsewhere = _launcher_of(hydras)
    if elsewhere is not None and not options.multirun:
        raise UserError(f"{elsewhere}: takes a sweep; add -m")
    if jobs[0].config.plan:
        print_plan(jobs, console)
        return OK

    def starting(sweep: str | None) -> StartWith:
        if sweep is None:
            return partial(_start_one, flags, overrides) if hydras else _start_here
        # Not by a reference to results_dir, which each run has as it was typed, with ~ for a home.
        folder = in_grammar(str(Path(jobs[0].config.results_dir) / "sweeps" / sweep))
        return partial(_start, launcher(f"hydra.sweep.dir={folder}"), _fused(jobs, hydras))

    return _run(jobs, starting, multirun=options.multirun)


def _follow(team: TorchTeam, typed: list[str]) -> int:
    """Take part in what rank 0 does, which says all there is to say."""
    try:
        follow(team, _folders(_flags(typed)))
    except KeyboardInterrupt as interruption:
        return exit_code(interruption)
    except UserError:
        return BAD_INPUT
    return FAILED if team.lost else OK


def _folders(options: Namespace) -> list[Path]:
    return [Path(options.config_dir).absolute()] if options.config_dir else []


def _launcher_of(overrides: Sequence[str]) -> str | None:
    """The override that hands runs to other processes; None where they are carried out in this one."""
    chosen = (line for line in overrides if line.startswith("hydra/launcher=") and line != "hydra/launcher=basic")
    return next(chosen, None)


def _refuse_launcher(overrides: list[str]) -> None:
    """Processes of a launcher would not be those that torchrun started."""
    elsewhere = _launcher_of(overrides)
    if elsewhere is not None and current_team().size > 1:
        raise UserError(
            f"{elsewhere}: under torchrun the runs of a sweep go one after the other; leave the launcher out"
        )


def _refuse_other_folders(overrides: list[str]) -> None:
    """The command and its jobs would mean different folders by the same relative names, or by other settings."""
    for line in overrides:
        key, _, value = line.lstrip("+").partition("=")
        if key == "hydra.job.chdir" and value.lower() not in ("false", "null"):
            raise UserError(f"{line}: runs stay in the folder where the command was typed; leave it out")
        if key == "hydra.sweep.dir":
            raise UserError(f"{line}: all that a sweep writes lies below results_dir; set that instead")


def _flags(typed: list[str]) -> Namespace:
    """Hydra's flags, and the overrides: -m may stand anywhere among them."""
    parser = get_args_parser()

    def refuse(message: str) -> NoReturn:
        raise UserError(message)

    parser.error = refuse  # type: ignore[method-assign]
    options = parser.parse_intermixed_args(typed)
    for name in ("config_name", "config_path"):
        if getattr(options, name):
            raise UserError(
                f"--{name.replace('_', '-')} {getattr(options, name)}: the primary config is fixed; use -cd"
            )
    if options.experimental_rerun:
        raise UserError(
            f"--experimental-rerun {options.experimental_rerun}: a run goes on when its command is typed again"
        )
    if options.config_dir and not Path(options.config_dir).is_dir():
        raise UserError(f"-cd {options.config_dir}: no such folder")
    if options.cfg and options.multirun:
        raise UserError(f"--cfg {options.cfg}: prints the settings of one run; leave out -m")
    return options


def _written_out(override: str, *, multirun: bool) -> str:
    """seeds=3 as the sweep that it is short for: seed=0,1,2."""
    key, _, value = override.partition("=")
    if key != "seeds" or value == "null":
        return override
    fits = value.isdecimal() and 0 < int(value) <= MOST_JOBS
    require(fits, "seeds", value, f"a whole number from 1 to {MOST_JOBS:,}; name other seeds by seed=3,5,8")
    if int(value) > 1 and not multirun:
        raise UserError(f"{override}: {ADD_M}")
    return "seed=" + ",".join(map(str, range(int(value))))


def _refuse_twins(jobs: list[Job]) -> None:
    """Two names for one run in a sweep are most likely a slip."""
    seen: dict[Path, Job] = {}
    for job in jobs:
        twin = seen.setdefault(record_of(job).folder, job)
        if twin is not job:
            raise UserError(f"{twin.name} and {job.name} are the same run; drop one")


def _run(jobs: list[Job], starting: Callable[[str | None], StartWith], *, multirun: bool) -> int:
    """Carry out jobs and say what came of them.

    Args:
        jobs: of the command line.
        starting: given the name of the sweep, if they are one, what carries out some of them.
        multirun: whether they are one.
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
    start = starting(sweep)
    group = first.tracker.group or (f"sweep-{sweep}" if sweep else None)
    interrupted: KeyboardInterrupt | None = None
    launched = True
    if waiting:
        if sweep:
            console.print(f"{len(jobs)} runs, {len(finished)} of them finished already")
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
    _say_what_is_not_kept(finished)
    rows = _rows(jobs)
    if any(row.status != Status.REFUSED for row in rows):  # where nothing ran, a sentence says all
        print_table(rows, console)
        print_means(rows, console)
    kept = True
    if sweep and any(row.summary for row in rows):
        kept = _keep_table(rows, jobs, results / "sweeps" / sweep, group)
    if interrupted is not None:
        raise interrupted
    return _complain(rows, launched=launched) or (OK if kept else FAILED)


def _say_what_is_not_kept(finished: list[Job]) -> None:
    """Name the runs whose models were asked for only after they had finished."""
    without = [job for job in finished if job.config.keep_model and not (record_of(job).folder / MODEL).exists()]
    for job in without:
        errors.print(f"warning: {job.name} finished without keep_model; force=true runs it anew", style="yellow")


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


def _start_here(own: list[str], jobs: Sequence[Job]) -> dict[int, str]:
    """Carry out the one job of a command line, in this process; it is no part of a sweep and has nothing of its own."""
    assert not own
    traces = map(train_here, jobs)
    return {place: trace for place, trace in enumerate(traces) if trace is not None}


def _start_one(flags: list[str], overrides: list[str], own: list[str], jobs: Sequence[Job]) -> dict[int, str]:
    """Let Hydra carry out the one job of a command line that has settings of Hydra's, in this process."""
    raised = _launch(flags, [*overrides, *own])
    return dict.fromkeys(range(len(jobs)), raised) if raised else {}


def _start(launcher: Launcher, fused: bool, own: list[str], jobs: Sequence[Job]) -> dict[int, str]:
    """Carry out jobs of a sweep through Hydra's launcher."""
    places: dict[tuple[str, ...], list[int]] = {}
    for place, job in enumerate(jobs):
        line = tuple("seeds" if fused and one.startswith("seed=") else one for one in job.overrides)
        places.setdefault(line, []).append(place)
    lines = []
    for line, of_line in places.items():
        seeds = f"seeds=[{','.join(str(jobs[place].config.seed) for place in of_line)}]"
        lines.append([*(seeds if one == "seeds" else one for one in line), *own])
    raised = zip(places.values(), launcher(lines), strict=True)
    return {place: trace for of_line, trace in raised if trace is not None for place in of_line}


def _fused(jobs: Sequence[Job], hydras: Sequence[str]) -> bool:
    """Whether jobs that differ in their seeds alone become one; a launcher of several processes has to be told to.

    Which seeds share their passes is decided in that job.
    """
    fuse = jobs[0].config.fuse_seeds
    several = len({job.config.seed for job in jobs}) > 1
    return bool(several and fuse and not (_launcher_of(hydras) and fuse == "auto"))


def _launch(flags: list[str], overrides: list[str]) -> str | None:
    """Hand over to Hydra; the traceback of what was raised outside of the run, if anything was."""
    # Overrides first: a flag that may have a value, as --info, would take one for it.
    sys.argv = [sys.argv[0], *map(quoted, overrides), *flags]
    raised = []

    def task(composed: DictConfig) -> None:
        raised.append(train_job(composed, Process.this()))

    hydra.main(version_base="1.3", config_path=str(conf_folder()), config_name="config")(task)()
    return raised[0] if raised else None


def _rows(jobs: list[Job]) -> list[Row]:
    """What the records say of each job, named by what sets it apart from the others."""
    common = set.intersection(*(set(job.overrides) for job in jobs)) if len(jobs) > 1 else set()
    rows = []
    for job in jobs:
        record = record_of(job)
        folder = record.latest() if job.config.force else record.folder
        recorded = Recorded.read(folder)
        status, reason = recorded.status or NOT_RUN, recorded.reason or recorded.damage
        if refusal := record.take_refusal():
            status, reason = Status.REFUSED, refusal
        elif untold := record.take_untold():
            status, reason = Status.FAILED, untold
        own = replace(job, overrides=tuple(line for line in job.overrides if line not in common))
        rows.append(
            Row(
                name=own.name,
                summary=recorded.so_far,
                status=status,
                reason=reason,
                folder=str(folder) if folder.exists() else None,
            )
        )
    return rows


def _keep_table(rows: list[Row], jobs: list[Job], folder: Path, group: str | None) -> bool:
    """Write the table beside the sweep's own record, and to the tracker; whether it could be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / "table.csv", as_csv(rows))
    except OSError as error:
        errors.print(f"error: the table can't be written to {folder} ({error.strerror})", style="red")
        return False
    settings = jobs[0].config.tracker
    settings.group = group
    columns = [
        "run",
        *jobs[0].choices,
        "target eps",
        "seed",
        "test accuracy",
        "best on test",
        "eps",
        "eps as published",
        "eps of the search",
        "status",
    ]
    cells = []
    for job, row in zip(jobs, rows, strict=True):
        found = [row.accuracy("final"), row.accuracy("best"), str(row.summary.get("eps"))]
        found += [str(row.summary.get(name)) for name in ("published_eps", "search_eps")]
        found.append(row.status)
        cells.append([row.name, *job.choices.values(), str(job.config.eps), job.config.seed, *found])
    where = Path(jobs[0].config.results_dir)
    log_table(settings, where, name=f"table-{group}", columns=columns, rows=cells, say=errors.print)
    return True


def _complain(rows: list[Row], *, launched: bool = True) -> int:
    """Say once what went wrong; the exit code tells which kind.

    Args:
        rows: of all runs.
        launched: whether the launcher did its work; where it did not, which has been said, some were not begun.
    """
    reasons: dict[str, list[Row]] = {}
    unfinished = [row for row in rows if row.status != Status.FINISHED]
    for row in unfinished:
        if launched or row.status != NOT_RUN or row.reason:
            reasons.setdefault(f"{row.status}: {row.reason or NO_REASON}", []).append(row)
    for reason, those in reasons.items():
        which = "" if len(rows) == 1 else f" ({'; '.join(row.name for row in those)})"
        text = reason.removeprefix(f"{Status.REFUSED}: ")
        errors.print(f"error: {text}{which}", style="red")
    if any(row.status == Status.REFUSED for row in rows):
        return BAD_INPUT
    return FAILED if unfinished else OK


if __name__ == "__main__":
    sys.exit(main())
