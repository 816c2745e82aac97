"""Accuracy and loss on the test split, on the device."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from dpbench.data import Split

EVALUATION_BATCH = 1000


class Evaluation(NamedTuple):
    """What an evaluation found.

    Attributes:
        loss: mean over the split.
        accuracy: fraction of the split, 0 to 1.
        class_accuracy: of each class from 0 to the largest label; None for one without samples.
    """

    loss: float
    accuracy: float
    class_accuracy: tuple[float | None, ...]


@torch.no_grad()
def evaluate(model: nn.Module, split: Split, batch: int = EVALUATION_BATCH) -> Evaluation:
    """Evaluate a model; it is left in training mode.

    Args:
        model: maps inputs to logits.
        split: on the model's device.
        batch: most samples at once.
    """
    model.eval()
    batch = min(batch, EVALUATION_BATCH)
    loss = torch.zeros((), dtype=torch.float64, device=split.labels.device)
    of_class = split.labels.bincount()
    correct = torch.zeros_like(of_class)
    for start in range(0, len(split), batch):
        inputs, labels = split.take(slice(start, start + batch))
        logits = model(inputs)
        loss += F.cross_entropy(logits, labels, reduction="sum").double()
        correct.index_add_(0, labels, (logits.argmax(1) == labels).long())
    model.train()
    right, samples = correct.tolist(), of_class.tolist()
    by_class = tuple(r / n if n else None for r, n in zip(right, samples, strict=True))
    return Evaluation(float(loss) / len(split), sum(right) / len(split), by_class)
