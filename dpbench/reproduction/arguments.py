"""The arguments of python -m dpbench.reproduce: key=value and -cd, as of dpbench.run."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dpbench.claims import SECTIONS, Artefact
from dpbench.cli.command import OverridesParser
from dpbench.config import conf_folder
from dpbench.errors import UserError, require
from dpbench.wording import flag_of, folder_of, seconds_of

HELP = f"""\
python -m dpbench.reproduce [KEY=VALUE] ... [-cd FOLDER]

Runs what the tables and figures of the papers need and the records don't have yet, at full fidelity and cheapest first,
and says of every printed number whether it is reproduced.

  python -m dpbench.reproduce plan=true                     what is done, what is missing, what it costs; runs nothing
  python -m dpbench.reproduce budget=30m                    what fits into half an hour
  python -m dpbench.reproduce paper=disk artefact=table_1   some papers, tables or figures
  python -m dpbench.reproduce paper=disk artefact=table_1 plan=true     the same plan, cell by cell

  paper        {", ".join(SECTIONS)}; several with commas; all by default
  artefact     names of tables and figures, such as table_1,figure_2; all by default
  budget       time to spend, such as 90s, 30m, 2h or 1h30m; no end by default
  plan         true: print what would be run, and run nothing
  retry        true: runs that failed are tried once more; one that diverged is a result and stays
  launcher     a launcher of Hydra, such as joblib, to which runs are handed; by default they run here, one by one;
               hydra.launcher.* are its settings, such as hydra.launcher.n_jobs=4; times are those of this machine, one
               run after the other, so leave budget out where runs go elsewhere
  smoke        true: a few steps of one cell of every table and figure, in a temporary folder; no result
  results_dir  folder of the records (default: results)
  claims       folder of the files of tables and figures (default: conf/paper)
  -cd FOLDER   a folder of options of your own, which cells may name

Settings that do not change what is computed are those of dpbench.run: device, data.root (default: the environment
variable DPBENCH_DATA, else .data), data.download (true: data, tokenizers and weights that are not here are fetched),
tracker, tracker.*, fuse_seeds, micro_batch.
A run is not begun if it is expected to end after the budget. What is recorded is never run again: the same command goes
on where the last one ended, however that was.
Exit codes: 0; 1, a run failed; 2, bad input; 130, interrupted; 143, ended by SIGTERM.
"""
# Settings of a run that leave its numbers as they are; with a dot, all below.
PASSED_ON = ("device", "data.", "tracker", "tracker.", "fuse_seeds", "micro_batch")
NAME = re.compile(r"\w+")
OF_LAUNCHER = "hydra.launcher."
OWN = ("paper", "artefact", "budget", "plan", "retry", "launcher", "smoke", "results_dir", "claims")


@dataclass(frozen=True)
class Arguments:
    """What was asked for.

    Attributes:
        papers: in the order of `SECTIONS`; empty for all that there are.
        artefacts: names; empty for all.
        budget: seconds; None for no end.
        plan: print it only.
        retry: run again what failed.
        launcher: of Hydra; None to run here.
        smoke: a few steps of everything.
        results_dir: folder of the records.
        claims: folder of the files of tables and figures.
        launcher_settings: of the launcher, hydra.launcher.*.
        passed_on: settings for every run.
        config_dirs: further folders searched for options.
    """

    papers: tuple[str, ...] = ()
    artefacts: tuple[str, ...] = ()
    budget: float | None = None
    plan: bool = False
    retry: bool = False
    launcher: str | None = None
    launcher_settings: tuple[str, ...] = ()
    smoke: bool = False
    results_dir: Path = Path("results")
    claims: Path = Path()
    passed_on: tuple[str, ...] = ()
    config_dirs: tuple[Path, ...] = ()

    @property
    def own_places(self) -> tuple[str, ...]:
        """Words that say where claims, records and options lie, as far as they are not the project's."""
        places = [word for folder in self.config_dirs for word in ("-cd", _as_typed(folder))]
        if self.claims != conf_folder() / "paper":
            places.append(f"claims={self.claims}")
        if self.results_dir != Path("results"):
            places.append(f"results_dir={self.results_dir}")
        return tuple(places)


def parse(typed: Sequence[str]) -> Arguments:
    """The arguments of a command line; reads no file.

    Raises:
        UserError: one is unknown, stands there twice, or has a value that it can't have.
    """
    options, config_dirs = OverridesParser().parse(typed)
    given: dict[str, str] = {}
    for word in options.overrides:
        key, separator, value = word.partition("=")
        if not separator or not key:
            raise UserError(f"{word}: expected key=value; --help lists the keys")
        if key in given:
            raise UserError(f"{key}: expected once")
        if key not in OWN and not key.startswith(OF_LAUNCHER) and not _passed_on(key):
            known = ", ".join((*OWN, *(f"{name}*" if name.endswith(".") else name for name in PASSED_ON)))
            raise UserError(f"{word}: expected one of {known}; what a cell computes is as the paper has it")
        given[key] = value
    smoke = flag_of("smoke", given.get("smoke", "false"))
    for key in ("budget", "plan", "retry", "launcher") if smoke else ():
        require(key not in given, key, given.get(key), "no such key beside smoke=true, which tries a few steps here")
    papers = _names(given["paper"], "paper") if "paper" in given else ()
    for paper in papers:
        require(paper in SECTIONS, "paper", paper, f"one of {', '.join(SECTIONS)}")
    launcher = given.get("launcher")
    require(launcher is None or NAME.fullmatch(launcher) is not None, "launcher", launcher, "the name of a launcher")
    of_launcher = tuple(f"{key}={value}" for key, value in given.items() if key.startswith(OF_LAUNCHER))
    if of_launcher and launcher is None:
        raise UserError(f"{of_launcher[0]}: expected a launcher, such as launcher=joblib")
    return Arguments(
        papers=tuple(paper for paper in SECTIONS if paper in papers),
        artefacts=_names(given["artefact"], "artefact") if "artefact" in given else (),
        budget=seconds_of("budget", given["budget"]) if "budget" in given else None,
        plan=flag_of("plan", given.get("plan", "false")),
        retry=flag_of("retry", given.get("retry", "false")),
        launcher=launcher,
        launcher_settings=of_launcher,
        smoke=smoke,
        results_dir=folder_of("results_dir", given.get("results_dir", "results")),
        claims=folder_of("claims", given.get("claims", str(conf_folder() / "paper"))),
        passed_on=tuple(f"{key}={value}" for key, value in given.items() if _passed_on(key)),
        config_dirs=tuple(config_dirs),
    )


def chosen(arguments: Arguments, artefacts: Sequence[Artefact]) -> tuple[Artefact, ...]:
    """Those of these artefacts that were asked for.

    Raises:
        UserError: a paper that was asked for has none of a name, and no other one has.
    """
    known = dict.fromkeys(artefact.name for artefact in artefacts)  # papers share names
    for name in arguments.artefacts:
        require(name in known, "artefact", name, f"one of {', '.join(known)}")
    return tuple(one for one in artefacts if not arguments.artefacts or one.name in arguments.artefacts)


def _passed_on(key: str) -> bool:
    return any(key.startswith(name) if name.endswith(".") else key == name for name in PASSED_ON)


def _names(value: str, field: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in value.split(","))
    require(all(NAME.fullmatch(name) for name in names), field, value, "names, separated by commas")
    return names


def _as_typed(folder: Path) -> str:
    """A folder from where the command was typed, if it lies below."""
    return str(folder.relative_to(Path.cwd()) if folder.is_relative_to(Path.cwd()) else folder)
