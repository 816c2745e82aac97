"""How the samples of a step are drawn, and what that means for a guarantee."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from dpbench.errors import require
from dpbench.privacy.uniform import UniformSource
from dpbench.state import Remembering


@dataclass(frozen=True)
class Scheme:
    """A way to draw batches.

    Attributes:
        name: as in a configuration.
        words: what it does.
        neighbouring: data sets that the guarantee does not tell apart.
        sensitivity: largest change of a clipped sum between neighbours, in units of the bound C.
        passes: whether every sample takes part exactly once in each pass over the data.
        accountants: those that give a valid bound, tightest first.
    """

    name: str
    words: str
    neighbouring: str
    sensitivity: float
    passes: bool
    accountants: tuple[str, ...]


POISSON = Scheme(
    "poisson",
    "each sample takes part in each step with the same probability, independently",
    "add or remove one sample",
    1.0,
    False,
    ("pld", "rdp"),
)
FIXED_SIZE = Scheme(
    "fixed_size",
    "each step draws a batch of fixed size without replacement",
    "replace one sample by another",
    2.0,
    False,
    ("rdp",),
)
SHUFFLED = Scheme(
    "shuffled",
    "each pass over the data is shuffled and cut into batches",
    "replace one sample by one that contributes nothing",
    1.0,
    True,
    ("gdp", "rdp"),
)
CYCLIC = Scheme(
    "cyclic",
    "the data are shuffled once and every pass takes the same batches in the same order",
    "replace one sample by one that contributes nothing",
    1.0,
    True,
    ("gdp", "rdp"),
)
SCHEMES = {scheme.name: scheme for scheme in (POISSON, FIXED_SIZE, SHUFFLED, CYCLIC)}


class Sampler(Remembering, ABC):
    """Draws the batches of a run. The state of its source is no part of its own.

    Attributes:
        size: number of samples N.
        batch: B, the size of a batch: expected for Poisson sampling, exact otherwise but for a last one of a pass.
    """

    def __init__(self, size: int, batch: int, source: UniformSource) -> None:
        require(size > 0, "size", size, "a whole number > 0")
        require(0 < batch <= size, "batch", batch, f"a number above 0 and at most the {size} samples")
        self.size = size
        self.batch = batch
        self._source = source

    @abstractmethod
    def draw(self) -> Tensor:
        """Indices of the next batch, shape (B,), int64, on the source's device."""


class PoissonSampler(Sampler):
    """Each sample takes part in each step with probability q = B/N, independently. A batch may be empty."""

    def __init__(self, size: int, batch: float, source: UniformSource) -> None:
        super().__init__(size, math.ceil(batch), source)
        self._rate = batch / size
        # Double precision: a float32 draw rounds q to a multiple of 2^-24.
        self._draws = torch.empty(size, dtype=torch.float64, device=source.device)

    @override
    def draw(self) -> Tensor:
        """Ascending indices."""
        return (self._source.fill(self._draws) < self._rate).nonzero().squeeze(1)


class FixedSizeSampler(Sampler):
    """Each step draws B samples without replacement, independently of other steps."""

    @override
    def draw(self) -> Tensor:
        """Indices in random order."""
        return self._source.order(self.size)[: self.batch]


class PassSampler(Sampler):
    """Cuts a random order of the data into batches of B; the last batch of a pass has what is left.

    Attributes:
        reshuffle: draw a new order for each pass; otherwise all passes share the first.
    """

    remembers = ("_order", "_next")

    def __init__(self, size: int, batch: int, source: UniformSource, *, reshuffle: bool) -> None:
        super().__init__(size, batch, source)
        self.reshuffle = reshuffle
        self._order: Tensor | None = None
        self._next = 0

    @override
    def draw(self) -> Tensor:
        """Indices in random order."""
        if self._order is None or (self.reshuffle and self._next >= self.size):
            self._order = self._source.order(self.size)
        if self._next >= self.size:
            self._next = 0
        batch = self._order[self._next : self._next + self.batch]
        self._next += self.batch
        return batch


def make_sampler(scheme: Scheme, size: int, batch: int, source: UniformSource) -> Sampler:
    """The sampler of a scheme over N samples with batches of B.

    Raises:
        UserError: there are no samples, or B is not above 0 and at most N.
    """
    if scheme == POISSON:
        return PoissonSampler(size, batch, source)
    if scheme == FIXED_SIZE:
        return FixedSizeSampler(size, batch, source)
    return PassSampler(size, batch, source, reshuffle=scheme == SHUFFLED)


def steps_of(scheme: Scheme, size: int, batch: int, epochs: float) -> int:
    """Steps of `epochs` passes over N samples: ceil(E N/B), or whole batches of every pass where a scheme passes."""
    per_epoch = math.ceil(size / batch) if scheme.passes else size / batch
    return math.ceil(round(epochs * per_epoch, 9))
