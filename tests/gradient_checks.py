"""Per-sample gradients against one plain backward pass per sample in float64, and models that several tests share."""

import copy
import math
import os
import warnings
from typing import NamedTuple

import torch
import torch.nn.functional as F
from hypothesis import settings
from hypothesis import strategies as st
from torch import nn
from torch.func import functional_call, grad, vmap

from dpbench.devices import prepare_device
from dpbench.errors import PlainWarning
from dpbench.gradients import FlatParameters, PerSampleGradients
from dpbench.gradients.choice import Chooser
from dpbench.gradients.way import Books
from dpbench.models.layers import WSConv2d
from dpbench.query import Point

# Where the engine computes; references are computed on the CPU.
DEVICE = torch.device(os.environ.get("DPBENCH_TESTS_DEVICE", "cpu"))
prepare_device(DEVICE)

# Weights of 1, 2 and 4 iterates.
WEIGHTS = {1: (0.8,), 2: (1.4, -0.4), 4: (0.6, -0.9, 1.1, 0.2)}

EXACT = {torch.float64: 1e-9, torch.float32: 1e-5}

FALLBACK = "falling back to materialised per-sample gradients for this model"

SHAPES = settings(derandomize=True, deadline=None, max_examples=14)

seeds = st.integers(0, 2**20)


def cross_entropy(outputs, targets):
    return F.cross_entropy(outputs, targets, reduction="none")


def plain_gradients(model, iterate, inputs, targets, loss=cross_entropy, views=1):
    """Losses (B,) and gradients (B, d) in float64: each sample goes through a copy of the model alone, by autograd."""
    alone = copy.deepcopy(model).double()
    parameters = [p for p in alone.parameters() if p.requires_grad]
    for parameter, piece in zip(parameters, iterate.double().split([p.numel() for p in parameters]), strict=True):
        parameter.data.copy_(piece.view_as(parameter))
    losses, rows = [], []
    for i in range(len(targets)):
        sample = inputs[i] if views > 1 else inputs[i : i + 1]
        value = loss(alone(sample), targets[i : i + 1].repeat_interleave(views, 0)).mean()
        gradients = torch.autograd.grad(value, parameters, allow_unused=True, materialize_grads=True)
        losses.append(value.detach())
        rows.append(torch.cat([g.flatten() for g in gradients]))
    return torch.stack(losses), torch.stack(rows)


def func_gradients(model, flat, iterate, inputs, targets):
    """Gradients (B, d) by torch.func."""

    def loss(vector, sample, target):
        parameters = dict(zip(flat.names, flat.views(vector), strict=True))
        return cross_entropy(functional_call(model, parameters, (sample.unsqueeze(0),)), target.unsqueeze(0))[0]

    return vmap(grad(loss), in_dims=(None, 0, 0))(iterate.clone(), inputs, targets)


def iterates_of(vector, count, spread):
    """The vector and others near it, all of which float32 can represent."""
    others = [vector + spread * torch.randn_like(vector) for _ in range(count - 1)]
    return [point.float().double() for point in (vector, *others)]


def relative(got, want):
    return float((got.double().cpu() - want).norm() / want.norm())


class Expanded(nn.Module):
    """One channel as so many, without a copy."""

    def __init__(self, channels):
        super().__init__()
        self.channels = channels

    def forward(self, x):
        return x.expand(-1, self.channels, *x.shape[2:])


class Reference(NamedTuple):
    """What an engine is compared with: `plain_gradients` at some iterates."""

    targets: torch.Tensor
    iterates: list
    plain: list


def reference_of(model, inputs, targets=None, *, loss=cross_entropy, views=1, points=(1, 2, 4), spread=0.1):
    """By what `assert_exact` is given."""
    model.double()
    inputs = inputs.float().double() if inputs.is_floating_point() else inputs
    targets = torch.randint(3, (len(inputs),)) if targets is None else targets
    iterates = iterates_of(FlatParameters(model).vector, max(points), spread)
    return Reference(targets, iterates, [plain_gradients(model, at, inputs, targets, loss, views) for at in iterates])


