"""Sweeps that survive: workers that are killed, launchers that break, and other commands on the same folder."""

import csv
import importlib
import json
import os
import pkgutil
import random
import signal
import subprocess
import sys
import threading
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import fake_slurm
import pytest
import torch
from cli import SMALL, environment, read, records, run, status
from joblib.externals.loky import get_reusable_executor
from made_up_locks import held_by_the_dead, held_elsewhere
from omegaconf import OmegaConf
from resuming import resumed_at
from rich.console import Console

from dpbench.config import compose_jobs, in_grammar
from dpbench.launch import launcher, rounds
from dpbench.launch.forced import give_up_if_forced_and_seen
from dpbench.launch.job import train_job
from dpbench.launch.launcher import Launcher, LauncherError
from dpbench.launch.rounds import carry_through
from dpbench.tracking import lock as locks
from dpbench.tracking.lock import Lock
from dpbench.tracking.process import Process
from dpbench.tracking.provenance import provenance
from dpbench.tracking.published import Published
from dpbench.tracking.reading import Recorded
from dpbench.tracking.status import Status
from dpbench.training.job_record import fail, record_of


def needs(plugin: str) -> pytest.MarkDecorator:
    """Skips a test where a launcher's plugin is not installed; `pip install .[sweeps]` brings all of them."""
    installed = {module.name for module in pkgutil.iter_modules(getattr(find("hydra_plugins"), "__path__", ()))}
    return pytest.mark.skipif(plugin not in installed, reason=f"{plugin} is not installed")


def find(name: str):
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError:
        return None


# Rounds, with a launcher of the test's own.


@pytest.fixture
def jobs(tmp_path: Path):
    return compose_jobs([*SMALL, f"results_dir={tmp_path}", "seed=0,1,2"], multirun=True)


def finish(job) -> None:
    record = record_of(job)
    assert record.lock.acquire()
    write_whole(record)
    record.lock.release()


def write_whole(record) -> None:
    record.start({"eps": 8.0, "algo": {"name": "disk"}}, {"started": "2026-01-01T00:00:00+00:00"})
    record.append_metrics({"step": 3, "epoch": 1.0, "test_accuracy": 0.5})
    record.write("ledger.json", {"delta": 1e-5, "releases": []})
    record.write("summary.json", {"test_accuracy": {"final": 0.5, "best": 0.5, "best_step": 3}, "eps": 8.0, "steps": 3})
    record.set_status(Status.FINISHED)


def kill(job) -> None:
    """What is left of a run whose process was killed."""
    record = record_of(job)
    record.start({}, {})
    held_by_the_dead(record.lock.path)


def carried(jobs, start) -> str:
    console = Console(record=True, width=200)
    carry_through(jobs, start, console)
    return console.export_text()


def recorded(job) -> Recorded:
    return Recorded.read(record_of(job).folder)


def outcomes(jobs) -> list[str]:
    return [recorded(job).status for job in jobs]


def test_what_was_killed_is_begun_again_and_what_was_not_begun_too(jobs):
    begun = []

    def start(batch):
        begun.append([job.config.seed for job in batch])
        if len(begun) == 1:
            finish(batch[0])
            kill(batch[1])  # and the third one was never reached
        else:
            list(map(finish, batch))
        return {}

    said = carried(jobs, start)
    assert begun == [[0, 1, 2], [1, 2]]
    assert outcomes(jobs) == ["finished"] * 3
    assert "killed, and begun again: " in said
    assert "seed=1, 1 of 4 attempts" in said


def test_a_note_that_nobody_lived_to_take_says_nothing_of_a_run_that_is_begun_now(jobs):
    """The command that had asked for the run was killed before it could say why the run did not start."""
    for job in jobs[:2]:
        record_of(job).refuse("no such data")
    begun = []

    def start(batch):
        begun.append([job.config.seed for job in batch])
        finish(batch[0])
        record_of(batch[1]).refuse("no such device")
        return {}

    carried(jobs[:2], start)
    assert begun == [[0, 1]]
    assert record_of(jobs[0]).take_refusal() is None
    assert record_of(jobs[1]).take_refusal() == "no such device"


