"""What several layers have in common: products with a weight, and biases."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from dpbench.gradients.recording import Part, Recording
from dpbench.gradients.uses import Direct, Outer, Term
from dpbench.gradients.uses.base import full


def linear(recording: Recording, x: Tensor, weight: Tensor, bias: Tensor | None, *, transposed: bool = False) -> Tensor:
    """A linear map with book-keeping.

    Args:
        recording: of the pass.
        x: shape (n, ..., d).
        weight: shape (p, d), or (d, p) where it is stored transposed.
        bias: shape (p,), or None.
        transposed: how the weight is stored.

    Returns:
        Shape (n, ..., p).
    """
    kept = x.detach()

    def term(b: Tensor) -> Term:
        return Term(recording.tokens(kept), recording.tokens(b))

    parts = [Part((weight,), Outer((tuple(weight.shape),), transposed), term)]
    if bias is not None:
        parts += bias_parts(recording, bias, full)
    return recording.watch(recording.weights.linear(x, weight, bias, transposed), kept, parts)


def bias_parts(recording: Recording, bias: Tensor, summed: Callable[[Tensor], Tensor]) -> list[Part]:
    """The part of a bias: the output gradient, summed over what is not a sample.

    Args:
        recording: of the pass.
        bias: the parameter.
        summed: brings the output gradient to shape (n, ..., *bias).
    """
    use = Direct((tuple(bias.shape),))
    return [Part((bias,), use, lambda b: recording.per_row(bias, summed(b)))]