def assert_exact(
    model,
    inputs,
    targets=None,
    *,
    reference=None,
    loss=cross_entropy,
    views=1,
    points=(1, 2, 4),
    strategies=None,
    per_layer=None,
    spread=0.1,
    books=True,
    checked=True,
    tolerances=EXACT,
):
    """Norms, random weighted sums, clipped sums and losses of the engine equal those of `plain_gradients`.

    Args:
        model: any model.
        inputs: shape (B, ...), or (B, K, ...) with K views.
        targets: shape (B, ...); three classes if not given.
        reference: of this model and these inputs, where it is known.
        loss: per-sample losses.
        views: K.
        points: how many iterates, each number a check.
        strategies: kinds of strategies that the engine may take.
        per_layer: for each group, how the names of its parameters begin; None for one group.
        spread: distance of the iterates.
        books: the engine must keep books, without a warning; else it must fall back, with one; None for either.
        checked: the engine compares its books with autograd first, as it does for users.
        tolerances: by precision.
    """
    if reference is None:
        reference = reference_of(model, inputs, targets, loss=loss, views=views, points=points, spread=spread)
    targets, iterates, plain = reference
    inputs = inputs.float().double() if inputs.is_floating_point() else inputs
    groups = groups_of(FlatParameters(model), per_layer)
    factors = torch.randn(int(groups.max()) + 1, len(inputs), dtype=torch.float64).float().double()
    for dtype, tolerance in tolerances.items():
        twin = copy.deepcopy(model).to(DEVICE, dtype)
        engine = PerSampleGradients(twin, FlatParameters(twin), loss, per_layer=per_layer is not None, views=views)
        restricted(engine, strategies)
        typed = inputs.to(DEVICE, dtype) if inputs.is_floating_point() else inputs.to(DEVICE)
        if not checked:
            trust(engine, Books(1, channels_last=engine.channels_last), typed, targets)
        complaints = []
        for count in points:
            weighted = list(zip(WEIGHTS[count], iterates, plain, strict=False))
            want = sum(weight * gradients for weight, _, (_, gradients) in weighted)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                at_iterates = [Point(weight, at.to(DEVICE, dtype)) for weight, at, _ in weighted]
                tape = engine.record(at_iterates, typed, targets.to(DEVICE))
            complaints += [str(w.message) for w in caught if w.category is PlainWarning and FALLBACK in str(w.message)]
            assert_tape(tape, want, groups, factors, tolerance)
            torch.testing.assert_close(tape.losses.double().cpu(), weighted[0][2][0], rtol=tolerance, atol=tolerance)
        assert books is None or len(complaints) == (not books), complaints


class Restricted(Chooser):
    """Chooses among strategies of these kinds alone, where a use has any."""

    def __init__(self, kinds):
        super().__init__()
        self.kinds = kinds

    def _candidates(self, use, term, points):
        allowed = super()._candidates(use, term, points)
        among = {s: cost for s, cost in use.strategies(term, points).items() if s.kind in self.kinds}
        return {s: cost for s, cost in among.items() if s in allowed} or among or allowed


def restricted(engine, kinds):
    """The engine, which takes strategies of these kinds alone from now on; None for any."""
    if kinds is not None:
        engine._chooser = Restricted(kinds)
    return engine


def trust(engine, way, inputs, targets):
    """Let an engine take a way without comparing it in one of the next batches like this one."""
    engine._way, engine._batches = way, 4
    engine._compared_batches.add(inputs, targets, len(targets))


def groups_of(flat, per_layer):
    """For each number of the flat vector, its group."""
    if per_layer is None:
        return torch.zeros(len(flat), dtype=torch.int64)
    numbers = []
    for name, parameter in zip(flat.names, flat.parameters, strict=True):
        (group,) = [i for i, beginnings in enumerate(per_layer) if name.startswith(beginnings)]
        numbers.append(torch.full((parameter.numel(),), group))
    return torch.cat(numbers)


def assert_tape(tape, want, groups, factors, tolerance):
    norms = torch.stack([want[:, groups == g].norm(dim=1) for g in range(len(factors))])
    assert tape.norms().shape == norms.shape
    deviation = float(((tape.norms().double().cpu() - norms).abs() / norms).max())
    assert deviation < tolerance
    sums = (factors[groups].t() * want).sum(0)
    assert relative(tape.weighted_sum(factors.to(tape.norms())), sums) < tolerance
    threshold = float(norms.median())
    clipped = ((threshold / norms).clamp(max=1)[groups].t() * want).sum(0)
    assert relative(tape.weighted_sum((threshold / tape.norms()).clamp(max=1)), clipped) < tolerance


def read_out(*layers, example):
    """The layers and a linear map to three classes."""
    model = nn.Sequential(*layers, nn.Flatten(), nn.LazyLinear(3))
    model(example)
    return model


def standardised(channels, out, kernel, spread=0.1, **options):
    """WSConv2d with gains, one filter of which varies so little that its scale is bounded; how far iterates may go."""
    layer = WSConv2d(channels, out, kernel, **options)
    with torch.no_grad():
        layer.gain.copy_(0.5 + torch.rand(out))
        layer.weight[0] *= 1e-3
        layer.gain[1:2] *= -1
    spreads = [torch.full_like(p, spread) for _, p in layer.named_parameters()]
    names = [name for name, _ in layer.named_parameters()]
    spreads[names.index("weight")][0] = 1e-4
    return layer, torch.cat([s.flatten() for s in spreads]).double()


