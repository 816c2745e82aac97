"""Networks of the papers as functions of their parameters in order, written from their descriptions."""

from collections.abc import Callable, Iterator

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

Parameters = Iterator[Tensor]


def cnn5(p: Parameters, x: Tensor) -> Tensor:
    """doppler.md 4.0, dp_pmlf.md 4.2: 3x3 convolutions, tanh, three 2x2 max pools, 16 groups after each pool."""
    x = F.pad(x, [(32 - x.shape[-1]) // 2] * 4)
    for block in range(4):
        x = torch.tanh(F.conv2d(x, next(p), next(p), padding=1))
        x = F.max_pool2d(x, 2) if block < 3 else x
        x = F.group_norm(x, 16, next(p), next(p))
    return F.conv2d(x, next(p), next(p), padding=1).mean((2, 3))  # its 4x4 pixels


def tutorial_cnn(p: Parameters, x: Tensor) -> Tensor:
    """dc_sgd.md 4.1: on three channels."""
    x = x.expand(-1, 3, -1, -1)
    x = F.max_pool2d(F.relu(F.conv2d(x, next(p), next(p), stride=2, padding=3)), 2, stride=1)
    x = F.max_pool2d(F.relu(F.conv2d(x, next(p), next(p), stride=2)), 2, stride=1)
    return F.linear(F.relu(F.linear(x.flatten(1), next(p), next(p))), next(p), next(p))


def abadi_cnn(p: Parameters, x: Tensor) -> Tensor:
    """adp.md 4.5: two 5x5 convolutions of 64 channels with 2x2 max pools, two layers of 384 units, all with ReLU."""
    for _ in range(2):
        x = F.max_pool2d(F.relu(F.conv2d(x, next(p), next(p), padding=2)), 2)
    x = x.flatten(1)
    for _ in range(2):
        x = F.relu(F.linear(x, next(p), next(p)))
    return F.linear(x, next(p), next(p))


def mlp(p: Parameters, x: Tensor) -> Tensor:
    """One hidden layer with tanh."""
    return F.linear(torch.tanh(F.linear(x.flatten(1), next(p), next(p))), next(p), next(p))


def wide_resnet(named: dict[str, Tensor], x: Tensor) -> Tensor:
    """WRN-16-4 of De et al. 2022: before each convolution ReLU, then 16 groups; filters standardised, with gains."""

    def conv(name: str, x: Tensor, stride: int = 1) -> Tensor:
        w = named[f"{name}.weight"].numpy()
        filters = w.reshape(len(w), -1)
        centred = filters - filters.mean(1, keepdims=True)
        scaled = centred / np.sqrt(np.maximum((centred**2).sum(1, keepdims=True), 1e-4))
        weight = torch.from_numpy(scaled.reshape(w.shape)) * named[f"{name}.gain"].view(-1, 1, 1, 1)
        return F.conv2d(x, weight, named[f"{name}.bias"], stride=stride, padding=w.shape[-1] // 2)

    def norm(name: str, x: Tensor) -> Tensor:
        return F.group_norm(F.relu(x), 16, named[f"{name}.weight"], named[f"{name}.bias"])

    x = conv("0", x)
    for layer in range(1, 7):
        first, stride = layer % 2 == 1, 2 if layer in (3, 5) else 1
        h = conv(f"{layer}.conv1", norm(f"{layer}.norm1", x), stride)
        h = conv(f"{layer}.conv2", norm(f"{layer}.norm2", h))
        x = h + (conv(f"{layer}.skip.2", norm(f"{layer}.skip.1", x), stride) if first else x)
    return F.linear(norm("8", x).mean((2, 3)), named["11.weight"], named["11.bias"])


IN_ORDER: dict[str, Callable[[Parameters, Tensor], Tensor]] = {
    "cnn5": cnn5,
    "cnn_small": tutorial_cnn,
    "cnn_abadi": abadi_cnn,
    "mlp": mlp,
}


def averaging_transformer(p: Parameters, ids: Tensor, heads: int, depth: int) -> Tensor:
    """Pre-norm blocks over the tokens of one text (T,), none of them padding; their normalised outputs averaged."""
    x = next(p)[ids] + next(p)[: len(ids)]
    for _ in range(depth):
        into, out, up, down = [(next(p), next(p)) for _ in range(4)]
        norm1, norm2 = [(next(p), next(p)) for _ in range(2)]
        q, k, v = F.linear(F.layer_norm(x, x.shape[-1:], *norm1), *into).chunk(3, dim=1)
        mixed = []
        for one in range(heads):
            part = slice(one * x.shape[1] // heads, (one + 1) * x.shape[1] // heads)
            scores = q[:, part] @ k[:, part].T / (x.shape[1] // heads) ** 0.5
            mixed.append(scores.softmax(1) @ v[:, part])
        x = x + F.linear(torch.cat(mixed, 1), *out)
        x = x + F.linear(F.relu(F.linear(F.layer_norm(x, x.shape[-1:], *norm2), *up)), *down)
    x = F.layer_norm(x, x.shape[-1:], next(p), next(p)).mean(0)
    return F.linear(x, next(p), next(p))


def last_state_lstm(p: Parameters, ids: Tensor, depth: int) -> Tensor:
    """What the last layer says at the last token of a text (T,); gates are those of torch: in, forget, cell, out."""
    sequence = list(next(p)[ids])
    for _ in range(depth):
        w_x, w_h, b_x, b_h = (next(p) for _ in range(4))
        h = c = torch.zeros(w_h.shape[1], dtype=w_h.dtype)
        outputs = []
        for x in sequence:
            i, f, g, o = (w_x @ x + b_x + w_h @ h + b_h).chunk(4)
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            h = o.sigmoid() * c.tanh()
            outputs.append(h)
        sequence = outputs
    return F.linear(sequence[-1], next(p), next(p))
