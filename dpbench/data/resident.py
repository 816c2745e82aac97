"""Samples that live on the device as bytes and become numbers there, a batch at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class Split:
    """One split of an image data set, resident on a device.

    Attributes:
        images: uint8, shape (N, C, H, W).
        labels: int64, shape (N,).
        offset: subtracted from the raw bytes, shape (1, C, 1, 1).
        factor: multiplies what is left, shape (1, C, 1, 1).
    """

    images: Tensor
    labels: Tensor
    offset: Tensor
    factor: Tensor

    @classmethod
    def of(cls, images: Tensor, labels: Tensor, *, highest: int, mean: list[float], std: list[float]) -> Split:
        """A split normalised as (x/highest - mean)/std per channel."""
        shape = (1, -1, 1, 1)
        offset = highest * torch.tensor(mean).view(shape)
        return cls(images, labels.long(), offset, 1 / (highest * torch.tensor(std).view(shape)))

    def __len__(self) -> int:
        """Number of samples."""
        return len(self.labels)

    def to(self, device: torch.device) -> Split:
        """The split on a device."""
        return Split(*(t.to(device) for t in (self.images, self.labels, self.offset, self.factor)))

    def take(self, indices: Tensor | slice) -> tuple[Tensor, Tensor]:
        """Normalised images, float32 (B, C, H, W), and labels (B,) of these indices."""
        return (self.images[indices].float() - self.offset) * self.factor, self.labels[indices]

    def batches(self, indices: Tensor, size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """The samples of these indices, at most `size` at a time; nothing where there are none."""
        for part in indices.split(size):
            if len(part) > 0:
                yield self.take(part)


@dataclass
class Splits:
    """The two splits of a data set."""

    train: Split
    test: Split