@pytest.mark.parametrize("seen", [True, False])
def test_a_forced_run_that_was_seen_is_not_begun_again_by_itself(jobs, seen):
    """From its beginning, that is: what was seen would be released a second time."""
    list(map(finish, jobs[:1]))
    Published(3, "cpu").write(record_of(jobs[0]).folder)  # of an earlier life
    (job,) = [replace(job, config=replace(job.config, force=True)) for job in jobs[:1]]
    begun = []

    def start(batch):
        begun.append(len(batch))
        if len(begun) == 2:
            write_whole(record_of(job))
            return {}
        record = record_of(job)
        record.start({}, {"device": "cpu"})
        record.append_metrics({"step": 6, "epoch": 1.0, "test_accuracy": 0.5})
        record.write("ledger.json", {"eps": 3.0})
        held_by_the_dead(record.lock.path)
        time.sleep(0.02)
        if seen:
            Published(6, "cpu").write(record_of(job).folder)
        return {}

    carried([job], start)
    if seen:  # and it keeps what it has: what was spent, and where to go on without force=true
        kept = read(record_of(job).latest(), "ledger.json"), read(record_of(job).latest(), "provenance.json")
        assert kept == ({"eps": 3.0}, {"device": "cpu"})
        assert [line["step"] for line in Recorded.read(record_of(job).latest()).metrics] == [6]
    assert begun == ([1] if seen else [1, 1])
    assert recorded(job).status == "finished"  # by the first command
    latest = Recorded.read(record_of(job).latest())
    assert latest.status == ("failed" if seen else "finished")
    assert ("metrics of it were seen" in (latest.reason or "")) == seen


def test_a_forced_run_that_diverged_stays_as_it_ended(jobs):
    (job,) = [replace(job, config=replace(job.config, force=True)) for job in jobs[:1]]

    def start(batch):
        record = record_of(job)
        record.start({}, {})
        time.sleep(0.02)
        Published(6, "cpu").write(record.folder)
        record.set_status(Status.DIVERGED, "the loss is nan")
        return {}

    carried([job], start)
    assert (recorded(job).status, recorded(job).reason) == ("diverged", "the loss is nan")


@pytest.mark.parametrize(
    ("forced", "before", "after", "left"),
    [(True, False, True, 0), (True, True, False, 1), (True, False, False, 1), (False, False, True, 1)],
)
def test_a_forced_run_that_was_seen_is_not_begun_again_by_a_cluster(jobs, forced, before, after, left):
    job = replace(jobs[0], config=replace(jobs[0].config, force=forced))
    record = record_of(job)
    if before:  # of an earlier attempt
        record.folder.parent.mkdir(parents=True)
        Published(6, "cpu").write(record.folder)
        time.sleep(0.02)
    record.start({}, {})
    time.sleep(0.02)  # a clock may be as coarse as that
    if after:
        Published(6, "cpu").write(record.folder)
    assert len(give_up_if_forced_and_seen([job])) == left
    assert recorded(job).status == ("interrupted" if left else "failed")


def test_a_run_that_takes_its_workers_along_fails_and_the_others_finish(jobs):
    begun = []

    def start(batch):
        begun.append([job.config.seed for job in batch])
        list(map(kill if 1 in begun[-1] else finish, batch))
        return {}

    carried(jobs, start)
    # Twice beside others, which are not to pay for it; then each of them alone.
    assert begun == [[0, 1, 2], [0, 1, 2], [0], [1], [1], [2]]
    assert outcomes(jobs) == ["finished", "failed", "finished"]
    assert recorded(jobs[1]).reason.startswith("killed in 4 attempts")


def test_a_worker_that_was_told_to_end_takes_no_attempt_and_its_run_is_never_failed(jobs, monkeypatch):
    monkeypatch.setattr(rounds, "STOPS", 7)
    begun = []

    def start(batch):
        begun.append(len(batch))
        for job in batch:
            record = record_of(job)
            record.start({}, {})
            record.set_status(Status.INTERRUPTED, "told to end")
        return {}

    carried(jobs[:1], start)
    assert begun == [1] * 7
    assert outcomes(jobs[:1]) == ["interrupted"]


@pytest.mark.parametrize(("here", "raised"), [(True, True), (False, False)])
def test_a_signal_to_a_worker_does_not_interrupt_the_command(monkeypatch, here, raised):
    monkeypatch.setattr("dpbench.launch.job._of_hydra", lambda composed: composed)
    monkeypatch.setattr("dpbench.launch.job._train", lambda _: (_ for _ in ()).throw(KeyboardInterrupt))
    of_command = Process.this() if here else replace(Process.this(), pid=1)
    monkeypatch.setenv("WANDB_SERVICE", "of the command")
    with pytest.raises(KeyboardInterrupt) if raised else nullcontext():
        assert train_job(OmegaConf.create(), of_command, []) is None
    # W&B's service of the command may be on another machine.
    assert ("WANDB_SERVICE" in os.environ) == here


