"""What results/ claims is what its records say, and README says no more."""

import math
import re
import shutil
import statistics
import subprocess
from itertools import dropwhile, takewhile
from pathlib import Path

import pytest
from cli import ROOT
from results_command import results as results_command
from short_noise import shown
from specifications import artefacts

from dpbench.claims import Evidence, Scorecard
from dpbench.claims.computed_file import path_of, read_computed
from dpbench.config.recorded import recorded_stage
from dpbench.privacy.correlation import BandedSquareRoot, Tree
from dpbench.privacy.tail import END_BEFORE
from dpbench.report.grid import Entry, Grid, build_grid
from dpbench.report.run_records import read_runs
from dpbench.report.scorecard import as_markdown
from dpbench.reproduction.hashes import Hashes
from dpbench.reproduction.index import RecordIndex
from dpbench.tracking.reading import Recorded, read_audits

RESULTS = ROOT / "results"
PANEL = (ROOT / "docs" / "panel.md").read_text()
RECORDS = ("runs", "audits", "benchmarks")  # all else in results/ is written from these, or computed
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
    assert sum(file.stat().st_size for file in files if file.relative_to(RESULTS).parts[0] in RECORDS) < MOST_BYTES
    for file in files:
        if file.suffix not in (".png", ".npz"):
            found = re.search(r"(?<![\w.<])/(tmp|home|root|work|Users|mnt)/", file.read_text())
            assert found is None, f"{file}: {found}"


def test_every_record_is_whole():
    committed()
    outcome = results_command(RESULTS, "check")
    assert outcome.code == 0, outcome.out


@pytest.fixture(scope="module")
def evidence() -> Evidence:
    """The committed records."""
    committed()
    hashes = Hashes(RecordIndex(RESULTS))
    cells = [cell for artefact in artefacts().values() for cell in artefact.cells if cell.runs]
    # Composed together, in a tenth of the time.
    hashes.prepare(candidate for cell in cells for candidate in cell.candidates)
    return Evidence(RESULTS, hashes)


@pytest.fixture(scope="module")
def grids(evidence) -> list[Grid]:
    """Every table and figure, as the committed records have it."""
    return [build_grid(artefact, evidence) for artefact in artefacts().values()]


def test_the_scorecard_is_that_of_the_records_and_readme_has_its_numbers(grids):
    written = (RESULTS / "scorecard.md").read_text()
    assert as_markdown(grids) == written
    readme = (ROOT / "README.md").read_text()
    (summary,) = (line for line in written.splitlines() if line.startswith("Of "))
    changed = [line for line in written.splitlines() if line.endswith("in no commit.")]
    assert all(line in " ".join(readme.split()) for line in (summary, *changed))
    card = Scorecard(tuple(finding for grid in grids for finding in grid.findings))
    assert by_paper(readme) == by_paper(written)
    assert len(by_paper(readme)) == 2 + len(card.papers) + 1  # below the names of the columns; the last: our own claims


def by_paper(text: str) -> list[str]:
    """The lines of the table of outcomes by paper."""
    below = dropwhile(lambda line: not line.startswith("| paper | claims |"), text.splitlines())
    return list(takewhile(lambda line: line.startswith("|"), below))


