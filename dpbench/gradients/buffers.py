"""A model's buffers, put back after passes that are none of training's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


class Buffers:
    """The buffers of a model, as they are now."""

    def __init__(self, model: nn.Module) -> None:
        self._before = [
            (module, name, buffer, buffer.detach().clone())
            for module in model.modules()
            for name, buffer in module.named_buffers(recurse=False)
        ]

    @torch.no_grad()
    def restore(self) -> None:
        """Give the model the same buffers with the same values."""
        for module, name, buffer, values in self._before:
            if getattr(module, name) is not buffer:
                setattr(module, name, buffer)
            buffer.copy_(values)


@contextmanager
def buffers_kept(model: nn.Module) -> Iterator[None]:
    """Give a model its buffers of before again."""
    before = Buffers(model)
    try:
        yield
    finally:
        before.restore()