def test_a_record_names_the_command_and_not_the_worker_that_a_launcher_started(monkeypatch):
    recorded, command = [], ["python", "-m", "dpbench.run", "seed=0,1", "-m"]
    monkeypatch.setattr("dpbench.launch.job._of_hydra", lambda composed: composed)
    monkeypatch.setattr("dpbench.launch.job._train", lambda _: recorded.append(provenance(torch.device("cpu"))))
    monkeypatch.setattr(sys, "argv", ["worker", "/tmp/job"])
    train_job(OmegaConf.create(), replace(Process.this(), pid=1), command)
    assert recorded[0]["command"] == command
    assert provenance(torch.device("cpu"))["command"][-1] == "/tmp/job"  # of a process that works for itself


def test_an_error_outside_of_the_run_is_recorded_with_its_traceback(jobs):
    carried(jobs[:1], lambda _: {0: "Traceback ...\nValueError: no such module\n"})
    found = recorded(jobs[0])
    assert (found.status, found.reason) == ("failed", "ValueError: no such module")
    assert read(record_of(jobs[0]).folder, "status.json")["traceback"].startswith("Traceback")


def test_a_launcher_that_begins_nothing_is_given_up(jobs):
    begun = []
    carried(jobs, lambda batch: begun.append(len(batch)) or {})
    assert begun == [3] * rounds.FRUITLESS
    assert {recorded(job).reason for job in jobs} == {"its process ended 3 times before the run began"}


def test_what_failed_is_not_begun_again_by_this_command_but_by_the_next(jobs):
    def start(batch):
        fail(batch[0], "broken")
        return {}

    carried(jobs[:1], start)
    assert outcomes(jobs[:1]) == ["failed"]
    carried(jobs[:1], lambda batch: finish(batch[0]) or {})
    assert outcomes(jobs[:1]) == ["finished"]


def test_what_others_are_at_comes_last_and_their_record_counts(jobs, monkeypatch):
    monkeypatch.setattr(rounds, "LOOK", 0.01)
    other = record_of(jobs[0])
    assert other.lock.acquire()
    begun = []

    def start(batch):
        begun.append([job.config.seed for job in batch])
        list(map(finish, batch))

        return {}

    wait = rounds._wait

    def waits(*arguments):
        write_whole(other)
        other.lock.release()
        wait(*arguments)

    monkeypatch.setattr(rounds, "_wait", waits)
    said = carried(jobs, start)
    assert begun == [[1, 2]]
    assert outcomes(jobs) == ["finished"] * 3
    assert f"waiting for others to end 1 of these runs: process {os.getpid()} on " in said


def test_what_others_left_is_begun_here_once_they_have_gone(jobs, monkeypatch):
    monkeypatch.setattr(rounds, "LOOK", 0.01)
    monkeypatch.setattr(locks, "STALE", 0.2)
    monkeypatch.setattr(locks, "BEAT", 0.05)
    held_elsewhere(record_of(jobs[0]).lock.path)
    begun = []

    def start(batch):
        begun.append([job.config.seed for job in batch])
        list(map(finish, batch))
        return {}

    carried(jobs, start)
    assert begun == [[1, 2], [0]]


def test_nobody_waits_for_others_longer_than_there_is_time(jobs):
    held_elsewhere(record_of(jobs[0]).lock.path)
    carry_through(jobs[:1], lambda _: pytest.fail("begun"), Console(quiet=True), end=0)


def test_what_others_left_is_not_begun_here_without_time_for_it(jobs):
    kill(jobs[0])
    time_for = jobs[1:]
    begun = []

    def start(batch):
        begun.extend(batch)
        list(map(finish, batch))
        return {}

    late = carry_through(jobs, start, Console(quiet=True), fits=lambda job: job in time_for)
    assert (late, begun) == (jobs[:1], time_for)


