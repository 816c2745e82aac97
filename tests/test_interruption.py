"""Runs that are told to end by a signal: after their step, with a checkpoint, and once more at once."""

import os
import signal
import threading
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from cli import read, run, status
from resuming import carried_out, checkpoints, outcome, resumed_at, signalled, tiny, whole

from dpbench.errors import Terminated
from dpbench.training.interruption import Interruption


@pytest.fixture
def heeded() -> Iterator[None]:
    """SIGINT interrupts, also where a shell started these tests in the background, which ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("heeded")
@pytest.mark.parametrize(
    ("which", "error", "reason"),
    [(signal.SIGTERM, Terminated, "by SIGTERM"), (signal.SIGINT, KeyboardInterrupt, "by the user")],
)
def test_a_signal_ends_a_run_after_the_step_with_a_checkpoint(which, error, reason, tmp_path):
    config, handlers = tiny("algo=disk"), [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)]
    with pytest.MonkeyPatch.context() as patch:
        signalled(patch, 4, which)
        with pytest.raises(error):
            carried_out(config, tmp_path)
    (folder,) = tmp_path.glob("runs/*/0")
    assert read(folder, "status.json") == {"status": "interrupted", "reason": reason}
    assert read(folder, "ledger.json")["releases"][0]["count"] == 5
    assert checkpoints(folder) == ["checkpoint-00000005.pt"]
    assert [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)] == handlers
    carried_out(config, tmp_path)
    assert resumed_at(folder) == [5]
    assert outcome(folder) == whole(config, tmp_path)


@pytest.mark.usefixtures("heeded")
def test_a_second_interrupt_ends_a_run_at_once(tmp_path):
    with pytest.MonkeyPatch.context() as patch:
        signalled(patch, 4, signal.SIGINT, signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            carried_out(tiny(), tmp_path)
    (folder,) = tmp_path.glob("runs/*/0")
    assert read(folder, "status.json") == {"status": "interrupted", "reason": "by the user"}
    assert read(folder, "summary.json")["steps"] == 4
    assert checkpoints(folder) == []


@pytest.mark.usefixtures("heeded")
@pytest.mark.parametrize(
    ("told", "at_once"),
    [((signal.SIGTERM, signal.SIGINT), False), ((signal.SIGTERM, signal.SIGINT, signal.SIGINT), True)],
    ids=["one", "two"],
)
def test_after_sigterm_it_is_the_second_interrupt_that_ends_a_run_at_once(told, at_once, tmp_path, capfd):
    with pytest.MonkeyPatch.context() as patch:
        signalled(patch, 4, *told)
        with pytest.raises(KeyboardInterrupt if at_once else Terminated):
            carried_out(tiny(), tmp_path)
    (folder,) = tmp_path.glob("runs/*/0")
    assert checkpoints(folder) == ([] if at_once else ["checkpoint-00000005.pt"])
    assert "once more ends at once" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("minutes", "error", "words"), [(240, SystemExit, "-1"), (0, Exception, "timed-out")], ids=["again", "for good"]
)
@pytest.mark.parametrize("told", [(signal.SIGUSR2,), (signal.SIGTERM, signal.SIGUSR2)], ids=["alone", "after SIGTERM"])
def test_submitit_queues_a_job_again_once_its_run_has_written_a_checkpoint(minutes, error, words, told, tmp_path):
    environments = pytest.importorskip("submitit.core.job_environment")
    utils = pytest.importorskip("submitit.core.utils")
    requeued: list[int] = []
    job = utils.DelayedSubmission(len)
    job._timeout_min = minutes
    cluster = SimpleNamespace(global_rank=0, _requeue=requeued.append)
    handler = environments.SignalHandler(cluster, None, job).checkpoint_and_try_requeue
    before, config = signal.signal(signal.SIGUSR2, handler), tiny()
    try:
        with pytest.MonkeyPatch.context() as patch:
            signalled(patch, 4, *told)
            with pytest.raises(error, match=words):
                carried_out(config, tmp_path)
        assert signal.getsignal(signal.SIGUSR2) == handler
    finally:
        signal.signal(signal.SIGUSR2, before)
    assert len(requeued) == (minutes > 0)
    (folder,) = tmp_path.glob("runs/*/0")
    assert read(folder, "status.json") == {"status": "interrupted", "reason": "by its cluster"}
    assert checkpoints(folder) == ["checkpoint-00000005.pt"]
    carried_out(config, tmp_path)
    assert resumed_at(folder) == [5]
    assert outcome(folder) == whole(config, tmp_path)


def test_handlers_of_others_are_left_alone():
    seen: list[int] = []
    before = signal.signal(signal.SIGUSR2, lambda number, frame: seen.append(number))
    try:
        interruption = Interruption()
        with interruption:
            os.kill(os.getpid(), signal.SIGUSR2)
        assert seen == [signal.SIGUSR2]
        assert interruption.reason is None
    finally:
        signal.signal(signal.SIGUSR2, before)


def test_ignored_signals_stay_ignored():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with Interruption():
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_run_in_another_thread_leaves_signals_alone(tmp_path):
    found = []
    thread = threading.Thread(target=lambda: found.append(carried_out(tiny(), tmp_path)))
    thread.start()
    thread.join()
    assert status(found[0][0][0]) == "finished"


def test_a_command_that_is_terminated_says_so_in_its_exit_code_and_begins_no_other_run(tmp_path, monkeypatch):
    with pytest.MonkeyPatch.context() as patch:
        signalled(patch, 1, signal.SIGTERM)
        outcome = run(tmp_path, "algo=dpsgd,disk", "-m")
    assert outcome.code == 143
    assert outcome.err == "interrupted; finished work is kept, and the same command goes on from there\n"
    assert len(list(tmp_path.glob("runs/*/0"))) == 1
    outcome = run(tmp_path, "algo=dpsgd,disk", "-m")
    assert outcome.code == 0
    assert "goes on after step 2 of 3" in outcome.out


@pytest.mark.usefixtures("heeded")
@pytest.mark.parametrize(
    ("typed", "at_once", "in_the_end"),
    [
        ((), "ends after this step, with a checkpoint", "and the same command goes on from there"),
        (
            ("force=true",),
            "ends after this step, and with force=true begins anew",
            "but with force=true the same command begins every run anew",
        ),
    ],
)
def test_what_the_same_command_would_do_is_said_as_it_is(typed, at_once, in_the_end, tmp_path, capfd):
    with pytest.MonkeyPatch.context() as patch:
        signalled(patch, 1, signal.SIGINT)
        outcome = run(tmp_path, *typed)
    assert outcome.code == 130
    assert capfd.readouterr().err == f"\ninterrupted: {at_once}; once more ends at once\n"
    assert outcome.err == f"interrupted; finished work is kept, {in_the_end}\n"
    assert ("goes on after step" in run(tmp_path, *typed).out) == (not typed)
