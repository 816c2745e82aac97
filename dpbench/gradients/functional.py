"""Per-sample gradients of any model, all of them in memory at once: slow, but without rules."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap

from dpbench.gradients.buffers import Buffers
from dpbench.gradients.flat import FlatParameters
from dpbench.gradients.loss import Loss, sample_losses

# Losses (B,) and gradients (B, d) at the current parameters, of inputs and targets.
Gradients = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]

# Samples at a time; the fastest of those tried on CPUs.
CHUNK = 8


def by_vmap(model: nn.Module, flat: FlatParameters, loss: Loss, views: int) -> Gradients:
    """By torch.func; each sample goes through the model alone, so that nothing can mix samples."""

    def of_one(parameters: dict[str, Tensor], sample: Tensor, target: Tensor) -> Tensor:
        def apply(rows: Tensor) -> Tensor:
            output: Tensor = functional_call(model, parameters, (rows,), tie_weights=True)
            return output

        return sample_losses(apply, loss, sample.unsqueeze(0), target.unsqueeze(0), views).squeeze(0)

    of_all = vmap(grad_and_value(of_one), in_dims=(None, 0, 0), randomness="different", chunk_size=CHUNK)

    def gradients(inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        parameters = dict(zip(flat.names, (p.detach() for p in flat.parameters), strict=True))
        of_parameters, losses = of_all(parameters, inputs, targets)
        return losses.detach(), torch.cat([of_parameters[name].detach().flatten(1) for name in flat.names], dim=1)

    return gradients


def one_by_one(model: nn.Module, flat: FlatParameters, loss: Loss, views: int) -> Gradients:
    """By one plain backward pass per sample."""

    def gradients(inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        losses, rows = [], []
        before = Buffers(model)
        with torch.enable_grad():
            for i in range(len(targets)):
                before.restore()  # for a counter of passes a batch is one
                value = sample_losses(model, loss, inputs[i : i + 1], targets[i : i + 1], views)
                parts = torch.autograd.grad(value.sum(), flat.parameters, allow_unused=True, materialize_grads=True)
                losses.append(value.detach())
                rows.append(torch.cat([part.flatten() for part in parts]))
        return torch.cat(losses), torch.stack(rows)

    return gradients