def test_a_single_run_that_another_process_is_at_is_waited_for(tmp_path, monkeypatch):
    (job,) = compose_jobs([*SMALL, f"results_dir={tmp_path}"], multirun=False)
    other = Lock(record_of(job).lock.path)
    assert other.acquire()
    wait = rounds._wait

    def waits(*arguments):
        other.release()  # it was interrupted: this one carries on
        wait(*arguments)

    monkeypatch.setattr(rounds, "_wait", waits)
    outcome = run(tmp_path)
    assert outcome.code == 0
    assert "waiting for others to end 1 of these runs" in outcome.out
    assert [status(record) for record in records(tmp_path)] == ["finished"]


def test_sigterm_ends_the_wait_for_others_as_it_ends_runs(tmp_path, monkeypatch):
    (job,) = compose_jobs([*SMALL, f"results_dir={tmp_path}"], multirun=False)
    assert Lock(record_of(job).lock.path).acquire()
    monkeypatch.setattr(rounds, "LOOK", 0.01)
    monkeypatch.setattr(rounds.time, "sleep", lambda _: signal.raise_signal(signal.SIGTERM))
    outcome = run(tmp_path)
    assert outcome.code == 143
    assert outcome.err == "interrupted; finished work is kept, and the same command goes on from there\n"


@needs("hydra_submitit_launcher")
def test_a_launcher_that_cannot_work_is_an_error_in_one_line(tmp_path):
    slurm = Launcher(["hydra/launcher=submitit_slurm", f"results_dir={in_grammar(str(tmp_path))}"])
    with pytest.raises(LauncherError, match=r"sbatch|srun|cluster"):
        slurm([["algo=dpsgd"]])


def test_workers_on_this_machine_divide_its_cores(monkeypatch):
    monkeypatch.setattr(launcher, "cpu_count", lambda: 8)
    monkeypatch.setattr(launcher, "effective_n_jobs", lambda asked: 8 if asked == -1 else asked)
    monkeypatch.delenv(launcher.THREADS)
    joblib = {"_target_": "any", "n_jobs": -1}
    for asked, jobs, workers in ((-1, 3, 3), (-1, 20, 8), (4, 20, 4), (-1, 1, 2), (1, 5, 1)):
        settings = OmegaConf.create({**joblib, "n_jobs": asked})
        assert launcher._share_cores(settings, jobs) == jobs
        assert settings.n_jobs == workers  # each has 8 / workers threads by joblib
    assert launcher.THREADS not in os.environ
    local = {"_target_": "hydra_plugins.hydra_submitit_launcher.submitit_launcher.LocalLauncher", "cpus_per_task": 2}
    assert launcher._share_cores(OmegaConf.create(local), 10) == 4
    assert os.environ[launcher.THREADS] == "2"


@needs("hydra_submitit_launcher")
def test_a_sweep_is_sent_in_arrays_that_slurm_takes(tmp_path, monkeypatch):
    sent = []

    class Plugin:
        def launch(self, lines, initial_job_idx):
            sent.append((initial_job_idx, len(lines)))
            return [None] * len(lines)

    monkeypatch.setattr(launcher.Plugins, "instantiate_launcher", lambda *_, **__: Plugin())
    slurm = Launcher(["hydra/launcher=submitit_slurm", f"results_dir={in_grammar(str(tmp_path))}"])
    lines = [[f"seed={seed}"] for seed in range(2001)]
    assert slurm(lines) == [None] * 2001
    assert sent == [(0, 1000), (1000, 1000), (2000, 1)]


@pytest.mark.parametrize("further", [(), ("plan=true",)])
@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("hydra/launcher=nosuch", "hydra/launcher=nosuch: expected one of basic"),
        ("hydra.launcher.nosuch=3", "hydra.launcher.nosuch=3: no such setting; hydra/launcher=basic has none"),
        ("hydra.sweep.subdirs=x", "hydra.sweep.subdirs=x: no such setting; hydra.sweep has dir, subdir; did you mean"),
        ("hydra.output_subdir=[1]", "hydra.output_subdir=[1]: expected one text"),
        pytest.param(
            "hydra/launcher=joblib hydra.launcher.n_jobs=0",
            "hydra.launcher.n_jobs=0: expected a whole number other than 0",
            marks=needs("hydra_joblib_launcher"),
        ),
    ],
)
def test_a_launcher_that_is_not_there_is_refused_in_a_sentence(tmp_path, typed, said, further):
    outcome = run(tmp_path, "-m", "seed=0,1", *typed.split(), *further)
    assert outcome.code == 2
    assert outcome.error().startswith(said)
    assert not list(tmp_path.iterdir())


