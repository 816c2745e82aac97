"""Locks that others hold, or have left behind."""

import json
import multiprocessing
import os
import signal
from pathlib import Path

from dpbench.tracking.lock import COUNTER, Lock


def held_elsewhere(path: Path) -> None:
    """A lock of a process on another machine, which gives no sign of life."""
    path.parent.mkdir(parents=True, exist_ok=True)
    who = {"host": "far", "pid": 7, "machine": "another", "started": "1", "attempt": 1, "token": "a" * 32}
    path.write_text(json.dumps(who) + "\n" + COUNTER.format(0))


def held_by_the_dead(path: Path) -> None:
    """A lock of a process of this machine that was killed."""

    def hold() -> None:
        assert Lock(path).acquire()
        os.kill(os.getpid(), signal.SIGKILL)

    process = multiprocessing.get_context("fork").Process(target=hold)
    process.start()
    process.join()
