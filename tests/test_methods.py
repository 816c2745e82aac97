"""The pages of docs/methods: up to date, complete, and true to what the stages are."""

import re
import shutil
from functools import cache
from pathlib import Path

import pytest
import yaml
from cli import ROOT
from helpers import ALGORITHMS, composed, job_of

from dpbench.config import compose_jobs
from dpbench.errors import UserError
from dpbench.methods import generated, pages, write
from dpbench.methods.__main__ import main
from dpbench.methods.entry import read_entry
from dpbench.methods.facts import StageFacts, guarantee, memory, stages

DOCS = ROOT / "docs" / "methods"


@cache
def facts(*overrides: str) -> dict[str, StageFacts]:
    return {stage.group: stage for stage in stages(job_of(*overrides), job_of())}


def kept(*overrides: str) -> dict[str, float]:
    return memory(compose_jobs([*overrides, "epochs=2", "micro_batch=64"], multirun=False)[0])


def written_guarantee(job) -> str:
    page = DOCS / f"{job.choices['algo']}.md"
    found = re.search(r"eps=8\): (.*)", page.read_text()) if page.is_file() else None
    return found[1] if found else ""


def require_up_to_date() -> None:
    expected = generated(DOCS)
    written = {path.name: path.read_text() for path in DOCS.glob("*.md")}
    stale = sorted(name for name in expected.keys() | written.keys() if expected.get(name) != written.get(name))
    assert not stale, f"run python -m dpbench.methods, which brings {', '.join(stale)} up to date"
    assert set(expected) == {"README.md", *(f"{name}.md" for name in ALGORITHMS)}


def test_the_pages_are_up_to_date_but_for_their_guarantees(monkeypatch):
    monkeypatch.setattr(pages, "guarantee", written_guarantee)
    require_up_to_date()


@pytest.mark.slow
def test_the_pages_are_up_to_date():
    require_up_to_date()


def test_a_guarantee_is_that_of_the_default_run():
    job = job_of("algo=dpsgd")
    assert guarantee(job) == written_guarantee(job)


@pytest.fixture
def copied(tmp_path, monkeypatch) -> Path:
    """A copy of the entries, for which no page is computed."""
    monkeypatch.setattr(pages, "_job", lambda *_: None)
    monkeypatch.setattr(pages, "_page", lambda job, default, entry: f"# {entry.title}\n")
    return shutil.copytree(DOCS, tmp_path / "methods")


def test_an_algorithm_without_an_entry_is_named_with_what_to_do(copied, capsys):
    (copied / "source" / "doppler.yaml").unlink()
    assert main([f"docs={copied}"]) == 2
    assert main([f"docs={copied / 'nowhere'}"]) == 2
    assert capsys.readouterr().err.startswith(
        "error: algo=doppler: has no entry; write its title, sources, equation, symbols and deviations into "
        "docs/methods/source/doppler.yaml"
    )


def test_an_entry_without_an_algorithm_is_named(copied):
    (copied / "source" / "nothing.yaml").write_text((copied / "source" / "disk.yaml").read_text())
    with pytest.raises(UserError, match=r"nothing\.yaml: there is no algo=nothing$"):
        generated(copied)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"symbols": None}, "symbols"),
        ({"equations": "x"}, "equations"),
        ({"deviations": [{"paper": "x", "here": "y"}]}, "where"),
        ({"sources": "one"}, "list|List"),
    ],
)
def test_an_entry_that_is_not_complete_is_named(tmp_path, change, message):
    content = {**yaml.safe_load((DOCS / "source" / "disk.yaml").read_text()), **change}
    content = {key: value for key, value in content.items() if value is not None}
    (tmp_path / "disk.yaml").write_text(yaml.safe_dump(content))
    with pytest.raises(UserError, match=rf"^docs/methods/source/disk\.yaml: .*({message})"):
        read_entry(tmp_path, "disk")


def test_writing_touches_what_changed_and_removes_what_is_gone(copied):
    write(copied)
    (copied / "gone.md").write_text("x")
    (copied / "disk.md").write_text("x")
    assert sorted(path.name for path in write(copied)) == ["disk.md", "gone.md"]
    assert not (copied / "gone.md").exists()
    assert write(copied) == []


def test_settings_are_named_as_one_types_them_with_their_defaults_and_meanings():
    found = facts("algo=disk", "algo.kappa=0.9")
    kappa = [next(s for s in found[group].settings if s.typed == "algo.kappa") for group in ("query", "filter")]
    assert [setting.default for setting in kappa] == ["0.9", "0.9"]
    assert kappa[1].meaning == "weight of the new gradient, in (0, 1]; the steady-state Kalman gain."
    # Without algo.kappa to refer to, the stage's own setting.
    own = facts("filter=exponential")["filter"].settings
    assert [(setting.typed, setting.default) for setting in own] == [("filter.kappa", "0.7")]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_setting_has_a_meaning_and_can_be_typed(algorithm):
    found = [setting for stage in facts(f"algo={algorithm}").values() for setting in stage.settings]
    assert [setting.typed for setting in found if not setting.meaning] == []
    assert len(found) >= 4
    typed = [f"{setting.typed}={setting.default}" for setting in found]
    assert composed(f"algo={algorithm}", *typed) == job_of(f"algo={algorithm}").config


def test_groups_beside_the_stages_appear_where_an_algorithm_chooses_in_them():
    assert set(facts("algo=adp")) - set(facts("algo=dpsgd")) == {"schedule"}
    assert facts("algo=adp")["schedule"].option == "inverse_sqrt"


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (("algo=dpsgd",), {}),
        (("algo=dpadam",), {"optim": 2}),  # two moments
        (("algo=doppler", "filter=second"), {"filter": 4}),  # n_a + n_b, as DOPPLER counts
        (("algo=disk",), {"query": 1, "filter": 1}),  # the last iterate for d, and m
        (("algo=dp_pmlf", "algo.length=3", "filter=none"), {"query": 3}),
        (("algo=innerouter",), {"query": 2, "optim": 1}),
    ],
)
def test_memory_is_what_the_methods_must_remember(overrides, expected):
    found = {group: vectors for group, vectors in kept(*overrides).items() if vectors}
    assert found == expected


def test_memory_is_counted_without_data(monkeypatch):
    monkeypatch.setattr("dpbench.data.ImageDataset.load", lambda *_, **__: pytest.fail("read"))
    assert kept("algo=dpsgd")["filter"] == 0
