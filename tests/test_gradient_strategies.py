"""Every strategy of the engine, views, groups of parameters and changes in place."""

import math
from fractions import Fraction
from types import SimpleNamespace

import pytest
import torch
from gradient_checks import (
    assert_exact,
    assert_standardised_exact,
    read_out,
    reference_of,
    restricted,
    standardised,
    standardised_model,
    trust,
)
from small_models import Attention, Recurrent, Scaled, Tokens
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode
from transformers.pytorch_utils import Conv1D

from dpbench.gradients import FlatParameters, PerSampleGradients
from dpbench.gradients.choice import Chooser
from dpbench.gradients.summands import Held, summand_of
from dpbench.gradients.uses import Outer, Strategy, Term
from dpbench.gradients.way import Books
from dpbench.gradients.weights import Weights
from dpbench.models.layers import StdConv2d, WSConv2d
from dpbench.query import Point
from dpbench.training.losses import per_sample_loss

pytestmark = pytest.mark.usefixtures("seeded")


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
    layer, x, spread = strategy_models()[name]
    x = torch.cat([x, x.flip(1), x[:1]])
    model, spread = (
        standardised_model(layer, spread, x) if spread is not None else (read_out(layer, nn.Tanh(), example=x), 0.1)
    )
    reference = reference_of(model, x, points=(1, 2), spread=spread)
    for number in range(16):

        def numbered(_self, use, term, points, number=number):
            strategies = sorted(use.strategies(term, points), key=repr)
            offered.update(strategies)
            used.add(strategies[number % len(strategies)])
            return strategies[number % len(strategies)]

        monkeypatch.setattr(Chooser, "choose", numbered)
        assert_exact(model, x, reference=reference, points=(1, 2), tolerances={torch.float64: 1e-9})
        if used == offered:
            break
    assert used == offered
    assert {strategy.kind for strategy in used} >= {"hold", "gram"}
    assert len({strategy.method for strategy in used}) >= (4 if "narrowing" in name else 1)


# Weights that nearly cancel, as DiSK's with a small gamma do


class TiedHead(nn.Module):
    """An embedding that is the head, too, as in GPT-2."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(6, 4)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids):
        return self.head(torch.tanh(self.table(ids))).mean(1)


CANCELLING = [name for name in STRATEGY_MODELS if name != "embedding"] + ["tied"]


def largest_share_of_the_bound(name, weight):
    """What one sample adds to the clipped sum at most, over the bound that its computed norm is to warrant."""
    if name == "tied":
        model, x = TiedHead(), torch.randint(6, (24, 5))
    else:
        layer, x, _ = strategy_models()[name]
        x = torch.randn(24, *x.shape[1:])
        model = read_out(layer, nn.Tanh(), example=x)
    flat = FlatParameters(model)
    engine = restricted(PerSampleGradients(model, flat, per_sample_loss), {"gram"})
    # As DiSK's probe: so near that the mixture is no larger than a gradient.
    near = flat.vector + torch.randn_like(flat.vector) / weight
    targets = torch.randint(3, (len(x),))
    tape = engine.record([Point(weight, near), Point(1 - weight, flat.vector.clone())], x, targets)
    if tape.doubtful():
        tape.refine()
    norms = tape.norms()[0]
    own = [tape.weighted_sum(one.unsqueeze(0) / norms).norm() for one in torch.eye(len(x))]
    return float(torch.stack(own).max())


@pytest.mark.parametrize("weight", [0.9, 7.0, 40.0, 1e3, 1e4])
@pytest.mark.parametrize("name", CANCELLING)
def test_norms_are_not_too_small_where_terms_nearly_cancel(name, weight):
    assert largest_share_of_the_bound(name, weight) < 1.002


def test_inner_products_in_single_precision_would_be_too_small(monkeypatch):
    # The comparison of a batch would notice.
    monkeypatch.setattr("dpbench.gradients.settle.short_norm", lambda *_: None)
    monkeypatch.setattr("dpbench.gradients.tape.CANCELLING", 0.0)
    # How much too small is up to rounding, which differs between processors.
    assert max(largest_share_of_the_bound("linear on tokens", 1e4) for _ in range(20)) > 2


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


@pytest.mark.parametrize("first", [nn.Identity, lambda: nn.LayerNorm(4)], ids=["first", "after another layer"])
def test_changes_in_place_of_a_view(first, monkeypatch):
    """Autograd drops the hooks of a view that is changed in place; torch up to 2.14 gives linear layers' as views."""

    def viewed(weights, x, weight, bias, transposed):
        return torch.addmm(bias, x.flatten(0, -2), weight.t()).view(*x.shape[:-1], -1)

    monkeypatch.setattr(Weights, "linear", viewed)
    layers = first(), Residual(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 4)), Residual(nn.Linear(4, 4))
    x = torch.randn(4, 3, 4)
    assert_exact(read_out(*layers, example=x), x)


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
    trust(engine, Books(1), inputs, labels)  # so that the first record is the one that times
    query = [Point(0.5 + j, flat.vector + 0.1 * j) for j in range(points)]
    first, second = (engine.record(query, inputs, labels) for _ in range(2))
    factors = torch.rand(1, 5).double()
    torch.testing.assert_close(first.norms(), second.norms(), rtol=1e-12, atol=0)
    torch.testing.assert_close(first.weighted_sum(factors), second.weighted_sum(factors), rtol=1e-10, atol=1e-12)


