"""The team that this process belongs to: of the processes that torchrun started, or alone."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from dpbench.training.contact import PATIENCE, Contact
from dpbench.training.distributed import TorchTeam
from dpbench.training.team import ALONE, Team

_current: Team = ALONE


def current_team() -> Team:
    """The team that this process belongs to."""
    return _current


@contextmanager
def torchrun_team(patience: timedelta = PATIENCE) -> Iterator[Team]:
    """The team of the processes that torchrun started; without it, or where there is one alone, `ALONE`.

    Args:
        patience: how long to wait for one that does not answer.
    """
    global _current
    if not dist.is_torchelastic_launched() or int(os.environ["WORLD_SIZE"]) == 1:
        yield ALONE
        return
    gpus = torch.cuda.device_count()
    if gpus:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % gpus)
    dist.init_process_group("cpu:gloo,cuda:nccl" if gpus else "gloo", timeout=patience)
    team = TorchTeam(Contact(patience))
    _current = team
    try:
        yield team
    finally:
        _current = ALONE
        team.contact.leave()
