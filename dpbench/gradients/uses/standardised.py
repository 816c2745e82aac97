"""Convolutions with scaled weight standardisation: the gradient of the filter goes through the standardisation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import override

from dpbench.gradients.uses.base import Squares, Strategy, Term, full, pairs
from dpbench.gradients.uses.patches import Patches

# Of a gain: beyond it, what a filter gives is lost in the rounding of the output.
LARGEST_BIAS = 64.0


class Standardisation(NamedTuple):
    """The standardisation at one iterate: filter_p = gain_p (w_p - mean_p) scale_p with n weights a filter.

    Attributes:
        filters: (w - mean) scale, shape (P, n).
        scale: shape (P, 1).
        moves: 1 where the scale depends on the weights, 0 where it is at its bound, shape (P, 1).
        gain: shape (P, 1).
        bias: what the layer adds to the output, shape (P, 1).
    """

    filters: Tensor
    scale: Tensor
    moves: Tensor
    gain: Tensor
    bias: Tensor

    def shows_products(self) -> bool:
        """Whether (output - bias) / gain has what the filters give, to nearly the precision of the output."""
        return bool((self.bias.abs() <= LARGEST_BIAS * self.gain.abs()).all()) and bool(self.gain.all())


@dataclass(frozen=True)
class StandardisedPatches(Patches):
    """A kernel and, where it is trained, its gain (P,): `extra` of a term is the `Standardisation` of its iterate.

    With H the gradient of the filter that was applied: the gain's is ⟨H_p, filter_p⟩, the weight's is
    gain scale (H - mean(H) - ⟨H, filter⟩ filter), for each output channel p.
    """

    @override
    def rows(self, term: Term, strategy: Strategy) -> tuple[Tensor, ...]:
        (rows,) = super().rows(term, strategy)
        weights, gains = self._through(rows.view(len(rows), self.shapes[0][0], -1), term.extra)
        return (weights.flatten(1), gains)[: len(self.shapes)]

    def _through(self, filter_gradients: Tensor, extra: Standardisation) -> tuple[Tensor, Tensor]:
        """Gradients of weights (B, P, n) and gains (B, P) from those of the filters (B, P, n), which are overwritten.

        By products over the samples of each output channel, which read and write the gradients once.
        """
        by_channel = filter_gradients.transpose(0, 1)
        count = extra.filters.shape[1]
        basis = torch.stack([torch.full_like(extra.filters, count**-0.5), extra.filters], dim=1)  # (P, 2, n)
        along = torch.bmm(by_channel, basis.transpose(1, 2))
        gains = along[..., 1].t().clone()
        along[..., 1] *= extra.moves
        by_channel.baddbmm_(along, basis, alpha=-1)
        return filter_gradients.mul_(extra.gain * extra.scale), gains

    @override
    def reach(self, term: Term) -> Tensor:
        # Projections lengthen nothing; gains' gradients are of filters, which have norms of at most 1.
        extra: Standardisation = term.extra
        return super().reach(term) * (extra.gain * extra.scale).abs().max().clamp(min=1).square()

    @override
    def gram_squares(self, terms: Sequence[Term], strategy: Strategy) -> Squares:
        """Of the weights, what the projections leave of the filters' inner products; and of the gains.

        With s = gain scale, u the unit vector of ones and f the filter of an iterate, or 0 where the scale is at its
        bound, two iterates have ⟨s(H - ⟨H,u⟩u - ⟨H,f⟩f), s'(H' - ⟨H',u⟩u - ⟨H',f'⟩f')⟩ for each output channel, and
        u is orthogonal to f and f'.
        """
        extras: list[Standardisation] = [term.extra for term in terms]
        factors = [(extra.gain * extra.scale).view(-1) for extra in extras]
        within = [
            Term(term.a, full(term.b) * factor.view(-1, 1, 1)) for term, factor in zip(terms, factors, strict=True)
        ]
        squares, parts = super().gram_squares(within, strategy)
        along = [self._along(terms, j) for j in range(len(terms))]  # of ⟨H_j, u⟩, ⟨H_j, filter_0⟩, ⟨H_j, filter_1⟩, ...
        moves = [extra.moves.view(-1) for extra in extras]
        for j, k in pairs(len(terms)):
            (ones_j, *of_j), (ones_k, *of_k) = along[j], along[k]
            overlap = moves[j] * moves[k] * (extras[j].filters * extras[k].filters).sum(1)
            removed = ones_j * ones_k + moves[k] * of_j[k] * of_k[k] + moves[j] * of_j[j] * of_k[j]
            removed -= overlap * of_j[j] * of_k[k]
            squares -= (1 if j == k else 2) * (factors[j] * factors[k] * removed).sum(1)
        if len(self.shapes) == 1:
            return Squares(squares, parts)
        gains = sum(of[1 + j] for j, of in enumerate(along))
        assert isinstance(gains, Tensor)
        return Squares(squares + gains.square().sum(1), parts)

    def _along(self, terms: Sequence[Term], j: int) -> list[Tensor]:
        """⟨H_j, u⟩ and ⟨H_j, f⟩ for the filters of all iterates, (B, P) each: what they give of the input, times b.

        What the iterate's own filters give is in the layer's output, where that is kept.
        """
        term, extras = terms[j], [term.extra for term in terms]
        a, b = full(term.a).flatten(0, 1), full(term.b).flatten(0, 1).flatten(2)
        settings = (None, self.stride, self.padding, self.dilation)
        ones = b.new_full((1, 1, *self.shapes[0][2:]), extras[0].filters.shape[1] ** -0.5)
        box = F.conv2d(a.sum(1, keepdim=True), ones, *settings).flatten(2)
        products = [torch.bmm(b, box.transpose(1, 2)).squeeze(2)]
        known = {} if term.output is None else {j: self._own(term, b)}
        missing = [k for k in range(len(terms)) if k not in known]
        if missing:
            filters = torch.cat([extras[k].filters.view(self.shapes[0]) for k in missing])
            outputs = F.conv2d(a, filters, *settings).flatten(2).chunk(len(missing), dim=1)
            known |= {k: (b * output).sum(2) for k, output in zip(missing, outputs, strict=True)}
        products += [known[k] for k in range(len(terms))]
        return [product.view(*term.b.shape[:2], -1).sum(1) for product in products]

    def _own(self, term: Term, b: Tensor) -> Tensor:
        """⟨H, filter⟩ of the rows (B m, P), from the layer's output."""
        assert term.output is not None
        extra: Standardisation = term.extra
        given = term.output.flatten(0, 1).flatten(2) - extra.bias
        return given.mul_(b).sum(2) / extra.gain.view(-1)

    @override
    def add_weighted_sum(self, term: Term, factors: Tensor, onto: Sequence[Tensor]) -> None:
        filter_gradient = torch.zeros_like(onto[0])
        super().add_weighted_sum(term, factors, [filter_gradient])
        weight, gain = self._through(filter_gradient.view(1, self.shapes[0][0], -1), term.extra)
        onto[0].add_(weight.view(self.shapes[0]))
        if len(onto) > 1:
            onto[1].add_(gain[0])
