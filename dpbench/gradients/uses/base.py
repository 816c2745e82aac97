"""How a parameter enters a layer's computation, and so what its per-sample gradient is made of."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

# Of the shortest gradient that a clip scales up (dpbench.clip.SMALLEST_NORM).
SMALLEST_SQUARE = 1e-30


class Term(NamedTuple):
    """One call of a layer at one iterate; the per-sample gradient of the call is a bilinear function of a and b.

    Attributes:
        a: what the layer read, shape (B, m, ...): the m rows of the model's input that belong to one sample.
        b: gradient of the loss with respect to what the layer gave, shape (B, m, ...).
        extra: what else a use needs of the call, a named tuple of tensors that is the same for all samples; a list,
            one for each seed, where samples of several seeds are in one term.
        output: what the layer gave, of the shape of b, where that spares a use work; None where it would not, or is
            not known to working precision.
    """

    a: Tensor
    b: Tensor
    extra: Any = None
    output: Tensor | None = None

    def samples(self, which: slice) -> Term:
        """The term of some of the samples."""
        if which.start == 0 and which.stop >= len(self.b):
            return self
        output = None if self.output is None else self.output[which]
        return Term(self.a[which], self.b[which], self.extra, output)

    def kept(self, samples: Tensor) -> Term:
        """The term with zeros for all but some samples, boolean of shape (B,)."""

        def masked(t: Tensor) -> Tensor:
            return t.masked_fill(~samples.view(-1, *[1] * (t.dim() - 1)), 0)

        return Term(masked(self.a), masked(self.b), self.extra, None if self.output is None else masked(self.output))

    def precise(self) -> Term:
        """The term in double precision, which the output does not have."""
        extra = None if self.extra is None else type(self.extra)(*(part.double() for part in self.extra))
        return Term(self.a.double() if self.a.is_floating_point() else self.a, self.b.double(), extra)

    def by_seed(self, seeds: int) -> list[Term]:
        """The terms of `seeds` seeds, which have equally many samples, one seed after the other."""
        if seeds == 1:
            return [self]
        extras = [None] * seeds if self.extra is None else self.extra
        outputs = [None] * seeds if self.output is None else self.output.chunk(seeds)
        return [Term(*parts) for parts in zip(self.a.chunk(seeds), self.b.chunk(seeds), extras, outputs, strict=True)]


class Squares(NamedTuple):
    """Squared norms of per-sample gradients that are sums of parts.

    Attributes:
        whole: of the sums, shape (B,).
        parts: squared norms of the parts, added up, where `whole` is made of their inner products: its rounding errors
            are in proportion to them, however small it is. Zero where it is not, inf where `whole` may have
            underflowed. Shape (B,) or ().
    """

    whole: Tensor
    parts: Tensor


@dataclass(frozen=True)
class Strategy:
    """A way to the norms and weighted sums of the per-sample gradients G_i.

    Attributes:
        kind: "hold" makes all G_i and keeps them; "pass" makes them for the norms, a chunk at a time, and makes the
            weighted sum from a and b; "gram" never makes them: ‖G_i‖² comes from inner products of a and b.
        method: which kernel is used, where there is a choice.
        chunk: samples at a time; 0 for all.
    """

    kind: str
    method: str = ""
    chunk: int = 0


@dataclass(frozen=True)
class Use(ABC):
    """One kind of use of parameters, with its settings; equal uses of equal shapes cost the same.

    Attributes:
        shapes: of the parameters used, of which the first is the weight.
        hold_factor: per-sample gradients are held where they take at most so many times the memory of what they are
            made of.
    """

    hold_factor: ClassVar[float] = 1.5

    shapes: tuple[tuple[int, ...], ...]

    @property
    def size(self) -> int:
        """Numbers in one per-sample gradient."""
        return sum(torch.Size(shape).numel() for shape in self.shapes)

    @abstractmethod
    def strategies(self, term: Term, points: int) -> dict[Strategy, float]:
        """The strategies that can be used, with the multiplications that each takes for a sample.

        Args:
            term: any term of the use.
            points: how many terms there will be.
        """

    @abstractmethod
    def rows(self, term: Term, strategy: Strategy) -> tuple[Tensor, ...]:
        """G_i of a term: for each parameter (B, numbers in it)."""


class Factorable(Use):
    """One whose G_i need not be made: a and b give norms and weighted sums, too."""

    def reach(self, term: Term) -> Tensor:
        """(Σ_τ ‖G_iτ‖)² over tokens or pixels τ at most, shape (B,): rounding errors of G_i are in proportion to it."""
        dtype = full(term.b[:0]).dtype
        of_a, of_b = (torch.linalg.vector_norm(t.flatten(1), dim=1, dtype=dtype) for t in (term.a, term.b))
        product: Tensor = of_a * of_b
        return product.square_()

    @abstractmethod
    def gram_squares(self, terms: Sequence[Term], strategy: Strategy) -> Squares:
        """‖Σ_j G_ij‖² over terms j without making G_ij."""

    @abstractmethod
    def add_weighted_sum(self, term: Term, factors: Tensor, onto: Sequence[Tensor]) -> None:
        """Add Σ_i factor_i G_i of a term to tensors of the parameters' shapes.

        Args:
            term: with B samples.
            factors: shape (B,).
            onto: one tensor for each of `shapes`.
        """

    def add_weighted_sums(self, term: Term, factors: Tensor, onto: Sequence[Tensor]) -> None:
        """Add the sums of the samples of each seed.

        Args:
            term: with S B samples, seed by seed.
            factors: shape (S, B).
            onto: for each of `shapes` a tensor (S, *shape).
        """
        for part, own, *targets in zip(term.by_seed(len(factors)), factors, *onto, strict=True):
            self.add_weighted_sum(part, own, targets)


def full(t: Tensor) -> Tensor:
    """A tensor in the precision in which norms and sums are taken: half precision becomes float32."""
    return t.float() if t.dtype in (torch.bfloat16, torch.float16) else t


def scaled(t: Tensor, factors: Tensor) -> Tensor:
    """factor_i t_i for each sample i, in full precision."""
    return full(t) * factors.view(-1, *[1] * (t.dim() - 1))


def pairs(count: int) -> list[tuple[int, int]]:
    """(j, k), j <= k, for all products of `count` things with each other, each pair once."""
    return [(j, k) for j in range(count) for k in range(j, count)]


def pieces(batch: int, numbers: int, device: torch.device) -> list[slice]:
    """Slices of a batch whose temporaries, of this many numbers per sample, stay in cache or small on a GPU."""
    most = 2**26 if device.type == "cuda" else 2**18
    size = max(1, most // numbers)
    return [slice(start, start + size) for start in range(0, batch, size)]


def lost(squares: Tensor, reach: Tensor) -> Tensor:
    """Whether squared norms may lack a thousandth of themselves, or of the smallest that matters, to underflow.

    Args:
        squares: products of sums a of squares and b of others, shape (B,).
        reach: sum over these products of a times the squares in b and b times those in a. What underflows of each
            square is at most the smallest number there is.
    """
    number = torch.finfo(squares.dtype)
    scale = math.sqrt(number.tiny * number.eps * 2**10)  # on both sides, since its square is hardly a number
    return reach * scale > squares.clamp(min=SMALLEST_SQUARE) / scale


# Of one pair of terms j <= k: the two factors of the inner products of all pairs of their tokens, each (n, T_j, T_k),
# which may be overwritten, and whether j = k.
Grams = tuple[Tensor, Tensor, bool]


def squares_of_grams(samples: Sequence[slice], width: int, grams: Callable[[slice], Iterable[Grams]]) -> Squares:
    """‖Σ_jt G_ijt‖² over terms j and tokens t from the inner products of all pairs of parts.

    Args:
        samples: pieces of a batch.
        width: most products that an inner product adds up.
        grams: makes the factors of a piece, for all pairs of terms.
    """
    found = [_piece_squares(grams(piece), width) for piece in samples]
    whole, parts, reach = found[0] if len(found) == 1 else (torch.cat(of) for of in zip(*found, strict=True))
    return Squares(whole, parts.masked_fill(lost(whole, reach), torch.inf))


def _piece_squares(grams: Iterable[Grams], width: int) -> tuple[Tensor, Tensor, Tensor]:
    """Squared norms, those of the parts, and what `lost` asks for, of some samples."""
    whole, parts, reach = [], [], []
    for x, y, same in grams:
        if same:
            of_x, of_y = (t.diagonal(dim1=1, dim2=2) for t in (x, y))
            parts.append((of_x * of_y).sum(1))
            # No entry of a Gram matrix is more than its trace, and all together no more than its size times that.
            reach.append((of_x.sum(1) + of_y.sum(1)).mul_(width * x.shape[1]))
        products = x.mul_(y).flatten(1).sum(1)
        whole.append(products if same else products.mul_(2))
    return _total(whole), _total(parts), _total(reach)


def _total(found: Sequence[Tensor]) -> Tensor:
    return found[0] if len(found) == 1 else torch.stack(list(found)).sum(0)


def token_squares(a: Sequence[Tensor], *of_layers: Sequence[Tensor]) -> Squares:
    """Σ_l ‖Σ_j B_ljᵀ A_j‖² = Σ_jk ⟨A_j A_kᵀ, Σ_l B_lj B_lkᵀ⟩ of each sample, over layers l that read the same A_j.

    Args:
        a: for each j shape (B, T_j, d).
        of_layers: for each l and j shape (B, T_j, p_l).
    """
    first, *others = of_layers

    def grams(piece: slice) -> Iterator[Grams]:
        for j, k in pairs(len(a)):
            gram_b = torch.bmm(first[j][piece], first[k][piece].transpose(1, 2))
            for b in others:
                gram_b.baddbmm_(b[j][piece], b[k][piece].transpose(1, 2))
            yield torch.bmm(a[j][piece], a[k][piece].transpose(1, 2)), gram_b, j == k

    width = max(a[0].shape[2], sum(b[0].shape[2] for b in of_layers))
    return squares_of_grams(pieces(len(a[0]), 2 * a[0].shape[1] ** 2, a[0].device), width, grams)
