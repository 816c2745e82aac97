import errno
import multiprocessing
import os
import threading
import time
from dataclasses import replace
from multiprocessing.context import ForkProcess

import pytest
from helpers import composed
from rich.console import Console

import dpbench.training.budget
from dpbench.errors import UserError
from dpbench.privacy import Plan, Release, calibrate, calibrated, calibration
from dpbench.privacy.correlation import Tree
from dpbench.privacy.sampling import CYCLIC, SHUFFLED
from dpbench.training import calibrating
from dpbench.training.budget import is_known
from dpbench.training.calibrating import budgets

RUNS = [composed("privacy.accountant=rdp", "epochs=1", f"eps={eps}") for eps in (1, 2, 3)]


@pytest.fixture(autouse=True)
def _empty_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("DPBENCH_CACHE", str(tmp_path / "cache"))
    # pytest-xdist's thread is idle.
    monkeypatch.setattr(calibrating, "_can_fork", lambda: True)


@pytest.fixture
def calibrated_by(monkeypatch, tmp_path):
    """Process numbers of those that calibrate, one a line."""
    file = tmp_path / "processes"
    file.touch()

    def recorded(*args):
        with file.open("a") as lines:
            lines.write(f"{os.getpid()}\n")
        return calibrate(*args)

    monkeypatch.setattr(dpbench.training.budget, "calibrate", recorded)
    return lambda: [int(line) for line in file.read_text().split()]


def alone(monkeypatch, tmp_path):
    """Multipliers of the runs found one after the other."""
    monkeypatch.setenv("DPBENCH_CACHE", str(tmp_path / "other"))
    found = [calibrate(run.release_plan(), run.eps, run.delta_value, "rdp").noise_multiplier for run in RUNS]
    monkeypatch.setenv("DPBENCH_CACHE", str(tmp_path / "cache"))
    return found


def test_several_runs_are_calibrated_by_other_processes(calibrated_by, monkeypatch, tmp_path):
    want = alone(monkeypatch, tmp_path)
    assert not any(map(is_known, RUNS))
    found = budgets(RUNS, Console())
    assert [one.noise_multiplier for one in found] == want
    # Three calibrations elsewhere, then what this process finds in the cache.
    by = calibrated_by()
    assert by[3:] == [os.getpid()] * 3
    assert os.getpid() not in by[:3]
    assert all(map(is_known, RUNS))
    budgets(RUNS, Console())
    assert calibrated_by()[6:] == [os.getpid()] * 3


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core")
def test_several_processes_work_at_once(tmp_path):
    both = multiprocessing.get_context("fork").Barrier(2)

    def meet():
        both.wait(timeout=60)
        (tmp_path / str(os.getpid())).touch()

    with calibrating.calibrating([meet, meet], Console(), "nothing"):
        pass
    assert len(list(tmp_path.iterdir())) == 2


@pytest.fixture
def no_version_known():
    """Neither before a test nor after it."""
    calibration.arithmetic.cache_clear()
    yield
    calibration.arithmetic.cache_clear()


@pytest.mark.parametrize("changed", ["version", "digest_of", "discretisation"])
def test_what_was_calibrated_by_other_means_is_not_known(monkeypatch, no_version_known, changed):
    plan = Plan.of([Release(0.1, 1.0)] * 3)
    found = calibrate(plan, 3.0, 1e-5, "rdp")
    known = calibrated(plan, 3.0, 1e-5, "rdp")
    assert known is not None
    assert known.noise_multiplier == found.noise_multiplier
    monkeypatch.setattr(calibration, changed, lambda _: 0.5 if changed == "discretisation" else "0")
    calibration.arithmetic.cache_clear()
    assert calibrated(plan, 3.0, 1e-5, "rdp") is None


@pytest.mark.parametrize("module", ["calibration", "search"])
def test_all_that_an_account_is_made_of_tells_versions_apart(monkeypatch, no_version_known, module):
    read = []
    monkeypatch.setattr(calibration, "digest_of", lambda files: read.extend(file.name for file in files) or "0")
    calibration.arithmetic(f"dpbench.privacy.{module}")
    own = {"calibration.py", "accountants.py", "grouping.py", "plan.py", "correlation.py", "sampling.py", "tuning.py"}
    assert own | {f"{module}.py"} <= set(read)


