"""python -m dpbench.privacy: what a run would spend, or how much noise it needs, under every account."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from dpbench.cli.starting import starting
from dpbench.garbage import uncollected

with starting(), uncollected():
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from dpbench.cli.command import OK, OverridesParser, run_command
    from dpbench.config import Job, compose_jobs, names_apart
    from dpbench.config.registry import register
    from dpbench.config.schema import RunConfig
    from dpbench.console import make_console, new_table
    from dpbench.errors import UserError, require
    from dpbench.privacy import SCHEMES, calibrate, epsilon
    from dpbench.privacy.accountants import gaussian_epsilon
    from dpbench.privacy.closed_forms import approximate_clt_mu
    from dpbench.privacy.plan import Repeat
    from dpbench.privacy.sampling import POISSON
    from dpbench.privacy.search import calibrate_search
    from dpbench.privacy.tuning import PoissonRuns, RandomStopping, TruncatedNegativeBinomial
    from dpbench.training.budget import OverspentError, budget, guarantee_of
    from dpbench.training.calibrating import calibrating
    from dpbench.wording import NOTHING, number_of

# Candidates of a search if nothing is said, and at most: the account of more takes all memory.
CANDIDATES, LARGEST_GRID = 10, 1_000_000

# A number of a run.
Find = Callable[[RunConfig], float]

USAGE = """\
python -m dpbench.privacy [GROUP=OPTION | SETTING=VALUE] ... [--grid G] [-cd FOLDER] [-m]

The same settings as a run; values separated by commas are compared, with -m or without. Prints the noise multiplier
that each sampling scheme and accountant asks for (or, with privacy.noise_multiplier=Z, the eps that Z spends), what
tuning over a grid of G candidates costs (default: 10), and each run's guarantee in words. Reads no data and trains
nothing.

  python -m dpbench.privacy dataset=cifar10 batch_size=1000 epochs=50 eps=1,8
  python -m dpbench.privacy algo=disk eps=4 privacy=shuffled --grid 45
  python -m dpbench.privacy dataset=mnist batch_size=256 epochs=10 privacy.noise_multiplier=1.1

