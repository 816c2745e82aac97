"""Linear layers: G_i = Σ_τ b_τ a_τᵀ over the tokens τ of sample i."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from dpbench.gradients.uses.base import Factorable, Squares, Strategy, Term, full, lost, scaled, token_squares


@dataclass(frozen=True)
class Outer(Factorable):
    """A weight (p, d) applied to tokens: a is (B, T, d), b is (B, T, p).

    Attributes:
        transposed: the weight is stored as (d, p), as in transformers' Conv1D.
    """

    transposed: bool = False

    @override
    def strategies(self, term: Term, points: int) -> dict[Strategy, float]:
        tokens, d, p = term.a.shape[1], term.a.shape[2], term.b.shape[2]
        product = points * tokens * d * p
        gram = points * (points + 1) / 2 * tokens**2 * (d + p)
        return {
            Strategy("gram"): gram + product,
            Strategy("hold"): product + 2 * d * p,
            Strategy("pass", chunk=8): 2 * product + d * p,
        }

    @override
    def rows(self, term: Term, strategy: Strategy) -> tuple[Tensor, ...]:
        a, b = full(term.a), full(term.b)
        left, right = (a, b) if self.transposed else (b, a)
        return (torch.bmm(left.transpose(1, 2), right).flatten(1),)

    @override
    def gram_squares(self, terms: Sequence[Term], strategy: Strategy) -> Squares:
        a, b = [full(t.a) for t in terms], [full(t.b) for t in terms]
        if len(terms) == 1 and a[0].shape[1] == 1:  # one token needs no matrices
            of_a, of_b = (t[0].square().sum((1, 2)) for t in (a, b))
            squares = of_a * of_b
            reach = of_a * b[0].shape[2] + of_b * a[0].shape[2]
            return Squares(squares, squares.masked_fill(lost(squares, reach), torch.inf))
        return token_squares(a, b)

    @override
    def add_weighted_sum(self, term: Term, factors: Tensor, onto: Sequence[Tensor]) -> None:
        left, right = self._factors_of_sum(term, factors)
        onto[0].addmm_(left.flatten(0, 1).t(), right.flatten(0, 1))

    @override
    def add_weighted_sums(self, term: Term, factors: Tensor, onto: Sequence[Tensor]) -> None:
        left, right = (t.reshape(len(factors), -1, t.shape[2]) for t in self._factors_of_sum(term, factors))
        onto[0].baddbmm_(left.transpose(1, 2), right)

    def _factors_of_sum(self, term: Term, factors: Tensor) -> tuple[Tensor, Tensor]:
        """Left and right (B, T, ...) of the product that is the weighted sum."""
        a, b = full(term.a), full(term.b)
        # The factors go where there are fewer numbers to multiply.
        if a.shape[2] < b.shape[2]:
            a = scaled(a, factors)
        else:
            b = scaled(b, factors)
        return (a, b) if self.transposed else (b, a)
