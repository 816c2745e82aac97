"""What results/ claims is what its records say, and README says no more."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from cli import ROOT
from results_command import results as results_command

from dpbench.claims import Evidence, Scorecard, load_all
from dpbench.config import conf_folder
from dpbench.report.grid import build_grid
from dpbench.report.scorecard import as_markdown
from dpbench.reproduction.hashes import Hashes
from dpbench.reproduction.index import RecordIndex
from dpbench.reproduction.standing import trained

RESULTS = ROOT / "results"
MOST_BYTES = 50 * 2**20


def committed() -> list[Path]:
    """The files of results/ that git knows; skips where others lie beside them, or some were changed."""
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("no checkout")
    git = ["git", "-C", str(ROOT)]
    changes = subprocess.run([*git, "status", "--porcelain", "results"], capture_output=True, text=True, check=True)
    if changes.stdout:
        pytest.skip("results/ has runs of one's own")
    listed = subprocess.run([*git, "ls-files", "-z", "results"], capture_output=True, text=True, check=True)
    return [ROOT / name for name in listed.stdout.split("\0") if name]


def test_they_are_compact_and_name_no_folder_of_a_machine():
    files = committed()
    assert sum(file.stat().st_size for file in files) < MOST_BYTES
    for file in files:
        if file.suffix != ".png":
            found = re.search(r"(?<![\w.<])/(tmp|home|root|work|Users|mnt)/", file.read_text())
            assert found is None, f"{file}: {found}"


def test_every_record_is_whole():
    committed()
    outcome = results_command(RESULTS, "check")
    assert outcome.code == 0, outcome.out


def test_the_scorecard_is_that_of_the_records_and_readme_has_its_numbers():
    committed()
    artefacts, hashes = load_all(conf_folder() / "paper"), Hashes(RecordIndex(RESULTS))
    cells = [cell for artefact in artefacts for cell in artefact.cells if trained(cell)]
    hashes.prepare(
        candidate for cell in cells for candidate in cell.candidates
    )  # composed together, in a tenth of the time
    evidence = Evidence(RESULTS, hashes)
    grids = [build_grid(artefact, evidence) for artefact in artefacts]
    written = (RESULTS / "scorecard.md").read_text()
    assert as_markdown(grids) == written
    rows = [line for line in (ROOT / "README.md").read_text().splitlines() if line in written.splitlines()]
    card = Scorecard(tuple(finding for grid in grids for finding in grid.findings))
    assert len([row for row in rows if row.startswith("| ")]) >= len(card.papers)
