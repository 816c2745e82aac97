"""Per-sample gradients of every kind of layer, against one plain backward pass per sample in float64."""

import copy
import math
import warnings

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.func import functional_call, grad, vmap
from transformers.pytorch_utils import Conv1D

from dpbench.gradients import FlatParameters, PerSampleGradients, uses
from dpbench.gradients.choice import Chooser
from dpbench.gradients.per_sample import Books
from dpbench.gradients.pooling import max_pooling
from dpbench.gradients.summands import Factored, Held
from dpbench.gradients.uses import Lookup, Outer, Patches
from dpbench.models.layers import StdConv2d, WSConv2d
from dpbench.query import Point
from dpbench.training.assemble import per_sample_loss

# Weights of 1, 2 and 4 iterates.
WEIGHTS = {1: (0.8,), 2: (1.4, -0.4), 4: (0.6, -0.9, 1.1, 0.2)}
EXACT = {torch.float64: 1e-9, torch.float32: 1e-5}
FALLBACK = "this model keeps no books of its gradients, which are made one by one"
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
    return float((got.double() - want).norm() / want.norm())


def assert_exact(
    model,
    inputs,
    targets=None,
    *,
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
    model.double()
    inputs = inputs.float().double() if inputs.is_floating_point() else inputs
    targets = torch.randint(3, (len(inputs),)) if targets is None else targets
    flat = FlatParameters(model)
    iterates = iterates_of(flat.vector, max(points), spread)
    plain = [plain_gradients(model, at, inputs, targets, loss, views) for at in iterates]
    groups = groups_of(flat, per_layer)
    factors = torch.randn(int(groups.max()) + 1, len(inputs), dtype=torch.float64).float().double()
    for dtype, tolerance in tolerances.items():
        twin = copy.deepcopy(model).to(dtype)
        engine = PerSampleGradients(
            twin, FlatParameters(twin), loss, per_layer=per_layer is not None, views=views, strategies=strategies
        )
        if not checked:
            engine._way = Books(1)
        typed = inputs.to(dtype) if inputs.is_floating_point() else inputs
        complaints = []
        for count in points:
            weighted = list(zip(WEIGHTS[count], iterates, plain, strict=False))
            want = sum(weight * gradients for weight, _, (_, gradients) in weighted)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                tape = engine.record([Point(weight, at.to(dtype)) for weight, at, _ in weighted], typed, targets)
            complaints += [str(w.message) for w in caught if w.category is UserWarning and FALLBACK in str(w.message)]
            assert_tape(tape, want, groups, factors, tolerance)
            torch.testing.assert_close(tape.losses.double(), weighted[-1][2][0], rtol=tolerance, atol=tolerance)
        assert books is None or len(complaints) == (not books), complaints


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
    assert float(((tape.norms().double() - norms).abs() / norms).max()) < tolerance
    sums = (factors[groups].t() * want).sum(0)
    assert relative(tape.weighted_sum(factors.to(tape.norms().dtype)), sums) < tolerance
    threshold = float(norms.median())
    clipped = ((threshold / norms).clamp(max=1)[groups].t() * want).sum(0)
    assert relative(tape.weighted_sum((threshold / tape.norms()).clamp(max=1)), clipped) < tolerance


def read_out(*layers, example):
    """The layers and a linear map to three classes."""
    model = nn.Sequential(*layers, nn.Flatten(), nn.LazyLinear(3))
    model(example)
    return model


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(3)


# Linear layers


@SHAPES
@given(
    seeds,
    st.lists(st.integers(1, 3), max_size=2),
    st.integers(1, 5),
    st.integers(1, 5),
    st.booleans(),
    st.booleans(),
    st.integers(1, 5),
)
def test_linear(seed, tokens, d, p, bias, first, batch):
    torch.manual_seed(seed)
    x = torch.randn(batch, *tokens, d)
    before = [] if first else [nn.Linear(d, d), nn.Tanh()]
    assert_exact(read_out(*before, nn.Linear(d, p, bias=bias), nn.Tanh(), example=x), x)


@SHAPES
@given(seeds, st.lists(st.integers(1, 3), max_size=2), st.integers(1, 5), st.integers(1, 5), st.booleans())
def test_conv1d_of_transformers(seed, tokens, d, p, first):
    torch.manual_seed(seed)
    x = torch.randn(4, *tokens, d)
    layer = Conv1D(p, d)
    nn.init.normal_(layer.weight)
    before = [] if first else [nn.Linear(d, d), nn.Tanh()]
    assert_exact(read_out(*before, layer, nn.Tanh(), example=x), x)


# Convolutions


@st.composite
def convolutions(draw, dimensions, modes=("zeros", "reflect", "circular")):
    """(channels, options of a convolution, size of a map that it can read)."""
    groups, width = draw(st.sampled_from([(1, 2), (1, 3), (2, 4), (3, 3)]))
    out = draw(st.sampled_from([1, 2])) * width
    kernel = [draw(st.integers(1, 4)) for _ in range(dimensions)]
    dilation = [draw(st.integers(1, 2)) for _ in range(dimensions)]
    padding = draw(st.sampled_from(["same", "valid", "zero", "numbers"]))
    stride = [1 if padding == "same" else draw(st.integers(1, 3)) for _ in range(dimensions)]
    mode = draw(st.sampled_from(modes))
    if padding == "numbers":
        padding = tuple(draw(st.integers(0, 2)) for _ in range(dimensions))
    elif padding == "zero":
        padding = 0
    size = [max(3, d * (k - 1) + 1) + draw(st.integers(0, 3)) for k, d in zip(kernel, dilation, strict=True)]
    options = {
        "out_channels": out,
        "kernel_size": tuple(kernel),
        "stride": tuple(stride),
        "dilation": tuple(dilation),
        "padding": padding,
        "padding_mode": mode,
        "groups": groups,
        "bias": draw(st.booleans()),
    }
    return width, options, size


@SHAPES
@given(seeds, convolutions(1), st.booleans())
def test_conv1d(seed, convolution, first):
    torch.manual_seed(seed)
    channels, options, size = convolution
    x = torch.randn(4, channels, *size)
    before = [] if first else [nn.Conv1d(channels, channels, 1), nn.Tanh()]
    assert_exact(read_out(*before, nn.Conv1d(channels, **options), nn.Tanh(), example=x), x)


@settings(SHAPES, max_examples=28)
@given(seeds, convolutions(2), st.booleans())
def test_conv2d(seed, convolution, first):
    torch.manual_seed(seed)
    channels, options, size = convolution
    x = torch.randn(4, channels, *size)
    before = [] if first else [nn.Conv2d(channels, channels, 1), nn.Tanh()]
    assert_exact(read_out(*before, nn.Conv2d(channels, **options), nn.Tanh(), example=x), x)


@settings(SHAPES, max_examples=28)
@given(
    seeds,
    st.tuples(st.integers(1, 4), st.integers(1, 4)),
    st.tuples(st.integers(0, 3), st.integers(0, 3)),
    st.tuples(st.integers(1, 3), st.integers(1, 3)),
    st.tuples(st.integers(0, 3), st.integers(0, 3)),
    st.sampled_from([1, 2]),
)
def test_conv2d_by_inner_products(seed, kernel, padding, dilation, extra, views):
    """Kernels larger and smaller than the map, and padding that some of a kernel's points never leave."""
    torch.manual_seed(seed)
    shape = (kernel, padding, dilation, extra)
    size = [max(1, d * (k - 1) + 1 - 2 * p) + more for k, p, d, more in zip(*shape, strict=True)]
    x = torch.randn(4, views, 2, *size) if views > 1 else torch.randn(4, 2, *size)
    layer = nn.Conv2d(2, 3, kernel, padding=padding, dilation=dilation)
    model = read_out(layer, nn.Tanh(), example=x[:, 0] if views > 1 else x)
    assert_exact(model, x, views=views, points=(1, 2), strategies=frozenset({"gram"}))


CONVOLUTIONS = {
    "1x1, stride 2": ({"kernel_size": 1, "stride": 2}, (5, 6)),
    "1x1, padding 1": ({"kernel_size": 1, "padding": 1}, (3, 4)),
    "depthwise": ({"kernel_size": 3, "groups": 4, "padding": 1}, (4, 5)),
    "depthwise, stride 2": ({"kernel_size": 3, "groups": 4, "stride": 2, "bias": False}, (6, 5)),
    "same, even kernel": ({"kernel_size": (2, 4), "padding": "same"}, (4, 5)),
    "same, even kernel, dilated, circular": (
        {"kernel_size": (4, 2), "padding": "same", "dilation": (1, 3), "padding_mode": "circular"},
        (5, 6),
    ),
    "same, reflect": ({"kernel_size": (3, 4), "padding": "same", "padding_mode": "reflect"}, (5, 5)),
    "replicate": ({"kernel_size": 3, "padding": (2, 1), "padding_mode": "replicate"}, (4, 4)),
    "valid": ({"kernel_size": 3, "padding": "valid", "stride": 2}, (7, 6)),
    "stride that leaves pixels over": ({"kernel_size": 2, "stride": 3}, (7, 9)),
    "kernel as large as the map": ({"kernel_size": (4, 5)}, (4, 5)),
}


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_conv2d_with_settings(name):
    options, size = CONVOLUTIONS[name]
    x = torch.randn(4, 4, *size)
    assert_exact(read_out(nn.Conv2d(4, 4, 1), nn.Tanh(), nn.Conv2d(4, 8, **options), nn.Tanh(), example=x), x)


def test_conv2d_of_channels_last_maps():
    x = torch.randn(4, 4, 5, 6).to(memory_format=torch.channels_last)
    assert_exact(read_out(nn.Conv2d(4, 4, 1), nn.Tanh(), nn.Conv2d(4, 6, 3), nn.Tanh(), example=x), x)


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
    model = read_out(layer, nn.Tanh(), example=x)
    scale = layer.statistics(layer.weight)[1].flatten()
    assert math.isclose(scale[0].item(), layer.SMALLEST**-0.5, rel_tol=1e-6)
    if layer.weight[0].numel() > 1:
        assert (scale[1:] < 0.9 * scale[0]).all()
    rest = sum(p.numel() for p in model.parameters()) - len(spread)
    assert_exact(model, x, spread=torch.cat([spread, torch.full((rest,), 0.1).double()]), **options)


@SHAPES
@given(
    seeds,
    st.integers(1, 3),
    st.integers(2, 4),
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(0, 2),
    st.integers(0, 3),
)
def test_weight_standardised_convolution(seed, channels, out, kernel, stride, padding, extra):
    torch.manual_seed(seed)
    channels = max(channels, 3) if kernel == 1 else channels  # a filter of one weight is always 0
    layer, spread = standardised(channels, out, kernel, stride=stride, padding=padding)
    assert_standardised_exact(layer, spread, torch.randn(4, channels, kernel + extra, kernel + 1))


# Norms


@SHAPES
@given(
    seeds,
    st.integers(1, 3),
    st.integers(2, 3),
    st.lists(st.integers(2, 4), max_size=2),
    st.booleans(),
    st.booleans(),
    st.booleans(),
)
def test_group_norm(seed, groups, width, size, affine, channels_last, first):
    torch.manual_seed(seed)
    width += 2 * (not size)  # groups of few numbers are all but constant, and float32 isn't enough
    channels = groups * width
    x = torch.randn(4, channels, *size)
    if channels_last and len(size) == 2:
        x = x.to(memory_format=torch.channels_last)
    norm = nn.GroupNorm(groups, channels, affine=affine)
    if affine:
        nn.init.normal_(norm.weight)
        nn.init.normal_(norm.bias)
    before = {
        0: nn.Linear(channels, channels),
        1: nn.Conv1d(channels, channels, 1),
        2: nn.Conv2d(channels, channels, 1),
    }
    layers = [norm] if first else [before[len(size)], norm]
    assert_exact(read_out(*layers, nn.Tanh(), example=x), x)


@pytest.mark.parametrize("fixed", ["weight", "bias", "both"])
@pytest.mark.parametrize("channels_last", [False, True])
def test_group_norm_in_part_frozen(fixed, channels_last):
    x = torch.randn(4, 4, 3, 5)
    if channels_last:
        x = x.to(memory_format=torch.channels_last)
    norm = nn.GroupNorm(2, 4)
    for name in ("weight", "bias") if fixed == "both" else (fixed,):
        getattr(norm, name).requires_grad_(False)
    assert_exact(read_out(nn.Conv2d(4, 4, 1), norm, nn.Tanh(), example=x), x)


@SHAPES
@given(
    seeds,
    st.sampled_from([nn.LayerNorm, nn.RMSNorm]),
    st.lists(st.integers(1, 3), max_size=2),
    st.sampled_from([(5,), (3, 4), (2, 2, 3)]),
    st.booleans(),
    st.booleans(),
)
def test_layer_norm_and_rms_norm(seed, kind, tokens, shape, affine, bias):
    torch.manual_seed(seed)
    options = {"bias": bias} if kind is nn.LayerNorm else {}
    norm = kind(shape, elementwise_affine=affine, **options)
    for parameter in norm.parameters():
        nn.init.normal_(parameter)
    x = torch.randn(4, *tokens, *shape)
    assert_exact(read_out(nn.Linear(shape[-1], shape[-1]), norm, nn.Tanh(), example=x), x)


# Embeddings


@SHAPES
@given(
    seeds,
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(0, 1),
    st.integers(1, 2),
    st.booleans(),
    st.sampled_from([torch.contiguous_format, torch.channels_last]),
)
def test_max_pooling(seed, kernel, stride, padding, dilation, ceil, layout):
    torch.manual_seed(seed)
    pool = nn.MaxPool2d(kernel, stride, min(padding, kernel // 2), dilation, ceil_mode=ceil)
    x = torch.randn(4, 2, 7, 8).contiguous(memory_format=layout)
    assert_exact(read_out(nn.Conv2d(2, 3, 2), pool, nn.Conv2d(3, 2, 1), example=x), x)


def test_max_pooling_takes_the_pixel_that_torch_takes_of_several_equal_ones():
    pool = nn.MaxPool2d(2)
    x = torch.randint(2, (6, 3, 8, 8)).float().requires_grad_()
    weights = torch.randn(6, 3, 4, 4)

    def maxima_and_gradient(forward):
        maxima = forward(x)
        return maxima.detach(), *torch.autograd.grad(maxima, x, weights)

    want = maxima_and_gradient(pool)
    got = maxima_and_gradient(lambda t: max_pooling(None, pool, t))
    assert all(map(torch.equal, got, want))
    # The same maxima, of the last of equal pixels: the check above does see which pixel is taken.
    last, elsewhere = maxima_and_gradient(lambda t: pool(t.flip(2, 3)).flip(2, 3))
    assert torch.equal(last, want[0])
    assert not torch.equal(elsewhere, want[1])


@SHAPES
@given(seeds, st.integers(2, 9), st.integers(1, 4), st.lists(st.integers(1, 5), max_size=2), st.booleans())
def test_embedding(seed, rows, d, tokens, padded):
    torch.manual_seed(seed)
    ids = torch.randint(rows, (4, *tokens))  # with few rows, ids are repeated
    table = nn.Embedding(rows, d, padding_idx=seed % rows if padded else None)
    nn.init.normal_(table.weight)  # the padding row too, so that what goes to it would be seen
    assert_exact(read_out(table, nn.Tanh(), example=ids), ids)


class Positions(nn.Module):
    """Embeddings of tokens and of positions, whose ids are the same for all samples; a shared bias from another."""

    def __init__(self, rows, length, d):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(rows, d), nn.Embedding(length, d)
        self.kinds = nn.Embedding(2, d, padding_idx=1)
        self.mix = nn.Linear(d, d)
        self.register_buffer("ids", torch.arange(length).flip(0).unsqueeze(0))

    def forward(self, ids):
        positions = self.ids[:, : ids.shape[1]]
        kinds = (positions % 2).expand(len(ids), -1)
        return self.tokens(ids) + self.mix(self.positions(positions)) + self.kinds(kinds)


@SHAPES
@given(seeds, st.integers(2, 5), st.integers(1, 6), st.integers(1, 4), st.integers(1, 5))
def test_embedding_of_ids_shared_by_the_batch(seed, rows, length, d, batch):
    torch.manual_seed(seed)
    ids = torch.randint(rows, (batch, length))
    assert_exact(read_out(Positions(rows, 6, d), nn.Tanh(), example=ids), ids)


def test_embedding_of_32_bit_ids():
    ids = torch.randint(5, (4, 6), dtype=torch.int32)
    for kind in ("hold", "gram"):
        model = read_out(nn.Embedding(5, 3), nn.Tanh(), example=ids)
        assert_exact(model, ids, strategies=frozenset({kind}))


# Parameters that no layer of a known kind owns


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


@SHAPES
@given(seeds, st.integers(1, 4), st.integers(1, 4), st.integers(1, 5))
def test_tokens_positions_and_layer_scale(seed, length, d, batch):
    torch.manual_seed(seed)
    x = torch.randn(batch, length, d)
    assert_exact(read_out(Tokens(length, d), nn.Tanh(), example=x), x)


class Scaled(nn.Module):
    """Output of a layer times a parameter of some shape."""

    def __init__(self, layer, shape):
        super().__init__()
        self.layer = layer
        self.scale = nn.Parameter(torch.rand(shape) + 0.5)

    def forward(self, x):
        return self.layer(x) * self.scale


SCALES = {
    "vector on (B, d)": ((4,), lambda: nn.Linear(5, 4), (4, 5)),
    "vector on (B, T, d)": ((4,), lambda: nn.Linear(5, 4), (4, 3, 5)),
    "vector on (B, H, W, d)": ((4,), lambda: nn.Linear(5, 4), (4, 3, 3, 5)),
    "scalar": ((), lambda: nn.Linear(5, 4), (4, 3, 5)),
    "scalar on (B, d)": ((), lambda: nn.Linear(5, 4), (4, 5)),
    "one number": ((1,), lambda: nn.Linear(5, 4), (4, 3, 5)),
    "channels of a map": ((4, 1, 1), lambda: nn.Conv2d(2, 4, 2), (4, 2, 4, 4)),
    "channels of a map, with a batch": ((1, 4, 1, 1), lambda: nn.Conv2d(2, 4, 2), (4, 2, 4, 4)),
    "positions without a batch": ((3, 4), lambda: nn.Linear(5, 4), (4, 3, 5)),
    "as many positions as are compared": ((3, 1), lambda: nn.Linear(5, 4), (3, 3, 5)),
}


@pytest.mark.parametrize("name", SCALES)
def test_scales_keep_books(name):
    shape, layer, size = SCALES[name]
    x = torch.randn(*size)
    assert_exact(read_out(Scaled(layer(), shape), nn.Tanh(), example=x), x)


def test_parameter_used_twice_and_by_two_modules():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = Scaled(nn.Linear(4, 4), (4,)), Scaled(nn.Linear(4, 4), (4,))
            self.second.scale = self.first.scale

        def forward(self, x):
            return self.second(torch.tanh(self.first(x))) + self.first.scale

    x = torch.randn(4, 3, 4)
    assert_exact(read_out(Twice(), nn.Tanh(), example=x), x)


# LSTMs and attention


class Recurrent(nn.Module):
    """An LSTM of which all that it gives is used."""

    def __init__(self, d, **options):
        super().__init__()
        self.start = nn.Linear(d, d)
        self.lstm = nn.LSTM(d, batch_first=True, **options)

    def forward(self, x):
        output, (h, c) = self.lstm(self.start(x))
        return torch.cat([output.flatten(1), h.transpose(0, 1).flatten(1), c.transpose(0, 1).flatten(1)], dim=1)


@SHAPES
@given(seeds, st.integers(1, 4), st.integers(1, 3), st.integers(1, 4), st.integers(1, 2), st.booleans(), st.booleans())
def test_lstm(seed, length, d, hidden, layers, bidirectional, bias):
    torch.manual_seed(seed)
    x = torch.randn(4, length, d)
    model = Recurrent(d, hidden_size=hidden, num_layers=layers, bidirectional=bidirectional, bias=bias)
    assert_exact(read_out(model, example=x), x)


class Started(nn.Module):
    """An LSTM that begins in a state which another layer makes, and is called again on its own output."""

    def __init__(self):
        super().__init__()
        self.state = nn.Linear(3, 2 * 2 * 3)
        self.lstm = nn.LSTM(3, 3, num_layers=2, batch_first=True)

    def forward(self, x):
        h, c = torch.tanh(self.state(x[:, 0])).view(len(x), 2, 2, 3).permute(1, 2, 0, 3)
        output, states = self.lstm(x, (h.contiguous(), c.contiguous()))
        return self.lstm(output[:, 1:], states)[0]


def test_lstm_with_a_first_state_called_twice():
    x = torch.randn(4, 4, 3)
    assert_exact(read_out(Started(), example=x), x)


@pytest.mark.parametrize("frozen", ["weight_ih_l0", "weight_hh_l0_reverse", "bias", "weight"])
def test_lstm_in_part_frozen(frozen):
    model = Recurrent(3, hidden_size=2, bidirectional=True)
    for name, parameter in model.lstm.named_parameters():
        parameter.requires_grad_(not name.startswith(frozen))
    x = torch.randn(4, 3, 3)
    assert_exact(read_out(model, example=x), x)


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
            forbidden = torch.ones(query.shape[1], key.shape[1], dtype=torch.bool).triu(1)
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


@SHAPES
@given(
    seeds,
    st.integers(3, 5),
    st.sampled_from([(2, 1), (2, 2), (4, 2)]),
    st.fixed_dictionaries(
        {
            "cross": st.booleans(),
            "values": st.booleans(),
            "bias": st.booleans(),
            "padding": st.sampled_from([None, "boolean", "numbers"]),
            "weights": st.sampled_from([None, "mean", "of each head"]),
        }
    ),
    st.booleans(),
)
def test_multihead_attention(seed, length, sizes, options, training):
    torch.manual_seed(seed)
    x = torch.randn(4, length, sizes[0])
    assert_exact(read_out(Attention(*sizes, **options), example=x).train(training), x)


@pytest.mark.parametrize("weights", [None, "mean"])
@pytest.mark.parametrize("mask", ["boolean", "numbers", "of each head"])
def test_multihead_attention_with_a_mask(mask, weights):
    x = torch.randn(4, 4, 4)
    padding = "numbers" if mask == "numbers" else "boolean"
    assert_exact(read_out(Attention(4, 2, mask=mask, weights=weights, padding=padding), example=x), x)


@pytest.mark.parametrize("frozen", ["in_proj_weight", "in_proj_bias", "out_proj.weight", "in_proj", "out_proj"])
def test_multihead_attention_in_part_frozen(frozen):
    model = Attention(4, 2)
    for name, parameter in model.attention.named_parameters():
        parameter.requires_grad_(not name.startswith(frozen))
    x = torch.randn(4, 3, 4)
    assert_exact(read_out(model, example=x), x)


# Layers called more than once, and weights that layers share


class Again(nn.Module):
    """A layer called on an input, and on what a function makes of its output."""

    def __init__(self, layer, then):
        super().__init__()
        self.layer, self.then = layer, then

    def forward(self, x):
        first = self.layer(x)
        return torch.cat([first.flatten(1), self.layer(self.then(first)).flatten(1)], dim=1)


AGAIN = {
    "linear": (lambda: nn.Linear(4, 4), torch.tanh, (4, 3, 4)),
    "linear on one token": (lambda: nn.Linear(4, 4), torch.tanh, (4, 4)),
    "linear on fewer tokens": (lambda: nn.Linear(4, 4), lambda x: torch.tanh(x[:, 1:]), (4, 3, 4)),
    "linear on one token of many": (lambda: nn.Linear(4, 4), lambda x: torch.tanh(x.mean(1)), (4, 3, 4)),
    "conv": (lambda: nn.Conv2d(2, 2, 3, padding=1), torch.tanh, (4, 2, 4, 4)),
    "conv on a smaller map": (lambda: nn.Conv2d(2, 2, 3), torch.tanh, (4, 2, 7, 8)),
    "conv on a larger map": (lambda: nn.Conv2d(2, 2, 2), lambda x: F.interpolate(x, scale_factor=2.0), (4, 2, 4, 4)),
    "conv1d on a smaller map": (lambda: nn.Conv1d(2, 2, 3), torch.tanh, (4, 2, 8)),
    "standardised conv on a smaller map": (lambda: standardised(2, 2, 3)[0], torch.tanh, (4, 2, 7, 8)),
    "group norm": (lambda: nn.GroupNorm(2, 6), torch.sin, (4, 6, 3)),
    "layer norm": (lambda: nn.LayerNorm(6), torch.sin, (4, 3, 6)),
    "direct parameter": (lambda: Scaled(nn.Identity(), (4,)), torch.tanh, (4, 3, 4)),
}


@pytest.mark.parametrize("name", AGAIN)
def test_layer_called_twice(name):
    layer, then, size = AGAIN[name]
    x = torch.randn(*size)
    # The standardised filter of small variance must not leave its bound.
    spread = 1e-5 if "standardised" in name else 0.1
    assert_exact(read_out(Again(layer(), then), nn.Tanh(), example=x), x, spread=spread)


@pytest.mark.parametrize("kind", ["hold", "pass", "gram"])
def test_linear_called_twice_by_every_kind_of_strategy(kind):
    x = torch.randn(4, 3, 4)
    model = read_out(Again(nn.Linear(4, 4), lambda t: torch.tanh(t[:, 1:])), example=x)
    assert_exact(model, x, strategies=frozenset({kind}))


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


@SHAPES
@given(
    seeds,
    st.integers(3, 6),
    st.integers(2, 4),
    st.integers(1, 5),
    st.booleans(),
    st.booleans(),
    st.booleans(),
    st.booleans(),
)
def test_tied_weights(seed, rows, d, length, padded, bias, again, training):
    torch.manual_seed(seed)
    ids = torch.randint(rows, (4, length))
    model = Language(rows, d, padding_idx=0 if padded else None, bias=bias, again=again).train(training)
    nn.init.normal_(model.table.weight)
    assert_exact(model, ids, torch.randint(rows, (4, length)), loss=next_token)


def test_cross_term_of_tied_weights_matters(monkeypatch):
    model, ids = Language().double(), torch.randint(5, (4, 6))
    apart = copy.deepcopy(model)
    apart.head.weight = nn.Parameter(model.head.weight.detach().clone())
    vector = torch.cat([p.detach().flatten() for p in apart.parameters()])
    sizes = [p.numel() for p in apart.parameters()]
    _, gradients = plain_gradients(apart, vector, ids, ids, next_token)
    parts = dict(zip([name for name, _ in apart.named_parameters()], gradients.split(sizes, 1), strict=True))
    of_table, of_head = parts["table.weight"], parts["head.weight"]
    together = (of_table + of_head).norm(dim=1)
    without = (of_table.square().sum(1) + of_head.square().sum(1)).sqrt()
    assert ((without - together).abs() > 0.02 * together).all()
    assert_exact(model, ids, ids, loss=next_token)
    monkeypatch.setattr("dpbench.gradients.summands.cross_products", lambda lookups, _: torch.zeros(len(lookups[0].b)))
    with pytest.raises(AssertionError):
        assert_exact(model, ids, ids, loss=next_token, checked=False)
    assert_exact(model, ids, ids, loss=next_token, books=False)


def test_linear_and_transposed_linear_of_one_weight():
    class Coder(nn.Module):
        def __init__(self):
            super().__init__()
            self.code, self.decode = nn.Linear(5, 4), Conv1D(5, 4)
            self.decode.weight = self.code.weight

        def forward(self, x):
            return self.decode(torch.tanh(self.code(x)))

    x = torch.randn(4, 3, 5)
    assert_exact(read_out(Coder(), example=x), x)


# Frozen parameters, and parameters that are not used

PARTLY_FROZEN = {
    "linear": (lambda: nn.Linear(4, 4), (4, 3, 4)),
    "conv1d of transformers": (lambda: Conv1D(4, 4), (4, 3, 4)),
    "conv1d": (lambda: nn.Conv1d(3, 4, 2), (4, 3, 4)),
    "conv2d": (lambda: nn.Conv2d(3, 4, 2), (4, 3, 4, 4)),
    "layer norm": (lambda: nn.LayerNorm(6), (4, 3, 6)),
    "standardised conv, bias": (lambda: standardised(3, 4, 2)[0], (4, 3, 4, 4)),
}


@pytest.mark.parametrize("frozen", ["weight", "bias"])
@pytest.mark.parametrize("name", PARTLY_FROZEN)
def test_layers_in_part_frozen(name, frozen):
    layer, size = PARTLY_FROZEN[name]
    layer, x = layer(), torch.randn(*size)
    getattr(layer, frozen).requires_grad_(False)
    if frozen == "weight" and "standardised" in name:
        layer.gain.requires_grad_(False)
    spread = 1e-5 if "standardised" in name else 0.1
    assert_exact(read_out(layer, nn.Tanh(), example=x), x, spread=spread)


@pytest.mark.parametrize("frozen", ["weight", "gain"])
def test_standardised_convolution_without_weight_or_gain_is_exact_all_the_same(frozen):
    layer, x = standardised(3, 4, 2)[0], torch.randn(4, 3, 4, 4)
    getattr(layer, frozen).requires_grad_(False)
    assert_exact(read_out(layer, nn.Tanh(), example=x), x, spread=1e-5, books=False)


def test_frozen_embedding_and_layers_that_nothing_reads():
    class Partial(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(5, 4)
            self.table.weight.requires_grad_(False)
            self.unused = nn.Linear(3, 3)
            self.alone = nn.Parameter(torch.ones(2))
            self.used = nn.Linear(4, 4)

        def forward(self, ids):
            self.unused(torch.ones(1, 3, dtype=self.used.weight.dtype))
            return self.used(self.table(ids))

    ids = torch.randint(5, (4, 3))
    assert_exact(read_out(Partial(), nn.Tanh(), example=ids), ids)


# Strategies


def strategy_models():
    """(model, inputs, spread of the iterates): layers with more than one strategy."""
    standard, spread = standardised(3, 4, 3, padding=1)
    point, point_spread = standardised(3, 4, 1)
    strided, strided_spread = standardised(3, 4, 3, stride=2, padding=1)
    narrowing, narrowing_spread = standardised(4, 2, 3, padding=1)
    return {
        "linear": (nn.Linear(5, 4), torch.randn(4, 5), None),
        "linear on tokens": (nn.Linear(5, 4), torch.randn(4, 3, 5), None),
        "conv1d of transformers": (Conv1D(4, 5), torch.randn(4, 3, 5), None),
        "conv2d": (nn.Conv2d(3, 4, (3, 2), padding=(1, 0)), torch.randn(4, 3, 4, 5), None),
        "conv2d, dilated": (nn.Conv2d(3, 4, (3, 2), padding=2, dilation=(1, 2)), torch.randn(4, 3, 4, 5), None),
        "conv2d, same, circular": (
            nn.Conv2d(3, 4, (3, 2), padding="same", padding_mode="circular"),
            torch.randn(4, 3, 4, 5),
            None,
        ),
        "conv2d, narrowing": (nn.Conv2d(4, 2, (3, 2), padding=(2, 0)), torch.randn(4, 4, 4, 5), None),
        "conv2d, narrowing, dilated": (nn.Conv2d(4, 2, 3, padding=(1, 2), dilation=2), torch.randn(4, 4, 5, 4), None),
        "conv2d, stride": (nn.Conv2d(3, 4, 3, stride=2, padding=1), torch.randn(4, 3, 5, 6), None),
        "conv2d, groups": (nn.Conv2d(4, 4, 3, groups=2, padding=1), torch.randn(4, 4, 4, 5), None),
        "conv2d, 1x1": (nn.Conv2d(3, 4, 1), torch.randn(4, 3, 4, 5), None),
        "conv2d, 1x1, stride": (nn.Conv2d(3, 4, 1, stride=(2, 3)), torch.randn(4, 3, 4, 5), None),
        "conv1d": (nn.Conv1d(3, 4, 3, padding=1, dilation=2), torch.randn(4, 3, 6), None),
        "standardised conv": (standard, torch.randn(4, 3, 4, 5), spread),
        "standardised conv, 1x1": (point, torch.randn(4, 3, 4, 5), point_spread),
        "standardised conv, narrowing": (narrowing, torch.randn(4, 4, 4, 5), narrowing_spread),
        "standardised conv, stride": (strided, torch.randn(4, 3, 5, 6), strided_spread),
        "embedding": (nn.Embedding(6, 3, padding_idx=1), torch.randint(6, (4, 5)), None),
    }


STRATEGY_MODELS = list(strategy_models())


@pytest.mark.parametrize("kind", ["hold", "pass", "gram"])
@pytest.mark.parametrize("name", STRATEGY_MODELS)
def test_every_kind_of_strategy(name, kind):
    layer, x, spread = strategy_models()[name]
    strategies = frozenset({kind})
    if spread is not None:
        assert_standardised_exact(layer, spread, x, strategies=strategies)
    else:
        assert_exact(read_out(layer, nn.Tanh(), example=x), x, strategies=strategies)


@pytest.mark.parametrize("name", STRATEGY_MODELS)
def test_every_strategy(name, monkeypatch):
    """Each kernel and size of chunks too; the batch is one more than four chunks of two."""
    used, offered = set(), set()
    for number in range(16):

        def numbered(_self, use, term, points, number=number):
            strategies = sorted(use.strategies(term, points), key=repr)
            offered.update(strategies)
            used.add(strategies[number % len(strategies)])
            return strategies[number % len(strategies)]

        monkeypatch.setattr(Chooser, "choose", numbered)
        layer, x, spread = strategy_models()[name]
        x = torch.cat([x, x.flip(1), x[:1]])
        options = {"points": (1, 2), "tolerances": {torch.float64: 1e-9}}
        if spread is not None:
            assert_standardised_exact(layer, spread, x, **options)
        else:
            assert_exact(read_out(layer, nn.Tanh(), example=x), x, **options)
    assert used == offered
    assert {strategy.kind for strategy in used} >= {"hold", "gram"}
    assert len({strategy.method for strategy in used}) >= (4 if "narrowing" in name else 1)


# Views


VIEWS = {
    "linear": (lambda: [nn.Linear(4, 3)], (4,)),
    "linear on tokens": (lambda: [nn.Linear(4, 3)], (2, 4)),
    "conv2d": (lambda: [nn.Conv2d(2, 3, 3, padding=1), nn.Tanh(), nn.Conv2d(3, 2, 2, stride=2)], (2, 4, 5)),
    "standardised conv": (lambda: [WSConv2d(2, 3, 3, padding=1)], (2, 4, 5)),
    "standardised conv without gain": (lambda: [StdConv2d(2, 3, 3, padding=1)], (2, 4, 5)),
    "group norm": (lambda: [nn.Conv2d(2, 4, 2), nn.GroupNorm(2, 4), nn.ReLU(inplace=True)], (2, 4, 5)),
    "layer norm": (lambda: [nn.Linear(4, 5), nn.LayerNorm(5)], (2, 4)),
    "direct parameters": (lambda: [Tokens(2, 4)], (2, 4)),
    "attention": (lambda: [Attention(4, 2, padding="boolean")], (3, 4)),
    "lstm": (lambda: [Recurrent(3, hidden_size=2)], (3, 3)),
}


@pytest.mark.parametrize("views", [2, 3])
@pytest.mark.parametrize("name", VIEWS)
def test_views_of_a_sample(name, views):
    layers, size = VIEWS[name]
    x = torch.randn(4, views, *size)
    assert_exact(read_out(*layers(), nn.Tanh(), example=x[:, 0]), x, views=views, points=(1, 2))


STANDARDISED = ["standardised conv", "standardised conv without gain"]


@pytest.mark.parametrize("kind", ["hold", "pass", "gram"])
@pytest.mark.parametrize("name", ["linear", "linear on tokens", "conv2d", *STANDARDISED])
def test_views_by_every_kind_of_strategy(name, kind):
    layers, size = VIEWS[name]
    x = torch.randn(4, 2, *size)
    model = read_out(*layers(), nn.Tanh(), example=x[:, 0])
    assert_exact(model, x, views=2, points=(1, 2), strategies=frozenset({kind}))


def test_views_of_a_model_that_falls_back():
    x = torch.randn(4, 2, 4)
    assert_exact(read_out(nn.Linear(4, 5), nn.PReLU(5), example=x[:, 0]), x, views=2, points=(1, 2), books=False)


# Groups of parameters, and changes in place


class Mixed(nn.Module):
    def __init__(self):
        super().__init__()
        self.token = nn.Parameter(torch.randn(1, 1, 4))
        self.stem = nn.Conv2d(2, 4, 2)
        self.norm = nn.GroupNorm(2, 4)
        self.standard = WSConv2d(4, 4, 1)
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.scaled = Scaled(nn.Linear(4, 4), (4,))
        self.lstm = nn.LSTM(4, 3, batch_first=True, bidirectional=True)
        self.tied = nn.Linear(4, 4)
        self.tied.weight = self.scaled.layer.weight
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        x = self.standard(torch.relu_(self.norm(self.stem(x)))).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], dim=1)
        x = x + self.attention(x, x, x, need_weights=False)[0]
        x = self.tied(torch.tanh(self.scaled(x)))
        return self.head(self.lstm(x)[0].mean(1))


# A shared parameter is in the group of the layer that comes first.
MIXED_GROUPS = [
    ("token",),
    ("stem.",),
    ("norm.",),
    ("standard.",),
    ("attention.",),
    ("scaled.scale",),
    ("scaled.layer.",),
    ("lstm.",),
    ("tied.bias",),
    ("head.",),
]


@pytest.mark.parametrize("kind", ["hold", "pass", "gram", None])
def test_groups_of_a_mixed_model(kind):
    strategies = None if kind is None else frozenset({kind})
    assert_exact(Mixed(), torch.randn(4, 2, 3, 4), per_layer=MIXED_GROUPS, strategies=strategies)


def test_groups_of_a_model_that_falls_back():
    x = torch.randn(4, 4)
    model = read_out(nn.Linear(4, 5), nn.PReLU(5), example=x)
    assert_exact(model, x, per_layer=[("0.",), ("1.",), ("3.",)], books=False)


class Residual(nn.Module):
    """Adds what it read to the output of its layers, in place."""

    def __init__(self, *layers):
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x):
        out = self.layers(x)
        out += x
        return out


IN_PLACE = {
    "first layer": (lambda: [nn.Linear(4, 5), nn.ReLU(inplace=True)], (4, 4)),
    "first convolution": (lambda: [nn.Conv2d(2, 4, 3), nn.ReLU(inplace=True), nn.Conv2d(4, 2, 2)], (4, 2, 5, 5)),
    "first standardised convolution": (lambda: [WSConv2d(2, 4, 3), nn.ReLU(inplace=True)], (4, 2, 5, 5)),
    "group norm": (
        lambda: [nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(inplace=True), nn.Conv2d(4, 2, 2)],
        (4, 2, 5, 5),
    ),
    "first group norm": (lambda: [nn.GroupNorm(2, 4), nn.ReLU(inplace=True), nn.Conv2d(4, 2, 2)], (4, 4, 5, 5)),
    "layer norm": (lambda: [nn.LayerNorm(4), nn.ReLU(inplace=True), nn.Linear(4, 3)], (4, 3, 4)),
    "embedding": (lambda: [nn.Embedding(5, 4), nn.ReLU(inplace=True), nn.Linear(4, 3)], None),
    "residual of a first layer": (lambda: [Residual(nn.Linear(4, 4)), nn.ReLU(inplace=True)], (4, 4)),
    "residual of two layers": (
        lambda: [Residual(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 4)), Residual(nn.Linear(4, 4))],
        (4, 3, 4),
    ),
    "residual of a norm": (
        lambda: [
            nn.Conv2d(4, 4, 1),
            Residual(nn.Conv2d(4, 4, 3, padding=1), nn.GroupNorm(2, 4)),
            nn.ReLU(inplace=True),
            nn.Conv2d(4, 2, 2),
        ],
        (4, 4, 4, 4),
    ),
}


