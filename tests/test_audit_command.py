"""python -m dpbench.audit: what it prints, what it keeps, and what it refuses."""

import errno
import json
import math
import sys
from dataclasses import asdict, replace
from io import StringIO

import pytest
from helpers import composed
from hydra.core.global_hydra import GlobalHydra
from mutants import missing_clip
from rich.console import Console

from dpbench.audit.__main__ import main
from dpbench.audit.page import print_audit
from dpbench.audit.result import Audit, Finding
from dpbench.audit.settings import AuditSettings, audit_hash
from dpbench.config import compose_jobs, config_hash
from dpbench.data import ImageDataset
from dpbench.tracking.reading import read_audits

SMALL = ("audit.runs=60", "audit.canaries=200", "audit.steps=3", "device=cpu")


def command(capsys, tmp_path, *arguments):
    try:
        code = main([f"results_dir={tmp_path}", *arguments])
    finally:
        GlobalHydra.instance().clear()
    return code, *capsys.readouterr()


def test_command_prints_and_keeps_what_it_found(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["audit"])
    code, out, _ = command(capsys, tmp_path, "algo=disk", "eps=4", *SMALL)
    assert code == 0
    assert "consistent with the claim" in out
    assert "95 % confidence" in out
    (file,) = tmp_path.glob("audits/*/audit.json")
    kept = json.loads(file.read_text())
    assert kept["verdict"] == "consistent with the claim"
    (job,) = compose_jobs(["algo=disk", "eps=4", "device=cpu"], multirun=False)
    assert kept["run"] == config_hash(job.config)  # whose numbers the page shows beside it
    assert list(read_audits(tmp_path)) == [kept]
    assert kept["settings"]["runs"] == 60
    assert len(kept["findings"]) == 4
    assert sum(finding["risk"] for finding in kept["findings"]) == pytest.approx(0.05)
    assert all(finding["eps_at_least"] <= finding["claimed_eps"] <= 4 for finding in kept["findings"])


def test_an_audit_that_breaks_off_is_no_violation(capsys, tmp_path, monkeypatch):
    def broken(*_):
        raise RuntimeError("no such kernel")

    monkeypatch.setattr("dpbench.audit.__main__.audit", broken)
    code, out, err = command(capsys, tmp_path, "algo=dpsgd", *SMALL)
    assert code == 3
    assert "RuntimeError: no such kernel" in err
    assert "violat" not in out
    assert not list(tmp_path.glob("audits/*/audit.json"))


def test_data_that_can_not_be_read_are_named_in_a_line(capsys, tmp_path, monkeypatch):
    def forbidden(*_, **__):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(ImageDataset, "load", forbidden)
    code, _, err = command(capsys, tmp_path, "data.root=/nowhere", *SMALL)
    assert (code, err) == (2, "error: data.root=/nowhere: can't be read (Permission denied)\n")


def test_audits_are_named_by_what_their_result_hangs_on():
    config, settings = composed("algo=dpsgd", "eps=4"), AuditSettings()
    others = [replace(settings, **{name: value}) for name, value in vary(settings).items()]
    named = [audit_hash(config, one) for one in (settings, *others)]
    named += [audit_hash(composed("algo=dpsgd", line), settings) for line in ("eps=5", "seed=1")]
    assert len(set(named)) == len(named)
    elsewhere = composed("algo=dpsgd", "eps=4", "device=cpu", "results_dir=elsewhere")
    assert audit_hash(elsewhere, settings) == audit_hash(config, settings)


def vary(settings):
    """Another value for each setting."""
    return {name: value / 2 if isinstance(value, float) else value + 1 for name, value in asdict(settings).items()}


@pytest.mark.parametrize(
    ("factor", "says"),
    [
        (math.inf, "not even a hundredth of the noise would be noticed; more runs of the step (audit.runs) would"),
        (1.234, "noise too small by a factor of 1.23 would be noticed in about half of all audits"),
    ],
)
def test_how_much_too_little_noise_an_audit_notices_is_said(factor, says):
    finding = Finding("a step", "a model", 1e-5, 0.01, 1.0, 0.5, False, {"notices_noise_too_small_by": factor})
    shown = StringIO()
    print_audit(Audit(0.95, (finding,)), Console(file=shown, width=200))
    assert f"a step, a model: {says}\n" in shown.getvalue()


def test_command_says_where_no_proof_covers_the_claim(capsys, tmp_path):
    code, out, _ = command(capsys, tmp_path, "algo=dicesgd", *SMALL)
    unproven = "un-clipped gradients come back in later steps"
    assert code == 0
    assert f"NOT CERTIFIED: {unproven}. No proof covers the claimed eps" in " ".join(out.split())
    (file,) = tmp_path.glob("audits/*/audit.json")
    assert json.loads(file.read_text())["uncertified"] == unproven


def test_command_says_what_is_violated(capsys, tmp_path, monkeypatch):
    missing_clip(monkeypatch)
    code, out, _ = command(capsys, tmp_path, *SMALL)
    assert code == 1
    assert "violates the claim" in out
    (file,) = tmp_path.glob("audits/*/audit.json")
    assert json.loads(file.read_text())["verdict"] == "violates the claim"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("eps=inf", "eps=inf: promises nothing"),
        ("eps=1,2", "an audit is of one"),
        ("plan=true", "plan=true: an audit prints no plan, it would run; leave it out"),
        ("audit.runs=3", "audit.runs=3: expected a whole number >= 10"),
        ("audit.runs=x", "audit.runs=x: expected a whole number"),
        ("audit.confidence=1", "audit.confidence=1: expected a number in (0, 1)"),
        ("audit.canaries=1", "audit.canaries=1: expected a whole number from 4"),
        ("audit.steps=0", "audit.steps=0: expected a whole number > 0"),
        ("audit.steps=10000001", "audit.steps=10000001: expected a whole number > 0, at most 10000000"),
        ("audit.rus=3", "audit.rus=3: no such setting; audit has runs, canaries, steps, confidence"),
        ("audit.runs", "audit.runs: expected key=value"),
        ("privacy.noise_multiplier=2", "privacy.noise_multiplier=2: expected null"),
        ("privacy=as_published", "privacy.published=poisson_rdp: expected null"),
        ("algo=dikc", "algo=dikc: expected one of"),
        ("--no-such-flag", "--no-such-flag"),
        ("dataset=mnist data.root=/nonexistent", "data.root=/nonexistent: no such folder; set data.download=true"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(capsys, tmp_path, arguments, said):
    code, _, err = command(capsys, tmp_path, *arguments.split())
    assert code == 2
    assert err.count("\n") == 1
    assert said in err
    assert list(tmp_path.rglob("audit.json")) == []


def test_help_shows_every_setting_with_its_default(capsys, tmp_path):
    code, out, _ = command(capsys, tmp_path, "--help")
    assert code == 0
    for name in ("runs=1000", "canaries=2000", "steps=50", "confidence=0.95"):
        assert f"audit.{name}" in out
