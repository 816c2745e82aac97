"""Locks: one holder at a time, taken over by one of many, whatever clocks say, and noticed by who lost it."""

import errno
import json
import multiprocessing
import os
import pwd
import shutil
import signal
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from cli import only_record, read, run
from made_up_locks import held_by_the_dead, held_elsewhere

from dpbench.step import PrivateStep
from dpbench.tracking import lock as locks
from dpbench.tracking.lock import Lock, LockLostError, LockRemovedError, State, Watch, is_held, look, take_away
from dpbench.tracking.process import Process
from dpbench.tracking.reading import Recorded
from dpbench.tracking.record import RunRecord
from dpbench.tracking.status import Status
from dpbench.tracking.tracker import Tracker
from dpbench.training import leases
from dpbench.training.leases import device_of_this_process, lease

FORK = multiprocessing.get_context("fork")
BEAT, STALE = 0.05, 0.4
CONTENDERS = 8


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "runs" / "0.lock"


@pytest.fixture
def quick(monkeypatch) -> None:
    """Signs of life come often, and locks are soon stale."""
    monkeypatch.setattr(locks, "BEAT", BEAT)
    monkeypatch.setattr(locks, "STALE", STALE)


def in_processes(count: int, target, *arguments) -> None:
    """Let so many processes do the same at once."""
    together = FORK.Barrier(count)
    processes = [FORK.Process(target=target, args=(together, *arguments)) for _ in range(count)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0] * count


# One at a time.


def test_of_many_processes_one_at_a_time_holds_it(path):
    inside, log = path.with_name("inside"), path.with_name("log")

    def contend(together) -> None:
        together.wait()
        for _ in range(20):
            lock = Lock(path)
            while not lock.acquire():
                time.sleep(0.001)
            os.close(os.open(inside, os.O_CREAT | os.O_EXCL))  # raises if somebody else is inside
            lock.check()
            with log.open("a") as stream:
                stream.write("x")
            inside.unlink()
            lock.release()

    in_processes(CONTENDERS, contend)
    assert len(log.read_text()) == CONTENDERS * 20
    assert [file.name for file in path.parent.iterdir()] == ["log"]  # neither locks nor claims stay


def test_a_held_lock_is_not_acquired_again_and_a_released_one_is(path):
    first, second = Lock(path), Lock(path)
    assert first.acquire()
    assert first.acquire()
    assert not second.acquire()
    assert is_held(path)
    first.release()
    first.release()
    assert second.acquire()
    second.check()
    second.release()
    assert list(path.parent.iterdir()) == []


@pytest.mark.parametrize("name", ["runs", "runs/aaaaaaaaaaaa"])
def test_a_link_that_leads_nowhere_is_an_error(tmp_path, name):
    link = tmp_path / name
    link.parent.mkdir(exist_ok=True)
    link.symlink_to(tmp_path / "purged")
    with pytest.raises(FileExistsError):
        Lock(tmp_path / "runs/aaaaaaaaaaaa/0.lock").acquire()
    outcome = run(tmp_path)
    assert outcome.code == 1 if name == "runs" else outcome.code == 0
    assert ("no lock can be made for" in outcome.out) == (name == "runs")


@pytest.mark.parametrize(
    "of_it", [{"attempt": "x"}, {"attempt": None}, {"token": "**/"}, {"token": 3}, {"token": None}, None], ids=str
)
def test_what_no_lock_has_written_is_as_one_that_has_not_come_to_writing(path, of_it):
    path.parent.mkdir()
    who = {"pid": 7, "token": "a" * 32, "attempt": 1}
    path.write_text(json.dumps([who] if of_it is None else {**who, **of_it}) + "\n")
    seen = look(path)
    assert (seen.token, seen.attempt, seen.claims) == ("unwritten", 1, 0)
    assert not Lock(path).acquire()


def test_a_lock_that_cannot_be_taken_away_stays_and_is_an_error_of_nobody(path, monkeypatch):
    def full(*_: object) -> bool:
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    lock = Lock(path)
    assert lock.acquire()
    with monkeypatch.context() as patch:
        patch.setattr(locks, "take_away", full)
        lock.release()
    assert not lock.held
    assert path.exists()


# Holders who have gone.