@pytest.mark.parametrize("name", IN_PLACE)
def test_changes_in_place(name):
    layers, size = IN_PLACE[name]
    x = torch.randint(5, (4, 3)) if size is None else torch.randn(*size)
    model = read_out(*layers(), example=x if size is None else x.clone())
    before = x.clone()
    assert_exact(model, x)
    assert torch.equal(x, before)


# The tests can fail


def test_both_references_agree():
    model = read_out(nn.Linear(4, 5), nn.Tanh(), example=torch.randn(4, 3, 4)).double()
    x, y = torch.randn(4, 3, 4).double(), torch.randint(3, (4,))
    flat = FlatParameters(model)
    _, plain = plain_gradients(model, flat.vector, x, y)
    torch.testing.assert_close(func_gradients(model, flat, flat.vector, x, y), plain, rtol=1e-12, atol=1e-14)


MECHANISMS = {
    "linear": (lambda: read_out(nn.Linear(5, 4), nn.Tanh(), example=torch.randn(4, 3, 5)), (4, 3, 5)),
    "conv": (lambda: read_out(nn.Conv2d(2, 3, 2), nn.Tanh(), example=torch.randn(4, 2, 4, 4)), (4, 2, 4, 4)),
    "embedding": (lambda: read_out(nn.Embedding(5, 4), nn.Tanh(), example=torch.randint(5, (4, 3))), None),
}


