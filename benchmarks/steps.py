"""Whole steps: gradient, noise, filter and optimizer."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from functools import partial

import torch
from torch import Tensor, nn

from benchmarks.mixtures import trained
from dpbench.clip import ThresholdClip
from dpbench.filters import Exponential, Filter, Identity, RecursiveLowPass
from dpbench.gradients import FlatParameters, PerSampleGradients
from dpbench.noise import ConstantNoise
from dpbench.privacy import Ledger
from dpbench.privacy.gaussian import SeededGaussian
from dpbench.privacy.plan import Plan, Release, Repeat
from dpbench.query import LastIterates, OnePoint, Query, TwoPoint
from dpbench.step import PrivateStep
from dpbench.threshold import FixedThreshold
from dpbench.training.assemble import per_sample_loss

# Takes a step with inputs and targets.
Step = Callable[[Tensor, Tensor], object]

LEARNING_RATE = 1e-3
RELEASE = Release(sampling_rate=0.01, noise_multiplier=1.0)


def non_private_step(model: nn.Module, threshold: float) -> Step:
    """Forward pass, backward pass and SGD."""
    optimizer = torch.optim.SGD(trained(model), lr=LEARNING_RATE)

    def step(inputs: Tensor, targets: Tensor) -> None:
        optimizer.zero_grad(set_to_none=True)
        per_sample_loss(model(inputs), targets).sum().backward()
        optimizer.step()

    return step


def private_step(make_query: Callable[[], Query], make_filter: Callable[[], Filter]) -> Callable[..., Step]:
    """The private step of dpbench with a query and a filter."""

    def build(model: nn.Module, threshold: float) -> Step:
        flat = FlatParameters(model)
        plan = Plan((Repeat(RELEASE, 1_000_000),))
        private = PrivateStep(
            PerSampleGradients(model, flat, per_sample_loss),
            query=make_query(),
            clip=ThresholdClip(),
            threshold=FixedThreshold(threshold),
            noise=ConstantNoise(),
            filter=make_filter(),
            optimizer=torch.optim.SGD(flat.parameters, lr=LEARNING_RATE),
            noise_multiplier=RELEASE.noise_multiplier,
            sampling_rate=RELEASE.sampling_rate,
            expected_batch=256,
            ledger=Ledger(plan, eps=1.0, delta=1e-5, accountant="rdp"),
            noise_source=SeededGaussian(torch.Generator(flat.vector.device).manual_seed(0)),
            side_source=SeededGaussian(torch.Generator().manual_seed(1)),
        )
        return lambda inputs, targets: private([(inputs, targets)])

    return build


NON_PRIVATE_STEP = "step_nonprivate"
DPSGD_STEP = "step_dpsgd"
# The first step of a query that remembers has one point. dpbench compares its gradients with autograd's in batches 1,
# 4, 16, ...: the first of them are no rounds, and medians don't show the others.
WARMUPS = 4

STEPS: dict[str, tuple[str, Callable[[nn.Module, float], Step]]] = {
    NON_PRIVATE_STEP: ("non-private", non_private_step),
    DPSGD_STEP: ("DP-SGD", private_step(OnePoint, Identity)),
    "step_disk": ("DiSK", private_step(TwoPoint, Exponential)),
    "step_pmlf": (
        "PMLF",
        private_step(partial(LastIterates, length=2, decay=1.0), lambda: RecursiveLowPass(b=[0.15, -0.05], a=[-0.9])),
    ),
}


def build_step(name: str, model: nn.Module, threshold: float) -> Step:
    """The named step, on a copy of the model."""
    return STEPS[name][1](deepcopy(model), threshold)
