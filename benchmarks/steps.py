"""Whole steps: gradient, noise, filter and optimizer."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from benchmarks.mixtures import trained
from benchmarks.models import Case
from dpbench.clip import ThresholdClip
from dpbench.filters import Exponential, Filter, Identity, RecursiveLowPass
from dpbench.noise import ConstantNoise
from dpbench.privacy import Ledger
from dpbench.privacy.gaussian import SeededGaussian
from dpbench.privacy.plan import Plan, Release, Repeat
from dpbench.query import LastIterates, OnePoint, Query, TwoPoint
from dpbench.step import PrivateStep
from dpbench.threshold import FixedThreshold
from dpbench.training.losses import per_sample_loss

# Takes a step with inputs and targets.
Step = Callable[[Tensor, Tensor], object]

LEARNING_RATE = 1e-3
RELEASE = Release(sampling_rate=0.01, noise_multiplier=1.0)


def non_private_step(case: Case, threshold: float) -> Step:
    """Forward pass, backward pass and SGD."""
    model = case.copy()
    optimizer = torch.optim.SGD(trained(model), lr=LEARNING_RATE)

    def step(inputs: Tensor, targets: Tensor) -> None:
        optimizer.zero_grad(set_to_none=True)
        per_sample_loss(model(inputs), targets).sum().backward()
        optimizer.step()

    return step


def private_step(make_query: Callable[[], Query], make_filter: Callable[[], Filter]) -> Callable[..., Step]:
    """The private step of dpbench with a query and a filter."""

    def build(case: Case, threshold: float) -> Step:
        gradients = case.gradients
        flat = gradients.flat
        plan = Plan((Repeat(RELEASE, 1_000_000),))
        private = PrivateStep(
            gradients,
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
            side_source=SeededGaussian(torch.Generator().manual_seed(12345)),
        )
        return lambda inputs, targets: private([(inputs, targets)])

    return build


NON_PRIVATE_STEP = "step_nonprivate"
DPSGD_STEP = "step_dpsgd"

# By name, the title and what makes the step for the model of a case.
STEPS: dict[str, tuple[str, Callable[[Case, float], Step]]] = {
    NON_PRIVATE_STEP: ("non-private", non_private_step),
    DPSGD_STEP: ("DP-SGD", private_step(OnePoint, Identity)),
    "step_disk": ("DiSK", private_step(TwoPoint, Exponential)),
    "step_pmlf": (
        "PMLF",
        private_step(partial(LastIterates, length=2, decay=1.0), lambda: RecursiveLowPass(b=[0.15, -0.05], a=[-0.9])),
    ),
}