@pytest.mark.parametrize("name", MECHANISMS)
def test_gram_norms_without_cross_terms_are_noticed(name, monkeypatch):
    build, size = MECHANISMS[name]
    x = torch.randint(5, (4, 3)) if size is None else torch.randn(*size)
    gram = frozenset({"gram"})
    assert_exact(build(), x, strategies=gram)
    for module in vars(uses).values():
        if hasattr(module, "pairs"):
            monkeypatch.setattr(module, "pairs", lambda count: [(j, j, 1.0) for j in range(count)])
    assert_exact(build(), x, strategies=gram, points=(1,), checked=False)
    with pytest.raises(AssertionError):
        assert_exact(build(), x, strategies=gram, points=(2,), checked=False)


@pytest.mark.parametrize("kind", ["hold", "pass"])
def test_norms_that_leave_iterates_apart_are_noticed(kind, monkeypatch):
    """‖G‖² + ‖H‖² in place of ‖G + H‖²."""

    def own_squares(use, term, strategy):
        return sum(rows.square().sum(1) for rows in use.rows(term, strategy))

    def apart(self):
        strategy = self._strategy
        return sum(own_squares(self.use, term, strategy) for term in self.terms)

    x = torch.randn(4, 3, 5)
    assert_exact(MECHANISMS["linear"][0](), x, strategies=frozenset({kind}))
    if kind == "pass":
        monkeypatch.setattr(Factored, "squares", apart)
    else:
        add = Held.add

        def add_apart(self, term, use):
            before = self.squares() if self._chunks else 0
            own = own_squares(use, term, self._strategy)
            add(self, term, use)
            self._squares = [before + own]

        monkeypatch.setattr(Held, "add", add_apart)
    assert_exact(MECHANISMS["linear"][0](), x, strategies=frozenset({kind}), points=(1,), checked=False)
    with pytest.raises(AssertionError):
        assert_exact(MECHANISMS["linear"][0](), x, strategies=frozenset({kind}), points=(2,), checked=False)


