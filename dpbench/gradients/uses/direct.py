"""Parameters whose per-sample gradients a layer's backward pass gives as they are."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from typing_extensions import override

from dpbench.gradients.uses.base import Strategy, Term, Use, full


@dataclass(frozen=True)
class Direct(Use):
    """Biases, gains of norms, tokens: b holds the per-sample gradients, shape (B, *shape); a is not used."""

    @override
    def strategies(self, term: Term, points: int) -> dict[Strategy, float]:
        return {Strategy("hold"): points * self.size}

    @override
    def rows(self, term: Term, strategy: Strategy) -> tuple[Tensor, ...]:
        return (full(term.b).reshape(len(term.b), -1),)
