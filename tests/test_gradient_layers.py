"""Per-sample gradients of linear layers, convolutions, norms and pooling, against plain passes in float64."""

import pytest
import torch
from gradient_checks import SHAPES, assert_exact, assert_standardised_exact, read_out, seeds, standardised
from hypothesis import given, settings
from hypothesis import strategies as st
from small_models import Expanded
from torch import nn
from transformers.pytorch_utils import Conv1D

from dpbench.gradients.pooling import max_pooling, vectorised_pooling
from dpbench.models.layers import StdConv2d, WSConv2d

pytestmark = pytest.mark.usefixtures("seeded")


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


@settings(SHAPES, max_examples=28)
@given(
    seeds,
    convolutions(2),
    st.booleans(),
    st.sampled_from([1, 2]),
    st.sampled_from(["hold", "pass", "gram", None]),
)
def test_conv2d_of_grey_maps(seed, convolution, first, views, kind):
    torch.manual_seed(seed)
    channels, options, size = convolution
    x = torch.randn(4, views, 1, *size) if views > 1 else torch.randn(4, 1, *size)
    before = [] if first else [nn.Conv2d(1, 1, 1), nn.Tanh()]
    layers = [*before, Expanded(channels), nn.Conv2d(channels, **options), nn.Tanh()]
    model = read_out(*layers, example=x[:, 0] if views > 1 else x)
    assert_exact(model, x, views=views, strategies=kind and {kind})


@pytest.mark.parametrize("kind", ["hold", "pass", "gram"])
def test_conv2d_of_grey_maps_with_one_weight_for_a_channel(kind):
    x = torch.randn(4, 1, 5, 4)
    assert_exact(read_out(Expanded(3), nn.Conv2d(3, 1, 1), nn.Tanh(), example=x), x, strategies=frozenset({kind}))


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


@pytest.mark.parametrize("kind", ["hold", "pass", "gram"])
def test_conv2d_of_views_with_channels_last(kind):
    x = torch.randn(4 * 2, 4, 5, 6).to(memory_format=torch.channels_last).unflatten(0, (4, 2))
    model = read_out(nn.Conv2d(4, 4, 3), nn.Tanh(), nn.Conv2d(4, 6, 2), nn.Tanh(), example=x[:, 0])
    assert_exact(model, x, views=2, points=(1, 2), strategies=frozenset({kind}))


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


# By the gain and bias of one channel: what its filter gives can be read off its output, or is lost there.
LEGIBLE = {"usual": (0.7, 0.3), "no gain": (0.0, 0.3), "small gain": (1e-6, 1.0)}


@pytest.mark.parametrize("case", LEGIBLE)
@pytest.mark.parametrize("kind", [WSConv2d, StdConv2d])
def test_weight_standardised_convolution_by_inner_products(case, kind):
    layer, x = kind(3, 4, 2), torch.randn(5, 3, 4, 4)
    with torch.no_grad():
        layer.gain[2], layer.bias[2] = LEGIBLE[case]
    assert_exact(read_out(nn.Conv2d(3, 3, 1), layer, nn.LeakyReLU(), example=x), x, spread=1e-4, strategies={"gram"})


def test_weight_standardised_convolution_whose_output_is_changed_in_place():
    x = torch.randn(5, 3, 4, 4)
    model = read_out(nn.Conv2d(3, 3, 1), standardised(3, 4, 2)[0], nn.LeakyReLU(0.3, inplace=True), example=x)
    assert_exact(model, x, spread=1e-5, strategies={"gram"})


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


@pytest.mark.parametrize("fixed", ["weight", "bias", "none"])
@pytest.mark.parametrize("most", [1, 2, 6, 7])
def test_group_norm_of_more_groups_than_a_gpu_takes_at_once(monkeypatch, most, fixed):
    monkeypatch.setattr("dpbench.gradients.layers.most_groups", lambda device: most)
    x = torch.randn(5, 4, 3, 2)
    norm = nn.GroupNorm(2, 4)
    if fixed != "none":
        getattr(norm, fixed).requires_grad_(False)
    assert_exact(read_out(nn.Conv2d(4, 4, 1), norm, nn.Tanh(), example=x), x)


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


# Pooling


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


def test_max_pooling_is_the_same_where_no_books_are_kept():
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.MaxPool2d(3, 2, ceil_mode=True), nn.Sequential(nn.MaxPool2d(2, 1)))
    x = torch.randn(5, 1, 12, 13)
    want = model(x)
    with vectorised_pooling(model):
        assert sum("forward" in vars(layer) for layer in model.modules()) == 2
        assert torch.equal(model(x), want)
    assert not any("forward" in vars(layer) for layer in model.modules())
