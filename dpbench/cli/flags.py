"""What is typed after python -m dpbench.run: Hydra's flags, and overrides that it gives no meaning or another one."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from typing import NoReturn

from hydra._internal.utils import get_args_parser

from dpbench.config.compose import ADD_M, MOST_JOBS
from dpbench.errors import UserError, require
from dpbench.launch.launcher import launcher_of
from dpbench.training.torchrun import current_team


def parse(typed: Sequence[str]) -> Namespace:
    """Hydra's flags, and the overrides: -m may stand anywhere among them.

    Raises:
        UserError: there is no such flag, or a run takes it otherwise.
    """
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
    if sum(word == "-cd" or word.partition("=")[0] == "--config-dir" for word in typed) > 1:
        raise UserError(f"-cd {options.config_dir}: expected once")
    printing = {"--cfg": options.cfg, "--info": options.info, "-sc": options.shell_completion}
    asked = {"-m": options.multirun, "-r": options.run, **printing}
    several = [flag for flag, given in asked.items() if given]
    if any(printing.values()) and len(several) > 1:
        both = " and ".join(several)
        raise UserError(f"{both}: Hydra does one of these at a time, for one run; leave out {several[0]}")
    return options


def written_out(overrides: Sequence[str], *, multirun: bool) -> list[str]:
    """Overrides with seeds=3 as the sweep that it is short for, seed=0,1,2.

    Raises:
        UserError: it is no number of seeds, or there are other seeds beside it.
    """
    written = [_written_out(override, multirun=multirun) for override in overrides]
    if written != list(overrides) and sum(line.startswith("seed=") for line in written) > 1:
        raise UserError("seeds=N stands for seed=0,...,N-1; give seed or seeds, not both")
    return written


def _written_out(override: str, *, multirun: bool) -> str:
    key, _, value = override.partition("=")
    if key != "seeds" or value == "null":
        return override
    fits = value.isdecimal() and 0 < int(value) <= MOST_JOBS
    require(fits, "seeds", value, f"a whole number from 1 to {MOST_JOBS:,}; name other seeds by seed=3,5,8")
    if int(value) > 1 and not multirun:
        raise UserError(f"{override}: {ADD_M}")
    return "seed=" + ",".join(map(str, range(int(value))))


def refuse_launcher(overrides: Sequence[str]) -> None:
    """Raise `UserError` if a launcher is to start processes that would not be those that torchrun started."""
    elsewhere = launcher_of(overrides)
    if elsewhere is not None and current_team().size > 1:
        raise UserError(
            f"{elsewhere}: under torchrun the runs of a sweep go one after the other; leave the launcher out"
        )


def refuse_other_folders(overrides: Sequence[str]) -> None:
    """Raise `UserError` if the command and its jobs would mean different folders by the same names."""
    for line in overrides:
        key, _, value = line.lstrip("+").partition("=")
        if key == "hydra.job.chdir" and value.lower() not in ("false", "null"):
            raise UserError(f"{line}: runs stay in the folder where the command was typed; leave it out")
        if key.startswith("hydra.sweeper"):
            raise UserError(f"{line}: values to be swept are typed as in eps=2,8 -m; leave it out")
        if key == "hydra.sweep.dir":
            raise UserError(f"{line}: all that a sweep writes lies below results_dir; set that instead")
