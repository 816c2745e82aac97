"""Per-sample gradients of one micro-batch, ready to be clipped and summed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from dpbench.gradients.flat import FlatParameters
from dpbench.gradients.joined import joined
from dpbench.gradients.summands import CANCELLING, LEAST, SEVERELY, Summand


class Tape:
    """G_i = Σ_j w_j ∇f(θ_j; x_i) of the samples i of a micro-batch, or of one of each of S seeds, one after the other.

    Attributes:
        losses: f(θ_j; x_i) at the first point of the query, shape (B,), detached.
    """

    def __init__(
        self,
        losses: Tensor,
        flat: FlatParameters,
        summands: Mapping[tuple[Tensor, ...], Summand],
        groups: Mapping[Tensor, int],
        seeds: int | None = None,
    ) -> None:
        """What a pass has recorded.

        Args:
            losses: shape (B,).
            flat: the parameters.
            summands: of the parameters used together.
            groups: of each parameter.
            seeds: S; None for the samples of one run.
        """
        self.losses = losses
        self._flat = flat
        self._summands = joined(summands, groups)
        self._groups = groups
        self._seeds = seeds
        self._norms: Tensor | None = None
        self._rough: Tensor | None = None
        self._doubtful = losses.new_zeros((), dtype=torch.bool)
        self._precise = False

    def norms(self) -> Tensor:
        """Norms of each parameter group and sample, shape (G, B); inf where the square of one is not finite."""
        if self._norms is None:
            squares, parts = self._squares(precise=False)
            self._doubtful = (squares < CANCELLING * parts) | ~squares.isfinite()
            self._norms = _roots(squares)
        return self._norms

    def doubtful(self) -> Tensor:
        """Whether norms may be wrong, for parts that nearly cancel or squares beyond the largest number; a flag."""
        self.norms()
        return self._doubtful.any() if self._rough is None else self.losses.new_zeros((), dtype=torch.bool)

    def refine(self) -> None:
        """Take norms that may be wrong in double precision, and sums where that alone gives what the norms speak of.

        All other norms stay as they are: what a sample adds does not depend on whether there is a doubtful one.
        """
        self._rough = rough = self.norms()
        squares, parts = self._squares(precise=True)
        norms = _roots(squares.maximum(LEAST * parts).to(rough.dtype))
        severely = (squares < SEVERELY * parts) | ~rough.isfinite()
        self._precise = bool((self._doubtful & norms.isfinite() & severely).any())
        self._norms = torch.where(self._doubtful, norms, rough)

    def overflows(self, sums: Iterable[Tensor]) -> Tensor:
        """Whether one of the sums of `weighted_sum` is not finite, and may be in double precision; a flag."""
        if self._precise:
            return self.losses.new_zeros((), dtype=torch.bool)
        return not_finite(sums)

    def sum_precisely(self) -> None:
        """Take sums in double precision from now on: a factor above 1 may take numbers beyond single precision."""
        self._precise = True

    def _squares(self, *, precise: bool) -> tuple[Tensor, Tensor]:
        """Squared norms of each group and sample, and of their parts; in double precision if asked for."""
        dtype = torch.float64 if precise else self._flat.vector.dtype
        squares = self._flat.vector.new_zeros(max(self._groups.values()) + 1, len(self.losses), dtype=dtype)
        parts = torch.zeros_like(squares)
        for parameters, summand in self._summands.items():
            found = summand.squares(precise=precise)
            squares[self._groups[parameters[0]]] += found.whole
            parts[self._groups[parameters[0]]] += found.parts
        return squares, parts

    def whole_norms(self) -> Tensor:
        """Norms over all parameters, shape (B,)."""
        norms = self.norms()
        return norms[0] if len(norms) == 1 else torch.linalg.vector_norm(norms, dim=0)

    def finite(self) -> Tensor:
        """Which samples have a finite gradient, boolean of shape (B,)."""
        return self.norms().isfinite().all(0)

    def leave_out_broken(self) -> None:
        """Let gradients that are not finite be zero in sums; their norms stay inf. Of the samples of one run."""
        finite = self.finite()
        for summand in self._summands.values():
            summand.keep(finite)

    def weighted_sum(self, factors: Tensor) -> Tensor:
        """Σ_i factor_i G_i as a flat vector; not finite where a sample's gradient is not, unless it was left out.

        Args:
            factors: shape (G, B), a factor for each parameter group and sample.

        Returns:
            Shape (d,); of S seeds (S, d), each the sum over its own samples.
        """
        lead = [] if self._seeds is None else [self._seeds]
        vector = self._flat.vector
        total = vector.new_zeros(*lead, len(self._flat), dtype=torch.float64 if self._precise else vector.dtype)
        views: dict[Tensor, Tensor] = dict(zip(self._flat.parameters, self._flat.views(total), strict=True))
        for parameters, summand in self._summands.items():
            own, onto = factors[self._groups[parameters[0]]], [views[p] for p in parameters]
            if self._seeds is None:
                summand.add_weighted_sum(own, onto)
            else:
                summand.add_weighted_sums(own.view(self._seeds, -1), onto)
        return total.to(vector.dtype)


def not_finite(sums: Iterable[Tensor]) -> Tensor:
    """Whether a number of one of the sums is not finite, or all together are beyond all numbers; a flag."""
    return ~torch.stack([total.sum() for total in sums]).isfinite().all()


def _roots(squares: Tensor) -> Tensor:
    """Norms of squares; inf for what is no number."""
    return squares.clamp(min=0).sqrt().nan_to_num(nan=torch.inf, posinf=torch.inf)
