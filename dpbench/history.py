"""The last few vectors that a stage was given, in memory that is allocated once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor


class History:
    """Copies of the last vectors of shape (d,), the newest first.

    Args:
        length: most that are kept, >= 0.
    """

    def __init__(self, length: int) -> None:
        self._length = length
        self._vectors: list[Tensor] = []

    def push(self, vector: Tensor) -> None:
        """Keep a copy of a vector, in the memory of the oldest one once there are as many as are kept."""
        if self._length == 0:
            return
        oldest = self._vectors.pop() if len(self._vectors) == self._length else torch.empty_like(vector)
        self._vectors.insert(0, oldest.copy_(vector))

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self._vectors)

    def __len__(self) -> int:
        return len(self._vectors)

    def copies(self) -> list[Tensor]:
        """All of them, for a state."""
        return [vector.clone() for vector in self._vectors]

    def restore(self, vectors: Iterable[Tensor]) -> None:
        """Take copies of those of a state in place of what is kept."""
        self._vectors = [vector.clone() for vector in vectors]
