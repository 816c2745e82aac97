"""Samples as strong as a step allows: each pulls along a coordinate of its own, far beyond any threshold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor, nn
from typing_extensions import override

from dpbench.config import RunConfig
from dpbench.data import Augmentation, Dataset, ImageDataset
from dpbench.models import Model
from dpbench.query import Point

# Norm of a canary's gradient. Float32 holds its products with what a threshold may sensibly be.
STEEPNESS = 1e4
# A centre that no parameter comes near, so that a canary's gradient is the same everywhere.
FAR = -1e4
# More samples at once than is worth splitting: a canary is two numbers.
MICRO_BATCH = 4096


@dataclass
class CanaryModel(Model):
    """One parameter θ_k for each of so many directions; a sample (k, u) has the loss log(1 + exp(a |θ_k - u|)).

    Its gradient is a sign(θ_k - u) along coordinate k, up to a factor between 1/2 and 1 close to u: norm and direction
    are known, canaries are orthogonal, and a centre u between two iterates makes their gradients opposite.

    Attributes:
        directions: number of parameters.
    """

    name: str = "canaries"
    directions: int = 1

    @override
    def build(self, dataset: Dataset) -> nn.Module:
        return _Valleys(self.directions)


class _Valleys(nn.Module):
    def __init__(self, directions: int) -> None:
        super().__init__()
        self.positions = nn.Embedding(directions, 1)
        nn.init.zeros_(self.positions.weight)

    @override
    def forward(self, samples: Tensor) -> Tensor:
        """Logits (B, 2), which have the loss above for label 0, of samples (B, 1, 1, 2)."""
        direction, centre = samples.flatten(1).unbind(1)
        height = STEEPNESS * (self.positions(direction.long()).squeeze(1) - centre).abs()
        return torch.stack([torch.zeros_like(height), height], dim=1)


def with_canaries(config: RunConfig, directions: int) -> RunConfig:
    """The run on canaries: its model and samples are exchanged, all else stays."""
    size = config.dataset.trained_on
    dataset = ImageDataset(name="digits", channels=1, height=1, width=2, classes=2, train_size=size)
    model = CanaryModel(directions=directions)
    # There is nothing of a canary to be cut out or mirrored.
    return replace(config, model=model, dataset=dataset, augmentation=Augmentation(), micro_batch=MICRO_BATCH)


def canary_samples(directions: Tensor, centre: float = FAR) -> tuple[Tensor, Tensor]:
    """Samples (B, 1, 1, 2) along these directions (B,), and their labels."""
    samples = torch.stack([directions.float(), torch.full_like(directions, centre, dtype=torch.float32)], dim=1)
    return samples.view(-1, 1, 1, 2), torch.zeros_like(directions)


def strongest_centre(points: Sequence[Point], direction: int) -> tuple[float, float]:
    """Where the canary of a direction has the longest gradient Σ_j w_j ∇f(θ_j), and the sign of that gradient.

    With weights 2 and -1 it lies between the two iterates, whose gradients are then opposite: clipped one by one they
    would add up to three times the threshold.
    """
    places = [float(point.iterate[direction]) for point in points]
    ordered = sorted(places)
    between = [(a + b) / 2 for a, b in pairwise(ordered) if a < b]
    pulls = {
        centre: sum(p.weight if place > centre else -p.weight for p, place in zip(points, places, strict=True))
        for centre in (FAR, *between)
    }
    centre = max(pulls, key=lambda c: abs(pulls[c]))
    return centre, 1.0 if pulls[centre] > 0 else -1.0
