"""What README and docs/ say to type is what the program takes, and what they point to is there."""

import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
from cli import ROOT
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.override_parser.overrides_parser import OverridesParser

from dpbench.config import compose_each, conf_folder, quoted
from dpbench.reproduction.arguments import parse as parse_reproduce
from dpbench.results.__main__ import main as main_of_results
from dpbench.results.arguments import help_text
from dpbench.results.arguments import parse as parse_results
from dpbench.results.selection import HASH
from dpbench.training.budget import budget

PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md")), ROOT / "results" / "scorecard.md"]
# An indented block, and the lines of a shell function that stands for the interpreter.
FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
BLOCK = re.compile(r"(?:^ {4}.*\n)+", re.MULTILINE)
SHOW = "python() { printf '%s\\x1f' \"$@\"; printf '\\x1e'; }\ntorchrun() { python \"$@\"; }\nmake() { :; }\n"


def commands(page: Path) -> list[list[str]]:
    """Arguments of each `python -m dpbench...` of a page, as a shell hands them over."""
    found = []
    for block in BLOCK.findall(FENCED.sub("", page.read_text())):
        if "-m dpbench" not in block:
            continue
        done = subprocess.run(["bash", "-uc", SHOW + block], capture_output=True, text=True, check=True)
        found += [words.split("\x1f")[:-1] for words in done.stdout.split("\x1e")[:-1]]
    return [words[words.index("-m") + 1 :] for words in found if "-m" in words]


FOUND = [(page, words) for page in PAGES for words in commands(page)]


def test_a_search_is_drawn_as_the_page_says(capsys):
    """The number of runs has the mean that is charged for, by SciPy's distribution; each is a run of its own."""
    (program,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs/privacy.md").read_text(), re.DOTALL)
    names: dict[str, Any] = {}
    exec(program, names)
    assert names["logser"].mean(1 - names["search"].gamma) == pytest.approx(8, rel=1e-9)
    lines = [shlex.split(line)[3:] for line in capsys.readouterr().out.splitlines()]
    assert [line[-1] for line in lines] == [f"seed={number}" for number in range(len(lines))]
    (job,) = compose_each(lines[:1])
    assert job.config.privacy.search_runs == names["search"].mean


def test_the_bound_of_samples_without_replacement_is_as_far_off_as_the_page_says():
    text = " ".join((ROOT / "docs/privacy.md").read_text().split())
    (said,) = re.findall(r"it asks for a multiplier of ([\d.]+) where `poisson` needs ([\d.]+) by RDP", text)
    typed = ["dataset=cifar10", "batch_size=1000", "epochs=50", "eps=8", "privacy.accountant=rdp"]
    found = [budget(job.config).noise_multiplier for job in compose_each([[*typed, "privacy=fixed_size"], typed])]
    assert [f"{one:.2f}" for one in found] == list(said)


def test_commands_of_all_kinds_are_found():
    kinds = {words[0] for _, words in FOUND}
    assert kinds == {f"dpbench.{name}" for name in ("run", "privacy", "audit", "data", "reproduce", "results")}
    assert len(FOUND) > 80


def single_runs(words: list[str]) -> list[list[str]]:
    """A command's overrides, a list for each run of its sweep."""
    typed = [quoted(re.sub(r"^seeds=\d+$", "seed=0", word)) for word in words]
    overrides = OverridesParser.create().parse_overrides(typed)
    own = [override for override in overrides if not override.key_or_group.startswith("hydra")]
    return [list(line) for line in BasicSweeper.split_arguments(own, None)[0]]


def test_settings_that_are_typed_compose():
    lines = []
    for _, (module, *words) in FOUND:
        # tests/test_own_method.py runs those that have options of their own.
        if module in ("dpbench.run", "dpbench.audit", "dpbench.privacy") and "my_conf" not in words:
            typed = [word for word in words if "=" in word]
            assert {*words} - {*typed} <= {"-m", "--help", "--grid", "45"}, words
            lines += single_runs(typed)
    assert len(compose_each(lines)) > 100


@pytest.mark.parametrize(
    "words",
    [words[1:] for _, words in FOUND if words[0] == "dpbench.reproduce" and "my_conf" not in words],
    ids=" ".join,
)
def test_tables_and_figures_that_are_typed_exist(words):
    arguments = parse_reproduce(words)
    for paper in arguments.papers:
        folder = conf_folder() / "paper" / paper
        assert all((folder / f"{name}.yaml").is_file() for name in arguments.artefacts)


@pytest.mark.parametrize("words", [words[1:] for _, words in FOUND if words[0] == "dpbench.results"], ids=" ".join)
def test_selections_that_are_typed_parse(words):
    assert parse_results(words)


def test_hashes_that_are_typed_are_of_records():
    examples = [line.split()[3:] for line in help_text([]).splitlines() if line.startswith("  python -m")]
    words = [words[1:] for _, words in FOUND if words[0] == "dpbench.results"] + examples
    typed = {word for line in words for word in line if HASH.fullmatch(word)}
    assert typed
    recorded = [folder.name for folder in (ROOT / "results" / "runs").iterdir()]
    assert [start for start in typed if not any(name.startswith(start) for name in recorded)] == []


def test_the_answer_that_readme_shows_is_what_the_command_prints(monkeypatch, capsys):
    (words,) = [words[1:] for page, words in FOUND if page.name == "README.md" and "compare" in words]
    (shown,) = re.findall(r"```text\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("COLUMNS", "120")
    assert main_of_results(words) == 0
    printed = capsys.readouterr().out
    assert [line.rstrip() for line in printed.splitlines()] == shown.splitlines()


def heading_anchors(page: Path) -> set[str]:
    """As GitHub makes them."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_a_page_points_to_is_there(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if target.startswith(("http://", "https://")):
            continue
        path, _, anchor = target.partition("#")
        pointed = (page.parent / path).resolve() if path else page
        assert pointed.exists(), target
        assert not anchor or anchor in heading_anchors(pointed), target