@pytest.mark.parametrize("leave", [held_elsewhere, held_by_the_dead])
def test_a_stale_lock_is_taken_over_by_exactly_one_of_many(path, leave, quick):
    leave(path)
    log = path.with_name("log")

    def contend(together) -> None:
        watch, lock = Watch(path), Lock(path)
        together.wait()
        turns = 0
        while turns < 60:
            if log.exists():  # who has it lives, however rarely it gets to say so
                locks.STALE, turns = 5 * STALE, turns + 1
            if watch.look() == State.STALE:
                watch.take_away()
            if not lock.held and lock.acquire():
                with log.open("a") as stream:
                    stream.write("x")
            time.sleep(BEAT / 10)
        together.wait()  # who has it keeps it until all others have had their chance
        lock.release()

    in_processes(CONTENDERS, contend)
    assert log.read_text() == "x"


def test_without_looking_once_more_under_the_claim_two_would_hold_it(path, monkeypatch):
    held_elsewhere(path)
    seen = look(path)
    assert take_away(path, seen)
    first = Lock(path)
    assert first.acquire()
    # A second one, who saw the same lock but comes late, leaves the new one alone.
    assert not take_away(path, seen)
    first.check()
    # The mutant trusts what it saw.
    with monkeypatch.context() as patch:
        patch.setattr(locks, "look", lambda _: seen)
        assert take_away(path, seen)
    second = Lock(path)
    assert second.acquire()
    assert first.held  # as it believes, until it looks
    with pytest.raises(LockLostError):
        first.check()
    first.release()
    second.check()
    second.release()


def test_a_process_of_this_machine_that_has_ended_is_gone_at_once(path):
    held_by_the_dead(path)
    assert look(path).process.gone()
    assert Watch(path).look() == State.STALE
    lock = Lock(path)
    assert lock.acquire()
    assert look(path).attempt == 2
    lock.release()


def test_a_process_is_more_than_its_number():
    me = Process.this()
    assert not me.gone()
    assert replace(me, started="1").gone()  # the number was given out again
    assert not replace(me, started="1", machine="another").gone()  # nothing is known of other machines
    assert not replace(me, started="1", machine="").gone()
    assert Process.read({"pid": "many"}).pid == 0


def test_a_killed_child_that_nobody_has_asked_after_is_gone(path):
    process = FORK.Process(target=time.sleep, args=(60,))
    process.start()
    _, started = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[:20:19]
    of_child = replace(Process.this(), pid=process.pid, started=started)
    assert not of_child.gone()
    os.kill(process.pid, signal.SIGKILL)
    while not of_child.gone():  # a zombie, which has its number still
        time.sleep(0.01)
    process.join()


# Signs of life, and clocks.


def test_a_holder_that_lives_is_left_alone_whatever_its_file_says_of_the_time(path, quick, monkeypatch):
    patience = 2 * STALE
    monkeypatch.setattr(locks, "STALE", patience)  # a sign of life may have to wait for a core
    lock = Lock(path)
    assert lock.acquire()
    watch, start, signs = Watch(path), time.monotonic(), set()
    while len(signs) < 5 or time.monotonic() < start + 2 * patience:
        os.utime(path, (0, 0))  # a clock that is decades late
        assert watch.look() == State.HELD
        signs.add(watch.seen.content)
        time.sleep(BEAT / 2)
    lock.release()
    assert watch.look() == State.FREE


def test_a_holder_without_signs_of_life_is_stale_whatever_its_file_says_of_the_time(path, quick):
    held_elsewhere(path)
    watch = Watch(path)
    start = time.monotonic()
    while watch.look() == State.HELD:
        later = time.time() + 10**6
        os.utime(path, (later, later))
        time.sleep(BEAT / 2)
    assert time.monotonic() - start >= STALE


def test_one_who_slept_does_not_take_others_for_gone(path, monkeypatch):
    held_elsewhere(path)
    now = [0.0]
    monkeypatch.setattr(locks.time, "monotonic", lambda: now[0])
    watch = Watch(path)
    watch.look()
    now[0] += 10**6
    assert watch.look() == State.HELD
    for _ in range(int(locks.STALE / locks.BEAT)):
        now[0] += locks.BEAT
        state = watch.look()
    assert state == State.STALE


@pytest.mark.parametrize(("share", "takes"), [(0.4, True), (0.6, False)])
def test_one_who_stands_still_under_a_claim_gives_it_up(path, monkeypatch, share, takes):
    """After half of what makes a claim stale: nobody else takes it for one whose maker has gone before that."""
    held_elsewhere(path)
    seen, glance = look(path), locks.look
    now = [0.0]

    def slow(path):
        now[0] += share * locks.STALE
        return glance(path)

    monkeypatch.setattr(locks, "look", slow)
    monkeypatch.setattr(locks.time, "monotonic", lambda: now[0])
    assert take_away(path, seen) == takes
    assert [file.name for file in path.parent.iterdir()] == ([] if takes else [path.name])


