"""Per-sample losses: of classes, and of the next token."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from dpbench.data import IGNORED
from dpbench.errors import UserError


def per_sample_loss(logits: Tensor, labels: Tensor, classes: int = 1) -> Tensor:
    """Cross-entropy of each sample, shape (B,).

    Args:
        logits: shape (B, classes).
        labels: shape (B,).
        classes: that labels may be of.

    Raises:
        UserError: the model gave something else than logits, or too few.
    """
    if not isinstance(logits, Tensor) or logits.dim() < 2 or len(logits) != len(labels):
        found = f"shape {tuple(logits.shape)}" if isinstance(logits, Tensor) else f"a {type(logits).__name__}"
        raise UserError(f"expected logits of the model, shape ({len(labels)}, classes), not {found}")
    if logits.shape[1] < classes:  # on a GPU the loss would end the process, with a word about itself
        raise UserError(f"expected logits of the model for {classes} classes, not for {logits.shape[1]}")
    return F.cross_entropy(logits, labels, reduction="none")


def next_token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy of the tokens that each sample is asked for, shape (B,).

    Args:
        logits: shape (B, T, V).
        targets: shape (B, T), `IGNORED` where no token is asked for.
    """
    losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none", ignore_index=IGNORED)
    return losses.view_as(targets).sum(1) / (targets != IGNORED).sum(1).clamp(min=1)
