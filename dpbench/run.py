"""python -m dpbench.run: one training run, or a sweep with -m."""

from __future__ import annotations

import sys
import time
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import hydra
from hydra._internal.utils import get_args_parser

from dpbench.cli.console import make_console
from dpbench.cli.help import help_text
from dpbench.cli.job import train_job
from dpbench.cli.preview import print_plan
from dpbench.config import Job, compose_jobs, conf_folder, quoted
from dpbench.config.schema import register
from dpbench.errors import UserError
from dpbench.report.sweep import Row, as_csv, print_table
from dpbench.tracking import Status, log_table, tracker_line
from dpbench.tracking.record import read_json, require_writable, write_atomically
from dpbench.training.budget import budget
from dpbench.training.execute import record_of

OK, FAILED, BAD_INPUT, INTERRUPTED = 0, 1, 2, 130

console = make_console()
errors = make_console(stderr=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line; returns the exit code."""
    typed = list(sys.argv[1:] if arguments is None else arguments)
    register()
    try:
        return _main(typed)
    except UserError as error:
        errors.print(f"error: {error}", style="red")
        return BAD_INPUT
    except KeyboardInterrupt:
        return _interrupted()


def _main(typed: list[str]) -> int:
    if "-h" in typed or "--help" in typed:
        console.print(help_text())
        return OK
    options = _flags(typed)
    flags = [argument for argument in typed if argument not in options.overrides]
    overrides = [_written_out(quoted(override)) for override in options.overrides]
    if overrides != options.overrides and sum(line.startswith("seed=") for line in overrides) > 1:
        raise UserError("seeds is short for a list of values of seed; give one of the two")
    if options.info or options.hydra_help or options.shell_completion:
        _launch(flags, overrides)
        return OK
    folders = [Path(options.config_dir).absolute()] if options.config_dir else []
    jobs = compose_jobs(overrides, multirun=options.multirun, config_dirs=folders)
    if options.cfg:
        _launch(flags, overrides)
        return OK
    _refuse_twins(jobs)
    if jobs[0].config.plan:
        print_plan(jobs, console)
        return OK
    return _run(jobs, flags, overrides, multirun=options.multirun)


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
    if options.config_dir and not Path(options.config_dir).is_dir():
        raise UserError(f"-cd {options.config_dir}: no such folder")
    if options.cfg and options.multirun:
        raise UserError(f"--cfg {options.cfg}: prints the settings of one run; leave out -m")
    return options


def _written_out(override: str) -> str:
    """seeds=3 as the sweep that it is short for: seed=0,1,2."""
    key, _, value = override.partition("=")
    if key != "seeds" or value == "null":
        return override
    if not value.isdecimal() or int(value) == 0:
        raise UserError("expected a whole number > 0; name other seeds by seed=3,5,8", field="seeds", value=value)
    return "seed=" + ",".join(map(str, range(int(value))))


def _refuse_twins(jobs: list[Job]) -> None:
    """Two names for one run in a sweep are most likely a slip."""
    seen: dict[Path, Job] = {}
    for job in jobs:
        twin = seen.setdefault(record_of(job).folder, job)
        if twin is not job:
            raise UserError(f"{twin.name} and {job.name} are the same run; drop one")


def _run(jobs: list[Job], flags: list[str], overrides: list[str], *, multirun: bool) -> int:
    first = jobs[0].config
    results = Path(first.results_dir)
    require_writable(results)
    waiting = [job for job in jobs if job.config.force or not record_of(job).finished()]
    for job in waiting:
        budget(job.config)  # refuses here what can't be calibrated; the result is cached
    sweep = time.strftime("%Y-%m-%d_%H-%M-%S")
    group = first.tracker.group or (f"sweep-{sweep}" if multirun else None)
    interrupted = False
    if waiting:
        if multirun:
            console.print(f"{len(jobs)} runs, {len(jobs) - len(waiting)} of them finished already")
        console.print(tracker_line(first.tracker, results))
        own = [f"hydra.sweep.dir=${{results_dir}}/sweeps/{sweep}"] if multirun else []
        own += [f"tracker.group={group}"] if group and not first.tracker.group else []
        try:
            _launch(flags, [*_seeds_in_one_job(jobs, overrides), *own])
        except KeyboardInterrupt:
            interrupted = True
        except SystemExit:  # Hydra's, after it has printed why a launcher failed
            errors.print("error: the launcher failed; what is recorded stays", style="red")
    rows = _rows(jobs)
    if any(row.status != Status.REFUSED for row in rows):  # where nothing ran, a sentence says all
        print_table(rows, console)
    if multirun and waiting and any(row.summary for row in rows):
        _keep_table(rows, jobs, results / "sweeps" / sweep, group)
    return _interrupted() if interrupted else _complain(rows)


def _seeds_in_one_job(jobs: list[Job], overrides: list[str]) -> list[str]:
    """The overrides with a sweep over seeds as one job; a launcher of several processes has to be told to.

    Which seeds share their passes is decided in that job.
    """
    seeds = list(dict.fromkeys(job.config.seed for job in jobs))
    elsewhere = any(line.startswith("hydra/launcher=") and line != "hydra/launcher=basic" for line in overrides)
    fuse = jobs[0].config.fuse_seeds
    if len(seeds) == 1 or not fuse or (elsewhere and fuse == "auto"):
        return overrides
    together = f"seeds=[{','.join(map(str, seeds))}]"
    return [together if line.partition("=")[0] == "seed" else line for line in overrides]


def _interrupted() -> int:
    errors.print("interrupted; what is recorded stays, the rest runs again next time", style="yellow")
    return INTERRUPTED


def _launch(flags: list[str], overrides: list[str]) -> None:
    """Hand over to Hydra and its launcher."""
    sys.argv = [sys.argv[0], *flags, *overrides]
    hydra.main(version_base="1.3", config_path=str(conf_folder()), config_name="config")(train_job)()


def _rows(jobs: list[Job]) -> list[Row]:
    """What the records say of each job, named by what sets it apart from the others."""
    common = set.intersection(*(set(job.overrides) for job in jobs)) if len(jobs) > 1 else set()
    rows = []
    for job in jobs:
        record = record_of(job)
        folder = record.latest() if job.config.force else record.folder
        refusal = record.take_refusal()
        status = {"status": Status.REFUSED, "reason": refusal} if refusal else read_json(folder / "status.json")
        own = replace(job, overrides=tuple(line for line in job.overrides if line not in common))
        rows.append(
            Row(
                name=own.name,
                summary=read_json(folder / "summary.json"),
                status=status.get("status", "not run"),
                reason=status.get("reason"),
                folder=str(folder),
            )
        )
    return rows


def _keep_table(rows: list[Row], jobs: list[Job], folder: Path, group: str | None) -> None:
    """Write the table beside the sweep's own record, and to the tracker."""
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / "table.csv", as_csv(rows))
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
        "status",
    ]
    cells = []
    for job, row in zip(jobs, rows, strict=True):
        found = [row.accuracy("final"), row.accuracy("best"), str(row.summary.get("eps"))]
        found += [str(row.summary.get("published_eps")), row.status]
        cells.append([row.name, *job.choices.values(), str(job.config.eps), job.config.seed, *found])
    where = Path(jobs[0].config.results_dir)
    log_table(settings, where, name=f"table-{group}", columns=columns, rows=cells, say=errors.print)


def _complain(rows: list[Row]) -> int:
    """Say once what went wrong; the exit code tells which kind."""
    reasons: dict[str, list[Row]] = {}
    for row in rows:
        if row.status != Status.FINISHED:
            reasons.setdefault(f"{row.status}: {row.reason}", []).append(row)
    for reason, those in reasons.items():
        which = "" if len(rows) == 1 else f" ({'; '.join(row.name for row in those)})"
        text = reason.removeprefix(f"{Status.REFUSED}: ")
        errors.print(f"error: {text}{which}", style="red")
    if any(row.status == Status.REFUSED for row in rows):
        return BAD_INPUT
    return FAILED if reasons else OK


if __name__ == "__main__":
    sys.exit(main())