def test_a_launcher_that_can_not_be_made_is_told_of_in_a_sentence(tmp_path):
    """With a setting that it has not, which Hydra takes behind a plus sign."""
    outcome = run(tmp_path, "-m", "seed=0,1", "+hydra.launcher.foo.bar=1")
    assert outcome.code == 1
    assert "InstantiationException" in outcome.err
    assert "Traceback" not in outcome.out + outcome.err
    assert records(tmp_path) == []


@pytest.mark.parametrize(
    "launcher",
    [
        pytest.param("joblib", marks=needs("hydra_joblib_launcher")),
        pytest.param("slurm", marks=needs("hydra_submitit_launcher")),
    ],
)
def test_a_launcher_takes_a_sweep(tmp_path, launcher):
    outcome = run(tmp_path, f"hydra/launcher={launcher}")
    assert (outcome.code, outcome.error()) == (2, f"hydra/launcher={launcher}: takes a sweep; add -m")
    assert not list(tmp_path.iterdir())
    assert run(tmp_path, "hydra/launcher=basic", "plan=true").code == 0


def test_a_launcher_that_fails_is_one_error(tmp_path, monkeypatch):
    def fail(*_):
        raise LauncherError("no machine is left")

    monkeypatch.setattr(Launcher, "__call__", fail)
    outcome = run(tmp_path, "-m", "eps=3,4")
    assert outcome.code == 1
    assert outcome.error() == "the launcher failed; what is recorded stays: no machine is left"
    assert outcome.out.count(" not run") == 2
    assert str(tmp_path / "runs") not in outcome.out


@pytest.mark.parametrize("typed", ["seed=range(0,1000000000)", "seed=range(0,1000) batch_size=range(1,1000)"])
def test_a_sweep_without_end_is_refused_before_it_is_listed(tmp_path, typed):
    outcome = run(tmp_path, "-m", *typed.split(), "plan=true")
    assert outcome.code == 2
    assert outcome.error() == f"{typed.replace(' ', ', ')}: more than the 100,000 runs that a sweep may have"


# Processes of their own.

# Half a second or so of training, which writes down which run its process begins and ends.
TOLD = """
import os, time
from dataclasses import dataclass
from dpbench.filters import Filter

@dataclass
class Told(Filter):
    number: int = 0
    steps: int = 12
    breaks: int = -1

    def __post_init__(self):
        self._taken = 0

    def apply(self, gradient):
        self._taken += 1
        if self.number == self.breaks:
            raise RuntimeError("told to break")
        if self._taken == 1:
            self._tell("begun")
        time.sleep(0.05)
        return gradient

    def _tell(self, what):
        with open(os.environ["TOLD"], "a") as log:
            log.write(f"{what} {self.number} {os.getpid()}\\n")

    def state_dict(self):
        return {"taken": self._taken}

    def load_state_dict(self, state):
        self._taken = state["taken"]
"""
# Every process that finishes a record writes that down once it has.
WHEN_FINISHED = """
import os, sys
import importlib.abc, importlib.machinery

class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != "dpbench.tracking.record":
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        execute = spec.loader.exec_module

        def patched(module):
            execute(module)
            original = module.RunRecord.set_status

            def set_status(self, status, *rest):
                original(self, status, *rest)
                if status == "finished":
                    with open(os.environ["TOLD"], "a") as log:
                        log.write(f"finished {self.folder} {os.getpid()}\\n")

            module.RunRecord.set_status = set_status

        spec.loader.exec_module = patched
        return spec

sys.meta_path.insert(0, Finder())
"""
QUICK = ("privacy.accountant=rdp", "model=linear", "batch_size=128", "epochs=1", "device=cpu", "tracker=disabled")


