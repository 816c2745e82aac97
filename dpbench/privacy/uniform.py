"""Where the draw of batches comes from: a seeded generator for experiments, or a cryptographic one for releases."""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from dpbench.privacy.key_stream import UNIT, KeyStream


class UniformSource(ABC):
    """Draws uniform numbers and random orders.

    Attributes:
        device: where they are.
    """

    device: torch.device

    @abstractmethod
    def fill(self, out: Tensor) -> Tensor:
        """Fill a float64 tensor with independent uniform numbers in [0, 1) and return it."""

    @abstractmethod
    def order(self, size: int) -> Tensor:
        """So many indices in random order, shape (size,), int64."""


class SeededUniform(UniformSource):
    """Draws of a generator that checkpoints carry: whoever knows the seed knows the batches."""

    def __init__(self, generator: torch.Generator) -> None:
        self.generator = generator
        self.device = generator.device

    @override
    def fill(self, out: Tensor) -> Tensor:
        return out.uniform_(generator=self.generator)

    @override
    def order(self, size: int) -> Tensor:
        return torch.randperm(size, generator=self.generator, device=self.device)


class SecureUniform(UniformSource):
    """Draws of a `KeyStream`, made on the CPU: nobody can tell the batches, as amplification by sampling needs."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = KeyStream()

    @override
    def fill(self, out: Tensor) -> Tensor:
        return out.copy_(torch.from_numpy(self._stream.multiples(out.numel()) * UNIT).view(out.shape))

    @override
    def order(self, size: int) -> Tensor:
        # Two words are the same with probability below N²/2^65.
        return torch.from_numpy(np.argsort(self._stream.words(size))).to(self.device)
