"""Convolutions: G_i = Σ_τ b_τ a_τᵀ over the pixels τ of sample i, where a_τ is the patch that pixel τ saw."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.grad import conv2d_weight
from typing_extensions import override

from dpbench.gradients.uses.base import (
    Factorable,
    Grams,
    Squares,
    Strategy,
    Term,
    full,
    pairs,
    pieces,
    scaled,
    squares_of_grams,
    token_squares,
)

# Samples at a time for the grouped convolution; which is fastest depends on shapes and device.
CHUNKS_ON_CPU = (2, 8, 32)


@dataclass(frozen=True)
class Patches(Factorable):
    """A kernel (P, C/groups, kh, kw): a is (B, m, C, H, W) with any uneven padding written out, b (B, m, P, H', W').

    Attributes:
        stride: along height and width, like the other pairs.
        padding: zeros on both sides.
        dilation: distance between the points of the kernel.
        groups: of channels.
    """

    # Of images, activations that no convolution reads are most of the memory.
    hold_factor: ClassVar[float] = 2.5

    stride: tuple[int, int] = (1, 1)
    padding: tuple[int, int] = (0, 0)
    dilation: tuple[int, int] = (1, 1)
    groups: int = 1

    @override
    def strategies(self, term: Term, points: int) -> dict[Strategy, float]:
        views, channels = term.a.shape[1:3]
        pixels, weight = term.b[0, 0, 0].numel(), self._weight_size
        product = points * views * pixels * weight
        chunks = (0,) if term.a.is_cuda else CHUNKS_ON_CPU
        cost: dict[Strategy, float] = {}
        for chunk in chunks:
            cost[Strategy("hold", "grouped", chunk)] = product + 2 * weight
            cost[Strategy("pass", "grouped", chunk)] = 2 * product + weight
        if self.groups == 1:
            patch = weight // self._kernel[0]
            chunk = 0 if term.a.is_cuda else 16
            cost[Strategy("hold", "unfolded", chunk)] = product + 2 * weight + pixels * patch
            cost[Strategy("pass", "unfolded", chunk)] = 2 * product + weight + pixels * patch
            tokens = points * views * pixels
            gram = tokens * (tokens + pixels) / 2 * (patch + self._kernel[0])
            cost[Strategy("gram", "unfolded")] = gram + product + tokens * patch
        if self._can_reach_back():
            out, _, kh, kw = self._kernel
            chunk = 0 if term.a.is_cuda else 16
            area = term.a.shape[3] * (term.a.shape[4] + self.padding[1])
            if out < channels:
                cost[Strategy("hold", "unfolded_output", chunk)] = product + 2 * weight + area * out * kh * kw
                cost[Strategy("pass", "unfolded_output", chunk)] = 2 * product + weight + area * out * kh * kw
            planes = points * views
            gram = area**2 * (channels + out + 2 * (kh + kw))
            cost[Strategy("gram", "pixels")] = planes * (planes + 1) / 2 * gram + product
        return cost

    @property
    def _kernel(self) -> tuple[int, ...]:
        """Shape of the kernel that is computed with."""
        return self.shapes[0]

    @property
    def _weight_size(self) -> int:
        return torch.Size(self._kernel).numel()

    @override
    def rows(self, term: Term, strategy: Strategy) -> tuple[Tensor, ...]:
        a, b = full(term.a), full(term.b)
        methods = {"unfolded": self._unfolded, "unfolded_output": self._unfolded_output}
        return (methods.get(strategy.method, self._grouped)(a, b).flatten(1),)

    def _grouped(self, a: Tensor, b: Tensor) -> Tensor:
        """Samples as the groups of one convolution; the rows of a sample as its batch."""
        batch = len(a)
        rows: Tensor = conv2d_weight(
            a.transpose(0, 1).reshape(a.shape[1], -1, *a.shape[3:]),
            (batch * self._kernel[0], *self._kernel[1:]),
            b.transpose(0, 1).reshape(b.shape[1], -1, *b.shape[3:]),
            self.stride,
            self.padding,
            self.dilation,
            batch * self.groups,
        )
        return rows.reshape(batch, -1)  # in the layout of the images

    def _unfolded(self, a: Tensor, b: Tensor) -> Tensor:
        """A product of output gradients and unfolded patches of the input."""
        rows = torch.bmm(b.flatten(0, 1).flatten(2), self._patches(a).transpose(1, 2))
        return _over_views(rows, len(a))

    def _patches(self, a: Tensor) -> Tensor:
        """What each output pixel saw, shape (B m, C kh kw, H' W')."""
        if self._kernel[2:] == (1, 1) and self.padding == (0, 0):
            return a[..., :: self.stride[0], :: self.stride[1]].flatten(0, 1).flatten(2)
        _, _, kh, kw = self._kernel
        return unfold(a.flatten(0, 1), (kh, kw), self.dilation, self.padding, self.stride)

    def _unfolded_output(self, a: Tensor, b: Tensor) -> Tensor:
        """The same product seen from the input: each input pixel times the output gradients that it went to."""
        out, _, kh, kw = self._kernel
        (dh, dw), (ph, pw) = self.dilation, self.padding
        reach = ((kh - 1) * dh - ph, (kw - 1) * dw - pw)
        patches = unfold(b.flatten(0, 1), (kh, kw), self.dilation, reach, (1, 1))
        rows = torch.bmm(patches, a.flatten(0, 1).flatten(2).transpose(1, 2))
        # The point of the kernel counts backwards here, and the channel comes last.
        rows = _over_views(rows, len(a)).view(len(a), out, kh, kw, -1).flip(2, 3)
        return rows.permute(0, 1, 4, 2, 3)

    def _can_reach_back(self) -> bool:
        """Stride 1 and no padding beyond the kernel, so that all of the input can be reached from the output."""
        reach = ((k - 1) * d - p for k, d, p in zip(self._kernel[2:], self.dilation, self.padding, strict=True))
        return self.groups == 1 and self.stride == (1, 1) and all(r >= 0 for r in reach)

    @override
    def reach(self, term: Term) -> Tensor:
        # A pixel of the input is in at most so many patches.
        return super().reach(term).mul_(self._kernel[2] * self._kernel[3])

    @override
    def gram_squares(self, terms: Sequence[Term], strategy: Strategy) -> Squares:
        if strategy.method == "pixels":
            return self._pixel_squares(terms)
        # So many samples at a time that their patches are still in cache when they are multiplied.
        patches = sum(t.a.shape[1] for t in terms) * terms[0].b[0, 0, 0].numel() * self._weight_size // self._kernel[0]
        samples = pieces(len(terms[0].b), patches, terms[0].b.device)
        found = [self._token_squares([term.samples(piece) for term in terms]) for piece in samples]
        return found[0] if len(found) == 1 else Squares(*(torch.cat(of) for of in zip(*found, strict=True)))

    def _token_squares(self, terms: Sequence[Term]) -> Squares:
        """Output pixels as tokens, which have read their patches."""
        tokens = [self._patches(full(t.a)).unflatten(0, t.a.shape[:2]).transpose(2, 3).flatten(1, 2) for t in terms]
        return token_squares(tokens, [full(t.b).flatten(3).transpose(2, 3).flatten(1, 2) for t in terms])

    def _pixel_squares(self, terms: Sequence[Term]) -> Squares:
        """Σ over pairs of pixels of ⟨patch, patch⟩ ⟨b, b⟩.

        The inner product of two patches is the sum, over the points of the kernel, of inner products of pixels: the
        Gram matrix of pixels summed along its diagonals, first over columns of the kernel, then over rows. Pixels
        are in flat order with as many zeros after each row as the padding, so that a shift is a shift for all rows.
        """
        (_, _, kh, kw), (dh, dw), (ph, pw) = self._kernel, self.dilation, self.padding
        (out_h, out_w), (height, width) = terms[0].b.shape[3:], terms[0].a.shape[3:]
        width += pw
        columns, rows = [i * dw - pw for i in range(kw)], [(i * dh - ph) * width for i in range(kh)]
        area, length = height * width, (out_h - 1) * width + out_w
        planes: list[tuple[Tensor, Tensor]] = []
        for term in terms:
            for view in range(term.a.shape[1]):
                a = F.pad(full(term.a[:, view]), (0, pw)).flatten(2)
                b = F.pad(full(term.b[:, view]), (0, width - out_w)).flatten(2)[:, :, :length]
                planes.append((a, b))

        def grams(piece: slice) -> Iterator[Grams]:
            for j, k in pairs(len(planes)):
                (a_j, b_j), (a_k, b_k) = planes[j], planes[k]
                gram = torch.bmm(a_j[piece].transpose(1, 2), a_k[piece])
                gram = _diagonal_sum(_diagonal_sum(gram, columns, area), rows, length)
                yield gram, torch.bmm(b_j[piece].transpose(1, 2), b_k[piece]), j == k

        width = max(a.shape[1] * kh * kw + b.shape[1] for a, b in planes)
        return squares_of_grams(pieces(len(planes[0][0]), area**2, planes[0][0].device), width, grams)

    @override
    def add_weighted_sum(self, term: Term, factors: Tensor, onto: Sequence[Tensor]) -> None:
        a, b = full(term.a), full(term.b)
        if a.numel() < b.numel():
            a = scaled(a, factors)
        else:
            b = scaled(b, factors)
        onto[0].add_(
            conv2d_weight(
                a.flatten(0, 1),
                self._kernel,
                b.flatten(0, 1),
                self.stride,
                self.padding,
                self.dilation,
                self.groups,
            ).view_as(onto[0])
        )

    @override
    def add_weighted_sums(self, term: Term, factors: Tensor, onto: Sequence[Tensor]) -> None:
        if term.b.is_cuda:
            self.add_grouped_sums(term, factors, onto)
        else:  # one product after the other takes less time there
            super().add_weighted_sums(term, factors, onto)

    def add_grouped_sums(self, term: Term, factors: Tensor, onto: Sequence[Tensor]) -> None:
        """What `add_weighted_sums` adds, with the seeds as the groups of one convolution."""
        a, b = full(term.a), scaled(term.b, factors)
        a, b = (t.flatten(0, 1).unflatten(0, (len(factors), -1)) for t in (a, b))
        onto[0].add_(self._grouped(a, b).view_as(onto[0]))


@dataclass(frozen=True)
class GreyPatches(Patches):
    """A kernel (P, C, kh, kw) that reads the same channel C times: a is (B, m, 1, H, W), b (B, m, P, H', W').

    G_i is C times over that of a kernel for one channel, and only that one is computed.
    """

    @property
    @override
    def _kernel(self) -> tuple[int, ...]:
        return (self.shapes[0][0], 1, *self.shapes[0][2:])

    @property
    def _channels(self) -> int:
        return self.shapes[0][1]

    @override
    def rows(self, term: Term, strategy: Strategy) -> tuple[Tensor, ...]:
        (rows,) = super().rows(term, strategy)
        of_one = rows.view(len(rows), self.shapes[0][0], 1, -1)
        # A copy even where it could be a view, since terms are added up in place.
        return (of_one.repeat(1, 1, self._channels, 1).flatten(1),)

    @override
    def reach(self, term: Term) -> Tensor:
        return super().reach(term).mul_(self._channels)

    @override
    def gram_squares(self, terms: Sequence[Term], strategy: Strategy) -> Squares:
        whole, parts = super().gram_squares(terms, strategy)
        return Squares(whole * self._channels, parts * self._channels)

    @override
    def add_weighted_sum(self, term: Term, factors: Tensor, onto: Sequence[Tensor]) -> None:
        of_one = onto[0].new_zeros(self._kernel)
        super().add_weighted_sum(term, factors, [of_one])
        onto[0].add_(of_one)

    @override
    def add_grouped_sums(self, term: Term, factors: Tensor, onto: Sequence[Tensor]) -> None:
        of_one = onto[0].new_zeros(len(factors), *self._kernel)
        super().add_grouped_sums(term, factors, [of_one])
        onto[0].add_(of_one)


Pair = tuple[int, int]


def unfold(images: Tensor, kernel: Pair, dilation: Pair, padding: Pair, stride: Pair) -> Tensor:
    """What `F.unfold` gives, (n, C, H, W) to (n, C kh kw, H' W'), by one strided copy: several times faster."""
    (kh, kw), (dh, dw), (ph, pw), (step_h, step_w) = kernel, dilation, padding, stride
    padded = F.pad(images, (pw, pw, ph, ph)) if ph or pw else images
    n, channels, height, width = padded.shape
    out_h, out_w = (height - dh * (kh - 1) - 1) // step_h + 1, (width - dw * (kw - 1) - 1) // step_w + 1
    of_n, of_c, of_h, of_w = padded.stride()
    windows = padded.as_strided(
        (n, channels, kh, kw, out_h, out_w), (of_n, of_c, dh * of_h, dw * of_w, step_h * of_h, step_w * of_w)
    )
    return windows.reshape(n, channels * kh * kw, out_h * out_w)


def _over_views(rows: Tensor, batch: int) -> Tensor:
    """Shape (B m, ...) summed over the rows m of each sample."""
    return rows if len(rows) == batch else rows.view(batch, -1, *rows.shape[1:]).sum(1)


def _diagonal_sum(gram: Tensor, offsets: Sequence[int], length: int) -> Tensor:
    """Σ_o gram[:, t + o, s + o] for t, s < length; zero outside of the matrix."""
    size = gram.shape[1]
    if offsets == [0]:
        return gram[:, :length, :length]
    total = gram.new_zeros(len(gram), length, length)
    for offset in offsets:
        low, high = max(0, -offset), min(length, size - offset)
        if low < high:
            inside, shifted = slice(low, high), slice(low + offset, high + offset)
            total[:, inside, inside] += gram[:, shifted, shifted]
    return total
