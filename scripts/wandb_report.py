"""A W&B report of all tables and figures, and a workspace of the training runs.

    python scripts/wandb_report.py [--project dpbench] [--entity TEAM] [--results results]
                                   [--claims FOLDER] [-cd FOLDER]

Saved where an account is logged in; otherwise one sentence says what it would do, and the exit code is 2. What it
builds is tested; that W&B takes it is not, for this needs an account.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from dpbench.claims import Artefact, load_all
from dpbench.config import conf_folder
from dpbench.config.schema import TrackerSettings
from dpbench.errors import UserError
from dpbench.tracking.wandb_mode import choose_mode


def main(arguments: list[str] | None = None) -> int:
    """Build and save both; returns the exit code."""
    parser = argparse.ArgumentParser(description="A W&B report of all tables and figures, and a workspace of the runs.")
    parser.add_argument("--project", default="dpbench", help="W&B project (default: dpbench)")
    parser.add_argument("--entity", default=None, help="W&B user or team (default: that of the account)")
    parser.add_argument("--results", type=Path, default=Path("results"), help="folder of the records")
    parser.add_argument(
        "--claims",
        type=Path,
        default=conf_folder() / "paper",
        help="folder of the files of tables and figures (default: conf/paper)",
    )
    parser.add_argument("-cd", "--config-dir", type=Path, help="folder of options of your own, which these may name")
    chosen = parser.parse_args(arguments)
    if chosen.config_dir is not None and not chosen.config_dir.is_dir():
        parser.error(f"-cd {chosen.config_dir}: no such folder")
    settings = TrackerSettings(project=chosen.project, entity=chosen.entity)
    mode, why = choose_mode(settings)
    if mode != "online":
        what = f"a report of all tables and figures and a workspace of the runs to the W&B project {chosen.project}"
        print(f"It would save {what}, but W&B is {mode} ({why})", file=sys.stderr)
        return 2
    try:
        artefacts = load_all(chosen.claims)
    except UserError as error:
        parser.error(str(error))
    save(settings, chosen.results, artefacts, [] if chosen.config_dir is None else [chosen.config_dir.absolute()])
    return 0


def save(
    settings: TrackerSettings, results_dir: Path, artefacts: Sequence[Artefact], config_dirs: Sequence[Path]
) -> None:
    """Log tables and pictures, save report and workspace, and print where they are."""
    from dpbench.claims import Evidence
    from dpbench.report import build_grid
    from dpbench.report.wandb import build_report, build_workspace, log_output

    evidence = Evidence(results_dir, hashes(results_dir, config_dirs))
    grids = [build_grid(artefact, evidence) for artefact in artefacts]
    log_output(settings, results_dir, grids, print)
    print(build_report(settings, grids).save().url)
    print(build_workspace(settings).save().url)


def hashes(results_dir: Path, config_dirs: Sequence[Path]) -> Callable[[tuple[str, ...]], str | None]:
    """The configuration hash of every run, as the reproduction looks it up."""
    from dpbench.reproduction.hashes import Hashes
    from dpbench.reproduction.index import RecordIndex

    return Hashes(RecordIndex(results_dir), config_dirs)


if __name__ == "__main__":
    sys.exit(main())
