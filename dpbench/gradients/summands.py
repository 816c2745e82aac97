"""The parts of a tape: per-sample gradients of some parameters, as a sum of terms over calls and iterates.

The terms of a parameter are added up before any norm is taken, so clipping sees the mixture, exactly.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from typing_extensions import override

from dpbench.gradients.uses import Factorable, Lookup, Outer, Squares, Strategy, Term, Use, cross_products

# Inner products lose some 2^-24 of the parts' squares. Where the whole is smaller than the parts by more than this, it
# may have lost so much of itself that its norm, and with it what is clipped, is wrong.
CANCELLING = 2.0**-6
# The same of weighted sums, of which 2^-24 of the parts is lost: a sample would then have more than its bound.
SEVERELY = 2.0**-26
# Norms in double precision are not smaller than by what that may have lost.
LEAST = 2.0**-40


class Summand(ABC):
    """G_i = Σ_j G_ij over terms j, in a form that gives norms and weighted sums."""

    @abstractmethod
    def squares(self, *, precise: bool = False) -> Squares:
        """‖G_i‖².

        Args:
            precise: terms nearly cancel, so that inner products are to be in double precision.
        """

    @abstractmethod
    def keep(self, samples: Tensor) -> None:
        """Let G_i be zero but for some samples, boolean of shape (B,); norms are those of before."""

    @abstractmethod
    def add_weighted_sum(self, factors: Tensor, onto: Sequence[Tensor]) -> None:
        """Add Σ_i factor_i G_i, factors of shape (B,), to tensors of the parameters' shapes.

        In double precision where the tensors are, but for gradients that are kept in another.
        """

    @abstractmethod
    def add_weighted_sums(self, factors: Tensor, onto: Sequence[Tensor]) -> None:
        """Add the sums of the samples of each seed, factors of shape (S, B/S), to tensors (S, *parameter)."""


class Growing(Summand):
    """One whose terms are added as a pass goes back through the calls that they are of."""

    @abstractmethod
    def add(self, term: Term, use: Use) -> None:
        """Add a term."""


class Held(Growing):
    """All G_i are made and kept: B times the size of the parameters. a and b are not.

    Uses may differ from term to term.
    """

    def __init__(self, strategy: Strategy, expected: int = 1) -> None:
        """Nothing so far.

        Args:
            strategy: kernel and chunks by which G_i are made.
            expected: terms that will be added; fewer or more only take longer.
        """
        self._strategy = strategy
        self._missing = expected
        self._chunks: list[tuple[Tensor, ...]] = []
        self._squares: list[Tensor] = []

    @override
    def add(self, term: Term, use: Use) -> None:
        """Add a term, whose rows may be overwritten.

        With the last one, norms are taken while a chunk is in cache; not of few numbers (joined.py).
        """
        first = not self._chunks
        self._missing -= 1
        self._squares = []
        for i, part in enumerate(chunks(len(term.b), self._strategy.chunk)):
            rows = use.rows(term.samples(part), self._strategy)
            if first:
                self._chunks.append(rows)
            else:
                rows = tuple(have.add_(new) for have, new in zip(self._chunks[i], rows, strict=True))
            if self._missing <= 0 and not few(rows):
                self._squares.append(row_squares(rows))

    def rows(self) -> tuple[Tensor, ...] | None:
        """G_i for each parameter, shape (B, numbers in it), where there are few of them; else None."""
        return self._chunks[0] if len(self._chunks) == 1 and few(self._chunks[0]) else None

    @override
    def squares(self, *, precise: bool = False) -> Squares:
        """‖G_i‖² of the sums as they are."""
        if precise:
            return of_rows([row_squares(rows, torch.float64) for rows in self._chunks])
        if len(self._squares) == len(self._chunks):
            return of_rows(self._squares)
        return of_rows([row_squares(rows) for rows in self._chunks])

    @override
    def keep(self, samples: Tensor) -> None:
        """Let the others be zero."""
        parts = samples.split([len(rows[0]) for rows in self._chunks])
        for rows, part in zip(self._chunks, parts, strict=True):
            for t in rows:
                t[~part] = 0.0

    @override
    def add_weighted_sum(self, factors: Tensor, onto: Sequence[Tensor]) -> None:
        """Add Σ_i factor_i G_i, one product for each chunk and parameter."""
        parts = factors.split([len(rows[0]) for rows in self._chunks])
        for target, *of_chunks in zip(onto, *self._chunks, strict=True):
            total = parts[0] @ of_chunks[0]
            for rows, part in zip(of_chunks[1:], parts[1:], strict=True):
                total.addmv_(rows.t(), part)
            target.add_(total.view_as(target))

    @override
    def add_weighted_sums(self, factors: Tensor, onto: Sequence[Tensor]) -> None:
        """Add the sums of each seed; all G_i are in one chunk."""
        (of_all,) = self._chunks
        for target, rows in zip(onto, of_all, strict=True):
            total = torch.bmm(factors.unsqueeze(1), rows.view(*factors.shape, -1))
            target.add_(total.view_as(target))


class Factored(Growing):
    """a and b of each call are kept, and G_i only made for the norms, if at all. All terms are of one use."""

    def __init__(self, use: Factorable, strategy: Strategy) -> None:
        self.use = use
        self.terms: list[Term] = []
        self._strategy = strategy

    @property
    def by_tokens(self) -> bool:
        """Whether norms come from Gram matrices of a linear layer's tokens."""
        return self._strategy.kind == "gram" and isinstance(self.use, Outer) and self.terms[0].a.shape[1] > 1

    @override
    def add(self, term: Term, use: Use) -> None:
        """Add a term."""
        self.terms.append(term if self._strategy.kind == "gram" else term._replace(output=None))

    @override
    def squares(self, *, precise: bool = False) -> Squares:
        """‖G_i‖²."""
        terms = [term.precise() for term in self.terms] if precise else self.terms
        if self._strategy.kind == "gram":
            return self.use.gram_squares(terms, self._strategy)
        squares = []
        for part in chunks(len(terms[0].b), self._strategy.chunk):
            rows = self.use.rows(terms[0].samples(part), self._strategy)
            for term in terms[1:]:
                more = self.use.rows(term.samples(part), self._strategy)
                rows = tuple(have.add_(new) for have, new in zip(rows, more, strict=True))
            squares.append(row_squares(rows))
        # What is left of parts that cancel is right, up to where weighted sums, taken in another order, would be wrong.
        reach = torch.stack([self.use.reach(term) for term in terms]).sum(0)
        return Squares(torch.cat(squares), reach * (1.0 if precise else SEVERELY / CANCELLING))

    @override
    def keep(self, samples: Tensor) -> None:
        """Let what the others are made of be zero, in copies: the model's inputs may be among it."""
        self.terms = [term.kept(samples) for term in self.terms]

    @override
    def add_weighted_sum(self, factors: Tensor, onto: Sequence[Tensor]) -> None:
        """Add Σ_i factor_i G_i, one product for each term."""
        for term in self._like(onto):
            self.use.add_weighted_sum(term, factors.to(onto[0].dtype), onto)

    @override
    def add_weighted_sums(self, factors: Tensor, onto: Sequence[Tensor]) -> None:
        """Add the sums of each seed, one product for each term."""
        for term in self._like(onto):
            self.use.add_weighted_sums(term, factors.to(onto[0].dtype), onto)

    def _like(self, onto: Sequence[Tensor]) -> Iterable[Term]:
        return (term.precise() for term in self.terms) if onto[0].dtype == torch.float64 else self.terms