class Commands:
    """Command lines in processes of their own that share one results folder."""

    def __init__(self, folder: Path) -> None:
        self.results = folder / "results"
        self.log = folder / "told"
        self.log.touch()
        conf = folder / "conf"
        (conf / "filter").mkdir(parents=True)
        (conf / "told.py").write_text(TOLD)
        (conf / "sitecustomize.py").write_text(WHEN_FINISHED)
        text = "defaults:\n  - /schema/filter@_here_: told.Told\n  - _self_\n"
        (conf / "filter" / "told.yaml").write_text(text)
        self.conf = conf
        self.environment = {
            **environment(conf),
            "TOLD": str(self.log),
        }

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "dpbench.run", "-cd", str(self.conf), f"results_dir={self.results}"]
        command += [*QUICK, "filter=told", "-m", *arguments]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        return subprocess.Popen(command, cwd=self.conf.parent, env=self.environment, **pipes)

    def told(self, what: str) -> list[tuple[str, int]]:
        """Runs and processes of which something was written down."""
        lines = [line.split() for line in self.log.read_text().splitlines()]
        return [(run, int(pid)) for said, run, pid in lines if said == what]


@pytest.fixture
def commands(tmp_path: Path) -> Commands:
    return Commands(tmp_path)


def table_of(out: str) -> list[str]:
    return [line.split()[0] for line in out.splitlines() if line.endswith("finished")]


@needs("hydra_joblib_launcher")
def test_of_three_runs_through_joblib_one_fails_is_listed_and_the_others_finish(commands, monkeypatch):
    for name, value in commands.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.syspath_prepend(commands.conf)
    sweep = ("-cd", str(commands.conf), "filter=told", "filter.number=0,1,2", "filter.breaks=1", "-m")
    outcome = run(commands.results, *sweep, "hydra/launcher=joblib", "hydra.launcher.n_jobs=2", settings=QUICK)
    get_reusable_executor().shutdown()
    assert outcome.code == 1
    assert outcome.err == "error: failed: RuntimeError: told to break (told.py, line 18) (filter.number=1)\n"
    found = {read_number(record): record for record in records(commands.results)}
    assert {number: status(record) for number, record in found.items()} == {0: "finished", 1: "failed", 2: "finished"}
    assert "Traceback" in read(found[1], "status.json")["traceback"]
    typed = [f"results_dir={commands.results}", *QUICK, *sweep, "hydra/launcher=joblib", "hydra.launcher.n_jobs=2"]
    for record in found.values():
        command = read(record, "provenance.json")["command"]
        assert command[-len(typed) :] == typed
        assert command[: -len(typed)] in (["dpbench"], ["python", "-m", "pytest"])  # and no worker of joblib's
    (path,) = commands.results.glob("sweeps/*/table.csv")
    assert [row["status"] for row in csv.DictReader(path.open())] == ["finished", "failed", "finished"]


def read_number(record: Path) -> int:
    (line,) = (line for line in (record / "config.yaml").read_text().splitlines() if line.startswith("  number: "))
    return int(line.split()[1])


