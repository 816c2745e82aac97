"""Right of g_t: post-processing by filter and optimizer, which get the private gradient and public facts alone."""

from __future__ import annotations

import torch
from torch import Tensor

from dpbench.filters import Filter
from dpbench.gradients import FlatParameters
from dpbench.optim import PlacesFilter


def update(
    flat: FlatParameters, gradient: Tensor, noise_std: float, filter: Filter, optimizer: torch.optim.Optimizer
) -> None:
    """Move the parameters by what filter and optimizer make of a private gradient.

    Args:
        flat: the parameters.
        gradient: g_t, shape (d,).
        noise_std: standard deviation of the noise in each of its coordinates.
        filter: told `noise_std`, then applied: by an optimizer that places it, or before any other.
        optimizer: told `noise_std`.
    """
    filter.expect(noise_std)
    tell(optimizer, noise_std=noise_std)
    if isinstance(optimizer, PlacesFilter):
        flat.set_gradient(gradient)
        optimizer.step_filtered(filter.apply)
    else:
        flat.set_gradient(filter.apply(gradient))
        optimizer.step()


def tell(optimizer: torch.optim.Optimizer, **facts: float) -> None:
    """Write facts about the step into those parameter groups that have keys for them.

    ``noise_std``: standard deviation of the noise in each coordinate of g_t, public.
    ``unnoised_norm``: norm of the clipped mean before noise, NOT public; only the step itself tells it.
    """
    for group in optimizer.param_groups:
        group.update({name: value for name, value in facts.items() if name in group})