def table_rows(text: str) -> dict[str, list[str]]:
    """Cells of the rows of Markdown tables, by the first one."""
    rows = (
        [cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("| ")
    )
    return {name: cells for name, *cells in rows}


def section(title: str) -> str:
    """A section of the page of the panels."""
    return PANEL.partition(f"## {title}\n")[2].partition("\n## ")[0]


@pytest.mark.parametrize(("data", "title", "rows", "digits"), [("digits", "digits", 9, 1), ("mnist", "MNIST", 19, 2)])
def test_the_page_of_the_panels_has_the_numbers_of_their_records(grids, data, title, rows, digits):
    (grid,) = (grid for grid in grids if grid.artefact.where == f"beyond/panel_{data}.yaml")
    found: dict[str, list[Entry]] = {}
    for entry in grid.entries.values():
        found.setdefault(entry.cell.at["method"], []).append(entry)
    measured = section(f"Found on {title}").partition("Audits of")[0]
    shown = {name: cells for name, cells in table_rows(measured).items() if name in found}
    assert len(shown) == rows
    for name, (*cells, against) in shown.items():
        assert cells == [entry.ours.partition(" (")[0] for entry in found[name]]
        pairs = list(zip(found[name], found["DP-SGD"], strict=True))
        difference = statistics.fmean(one.value - other.value for one, other in pairs)
        error = math.hypot(*(one.spread for pair in pairs for one in pair)) / math.sqrt(5) / len(pairs)
        assert against == ("" if name == "DP-SGD" else f"{difference:+.{digits}f} ± {error:.{digits}f}")


def times_delta(one):
    """At least and at most how often a sample shows for sure, in units of delta."""
    ledger = one.ledger
    net = recorded_stage("model", one.config["model"]).build(recorded_stage("dataset", one.config["dataset"]))
    coordinates = sum(parameter.numel() for parameter in net.parameters())
    if ledger["correlation"]:  # what is released is C X + Z, to whose rows a sample adds each time it takes part
        ((multiplier,),) = (entry["noise_multipliers"] for entry in ledger["releases"])
        strategy = eval(ledger["correlation"], {"Tree": Tree, "BandedSquareRoot": BandedSquareRoot})
        matrix = strategy.strategy(ledger["planned"], ledger["epoch"])
        rows = sum(matrix[:, i : i + ledger["epoch"]] for i in range(0, ledger["planned"], ledger["epoch"]))
        releases = [(1, row / multiplier, coordinates) for row in rows[:, (rows**2).sum(0).argmax()]]
    else:
        assert ledger["sampler"] == "poisson"
        releases = [
            (entry["count"] * entry["sampling_rate"], 1 / noise, parts)
            for entry in ledger["releases"]
            for multiplier in entry["noise_multipliers"]
            for noise, parts in (
                (multiplier, coordinates),
                *((part["noise_multiplier"], 20) for part in entry["beside"]),
            )
        ]
    both = ((times * one for one in shown(moved, parts)) for times, moved, parts in releases)
    least, most = map(sum, zip(*both, strict=True))
    return least / ledger["delta"], most / ledger["delta"]


def test_the_page_of_the_panels_says_where_noise_ended_too_early(grids):
    on_page = re.search(
        r"On digits that keeps delta \(at most (\S+) times delta\); on MNIST it does not in any run: .* a probability "
        r"of (\d+) to (\d+) times delta",
        " ".join(PANEL.split()),
    )
    assert on_page is not None
    found: dict[str, list[tuple[float, float]]] = {"digits": [], "mnist": []}
    for grid in (grid for grid in grids if grid.artefact.where.startswith("beyond/panel_")):
        for one in read_runs([grid], RESULTS).configurations:
            assert all(run.noise_end == END_BEFORE for run in one.runs)
            found[one.config["dataset"]["name"]].append(times_delta(one))
    assert max(most for _, most in found["digits"]) < 1
    least = min(least for least, _ in found["mnist"])
    most = max(most for _, most in found["mnist"])
    assert on_page.groups() == (f"{max(most for _, most in found['digits']):.2f}", f"{least:.0f}", f"{most:.0f}")


def accuracies_of_seeds(entry: Entry) -> list[float]:
    """Of a cell's runs the final test accuracy in per cent, by seed."""
    found = sorted((int(run.folder.name), Recorded.read(run.folder).summary) for run in entry.runs)
    assert [seed for seed, _ in found] == [0, 1, 2, 3, 4]
    return [100 * summary["test_accuracy"]["final"] for _, summary in found]


def test_the_page_of_the_panels_says_what_the_choice_by_one_of_the_seeds_brings(grids):
    text = " ".join(PANEL.split())
    (on_page,) = re.findall(
        r"other four by (\S+) ± (\S+) points on MNIST and by (\S+) ± (\S+) on digits, .* on MNIST DP-SGD's is (\S+) "
        r"worse, LP-DPAdam's (\S+) better",
        text,
    )
    (without,) = re.findall(r"2\.6 standard errors \((\S+) without the seed that chose\)", text)
    said: list[str] = []
    for data, digits in (("mnist", 2), ("digits", 1)):
        (grid,) = (grid for grid in grids if grid.artefact.where == f"beyond/panel_{data}.yaml")
        found: dict[str, list[list[float]]] = {}
        for entry in grid.entries.values():
            found.setdefault(entry.cell.at["method"], []).append(accuracies_of_seeds(entry))
        leads = {
            method: [first - statistics.fmean(others) for first, *others in cells] for method, cells in found.items()
        }
        every = [lead for of_method in leads.values() for lead in of_method]
        error = statistics.stdev(every) / math.sqrt(len(every))
        said += [f"{statistics.fmean(every):.{digits}f}", f"{error:.{digits}f}"]
        if data == "mnist":
            of_two = [-statistics.fmean(leads["DP-SGD"]), statistics.fmean(leads["LP-DPAdam"])]
            pairs = list(zip(found["DiSK + DC-SGD-E"], found["DP-SGD"], strict=True))
            lead = statistics.fmean(statistics.fmean(one[1:]) - statistics.fmean(two[1:]) for one, two in pairs)
            spread = math.hypot(*(statistics.stdev(seeds[1:]) for pair in pairs for seeds in pair))
            assert without == f"{lead / (spread / 2 / len(pairs)):.1f}"
    assert list(on_page) == said + [f"{one:.2f}" for one in of_two]


def test_the_page_of_the_panels_names_the_grids_whose_end_was_taken(grids):
    ends: dict[str, dict[str, set[tuple[str, str]]]] = {}
    for grid in (grid for grid in grids if grid.artefact.where.startswith("beyond/panel_")):
        of_data = ends.setdefault(grid.artefact.where, {})
        for entry in grid.entries.values():
            typed = (line for one in entry.cell.candidates for line in one if line.startswith("optim.lr="))
            steps = sorted({float(line.partition("=")[2]) for line in typed})
            taken = Recorded.read(entry.runs[0].folder).settings["optim"]["lr"]
            for end in {steps[0], steps[-1]} & {taken} if len(steps) > 1 else ():
                which = "largest" if end == steps[-1] else "smallest"
                of_data.setdefault(entry.cell.at["method"], set()).add((entry.cell.at["eps"], which))
    assert ends["beyond/panel_mnist.yaml"] == {
        **{method: {("8", "largest")} for method in ("DOPPLER", "DP-PMLF", "ADP")},
        "DP-SGD, threshold": {("8", "largest"), ("1", "largest")},
    }
    assert len(ends["beyond/panel_digits.yaml"]) == 7
    told = "on digits seven methods take the largest or the smallest at some eps"
    assert told in " ".join(PANEL.split())


def test_the_findings_have_the_searches_on_mnist_that_spend_more_than_random_stopping(evidence):
    text = " ".join((ROOT / "docs/findings/dc_sgd.md").read_text().split())
    (said,) = re.findall(r"Du's ninety runs spend (\S+) at eps = 4 and (\S+) at 8", text)
    computed = read_computed(path_of(evidence.results_dir, "dc_sgd", "table_2"))
    over = {}
    for cell in artefacts()["dc_sgd/table_2"].cells:
        spent = computed.spent.get(cell.place, 0.0)
        if cell.at["setting"] == "CNN MNIST" and spent > float(cell.at["eps"]):
            over[cell.at["method"], cell.at["eps"]] = f"{spent:.2f}"
    assert over == {("Du", "4"): said[0], ("Du", "8"): said[1]}


def test_the_findings_say_what_the_seed_that_chooses_adds_to_the_means_of_table_4(evidence):
    text = " ".join((ROOT / "docs/findings/dc_sgd.md").read_text().split())
    (said,) = re.findall(r"without it the means of Table IV are ([^;]*);", text)
    table, more = artefacts()["dc_sgd/table_4"], {}
    for cell in table.cells:
        if cell.at["setting"] != "CNN MNIST" or len(cell.candidates) == 1:
            continue
        values = evidence.measure(cell, None).values
        added = statistics.fmean(values) - statistics.fmean(values[1:])
        more.setdefault(cell.at["method"], []).append(round(added + 1e-9, 2))
    ends = {method: (min(of_one), max(of_one)) for method, of_one in more.items()}
    low, high = ends.pop("DC-SGD-P")
    parts = [f"{ends[method][0]} to {ends[method][1]} of {method}" for method in ("Du", "DP-SGD", "Andrew")]
    expected = f"{parts[0]}, {parts[1]} and {parts[2]}, and between {high} lower and {-low} higher of DC-SGD-P"
    assert said == f"lower by {expected}"


def of_candidates(evidence: Evidence, artefact: str, key: str, **at: str) -> dict[str, float]:
    """What the first seed of each candidate of a cell came to, by the candidate's value of a setting."""
    cells = artefacts()[artefact].cells
    (cell,) = (cell for cell in cells if cell.at == at)
    found = {}
    for candidate in cell.candidates:
        (value,) = (override.partition("=")[2] for override in candidate if override.startswith(f"{key}="))
        found[value] = evidence.runs(cell, candidate).values[0]
    return found


def test_the_findings_of_doppler_have_the_accuracies_at_all_step_sizes(evidence):
    text = (ROOT / "docs" / "findings" / "doppler.md").read_text()
    header, _, rows = text.partition("\n| step size |")[2].partition("\n\n")[0].partition("\n")
    shown = table_rows(rows)
    shown.pop("---")
    assert set(shown) == {"DPSGD", "LP-DPSGD"}
    for method, cells in shown.items():
        found = of_candidates(evidence, "doppler/figure_3", "optim.lr", method=method, data="MNIST")
        assert cells == [f"{found[step.strip()]:.2f}" for step in header.strip("| ").split("|")]


@pytest.mark.parametrize(
    ("title", "artefact"), [("Table II", "table_2"), ("Table III", "table_3"), ("Table IV", "table_4")]
)
def test_the_findings_of_dc_sgd_have_the_numbers_of_their_records(grids, title, artefact):
    (grid,) = (grid for grid in grids if grid.artefact.where == f"dc_sgd/{artefact}.yaml")
    found = {
        (entry.cell.at["method"], entry.cell.at["eps"]): entry
        for entry in grid.entries.values()
        if entry.cell.at["setting"] == "CNN MNIST"
    }
    text = (ROOT / "docs" / "findings" / "dc_sgd.md").read_text()
    shown = table_rows(text.partition(f"\n| {title}, eps |")[2].partition("\n\n")[0].partition("\n")[2])
    shown.pop("---")
    budgets = [eps for method, eps in found if method == "DC-SGD-E"]
    assert len(shown) >= 2
    for name, cells in shown.items():
        method, _, which = name.partition(", ")
        entries = [found[method, eps] for eps in budgets]
        if which == "printed":
            assert cells == [entry.printed for entry in entries]
        else:
            assert which == "here"
            assert cells == [entry.ours.partition(" (")[0] if entry.value is not None else "–" for entry in entries]


def test_the_findings_of_dp_pmlf_have_the_numbers_of_their_records(grids):
    (grid,) = (grid for grid in grids if grid.artefact.where == "dp_pmlf/text_4.yaml")
    found: dict[str, list[str]] = {}
    for entry in grid.entries.values():
        found.setdefault(entry.cell.at["method"], []).append(entry.ours.partition(" (")[0])
    text = (ROOT / "docs" / "findings" / "dp_pmlf.md").read_text()
    shown = table_rows(text.partition("\n| what it is | MNIST, 1 |")[2].partition("\n\n")[0].partition("\n")[2])
    of = {
        "DPSGD, step 0.5": "DPSGD",
        "DPSGD, step 1": "DPSGD, step doubled",
        "DPSGD, step 5": "DPSGD, step times 10",
        "DPSGD, step 10": "DPSGD, step times 20",
        "DP-PMLF as written, step 0.5": "DP-PMLF",
        "DP-PMLF as written, step 5": "DP-PMLF, step times 10",
        "the released code's sum and noise, step 5": "released, its noise, step times 10",
        "the same, with the noise that its eps needs": "released, step times 10",
        "InnerOuter, step 0.5": "InnerOuter",
        "the released code's sum and noise, heavy ball": "released, its noise, heavy ball",
        "the same heavy ball, with the noise that its eps needs": "released, heavy ball",
        "DPSGD, step 10, half the noise": "DPSGD, half the noise, step times 20",
    }
    assert {name: cells for name, cells in shown.items() if name in of} == {name: found[of[name]] for name in of}
    assert all(name in of or name.startswith(("*printed", "---")) for name in shown)


@pytest.mark.parametrize(
    ("figure", "header", "axis", "data"),
    [
        ("figure_5", "| Figure 5 | MNIST | F-MNIST |", "{method}", ["MNIST", "F-MNIST"]),
        ("figure_7", "| Figure 7, eps | 2 | 4 | 6 | 8 |", "k = {k}", ["MNIST"]),
    ],
)
def test_the_findings_of_dp_pmlf_have_the_numbers_of_its_figures(grids, figure, header, axis, data):
    (grid,) = (grid for grid in grids if grid.artefact.where == f"dp_pmlf/{figure}.yaml")
    found: dict[str, list[str]] = {}
    for entry in grid.entries.values():
        if entry.cell.at["data"] in data:
            found.setdefault(axis.format(**entry.cell.at), []).append(entry.ours.partition(" (")[0])
    text = (ROOT / "docs" / "findings" / "dp_pmlf.md").read_text()
    shown = table_rows(text.partition(f"\n{header}")[2].partition("\n\n")[0].partition("\n")[2])
    shown.pop("---")
    assert shown == found


def test_the_page_of_the_panels_has_the_bounds_of_its_audits():
    bounds = {
        audit["config"]["algo"]["name"]: [f"{one['eps_at_least']:.2f}" for one in audit["findings"]]
        for audit in read_audits(RESULTS)
    }
    of = {
        "DP-SGD": "dpsgd",
        "DOPPLER": "doppler",
        "DiSK": "disk",
        "DP-PMLF": "dp_pmlf",
        "ADP": "adp",
        "DC-SGD-E": "dcsgd_e",
    }
    told = table_rows(section("Found on digits").partition("Audits of")[2])
    assert {name: told[name] for name in of} == {name: bounds[algorithm] for name, algorithm in of.items()}


def test_findings_have_the_means_of_the_tables_alone():
    """What is printed stands in those tables, too."""
    committed()
    for page in sorted((ROOT / "docs" / "findings").glob("*.md")):
        tables = "".join(path.read_text() for path in sorted((RESULTS / page.stem).glob("*.md")))
        told = set(re.findall(r"\d+\.\d\d ± \d+\.\d\d", page.read_text()))
        assert told <= set(re.findall(r"\d+\.\d\d ± \d+\.\d\d", tables)), page
