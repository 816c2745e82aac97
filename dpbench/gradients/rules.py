"""Per-sample parameter gradients of single layers, from their input and the gradient of their output.

A rule maps (layer, input a, output gradient b) of one call to ``{parameter: (B, *parameter)}``.
Every rule is exact for a layer whose samples do not mix: dimension 0 of input and output is the sample.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn import grad

from dpbench.errors import UserError

Gradients = dict[Tensor, Tensor]
Rule = Callable[[nn.Module, Tensor, Tensor], Gradients]

# Samples per grouped convolution: few enough to stay in cache, the fastest range on the CPUs measured.
CONV_CHUNK = 16


def _trained(parameter: Tensor | None) -> bool:
    return parameter is not None and parameter.requires_grad


def linear(layer: nn.Module, a: Tensor, b: Tensor) -> Gradients:
    """Linear: Σ_τ b_τ a_τᵀ over all dimensions τ between the sample and the features."""
    assert isinstance(layer, nn.Linear)
    tokens_a, tokens_b = a.reshape(len(a), -1, a.shape[-1]), b.reshape(len(b), -1, b.shape[-1])
    gradients: Gradients = {}
    if _trained(layer.weight):
        gradients[layer.weight] = torch.bmm(tokens_b.transpose(1, 2), tokens_a)
    if _trained(layer.bias):
        gradients[layer.bias] = tokens_b.sum(1)
    return gradients


def conv(layer: nn.Module, a: Tensor, b: Tensor) -> Gradients:
    """Conv1d and Conv2d: samples become the groups of one grouped convolution, a few at a time."""
    assert isinstance(layer, (nn.Conv1d, nn.Conv2d))
    if layer.padding_mode != "zeros":
        raise UserError(f"convolution with padding_mode={layer.padding_mode!r} has no per-sample rule; use 'zeros'")
    gradients: Gradients = {}
    if _trained(layer.weight):
        weight_gradient: Callable[..., Tensor] = grad.conv1d_weight if a.dim() == 3 else grad.conv2d_weight
        a, padding = _padded(layer, a)
        chunks = []
        for start in range(0, len(a), CONV_CHUNK):
            x, g = a[start : start + CONV_CHUNK], b[start : start + CONV_CHUNK]
            n = len(x)
            chunk = weight_gradient(
                x.reshape(1, -1, *x.shape[2:]),
                (n * layer.out_channels, *layer.weight.shape[1:]),
                g.reshape(1, -1, *g.shape[2:]),
                stride=layer.stride,
                padding=padding,
                dilation=layer.dilation,
                groups=n * layer.groups,
            )
            chunks.append(chunk.view(n, *layer.weight.shape))
        gradients[layer.weight] = torch.cat(chunks)
    if layer.bias is not None and layer.bias.requires_grad:
        gradients[layer.bias] = b.flatten(2).sum(2)
    return gradients


def _padded(layer: nn.Conv1d | nn.Conv2d, a: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """Input and numeric padding; 'same' may pad unevenly, so its zeros are written out."""
    if layer.padding == "valid":
        return a, (0,) * len(layer.kernel_size)
    if layer.padding == "same":
        widths: list[int] = []
        for kernel, dilation in zip(reversed(layer.kernel_size), reversed(layer.dilation), strict=True):
            total = dilation * (kernel - 1)
            widths += [total // 2, total - total // 2]
        return F.pad(a, widths), (0,) * len(layer.kernel_size)
    assert not isinstance(layer.padding, str)
    return a, layer.padding


def group_norm(layer: nn.Module, a: Tensor, b: Tensor) -> Gradients:
    """GroupNorm: the normalised input times the output gradient, summed over positions."""
    assert isinstance(layer, nn.GroupNorm)
    gradients: Gradients = {}
    if _trained(layer.weight):
        normalised = F.group_norm(a, layer.num_groups, eps=layer.eps)
        gradients[layer.weight] = (normalised * b).reshape(*b.shape[:2], -1).sum(2)
    if _trained(layer.bias):
        gradients[layer.bias] = b.reshape(*b.shape[:2], -1).sum(2)
    return gradients


def layer_norm(layer: nn.Module, a: Tensor, b: Tensor) -> Gradients:
    """LayerNorm: the normalised input times the output gradient, summed over tokens."""
    assert isinstance(layer, nn.LayerNorm)
    shape = layer.normalized_shape
    gradients: Gradients = {}
    if _trained(layer.weight):
        normalised = F.layer_norm(a, shape, eps=layer.eps)
        gradients[layer.weight] = (normalised * b).reshape(len(b), -1, *shape).sum(1)
    if _trained(layer.bias):
        gradients[layer.bias] = b.reshape(len(b), -1, *shape).sum(1)
    return gradients


def embedding(layer: nn.Module, a: Tensor, b: Tensor) -> Gradients:
    """Embedding: output gradients are added to the rows that each sample looked up."""
    assert isinstance(layer, nn.Embedding)
    if layer.max_norm is not None or layer.scale_grad_by_freq:
        raise UserError("embedding with max_norm or scale_grad_by_freq has no per-sample rule; leave them unset")
    ids = a.reshape(len(a), -1)
    rows = b.reshape(*ids.shape, -1)
    if layer.padding_idx is not None:
        rows = rows.masked_fill((ids == layer.padding_idx).unsqueeze(-1), 0.0)
    gradient = rows.new_zeros(len(a), *layer.weight.shape)
    gradient.scatter_add_(1, ids.unsqueeze(-1).expand_as(rows), rows)
    return {layer.weight: gradient}


RULES: dict[type[nn.Module], Rule] = {
    nn.Linear: linear,
    nn.Conv1d: conv,
    nn.Conv2d: conv,
    nn.GroupNorm: group_norm,
    nn.LayerNorm: layer_norm,
    nn.Embedding: embedding,
}


def refuse_mixing(name: str, layer: nn.Module) -> None:
    """Raise `UserError` if a layer, trained or not, lets one sample change what is computed for another."""
    if isinstance(layer, nn.modules.batchnorm._BatchNorm):
        raise UserError(
            f"layer {name!r} is batch normalisation, which mixes samples and so has no per-sample gradient; "
            "use group normalisation"
        )


def rule_for(name: str, layer: nn.Module) -> Rule:
    """The rule of a layer that owns trainable parameters.

    Subclasses are not matched: they may compute something else.

    Raises:
        UserError: no rule is known for the layer.
    """
    rule = RULES.get(type(layer))
    if rule is None:
        known = ", ".join(sorted(kind.__name__ for kind in RULES))
        raise UserError(f"layer {name!r} of type {type(layer).__name__} has no per-sample rule; known: {known}")
    return rule
