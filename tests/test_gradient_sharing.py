"""Per-sample gradients of layers that are called more than once, of shared weights and of frozen ones."""

import copy

import pytest
import torch
import torch.nn.functional as F
from gradient_checks import SHAPES, assert_exact, next_token, plain_gradients, read_out, seeds, standardised
from hypothesis import given
from hypothesis import strategies as st
from small_models import Language, Scaled
from torch import nn
from transformers.pytorch_utils import Conv1D

from dpbench.gradients.joined import SameInput
from dpbench.gradients.summands import Factored
from dpbench.gradients.uses import Outer, Strategy, Term
from dpbench.models.layers import WSConv2d

pytestmark = pytest.mark.usefixtures("seeded")


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


class Readers(nn.Module):
    """Layers that read one input, whole or in part, and their outputs side by side."""

    def __init__(self, *layers, parts=None):
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.parts = parts or [lambda x: x] * len(layers)

    def forward(self, x):
        return torch.cat([layer(part(x)).flatten(1) for layer, part in zip(self.layers, self.parts, strict=True)], 1)


READERS = {
    "queries, keys and values": (lambda: (nn.Linear(5, 4), nn.Linear(5, 4, bias=False), nn.Linear(5, 7)), None),
    "one stored transposed": (lambda: (nn.Linear(5, 4), Conv1D(4, 5)), None),
    "the first tokens, all, and a view of them": (
        lambda: (nn.Linear(5, 4), nn.Linear(5, 4), nn.Linear(5, 4)),
        [lambda x: x[:, :2], lambda x: x, lambda x: x.flatten(1).view(-1, 3, 5)],
    ),
    "all, and in another order": (
        lambda: (nn.Linear(5, 4), nn.Linear(5, 4)),
        [lambda x: x, lambda x: x.transpose(0, 1).contiguous().transpose(0, 1)],
    ),
}


@pytest.mark.parametrize("kind", ["hold", "pass", "gram"])
@pytest.mark.parametrize("name", READERS)
def test_layers_that_read_one_input(name, kind):
    layers, parts = READERS[name]
    x = torch.randn(4, 3, 5)
    # Another layer comes first, so that what they read differs between iterates.
    model = read_out(nn.Linear(5, 5), nn.Tanh(), Readers(*layers(), parts=parts), nn.Tanh(), example=x)
    assert_exact(model, x, strategies=frozenset({kind}))


def test_layers_that_read_one_input_and_what_it_is_transposed():
    """Which is in the same memory and of the same shape."""
    x = torch.randn(4, 5, 5)
    parts = [lambda x: x, lambda x: x.transpose(1, 2)]
    model = read_out(nn.Linear(5, 5), nn.Tanh(), Readers(nn.Linear(5, 4), nn.Linear(5, 4), parts=parts), example=x)
    assert_exact(model, x, strategies=frozenset({"gram"}))


def test_a_broken_sample_is_left_out_of_layers_that_read_one_input():
    a, b = torch.randn(4, 3, 5), [torch.randn(4, 3, size) for size in (2, 6)]
    layers = [Factored(Outer(((size, 5),)), Strategy("gram")) for size in (2, 6)]
    for layer, own in zip(layers, b, strict=True):
        layer.add(Term(a, own.index_fill(0, torch.tensor([2]), torch.inf)), layer.use)
    both, kept = SameInput(layers), torch.tensor([True, True, False, True])
    both.keep(kept)
    sums = [torch.zeros(size, 5) for size in (2, 6)]
    both.add_weighted_sum(torch.ones(4), sums)
    for found, own in zip(sums, b, strict=True):
        torch.testing.assert_close(found, torch.einsum("btp,btd->pd", own[kept], a[kept]))


def test_layers_that_read_one_token():
    x = torch.randn(4, 5)
    assert_exact(read_out(Readers(nn.Linear(5, 4), nn.Linear(5, 3)), nn.Tanh(), example=x), x)


def test_layers_that_read_one_input_in_groups_of_their_own():
    x = torch.randn(4, 3, 5)
    model = read_out(Readers(nn.Linear(5, 4), nn.Linear(5, 4)), nn.Tanh(), example=x)
    groups = [("0.layers.0.",), ("0.layers.1.",), ("3.",)]
    assert_exact(model, x, strategies=frozenset({"gram"}), per_layer=groups)


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


class Stored(nn.Module):
    """An embedding whose table (V, d) is the weight of a layer that stores it transposed and so reads V numbers."""

    def __init__(self):
        super().__init__()
        self.table, self.layer, self.head = nn.Embedding(6, 3), Conv1D(3, 6), nn.Linear(3, 6)
        self.layer.weight = self.table.weight

    def forward(self, ids):
        return self.layer(torch.tanh(self.head(self.table(ids)))).sum(1)


def test_an_embedding_and_a_transposed_linear_layer_of_one_weight():
    assert_exact(Stored(), torch.randint(6, (4, 5)))


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


class Rarely(nn.Module):
    """Two standardised convolutions, the second in samples of one kind, that share what is named."""

    def __init__(self, *shared):
        super().__init__()
        self.first, self.second = WSConv2d(2, 2, 3), WSConv2d(2, 2, 3)
        for name in shared:
            setattr(self.second, name, getattr(self.first, name))

    def forward(self, x):
        return torch.tanh(self.first(x)) + torch.relu(x[:, :1, :1, :1]) * self.second(x)


@pytest.mark.parametrize("shared", [("weight",), ("gain",), ("weight", "gain")])
def test_standardised_convolutions_that_share_parameters_of_which_the_first_samples_show_nothing(shared):
    x = torch.randn(6, 2, 5, 5)
    x[:3, 0, 0, 0], x[3:, 0, 0, 0] = -1, 1
    assert_exact(read_out(Rarely(*shared), example=x), x, spread=1e-3, books=len(shared) == 2)


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
