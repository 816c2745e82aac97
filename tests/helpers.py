"""What several test files share."""

from copy import deepcopy
from functools import cache

import torch

from dpbench.config import RunConfig, compose_jobs
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
