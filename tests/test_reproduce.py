"""python -m dpbench.reproduce, on made-up claims about runs of a second."""

import json
import random
import re
import shlex
import signal
import subprocess
import sys
import time
from contextlib import redirect_stderr, redirect_stdout
from html import unescape
from io import StringIO
from pathlib import Path

import pytest
import torch
from cli import Outcome, environment, forget_logging, records
from hydra.core.global_hydra import GlobalHydra
from made_up_papers import SEARCH, TABLE, claims
from markupsafe import escape

from dpbench import reproduce
from dpbench.config import compose_each
from dpbench.files import read_json
from dpbench.launch import rounds
from dpbench.launch.launcher import Launcher, LauncherError
from dpbench.reproduction import launching, smoke
from dpbench.tracking.lock import Lock
from dpbench.training.job_record import record_of

pytestmark = pytest.mark.usefixtures("known_speed")
ALWAYS = ("paper=adp", "device=cpu", "tracker=disabled")


def run(folder: Path, *arguments: str, always: tuple[str, ...] = ALWAYS) -> Outcome:
    out, err = StringIO(), StringIO()
    where = [f"claims={folder / 'claims'}", f"results_dir={folder / 'results'}", f"data.root={folder}"]
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.setattr(sys, "argv", ["reproduce"])
        forget_logging(patch)
        try:
            code = reproduce.main([*where, *always, *arguments])
        finally:
            GlobalHydra.instance().clear()
    return Outcome(code, out.getvalue(), err.getvalue(), folder / "results")


def finished(results: Path) -> dict[str, tuple[int, float]]:
    """Of every finished run, which file says so, and its accuracy."""
    found = {}
    for folder in records(results):
        status = folder / "status.json"
        if read_json(status).get("status") == "finished":  # there may be none yet, of a run under way
            accuracy = json.loads((folder / "summary.json").read_text())["test_accuracy"]["final"]
            found[str(folder.relative_to(results))] = (status.stat().st_mtime_ns, accuracy)
    return found


def test_everything_missing_is_run_and_judged_and_never_again(tmp_path):
    own = "claims: [{says: ours, higher: {method: new}, lower: {method: old}, own: true}]\n"
    claims(tmp_path, table_1=TABLE + own, table_2=SEARCH)
    first = run(tmp_path)
    assert first.code == 0
    assert "Nothing is left that can be run here." in first.out
    assert "5 trained cells: 5 missing." in first.out
    found = finished(first.results)
    assert len(found) in (10, 11)  # four cells of two seeds; two further candidates; the winner's second seed
    last, ours = first.out.splitlines()[-2:]
    assert last.startswith("Claims: ")
    assert "not run" not in last
    assert "order" not in last
    assert ours.startswith("dpbench's own claims: 1 order ")
    again = run(tmp_path)
    assert (again.code, finished(again.results)) == (0, found)
    assert "0 runs ended, 0 failed." in again.out
    assert "5 trained cells: 5 done." in run(tmp_path, "plan=true").out


def test_a_plan_is_refused_where_a_file_stands_in_place_of_the_results(tmp_path):
    claims(tmp_path, table_1=TABLE)
    (tmp_path / "results").write_text("")
    assert run(tmp_path, "plan=true").error() == f"results_dir={tmp_path / 'results'}: is no folder; name another"


def test_a_plan_runs_nothing(tmp_path):
    claims(tmp_path)
    planned = run(tmp_path, "plan=true", "artefact=table_1")
    assert planned.code == 0
    assert "method new, eps 8" in planned.out
    assert "arithmetic" in planned.out
    assert "What can be run here: 8 runs" in planned.out
    assert not planned.results.exists()


def test_a_budget_ends_and_says_what_would_be_next(tmp_path):
    claims(tmp_path, table_1=TABLE)
    outcome = run(tmp_path, "budget=1s")
    assert outcome.code == 0
    assert finished(outcome.results) == {}
    assert "8 runs did not fit into the budget. Next is adp/table_1, method " in outcome.out
    assert "budget=1m is enough for one." in outcome.out


