"""plan=true: what a command line would run, and what it would cost."""

import json
import re
import shutil

import pytest
from cli import SMALL, STEPS, raise_after, run

from dpbench.cli import preview
from dpbench.config import compose_jobs, config_hash
from dpbench.training import estimate
from dpbench.training.budget import budget


def test_a_plan_times_each_kind_of_step_once(tmp_path, monkeypatch):
    run(tmp_path, "plan=true")  # which measures the machine, where that was not done yet
    timed = []
    monkeypatch.setattr(estimate, "_timed", {})
    monkeypatch.setattr(estimate, "seconds_of_step", lambda config, size: timed.append(config.algo["name"]) or 1.0)
    grid = ("eps=inf", "optim.lr=0.1,0.5", "seed=0,1", "epochs=0.1,0.2")
    assert run(tmp_path, "-m", "algo=dpsgd,disk", *grid, "plan=true").code == 0
    assert sorted(timed) == ["disk", "dpsgd"]
    models = ("eps=inf", "model=linear,mlp", "batch_size=64,128")
    assert run(tmp_path, "-m", "algo=dpsgd", *models, "plan=true").code == 0
    assert len(timed) == 5  # one of the four was known


def test_a_plan_prints_hash_steps_noise_multiplier_and_time_and_writes_no_run(tmp_path):
    outcome = run(tmp_path / "results", "eps=2", "seed=7", "plan=true")
    config = compose_jobs([*SMALL, "eps=2", "seed=7"], multirun=False)[0].config
    assert (outcome.code, outcome.err) == (0, "")
    shown = next(line for line in outcome.out.splitlines() if config_hash(config) in line)
    multiplier = f"{budget(config).noise_multiplier:.4f}"
    assert re.search(rf"{config_hash(config)} +7 +{STEPS} +0\.04454 +{multiplier} +\d+ s +to run", shown)
    assert re.search(r"^Training takes (less than a second|about \d+ s) .* nothing was run", outcome.out, re.MULTILINE)
    assert not (tmp_path / "results").exists()


def test_a_plan_is_refused_where_a_file_stands_in_place_of_the_results(tmp_path):
    (tmp_path / "file").write_text("")
    assert run(tmp_path / "file", "plan=true").error() == f"results_dir={tmp_path / 'file'}: is no folder; name another"


def test_a_plan_says_what_is_left_of_a_run(tmp_path):
    with pytest.MonkeyPatch.context() as patch:
        raise_after(patch, 2, KeyboardInterrupt())
        assert run(tmp_path, "eps=inf", "checkpoint.every_steps=2").code == 130
    assert "goes on after step 2" in run(tmp_path, "eps=inf", "plan=true").out
    assert "to run" in run(tmp_path, "eps=inf", "plan=true", "force=true").out
    assert run(tmp_path, "eps=inf").code == 0
    assert "Nothing is left to run" in run(tmp_path, "eps=inf", "plan=true").out


def test_a_plan_says_which_run_would_be_refused_since_it_was_seen(tmp_path):
    line = ("eps=8", "privacy.secure_noise=true", "evaluation.every_steps=1")
    with pytest.MonkeyPatch.context() as patch:
        raise_after(patch, 2, KeyboardInterrupt())
        assert run(tmp_path, *line).code == 130
    assert "goes on after step " in run(tmp_path, *line, "plan=true").out
    for checkpoint in tmp_path.rglob("*.pt"):
        checkpoint.unlink()
    planned = run(tmp_path, *line, "plan=true")
    assert (planned.code, "refused, for metrics of it were seen" in planned.out) == (0, True)
    assert "Nothing is left to run" in planned.out
    assert "to run" in run(tmp_path, *line, "plan=true", "force=true").out
    assert re.search(r"metrics of step [12] are published", run(tmp_path, *line).err)


@pytest.mark.parametrize("stages", [("clip=none",), ("algo=dcsgd_p",), ("algo=adp",)])
def test_plans_of_runs_without_noise(tmp_path, stages):
    outcome = run(tmp_path, "eps=inf", "plan=true", *stages)
    assert (outcome.code, outcome.err) == (0, "")
    assert "to run" in outcome.out


def test_a_plan_says_which_runs_no_proof_covers(tmp_path):
    outcome = run(tmp_path, "-m", "algo=dpsgd,dicesgd", "eps=1,inf", "optim.lr=1", "plan=true")
    (told,) = (line for line in outcome.out.splitlines() if line.startswith("NOT CERTIFIED: "))
    assert told.endswith(" algo=dicesgd eps=1 optim.lr=1")
    assert "NOT CERTIFIED" not in run(tmp_path, "eps=1", "plan=true").out


def test_a_plan_tells_the_eps_that_runs_spend_where_it_is_not_the_one_asked_for(tmp_path):
    planned = run(tmp_path, "-m", "eps=1,2", "privacy=as_published,poisson", "plan=true")
    said = [line for line in planned.out.splitlines() if line.startswith("accounting differs, ")]
    assert len(said) == 2
    for eps, line in zip(("1", "2"), said, strict=True):
        assert line.endswith(f" eps={eps} privacy=as_published")
        ran = " ".join(run(tmp_path, f"eps={eps}", "privacy=as_published").out.split())
        (told,) = re.findall(r"accounting differs, eps=.*? as published .*? by what is run \(.*?\)", ran)
        assert line.startswith(told)
        (summary,) = (json.loads(path.read_text()) for path in tmp_path.glob("runs/*/0/summary.json"))
        assert f"eps={summary['eps']:.4g} by what is run" in line
        shutil.rmtree(tmp_path / "runs")


def test_a_plan_refuses_what_a_run_would_refuse(tmp_path):
    outcome = run(tmp_path, "privacy.noise_multiplier=0.1", "plan=true")
    assert outcome.code == 2
    assert outcome.error().startswith("privacy.noise_multiplier=0.1: ")


def test_a_plan_of_a_large_model_needs_neither_its_weights_nor_data_nor_its_time(tmp_path, monkeypatch):
    """A step of RoBERTa on 1,000 samples takes minutes on a CPU: its time follows from that of small ones."""
    monkeypatch.setattr(preview, "seconds_of_training", pytest.fail)
    root = f"data.root={tmp_path / 'none'}"
    outcome = run(tmp_path, "dataset=sst2", "model=roberta_base", root, "device=cpu", "plan=true", settings=())
    assert (outcome.code, outcome.err) == (0, "")
    said = " ".join(outcome.out.split())
    assert "not here: data sst2; " in said
    fetched = "a run fetches them from the Hugging Face hub, as does: hf download FacebookAI/roberta-base"
    assert f"not here: weights FacebookAI/roberta-base; {fetched}" in said
    assert "large models estimated from operation counts; nothing was run." in said


def test_a_small_model_of_pretrained_weights_is_timed_without_them(tmp_path):
    tiny = (
        "model.width=24",
        "model.image_size=32",
        "model.heads=3",
        "model.depth=1",
        "model.pretrained=deit_tiny_patch16_224",
    )
    outcome = run(tmp_path, "dataset=digits", "model=vit_tiny", *tiny, "plan=true", settings=("batch_size=16",))
    assert outcome.code == 0
    assert "not here: weights deit_tiny_patch16_224; " in " ".join(outcome.out.split())
    assert "guessed" not in outcome.out