class Tied(Growing):
    """One weight as the table of an embedding and as a linear layer, as in GPT-2: their cross term is exact."""

    GRAM = Strategy("gram")

    def __init__(self) -> None:
        self._parts: dict[type[Use], Factored] = {}

    @override
    def add(self, term: Term, use: Use) -> None:
        """Add a term of either use."""
        assert isinstance(use, Factorable), "an embedding's or a linear layer's"
        self._parts.setdefault(type(use), Factored(use, self.GRAM)).add(term, use)

    @override
    def squares(self, *, precise: bool = False) -> Squares:
        """‖G_i + H_i‖² = ‖G_i‖² + ‖H_i‖² + 2 ⟨G_i, H_i⟩."""
        of_parts = [part.squares(precise=precise) for part in self._parts.values()]
        whole, parts = (torch.stack(both).sum(0) for both in zip(*of_parts, strict=True))
        if len(self._parts) == 2:
            lookups, outers = self._parts[Lookup].terms, self._parts[Outer].terms
            if precise:
                lookups, outers = [term.precise() for term in lookups], [term.precise() for term in outers]
            whole = whole + 2 * cross_products(lookups, outers)
        return Squares(whole, parts)

    @override
    def keep(self, samples: Tensor) -> None:
        """Let the others be zero in both."""
        for part in self._parts.values():
            part.keep(samples)

    @override
    def add_weighted_sum(self, factors: Tensor, onto: Sequence[Tensor]) -> None:
        """Add Σ_i factor_i (G_i + H_i)."""
        for part in self._parts.values():
            part.add_weighted_sum(factors, onto)

    @override
    def add_weighted_sums(self, factors: Tensor, onto: Sequence[Tensor]) -> None:
        """Add the sums of each seed."""
        for part in self._parts.values():
            part.add_weighted_sums(factors, onto)


