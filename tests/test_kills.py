"""Processes that are killed or told to end, and go on until they have finished, as if nothing had happened."""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from cli import environment, only_record, read, run, status
from helpers import ALGORITHMS
from resuming import LONGER, SLOWLY, DropoutMLP, carried_out, checkpoints, kill_at, outcome, resumed_at, tiny, whole

from dpbench.config.schema import CheckpointTimes

MUCH = ("disk", "dcsgd_e", "dp_ftrl")


def forked(work: Callable[[], object]) -> int:
    """Do something in a process of its own, which knows all that this one does; how that ended."""
    child = os.fork()
    if child == 0:
        try:
            work()
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def killed(config, results, point):
    return forked(lambda: (kill_at(point), carried_out(config, results, checkpoint=CheckpointTimes(every_steps=2))))


def killed_and_finished(config, results, points):
    """The folder of a run whose processes were killed at these points, one after the other."""
    ends = [killed(config, results, point) for point in points]
    assert ends == [-signal.SIGKILL] * len(points)
    assert forked(lambda: carried_out(config, results)) == 0
    (folder,) = results.glob("runs/*/0")
    return folder


@pytest.mark.parametrize(
    "algo", [name if name in MUCH else pytest.param(name, marks=pytest.mark.slow) for name in ALGORITHMS]
)
def test_an_algorithm_survives_kills_at_random_points(algo, tmp_path):
    config, draws = tiny(f"algo={algo}"), random.Random(algo)
    points = [draws.randint(1, 22) for _ in range(6)] if algo in MUCH else [draws.randint(20, 45), draws.randint(1, 30)]
    undisturbed = whole(config, tmp_path)  # first, as the others inherit what it imports
    folder = killed_and_finished(config, tmp_path, points)
    assert len(resumed_at(folder)) >= 1  # one that was killed before its first checkpoint began anew
    assert not list(folder.glob("*checkpoint*"))
    assert outcome(folder) == undisturbed


@pytest.mark.slow
@pytest.mark.parametrize("point", range(1, 70, 3))
def test_a_run_with_dropout_survives_a_kill_at_every_point(point, tmp_path):
    config = tiny("algo=lp_dpadam", "averaging=exponential")
    config.model = DropoutMLP()
    folder = killed_and_finished(config, tmp_path, [point, 15])
    assert outcome(folder) == whole(config, tmp_path)


def begun(results: Path, *arguments: str) -> subprocess.Popen[str]:
    """A command in a process of its own, which has written its first checkpoint."""
    command = [sys.executable, "-c", SLOWLY, f"results_dir={results}", *LONGER, *arguments]
    process = subprocess.Popen(
        command,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # Jobs in the background of a shell ignore SIGINT, and what they start inherits that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    end = time.monotonic() + 120
    while not list(results.glob("runs/*/*/checkpoint-*.pt")):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end
        time.sleep(0.01)
    return process


def ended(process: subprocess.Popen[str], how: signal.Signals) -> tuple[int, str]:
    process.send_signal(how)
    _, err = process.communicate(timeout=60)
    return process.returncode, err


@pytest.mark.parametrize("module", ["run", "reproduce", "audit", "privacy"])
def test_an_interruption_while_libraries_are_imported_is_a_line(tmp_path, module):
    (tmp_path / "hydra.py").write_text("import time; print('importing', flush=True); time.sleep(60)")
    process = subprocess.Popen(
        [sys.executable, "-m", f"dpbench.{module}", f"results_dir={tmp_path / 'results'}"],
        env=environment(tmp_path),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "importing\n"
    assert ended(process, signal.SIGINT) == (130, "\ninterrupted; nothing was begun\n")
    assert not (tmp_path / "results").exists()


def finished(results: Path, *arguments: str) -> Path:
    done = run(results, *arguments, settings=LONGER)
    assert done.code == 0
    assert "goes on after step" in done.out
    return only_record(results)


def of_command(results: Path) -> dict[str, object]:
    assert run(results, settings=LONGER).code == 0
    return outcome(only_record(results))


def test_a_process_that_gets_sigterm_ends_with_a_checkpoint_and_goes_on(tmp_path):
    process = begun(tmp_path / "parts", "checkpoint.every_steps=3")
    code, err = ended(process, signal.SIGTERM)
    assert (code, err) == (143, "interrupted; finished work is kept, and the same command goes on from there\n")
    record = only_record(tmp_path / "parts")
    assert read(record, "status.json") == {"status": "interrupted", "reason": "by SIGTERM"}
    steps = read(record, "summary.json")["steps"]
    assert checkpoints(record)[-1] == f"checkpoint-{steps:08d}.pt"
    assert outcome(finished(tmp_path / "parts")) == of_command(tmp_path / "whole")


@pytest.mark.slow
def test_a_process_that_gets_sigint_ends_with_a_checkpoint_and_goes_on(tmp_path):
    process = begun(tmp_path / "parts", "checkpoint.every_steps=3")
    code, err = ended(process, signal.SIGINT)
    assert code == 130
    assert "once more ends at once" in err
    assert read(only_record(tmp_path / "parts"), "status.json")["reason"] == "by the user"
    assert outcome(finished(tmp_path / "parts")) == of_command(tmp_path / "whole")


@pytest.mark.slow
def test_a_process_that_is_killed_goes_on(tmp_path):
    process = begun(tmp_path / "parts", "checkpoint.every_steps=3")
    time.sleep(random.Random(0).random())
    code, _ = ended(process, signal.SIGKILL)
    assert code == -signal.SIGKILL
    (record,) = (tmp_path / "parts").glob("runs/*/0")  # beside which its lock is left
    assert status(record) == "running"
    assert outcome(finished(tmp_path / "parts")) == of_command(tmp_path / "whole")
