"""A GPU for each process: on a machine with several, those that choose for themselves lease them from each other."""

from __future__ import annotations

import atexit
import itertools
import os
import tempfile
from functools import cache
from pathlib import Path

import torch

from dpbench.devices import choose_device
from dpbench.tracking.lock import Lock


def device_of_this_process(name: str) -> torch.device:
    """The device of a name, as `choose_device` has it; of several GPUs "auto" is one that no process of the user has.

    Raises:
        UserError: no such device here.
    """
    if name != "auto" or torch.cuda.device_count() < 2:
        return choose_device(name)
    device = torch.device("cuda", _leased())
    torch.cuda.set_device(device)
    return device


@cache
def _leased() -> int:
    """The GPU of this process until it ends."""
    index, lock = lease(Path(tempfile.gettempdir()) / f"dpbench-gpus-{os.getuid()}")
    atexit.register(lock.release)
    return index


def lease(folder: Path) -> tuple[int, Lock]:
    """Lease a GPU of this machine, one that as few others as possible have.

    Args:
        folder: of the locks, on this machine.

    Returns:
        Its index among those that torch may use, and the lock, which is to be released.
    """
    # By their own names: CUDA_VISIBLE_DEVICES gives every process numbers of its own.
    names = [torch.cuda.get_device_properties(index).uuid for index in range(torch.cuda.device_count())]
    for sharing in itertools.count():
        for index, name in enumerate(names):
            lock = Lock(folder / f"{name}.{sharing}.lock")
            if lock.acquire():
                return index, lock
    raise AssertionError("some number is free")
