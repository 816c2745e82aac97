"""Right of g_t: post-processing by filter and optimizer, which get the private gradient and public facts alone."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from dpbench.errors import UserError
from dpbench.filters import Filter
from dpbench.optim import PlacesFilter


class Moved(Protocol):
    """The parameters that filter and optimizer move: all of them, or those that one of several processes sees to."""

    def part(self, vector: Tensor) -> Tensor:
        """What belongs to them of a vector of shape (d,)."""

    def set_gradient(self, gradient: Tensor) -> None:
        """Give them a gradient, for the optimizer."""

    def moved(self) -> None:
        """They have been moved."""


def update(
    parameters: Moved, gradient: Tensor, noise_std: float, filter: Filter, optimizer: torch.optim.Optimizer
) -> None:
    """Move the parameters by what filter and optimizer make of a private gradient.

    Args:
        parameters: of the optimizer.
        gradient: g_t, shape (d,).
        noise_std: standard deviation of the noise in each of its coordinates.
        filter: told `noise_std`, then applied: by an optimizer that places it, or before any other.
        optimizer: told `noise_std`.

    Raises:
        UserError: what the filter gives is no gradient of that shape.
    """
    filter.expect(noise_std)
    tell(optimizer, noise_std=noise_std)
    part = parameters.part(gradient)

    def filtered(gradient: Tensor) -> Tensor:
        result = filter.apply(gradient)
        if not isinstance(result, Tensor) or result.shape != gradient.shape:
            found = f"shape {tuple(result.shape)}" if isinstance(result, Tensor) else f"a {type(result).__name__}"
            message = f"expected apply() to return a tensor of shape {tuple(gradient.shape)}, not {found}"
            raise UserError(message, field="filter", value=type(filter).__name__)
        return result

    if isinstance(optimizer, PlacesFilter):
        parameters.set_gradient(part)
        optimizer.step_filtered(filtered)
    else:
        parameters.set_gradient(filtered(part))
        optimizer.step()
    parameters.moved()


def tell(optimizer: torch.optim.Optimizer, **facts: float) -> None:
    """Write facts about the step into those parameter groups that have keys for them.

    ``noise_std``: standard deviation of the noise in each coordinate of g_t, public.
    ``unnoised_norm``: norm of the clipped mean before noise, NOT public; only the step itself tells it.
    """
    for group in optimizer.param_groups:
        group.update({name: value for name, value in facts.items() if name in group})
