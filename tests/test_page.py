"""The page of all results: what it shows, and that it is one well-formed document that needs nothing else."""

import ast
import json
import re
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path

import pytest
from made_up_evidence import NEW, OLD, digest
from specifications import PAPERS
from typing_extensions import override

from dpbench.claims import Artefact, Evidence, Outcome, load_all, load_artefact
from dpbench.config import conf_folder
from dpbench.report import build_grid, views
from dpbench.report import page as page_module
from dpbench.report.inline_svg import inline_svg
from dpbench.report.outcomes import BADGES
from dpbench.report.page import page
from dpbench.report.runs import Configuration

FILE = """
title: Made up & invented
kind: trained
source: made_up.md 5
seeds: 2
common: dataset=digits
rows:
  method:
    new: algo=disk
    old: algo=dpsgd
columns:
  eps:
    1: eps=1
    8: eps=8
values: |
  method | 1          | 8
  new    | 60 ± 0.3   | 70
  old    | 55         | 66
claims:
  - {says: The new one is better., higher: {method: new}, lower: {method: old}, printed: false}
  - {says: It feels better., why: a feeling}
deviations: [The network is ours.]
readings: {made_up.md 6: Poisson sampling}
"""
HOSTILE = "<script>alert('x')</script> & \"<b>"
VOID = {"meta", "link", "br", "img", "hr", "input"}