class BySeed(Growing):
    """The samples of each seed in a summand of their own."""

    def __init__(self, parts: Sequence[Growing]) -> None:
        """Nothing so far.

        Args:
            parts: an empty summand for each seed.
        """
        self._parts = parts

    @override
    def add(self, term: Term, use: Use) -> None:
        """Add a term of all seeds."""
        for part, of_seed in zip(self._parts, term.by_seed(len(self._parts)), strict=True):
            part.add(of_seed, use)

    @override
    def squares(self, *, precise: bool = False) -> Squares:
        """‖G_i‖²."""
        of_seeds = [part.squares(precise=precise) for part in self._parts]
        return Squares(
            torch.cat([of.whole for of in of_seeds]), torch.cat([of.parts.expand_as(of.whole) for of in of_seeds])
        )

    @override
    def keep(self, samples: Tensor) -> None:
        """Let the others be zero, seed by seed."""
        for part, own in zip(self._parts, samples.chunk(len(self._parts)), strict=True):
            part.keep(own)

    @override
    def add_weighted_sum(self, factors: Tensor, onto: Sequence[Tensor]) -> None:
        """Add Σ_i factor_i G_i over all seeds."""
        for part, own in zip(self._parts, factors.chunk(len(self._parts)), strict=True):
            part.add_weighted_sum(own, onto)

    @override
    def add_weighted_sums(self, factors: Tensor, onto: Sequence[Tensor]) -> None:
        """Add the sums of each seed, one after the other."""
        for part, own, *targets in zip(self._parts, factors, *onto, strict=True):
            part.add_weighted_sum(own, targets)


def summand_of(use: Use, strategy: Strategy, expected: int) -> Growing:
    """An empty summand for `expected` terms of a use."""
    if strategy.kind == "hold":
        return Held(strategy, expected)
    assert isinstance(use, Factorable), "no other use offers another strategy"
    return Factored(use, strategy)


def chunks(batch: int, size: int) -> list[slice]:
    """Slices of a batch of at most `size` samples; 0 for all at once."""
    size = size or batch
    return [slice(start, start + size) for start in range(0, batch, size)]


def few(rows: Sequence[Tensor]) -> bool:
    """Whether going through rows costs less than the calls that do it."""
    return sum(t.numel() for t in rows) <= (2**22 if rows[0].is_cuda else 2**16)


def of_rows(squares: Sequence[Tensor]) -> Squares:
    """Of chunks whose G_i were made: nothing that cancels is left to be added."""
    return Squares(torch.cat(list(squares)), squares[0].new_zeros(()))


def row_squares(rows: tuple[Tensor, ...], dtype: torch.dtype | None = None) -> Tensor:
    """‖G_i‖² of rows for each parameter, shape (B,)."""
    squares = torch.zeros((), device=rows[0].device)
    for t in rows:
        norms: Tensor = torch.linalg.vector_norm(t, dim=1, dtype=dtype)
        squares = squares + norms.square_()
    return squares
