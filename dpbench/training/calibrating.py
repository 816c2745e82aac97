"""Calibrating the runs of a command before the first of them begins, in processes at once."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from multiprocessing.context import ForkProcess
from multiprocessing.sharedctypes import Synchronized

from rich.console import Console

from dpbench.config.schema import RunConfig
from dpbench.garbage import uncollected
from dpbench.training.budget import Budget, budget, is_known
from dpbench.training.torchrun import current_team


def budgets(configs: Sequence[RunConfig], console: Console) -> list[Budget]:
    """What each run may spend, see `budget`; what has to be calibrated is so in as many processes as there are cores.

    Args:
        configs: of the runs.
        console: says meanwhile, on a terminal, what takes so long.

    Raises:
        UserError: of the first run that can't be calibrated.
    """
    unknown = [config for config in configs if not is_known(config)]
    what = "a run" if len(unknown) == 1 else f"{len(unknown)} runs"
    with uncollected():
        with calibrating([partial(budget, config) for config in unknown], console, f"the noise of {what}"):
            if unknown:
                _import_compiler()
        return [budget(config) for config in configs]


@contextmanager
def calibrating(tasks: Sequence[Callable[[], object]], console: Console, what: str) -> Iterator[None]:
    """Meanwhile calibrations are made in as many processes as there are cores, which leave them in the cache.

    Where no copies of this process can be had none is made: whoever needs one makes it then.

    Args:
        tasks: calibrations; what they raise is met again by whoever needs them.
        console: says so, on a terminal.
        what: is calibrated.
    """
    with ExitStack() as stack:
        workers: list[ForkProcess] = []
        stack.callback(_end, workers)
        if tasks and _can_fork():
            _begin(tasks, workers)
        if tasks:
            stack.enter_context(console.status(f"calibrating {what}"))
        yield
        for worker in workers:
            worker.join()


def _can_fork() -> bool:
    """Whether copies of this process can do the work: a new one imports for as long as most calibrations take.

    A thread, of this process or of its connections to others, may hold a lock that the copy would wait for without end.
    """
    return sys.platform == "linux" and threading.active_count() == 1 and current_team().size == 1


def _begin(tasks: Sequence[Callable[[], object]], workers: list[ForkProcess]) -> None:
    """Add to `workers` one for each core, or as many as the machine grants."""
    context = multiprocessing.get_context("fork")
    with suppress(OSError):  # no memory, or no further process of this user
        number = context.Value("i", 0)
        for _ in range(min(len(os.sched_getaffinity(0)), len(tasks))):
            worker = context.Process(target=_carry_out, args=(tasks, number))
            worker.start()
            workers.append(worker)


def _end(workers: Sequence[ForkProcess]) -> None:
    for worker in workers:
        worker.terminate()
        worker.join()


def _carry_out(tasks: Sequence[Callable[[], object]], number: Synchronized[int]) -> None:
    """Carry out one task after the other that no process has begun.

    Args:
        tasks: of all processes.
        number: of tasks begun.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the command ends its workers
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    command = os.getppid()
    while os.getppid() == command:  # else it was killed
        with number.get_lock():
            own, number.value = number.value, number.value + 1
        if own >= len(tasks):
            return
        with suppress(Exception):
            tasks[own]()


def _import_compiler() -> None:
    """Import, while others calibrate, what takes a second of the first of torch's optimizers."""
    import torch._dynamo  # noqa: F401
