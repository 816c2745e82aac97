"""Per-sample gradients under autocast."""

import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from gradient_checks import FALLBACK, cross_entropy, next_token, read_out, restricted
from small_models import Attention, Language, Recurrent, Tokens
from torch import nn

from dpbench.errors import UserError
from dpbench.gradients import FlatParameters, PerSampleGradients
from dpbench.models.layers import WSConv2d
from dpbench.query import Point

pytestmark = pytest.mark.usefixtures("seeded")


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


class Weighing(nn.Module):
    """Convolves, and weighs what that gives by fixed numbers, so that these are its gradients."""

    def __init__(self, layer, weights):
        super().__init__()
        self.layer, self.weights = layer, weights

    def forward(self, x):
        return (self.layer(x).float() * self.weights).flatten(1).sum(1)


@pytest.mark.parametrize("views", [1, 3])
@pytest.mark.parametrize(("layer", "size"), [(nn.Conv2d(2, 3, 3), (2, 34, 34)), (nn.Conv1d(2, 3, 5), (2, 996))])
def test_gradients_of_biases_under_autocast_are_summed_in_float32(layer, size, views):
    """Over pixels and views: the sum has more digits than bfloat16."""
    weights = torch.randn(1, *layer(torch.zeros(1, *size)).shape[1:]).bfloat16().float()
    model, x = Weighing(layer, weights), torch.randn(4, views, *size)
    flat = FlatParameters(model)
    engine = PerSampleGradients(model, flat, lambda outputs, _: outputs, views=views, autocast=torch.bfloat16)
    tape = engine.record([Point(1.0, flat.vector)], x if views > 1 else x.flatten(0, 1), torch.zeros(4))
    of_view = (weights / views).bfloat16().double()  # a third has to be rounded
    for only in torch.eye(4):
        bias = dict(zip(flat.names, flat.views(tape.weighted_sum(only.unsqueeze(0))), strict=True))["layer.bias"]
        torch.testing.assert_close(bias.double(), views * of_view.flatten(2).sum(2)[0], rtol=1e-5, atol=1e-5)


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


class Outside(nn.Module):
    """Uses a weight past its layer, and so keeps no books, beside what torch.func can map over samples or can't."""

    def __init__(self, beside):
        super().__init__()
        self.inner, self.head, self.beside = nn.Linear(24, 24), nn.Linear(24, 3), beside

    def forward(self, x):
        return self.head(self.beside(torch.tanh(self.inner(x) @ self.inner.weight)))


@pytest.mark.filterwarnings(f"ignore:{FALLBACK}")
@pytest.mark.parametrize("plain", [False, True])
def test_a_model_without_books_is_run_by_autocast_too(plain):
    model = Outside((lambda h: h * float(h.detach().sum() < torch.inf)) if plain else nn.Identity())
    x, y, flat = torch.randn(5, 24), torch.randint(3, (5,)), FlatParameters(model)
    points = [Point(1.4, flat.vector + 0.02 * torch.randn_like(flat.vector)), Point(-0.4, flat.vector)]
    half, whole = (PerSampleGradients(model, flat, cross_entropy, autocast=kind) for kind in (torch.bfloat16, None))
    norms, close = half.record(points, x, y).norms(), whole.record(points, x, y).norms()
    assert half._way.by_plain_autograd == whole._way.by_plain_autograd == plain
    torch.testing.assert_close(norms, close, rtol=0.05, atol=0)
    assert not torch.allclose(norms, close, rtol=1e-6)


def test_a_step_within_somebody_elses_autocast_is_refused():
    """Its norms and sums, too, would be in bfloat16, where one sample moves the sum by more than its share."""
    model = read_out(nn.Linear(6, 4), example=torch.zeros(1, 6))
    flat = FlatParameters(model)
    x, y, points = torch.randn(5, 6), torch.randint(3, (5,)), [Point(1.0, flat.vector)]
    for kind in (None, torch.bfloat16):
        gradients = PerSampleGradients(model, flat, cross_entropy, autocast=kind)
        with torch.autocast("cpu", torch.bfloat16):
            with pytest.raises(UserError, match=r"within torch.autocast.*autocast=torch.bfloat16"):
                gradients.clipped_sum(points, [(x, y)], torch.ones_like)
            with pytest.raises(UserError, match=r"within torch\.autocast"):
                gradients.record(points, x, y)
        assert gradients.record(points, x, y).norms().dtype == torch.float32


def test_models_are_not_run_in_a_type_whose_range_is_too_small_for_gradients():
    model = nn.Linear(6, 4)
    with pytest.raises(UserError, match=r"^autocast=torch\.float16: expected torch\.bfloat16, or None"):
        PerSampleGradients(model, FlatParameters(model), cross_entropy, autocast=torch.float16)


@pytest.mark.filterwarnings(f"ignore:{FALLBACK}")
@pytest.mark.parametrize("plain", [False, True])
def test_weights_in_half_precision_are_those_of_the_iterate_within_any_context(plain):
    """torch keeps them until the outermost context ends, also where that is one that turns autocast off."""
    model = Outside((lambda h: h * float(h.detach().sum() < torch.inf)) if plain else nn.Identity())
    x, y, flat = torch.randn(5, 24), torch.randint(3, (5,)), FlatParameters(model)
    points = [Point(1.4, flat.vector + torch.randn_like(flat.vector)), Point(-0.4, flat.vector)]
    gradients = PerSampleGradients(model, flat, cross_entropy, autocast=torch.bfloat16)
    want = gradients.record(points, x, y).norms()
    with torch.autocast("cpu", enabled=False):
        torch.testing.assert_close(gradients.record(points[1:], x, y).norms(), alone(gradients, points[1:], x, y))
        torch.testing.assert_close(gradients.record(points, x, y).norms(), want, rtol=1e-6, atol=0)


def alone(gradients, points, x, y):
    """Norms found in a thread of its own, whose contexts are no others'."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(lambda: gradients.record(points, x, y).norms()).result()


def assert_half_exact(model, x, y, loss, strategies):
    flat = FlatParameters(model)
    points = [Point(1.4, flat.vector + 0.02 * torch.randn_like(flat.vector)), Point(-0.4, flat.vector)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        half = restricted(PerSampleGradients(model, flat, loss, autocast=torch.bfloat16), strategies).record(
            points, x, y
        )
    whole = restricted(PerSampleGradients(model, flat, loss), strategies).record(points, x, y)
    norms = half.norms()[0]
    rows = torch.stack([half.weighted_sum(one.unsqueeze(0)) for one in torch.eye(len(x))])
    assert norms.dtype == rows.dtype == torch.float32
    torch.testing.assert_close(norms, rows.double().norm(dim=1).float(), rtol=1e-5, atol=0)
    torch.testing.assert_close(norms, whole.norms()[0], rtol=0.05, atol=0)
    assert not torch.allclose(norms, whole.norms()[0], rtol=1e-6)  # autocast was used
    factors = torch.randn(1, len(x))
    torch.testing.assert_close(half.weighted_sum(factors), (factors @ rows)[0], rtol=1e-4, atol=1e-6)