@needs("hydra_joblib_launcher")
def test_sigterm_ends_the_workers_of_joblib_too(commands):
    command = commands.start("filter.number=0,1", "epochs=5000", "hydra/launcher=joblib", "hydra.launcher.n_jobs=2")
    try:
        while command.poll() is None and len(list(commands.results.rglob("metrics.jsonl"))) < 2:
            time.sleep(0.1)
        workers = {pid for _, pid in commands.told("begun")}
        assert len(workers - {command.pid}) == 2
        command.send_signal(signal.SIGTERM)
        out, err = command.communicate(timeout=120)
    finally:
        command.kill()
    assert (command.returncode, err.count("interrupted; ")) == (143, 1), out + err
    deadline = time.monotonic() + 60
    while any(map(is_alive, workers)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(map(is_alive, workers))


def is_alive(pid: int) -> bool:
    """Whether a process is there and has not ended."""
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


@pytest.mark.slow
def test_two_commands_at_the_same_time_share_the_runs_of_a_sweep(commands):
    both = [commands.start("filter.number=0,1,2,3", "fuse_seeds=false") for _ in range(2)]
    said = [command.communicate(timeout=300) for command in both]
    assert [command.returncode for command in both] == [0, 0], said
    for out, _ in said:
        assert table_of(out) == [f"filter.number={number}" for number in range(4)]
    finished = [run for run, _ in commands.told("finished")]
    assert len(finished) == len(set(finished)) == 4
    assert not list(commands.results.rglob("*.lock*"))


class Reader(threading.Thread):
    """Reads all records again and again, as a page of results does; what it can't read it keeps."""

    def __init__(self, results: Path) -> None:
        super().__init__()
        self.results = results
        self.unreadable: list[str] = []
        self.reads = 0
        self.stop = threading.Event()

    def run(self) -> None:
        while not self.stop.wait(0.02):
            for path in self.results.glob("runs/*/*/*.json*"):
                try:
                    lines = path.read_text()
                except FileNotFoundError:
                    continue
                self.reads += 1
                try:
                    if path.suffix == ".jsonl":
                        list(map(json.loads, lines.splitlines()))
                    elif path.name[0] != ".":
                        json.loads(lines)
                except ValueError as error:
                    self.unreadable.append(f"{path}: {error}")


def kill_workers(commands: Commands, command: subprocess.Popen[str], kills: int, seed: int) -> int:
    """Kill processes in the midst of a run, at random; how many were."""
    rng = random.Random(seed)
    killed: set[int] = set()
    while command.poll() is None and len(killed) < kills:
        time.sleep(rng.uniform(0.5, 3))
        working = {pid for _, pid in commands.told("begun")} - killed
        living = sorted(pid for pid in working if Path(f"/proc/{pid}").exists())
        if living:
            victim = rng.choice(living)
            killed.add(victim)
            os.kill(victim, signal.SIGKILL)
    return len(killed)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "count", "kills"),
    [
        pytest.param(
            ("hydra/launcher=joblib", "hydra.launcher.n_jobs=2"),
            40,
            8,
            id="joblib",
            marks=needs("hydra_joblib_launcher"),
        ),
        pytest.param(
            ("hydra/launcher=ray", "+hydra.launcher.ray.init.num_cpus=2"),
            10,
            3,
            id="ray",
            marks=needs("hydra_ray_launcher"),
        ),
        pytest.param(
            ("hydra/launcher=submitit_local",), 10, 3, id="submitit_local", marks=needs("hydra_submitit_launcher")
        ),
    ],
)
def test_all_runs_end_once_while_workers_are_killed_at_random(commands, settings, count, kills):
    numbers = ",".join(map(str, range(count)))
    reader = Reader(commands.results)
    reader.start()
    command = commands.start(f"filter.number={numbers}", *settings)
    output = []
    drain = threading.Thread(target=lambda: output.append(command.communicate(timeout=1500)))
    drain.start()
    killed = kill_workers(commands, command, kills, seed=1)
    drain.join()
    reader.stop.set()
    reader.join()
    out, err = output[0]
    assert command.returncode == 0, f"{out}\n{err}"
    assert killed == kills
    assert len(table_of(out)) == count
    assert [status(record) for record in records(commands.results)] == ["finished"] * count
    finished = [run for run, _ in commands.told("finished")]
    assert len(finished) == len(set(finished))
    assert len(commands.told("begun")) > count  # some were begun again
    assert reader.reads > 0
    assert reader.unreadable == []
    assert not list(commands.results.rglob("*.lock*"))


@needs("hydra_submitit_launcher")
@pytest.mark.slow
def test_a_job_of_slurm_that_is_told_to_end_is_queued_again_and_its_run_finishes(commands, tmp_path):
    fake_slurm.install(tmp_path / "bin")
    commands.environment["PATH"] = os.pathsep.join([str(tmp_path / "bin"), os.environ["PATH"]])
    command = commands.start("filter.number=0,1", "filter.steps=40", "hydra/launcher=slurm")
    while not commands.told("begun"):
        time.sleep(0.05)
        assert command.poll() is None, command.communicate()
    told = commands.told("begun")[0]
    os.kill(told[1], signal.SIGUSR2)
    out, err = command.communicate(timeout=600)
    assert command.returncode == 0, err
    assert table_of(out) == ["filter.number=0", "filter.number=1"]
    for record in records(commands.results):
        assert read(record, "provenance.json")["command"] == ["python", "-m", "dpbench.run", *command.args[3:]]
    # By another process, after the steps that the first one had taken.
    found = {f"{read_number(record)}": record for record in records(commands.results)}
    assert len(resumed_at(found[told[0]])) == 1
    assert len(commands.told("begun")) == len(commands.told("finished")) == 2
    assert len({pid for _, pid in [*commands.told("begun"), *commands.told("finished")]}) == 3
    script = (tmp_path / "bin" / "script").read_text()
    for line in ("--requeue", "--signal=USR2@120", "--time=240", "--gpus-per-node=1", "--array=0-1%2"):
        assert f"#SBATCH {line}\n" in script
    assert len(list((tmp_path / "bin").glob("job-*"))) == 1  # by the cluster, not by this command