def test_norm_of_a_mixture_is_no_mixture_of_norms():
    x, y = torch.randn(4, 3, 5).double(), torch.randint(3, (4,))
    model = MECHANISMS["linear"][0]().double()
    flat = FlatParameters(model)
    engine = PerSampleGradients(model, flat, cross_entropy)
    points = [Point(w, at) for w, at in zip(WEIGHTS[2], iterates_of(flat.vector, 2, 0.5), strict=True)]
    mixture = engine.record(points, x, y).norms()
    apart = [engine.record([point], x, y).norms() for point in points]
    for other in (apart[0] + apart[1], (apart[0] - apart[1]).abs(), (apart[0] ** 2 + apart[1] ** 2).sqrt()):
        assert ((other - mixture).abs() > 0.01 * mixture).all()


def test_wrong_weighted_sums_are_noticed(monkeypatch):
    add = Outer.add_weighted_sum

    def once(self, term, factors, onto):
        if not onto[0].any():
            add(self, term, factors, onto)

    x = torch.randn(4, 3, 5)
    gram = frozenset({"gram"})
    monkeypatch.setattr(Outer, "add_weighted_sum", once)
    assert_exact(MECHANISMS["linear"][0](), x, strategies=gram, points=(1,), checked=False)
    with pytest.raises(AssertionError):
        assert_exact(MECHANISMS["linear"][0](), x, strategies=gram, points=(2,), checked=False)


