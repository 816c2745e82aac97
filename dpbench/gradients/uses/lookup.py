"""Embeddings: row id of G_i is the sum of the output gradients where sample i looked id up."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from dpbench.gradients.uses.base import (
    Factorable,
    Grams,
    Squares,
    Strategy,
    Term,
    Use,
    full,
    pairs,
    pieces,
    scaled,
    squares_of_grams,
)
from dpbench.gradients.uses.outer import Outer
from dpbench.gradients.weights import with_offsets


@dataclass(frozen=True)
class Lookup(Factorable):
    """A table (V, d): a holds the ids (B, T), b is (B, T, d), zero where an id is padding."""

    @override
    def strategies(self, term: Term, points: int) -> dict[Strategy, float]:
        tokens, d = term.b.shape[1:]
        return {
            Strategy("gram"): points * (points + 1) / 2 * tokens**2 * d,
            Strategy("hold"): points * tokens * d + 3 * self.size,
        }

    @override
    def rows(self, term: Term, strategy: Strategy) -> tuple[Tensor, ...]:
        b, (size, d) = full(term.b), self.shapes[0]
        rows = b.new_zeros(len(b) * size, d)
        _add_at(rows, with_offsets(term.a, len(b), size), b)
        return (rows.view(len(b), -1),)

    @override
    def gram_squares(self, terms: Sequence[Term], strategy: Strategy) -> Squares:
        """Σ_jl Σ_ts [id_jt = id_ls] ⟨b_jt, b_ls⟩."""
        b = [full(t.b) for t in terms]

        def grams(piece: slice) -> Iterator[Grams]:
            for j, k in pairs(len(terms)):
                same = terms[j].a[piece].unsqueeze(2) == terms[k].a[piece].unsqueeze(1)
                yield torch.bmm(b[j][piece], b[k][piece].transpose(1, 2)), same, j == k

        samples = pieces(len(b[0]), 2 * b[0].shape[1] ** 2, b[0].device)
        return squares_of_grams(samples, b[0].shape[2], grams)

    @override
    def add_weighted_sum(self, term: Term, factors: Tensor, onto: Sequence[Tensor]) -> None:
        _add_at(onto[0], term.a, scaled(term.b, factors))

    @override
    def add_weighted_sums(self, term: Term, factors: Tensor, onto: Sequence[Tensor]) -> None:
        seeds, size = onto[0].shape[:2]
        sums = onto[0].new_zeros(seeds * size, onto[0].shape[2])
        below = Term(with_offsets(term.a, seeds, size), term.b)
        self.add_weighted_sum(below, factors.reshape(-1), [sums])
        onto[0].add_(sums.view_as(onto[0]))


def _add_at(table: Tensor, ids: Tensor, b: Tensor) -> None:
    """Add to the rows of a table (V, d) that ids (B, T) name what b (B, T, d) has for them, in a fixed order."""
    ids, b = ids.reshape(-1), b.flatten(0, 1)
    if b.is_cuda:  # index_add_ and scatter_add_ are not deterministic there
        table.add_(torch.ops.aten.embedding_dense_backward(b, ids, len(table), -1, False))
    else:
        table.index_add_(0, ids, b)


def cross_products(lookups: Sequence[Term], outers: Sequence[Term]) -> Tensor:
    """⟨G_i, H_i⟩ of a table's gradients G and those H of a linear layer with the same weight, shape (B,).

    Row id of H is Σ_s b_s[id] a_s, so the product with Σ_t b_t at row id_t is Σ_ts b_s[id_t] ⟨a_s, b_t⟩.
    """
    total = lookups[0].b.new_zeros(len(lookups[0].b), dtype=full(lookups[0].b).dtype)
    for lookup in lookups:
        for outer in outers:
            picked = full(outer.b).gather(2, lookup.a.unsqueeze(1).expand(-1, outer.b.shape[1], -1))
            total += (picked * torch.bmm(full(outer.a), full(lookup.b).transpose(1, 2))).sum((1, 2))
    return total


def can_tie(first: Use, second: Use) -> bool:
    """Whether `cross_products` covers two uses of one weight."""
    kinds = {type(first), type(second)}
    return kinds == {Lookup, Outer} and not any(isinstance(use, Outer) and use.transposed for use in (first, second))
