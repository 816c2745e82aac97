"""What several test files share."""

from copy import deepcopy
from functools import cache
from pathlib import Path

import pytest
import torch
from draws import generator

from dpbench.clip import ThresholdClip
from dpbench.config import RunConfig, compose_jobs
from dpbench.data.sources import File, Problem
from dpbench.filters import Identity
from dpbench.gradients import FlatParameters, PerSampleGradients
from dpbench.noise import ConstantNoise
from dpbench.optim import SGD
from dpbench.privacy import Ledger, Part, Plan, Release
from dpbench.privacy.gaussian import SeededGaussian
from dpbench.query import OnePoint
from dpbench.step import PrivateStep
from dpbench.threshold import FixedThreshold
from dpbench.training.assemble import Assembly, assemble
from dpbench.training.losses import per_sample_loss

NOISE_SEED = 5


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


def step_of(
    model,
    loss=per_sample_loss,
    *,
    query=None,
    clip=None,
    threshold=None,
    noise=None,
    filter=None,
    optim=None,
    noise_multiplier=0.0,
    sampling_rate=1.0,
    expected_batch=1.0,
    steps=1000,
    ledger=None,
    seed=NOISE_SEED,
) -> PrivateStep:
    """The step of DP-SGD, but for the stages that are given; its noise follows from the seed alone."""
    flat = FlatParameters(model)
    clip, threshold = clip or ThresholdClip(), threshold or FixedThreshold(1.0)
    if ledger is None:  # an empty one is false
        ledger = equal_releases(steps, sampling_rate, noise_multiplier, threshold.beside)
    return PrivateStep(
        PerSampleGradients(model, flat, loss, per_layer=clip.scope == "per_layer"),
        query=query or OnePoint(),
        clip=clip,
        threshold=threshold,
        noise=noise or ConstantNoise(),
        filter=filter or Identity(),
        optimizer=(optim or SGD(lr=0.1)).build(flat.parameters),
        noise_multiplier=noise_multiplier,
        sampling_rate=sampling_rate,
        expected_batch=expected_batch,
        ledger=ledger,
        noise_source=SeededGaussian(generator(seed)),
        side_source=SeededGaussian(generator(seed + 1)),
    )


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
