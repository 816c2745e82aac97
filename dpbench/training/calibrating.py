"""Calibrating the runs of a command before the first of them begins, in processes at once."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Sequence
from multiprocessing.context import ForkProcess

from rich.console import Console

from dpbench.config.schema import RunConfig
from dpbench.garbage import uncollected
from dpbench.training.budget import Budget, budget, is_known


def budgets(configs: Sequence[RunConfig], console: Console) -> list[Budget]:
    """What each run may spend, see `budget`; what has to be calibrated is so in as many processes as there are cores.

    Args:
        configs: of the runs.
        console: says meanwhile, on a terminal, what takes so long.

    Raises:
        UserError: of the first run that can't be calibrated.
    """
    unknown = [config for config in configs if not is_known(config)]
    with uncollected(), contextlib.ExitStack() as stack:
        if unknown:
            workers = _begin(unknown) if _can_fork() else []
            stack.callback(_end, workers)
            stack.enter_context(console.status(f"calibrating the noise of {_runs(len(unknown))}"))
            if workers:
                _import_compiler()
            for worker in workers:
                worker.join()
        return [budget(config) for config in configs]


def _runs(number: int) -> str:
    return "a run" if number == 1 else f"{number} runs"


def _can_fork() -> bool:
    """Whether copies of this process can do the work: a new one imports for as long as most calibrations take.

    A thread may hold a lock that the copy would wait for without end.
    """
    return sys.platform == "linux" and threading.active_count() == 1


def _begin(unknown: Sequence[RunConfig]) -> list[ForkProcess]:
    processes = min(len(os.sched_getaffinity(0)), len(unknown))
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=_calibrate, args=(unknown[k::processes],)) for k in range(processes)]
    for worker in workers:
        worker.start()
    return workers


def _end(workers: Sequence[ForkProcess]) -> None:
    for worker in workers:
        worker.terminate()
        worker.join()


def _calibrate(configs: Sequence[RunConfig]) -> None:
    """Leave the multipliers in the cache; what goes wrong, or is not kept, the command meets again."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the command ends its workers
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for config in configs:
        with contextlib.suppress(Exception):
            budget(config)


def _import_compiler() -> None:
    """Import, while others calibrate, what takes a second of the first of torch's optimizers."""
    import torch._dynamo  # noqa: F401
