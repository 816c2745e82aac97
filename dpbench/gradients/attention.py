"""torch's MultiheadAttention, whose projections are not layers of their own."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpbench.errors import UserError
from dpbench.gradients.parts import linear
from dpbench.gradients.recording import Recording


def multihead_attention(
    recording: Recording,
    layer: nn.MultiheadAttention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """MultiheadAttention of batch-first queries, keys and values of one width."""
    if not layer.batch_first or layer.in_proj_weight is None or layer.bias_k is not None or layer.add_zero_attn:
        raise UserError("multi-head attention needs batch_first=True, one width, no bias_kv and no zero attention")
    q, k, v = _projections(recording, layer, query, key, value)
    heads, width = layer.num_heads, layer.head_dim
    q, k, v = (t.unflatten(-1, (heads, width)).transpose(1, 2) for t in (q, k, v))
    mask = _mask(attn_mask, key_padding_mask, q)
    dropout = layer.dropout if layer.training else 0.0
    weights: Tensor | None = None
    if need_weights:
        scores = q @ k.transpose(2, 3) / math.sqrt(width)
        weights = torch.softmax(scores if mask is None else scores + mask, dim=-1)
        weights = F.dropout(weights, dropout)
        mixed = weights @ v
        weights = weights.mean(1) if average_attn_weights else weights
    else:
        mixed = F.scaled_dot_product_attention(q, k, v, mask, dropout)
    mixed = mixed.transpose(1, 2).flatten(2)
    return linear(recording, mixed, layer.out_proj.weight, layer.out_proj.bias), weights


def _projections(
    recording: Recording, layer: nn.MultiheadAttention, query: Tensor, key: Tensor, value: Tensor
) -> tuple[Tensor, ...]:
    if query is key is value:
        return linear(recording, query, layer.in_proj_weight, layer.in_proj_bias).chunk(3, dim=-1)
    # One product of all tokens; each keeps the third of it that is its own.
    sizes = [query.shape[1], key.shape[1], value.shape[1]]
    together = linear(recording, torch.cat([query, key, value], 1), layer.in_proj_weight, layer.in_proj_bias)
    thirds = together.split(sizes, dim=1)
    return tuple(third.chunk(3, dim=-1)[i] for i, third in enumerate(thirds))


def _mask(attn_mask: Tensor | None, key_padding_mask: Tensor | None, query: Tensor) -> Tensor | None:
    """What is added to the scores (n, heads, T, S); where a mask is boolean, True forbids."""
    total: Tensor | None = None
    for mask, shape in ((attn_mask, None), (key_padding_mask, (len(query), 1, 1, -1))):
        if mask is None:
            continue
        if mask.dtype == torch.bool:
            mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(mask, -math.inf)
        if shape is not None:
            mask = mask.view(shape)
        elif mask.dim() == 3:
            mask = mask.view(len(query), -1, *mask.shape[1:])
        total = mask if total is None else total + mask
    return total
