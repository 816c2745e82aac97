"""Putting a run together from its configuration."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch
from torch import nn

from dpbench.averaging import Averaging
from dpbench.config import RunConfig, config_hash
from dpbench.data import Dataset, TextDataset
from dpbench.errors import UserError
from dpbench.gradients import FlatParameters, PerSampleGradients
from dpbench.models import NextToken
from dpbench.privacy import Ledger
from dpbench.privacy.gaussian import GaussianSource, SecureGaussian, SeededGaussian
from dpbench.privacy.uniform import SecureUniform, SeededUniform, UniformSource
from dpbench.randomness import generator, global_stream
from dpbench.step import PrivateStep
from dpbench.training.losses import next_token_loss, per_sample_loss
from dpbench.training.micro_batch import fitting_micro_batch
from dpbench.training.recorder import GradientRecorder

Kind = TypeVar("Kind", bound=PerSampleGradients)


@dataclass
class Assembly:
    """The parts of a run.

    Attributes:
        model: on its device, in training mode.
        step: the private step that trains it.
        averaging: of the iterates, for evaluation.
        micro_batch: samples held at once.
    """

    model: nn.Module
    step: PrivateStep
    averaging: Averaging
    micro_batch: int

    @property
    def at_once(self) -> int:
        """Samples of a micro-batch that are computed at once: fewer than all since memory ran out."""
        return min(self.micro_batch, self.step.gradients.most or self.micro_batch)


def gradients_of(config: RunConfig, model: nn.Module, flat: FlatParameters, kind: Callable[..., Kind]) -> Kind:
    """The gradients of a run's model."""
    return kind(
        model,
        flat,
        next_token_loss if config.dataset.generates else partial(per_sample_loss, classes=config.dataset.classes),
        per_layer=config.clip.scope == "per_layer",
        views=config.augmentation.copies,
        autocast=torch.bfloat16 if config.precision == "bfloat16" else None,
    )


def _noise(config: RunConfig, stream: str, device: torch.device) -> GaussianSource:
    if config.privacy.secure_noise:
        return SecureGaussian()
    return SeededGaussian(generator(config.seed, stream, device, config_hash(config)))


def draws_of(config: RunConfig, device: torch.device) -> UniformSource:
    """What a run's sampler draws from."""
    if config.privacy.secure_noise:
        return SecureUniform(device)
    return SeededUniform(generator(config.seed, "sampling", device, config_hash(config)))


def _require_built(group: str, settings: object, built: object, kind: type) -> None:
    if not isinstance(built, kind):
        found = type(built).__name__
        message = f"expected build() to return torch's {kind.__name__}, not a {found}"
        raise UserError(message, field=group, value=type(settings).__name__)


def _require_answers(data: Dataset, model: nn.Module) -> None:
    """Raise `UserError` where a model is to answer prompts, in the end, that can't."""
    if isinstance(data, TextDataset) and data.generates and data.most_tokens and not isinstance(model, NextToken):
        raise UserError(
            "answers to prompts come of a dpbench.models.NextToken alone; let build() return one, or set this to 0",
            field="dataset.most_tokens",
            value=data.most_tokens,
        )


def assemble(config: RunConfig, device: torch.device, noise_multiplier: float, ledger: Ledger) -> Assembly:
    """Build model, stages and optimizer; reads no data.

    Raises:
        UserError: the model has a layer that can't be trained privately.
    """
    with global_stream(config.seed, "weights"):
        model = config.model.build(config.dataset)
    _require_built("model", config.model, model, nn.Module)
    _require_answers(config.dataset, model)
    model.to(device).train()
    flat = FlatParameters(model)
    gradients = gradients_of(config, model, flat, PerSampleGradients)
    optimizer = config.optim.build(flat.parameters)
    _require_built("optim", config.optim, optimizer, torch.optim.Optimizer)
    if config.uncertified is None and any("unnoised_norm" in group for group in optimizer.param_groups):
        raise UserError(
            "this optimizer reads the norm of un-noised gradients, for which no eps holds; leave unnoised_norm out",
            field="optim",
            value=type(optimizer).__name__,
        )
    step = PrivateStep(
        gradients,
        # Copies: a stage remembers, and a configuration may be assembled more than once.
        query=deepcopy(config.query),
        clip=deepcopy(config.clip),
        threshold=deepcopy(config.threshold),
        noise=deepcopy(config.noise),
        filter=deepcopy(config.filter),
        optimizer=optimizer,
        noise_multiplier=noise_multiplier,
        sampling_rate=config.sampling_rate,
        expected_batch=config.batch_size,
        ledger=ledger,
        noise_source=_noise(config, "noise", device),
        # A generator of its own: what is drawn beside the gradient's noise leaves that as it would be without. It is a
        # few numbers, which thresholds keep on the CPU.
        side_source=_noise(config, "side", torch.device("cpu")),
    )
    if config.record_coordinates:
        chosen = generator(config.seed, "recording", device)
        step.recorder = GradientRecorder.at_random(len(flat), config.record_coordinates, chosen)
    micro_batch = config.micro_batch or fitting_micro_batch(config, model, gradients)
    return Assembly(model, step, deepcopy(config.averaging), micro_batch)