def test_searches_are_known_once_they_were_calibrated():
    search = composed("privacy.search_runs=5", "epochs=1", "eps=4", "dataset=digits")
    assert not is_known(search)
    budgets([search], Console())
    assert is_known(search)


@pytest.mark.parametrize("override", ["eps=inf", "privacy.noise_multiplier=20", "privacy.published=adp_theorem"])
def test_what_is_given_or_follows_from_a_formula_is_known(override):
    assert is_known(composed("privacy=as_published", override))


def test_the_first_run_that_cannot_be_calibrated_is_named_and_the_others_are_kept():
    hopeless = composed("privacy=fixed_size", "eps=1e-9", "delta=1e-9", "epochs=1")
    with pytest.raises(UserError, match="eps=1e-09"):
        budgets([hopeless, *RUNS], Console())
    assert all(map(is_known, RUNS))


def test_a_killed_process_costs_only_time(monkeypatch, tmp_path):
    want = alone(monkeypatch, tmp_path)
    command = os.getpid()

    def killed(*args):
        return calibrate(*args) if os.getpid() == command else os._exit(9)

    monkeypatch.setattr(dpbench.training.budget, "calibrate", killed)
    assert [one.noise_multiplier for one in budgets(RUNS, Console())] == want


@pytest.mark.parametrize("granted", [0, 1])
def test_as_many_processes_calibrate_as_the_machine_grants(monkeypatch, tmp_path, granted):
    want, original, begun = alone(monkeypatch, tmp_path), ForkProcess.start, []

    def start(self):
        if len(begun) == granted:
            raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
        begun.append(self)
        original(self)

    monkeypatch.setattr(ForkProcess, "start", start)
    assert [one.noise_multiplier for one in budgets(RUNS, Console())] == want
    assert len(begun) == granted
    assert multiprocessing.active_children() == []


def test_an_interruption_ends_the_processes(monkeypatch):
    def endless(*args):
        time.sleep(600)

    def interrupted():
        raise KeyboardInterrupt

    monkeypatch.setattr(dpbench.training.budget, "calibrate", endless)
    monkeypatch.setattr(calibrating, "_import_compiler", interrupted)
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        budgets(RUNS, Console())
    assert multiprocessing.active_children() == []
    assert time.monotonic() - start < 60


def test_no_copy_is_made_of_a_process_with_threads(monkeypatch):
    monkeypatch.undo()
    done = threading.Event()
    thread = threading.Thread(target=done.wait)
    thread.start()
    try:
        assert not calibrating._can_fork()
    finally:
        done.set()
        thread.join()


# A plan of which every part decides what is calibrated.
ONE = Plan.of([Release(0.1, 1.0)] * 10, CYCLIC, 10)


@pytest.mark.parametrize(
    "other",
    [
        (replace(ONE, epoch=5), 3.0, 1e-5, "gdp"),
        (replace(ONE, correlation=Tree()), 3.0, 1e-5, "gdp"),
        (replace(ONE, scheme=SHUFFLED), 3.0, 1e-5, "gdp"),
        (ONE.prefix(9), 3.0, 1e-5, "gdp"),
        (ONE.scaled(2.0), 3.0, 1e-5, "gdp"),
        (ONE, 2.0, 1e-5, "gdp"),
        (ONE, 3.0, 1e-6, "gdp"),
        (ONE, 3.0, 1e-5, "rdp"),
    ],
    ids=["epoch", "correlation", "scheme", "steps", "scales", "eps", "delta", "accountant"],
)
def test_what_was_calibrated_for_another_plan_or_budget_is_not_known(other):
    """It may be too little noise, and nothing asks an accountant again."""
    found = calibrate(ONE, 3.0, 1e-5, "gdp")
    assert calibrated(ONE, 3.0, 1e-5, "gdp").noise_multiplier == found.noise_multiplier
    assert calibrated(*other) is None
