"""Summands of a tape that are cheaper together: small ones, and those of layers that read the same input."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from itertools import chain

import torch
from torch import Tensor
from typing_extensions import override

from dpbench.gradients.recording import Parameters
from dpbench.gradients.summands import Factored, Held, Summand, of_rows, row_squares
from dpbench.gradients.uses import Squares
from dpbench.gradients.uses.base import full, token_squares


class SideBySide(Summand):
    """The G_i of many parameters in one matrix: one norm and one product for all of them."""

    def __init__(self, rows: Sequence[Tensor]) -> None:
        """Copy them.

        Args:
            rows: G_i for each parameter, shape (B, numbers in it).
        """
        self._sizes = [t.shape[1] for t in rows]
        self._rows = torch.cat(list(rows), 1)

    @override
    def squares(self, *, precise: bool = False) -> Squares:
        return of_rows([row_squares((self._rows,), torch.float64 if precise else None)])

    @override
    def keep(self, samples: Tensor) -> None:
        self._rows[~samples] = 0.0

    @override
    def add_weighted_sum(self, factors: Tensor, onto: Sequence[Tensor]) -> None:
        for target, part in zip(onto, (factors @ self._rows).split(self._sizes), strict=True):
            target.add_(part.view_as(target))

    @override
    def add_weighted_sums(self, factors: Tensor, onto: Sequence[Tensor]) -> None:
        totals = torch.bmm(factors.unsqueeze(1), self._rows.view(*factors.shape, -1)).squeeze(1)
        for target, part in zip(onto, totals.split(self._sizes, 1), strict=True):
            target.add_(part.reshape(target.shape))


class SameInput(Summand):
    """Linear layers that read the same tokens: their squared norms have one Gram matrix of these in common."""

    def __init__(self, layers: Sequence[Factored]) -> None:
        """Put them together.

        Args:
            layers: each with one weight.
        """
        self._layers = layers

    @override
    def squares(self, *, precise: bool = False) -> Squares:
        # Σ_l ‖Σ_τ b_lτ a_τᵀ‖² = ⟨A Aᵀ, Σ_l B_l B_lᵀ⟩.
        def exact(t: Tensor) -> Tensor:
            return t.double() if precise else full(t)

        a = [exact(term.a) for term in self._layers[0].terms]
        return token_squares(a, *([exact(term.b) for term in layer.terms] for layer in self._layers))

    @override
    def keep(self, samples: Tensor) -> None:
        for layer in self._layers:
            layer.keep(samples)

    @override
    def add_weighted_sum(self, factors: Tensor, onto: Sequence[Tensor]) -> None:
        for layer, target in zip(self._layers, onto, strict=True):
            layer.add_weighted_sum(factors, [target])

    @override
    def add_weighted_sums(self, factors: Tensor, onto: Sequence[Tensor]) -> None:
        for layer, target in zip(self._layers, onto, strict=True):
            layer.add_weighted_sums(factors, [target])


def joined(summands: Mapping[Parameters, Summand], groups: Mapping[Tensor, int]) -> dict[Parameters, Summand]:
    """Summands with those of one group put together that are cheaper so.

    Args:
        summands: complete.
        groups: of each parameter.
    """
    result: dict[Parameters, Summand] = {}
    small: dict[int, dict[Parameters, tuple[Tensor, ...]]] = defaultdict(dict)
    reading: dict[Hashable, dict[Parameters, Factored]] = defaultdict(dict)
    for parameters, summand in summands.items():
        group = groups[parameters[0]]
        if isinstance(summand, Held) and (rows := summand.rows()) is not None:
            small[group][parameters] = rows
        elif isinstance(summand, Factored) and summand.by_tokens:
            reading[group, *map(_memory, (term.a for term in summand.terms))][parameters] = summand
        else:
            result[parameters] = summand
    for held in small.values():
        result[_all(held)] = SideBySide(list(chain(*held.values())))
    for layers in reading.values():
        of_layers = list(layers.values())
        result[_all(layers)] = of_layers[0] if len(of_layers) == 1 else SameInput(of_layers)
    return result


def _memory(t: Tensor) -> Hashable:
    """What two tensors that exist at once have in common only if they are the same numbers."""
    return t.data_ptr(), t.shape, t.stride(), t.dtype


def _all(parts: Mapping[Parameters, object]) -> Parameters:
    return tuple(chain(*parts))
