"""Engines whose passes are recorded and replayed, on a GPU or by stand-ins."""

import torch

from dpbench.clip import ThresholdClip
from dpbench.gradients import PerSampleGradients
from dpbench.query import Point


def halved(norms: torch.Tensor) -> torch.Tensor:
    return ThresholdClip().factors(norms, 0.5)


def two_points(engine: PerSampleGradients, spread: float = 0.01) -> list[Point]:
    vector = engine.flat.vector
    return [Point(1.4, vector + spread * torch.randn_like(vector)), Point(-0.4, vector)]


def replay_counts(engine: PerSampleGradients) -> list[int]:
    """How often each recorded pass was replayed."""
    return [each.replays for each in engine._replays._recorded.values()]
