"""Layers with book-keeping: each computes what the layer computes, and records what its parameters' gradients need.

A sample's rows follow each other in dimension 0 of every input. Whoever subclasses a layer may compute something
else; the comparison in verify.py finds that out.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpbench.errors import UserError
from dpbench.gradients.attention import multihead_attention
from dpbench.gradients.parts import bias_parts, linear
from dpbench.gradients.pooling import max_pooling
from dpbench.gradients.recording import Part, Recording
from dpbench.gradients.recurrent import lstm
from dpbench.gradients.uses import Direct, GreyPatches, Lookup, Patches, Standardisation, StandardisedPatches, Term
from dpbench.gradients.uses.base import full
from dpbench.models.layers import WSConv2d

Forward = Callable[..., Any]


def linear_layer(recording: Recording, layer: nn.Linear, input: Tensor) -> Tensor:
    """Linear."""
    return linear(recording, recording.spread(input), layer.weight, layer.bias)


def conv1d_of_transformers(recording: Recording, layer: Any, x: Tensor) -> Tensor:
    """Transformers' Conv1D: a linear layer whose weight is stored transposed."""
    return linear(recording, recording.spread(x), layer.weight, layer.bias, transposed=True)


def convolution(recording: Recording, layer: nn.Conv1d | nn.Conv2d, input: Tensor) -> Tensor:
    """Conv1d and Conv2d, whatever their padding, stride, dilation and groups."""
    x = recording.spread(input)
    weights = recording.weights
    weight = weights.of(layer.weight)
    of_grey = x.dim() == 4 and x.shape[1] > 1 and x.stride(1) == 0 and layer.groups == 1
    if of_grey:  # one channel, expanded
        x, weight = x[:, :1], weight.sum(-3, keepdim=True)
    output = weights.convolution(layer, x, weight, layer.bias)
    padding, written_out = _padding(layer)
    kind = GreyPatches if of_grey else Patches
    use = kind((_kernel_shape(layer),), _pair(layer.stride), padding, _pair(layer.dilation), layer.groups)
    return _watch_convolution(recording, layer, x, output, (layer.weight,), use, written_out)


def standardised_convolution(recording: Recording, layer: WSConv2d, input: Tensor) -> Tensor:
    """WSConv2d, at one iterate the convolution with the filters that its standardisation gives."""
    x = recording.spread(input)
    weights = recording.weights
    weight, gain = weights.of(layer.weight), weights.of(layer.gain).unsqueeze(-1)
    mean, scale = layer.statistics(weight)
    filters = (weight.flatten(-3) - mean) * scale
    moves = (scale.square() * layer.SMALLEST < 1 - 1e-6).to(scale.dtype)
    bias = torch.zeros_like(gain) if layer.bias is None else weights.of(layer.bias).unsqueeze(-1)
    found = Standardisation(*(t.detach() for t in (filters, scale, moves, gain, bias)))
    extra = found if weights.seeds == 1 else [Standardisation(*parts) for parts in zip(*found, strict=True)]
    output = weights.convolution(layer, x, (filters * gain).view_as(weight), layer.bias)
    # A GPU would have to wait for the answer, and half precision does not do.
    shows = output.device.type == "cpu" and full(output) is output and found.shows_products()
    padding, written_out = _padding(layer)
    # Where the gain is a constant, only the weight has gradients.
    parameters = (layer.weight, layer.gain) if isinstance(layer.gain, nn.Parameter) else (layer.weight,)
    shapes = tuple(tuple(parameter.shape) for parameter in parameters)
    use = StandardisedPatches(shapes, _pair(layer.stride), padding, _pair(layer.dilation), layer.groups)
    given = output.detach() if shows else None
    return _watch_convolution(recording, layer, x, output, parameters, use, written_out, extra, given)


def _watch_convolution(
    recording: Recording,
    layer: nn.Conv1d | nn.Conv2d,
    x: Tensor,
    output: Tensor,
    parameters: tuple[Tensor, ...],
    use: Patches,
    written_out: tuple[int, ...],
    extra: Standardisation | list[Standardisation] | None = None,
    given: Tensor | None = None,
) -> Tensor:
    x = x.detach()
    version = None if given is None else given._version
    mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode

    def term(b: Tensor) -> Term:
        a = F.pad(x, written_out, mode=mode) if any(written_out) else x
        # What follows the layer may have changed its output in place.
        kept = None if given is None or given._version != version else _planes(recording.per_sample(given))
        return Term(_planes(recording.per_sample(a)), _planes(recording.per_sample(b)), extra, kept)

    bias = [] if layer.bias is None else bias_parts(recording, layer.bias, lambda b: full(b).flatten(2).sum(2))
    return recording.watch(output, x, [Part(parameters, use, term), *bias])


