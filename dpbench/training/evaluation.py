"""Accuracy and loss on the test split, on the device."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from dpbench.data import Split

EVALUATION_BATCH = 1000


class Evaluation(NamedTuple):
    """Mean loss and accuracy (0 to 1) over a split."""

    loss: float
    accuracy: float


@torch.no_grad()
def evaluate(model: nn.Module, split: Split) -> Evaluation:
    """Evaluate a model; it is left in training mode."""
    model.eval()
    loss = torch.zeros((), dtype=torch.float64, device=split.labels.device)
    correct = torch.zeros((), dtype=torch.int64, device=split.labels.device)
    for start in range(0, len(split), EVALUATION_BATCH):
        inputs, labels = split.take(slice(start, start + EVALUATION_BATCH))
        logits = model(inputs)
        loss += F.cross_entropy(logits, labels, reduction="sum").double()
        correct += (logits.argmax(1) == labels).sum()
    model.train()
    return Evaluation(float(loss) / len(split), int(correct) / len(split))