def test_a_claim_whose_maker_has_gone_holds_up_nobody_for_good(path, quick):
    held_by_the_dead(path)
    claim = path.with_name(f"{path.name}.{look(path).token}.1")
    claim.touch()
    watch, lock = Watch(path), Lock(path)
    assert watch.look() == State.HELD
    assert not lock.acquire()
    while watch.look() == State.HELD:
        time.sleep(BEAT / 2)
    assert watch.take_away()
    assert lock.acquire()
    lock.release()
    assert list(path.parent.iterdir()) == []


def test_a_lock_is_not_released_under_the_claim_of_another(path):
    """Who has looked once more under it is about to remove the lock, and would remove that of the next holder."""
    lock = Lock(path)
    assert lock.acquire()
    claim = path.with_name(f"{path.name}.{look(path).token}.1")
    claim.touch()
    lock.release()
    assert not lock.held
    assert sorted(path.parent.iterdir()) == [path, claim]


def test_a_lock_that_was_made_and_not_yet_written_is_held_until_it_is_stale(path, quick):
    path.parent.mkdir()
    path.touch()
    assert not Lock(path).acquire()
    watch = Watch(path)
    while watch.look() == State.HELD:
        time.sleep(BEAT / 2)
    assert watch.take_away()


# Locks that are lost.


def take_over(path: Path) -> None:
    """As another machine would: the lock of the one who stood still goes, another one comes."""
    assert take_away(path, look(path))
    held_elsewhere(path)


def test_who_has_lost_a_lock_sees_it_by_itself_and_leaves_the_new_one_alone(path, quick):
    lock = Lock(path)
    assert lock.acquire()
    seen = look(path)
    path.unlink()
    held_elsewhere(path)
    while not lock.lost:
        time.sleep(BEAT / 2)
    with pytest.raises(LockLostError, match="process 7 on far took this run over"):
        lock.check()
    after = look(path)
    lock.release()
    assert look(path) == after != seen


def test_who_finds_its_lock_removed_takes_nobody_for_its_holder(path):
    lock = Lock(path)
    assert lock.acquire()
    path.unlink()
    with pytest.raises(LockRemovedError, match="its lock was removed while it was under way"):
        lock.check()
    assert lock.lost
    held_elsewhere(path)  # it has one now
    with pytest.raises(LockLostError, match="process 7 on far took this run over"):
        lock.check()
    lock.release()


def test_who_has_lost_a_lock_writes_nothing_more_to_the_record(tmp_path):
    record = RunRecord(tmp_path, "0" * 12, 0)
    assert record.lock.acquire()
    record.start({}, {})
    take_over(record.lock.path)
    before = {file: file.read_bytes() for file in record.folder.iterdir()}
    writes = (
        lambda: record.start({}, {}),
        lambda: record.write("summary.json", {}),
        lambda: record.append_metrics({}),
        lambda: record.set_status(Status.FINISHED),
    )
    for write in writes:
        with pytest.raises(LockLostError):
            write()
    assert {file: file.read_bytes() for file in record.folder.iterdir()} == before
    record.lock.release()


