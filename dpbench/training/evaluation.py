"""Accuracy and loss on a split, on the device."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from dpbench.data import IGNORED, Samples
from dpbench.gradients.pooling import vectorised_pooling
from dpbench.training.team import ALONE, Team

EVALUATION_BATCH = 1000
# exp of more is no finite number.
LARGEST_EXPONENT = 700.0


class Evaluation(NamedTuple):
    """What an evaluation found; of a language model the samples are the tokens it is asked for.

    Attributes:
        loss: mean over the samples.
        accuracy: fraction of the split, 0 to 1.
        class_accuracy: of each class from 0 to the largest label; None for one without samples. Of a language model
            there is none.
    """

    loss: float
    accuracy: float
    class_accuracy: tuple[float | None, ...]

    @property
    def perplexity(self) -> float:
        """Of a language model: exp(loss); finite wherever the loss is."""
        return math.exp(min(self.loss, LARGEST_EXPONENT))


@torch.no_grad()
def evaluate(model: nn.Module, split: Samples, batch: int, team: Team = ALONE) -> Evaluation:
    """Evaluate a classifier; it is left in training mode.

    Args:
        model: maps inputs to logits.
        split: on the model's device.
        batch: most samples at once.
        team: of the processes that have shares of the split.
    """
    model.eval()
    loss = torch.zeros(1, dtype=torch.float64, device=split.labels.device)
    of_class = split.labels.bincount()
    correct = torch.zeros_like(of_class)
    with vectorised_pooling(model):
        for inputs, labels in split.everything(min(batch, EVALUATION_BATCH)):
            logits = model(inputs)
            loss += F.cross_entropy(logits, labels, reduction="sum").double()
            correct.index_add_(0, labels, (logits.argmax(1) == labels).long())
    model.train()
    (total, *right), samples = team.sum(torch.cat([loss, correct.double()])).tolist(), of_class.tolist()
    by_class = tuple(r / n if n else None for r, n in zip(right, samples, strict=True))
    return Evaluation(total / len(split), sum(right) / len(split), by_class)


@torch.no_grad()
def evaluate_language_model(model: nn.Module, split: Samples, batch: int, team: Team = ALONE) -> Evaluation:
    """Evaluate a model of the next token; it is left in training mode.

    Args:
        model: maps ids (B, T) to logits (B, T, V).
        split: on the model's device; its targets are (B, T).
        batch: most samples at once.
        team: of the processes that have shares of the split.
    """
    model.eval()
    loss = torch.zeros((), dtype=torch.float64, device=split.labels.device)
    correct = torch.zeros((), dtype=torch.int64, device=split.labels.device)
    asked = torch.zeros_like(correct)
    for inputs, targets in split.everything(min(batch, EVALUATION_BATCH)):
        logits = model(inputs)
        loss += F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum", ignore_index=IGNORED).double()
        correct += (logits.argmax(-1) == targets).sum()
        asked += (targets != IGNORED).sum()
    model.train()
    total, right, tokens = team.sum(torch.stack([loss, correct.double(), asked.double()])).tolist()
    return Evaluation(total / tokens, right / tokens, ())