Exit codes: 0, 2 bad input, 130 interrupted.
"""


def main(typed: Sequence[str] | None = None) -> int:
    """Run a command line; returns the exit code."""
    return run_command(_main, typed, lambda _: USAGE, "interrupted")


def _main(typed: list[str]) -> int:
    parser = OverridesParser()
    parser.add_argument("--grid")
    parser.add_argument("-m", "--multirun", action="store_true")  # of a sweep's line; several are compared anyway
    options, folders = parser.parse(typed)
    fits = options.grid is None or (options.grid.isdecimal() and 1 <= int(options.grid) <= LARGEST_GRID)
    require(fits, "--grid", options.grid, f"a whole number from 1 to {LARGEST_GRID}")
    grid = None if options.grid is None else int(options.grid)
    register()
    # What a run spends is the same for all seeds.
    overrides = [line for line in options.overrides if not line.startswith(("seed=", "seeds="))]
    _print(compose_jobs(overrides, multirun=True, config_dirs=folders), grid, make_console())
    return OK


def _print(jobs: list[Job], grid: int | None, console: Console) -> None:
    private = [job for job in jobs if math.isfinite(job.config.eps)]
    if not private:
        raise UserError(
            "expected a finite number: without noise there is nothing to account for", field="eps", value="inf"
        )
    columns = _columns(private)
    given = any(job.config.privacy.noise_multiplier is not None for job in private)
    require(grid is None or not given, "--grid", grid, "none beside privacy.noise_multiplier, as it asks for noise")
    grid = grid or CANDIDATES
    sizes = list(dict.fromkeys(_sizes(job.config) for job in private))
    console.print(sizes[0] + " (of the first)" * (len(sizes) > 1))
    if len(private) < len(jobs):
        console.print("Without noise (eps=inf) there is nothing to account for: left out.")
    searched = any(map(_is_searched, private))
    what = "eps spent" if given else "noise multiplier"
    spent = _table(f"{what} by one run, no search" if searched else what, columns)
    rows: dict[str, Find] = {
        f"{scheme.name}, {accountant}": partial(_account, sampler=scheme.name, accountant=accountant)
        for scheme in SCHEMES.values()
        for accountant in scheme.accountants
    }
    tuned = {} if given else _tuning(private, grid)
    tasks = [partial(find, job.config) for find in (*rows.values(), *tuned.values()) for job in private]
    with calibrating([] if given else tasks, console, f"the noise of {len(tasks)} accounts"):
        pass
    if given:
        rows["poisson, central limit (not a bound)"] = _clt
    _print_rows(spent, rows, private, console)
    if tuned:
        console.print(
            f"\nTuning over {grid} candidates within the same eps and delta, each trained with its own noise:"
        )
        _print_rows(_table("noise multiplier of each training", columns), tuned, private, console)
    _print_guarantees(private, columns, console)


def _sizes(config: RunConfig) -> str:
    return (
        f"N={config.dataset.trained_on}, batch size {config.batch_size}, {number_of(config.steps, 'step')}, "
        f"delta={config.delta_value:.3g}"
    )


def _print_guarantees(jobs: list[Job], columns: list[str], console: Console) -> None:
    """A paragraph for each job; of those that differ in their first sentence alone, what follows it once."""
    following: dict[str, list[str]] = {}
    for job, name in zip(jobs, columns, strict=True):
        try:
            found = budget(job.config)
        except UserError as refusal:
            # Of several the others are told; and what a given multiplier spends has been.
            if len(jobs) == 1 and not isinstance(refusal, OverspentError):
                raise
            console.print(f"\n{name}: a run of it is refused. {refusal}")
            continue
        given = job.config.privacy.noise_multiplier is not None
        head, _, rest = guarantee_of(job.config, found).partition(". ")
        shown = name if given and len(jobs) == 1 else f"{name} (noise multiplier {found.noise_multiplier:.4f})"
        following.setdefault(rest, []).append(f"{shown}: {head.removesuffix('.')}.")
    for rest, heads in following.items():
        console.print("\n" + "\n".join(heads) + (" " if len(heads) == 1 else "\nIn each of these cases: ") + rest)


def _print_rows(table: Table, rows: Mapping[str, Find], jobs: list[Job], console: Console) -> None:
    """Noise that changes in every step takes minutes, so a terminal shows which row is made."""
    for name, find in rows.items():
        with console.status(name):
            table.add_row(name, *_cells(find, jobs))
    console.print(table)


def _cells(find: Find, jobs: list[Job]) -> list[str]:
    """A number for each job; a dash where the combination is refused, or the number is beyond floating point."""
    cells = []
    for job in jobs:
        try:
            cells.append(f"{find(job.config):.4g}")
        except (UserError, OverflowError):
            cells.append(NOTHING)
    return cells


def _columns(jobs: list[Job]) -> list[str]:
    if len(jobs) > 1:
        return names_apart(jobs)
    (config,) = (job.config for job in jobs)
    given = config.privacy.noise_multiplier
    return [f"eps={config.eps:g}" if given is None else f"noise multiplier {given:g}"]


def _table(what: str, columns: list[str]) -> Table:
    table = new_table()
    table.add_column(what)
    for column in columns:
        table.add_column(Text(column), justify="right", overflow="fold")
    return table


def _account(config: RunConfig, sampler: str, accountant: str) -> float:
    """Multiplier for the target eps, or eps of the multiplier given, were the run sampled and accounted for so."""
    settings = replace(config.privacy, sampler=sampler, accountant=accountant, published=None)
    plan = replace(config, privacy=settings).release_plan()
    given = settings.noise_multiplier
    if given is None:
        return calibrate(plan, config.eps, config.delta_value, accountant).noise_multiplier
    return epsilon(plan.scaled(given), config.delta_value, accountant, eps_scale=config.eps)


def _clt(config: RunConfig) -> float:
    """Eps by the central limit theorem of Gaussian differential privacy, for equal steps on Poisson batches."""
    given = config.privacy.noise_multiplier
    plan = replace(config, privacy=replace(config.privacy, sampler=POISSON.name, accountant="auto")).release_plan()
    if given is None or len(plan.runs) > 1:
        raise UserError(
            "the central limit theorem is for equal steps", field="noise", value=type(config.noise).__name__
        )
    (run,) = plan.scaled(given).runs
    mu = approximate_clt_mu(run.release.sampling_rate, run.release.joint.noise_multiplier, run.times)
    return gaussian_epsilon(1 / mu, config.delta_value)


def _tuning(jobs: list[Job], grid: int) -> dict[str, Find]:
    """What finds the multiplier of each training, by ways to choose among candidates."""
    return {
        "no tuning": partial(_composed, grid=1),
        f"all {grid} results published": partial(_composed, grid=grid),
        **({"random search (privacy.search_runs)": _searched} if any(map(_is_searched, jobs)) else {}),
        f"random stopping (Liu-Talwar), {RandomStopping.over(grid).expected_runs:.0f} trainings expected": partial(
            _stopping, grid=grid
        ),
        f"geometric number (Papernot-Steinke), {2 * grid} expected": partial(
            _selected, runs=TruncatedNegativeBinomial(2 * grid, 1.0)
        ),
        f"Poisson number (Papernot-Steinke), {2 * grid} expected": partial(_selected, runs=PoissonRuns(2 * grid)),
    }


def _composed(config: RunConfig, grid: int) -> float:
    plan, accountant = config.release_plan(), config.privacy.valid_accountant
    if plan.scheme.passes:  # one Gaussian release each, which compose exactly
        together = math.sqrt(grid)
        # As one release with all noise divided by the root; only the gradient's can be raised to make up for it.
        one = replace(plan, runs=tuple(_with_less_beside(run, together) for run in plan.runs))
        return together * calibrate(one, config.eps, config.delta_value, accountant).noise_multiplier
    repeated = replace(plan, runs=plan.runs * grid)
    return calibrate(repeated, config.eps, config.delta_value, accountant).noise_multiplier


def _with_less_beside(run: Repeat, divisor: float) -> Repeat:
    parts = tuple(part._replace(noise_multiplier=part.noise_multiplier / divisor) for part in run.release.beside)
    return run._replace(release=run.release._replace(beside=parts))


def _is_searched(job: Job) -> bool:
    return job.config.privacy.search_runs is not None


def _searched(config: RunConfig) -> float:
    return budget(config).noise_multiplier


def _stopping(config: RunConfig, grid: int) -> float:
    eps, delta = RandomStopping.over(grid).per_run(config.eps, config.delta_value)
    accountant = "gdp" if config.privacy.scheme.passes else "rdp"
    return calibrate(config.release_plan(), eps, delta, accountant).noise_multiplier


def _selected(config: RunConfig, runs: TruncatedNegativeBinomial | PoissonRuns) -> float:
    return calibrate_search(config.release_plan(), config.eps, config.delta_value, runs).noise_multiplier


if __name__ == "__main__":
    sys.exit(main())
