"""The per-sample loss that is differentiated."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from dpbench.errors import UserError

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

    Raises:
        UserError: the loss is not one value per row, or the model changes its input in place.
    """
    rows, of_rows = (inputs, targets) if views == 1 else (inputs.flatten(0, 1), targets.repeat_interleave(views, dim=0))
    version = rows._version
    losses = _one_each(loss(model(rows), of_rows), len(of_rows))
    if rows._version != version:
        raise UserError(
            "the model changes its input in place, so that a batch is not the same for every pass; let it make a new "
            "tensor instead"
        )
    return losses if views == 1 else losses.view(-1, views).mean(1)


def _one_each(losses: Tensor, rows: int) -> Tensor:
    if losses.shape != (rows,):
        raise UserError(
            f"the loss of {rows} rows has shape {tuple(losses.shape)}; return one value for each of them, ({rows},)"
        )
    return losses