def record(
    results: Path, overrides: str, seed: int, accuracy: float, status="finished", reason=None, **summary
) -> Path:
    """The record of a run; the best accuracy is a point above the last."""
    folder = results / "runs" / digest(overrides.split()) / str(seed)
    folder.mkdir(parents=True)
    entry = {"final": accuracy / 100, "best": (accuracy + 1) / 100, "best_step": 1}
    files = {
        "summary": {"test_accuracy": entry, "eps": 0.987, "target_eps": 1.0, "private": True, **summary},
        "status": {"status": status, "reason": reason},
        "ledger": {
            "neighbouring": "add or remove one sample",
            "sampler": "poisson",
            "correlation": None,
            "accountant": "pld",
            "target_eps": 1.0,
            "published_eps": None,
            "delta": 1.25e-5,
            "planned": 321,
            "releases": [
                {"sampling_rate": 0.178, "noise_multipliers": [1.234], "beside": [], "count": 300},
                {"sampling_rate": 0.178, "noise_multipliers": [2.468], "beside": [], "count": 21},
            ],
            "eps": 0.987,
        },
        "provenance": {"commit": "0123456789abcdef", "dirty": True, "device": "a device", "wall_seconds": 77.7,
                       "command": ["/home/somebody/run.py"], "python": "3.11", "platform": "Linux",
                       "versions": {"dpbench": None, "torch": "2.11.0"}},
    }  # fmt: skip
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    config = {
        "eps": 1.0,
        "results_dir": "/home/somebody/results",
        "dataset": {"kind": "ImageDataset", "name": "digits", "train_size": 1437},
        "optim": {"kind": "SGD", "lr": 0.0625},
        "choices": {"algo": "disk", "optim": "sgd"},
        "overrides": [*overrides.split(), f"seed={seed}", "results_dir=/home/somebody/results"],
    }
    (folder / "config.yaml").write_text(json.dumps(config))
    lines = [{"step": n, "epoch": n, "test_accuracy": accuracy * n / 300, "test_loss": 1} for n in (1, 2, 3)]
    (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return folder


class PageWorld:
    """A results folder, files of claims about it, and the page that shows them."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.results = folder, folder / "results"

    def artefact(self, text: str = FILE, name: str = "table_1") -> Artefact:
        path = self.folder / "adp" / f"{name}.yaml"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        return load_artefact(path)

    def page(self, *artefacts: Artefact) -> str:
        evidence = Evidence(self.results, digest)
        return page([build_grid(artefact, evidence) for artefact in artefacts or (self.artefact(),)], self.results)


@pytest.fixture
def world(tmp_path, monkeypatch) -> PageWorld:
    """Without the methods' pages, which take most of the time."""
    monkeypatch.setattr(page_module, "conf_folder", lambda: tmp_path / "elsewhere" / "conf")
    return PageWorld(tmp_path)


class Document(HTMLParser):
    """Checks nesting while it reads, and keeps ids, addresses, tags and the text outside of style and script."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.ids: list[str] = []
        self.addresses: list[tuple[str, str, str]] = []
        self.tags: Counter[str] = Counter()
        self.handlers: list[str] = []
        self.text = ""
        self.feed(text)
        self.close()
        assert not self.open, f"not closed: {self.open}"

    @override
    def handle_starttag(self, tag, attrs):
        self.tags[tag] += 1
        names = [name for name, _ in attrs]
        assert len(set(names)) == len(names), f"{tag} has an attribute twice"
        for name, value in attrs:
            if name == "id":
                self.ids.append(value)
            if name in ("href", "src", "action", "data", "srcset", "poster"):
                self.addresses.append((tag, name, value))
            if name.startswith("on"):
                self.handlers.append(name)
        if tag not in VOID:
            # The parser of browsers closes a paragraph in front of these, silently.
            assert not (tag in ("div", "table", "ul", "dl", "p", "details", "section", "figure") and "p" in self.open)
            self.open.append(tag)

    @override
    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.handle_endtag(tag)

    @override
    def handle_endtag(self, tag):
        assert self.open, f"</{tag}> closes nothing"
        assert self.open[-1] == tag, f"</{tag}> closes <{self.open[-1]}>"
        self.open.pop()

    @override
    def handle_data(self, data):
        if not {"style", "script"} & set(self.open):
            self.text += data


def check(text: str) -> Document:
    """That a page is well-formed, has no id twice, no link into nothing, and asks nobody for anything."""
    document = Document(text)
    twice = [name for name, count in Counter(document.ids).items() if count > 1]
    assert not twice
    for tag, name, value in document.addresses:
        assert (tag, name) in (("a", "href"), ("use", "href")), f"{tag} {name}={value}"
        if value.startswith("#"):
            assert value[1:] in document.ids, f"nothing is at {value}"
    assert not document.handlers
    assert "@import" not in text
    assert not re.search(r"url\((?!#)", text)
    assert "default-src 'none'" in text
    return document


@pytest.fixture(scope="module")
def empty(tmp_path_factory) -> str:
    """The page of all artefacts without any record."""
    results = tmp_path_factory.mktemp("empty")
    evidence = Evidence(results, lambda _: None)
    return page([build_grid(artefact, evidence) for artefact in load_all(conf_folder() / "paper")], results)


def test_without_records_the_page_is_well_formed_and_says_what_is_missing(empty):
    document = check(empty)
    assert "So far no runs have been made" in document.text
    assert "No record of a run belongs to a table or figure yet" in document.text
    assert re.search(r"waiting for runs: data .*; [\d,]+ runs; .*GPU hours for [\d,]+ of them", document.text)


def test_every_artefact_has_a_place_its_table_and_its_command(empty):
    document = check(empty)
    for artefact in load_all(conf_folder() / "paper"):
        assert f"{artefact.paper}-{artefact.name}" in document.ids
        assert artefact.title in document.text
        if artefact.reason is None:
            assert f"paper={artefact.paper} artefact={artefact.name}\n" in document.text
        for line in (*artefact.deviations, *artefact.readings.values()):
            assert not artefact.cells or artefact.kind == "not reproducible" or line in document.text
    assert {*PAPERS, "scorecard", "runs", "methods"} <= set(document.ids)


def test_every_method_has_its_page_with_equations(empty):
    document = check(empty)
    names = {path.stem for path in (conf_folder() / "algo").glob("*.yaml")}
    assert names == {name.removeprefix("method-") for name in document.ids if name.startswith("method-")}
    assert document.tags["math"] == len(names)


def test_where_there_are_no_method_pages_the_page_says_so(world):
    assert "pages are not here" in check(world.page()).text


def test_every_outcome_is_shown_in_words_with_a_sign_and_its_meaning(world):
    document = check(world.page())
    assert set(BADGES) == set(Outcome)
    for outcome, badge in BADGES.items():
        assert f"{badge.sign}\N{NO-BREAK SPACE}{outcome}" in document.text
        assert badge.meaning in document.text


def test_the_numbers_of_records_stand_beside_those_printed(world):
    for seed, (new, old) in enumerate(((60.25, 50.0), (60.35, 50.1))):
        record(world.results, NEW, seed, new)
        record(world.results, OLD, seed, old)
    text = world.page()
    document = check(text)
    new, old = digest(NEW.split()), digest(OLD.split())
    assert f'<td class="good"><span>60 ± 0.3</span><a href="#run-{new}">60.30 ± 0.07 (n = 2)</a>' in text
    assert f'<td class="bad"><span>55</span><a href="#run-{old}">50.05 ± 0.07 (n = 2)</a>' in text
    assert "So far 4 runs of 2 configurations" in document.text
    assert "The numbers that the paper prints do not bear this out" in document.text
    assert "a feeling" in document.text


def test_the_scorecard_counts_each_outcome_of_each_paper(world):
    for seed in (0, 1):
        record(world.results, NEW, seed, 60)
        record(world.results, OLD, seed, 50)
    table = re.search(r'<table class="score">.*?</table>', world.page(), re.DOTALL)[0]
    counts = {
        row[0].split("&nbsp;")[1].removesuffix("</span>"): row[1:]
        for row in re.findall(r'<tr><th scope="row">(.*?)</th><td>(\d+)</td><td>(\d+)</td><td>(\d+)</td></tr>', table)
        if "badge" in row[0]
    }
    assert counts["reproduced"] == counts["below"] == counts["not judged by numbers"] == ("1", "1", "0")
    assert counts["not run"] == ("3", "3", "0")  # two numbers at eps 8, and the order, which needs them
    assert '<th scope="row">claims</th><td>6</td><td>6</td><td>0</td>' in table


def test_the_scorecard_tells_numbers_that_the_same_runs_reproduce_twice(world):
    for seed in (0, 1):
        record(world.results, NEW, seed, 60)
    again = world.artefact(name="table_2")
    assert "The 2 printed numbers reproduced by training are 1 distinct ones" in world.page(world.artefact(), again)
    assert "distinct ones" not in world.page(world.artefact())


def test_dpbenchs_own_claims_have_a_column_and_are_in_no_other(world):
    ours = FILE.replace("claims:\n", "claims:\n  - {says: Ours., higher: {eps: 8}, lower: {eps: 1}, own: true}\n")
    text = world.page(world.artefact(ours))
    table = re.search(r'<table class="score">.*?</table>', text, re.DOTALL)[0]
    assert '<th scope="row">claims</th><td>6</td><td>6</td><td>1</td>' in table
    section = text.partition('id="adp-table_1"')[2]
    assert section.index("dpbench’s own claims:") < section.index("<h4>Claims</h4>")
    assert "dpbench’s own claims:" not in world.page()


AUDIT = {
    "verdict": "consistent with the claim",
    "confidence": 0.95,
    "findings": [
        {"attack": "one step", "attacked": "a canary", "claimed_eps": 1.0, "eps_at_least": 0.81234, "violated": False},
        {"attack": "one run", "attacked": HOSTILE, "claimed_eps": 0.9, "eps_at_least": 0.1, "violated": False},
    ],
}


def test_an_audit_stands_beside_the_runs_of_its_configuration_alone(world, capsys):
    for overrides in (NEW, OLD):
        record(world.results, overrides, 0, 60)
    files = {"a": AUDIT | {"run": digest(NEW.split())}, "b": AUDIT | {"run": "0123456789ab"}, "c": AUDIT | {"run": 3}}
    for name, content in files.items():
        (world.results / "audits" / name).mkdir(parents=True)
        (world.results / "audits" / name / "audit.json").write_text(json.dumps(content))
    text = world.page()
    found = Document(text).text
    assert (
        found.count(
            "Consistent with the claim. Lower bounds on eps, with 95 % confidence: one step, a canary: "
            "at least 0.8123 of 1; one run, "
        )
        == 1
    )
    assert "<script>alert" not in text
    shown = {section.partition('"')[0]: section for section in text.split('<details class="run" id="run-')[1:]}
    assert "<dt>Audit</dt>" in shown[digest(NEW.split())]
    assert "<dt>Audit</dt>" not in shown[digest(OLD.split())]
    assert "run: expected a text" in capsys.readouterr().err.replace("\n", " ")


def test_the_command_of_a_run_has_the_suggestions_that_it_took():
    typed = ["device=cpu", "dataset.suggested.lr.sgd=1", "eps=2", "seed=3"]
    one = Configuration("abc", (), {"overrides": typed}, {}, (), ())
    assert one.overrides == ("dataset.suggested.lr.sgd=1", "eps=2")


def test_a_run_shows_config_ledger_guarantee_curve_and_provenance(world):
    record(world.results, NEW, 0, 60)
    text = world.page()
    document = check(text)
    assert "python -m dpbench.run dataset=digits algo=disk eps=1 seed=0" in document.text
    assert "algo=disk eps=1" in document.text
    assert "optim=sgd lr=0.0625" in document.text
    assert "dataset ImageDataset: name=digits, train_size=1437" in document.text
    assert "321 of 321 planned releases; sampling rate 0.178; noise multiplier 1.234 to 2.468" in document.text
    assert "The run is (0.987, 1.25e-05)-differentially private" in document.text
    assert "each of the 1437 training samples" in document.text
    assert "test accuracy by epoch, 1 run: from 20 to 60 %" in text
    assert "0123456789ab, modified" in document.text
    assert "torch 2.11.0" in document.text
    assert "dpbench None" not in document.text
    assert re.search(r"<td>60\.00</td><td>61\.00</td><td>0\.987</td><td>78</td>", text)
    assert "somebody" not in text, "names of folders do not belong on a page that is published"


def test_settings_that_configurations_share_stand_above_them_once_and_others_beside_each(world):
    record(world.results, NEW, 0, 60)
    other = record(world.results, OLD, 0, 55) / "config.yaml"
    other.write_text(other.read_text().replace("0.0625", "0.125"))
    text = world.page()
    check(text)
    above, *each = text[text.index("Settings of all of them") :].split('<details class="run"')
    assert len(each) == 2
    assert "name=digits, train_size=1437" in above
    assert "name=digits" not in "".join(each)
    assert "lr=" not in above
    assert [re.findall(r"lr=[0-9.]+", one) for one in each] == [["lr=0.0625"], ["lr=0.125"]]


def test_settings_of_the_only_configuration_stand_beside_it(world):
    record(world.results, NEW, 0, 60)
    text = world.page()
    assert "Settings of all of them" not in text
    assert "<dt>Settings</dt>" in text


def test_other_scores_have_a_column_each_where_any_run_has_one(world):
    record(world.results, NEW, 0, 60, mismatched_accuracy=0.84, test_loss=0.43219, bleu=61.234)
    record(world.results, NEW, 1, 60, test_loss=0.5)
    table = re.search(r'aria-label="Runs of.*?</table>', world.page(), re.DOTALL).group()
    head = re.findall(r'<th scope="col"[^>]*>(.*?)</th>', table)
    rows = [re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row) for row in re.findall(r"<tr>(<th scope=.row.*?)</tr>", table)]
    assert head[:4] == ["seed", "status", "last, %", "best, %"]
    assert head[4:] == ["mismatched accuracy", "test loss", "BLEU", "eps", "wall, s", "made in"]
    assert [row[4:7] for row in rows] == [["84.00", "0.4322", "61.23"], ["–", "0.5", "–"]]


def test_the_page_counts_the_runs_behind_its_numbers_and_no_others(world):
    """Neither what diverged in a number's place nor a candidate of a search that lost stands behind a number."""
    searched = world.artefact(FILE.replace("new: algo=disk", "new: algo=disk optim.lr=1,2"))
    record(world.results, f"{NEW} optim.lr=1", 0, 10, status="diverged")
    record(world.results, f"{NEW} optim.lr=2", 0, 60)
    record(world.results, f"{NEW} optim.lr=2", 1, 10, status="diverged")
    text = check(world.page(searched)).text
    assert "So far 1 runs of 1 configurations stand behind the cells below" in text
    # Of a search the winner is shown, with all of its runs.
    shown = [candidate for candidate in (1, 2) if f"optim.lr={candidate} seed=0" in text]
    assert shown == [2]
    assert "diverged" in text


def test_eps_that_is_not_proven_is_said_to_be_none(world):
    record(world.results, NEW, 0, 60, private=False)
    text = check(world.page()).text
    assert "None that is proven" in text
    assert "The run is (0.987" not in text


def test_gradients_without_noise_in_a_record_are_named_beside_the_guarantee(world):
    folder = record(world.results, NEW, 0, 60)
    assert "gradients.npz" not in check(world.page()).text
    config = json.loads((folder / "config.yaml").read_text())
    config["record_coordinates"] = 10
    (folder / "config.yaml").write_text(json.dumps(config))
    assert "does not hold for gradients.npz" in check(world.page()).text


def test_hostile_text_of_a_record_is_text(world):
    folder = record(world.results, NEW, 0, 60, "failed", reason=HOSTILE)
    config = json.loads((folder / "config.yaml").read_text())
    config["overrides"] = [f"dataset={HOSTILE}"]
    config["optim"] = {"kind": HOSTILE, HOSTILE: HOSTILE}
    (folder / "config.yaml").write_text(json.dumps(config))
    origin = {"commit": HOSTILE, "device": HOSTILE, "versions": {HOSTILE: HOSTILE}}
    (folder / "provenance.json").write_text(json.dumps(origin))
    harmless = world.artefact()
    hostile = world.artefact(FILE.replace("Made up & invented", "<script>x</script>"), "table_2")
    document = check(world.page(harmless, hostile))
    assert document.tags["script"] == 1, "the page's own"
    assert f"failed: {HOSTILE}" in document.text
    assert f"dataset={HOSTILE}" in document.text


@pytest.mark.parametrize("name", ["config.yaml", "ledger.json", "provenance.json", "metrics.jsonl"])
@pytest.mark.parametrize("content", [None, "{", ""])
def test_a_record_with_a_damaged_file_still_gives_a_page(world, name, content):
    folder = record(world.results, NEW, 0, 60)
    (folder / name).unlink() if content is None else (folder / name).write_text(content)
    assert "60.00 (n = 1 of 2)" in check(world.page()).text


def test_the_page_is_the_same_when_written_again(world):
    for seed in (0, 1):
        record(world.results, NEW, seed, 60 + seed)
    assert world.page() == world.page()


def test_details_of_runs_that_do_not_fit_give_way(world, monkeypatch):
    """First the curves of seeds become one, then configurations are left out, and the page says how many."""
    for seed in (0, 1):
        record(world.results, NEW, seed, 60 + seed)
        record(world.results, OLD, seed, 55 + seed)
    whole = world.page()
    assert whole.count("<polyline") == 4
    sizes = [len(part) for part in re.findall(r'<details class="run".*?</details>', whole, re.DOTALL)]
    monkeypatch.setattr(page_module, "RUNS_LIMIT", sum(sizes) - 1)
    merged = world.page()
    assert merged.count("<polyline") == 2
    monkeypatch.setattr(page_module, "RUNS_LIMIT", max(sizes))
    less = world.page()
    assert "1 of 2 configurations did not fit" in check(less).text
    assert less.count("<polyline") == 1


@pytest.mark.parametrize("evaluations", [1, 2])
def test_a_run_that_was_evaluated_once_has_no_curve(world, evaluations):
    path = record(world.results, NEW, 0, 60) / "metrics.jsonl"
    path.write_text("\n".join(path.read_text().splitlines()[:evaluations]))
    assert world.page().count("<polyline") == evaluations - 1


def test_large_tables_are_folded(world, monkeypatch):
    record(world.results, NEW, 0, 60)
    assert "Table of 4 numbers" not in world.page()
    monkeypatch.setattr(views, "UNFOLDED", 3)
    assert "<summary>Table of 4 numbers</summary>" in world.page()


def test_headers_span_the_cells_that_they_are_about():
    """Three rows by two: the outer label spans both of its rows, unless its own outer label changes."""
    labels = [("a", "x", "1"), ("a", "x", "2"), ("a", "y", "1"), ("b", "y", "1")]
    assert views.spans(labels) == [
        [("a", 3), ("x", 2), ("1", 1)],
        [("a", 0), ("x", 0), ("2", 1)],
        [("a", 0), ("y", 1), ("1", 1)],
        [("b", 1), ("y", 1), ("1", 1)],
    ]


# Figures.

PICTURE = """<?xml version="1.0"?>
<!DOCTYPE svg PUBLIC "-//W3C//DTD SVG 1.1//EN" "http://www.w3.org/Graphics/SVG/1.1/DTD/svg11.dtd">
<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" width="72pt" height="36pt"
     viewBox="0 0 72 36" onload="alert(1)">
<metadata>made by hand</metadata>
<style>* {stroke-linejoin: round}</style>
<script>alert(1)</script>
<defs><path id="m" d="M0 0"/><clipPath id="c"><rect width="9" height="9"/></clipPath></defs>
<g id="axes" clip-path="url(#c)"><use xlink:href="#m" style="fill: red"/><use xlink:href="http://elsewhere/x#m"/></g>
<a href="http://elsewhere"><text>away</text></a><image href="http://elsewhere/x.png"/>
<path d="M1 1" style="fill: url(http://elsewhere/y)"/><foreignObject><p>x</p></foreignObject>
<text>a &lt; b</text>
</svg>"""


def test_a_figure_stands_in_the_page_with_ids_of_its_own_and_nothing_active(world):
    for name in ("table_1", "table_2"):
        path = world.results / "adp" / f"{name}.svg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(PICTURE)
    (world.results / "adp" / "table_1.csv").write_text("a,b")
    document = check(world.page(world.artefact(), world.artefact(name="table_2")))
    assert {"adp-table_1-m", "adp-table_2-m", "adp-table_1-c"} <= set(document.ids)
    assert ("a", "href", "adp/table_1.csv") in document.addresses
    assert document.tags["clippath"] == 2
    assert document.tags["style"] == 1


def test_below_a_figure_stands_whether_it_shows_runs_or_only_what_is_printed(world):
    path = world.results / "adp" / "table_1.svg"
    path.parent.mkdir(parents=True)
    path.write_text(PICTURE)
    assert "<figcaption>Printed values only, nothing has been run yet;" in world.page()
    record(world.results, NEW, 0, 60.0)
    text = world.page()
    assert "<figcaption>Drawn from our runs;" in text
    assert "Printed values only" not in text


def test_a_figure_keeps_what_draws_and_loses_the_rest(tmp_path):
    path = tmp_path / "x.svg"
    path.write_text(PICTURE)
    picture = str(inline_svg(path, "p-", 'a "label"'))
    assert 'clip-path="url(#p-c)"' in picture
    assert '<use style="fill: red" href="#p-m"' in picture or '<use href="#p-m" style="fill: red"' in picture
    assert "a &lt; b" in picture
    assert 'style="max-width:72pt"' in picture
    for gone in ("elsewhere", "script", "onload", "metadata", "<style", "foreignObject", "<a", 'width="72', "xlink"):
        assert gone not in picture
    assert 'aria-label="a &quot;label&quot;"' in picture


def test_figures_of_a_page_have_the_styles_of_their_own_files(world):
    sheet = "<style>.s0{{fill:{}}}.s1{{fill:{}}}</style>"
    for name, colours in (("table_1", ("red", "blue")), ("table_2", ("blue", "green"))):
        path = world.results / "adp" / f"{name}.svg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(
            f'<svg xmlns="http://www.w3.org/2000/svg">{sheet.format(*colours)}<path id="a" class="s0"/>'
            '<path id="b" class="s1"/><path id="c" class="skip"/></svg>'
        )
    text = world.page(world.artefact(), world.artefact(name="table_2"))
    marks = dict(re.findall(r'<path id="adp-(table_\d-\w)" (?:class|style)="([^"]*)" />', text))
    rules = dict(re.findall(r"\.(drawn\d+)\{([^}]*)\}", text))
    assert {name: rules.get(mark, mark) for name, mark in marks.items()} == {
        "table_1-a": "fill:red",
        "table_1-b": "fill:blue",
        "table_2-a": "fill:blue",
        "table_2-b": "fill:green",
    }
    assert marks["table_1-b"] == marks["table_2-a"] in rules
    assert text.index(".drawn0{") < text.index("</style>")


