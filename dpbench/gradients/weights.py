"""What the layers of a pass compute with: one value of each parameter, or one for each of several seeds."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override


class Weights:
    """The parameters as they are, for all rows alike.

    Attributes:
        seeds: S, how many values each parameter has.
    """

    seeds = 1

    def __init__(self, *, channels_last: bool = False) -> None:
        """Values of the model's parameters.

        Args:
            channels_last: let convolutions of images give their channels last, which what follows then keeps.
        """
        self._channels_last = channels_last

    def of(self, parameter: Tensor) -> Tensor:
        """The value of a parameter, of its shape; (S, *parameter) where there are several."""
        return parameter

    def repeated(self, parameter: Tensor, rows: int) -> Tensor:
        """The value that belongs to each of `rows` rows, shape (rows, *parameter), contiguous."""
        return parameter.detach().expand(rows, *parameter.shape).contiguous()

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None, transposed: bool) -> Tensor:
        """A linear map of x (n, ..., d) with weight (p, d), or (d, p) where it is stored transposed."""
        return F.linear(x, weight.t() if transposed else weight, bias)

    def convolution(self, layer: nn.Conv1d | nn.Conv2d, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The convolution of a layer with filters as `of` gives them, and a bias that is a parameter."""
        if self._channels_last and isinstance(layer, nn.Conv2d):
            # torch goes by the strides, which `contiguous` leaves as they are where there is one channel.
            weight = torch.empty_like(weight, memory_format=torch.channels_last).copy_(weight)
        output: Tensor = layer._conv_forward(x, weight, bias)
        return output

    def lookup(self, ids: Tensor, table: Tensor, padding: int | None) -> Tensor:
        """The rows of a table (V, d) that ids (n, ...) name."""
        return F.embedding(ids, table, padding)


class StackedWeights(Weights):
    """A value of each parameter for each of S seeds; row r of n belongs to seed r // (n / S).

    Attributes:
        grouped: compute convolutions as one with S times the groups, not one after the other.
    """

    def __init__(self, values: Mapping[Tensor, Tensor], seeds: int, *, grouped: bool) -> None:
        """Take values.

        Args:
            values: for each trained parameter (S, *parameter); others are the same for all seeds.
            seeds: S.
            grouped: see the class.
        """
        self.seeds = seeds
        self.grouped = grouped
        self._values = values

    @override
    def of(self, parameter: Tensor) -> Tensor:
        """Shape (S, *parameter)."""
        value = self._values.get(parameter)
        return parameter.detach().expand(self.seeds, *parameter.shape) if value is None else value

    @override
    def repeated(self, parameter: Tensor, rows: int) -> Tensor:
        """Shape (rows, *parameter): S values, each as often as its seed has rows."""
        return self.of(parameter).repeat_interleave(rows // self.seeds, dim=0)

    @override
    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None, transposed: bool) -> Tensor:
        """One product for each seed, in one call."""
        w = self.of(weight) if transposed else self.of(weight).transpose(1, 2)
        rows = x.reshape(self.seeds, -1, x.shape[-1])
        output = torch.bmm(rows, w) if bias is None else torch.baddbmm(self.of(bias).unsqueeze(1), rows, w)
        return output.view(*x.shape[:-1], w.shape[2])

    @override
    def convolution(self, layer: nn.Conv1d | nn.Conv2d, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """A convolution for each seed, with filters (S, *layer.weight)."""
        biases = None if bias is None else self.of(bias)
        if not self.grouped:
            of_seeds = [None] * self.seeds if biases is None else biases.unbind()
            parts = zip(x.chunk(self.seeds), weight.unbind(), of_seeds, strict=True)
            return torch.cat([layer._conv_forward(*part) for part in parts])
        side_by_side = _seeds_as_channels(x, self.seeds)
        groups, layer.groups = layer.groups, self.seeds * layer.groups
        try:
            flat = None if biases is None else biases.flatten()
            output: Tensor = layer._conv_forward(side_by_side, weight.flatten(0, 1), flat)
        finally:
            layer.groups = groups
        return _channels_as_seeds(output, self.seeds)

    @override
    def lookup(self, ids: Tensor, table: Tensor, padding: int | None) -> Tensor:
        """Rows of S tables, one below the other."""
        return F.embedding(with_offsets(ids, self.seeds, len(table)), self.of(table).flatten(0, 1))


def with_offsets(ids: Tensor, seeds: int, size: int) -> Tensor:
    """Ids (n, ...) of rows of a table, as ids of rows of `seeds` tables of `size` rows, one below the other."""
    offsets = size * torch.arange(seeds, device=ids.device).repeat_interleave(len(ids) // seeds)
    return ids + offsets.view(-1, *[1] * (ids.dim() - 1))


def _seeds_as_channels(x: Tensor, seeds: int) -> Tensor:
    """Rows (S n, C, ...) of S seeds as (n, S C, ...)."""
    return x.reshape(seeds, -1, *x.shape[1:]).transpose(0, 1).flatten(1, 2)


def _channels_as_seeds(x: Tensor, seeds: int) -> Tensor:
    """Shape (n, S C, ...) as (S n, C, ...)."""
    return x.reshape(len(x), seeds, -1, *x.shape[2:]).transpose(0, 1).flatten(0, 1)
