"""What several test files share."""

from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from draws import generator

from dpbench.clip import ThresholdClip
from dpbench.config import Job, RunConfig, compose_jobs, conf_folder
from dpbench.data.sources import File, Problem
from dpbench.filters import Identity
from dpbench.gradients import FlatParameters, PerSampleGradients
from dpbench.noise import ConstantNoise
from dpbench.optim import SGD
from dpbench.privacy import Ledger, Part, Plan, Release
from dpbench.privacy.gaussian import GaussianSource, SeededGaussian
from dpbench.query import OnePoint
from dpbench.step import PrivateStep
from dpbench.threshold import FixedThreshold
from dpbench.training.assemble import Assembly, assemble
from dpbench.training.budget import budget, open_ledger
from dpbench.training.lockstep import alone
from dpbench.training.loop import Metrics, train
from dpbench.training.losses import per_sample_loss

ALGORITHMS = sorted(path.stem for path in (conf_folder() / "algo").glob("*.yaml"))
NOISE_SEED = 5


@cache
def job_of(*overrides: str) -> Job:
    return compose_jobs(overrides, multirun=False)[0]


def composed(*overrides: str) -> RunConfig:
    return deepcopy(job_of(*overrides).config)


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


class Trained(NamedTuple):
    """Metrics of all evaluations of a run, the final parameters, and what it released."""

    metrics: list[Metrics]
    vector: torch.Tensor
    ledger: Ledger


def trained(*overrides: str, root: Path = Path("nowhere"), source: GaussianSource | None = None) -> Trained:
    """Train from beginning to end on the CPU, with noise from this source if one is given."""
    config = composed(*overrides)
    multiplier = budget(config).noise_multiplier
    ledger = open_ledger(config, multiplier)
    parts = assemble(config, torch.device("cpu"), multiplier, ledger)
    if source is not None:
        parts.step.noise_source = parts.step.side_source = source
    metrics, steps = [], []
    splits = config.dataset.load(root, download=False)
    alone(train(config, parts, splits, ledger, on_step=steps.append, on_evaluation=metrics.append))
    assert steps == list(range(1, config.steps + 1))
    assert ledger.complete()
    return Trained(metrics, parts.step.gradients.flat.vector, ledger)


@contextmanager
def precision(dtype: torch.dtype) -> Iterator[None]:
    """Numbers have this type where none is asked for."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


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

    def norms(self, norms: torch.Tensor, error_weight: float) -> None:
        pass

    def private(self, gradient: torch.Tensor) -> None:
        self.private_gradients.append(gradient.clone())