def zeros_for_squares(self, terms, *_):
    return torch.zeros(len(terms[0].b), dtype=terms[0].b.dtype)


def halves_of(method):
    return lambda self, term, strategy: tuple(0.5 * rows for rows in method(self, term, strategy))


def nothing(self, term, factors, onto):
    pass


# (model, size of its inputs or None for ids, what is spoilt of which use): the strategies that few samples take.
SPOILT = {
    "norms of linear": (lambda: nn.Linear(5, 4), (4, 5), Outer, "gram_squares", zeros_for_squares),
    "sums of linear": (lambda: nn.Linear(5, 4), (4, 5), Outer, "add_weighted_sum", nothing),
    "gradients of linear": (lambda: nn.Linear(5, 4), (4, 6, 5), Outer, "rows", halves_of(Outer.rows)),
    "gradients of conv": (lambda: nn.Conv2d(2, 3, 2), (4, 2, 4, 4), Patches, "rows", halves_of(Patches.rows)),
    "norms of embedding": (lambda: nn.Embedding(9, 4), None, Lookup, "gram_squares", zeros_for_squares),
    "sums of embedding": (lambda: nn.Embedding(9, 4), None, Lookup, "add_weighted_sum", nothing),
}


@pytest.mark.parametrize("name", SPOILT)
def test_wrong_books_are_rejected_for_right_gradients(name, monkeypatch):
    build, size, use, method, wrong = SPOILT[name]
    x = torch.randint(9, (4, 2)) if size is None else torch.randn(*size)
    model = read_out(build(), nn.Tanh(), example=x)
    assert_exact(model, x)
    monkeypatch.setattr(use, method, wrong)
    assert_exact(model, x, books=False)
    with pytest.raises(AssertionError):
        assert_exact(model, x, points=(1,), books=None, checked=False)