@pytest.mark.parametrize("content", ["", "no picture", "<html xmlns='http://www.w3.org/1999/xhtml'/>"])
def test_what_is_no_picture_is_left_out(tmp_path, content):
    path = tmp_path / "x.svg"
    path.write_text(content)
    assert inline_svg(path, "p-", "x") is None
    assert inline_svg(tmp_path / "none.svg", "p-", "x") is None


# Colours.


def luminance(colour: str) -> float:
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


@pytest.mark.parametrize("scheme", [0, 1], ids=["light", "dark"])
def test_text_has_the_contrast_that_wcag_asks_for(scheme):
    """At least 4.5 to 1 (WCAG 2.2, 1.4.3, level AA), for every text on every ground that it stands on."""
    style = (Path(page_module.__file__).parent / "templates" / "page.css").read_text()
    block = re.findall(r":root \{(.*?)\}", style, re.DOTALL)[scheme]
    colours = dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", block))
    pairs = [(text, ground) for text in ("text", "quiet", "link") for ground in ("page", "panel")]
    pairs += [(tone, ground) for tone in ("good", "bad", "open", "none") for ground in (f"{tone}-back", "page")]
    pairs += [(text, f"{tone}-back") for text in ("text", "quiet", "link") for tone in ("good", "bad", "open")]
    for text, ground in pairs:
        lighter, darker = sorted((luminance(colours[text]), luminance(colours[ground])), reverse=True)
        assert (lighter + 0.05) / (darker + 0.05) >= 4.5, (text, ground)


def test_the_page_imports_nothing_of_training():
    folder = Path(page_module.__file__).parent
    for path in folder.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom):
                assert not (node.module or "").startswith(("dpbench.training", "dpbench.step", "torch")), path