def test_strategies_are_timed_apart_from_what_watches_a_comparison(monkeypatch, tmp_path):
    """It sees each call, which takes longer than many kernels: the strategy with the fewest calls would win."""
    monkeypatch.setenv("DPBENCH_CACHE", str(tmp_path))
    for name in ("WORTH_TIMING", "FEW"):
        monkeypatch.setattr(f"dpbench.gradients.choice.{name}", 0)
    watched = []

    def made(*arguments):
        watched.append(_get_current_dispatch_mode() is not None)
        return summand_of(*arguments)

    monkeypatch.setattr("dpbench.gradients.choice.summand_of", made)
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Dropout(), nn.Flatten(), nn.Linear(27, 3))
    flat = FlatParameters(model)
    PerSampleGradients(model, flat, per_sample_loss).record(
        [Point(1.0, flat.vector)], torch.rand(4, 2, 5, 5), torch.zeros(4, dtype=torch.long)
    )
    assert watched
    assert not any(watched)


@pytest.mark.parametrize(("samples", "fastest"), [(20, "few"), (32, "few"), (200, "many"), (300, "many")])
def test_strategies_are_timed_on_as_many_samples_as_there_are(samples, fastest, monkeypatch, tmp_path):
    """What takes least for a few samples, where calls count for most, need not do so for a micro-batch."""
    monkeypatch.setenv("DPBENCH_CACHE", str(tmp_path))
    clock = Fraction(0)
    seconds = {"few": lambda n: 1 + n, "many": lambda n: 40 + Fraction(n, 20)}

    class Timed(Outer):
        def strategies(self, term, points):
            return {Strategy("gram", name): 1e6 for name in seconds}

        def gram_squares(self, terms, strategy):
            nonlocal clock
            clock += seconds[strategy.method](len(terms[0].b))
            return super().gram_squares(terms, strategy)

    monkeypatch.setattr("dpbench.gradients.choice.time", SimpleNamespace(perf_counter=lambda: clock))
    term = Term(torch.randn(samples, 2, 3), torch.randn(samples, 2, 4))
    assert Chooser().choose(Timed(((4, 3),)), term, 1) == Strategy("gram", fastest)