# Autocast


HALF = {
    "linear": (lambda: [nn.Linear(24, 16), nn.Tanh()], (5, 24)),
    "linear on tokens": (lambda: [nn.Linear(12, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 8)], (5, 4, 12)),
    "conv": (
        lambda: [nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.ReLU(inplace=True), nn.Conv2d(8, 4, 3)],
        (5, 3, 8, 8),
    ),
    "conv, stride": (lambda: [nn.Conv2d(3, 8, 3, stride=2), nn.ReLU(), nn.Conv2d(8, 4, 1)], (5, 3, 9, 9)),
    "conv1d": (lambda: [nn.Conv1d(3, 8, 3), nn.Tanh(), nn.Conv1d(8, 4, 2, dilation=2)], (5, 3, 12)),
    "standardised conv": (lambda: [WSConv2d(3, 8, 3), nn.ReLU(), WSConv2d(8, 4, 2)], (5, 3, 8, 8)),
    "embedding": (lambda: [nn.Embedding(7, 8), nn.Linear(8, 8), nn.Tanh()], None),
    "token, positions, scale": (lambda: [Tokens(4, 8)], (5, 4, 8)),
    "attention": (lambda: [Attention(8, 2)], (5, 4, 8)),
    "lstm": (lambda: [Recurrent(6, hidden_size=5)], (5, 4, 6)),
}


