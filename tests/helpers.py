"""What several test files share."""

from copy import deepcopy
from functools import cache
from pathlib import Path

import pytest
import torch

from dpbench.config import RunConfig, compose_jobs
from dpbench.data.sources import File, Problem
from dpbench.privacy import Ledger, Part, Plan, Release
from dpbench.training.assemble import Assembly, assemble


@cache
def _composed(overrides: tuple[str, ...]) -> RunConfig:
    return compose_jobs(overrides, multirun=False)[0].config


def composed(*overrides: str) -> RunConfig:
    return deepcopy(_composed(overrides))


def equal_releases(steps: int, sampling_rate: float, noise_multiplier: float, beside: tuple[Part, ...] = ()) -> Ledger:
    plan = Plan.of([Release(sampling_rate, noise_multiplier, beside)] * steps)
    return Ledger(plan, eps=1.0, delta=1e-5, accountant="rdp")


def assembled(config: RunConfig, noise_multiplier: float = 0.0, steps: int = 100) -> Assembly:
    ledger = equal_releases(steps, config.sampling_rate, noise_multiplier, config.threshold.beside)
    return assemble(config, torch.device("cpu"), noise_multiplier, ledger)


def accept_made_up_files(patch: pytest.MonkeyPatch) -> None:
    """Let files of data sets that are there count as whole, whatever their sizes and sums."""

    def problem(file: File, root: Path, *, thorough: bool) -> Problem | None:
        return None if (root / file.path).is_file() else Problem(f"{file.path} is missing", absent=True)

    patch.setattr(File, "problem", problem)
    for module in ("cifar", "svhn"):
        patch.setattr(f"torchvision.datasets.{module}.check_integrity", lambda *_: True)


class Kept:
    """A recorder that keeps all private gradients."""

    def __init__(self) -> None:
        self.private_gradients: list[torch.Tensor] = []

    def unnoised(self, gradient: torch.Tensor) -> None:
        pass

    def private(self, gradient: torch.Tensor) -> None:
        self.private_gradients.append(gradient.clone())
