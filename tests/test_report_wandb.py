"""Tables, pictures, report and workspace for W&B: recorded offline and built to what would be sent; nothing is sent."""

import importlib.util
import json
import os
import sys
from pathlib import Path
from types import ModuleType

import pytest
import wandb
from cli import ROOT
from made_up_evidence import NEW, World
from wandb_log import offline_runs

from dpbench.claims import load_all
from dpbench.config import compose_each, conf_folder, config_hash
from dpbench.config.schema import TrackerSettings
from dpbench.report import build_grid, write_output
from dpbench.report.wandb import build_report, build_workspace, log_output


@pytest.fixture(autouse=True)
def logged_out(tmp_path, monkeypatch) -> None:
    """W&B without an account and without the user's settings."""
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    for name in ("CONFIG_DIR", "CACHE_DIR", "DATA_DIR", "ARTIFACT_DIR"):
        monkeypatch.setenv(f"WANDB_{name}", str(tmp_path / "home"))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    wandb.teardown()


@pytest.fixture
def world(world) -> World:
    """Where "new" at eps 1 came to what is printed."""
    world.runs(NEW, 60.0, 60.0, 60.0)
    return world


def test_tables_and_pictures_are_logged_as_a_run(world):
    settings = TrackerSettings(mode="offline", group="all")
    write_output([build_grid(world.artefact(), world.evidence)], world.results, lambda _: None)
    said: list[str] = []
    assert log_output(settings, world.results, [build_grid(world.artefact(), world.evidence)], said.append)
    wandb.teardown()
    assert said == []
    (run,) = offline_runs(world.results)
    assert (run.run.job_type, run.run.run_group, run.exit_code) == ("report", "all", 0)
    first = run.table("adp/made_up")[0]
    assert first == {
        "place": "method new, eps 1",
        "printed": "60 ± 0.3",
        "ours": "60.00 ± 0.00 (n = 3)",
        "verdict": "reproduced",
        "detail": "60.00 % over 3 runs, +0, allowed ±1",
    }
    assert run.table("scorecard")[0]["reproduced"] == 1
    assert [line["paper"] for line in run.table("scorecard")] == ["ADP", "dpbench's own claims"]
    (logged,) = run.history
    picture = run.folder / "files" / logged["adp/made_up_picture/path"]
    assert picture.read_bytes() == (world.results / "adp" / "made_up.png").read_bytes()


def test_nothing_is_logged_where_tracking_is_disabled(world):
    settings = TrackerSettings(mode="disabled")
    assert not log_output(settings, world.results, [build_grid(world.artefact(), world.evidence)], print)
    assert not (world.results / "wandb").exists()


def test_the_report_holds_scorecard_tables_and_how_numbers_are_chosen(world):
    settings = TrackerSettings(project="mine", entity="us")
    model = build_report(settings, [build_grid(world.artefact(), world.evidence)])._to_model()
    assert (model.project.name, model.project.entity_name) == ("mine", "us")
    spec = json.loads(model.spec.model_dump_json(by_alias=True, exclude_none=True))
    texts = [block["content"] for block in spec["blocks"] if block["type"] == "markdown-block"]
    assert "| ADP | 1 |" in texts[0]
    assert "| method new, eps 1 | 60 ± 0.3 | 60.00 ± 0.00 (n = 3) | reproduced |" in texts[1]
    assert "after the last step" in texts[1]
    headings = [block["children"][0]["text"] for block in spec["blocks"] if block["type"] == "heading"]
    assert headings == ["Scorecard", "ADP", "Made up: Made up"]
    (grid,) = [block["metadata"] for block in spec["blocks"] if block["type"] == "panel-grid"]
    filters = grid["runSets"][0]["filters"]["filters"]
    assert [(one["key"]["name"], one["value"]) for one in filters] == [("jobType", "report")]
    assert "adp/made_up_picture" in json.dumps(grid)


def test_the_workspace_shows_training_runs_over_epochs():
    view = build_workspace(TrackerSettings(project="mine", entity="us"))._to_model()
    assert (view.project, view.entity) == ("mine", "us")
    spec = json.loads(view.spec.model_dump_json(by_alias=True, exclude_none=True))["section"]
    training, ends = spec["panelBankConfig"]["sections"]
    assert [panel["config"]["metrics"] for panel in training["panels"]] == [
        ["test_accuracy"], ["test_loss"], ["train_loss"], ["gradient_norm"], ["above_threshold"], ["threshold"],
        ["eps"],
    ]  # fmt: skip
    assert {panel["config"]["xAxis"] for panel in training["panels"]} == {"epoch"}
    assert len(ends["panels"]) == 2


def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("wandb_report", ROOT / "scripts" / "wandb_report.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_script_says_what_it_would_do_where_nobody_is_logged_in(capsys):
    assert script().main(["--project", "mine"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err == (
        "It would save a report of all tables and figures and a workspace of the runs to the W&B project mine, but W&B "
        "is offline (no API key; log in with: wandb login)\n"
    )


def test_the_script_saves_where_somebody_is_logged_in(monkeypatch):
    saved = []
    module = script()
    monkeypatch.setenv("WANDB_API_KEY", 40 * "0")
    monkeypatch.setattr(module, "save", lambda settings, *rest: saved.append((settings.entity, *rest)))
    assert module.main(["--entity", "us", "--results", "there"]) == 0
    ((entity, results, artefacts, config_dirs),) = saved
    assert (entity, results, config_dirs) == ("us", Path("there"), [])
    assert artefacts == load_all(conf_folder() / "paper")


def test_the_script_takes_claims_and_options_of_ones_own(world, monkeypatch, tmp_path, capsys):
    saved = []
    module = script()
    monkeypatch.setenv("WANDB_API_KEY", 40 * "0")
    monkeypatch.setattr(module, "save", lambda _, *rest: saved.append(rest))
    own = world.artefact()
    assert module.main(["--results", "there", "--claims", str(world.folder), "-cd", str(tmp_path)]) == 0
    assert saved == [(Path("there"), (own,), [tmp_path])]
    nowhere = str(tmp_path / "nowhere")
    for typed, said in (
        (["--claims", nowhere], f"claims={nowhere}: expected a folder with folders of papers"),
        (["-cd", nowhere], f"-cd {nowhere}: no such folder"),
    ):
        with pytest.raises(SystemExit, match="2"):
            module.main(typed)
        assert said in capsys.readouterr().err
    assert len(saved) == 1


def test_runs_of_options_of_ones_own_are_found(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    option = tmp_path / "conf" / "algo" / "mine.yaml"
    option.parent.mkdir(parents=True)
    option.write_text("# @package _global_\nalgo:\n  name: mine\n")
    line = ("algo=mine", "seed=0")
    (job,) = compose_each([line], [tmp_path / "conf"])
    record = tmp_path / "results" / "runs" / config_hash(job.config) / "0"
    record.mkdir(parents=True)
    (record / "status.json").write_text(json.dumps({"status": "finished"}))
    assert script().hashes(tmp_path / "results", [tmp_path / "conf"])(line) == record.parent.name
    assert script().hashes(tmp_path / "results", [])(line) is None