def test_commands_on_pages_of_ones_own_claims_say_where_these_are(tmp_path, monkeypatch, capsys):
    claims(tmp_path, table_1=TABLE)
    options = tmp_path / "my options"
    options.mkdir()
    monkeypatch.chdir(tmp_path)
    outcome = run(tmp_path, "-cd", str(options), "budget=1s")
    places = f"-cd 'my options' claims={tmp_path / 'claims'} results_dir={tmp_path / 'results'}"
    (line,) = re.findall(r"^    (python .*)$", (outcome.results / "adp/table_1.md").read_text(), re.MULTILINE)
    assert line == f"python -m dpbench.reproduce paper=adp artefact=table_1 {places}"
    assert f"`python -m dpbench.reproduce {places}` runs what" in (outcome.results / "scorecard.md").read_text()
    assert str(escape(f"python -m dpbench.reproduce {places}")) in (outcome.results / "index.html").read_text()
    assert reproduce.main([*shlex.split(line)[3:], "plan=true", *ALWAYS[1:]]) == 0
    assert "What can be run here: 8 runs" in capsys.readouterr().out
    assert run(tmp_path, "-cd", str(options)).code == 0
    page = unescape((outcome.results / "index.html").read_text())
    commands = re.findall(r"<dt>Run it</dt><dd><code>(.*)</code>", page)
    assert len(commands) == 4
    where = f"-cd 'my options' results_dir={tmp_path / 'results'}"
    assert all(command.startswith(f"python -m dpbench.run {where} ") for command in commands)


def test_what_is_not_here_is_named_once(tmp_path):
    claims(tmp_path, table_1=TABLE.replace("dataset=digits", "dataset=mnist"))
    outcome = run(tmp_path)
    assert outcome.code == 0
    assert "not run: needs data mnist (4 cells)" in outcome.out
    assert finished(outcome.results) == {}


def test_a_run_that_fails_is_told_and_repeated_only_on_request(tmp_path, monkeypatch):
    claims(tmp_path, table_1=TABLE)
    with monkeypatch.context() as patch:
        patch.setattr("dpbench.training.execution.train", _breaks)
        outcome = run(tmp_path)
    assert outcome.code == 1
    assert outcome.err.count("RuntimeError: broken") == 8
    assert run(tmp_path).code == 0
    assert finished(outcome.results) == {}
    assert run(tmp_path, "retry=true").code == 0
    assert len(finished(outcome.results)) == 8


def test_a_search_whose_runs_make_other_releases_is_not_run(tmp_path):
    claims(tmp_path, table_2=SEARCH.replace("optim.lr=", "privacy.search_runs=8 batch_size=32,64 optim.lr="))
    outcome = run(tmp_path)
    assert outcome.code == 1
    assert "the runs of a search must make the same releases, and batch_size=32 " in outcome.err
    assert finished(outcome.results) == {}


def _breaks(*_, **__):
    raise RuntimeError("broken")
    yield


def test_an_interrupted_command_still_says_what_there_is(tmp_path, monkeypatch):
    claims(tmp_path, table_1=TABLE)
    carried = []

    def interrupted(jobs, console):
        if carried:
            raise KeyboardInterrupt
        carried.append(jobs)
        execute(jobs, console)

    execute = launching.execute
    monkeypatch.setattr(launching, "execute", interrupted)
    outcome = run(tmp_path)
    assert outcome.code == 130
    assert "2 runs ended, 0 failed." in outcome.out
    assert "Claims: " in outcome.out
    assert "interrupted; finished work is kept" in outcome.err
    assert len(finished(outcome.results)) == 2


def test_an_interrupted_launcher_still_says_what_there_is(tmp_path, monkeypatch):
    claims(tmp_path, table_1=TABLE)

    def interrupted(launcher, lines):
        carry(launcher, lines[:3])
        raise KeyboardInterrupt

    carry = Launcher.__call__
    monkeypatch.setattr(Launcher, "__call__", interrupted)
    outcome = run(tmp_path, "launcher=basic")
    assert outcome.code == 130
    assert "3 runs ended, 0 failed." in outcome.out
    assert len(finished(outcome.results)) == 3