def test_all_that_the_time_of_a_sample_depends_on_is_told_apart():
    """So that equal shapes, and no others, take equal paths."""
    chooser, use = Chooser(), Outer(((4, 3),))
    a, b = torch.randn(20, 2, 3), torch.randn(20, 2, 4)
    strided = torch.randn(20, 4, 2).transpose(1, 2)
    others = [
        (use, Term(a, b), 1),
        (use, Term(a, b), 2),
        (use, Term(a, strided), 1),
        (use, Term(a, b, output=b), 1),
        (use, Term(a.double(), b.double()), 1),
        (use, Term(a[:, :1], b[:, :1]), 1),
        (Outer(((3, 4),), transposed=True), Term(a, b), 1),
    ]
    for count, other in enumerate(others, 1):
        chooser.choose(*other)
        assert len(chooser.choices) == count
    for one, term, points in others:
        chooser.choose(one, Term(*(None if part is None else part[:9] for part in term)), points)
    assert len(chooser.choices) == len(others)


def test_what_is_chosen_for_hardly_any_samples_is_not_remembered():
    chooser, use = Chooser(), Outer(((4, 3),))
    assert chooser.choose(use, Term(torch.randn(7, 2, 3), torch.randn(7, 2, 4)), 1).kind in ("hold", "pass", "gram")
    assert chooser.choices == {}


@pytest.mark.parametrize(("points", "kinds"), [(1, {"gram"}), (2, {"gram", "hold"})])
def test_gradients_are_held_where_they_take_little_more_than_what_all_points_have_of_them(points, kinds):
    """The 48 numbers of the weight, beside 1.5 times 16 of each point."""
    use, term = Outer(((4, 12),)), Term(torch.randn(20, 1, 12), torch.randn(20, 1, 4))
    assert {strategy.kind for strategy in Chooser()._candidates(use, term, points)} & {"gram", "hold"} == kinds


def test_what_was_timed_is_believed_on_the_same_kind_of_device_alone_and_where_it_is_a_candidate(monkeypatch):
    known, timings = {}, []
    store = {
        "read": lambda _, key: known.get(str(key)),
        "write": lambda _, key, value: known.update({str(key): list(value)}),
    }
    monkeypatch.setattr("dpbench.gradients.choice.cache", SimpleNamespace(**store))
    monkeypatch.setattr("dpbench.gradients.choice.WORTH_TIMING", 0)
    monkeypatch.setattr("dpbench.gradients.choice.HOPELESS_COST", math.inf)
    monkeypatch.setattr(Chooser, "_fast", lambda self, use, some, points, candidates: timings.append(1) or candidates)
    use, term = Outer(((4, 3),)), Term(torch.randn(20, 2, 3), torch.randn(20, 2, 4))
    first = Chooser().choose(use, term, 1)
    assert (Chooser().choose(use, term, 1), len(timings)) == (first, 1)
    monkeypatch.setattr("dpbench.gradients.choice._device_name", lambda device: "another")
    assert (Chooser().choose(use, term, 1), len(timings)) == (first, 2)
    known.update({key: ["hold", "unheard of", 3] for key in known})
    assert (Chooser().choose(use, term, 1), len(timings)) == (first, 3)


@pytest.mark.parametrize("chunk", [0, 2])
def test_norms_are_of_all_terms_though_more_were_added_than_expected(chunk):
    """The last chunk is of few numbers, of which no norm is taken before it is asked for."""
    use, strategy = Outer(((200, 200),)), Strategy("hold", chunk=chunk)
    held, total = Held(strategy, expected=1), 0
    for _ in range(2):
        a, b = torch.randn(3, 1, 200), torch.randn(3, 1, 200)
        held.add(Term(a, b), use)
        total = total + torch.einsum("btp,btd->bpd", b, a)
    torch.testing.assert_close(held.squares().whole, total.square().sum((1, 2)))


def test_a_term_of_some_samples_has_all_that_belongs_to_these():
    term = Term(*(torch.randn(5, 1, size) for size in (3, 4)), output=torch.randn(5, 1, 4))
    some = term.samples(slice(1, 3))
    for part in ("a", "b", "output"):
        assert torch.equal(getattr(some, part), getattr(term, part)[1:3])
    assert term.samples(slice(0, 8)) is term