def assert_standardised_exact(layer, spread, x, **options):
    model, spread = standardised_model(layer, spread, x)
    assert_exact(model, x, spread=spread, **options)


def standardised_model(layer, spread, x):
    """A model of the layer, and how far iterates may go."""
    model = read_out(layer, nn.Tanh(), example=x)
    scale = layer.statistics(layer.weight)[1].flatten()
    assert math.isclose(scale[0].item(), layer.SMALLEST**-0.5, rel_tol=1e-6)
    if layer.weight[0].numel() > 1:
        assert (scale[1:] < 0.9 * scale[0]).all()
    rest = sum(p.numel() for p in model.parameters()) - len(spread)
    return model, torch.cat([spread, torch.full((rest,), 0.1).double()])


class Tokens(nn.Module):
    """A class token, position embeddings and a layer scale, as in vision transformers."""

    def __init__(self, length, d):
        super().__init__()
        self.start = nn.Linear(d, d)
        self.token = nn.Parameter(torch.randn(1, 1, d))
        self.positions = nn.Parameter(torch.randn(1, length + 1, d))
        self.scale = nn.Parameter(torch.rand(d))

    def forward(self, x):
        x = torch.cat([self.token.expand(len(x), -1, -1), self.start(x)], dim=1) + self.positions
        return x + self.scale * torch.tanh(x)


class Scaled(nn.Module):
    """Output of a layer times a parameter of some shape."""

    def __init__(self, layer, shape):
        super().__init__()
        self.layer = layer
        self.scale = nn.Parameter(torch.rand(shape) + 0.5)

    def forward(self, x):
        return self.layer(x) * self.scale


class Recurrent(nn.Module):
    """An LSTM of which all that it gives is used."""

    def __init__(self, d, **options):
        super().__init__()
        self.start = nn.Linear(d, d)
        self.lstm = nn.LSTM(d, batch_first=True, **options)

    def forward(self, x):
        output, (h, c) = self.lstm(self.start(x))
        return torch.cat([output.flatten(1), h.transpose(0, 1).flatten(1), c.transpose(0, 1).flatten(1)], dim=1)


class Attention(nn.Module):
    """Multi-head attention of a sequence to itself, or of its first two tokens to the others."""

    def __init__(self, d, heads, *, cross=False, values=False, padding=None, mask=None, weights=None, bias=True):
        super().__init__()
        self.start = nn.Linear(d, d)
        self.attention = nn.MultiheadAttention(d, heads, bias=bias, batch_first=True)
        for parameter in self.attention.parameters():
            nn.init.normal_(parameter, std=0.7)
        self.cross, self.values, self.padding, self.mask, self.weights = cross, values, padding, mask, weights

    def forward(self, x):
        x = self.start(x)
        query, key = (x[:, :2], x[:, 2:]) if self.cross else (x, x)
        value = torch.sin(key) if self.values else key
        hidden = None
        if self.padding is not None:
            hidden = x.detach()[:, -key.shape[1] :, 0] > 0
            hidden[:, 0] = False
            if self.padding == "numbers":
                hidden = torch.zeros_like(hidden, dtype=x.dtype).masked_fill(hidden, -2.0)
        forbidden = None
        if self.mask is not None:
            forbidden = torch.ones(query.shape[1], key.shape[1], dtype=torch.bool, device=x.device).triu(1)
            if self.mask == "numbers":
                forbidden = -forbidden.to(x.dtype)
            elif self.mask == "of each head":
                forbidden = forbidden.repeat(len(x) * self.attention.num_heads, 1, 1)
        output, weights = self.attention(
            query,
            key,
            value,
            key_padding_mask=hidden,
            attn_mask=forbidden,
            need_weights=self.weights is not None,
            average_attn_weights=self.weights != "of each head",
        )
        assert (weights is None) == (self.weights is None)
        return output if weights is None else torch.cat([output.flatten(1), weights.flatten(1)], dim=1)


class Language(nn.Module):
    """A model of language whose last layer has the weight of its first; optionally read twice more."""

    def __init__(self, rows=5, d=4, *, padding_idx=None, bias=True, again=False):
        super().__init__()
        self.table = nn.Embedding(rows, d, padding_idx=padding_idx)
        self.mix = nn.Linear(d, d)
        self.head = nn.Linear(d, rows, bias=bias)
        self.head.weight = self.table.weight
        self.again = again

    def forward(self, ids):
        x = self.table(ids)
        if self.again:
            x = x + self.table(ids.flip(1)[:, :1]) + torch.tanh(self.head(x)).sum(2, keepdim=True)
        return self.head(torch.tanh(self.mix(x)))


def next_token(outputs, targets):
    """The mean over tokens of a sample's losses."""
    return F.cross_entropy(outputs.flatten(0, 1), targets.flatten(), reduction="none").view(targets.shape).mean(1)
