"""The splits of a data set: samples on the device if they fit, where bytes become numbers, a batch at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor


class Samples(Protocol):
    """One split of a data set, on a device."""

    @property
    def labels(self) -> Tensor:
        """On that device, the sample in dimension 0."""

    def __len__(self) -> int:
        """Number of samples."""

    def to(self, device: torch.device) -> Samples:
        """The split on a device."""

    def take(self, indices: Tensor | slice) -> tuple[Tensor, Tensor]:
        """Inputs (B, ...) and targets (B, ...) of these indices."""

    def batches(self, indices: Tensor, size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """The samples of these indices, at most `size` at a time, in any order; nothing where there are none."""

    def everything(self, size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """All samples, at most `size` at a time, in any order."""


@dataclass(frozen=True)
class Prompts:
    """What a language model is given to continue, and what it may say.

    Attributes:
        ids: tokens of each prompt.
        references: texts that people wrote for each.
        end: token that ends a text.
        decode: makes a text of tokens.
    """

    ids: list[list[int]]
    references: list[list[str]]
    end: int
    decode: Callable[[list[int]], str]


@dataclass
class Split:
    """One split of a data set whose samples are arrays of one shape, on a device.

    Attributes:
        images: uint8, shape (N, C, H, W); or rows of numbers, float32 (N, F).
        labels: int64, shape (N,).
        offset: subtracted from the raw values, shape (1, C, 1, 1) or ().
        factor: multiplies what is left, shape (1, C, 1, 1) or ().
        resident: the images are on the device too; else they are in memory or mapped from disk.
    """

    images: Tensor
    labels: Tensor
    offset: Tensor
    factor: Tensor
    resident: bool = True

    @classmethod
    def of(
        cls,
        images: Tensor,
        labels: Tensor,
        *,
        highest: int,
        mean: list[float],
        std: list[float],
        resident: bool = True,
    ) -> Split:
        """A split normalised as (x/highest - mean)/std per channel."""
        shape = (1, -1, 1, 1)
        offset = highest * torch.tensor(mean).view(shape)
        return cls(images, labels.long(), offset, 1 / (highest * torch.tensor(std).view(shape)), resident)

    @classmethod
    def raw(cls, rows: Tensor, labels: Tensor) -> Split:
        """A split of numbers that are taken as they are."""
        return cls(rows, labels, torch.tensor(0.0), torch.tensor(1.0))

    def __len__(self) -> int:
        """Number of samples."""
        return len(self.labels)

    def to(self, device: torch.device) -> Split:
        """The split on a device, with its images if they are resident."""
        images = self.images.to(device) if self.resident else self.images
        labels, offset, factor = (t.to(device) for t in (self.labels, self.offset, self.factor))
        return Split(images, labels, offset, factor, self.resident)

    def take(self, indices: Tensor | slice) -> tuple[Tensor, Tensor]:
        """Normalised samples, float32 (B, ...), and labels (B,) of these indices, on the device."""
        if isinstance(indices, slice):
            images = self.images[indices]
        else:  # on a CPU ten times faster than the brackets
            images = self.images.index_select(0, indices.to(self.images.device))
        return self._normalised(images), self.labels[indices]

    def _normalised(self, images: Tensor) -> Tensor:
        """Samples as the model gets them, on the device."""
        return (images.to(self.labels.device).float() - self.offset).mul_(self.factor)

    def everything(self, size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """All samples in order, at most `size` at a time."""
        return (self.take(slice(start, start + size)) for start in range(0, len(self), size))

    def batches(self, indices: Tensor, size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """The samples of these indices, at most `size` at a time; nothing where there are none.

        Images that are not resident are read one batch ahead, while the device is busy with the one before. The thread
        that reads asks nothing of a GPU: another one may be recording a pass, which that would break.
        """
        parts = [part for part in indices.split(size) if len(part) > 0]
        if self.resident:
            yield from map(self.take, parts)
            return
        places = [part for part in indices.to(self.images.device).split(size) if len(part) > 0]
        with ThreadPoolExecutor(1) as reader:
            ahead: Future[Tensor] | None = None
            for number, part in enumerate(parts):
                read = ahead or reader.submit(self.images.index_select, 0, places[number])
                following = places[number + 1 : number + 2]
                ahead = reader.submit(self.images.index_select, 0, following[0]) if following else None
                yield self._normalised(read.result()), self.labels[part]


@dataclass
class Splits:
    """The splits of a data set.

    Attributes:
        train: what is trained on, and all that is private.
        test: what each evaluation is of.
        others: further splits that each evaluation reports beside it, by name.
        prompts: what a language model continues once it is trained, and what people wrote; None for other tasks.
    """

    train: Samples
    test: Samples
    others: dict[str, Samples] = field(default_factory=dict)
    prompts: Prompts | None = None

    def to(self, device: torch.device) -> Splits:
        """The splits on a device."""
        others = {name: split.to(device) for name, split in self.others.items()}
        return Splits(self.train.to(device), self.test.to(device), others, self.prompts)