def _planes(t: Tensor) -> Tensor:
    """(B, m, C, W) as (B, m, C, 1, W): one dimension is a plane one pixel high."""
    return t.unsqueeze(-2) if t.dim() == 4 else t


def _kernel_shape(layer: nn.Conv1d | nn.Conv2d) -> tuple[int, ...]:
    return (*layer.weight.shape[:2], *_pair(layer.kernel_size, fill=1))


def _pair(values: tuple[int, ...], fill: int = 1) -> tuple[int, int]:
    return (values[0], values[1]) if len(values) == 2 else (fill, values[0])


def _padding(layer: nn.Conv1d | nn.Conv2d) -> tuple[tuple[int, int], tuple[int, ...]]:
    """Zeros on both sides that the convolution itself adds, and other padding as `F.pad` takes it."""
    dimensions = len(layer.kernel_size)
    if layer.padding_mode == "zeros" and not isinstance(layer.padding, str):
        return _pair(layer.padding, fill=0), (0,) * 2 * dimensions
    # What torch itself pads with where a padding is uneven or not of zeros.
    return (0, 0), tuple(layer._reversed_padding_repeated_twice)


def group_norm(recording: Recording, layer: nn.GroupNorm, input: Tensor) -> Tensor:
    """GroupNorm; as a norm over the groups of all samples, each with its own copy of the gains.

    torch's backward pass sums their gradients over the pixels of each sample in any case.
    """
    x = recording.spread(input)
    if recording.weights.seeds > 1:
        x = x.contiguous()
    if not layer.affine or not x.is_contiguous():
        return _norm(recording, layer, x)
    rows, channels = x.shape[:2]
    weight = recording.expanded(layer.weight, rows)
    bias = recording.expanded(layer.bias, rows)

    def normed(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        flat = x.view(1, len(x) * channels, *x.shape[2:])
        output = F.group_norm(flat, len(x) * layer.num_groups, weight.view(-1), bias.view(-1), layer.eps)
        # Not a view, so that what follows may change it in place without a copy.
        return torch.ops.aten._unsafe_view(output, x.shape)  # type: ignore[no-any-return]

    at_once = max(1, most_groups(x.device) // layer.num_groups)
    if rows <= at_once:
        return normed(x, weight, bias)
    pieces = zip(x.split(at_once), weight.split(at_once), bias.split(at_once), strict=True)
    return torch.cat([normed(*piece) for piece in pieces])


def most_groups(device: torch.device) -> int:
    """So many groups torch's backward pass of a group norm takes at once: on a GPU, blocks along one side of a grid."""
    return 65535 if device.type == "cuda" else sys.maxsize


def _norm(recording: Recording, layer: nn.GroupNorm, x: Tensor) -> Tensor:
    groups = layer.num_groups
    output = F.group_norm(x, groups, layer.weight, layer.bias, layer.eps)
    if not layer.affine:
        return output
    kept = x.detach()

    def sums(t: Tensor) -> Tensor:
        return full(t).reshape(*t.shape[:2], -1).sum(2)

    def gain(b: Tensor) -> Term:
        return recording.per_row(layer.weight, sums(F.group_norm(full(kept), groups, eps=layer.eps) * b))

    use = Direct((tuple(layer.weight.shape),))
    return recording.watch(output, kept, [Part((layer.weight,), use, gain), *bias_parts(recording, layer.bias, sums)])


def layer_norm(recording: Recording, layer: nn.LayerNorm | nn.RMSNorm, input: Tensor) -> Tensor:
    """LayerNorm and RMSNorm: the normalised input times the output gradient, summed over tokens."""
    x = recording.spread(input)
    shape = list(layer.normalized_shape)
    bias = layer.bias if isinstance(layer, nn.LayerNorm) else None

    def normalised(t: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        if isinstance(layer, nn.LayerNorm):
            return F.layer_norm(t, shape, weight, bias, layer.eps)
        return F.rms_norm(t, shape, weight, layer.eps)

    kept = x.detach()
    parts = []
    if layer.weight is not None:

        def gain(b: Tensor) -> Term:
            return recording.per_row(layer.weight, normalised(full(kept), None, None).mul_(b))

        parts.append(Part((layer.weight,), Direct((tuple(layer.weight.shape),)), gain))
    if bias is not None:
        parts += bias_parts(recording, bias, full)
    if recording.weights.seeds == 1:
        return recording.watch(normalised(x, layer.weight, bias), kept, parts)
    output = normalised(x, None, None)
    for parameter, apply in ((layer.weight, torch.mul), (bias, torch.add)):
        if parameter is not None:
            rows = recording.weights.repeated(parameter, len(x))
            output = apply(output, rows.view(len(x), *[1] * (x.dim() - len(shape) - 1), *shape))
    return recording.watch(output, kept, parts)


def embedding(recording: Recording, layer: nn.Embedding, input: Tensor) -> Tensor:
    """Embedding; nothing goes to the row of the padding index."""
    ids = recording.spread(input)
    output = recording.weights.lookup(ids, layer.weight, layer.padding_idx)

    def term(b: Tensor) -> Term:
        if layer.padding_idx is not None:
            b = b.masked_fill((ids == layer.padding_idx).unsqueeze(-1), 0.0)
        return Term(ids.reshape(recording.samples, -1), recording.tokens(b))

    return recording.watch(output, ids, [Part((layer.weight,), Lookup((tuple(layer.weight.shape),)), term)])


FORWARDS: dict[type[nn.Module], Forward] = {
    nn.Linear: linear_layer,
    nn.Conv1d: convolution,
    nn.Conv2d: convolution,
    WSConv2d: standardised_convolution,
    nn.GroupNorm: group_norm,
    nn.LayerNorm: layer_norm,
    nn.RMSNorm: layer_norm,
    nn.Embedding: embedding,
    nn.MultiheadAttention: multihead_attention,
    nn.LSTM: lstm,
    nn.MaxPool2d: max_pooling,
}


# Of libraries that take seconds to import and are not needed for other models: by the class's full name.
FORWARDS_BY_NAME: dict[str, Forward] = {"transformers.pytorch_utils.Conv1D": conv1d_of_transformers}


# Forwards that read their parameters through the recording alone, so that each row may have those of its own seed.
BY_SEED: frozenset[Forward] = frozenset(
    {
        linear_layer,
        conv1d_of_transformers,
        convolution,
        standardised_convolution,
        group_norm,
        layer_norm,
        embedding,
        max_pooling,
    }
)

# Packages whose subclasses of these layers compute what the layers compute, in another way.
TRUSTED = ("torch", "torchvision", "transformers", "timm", "dpbench")


def forward_of(layer: nn.Module) -> Forward | None:
    """The layer's computation with book-keeping; None if its kind has none, or if it may compute something else."""
    kinds: tuple[Any, ...] = type(layer).__mro__
    for kind in kinds:
        forward = FORWARDS.get(kind) or FORWARDS_BY_NAME.get(f"{kind.__module__}.{kind.__qualname__}")
        if forward is not None:
            inherited = type(layer).forward is kind.forward
            trusted = type(layer).__module__.split(".")[0] in TRUSTED
            return forward if inherited or trusted else None
    return None


def refuse_mixing(name: str, layer: nn.Module) -> None:
    """Raise `UserError` if a layer, trained or not, lets one sample change what is computed for another."""
    if isinstance(layer, nn.modules.batchnorm._BatchNorm):
        raise UserError(
            f"layer {name!r} is batch normalisation, which mixes samples and so has no per-sample gradient; "
            "use group normalisation"
        )
    if isinstance(layer, nn.modules.instancenorm._InstanceNorm) and layer.track_running_stats:
        raise UserError(f"layer {name!r} keeps statistics of private samples; set track_running_stats=False")
    if isinstance(layer, (nn.Embedding, nn.EmbeddingBag)) and (
        layer.max_norm is not None or layer.scale_grad_by_freq or layer.sparse
    ):
        raise UserError(
            f"layer {name!r} is an embedding with max_norm, scale_grad_by_freq or sparse, which has no per-sample "
            "gradient here; leave them unset"
        )