@pytest.mark.parametrize("kind", ["hold", "pass", "gram"])
@pytest.mark.parametrize("name", HALF)
def test_norms_under_autocast_are_those_of_what_is_summed(name, kind):
    """Clipping bounds what is added only if norms and sums are of the same gradients, however they were rounded."""
    layers, size = HALF[name]
    x = torch.randint(7, (5, 6)) if size is None else torch.randn(*size)
    model, y = read_out(*layers(), example=x), torch.randint(3, (5,))
    assert_half_exact(model, x, y, cross_entropy, frozenset({kind}))


def test_norms_of_tied_weights_under_autocast_are_those_of_what_is_summed():
    assert_half_exact(Language(9, 8), torch.randint(9, (5, 6)), torch.randint(9, (5, 6)), next_token, None)


def assert_half_exact(model, x, y, loss, strategies):
    flat = FlatParameters(model)
    points = [Point(1.4, flat.vector + 0.02 * torch.randn_like(flat.vector)), Point(-0.4, flat.vector)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        half = PerSampleGradients(model, flat, loss, autocast=torch.bfloat16, strategies=strategies).record(
            points, x, y
        )
    whole = PerSampleGradients(model, flat, loss, strategies=strategies).record(points, x, y)
    norms = half.norms()[0]
    rows = torch.stack([half.weighted_sum(one.unsqueeze(0)) for one in torch.eye(len(x))])
    assert norms.dtype == rows.dtype == torch.float32
    torch.testing.assert_close(norms, rows.double().norm(dim=1).float(), rtol=1e-5, atol=0)
    torch.testing.assert_close(norms, whole.norms()[0], rtol=0.05, atol=0)
    assert not torch.allclose(norms, whole.norms()[0], rtol=1e-6)  # autocast was used
    factors = torch.randn(1, len(x))
    torch.testing.assert_close(half.weighted_sum(factors), (factors @ rows)[0], rtol=1e-4, atol=1e-6)


class WithPositions(nn.Module):
    """A parameter used directly, a convolution, norms and linear layers, for timing all of them."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv1d(3, 4, 3, padding=1), nn.LayerNorm(4)
        self.positions, self.head = nn.Parameter(torch.randn(1, 6, 4)), nn.Linear(4, 3)

    def forward(self, x):
        tokens = self.norm(self.conv(x).transpose(1, 2)) + self.positions
        return self.head(torch.tanh(tokens)).mean(1)


@pytest.mark.parametrize("points", [1, 2, 3])
def test_timing_leaves_what_it_times_as_it_was(points, monkeypatch, tmp_path):
    """The first micro-batch, on which strategies are timed, gives what the second does."""
    monkeypatch.setenv("DPBENCH_CACHE", str(tmp_path))
    for name in ("WORTH_TIMING", "FEW"):
        monkeypatch.setattr(f"dpbench.gradients.choice.{name}", 0)
    torch.manual_seed(0)
    model = WithPositions().double()
    inputs, labels = torch.randn(5, 3, 6).double(), torch.randint(3, (5,))
    flat = FlatParameters(model)
    engine = PerSampleGradients(model, flat, per_sample_loss)
    engine._way = Books(1)  # so that the first record is the one that times
    query = [Point(0.5 + j, flat.vector + 0.1 * j) for j in range(points)]
    first, second = (engine.record(query, inputs, labels) for _ in range(2))
    factors = torch.rand(1, 5).double()
    torch.testing.assert_close(first.norms(), second.norms(), rtol=1e-12, atol=0)
    torch.testing.assert_close(first.weighted_sum(factors), second.weighted_sum(factors), rtol=1e-10, atol=1e-12)
