"""Writing all output: which files there are, which of them change, and that drawing is not done twice."""

import csv
import json
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from made_up_evidence import NEW, World, digest
from specifications import artefacts

from dpbench.claims import Artefact, Evidence, Kind
from dpbench.report import build_grid, write_output
from dpbench.report import figures as drawing
from dpbench.report.layout import picture_of


@pytest.fixture
def undrawn(monkeypatch) -> list[str]:
    """Pictures are named, not drawn."""
    drawn: list[str] = []

    def files_of(picture) -> tuple[bytes, bytes]:
        drawn.append(picture.title)
        return drawing.fingerprint(picture).encode(), b"png"

    monkeypatch.setattr(drawing, "files_of", files_of)
    return drawn


PAGES = {"scorecard.md", "index.html"}


def write(world: World, folder: Path, say=lambda _: None) -> set[str]:
    changed = write_output([build_grid(world.artefact(), world.evidence)], folder, say)
    return {str(path.relative_to(folder)) for path in changed}


# Prints which modules of what trains are there when all of two packages have been imported.
OF_TRAINING = """
import importlib, pkgutil, sys
for package in ("dpbench.claims", "dpbench.report"):
    for module in pkgutil.walk_packages(importlib.import_module(package).__path__, f"{package}."):
        importlib.import_module(module.name)
print([name for name in sys.modules if name.startswith(("dpbench.training", "dpbench.gradients", "dpbench.step"))])
"""


def test_what_judges_and_shows_records_needs_nothing_of_training():
    done = subprocess.run([sys.executable, "-c", OF_TRAINING], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_what_is_written_once_is_left_alone_until_it_changes(world, tmp_path):
    out = tmp_path / "out"
    said: list[str] = []
    everything = {f"adp/made_up.{suffix}" for suffix in ("md", "csv", "svg", "png")} | PAGES
    assert write(world, out, said.append) == everything
    assert said == ["drawing ADP, Made up: Made up"]
    times = {path: path.stat().st_mtime_ns for path in out.rglob("*.*")}
    assert write(world, out, said.append) == set()
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*.*")} == times
    assert len(said) == 1
    world.runs(NEW, 60.0, 60.0, 60.0)
    assert write(world, out) == everything


def test_a_finding_that_the_picture_does_not_show_draws_nothing_anew(world, tmp_path, undrawn):
    out = tmp_path / "out"
    write(world, out)
    world.run(NEW, 0, 60, "diverged")
    assert write(world, out) == {"adp/made_up.md", "adp/made_up.csv"} | PAGES
    assert len(undrawn) == 1


@pytest.mark.parametrize("suffix", ["svg", "png"])
def test_a_picture_that_is_gone_is_drawn_again(world, tmp_path, undrawn, suffix):
    out = tmp_path / "out"
    write(world, out)
    (out / f"adp/made_up.{suffix}").unlink()
    assert f"adp/made_up.{suffix}" in write(world, out)
    assert len(undrawn) == 2


def test_a_picture_of_which_nothing_is_left_is_removed(world, tmp_path, undrawn):
    out = tmp_path / "out"
    write(world, out)

    def unprinted(text: str) -> str:
        head, _, rest = text.partition("values: |")
        return f"{head}values: not printed\nwhere:{rest.partition('where:')[2]}"

    changed = write_output([build_grid(world.artefact(change=unprinted), world.evidence)], out, lambda _: None)
    assert {path.suffix for path in changed} == {".svg", ".png", ".md", ".csv", ".html"}
    assert not (out / "adp/made_up.svg").exists()
    assert "![" not in (out / "adp/made_up.md").read_text()


def test_a_file_is_replaced_as_a_whole(world, tmp_path, undrawn):
    out = tmp_path / "out"
    write(world, out)
    assert not [path for path in out.rglob(".*") if path.is_file()]


def check(out: Path, artefacts: tuple[Artefact, ...], evidence: Evidence) -> None:
    """Every artefact has its page, its table where it has cells, and its picture where there is something to show."""
    for artefact in artefacts:
        stem = out / artefact.paper / artefact.name
        page = stem.with_suffix(".md").read_text()
        assert page.startswith("# "), artefact.where
        assert f"artefact={artefact.name}" in page or artefact.kind == Kind.NOT_REPRODUCIBLE
        if artefact.cells:
            with stem.with_suffix(".csv").open() as stream:
                assert len(list(csv.DictReader(stream))) == len(artefact.cells), artefact.where
        drawn = picture_of(build_grid(artefact, evidence)) is not None
        assert stem.with_suffix(".svg").exists() == stem.with_suffix(".png").exists() == drawn
        assert f"]({artefact.name}.svg)" in page or not drawn
        assert str(out) not in page


def test_every_artefact_has_its_files_while_nothing_is_run(tmp_path, undrawn):
    found = tuple(artefacts().values())
    evidence = Evidence(tmp_path, digest)
    write_output([build_grid(artefact, evidence) for artefact in found], tmp_path, lambda _: None)
    check(tmp_path, found, evidence)
    # Nothing else has a printed number to show, or says that it can't be laid out.
    assert len(undrawn) == sum(artefact.draw is not None and artefact.printed for artefact in found) == 27
    assert write_output([build_grid(artefact, evidence) for artefact in found], tmp_path, lambda _: None) == []


def made_up(artefacts: tuple[Artefact, ...], results: Path, count: int) -> int:
    """Records of so many runs, with learning curves; searches of up to ten candidates."""
    chance = random.Random(0)
    made = 0
    for cell in _cells(artefacts):
        middle = cell.printed.value if cell.printed is not None else 50.0
        for place, candidate in enumerate(cell.candidates):
            for seed in range(1 if place else cell.seeds):
                folder = results / "runs" / digest(candidate) / str(seed)
                if folder.exists() or made >= count:
                    continue
                folder.mkdir(parents=True)
                made += 1
                end = middle + chance.gauss(0, 0.5) - place
                metrics = [
                    {"step": 10 * k, "epoch": k, "test_accuracy": end / 100 * k / 40, "eps": 0.1} for k in range(41)
                ]
                (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in metrics))
                summary = {"test_accuracy": {"final": end / 100, "best": end / 100}, "eps": 1.0, "target_eps": 1.0}
                (folder / "summary.json").write_text(json.dumps(summary))
                (folder / "status.json").write_text('{"status": "finished"}')
                (folder / "provenance.json").write_text(json.dumps({"started": "2026-01-01", "commit": "0" * 40}))
    return made


def _cells(artefacts: tuple[Artefact, ...]) -> Iterator:
    for artefact in artefacts:
        yield from (cell for cell in artefact.cells if cell.runs and cell.overrides and len(cell.candidates) <= 10)


@pytest.mark.slow
def test_all_is_drawn_from_five_thousand_records_and_nothing_twice(tmp_path):
    found = tuple(artefacts().values())
    results, out = tmp_path / "results", tmp_path / "out"
    assert made_up(found, results, 5000) == 5000
    evidence = Evidence(results, digest)
    write_output([build_grid(artefact, evidence) for artefact in found], out, lambda _: None)
    check(out, found, evidence)
    assert write_output([build_grid(artefact, evidence) for artefact in found], out, lambda _: None) == []
