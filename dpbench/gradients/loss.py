"""The per-sample loss that is differentiated."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

# Losses (n,) of outputs and targets of n rows.
Loss = Callable[[Tensor, Tensor], Tensor]


def sample_losses(model: Callable[[Tensor], Tensor], loss: Loss, inputs: Tensor, targets: Tensor, views: int) -> Tensor:
    """f(θ; x_i), shape (B,): the mean over the views of a sample.

    Args:
        model: maps rows to outputs.
        loss: of outputs and targets, per row.
        inputs: shape (B, ...), or (B, K, ...) with K > 1 views of each sample.
        targets: shape (B, ...).
        views: K.
    """
    if views == 1:
        return loss(model(inputs), targets)
    losses = loss(model(inputs.flatten(0, 1)), targets.repeat_interleave(views, dim=0))
    return losses.view(-1, views).mean(1)
