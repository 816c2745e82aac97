"""What attacks by many runs are aimed at: a real step at a public state, neighbouring batches, a canary's direction."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass

import torch
from torch import Tensor

from dpbench.audit.canaries import canary_samples, strongest_centre, with_canaries
from dpbench.audit.settings import audited
from dpbench.config import RunConfig
from dpbench.data import ImageDataset
from dpbench.errors import UserError
from dpbench.gradients import MicroBatch
from dpbench.privacy import Release
from dpbench.query import Point, Query
from dpbench.step import PrivateStep
from dpbench.training.assemble import Assembly, assemble
from dpbench.training.budget import budget, open_ledger
from dpbench.training.loading import load_splits
from dpbench.training.losses import per_sample_loss

# Samples besides the canary, which the attacker knows: more than none, so that what mixes samples shows, and few, so
# that the size of the batch does too.
OTHERS = 3
# Coordinates of the model of canaries; those without a canary show the noise alone.
DIRECTIONS = 512
# The canary is a training image with so much more contrast, for its gradient to be longer than any threshold in use.
CONTRAST = 100.0


@dataclass
class Target:
    """A step to attack.

    Attributes:
        config: of the run that the step belongs to.
        attacked: what it computes with, in words.
        step: at the state that is attacked.
        others: batch without the canary.
        canary: batch of the canary alone.
        direction: of the canary's clipped contribution, shape (d,), norm 1.
        reach: norm of that contribution over the sensitivity of the step.
    """

    config: RunConfig
    attacked: str
    step: PrivateStep
    others: MicroBatch
    canary: MicroBatch
    direction: Tensor
    reach: float


class Restart:
    """Brings a step back to the state it has now, as a resumed run would, but with new noise."""

    def __init__(self, step: PrivateStep) -> None:
        self._step = step
        self._parameters = step.gradients.flat.vector.clone()
        # Gradients, which go on, would be compared with autograd's again in every run.
        self._state = deepcopy({name: state for name, state in step.state_dict().items() if name != "gradients"})
        # A whole ledger: one that has made releases refuses to forget them.
        self._ledger = deepcopy(step.ledger)

    def __call__(self) -> None:
        """Restore."""
        self._step.gradients.flat.vector.copy_(self._parameters)
        self._step.load_state_dict(self._state)
        self._step.ledger = deepcopy(self._ledger)


def releases_since(step: PrivateStep, before: int) -> list[Release]:
    """What the ledger says was released after its first `before` releases."""
    made = [run.release for run in step.ledger.made.runs for _ in range(run.times)]
    return made[before:]


def canary_target(config: RunConfig, device: torch.device, batch_size: int) -> Target:
    """The step on canaries, one of which is made for the points at which the step will take gradients."""
    config, parts = _ready(with_canaries(config, DIRECTIONS), device, batch_size)
    others = canary_samples(torch.arange(1, 1 + OTHERS, device=device))
    _warm_up(parts.step, others)
    centre, sign = strongest_centre(_next_points(parts.step), 0)
    canary = canary_samples(torch.zeros(1, dtype=torch.int64, device=device), centre)
    direction = torch.zeros_like(parts.step.gradients.flat.vector)
    direction[0] = sign
    reach = _reach(parts.step, canary)
    return Target(config, "canary made for the step", parts.step, others, canary, direction, reach)


def model_target(config: RunConfig, device: torch.device, batch_size: int) -> Target:
    """The step on the run's own model and data; the canary is an image of high contrast with the worst label."""
    if not isinstance(config.dataset, ImageDataset):
        raise UserError("this attack takes images; audit a run on images", field="dataset", value=config.dataset.name)
    config, parts = _ready(config, device, batch_size)
    data = load_splits(config, device).train
    others = data.take(slice(0, OTHERS))
    _warm_up(parts.step, others)
    image = CONTRAST * data.take(slice(OTHERS, OTHERS + 1))[0]
    labels = torch.arange(config.dataset.classes, device=device)
    points = _next_points(parts.step)
    mixtures = [_mixture(parts, points, image, label.view(1)) for label in labels]
    worst = max(range(len(mixtures)), key=lambda k: float(mixtures[k].norm()))
    direction = _clipped_direction(mixtures[worst], parts, per_layer=config.clip.scope == "per_layer")
    attacked = f"{config.model.name} on {config.dataset.name}"
    canary = (image, labels[worst].view(1))
    return Target(config, attacked, parts.step, others, canary, direction, _reach(parts.step, canary))


def _ready(config: RunConfig, device: torch.device, batch_size: int) -> tuple[RunConfig, Assembly]:
    """A run of one step, with noise calibrated for that one, whose ledger has room for the warm-up before it."""
    warm_up = _warm_up_steps(config.query)
    one = audited(config, steps=1, batch_size=batch_size)
    several = audited(config, steps=1 + warm_up, batch_size=batch_size)
    # The noise of the step that is attacked is that of the only step of a run.
    multiplier = budget(one).noise_multiplier * one.noise.scale(0) / several.noise.scale(warm_up)
    return several, assemble(several, device, multiplier, open_ledger(several, multiplier))


def _warm_up_steps(query: Query) -> int:
    """Steps after which a query that remembers iterates has all its points."""
    return max(2, query.most_points)


def _warm_up(step: PrivateStep, others: MicroBatch) -> None:
    for _ in range(_warm_up_steps(step.query)):
        step([others])


def _next_points(step: PrivateStep) -> list[Point]:
    """The points of the next step, which are public; the step's own query is not asked."""
    return deepcopy(step.query).points(step.gradients.flat.vector)


def _reach(step: PrivateStep, canary: MicroBatch) -> float:
    """Share of the step's sensitivity that a canary's clipped contribution reaches; takes no step."""
    query, step.query = step.query, deepcopy(step.query)
    threshold = step.threshold.value(step.steps)
    found = step.request([canary], threshold).alone()
    step.query = query
    return float(found.total.norm()) / step.sensitivity(threshold)


def _mixture(parts: Assembly, points: list[Point], image: Tensor, label: Tensor) -> Tensor:
    """Σ_j w_j ∇f(θ_j; x) by plain autograd, shape (d,)."""
    flat = parts.step.gradients.flat
    total = torch.zeros_like(flat.vector)
    for weight, iterate in points:
        with flat.at(iterate), torch.enable_grad():
            loss = per_sample_loss(parts.model(image), label).sum()
            pieces = torch.autograd.grad(loss, flat.parameters, allow_unused=True, materialize_grads=True)
        total.add_(torch.cat([piece.flatten() for piece in pieces]), alpha=weight)
    return total


def _clipped_direction(gradient: Tensor, parts: Assembly, *, per_layer: bool) -> Tensor:
    """Direction of a gradient far above its bound after it was clipped; per layer, all layers become as long."""
    flat = parts.step.gradients.flat
    pieces = [piece.flatten().clone() for piece in flat.views(gradient)]
    if per_layer:
        layers = [name.rpartition(".")[0] for name in flat.names]
        for layer in set(layers):
            own = [piece for piece, of in zip(pieces, layers, strict=True) if of == layer]
            norm = torch.cat(own).norm()
            for piece in own:
                piece.div_(norm.clamp(min=1e-30))
    joined = torch.cat(pieces)
    return joined.div_(joined.norm())