def test_a_launcher_of_hydra_gives_the_same_results(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("here", "launched"):
        claims(tmp_path / name, table_1=TABLE)
    here = run(tmp_path / "here")
    launched = run(tmp_path / "launched", "launcher=basic")
    assert launched.code == 0
    assert "8 runs ended, 0 failed." in launched.out
    one, other = ({run: accuracy for run, (_, accuracy) in finished(o.results).items()} for o in (here, launched))
    assert one == pytest.approx(other)
    assert {path.name for path in tmp_path.iterdir()} == {"here", "launched"}


def test_a_launcher_that_fails_is_one_error_and_no_failure_of_its_runs(tmp_path, monkeypatch):
    def fail(*_):
        raise LauncherError("no machine is left")

    monkeypatch.setattr(Launcher, "__call__", fail)
    claims(tmp_path, table_1=TABLE)
    outcome = run(tmp_path, "launcher=basic")
    assert outcome.code == 1
    assert "0 runs ended, 0 failed." in outcome.out
    assert outcome.error() == "the launcher failed; what is recorded stays: no machine is left"
    assert "Nothing is left" not in outcome.out
    assert records(outcome.results) == []


def test_a_run_that_another_command_is_at_comes_last(tmp_path, monkeypatch):
    claims(tmp_path, table_1=TABLE)
    others, order = [], []
    carry, wait = launching.execute, rounds._wait

    def begins(jobs, console):
        if not others:
            others.append(Lock(record_of(jobs[0]).lock.path))
            assert others[0].acquire()
        order.extend(record_of(job).lock.path for job in jobs)
        carry(jobs, console)

    def waits(*arguments):
        others[0].release()
        wait(*arguments)

    monkeypatch.setattr(launching, "execute", begins)
    monkeypatch.setattr(rounds, "_wait", waits)
    outcome = run(tmp_path)
    assert outcome.code == 0
    assert "waiting for others to end 1 of these runs" in outcome.out
    assert "8 runs ended, 0 failed." in outcome.out
    assert len(finished(outcome.results)) == 8
    assert order[-1] == others[0].path


def test_runs_of_a_launcher_may_go_to_devices_that_are_not_here(tmp_path, monkeypatch):
    claims(tmp_path, table_1=TABLE)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    given = {"always": ("paper=adp", "tracker=disabled", "device=cuda")}
    here = run(tmp_path, "plan=true", **given)
    assert here.code == 2
    assert here.error().startswith("device=cuda: ")
    there = run(tmp_path, "plan=true", "launcher=basic", **given)
    assert (there.code, there.err) == (0, "")
    assert "What can be run here: 8 runs" in there.out
    # The device is a run's own matter, and this launcher's runs are here.
    launched = run(tmp_path, "launcher=basic", "budget=1h", **given)
    assert launched.code == 1
    assert "device=cuda: " in launched.err


OWN = {
    "algo/mine.yaml": "# @package _global_\ndefaults:\n  - override /filter: median\n  - _self_\nalgo:\n  name: mine\n",
    "filter/median.yaml": "defaults:\n  - /schema/filter@_here_: filters_of_claims.Median\n  - _self_\nwindow: 3\n",
    "filters_of_claims.py": """\
from dataclasses import dataclass

from dpbench.filters import Filter


@dataclass
class Median(Filter):
    window: int = 3

    def __post_init__(self):
        self._last = []

    def apply(self, gradient):
        import torch

        self._last = [gradient.clone(), *self._last][: self.window]
        return torch.stack(self._last).median(dim=0).values

    def state_dict(self):
        return {"last": [gradient.clone() for gradient in self._last]}

    def load_state_dict(self, state):
        self._last = [gradient.clone() for gradient in state["last"]]
""",
}


@pytest.mark.parametrize("launcher", [(), ("launcher=basic",)])
def test_cells_may_have_options_of_ones_own(tmp_path, monkeypatch, launcher):
    """They are planned, run, found again and judged; and run anew once their defaults change."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name, text in OWN.items():
        path = tmp_path / "own" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    folder = claims(tmp_path, table_1=TABLE.replace("new: algo=disk", "new: algo=mine"))
    (folder / "adp").rename(folder / "beyond")
    given = {"always": ("device=cpu", "tracker=disabled")}
    refused = run(tmp_path, **given)
    assert refused.code == 2
    assert "algo=mine: expected one of " in refused.err
    own = ("-cd", str(tmp_path / "own"), *launcher)
    outcome = run(tmp_path, *own, **given)
    assert (outcome.code, outcome.err) == (0, "")
    assert "8 runs ended, 0 failed." in outcome.out
    found = finished(outcome.results)
    assert len(found) == 8
    again = run(tmp_path, *own, **given)
    assert "4 trained cells: 4 done." in again.out
    assert finished(again.results) == found
    (tmp_path / "own/filter/median.yaml").write_text(OWN["filter/median.yaml"].replace("3", "5"))
    assert "4 trained cells: 2 done, 2 missing." in run(tmp_path, *own, "plan=true", **given).out
    assert run(tmp_path, "-cd", str(tmp_path / "none"), **given).error().startswith("-cd ")


@pytest.mark.parametrize(
    ("typed", "says"),
    [
        ("artefact=table_9", "artefact=table_9: expected one of table_1, table_2"),
        ("launcher=no_such", "launcher=no_such: expected one of "),
        ("hydra.launcher.n_jobs=2", "hydra.launcher.n_jobs=2: expected a launcher, such as launcher=joblib"),
        ("device=tpu", "device=tpu: expected auto, cpu, cuda or cuda:<index>"),
        ("device=cpu,cuda", "device=cpu,cuda: expected one value"),
        ("micro_batch=1,2", "micro_batch=1,2: expected one value"),
        ("optim.lr=3", "optim.lr=3: expected one of paper,"),
        ("claims=/nowhere", "claims=/nowhere/adp: expected a folder with files of tables and figures"),
    ],
)
def test_bad_input_is_refused_in_a_sentence(tmp_path, typed, says):
    claims(tmp_path)
    where = [f"results_dir={tmp_path / 'results'}", *ALWAYS]
    keys = {typed.partition("=")[0]}
    given = [line for line in (f"claims={tmp_path / 'claims'}", *where) if line.partition("=")[0] not in keys]
    err = StringIO()
    with redirect_stderr(err), redirect_stdout(StringIO()):
        code = reproduce.main([*given, typed])
    assert (code, err.getvalue().count("\n")) == (2, 1)
    assert err.getvalue().startswith(f"error: {says}")
    assert not (tmp_path / "results").exists()


def test_help_is_printed():
    out = StringIO()
    with redirect_stdout(out):
        assert reproduce.main(["--help"]) == 0
    for key in ("paper", "artefact", "budget", "plan", "retry", "launcher", "smoke", "results_dir"):
        assert f"\n  {key} " in out.getvalue()


# A few steps of everything.

NO_DATA = TABLE.replace("dataset=digits model=linear", "dataset=cifar100 model=linear").replace("optim.lr=0.5", "")
COMPUTED = "title: Computed\nkind: computed\nreason: by hand\nsource: made_up.md 7\nvalues: not printed\n"


def test_smoke_goes_on_after_an_error_of_a_loader(tmp_path, monkeypatch):
    def breaks(config, device):
        raise ValueError("cut short\nhere")

    monkeypatch.setattr(smoke, "load_splits", breaks)
    claims(tmp_path, table_1=TABLE, table_2=NO_DATA)
    outcome = run(tmp_path, "smoke=true")
    assert outcome.code == 1
    assert "adp/table_1: failed: ValueError: cut short here" in outcome.out
    assert "adp/table_2: ran, " in outcome.out


def test_smoke_tries_everything_and_leaves_nothing(tmp_path):
    text = TABLE.replace("dataset=digits model=linear", "dataset=sst2 model=bert_base").replace("optim.lr=0.5", "")
    claims(tmp_path, table_1=TABLE, table_2=NO_DATA, table_3=COMPUTED, table_4=text)
    outcome = run(tmp_path, "smoke=true")
    assert outcome.code == 0, outcome.out
    lines = [line for line in outcome.out.splitlines() if line.startswith("adp/")]
    assert lines[0].startswith("adp/table_1: ran, method ")
    assert "made-up data, for it needs data cifar100" in lines[1]
    assert lines[2] == "adp/table_3: computed, not trained; not tried"
    assert "made-up data, for it needs data sst2; random weights, for it needs weights" in lines[3]
    assert not outcome.results.exists()


def test_smoke_makes_up_rows_of_numbers():
    (job,) = compose_each([("dataset=adult", "dataset.train_size=20", "dataset.test_size=5", "batch_size=5")])
    made_up = smoke.made_up_splits(job.config.dataset)
    for split, size in ((made_up.train, 20), (made_up.test, 5)):
        rows, labels = split.take(slice(0, size))
        assert (rows.shape, rows.dtype, labels.shape) == ((size, 104), torch.float32, (size,))
        assert labels.max() <= 1


def test_smoke_takes_a_few_steps_of_a_run_that_no_cell_is(tmp_path, monkeypatch):
    claims(tmp_path, table_1=TABLE)
    tried = []
    execute = smoke.execute
    monkeypatch.setattr(smoke, "execute", lambda jobs, *rest: (tried.extend(jobs), execute(jobs, *rest)))
    run(tmp_path, "smoke=true")
    (job,) = tried
    assert (job.config.steps, job.config.batch_size) == (smoke.STEPS, smoke.BATCH)
    assert "results" not in Path(job.config.results_dir).parts


def test_smoke_says_what_failed(tmp_path):
    claims(tmp_path, table_1=TABLE, table_2=TABLE.replace("optim.lr=0.5", "optim.lr=-1"))
    outcome = run(tmp_path, "smoke=true")
    assert outcome.code == 1
    assert "adp/table_2: failed: optim.lr=-1: expected a number > 0, at most 1e+38" in outcome.out
    assert "1 failed." in outcome.out


# Killed at any moment.


def started(folder: Path) -> subprocess.Popen[bytes]:
    where = [f"claims={folder / 'claims'}", f"results_dir={folder / 'results'}", *ALWAYS]
    command = [sys.executable, "-m", "dpbench.reproduce", *where]
    return subprocess.Popen(command, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


@pytest.mark.slow
def test_nothing_is_lost_or_run_twice_by_a_command_that_is_killed(tmp_path):
    for name in ("undisturbed", "killed"):
        claims(tmp_path / name, table_1=TABLE.replace("epochs=0.2", "epochs=5"))
    assert started(tmp_path / "undisturbed").wait() == 0
    wanted = {run: accuracy for run, (_, accuracy) in finished(tmp_path / "undisturbed" / "results").items()}
    draws, results = random.Random(0), tmp_path / "killed" / "results"
    seen: dict[str, tuple[int, float]] = {}
    kills = 0
    while True:
        process = started(tmp_path / "killed")
        before = len(seen)
        while process.poll() is None and len(finished(results) if results.exists() else ()) == before:
            time.sleep(0.05)  # until it has got somewhere
        time.sleep(draws.uniform(0, 2))
        if process.poll() is not None:
            break
        process.send_signal(signal.SIGKILL)
        process.wait()
        kills += 1
        found = finished(results)
        assert seen.items() <= found.items(), "a finished run was run again"
        seen = found
    assert process.returncode == 0
    assert kills >= 2
    found = finished(results)
    assert seen.items() <= found.items()
    assert {run: accuracy for run, (_, accuracy) in found.items()} == wanted
