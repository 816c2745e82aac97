"""Max pooling in the layout in which torch's CPU kernel is vectorised: with the channels last."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from typing_extensions import override

from dpbench.gradients.recording import Recording


def wants_channels_last(layers: Collection[nn.Module], device: torch.device) -> bool:
    """Whether a pass is faster if convolutions give their channels last.

    On a CPU pooling is, and convolutions are no slower; group norms are (layers.py).

    Args:
        layers: those that a recording watches.
        device: of the pass.
    """
    pools, norms = (any(isinstance(layer, kind) for layer in layers) for kind in (nn.MaxPool2d, nn.GroupNorm))
    return device.type == "cpu" and pools and not norms


def max_pooling(recording: Recording, layer: nn.MaxPool2d, input: Tensor) -> Tensor:
    """MaxPool2d: the same maxima, and the same pixel of several equal ones, as the layer's own."""
    return _pooled(layer, input)


@contextmanager
def vectorised_pooling(model: nn.Module) -> Iterator[None]:
    """Let max pooling be as fast where a model runs without a recording."""
    layers = [layer for layer in model.modules() if type(layer) is nn.MaxPool2d and "forward" not in vars(layer)]
    for layer in layers:
        layer.forward = partial(_pooled, layer)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward


def _pooled(layer: nn.MaxPool2d, input: Tensor) -> Tensor:
    """The layer's output.

    With its channels last, a plane of floats is pooled some eight times faster on a CPU, more than both copies cost.
    """
    if input.device.type != "cpu" or input.dim() != 4 or not input.is_contiguous() or layer.return_indices:
        own: Tensor = nn.MaxPool2d.forward(layer, input)
        return own
    settings = (layer.kernel_size, layer.stride, layer.padding, layer.dilation, layer.ceil_mode)
    pooled: Tensor = _ChannelsLast.apply(input, settings)
    return pooled


class _ChannelsLast(torch.autograd.Function):
    """Forward with the channels last, backward in the input's layout, where what follows is fastest."""

    @override
    @staticmethod
    def forward(ctx: Any, x: Tensor, settings: tuple[Any, ...]) -> Tensor:
        last = x.contiguous(memory_format=torch.channels_last)
        output, indices = torch.ops.aten.max_pool2d_with_indices(last, *settings)
        ctx.save_for_backward(x, indices)
        ctx.settings = settings
        return output.contiguous()  # type: ignore[no-any-return]

    @override
    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        x, indices = ctx.saved_tensors
        pool = torch.ops.aten.max_pool2d_with_indices_backward
        return pool(gradient.contiguous(), x, *ctx.settings, indices.contiguous()), None
