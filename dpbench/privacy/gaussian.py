"""Where Gaussian noise comes from: a seeded generator for experiments, or a cryptographic one for releases."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from dpbench.privacy.key_stream import UNIT, KeyStream

# Version of the numbers that `SeededGaussian` makes of a generator, to be raised when they change: runs that were seen
# are not gone on with by another one.
SEEDED_NOISE = 3

# Independent standard normals that make one number of noise, whose sum over sqrt(4) is standard normal again.
SUMMANDS = 4

# Numbers drawn at once, and up to twice as many last: 16 and more at a time torch makes as it would all together.
BLOCK = 2**16

# From so many numbers on several threads draw them, in parts of so many.
LARGE, PART = 2**20, 2**17

# A sum with secure noise is rounded to multiples of a power of two, of which so many and up to twice as many make a
# deviation of the noise: as many as float32 tells apart there.
GRID = 2**23


class GaussianSource(ABC):
    """Draws standard normal noise.

    Attributes:
        dtype: precision in which its numbers are to be drawn and added; None for that of the sum.
    """

    dtype: torch.dtype | None = None

    @abstractmethod
    def fill(self, out: Tensor) -> Tensor:
        """Fill a tensor with independent standard normal numbers and return it."""


def add_noise(total: Tensor, noise: Tensor, deviation: float, source: GaussianSource) -> None:
    """Add noise to a sum, in place.

    A number of float32 times a deviation, rounded, is never some of the numbers of float32; of two sums, each misses
    other ones. Where noise has been float32 before, a single number may thus tell for sure that it is not the one sum
    with noise, but the other, and many of a vector do. So numbers of a source that asks for double precision are added
    in that, and what comes of it is rounded to a grid that depends on the deviation alone: each of its numbers stands
    for a great many of double precision, so that none tells which sum it is of (Mironov 2012).

    Args:
        total: the sum.
        noise: of standard deviation 1, of the same shape.
        deviation: what it is multiplied with, > 0.
        source: of the noise.
    """
    if source.dtype is None:
        total.add_(noise, alpha=deviation)
        return
    spacing = 2.0 ** (math.frexp(deviation)[1] - 1) / GRID
    total.copy_(torch.add(total, noise, alpha=deviation).div_(spacing).round_().mul_(spacing))


class SeededGaussian(GaussianSource):
    """Noise of a generator that checkpoints carry: whoever knows the seed can regenerate and subtract it.

    torch makes a normal number in single precision of uniform ones with 24 bits on a CPU, so that none is beyond
    sqrt(48 log 2) = 5.77, nor beyond 6.7 on a GPU. A number outside would tell of a sample for sure, at any eps, and
    far more often than delta allows: of one that moves a single number, at noise multiplier 1 and in 1,000 steps, with
    probability 1e-3, and of one that moves many of them more often still (tail.py). The sum of two such numbers over
    sqrt(2) ends at 8.16, where that is below 1e-9; numbers in double precision end at 8.57.

    A CPU's generator is one thread's. Long vectors are made of parts with streams of their own, whose key of 128 bits
    the generator draws, so that they do not depend on the number of threads. NumPy's normals in single precision, by
    the ziggurat with its tail (Marsaglia and Tsang 2000), end at 8.20.
    """

    def __init__(self, generator: torch.Generator) -> None:
        self.generator = generator

    def repeats(self, other: GaussianSource) -> bool:
        """Whether another source will give the same numbers, because its generator stands where this one does."""
        if not isinstance(other, SeededGaussian) or other.generator is self.generator:
            return False
        alike = other.generator.device == self.generator.device
        return alike and torch.equal(other.generator.get_state(), self.generator.get_state())

    @override
    def fill(self, out: Tensor) -> Tensor:
        if out.device.type == "cpu" and out.numel() >= LARGE:
            return self._fill_by_parts(out)
        out.normal_(generator=self.generator)
        if out.dtype == torch.float64:
            return out
        vector, on_cpu = out.view(-1), out.device.type == "cpu"
        # In cache, and without a second vector of this size; a GPU would have that many kernels one after the other.
        starts = range(BLOCK, len(vector) - BLOCK + 1, BLOCK) if on_cpu else ()
        for part in vector.tensor_split(tuple(starts)):
            part.add_(torch.empty_like(part).normal_(generator=self.generator)).mul_(math.sqrt(0.5))
        return out

    def _fill_by_parts(self, out: Tensor) -> Tensor:
        key = torch.randint(2**32, (4,), generator=self.generator, device="cpu").tolist()
        numbers = out.view(-1).numpy()

        def draw(start: int) -> None:
            part = numbers[start : start + PART]
            stream = np.random.SFC64(np.random.SeedSequence(key, spawn_key=(start,)))
            np.random.Generator(stream).standard_normal(dtype=part.dtype, out=part)

        with ThreadPoolExecutor(torch.get_num_threads()) as pool:
            list(pool.map(draw, range(0, len(numbers), PART)))
        return out


class SecureGaussian(GaussianSource):
    """Noise of a stream cipher under a key that never leaves the process.

    Uniform numbers come from a `KeyStream`; a run that is resumed draws a new key, because one kept in a checkpoint
    would give all noise away. Each number is the sum of four normals over two, in double precision: which sums of four
    floating-point normals a value can be is too costly to enumerate, which the attack on the gaps of a single draw
    needs (Mironov 2012; Holohan and Braghin 2021). They stay in double precision until they are in the sum, see
    `add_noise`. Numbers are made on the CPU.
    """

    dtype = torch.float64

    def __init__(self) -> None:
        self._stream = KeyStream()

    @override
    def fill(self, out: Tensor) -> Tensor:
        total = np.zeros(out.numel())
        for _ in range(SUMMANDS // 2):
            for normals in self._pair(out.numel()):
                total += normals
        total /= math.sqrt(SUMMANDS)
        return out.copy_(torch.from_numpy(total).view(out.shape))

    def _pair(self, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Two arrays of standard normals (Box and Muller 1958)."""
        radius, angle = np.sqrt(-2 * np.log(self._uniform(count))), 2 * np.pi * self._uniform(count)
        return radius * np.cos(angle), radius * np.sin(angle)

    def _uniform(self, count: int) -> np.ndarray:
        """Numbers in (0, 1]: odd multiples of 2^-54 below 1/2; above, these rounded to multiples of 2^-53."""
        return (self._stream.multiples(count) + 0.5) * UNIT
