"""Random sources that give all processes of a run what rank 0's draw, sent over the network as it is."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from typing_extensions import override

from dpbench.privacy.gaussian import GaussianSource
from dpbench.privacy.uniform import UniformSource
from dpbench.training.contact import Contact


class NoiseFromTheLeader(GaussianSource):
    """Noise of rank 0's source for all."""

    def __init__(self, contact: Contact, source: GaussianSource) -> None:
        self.dtype = source.dtype
        self._contact = contact
        self._source = source

    @override
    def fill(self, out: Tensor) -> Tensor:
        return _of_the_leader(self._contact, out, self._source.fill, "noise")


class DrawsFromTheLeader(UniformSource):
    """What rank 0's source draws for all."""

    def __init__(self, contact: Contact, source: UniformSource) -> None:
        self.device = source.device
        self._contact = contact
        self._source = source

    @override
    def fill(self, out: Tensor) -> Tensor:
        return _of_the_leader(self._contact, out, self._source.fill, "a draw of samples")

    @override
    def order(self, size: int) -> Tensor:
        def draw(out: Tensor) -> Tensor:
            return out.copy_(self._source.order(size))

        order = torch.empty(size, dtype=torch.int64, device=self.device)
        return _of_the_leader(self._contact, order, draw, "a draw of samples")


def _of_the_leader(contact: Contact, out: Tensor, draw: Callable[[Tensor], Tensor], where: str) -> Tensor:
    """Let rank 0 draw into a tensor, and all have that.

    Args:
        contact: with the others.
        out: overwritten.
        draw: fills it.
        where: of the meeting, in words.
    """
    if contact.leads:
        draw(out)
    contact.meet(where)
    return contact.overwrite(out, 0)
