"""Per-sample gradients of embeddings, of parameters that no known layer owns, of LSTMs and of attention."""

import pytest
import torch
from gradient_checks import SHAPES, assert_exact, read_out, seeds
from hypothesis import given
from hypothesis import strategies as st
from small_models import Attention, Recurrent, Scaled, Tokens
from torch import nn

pytestmark = pytest.mark.usefixtures("seeded")


# Embeddings


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


@SHAPES
@given(seeds, st.integers(1, 4), st.integers(1, 4), st.integers(1, 5))
def test_tokens_positions_and_layer_scale(seed, length, d, batch):
    torch.manual_seed(seed)
    x = torch.randn(batch, length, d)
    assert_exact(read_out(Tokens(length, d), nn.Tanh(), example=x), x)


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