def test_a_run_that_was_taken_over_stops_and_says_so(tmp_path, monkeypatch):
    original = PrivateStep.take

    def stands_still(self, batch):
        if self.steps == 1:
            take_over(next(tmp_path.rglob("0.lock")))
        return original(self, batch)

    monkeypatch.setattr(PrivateStep, "take", stands_still)
    # What the other one comes to is not waited for here.
    monkeypatch.setattr("dpbench.launch.rounds._wait", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    ended = []
    monkeypatch.setattr(Tracker, "finish", lambda self, summary, *, succeeded: ended.append(succeeded))
    outcome = run(tmp_path)
    assert ended == [False]
    assert "stopped, nothing more is recorded: process 7 on far took this run over" in outcome.out
    record = only_record_of(tmp_path)
    assert read(record, "status.json") == {"status": "running"}
    assert not (record / "summary.json").exists()
    assert not (record / "metrics.jsonl").exists()
    assert look(next(tmp_path.rglob("0.lock"))).process.host == "far"


def counted_steps(patch: pytest.MonkeyPatch, at: int, do: Callable[[], object]) -> list[int]:
    """Does something within the step that follows so many, once; returns the steps that runs begin with."""
    original, begun, done = PrivateStep.take, list[int](), list[int]()

    def take(self, batch):
        if self.steps == 0:
            begun.append(self.steps)
        if self.steps == at and not done:
            done.append(at)
            do()
        return original(self, batch)

    patch.setattr(PrivateStep, "take", take)
    return begun


@pytest.mark.parametrize("gone", ["lock", "results"])
def test_a_run_whose_lock_was_removed_fails_and_is_not_begun_again_by_the_same_command(tmp_path, monkeypatch, gone):
    results = tmp_path / "results"

    def remove() -> None:
        next(results.rglob("0.lock")).unlink() if gone == "lock" else shutil.rmtree(results)

    begun = counted_steps(monkeypatch, 1, remove)
    outcome = run(results)
    assert outcome.code == 1
    assert begun == [0]
    said = f"its lock was removed while it was under way ({only_record(results)}.lock)"
    assert outcome.error() == f"failed: {said}"
    assert f"  stopped: {said}\n" in outcome.out
    assert read(only_record(results), "status.json") == {"status": "failed", "reason": said}
    assert run(results).code == 0  # which was typed anew
    assert not list(results.rglob("*.lock"))


def test_a_run_that_another_process_took_over_and_finished_keeps_its_record(tmp_path, monkeypatch):
    assert run(tmp_path / "other").code == 0

    def finish() -> None:
        record = next(tmp_path.glob("results/runs/*/0"))
        shutil.rmtree(record)
        only_record(tmp_path / "other").rename(record)
        record.with_name("0.lock").unlink()

    begun = counted_steps(monkeypatch, 1, finish)
    outcome = run(tmp_path / "results")
    assert (outcome.code, begun) == (0, [0])
    (name,) = (path.name for path in only_record(tmp_path / "results").parent.iterdir())
    assert name == "0"


def only_record_of(results: Path) -> Path:
    next(results.rglob("0.lock")).rename(results / "0.lock")
    return only_record(results)


def test_a_record_left_running_without_a_living_lock_is_an_interrupted_one(tmp_path):
    record = RunRecord(tmp_path, "0" * 12, 0)
    assert record.lock.acquire()
    record.start({}, {})
    assert Recorded.read(record.folder).status == "running"
    record.lock.release()
    assert Recorded.read(record.folder).status == "interrupted"
    held_by_the_dead(record.lock.path)
    assert Recorded.read(record.folder).status == "interrupted"
    record.lock.path.unlink()
    held_elsewhere(record.lock.path)
    assert Recorded.read(record.folder).status == "running"


def test_a_job_that_was_queued_again_outlives_the_lock_of_its_former_self(path, quick, monkeypatch):
    held_elsewhere(path)
    locks.outlive(path)
    assert look(path) is None
    lock = Lock(path)
    assert lock.acquire()
    monkeypatch.setattr(locks, "STALE", 60 * STALE)
    locks.outlive(path)  # one sign of life is enough
    lock.check()
    lock.release()


# GPUs.


def test_processes_share_gpus_as_little_as_they_can(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid=f"gpu-{index}"))
    held = [lease(tmp_path) for _ in range(5)]
    assert [index for index, _ in held] == [0, 1, 0, 1, 0]
    held[3][1].release()
    held[0][1].release()
    assert [lease(tmp_path)[0] for _ in range(2)] == [0, 1]

    log = tmp_path / "log"

    def contend(together) -> None:
        together.wait()
        index, lock = lease(tmp_path / "other")
        with log.open("a") as stream:
            stream.write(str(index))
        together.wait()
        lock.release()

    in_processes(4, contend)
    assert sorted(log.read_text()) == ["0", "0", "1", "1"]


def test_a_user_without_a_name_gets_a_gpu_too(tmp_path, monkeypatch):
    """As in a container, whose user may have no entry in passwd."""

    def nobody(uid: int) -> None:
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    for name in ("LOGNAME", "USER", "LNAME", "USERNAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", nobody)
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid=f"gpu-{index}"))
    assert leases._leased.__wrapped__() == 0


def test_a_device_that_was_named_is_not_leased(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr("dpbench.training.leases.lease", lambda _: pytest.fail("leased"))
    assert device_of_this_process("cpu") == torch.device("cpu")
    assert device_of_this_process("cuda:3") == torch.device("cuda:3")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert device_of_this_process("auto") == torch.device("cuda")
