"""Models whose books would be wrong without a sign: by rows that follow the data, draws, and effects of a pass."""

import random
import threading
import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from gradient_checks import assert_right, cross_entropy, engine_in_float64, restricted
from small_models import TimeFirst
from torch import nn

from dpbench.errors import UserError
from dpbench.gradients import FlatParameters, PerSampleGradients
from dpbench.gradients.draws import LEVELS, LevelDraws, UnknownDraw, held_still
from dpbench.gradients.fused import FusedGradients
from dpbench.gradients.request import Request
from dpbench.gradients.row_order import rows_by_data
from dpbench.gradients.verify import moved
from dpbench.gradients.way import Books, Rows
from dpbench.query import Point

pytestmark = [
    pytest.mark.usefixtures("seeded"),
    pytest.mark.filterwarnings("ignore:falling back to materialised"),
]


# Rows that follow the data

TOKENS = torch.tensor([[5, 1, 7, 2], [3, 8, 8, 4], [1, 1, 6, 2], [2, 5, 3, 7]])
RAGGED = torch.tensor([[5, 0, 0, 0], [3, 8, 8, 0], [1, 1, 6, 2], [2, 5, 3, 7]])
ODD = torch.tensor([[5, 0, 0, 0], [3, 8, 8, 4], [1, 1, 6, 2], [2, 5, 3, 7]])
CLASSES = torch.tensor([0, 1, 2, 0])


class OfTokens(nn.Module):
    """Token ids (n, T), of which 0 is padding, to three classes; what is between is up to `hidden`."""

    def __init__(self):
        super().__init__()
        self.embedding, self.inner, self.head = nn.Embedding(9, 5), nn.Linear(5, 5), nn.Linear(5, 3)

    def forward(self, ids):
        return self.head(self.hidden(ids))


class WithoutPadding(OfTokens):
    def hidden(self, ids):
        real, h = ids != 0, self.embedding(ids)
        out = torch.zeros_like(h)
        out[real] = torch.tanh(self.inner(h[real]))
        return out.sum(1)


class WithoutPaddingByIndex(OfTokens):
    def hidden(self, ids):
        h = self.embedding(ids)
        places = (ids != 0).flatten().nonzero().squeeze(1)
        inner = torch.tanh(self.inner(h.flatten(0, 1).index_select(0, places)))
        return torch.zeros_like(h).flatten(0, 1).index_copy(0, places, inner).view_as(h).sum(1)


class ByLength(OfTokens):
    def hidden(self, ids):
        order = (ids != 0).sum(1).argsort(descending=True, stable=True)
        return torch.tanh(self.inner(self.embedding(ids[order]))).mean(1)[order.argsort()]


class ByLengthInPython(OfTokens):
    def hidden(self, ids):
        lengths = [sum(token != 0 for token in row) for row in ids.tolist()]
        order = torch.tensor(sorted(range(len(ids)), key=lambda i: -lengths[i]))
        return torch.tanh(self.inner(self.embedding(ids[order]))).mean(1)[order.argsort()]


class ByLengthNumberByNumber(OfTokens):
    def hidden(self, ids):
        lengths = (ids != 0).sum(1)
        order = torch.tensor(sorted(range(len(ids)), key=lambda i: -int(lengths[i])))
        return torch.tanh(self.inner(self.embedding(ids[order]))).mean(1)[order.argsort()]


class Routed(OfTokens):
    """A mixture of experts: each sample goes to one of two layers."""

    def hidden(self, ids):
        h = self.embedding(ids).mean(1)
        out = torch.zeros_like(h)
        for expert, one in enumerate((torch.tanh, torch.sin)):
            (which,) = torch.where(ids[:, 0] % 2 == expert)
            out = out.index_add(0, which, one(self.inner(h[which])))
        return out


@pytest.mark.parametrize(
    "kind", [WithoutPadding, WithoutPaddingByIndex, ByLength, ByLengthInPython, ByLengthNumberByNumber, Routed]
)
def test_rows_that_follow_the_data_are_found_in_a_batch_that_shows_nothing(kind):
    engine = engine_in_float64(kind())
    innocent = torch.tensor([[2, 4, 1, 3], [2, 8, 8, 4], [4, 1, 6, 2], [2, 5, 3, 7]])
    assert_right(engine, (innocent, CLASSES))
    assert isinstance(engine._way, Rows)
    assert_right(engine, (TOKENS, CLASSES), (RAGGED, CLASSES), (ODD, CLASSES))


class EndOfSequence(OfTokens):
    """Picks one token of each sample, after all layers or before the last."""

    before = False

    def forward(self, ids):
        last = (ids != 0).sum(1) - 1
        h = torch.tanh(self.inner(self.embedding(ids)))
        if self.before:
            return self.head(h[torch.arange(len(ids)), last])
        return self.head(h)[torch.arange(len(ids)), last]


class Backwards(OfTokens):
    """Reorders features and tokens, but no samples."""

    def hidden(self, ids):
        order = torch.tensor([3, 1, 0, 2])
        h = self.embedding(ids)[:, order]
        h[ids == 0] = 0.0
        return self.inner(h[..., torch.tensor([4, 3, 2, 1, 0])]).mean(1)


@pytest.mark.parametrize("before", [False, True])
def test_picking_a_token_of_each_sample_keeps_books(before):
    model = EndOfSequence()
    model.before = before
    engine = engine_in_float64(model)
    assert_right(engine, (TOKENS, CLASSES), (RAGGED, CLASSES), (ODD, CLASSES))
    assert isinstance(engine._way, Books)


def test_reordering_within_samples_keeps_books():
    engine = engine_in_float64(Backwards())
    assert_right(engine, (TOKENS, CLASSES), (RAGGED, CLASSES))
    assert isinstance(engine._way, Books)


# (what is done with an input (4, 3) before a layer reads it, whether it picks rows by the data)
CHOICES = {
    "sort of samples": (lambda x: x.sort(0)[0], True),
    "sort of features": (lambda x: x.sort(1)[0], False),
    "stable sort of samples": (lambda x: x.sort(dim=0, stable=True)[0], True),
    "stable sort of features": (lambda x: x.sort(dim=1, stable=True)[0], False),
    "samples as a table": (lambda x: F.embedding(x[:, 0].argsort(), x), True),
    "take": (lambda x: x.take(x.argsort(0)), True),
    "largest of samples": (lambda x: x.topk(4, 0)[0], True),
    "largest of features": (lambda x: x.topk(3, 1)[0], False),
    "gather of samples": (lambda x: x.gather(0, x.argsort(0)), True),
    "gather of features": (lambda x: x.gather(1, x.argsort(1)), False),
    "mask": (lambda x: x[x[:, 0] > -9], True),
    "mask of values": (lambda x: x.masked_fill(x > 0, 0.0), False),
    "some set to a constant": (lambda x: x.index_put((x[:, 0] > 0,), torch.tensor(0.0)), False),
    "distinct": (lambda x: x.unique(dim=0), True),
    "repeated": (lambda x: x.repeat_interleave((x[:, 0] > -9).long(), 0), True),
    "repeated evenly": (lambda x: x.repeat_interleave(1, 0), False),
    "fixed order of samples": (lambda x: x[torch.tensor([1, 0, 2, 3])], True),
    "order of samples as it is": (lambda x: x[torch.arange(4)], False),
    "scattered": (lambda x: torch.zeros_like(x).scatter_add(0, x.argsort(0), x), True),
    "copied to other places": (lambda x: torch.zeros(4, 3).index_copy_(0, torch.tensor([1, 0, 3, 2]), x), True),
    "put to other places": (lambda x: torch.zeros(4, 3).index_put_((torch.tensor([1, 0, 3, 2]),), x), True),
    "fixed table of features": (lambda x: torch.eye(3)[torch.tensor([2, 0, 1])][0] * x, False),
    "through a buffer": (lambda x: torch.empty(4, 3).copy_(x)[torch.tensor([1, 0, 2, 3])], True),
    "table by data": (lambda x: torch.arange(12.0).view(4, 3)[(x[:, 0] > 0).long()], False),
    "largest of all": (lambda x: x / x.max().item(), False),
}


@pytest.mark.parametrize("name", CHOICES)
def test_operations_that_pick_rows_by_data(name):
    before, picks = CHOICES[name]

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 2)

        def forward(self, x):
            return self.layer(before(x))

    model = Model()
    assert (rows_by_data(model, [model.layer], [], torch.randn(4, 3)) is not None) == picks


class InChunks(nn.Module):
    def __init__(self, flat):
        super().__init__()
        self.layer, self.flat = nn.Linear(5, 3), flat

    def forward(self, x):
        if self.flat:  # 4 tokens of 4 samples at a time, so that their number is a multiple of that of samples
            return torch.cat([self.layer(part.flatten(0, 1)).view(-1, 4, 3) for part in x.split(4)]).mean(1)
        return torch.cat([self.layer(part) for part in x.split(4)]).mean(1)


@pytest.mark.parametrize("flat", [True, False])
def test_chunks_of_samples_are_found_in_a_whole_batch(flat):
    x, y = torch.randn(8, 4, 5).double(), torch.randint(3, (8,))
    assert_right(engine_in_float64(InChunks(flat)), (x, y))


def test_chunks_of_samples_are_found_in_the_first_batch_that_has_several():
    engine = engine_in_float64(InChunks(flat=True))
    assert_right(engine, (torch.randn(4, 4, 5).double(), torch.randint(3, (4,))))
    assert isinstance(engine._way, Books)
    assert_right(engine, (torch.randn(8, 4, 5).double(), torch.randint(3, (8,))))
    assert isinstance(engine._way, Rows)


def test_a_batch_that_is_larger_hides_nothing_of_those_before_it():
    model = Turning()
    engine = engine_in_float64(model)
    points = [Point(1.0, engine.flat.vector)]
    for count in (5, 5, 5):
        engine.record(points, torch.randn(count, 4).double(), torch.randint(3, (count,)))
        model.turned = True
    with pytest.raises(UserError, match=r"right in its first batches.*and maybe in some before it"):
        engine.record(points, torch.randn(6, 4).double(), torch.randint(3, (6,)))


class OfAnyRank(nn.Module):
    """Scales features, of vectors or of sequences of them."""

    def __init__(self):
        super().__init__()
        self.scale, self.head = nn.Parameter(torch.randn(5)), nn.Linear(5, 3)

    def forward(self, x):
        return self.head(torch.tanh(x * self.scale).view(len(x), -1, 5).sum(1))


SHAPES = {
    "one time, then two": (lambda: TimeFirst(5, 4), (4, 1, 5), (4, 2, 5)),
    "vectors, then as many as there are samples": (OfAnyRank, (4, 5), (4, 4, 5)),
    "sequences, then vectors": (OfAnyRank, (4, 3, 5), (4, 5)),
}


@pytest.mark.parametrize("name", SHAPES)
def test_what_is_right_for_samples_of_one_shape_alone(name):
    kind, first, then = SHAPES[name]
    engine = engine_in_float64(kind())
    y = torch.randint(3, (4,))
    assert_right(engine, (torch.randn(first).double(), y))
    assert isinstance(engine._way, Books)
    assert_right(engine, (torch.randn(then).double(), y))
    assert isinstance(engine._way, Rows)


class Positions(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.head, self.places = nn.Linear(3, 5), nn.Linear(5, 3), nn.Parameter(torch.randn(4, 5))

    def forward(self, x):
        return self.head(torch.tanh(self.inner(x) + self.places[: x.shape[1]]).mean(1))


def test_positions_of_which_some_are_taken():
    engine = engine_in_float64(Positions())
    for samples in (3, 8):
        assert_right(engine, (torch.randn(samples, 4, 3).double(), torch.randint(3, (samples,))))


# Parameters without a gradient among the samples that are compared first


class Rare(nn.Module):
    """Uses a layer's weight once more, in samples of one kind."""

    def __init__(self):
        super().__init__()
        self.inner, self.head, self.linear = nn.Linear(6, 6), nn.Linear(6, 3), nn.Linear(6, 3)

    def forward(self, x):
        rare = self.head(torch.tanh(self.inner(x) @ self.inner.weight))
        return self.linear(x) + torch.relu(x[:, :1]) * rare


def test_a_use_that_the_first_samples_do_not_have():
    x, y = torch.randn(6, 6).double(), torch.randint(3, (6,))
    x[:3, 0], x[3:, 0] = -1, 1
    assert_right(engine_in_float64(Rare()), (x, y))


class RareByAnotherName(nn.Module):
    """Has a parameter under two names, one of which samples of one kind alone make use of."""

    def __init__(self):
        super().__init__()
        self.scale, self.head = nn.Parameter(torch.randn(6)), nn.Linear(6, 3)
        self.shift = self.scale

    def forward(self, x):
        return self.head(torch.tanh(x * self.scale + torch.relu(x[:, :1]) * self.shift))


@pytest.mark.parametrize("kind", [Rare, RareByAnotherName])
def test_a_use_that_the_first_batch_does_not_have(kind):
    x, y = torch.randn(6, 6).double(), torch.randint(3, (6,))
    common, rare = x.clone(), x.clone()
    common[:, 0], rare[:, 0] = -1, 1
    engine = engine_in_float64(kind())
    assert_right(engine, (common, y))
    assert isinstance(engine._way, Rows)
    assert_right(engine, (rare, y))


class Turning(nn.Module):
    """Comes to use a weight without its layer."""

    def __init__(self):
        super().__init__()
        self.layer, self.turned = nn.Linear(4, 3), False

    def forward(self, x):
        return F.linear(x, 2 * self.layer.weight) if self.turned else self.layer(x)


def test_a_model_whose_books_become_wrong_is_stopped():
    model = Turning()
    engine = engine_in_float64(model)
    x, y = torch.randn(5, 4).double(), torch.randint(3, (5,))
    points = [Point(1.0, engine.flat.vector)]
    engine.record(points, x, y)
    model.turned = True
    for _ in range(2):
        engine.record(points, x, y)
    # The fourth batch is compared.
    with pytest.raises(UserError, match=r"right in its first batches.*and maybe in some before it"):
        engine.record(points, x, y)


class OnTheEdge(nn.Module):
    """Rounds the input of its ReLU in another way in each pass, which tells where that input is zero."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 3), nn.Linear(3, 3)
        self.edge, self.passes = torch.zeros(3), 0

    def forward(self, x):
        self.passes += torch.is_grad_enabled()
        return self.last((self.first(x) - self.edge + 1e-9 * (-1) ** self.passes).relu())


def test_a_sample_on_the_edge_of_a_relu_stops_no_run(monkeypatch):
    engine = engine_in_float64(OnTheEdge())
    x, y = torch.randn(5, 4).double(), torch.randint(3, (5,))
    points = [Point(1.0, engine.flat.vector)]
    engine.record(points, x, y)
    with torch.no_grad(), engine.flat.at(moved(engine.flat.vector, 1)):  # where the fourth batch is compared
        engine.model.edge = engine.model.first(x)[0]
    for _ in range(3):
        engine.record(points, x, y)
    assert isinstance(engine._way, Books)
    # It was on the edge: with the same place for the second comparison the batch fails.
    engine._batches = 3
    monkeypatch.setattr("dpbench.gradients.settle.AGAIN", 0)
    with pytest.raises(UserError, match="right in its first batches"):
        engine.record(points, x, y)


class Crowded(nn.Module):
    """Lets through the four largest samples of a batch alone, where there are more."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        if len(x) <= 4:
            return self.head(x)
        least = x[:, 0].detach().topk(4).values.min()
        return self.head(x * (x[:, :1] >= least))


class Alone(nn.Linear):
    """Treats small batches otherwise, and mixes nothing."""

    def forward(self, x):
        return super().forward(x) * (2.0 if len(x) < 5 else 1.0)


def test_a_model_that_treats_small_batches_otherwise_goes_one_by_one():
    engine = engine_in_float64(Alone(4, 3))
    assert_right(engine, (torch.randn(12, 4).double(), torch.randint(3, (12,))))
    assert isinstance(engine._way, Rows)
    assert engine._way.by_plain_autograd


def test_a_model_that_mixes_samples_in_large_batches_alone_goes_one_by_one():
    engine = engine_in_float64(Crowded())
    assert_right(engine, (torch.randn(12, 4).double(), torch.randint(3, (12,))))
    assert isinstance(engine._way, Rows)
    assert engine._way.by_plain_autograd


@pytest.mark.parametrize("turned", [False, True])
def test_broken_samples_hide_nothing(turned):
    model = Turning()
    model.turned = turned
    engine = engine_in_float64(model)
    x, y = torch.randn(5, 4).double(), torch.randint(3, (5,))
    x[4] = torch.nan
    engine._way = Books(1)
    engine.record([Point(1.0, engine.flat.vector)], x, y)
    assert isinstance(engine._way, Rows if turned else Books)


# Ways that are part of a state


class Standardising(nn.Module):
    """Standardises samples, of which a blank one has no deviation, and drops some of what it makes of them."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Dropout(0.3), nn.Linear(6, 5), nn.Dropout(0.5), nn.Tanh(), nn.Linear(5, 3))

    def forward(self, x):
        return self.layers((x - x.mean(1, keepdim=True)) / x.std(1, keepdim=True))


def anew(engine, state=None):
    """Gradients of the same model in a new process, with a state or without."""
    found = PerSampleGradients(engine.model, engine.flat, engine.loss)
    if state is not None:
        found.load_state_dict(state)
    return found


def test_with_the_state_a_broken_sample_that_comes_first_changes_no_draw():
    """Gradients of the first samples that are not finite settle nothing, and one by one a model draws otherwise."""
    engine = engine_in_float64(Standardising().train())
    points, y = [Point(1.0, engine.flat.vector)], torch.randint(3, (8,))
    engine.record(points, torch.randn(8, 6).double(), y)
    x = torch.randn(8, 6).double()
    x[0] = 0

    def total(engine):
        torch.manual_seed(5)
        return engine.clipped_sum(points, [(x, y)], lambda norms: (1 / norms).clamp(max=1)).total

    without, resumed = anew(engine), anew(engine, engine.state_dict())
    want = total(engine)
    assert torch.equal(total(resumed), want)
    assert not torch.allclose(total(without), want)


class Beside(nn.Module):
    """Uses its weight past its layer, beside what torch.func can map over samples or can't."""

    def __init__(self, beside):
        super().__init__()
        self.layer, self.beside = nn.Linear(6, 3), beside

    def forward(self, x):
        return self.layer(x) + self.beside(F.linear(x, self.layer.weight).tanh())


MODELS = {
    "books": lambda: nn.Linear(6, 3),
    "torch.func": lambda: Beside(nn.Identity()),
    "autograd": lambda: Beside(lambda h: h * float(h.detach().sum() < torch.inf)),
}


@pytest.mark.parametrize("name", MODELS)
def test_every_way_is_taken_up_with_what_it_was_compared_with(name, monkeypatch):
    engine = engine_in_float64(MODELS[name]())
    points = [Point(1.0, engine.flat.vector)]
    for count in (5, 7, 6):
        engine.record(points, torch.randn(count, 6).double(), torch.randint(3, (count,)))
    state = engine.state_dict()
    resumed = anew(engine, state)
    assert resumed.state_dict() == state
    assert state["way"] == {"books": {"leading": 1, "draws": False, "channels_last": False}}.get(
        name, {"by_plain_autograd": name == "autograd"}
    )
    monkeypatch.setattr("dpbench.gradients.per_sample.settle", lambda *_: pytest.fail("found anew"))
    assert_right(resumed, (torch.randn(7, 6).double(), torch.randint(3, (7,))))
    assert isinstance(resumed._way, type(engine._way))
    assert resumed._batches == (0 if name == "autograd" else 5)


def test_a_way_that_is_wrong_by_now_is_found_in_the_first_batch():
    model = Turning()
    engine = engine_in_float64(model)
    x, y = torch.randn(5, 4).double(), torch.randint(3, (5,))
    points = [Point(1.0, engine.flat.vector)]
    engine.record(points, x, y)
    resumed = anew(engine, engine.state_dict())
    model.turned = True
    engine.record(points, x, y)
    with pytest.raises(UserError, match="right in its first batches"):
        resumed.record(points, x, y)


def test_passes_that_are_none_of_trainings_leave_no_trace():
    model = CountingPasses()
    engine = engine_in_float64(model)
    points, (x, y) = [Point(1.0, engine.flat.vector)], (torch.randn(5, 6).double(), torch.randint(3, (5,)))
    for _ in range(2):
        state, passes = engine.state_dict(), float(model.passes)
        with engine.undisturbed():
            engine.most = 3
            engine.clipped_sum(points, [(x, y), (x, y)], torch.ones_like)
            assert engine.state_dict() != state
        assert (engine.state_dict(), float(model.passes)) == (state, passes)
        engine.record(points, x, y)


def test_samples_that_were_made_up_do_not_settle_the_way():
    model = Turning()
    model.turned = True
    engine = engine_in_float64(model)
    x, y = torch.randn(5, 4).double(), torch.randint(3, (5,))
    engine._way, engine._batches = Books(1), 1
    engine.compare_anew()
    assert_right(engine, (x, y))


def test_samples_that_were_made_up_choose_no_strategies():
    engine = engine_in_float64(nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)))
    engine.record([Point(1.0, engine.flat.vector)], torch.zeros(8, 4).double(), torch.zeros(8, dtype=torch.int64))
    assert engine.state_dict()["strategies"]
    engine.compare_anew()
    assert not engine.state_dict()["strategies"]


# Random draws


class Drawing(nn.Module):
    """Two layers and what a draw does between them, in training mode."""

    def __init__(self, between):
        super().__init__()
        self.inner, self.head, self.between = nn.Linear(6, 6), nn.Linear(6, 3), between

    def forward(self, x):
        h = torch.tanh(self.inner(x))
        return self.head(self.between(self, x, h) if self.training else h)


def drop_connect(model, x, h):
    return torch.tanh(F.linear(x, F.dropout(model.inner.weight, 0.3), model.inner.bias))


def weight_noise(model, x, h):
    return torch.tanh(F.linear(x, model.inner.weight * (1 + 0.1 * torch.randn_like(model.inner.weight))))


@pytest.mark.parametrize("between", [drop_connect, weight_noise])
def test_a_weight_that_is_used_without_its_layer_in_training_alone(between):
    engine = engine_in_float64(Drawing(between).train())
    x, y = torch.randn(4, 6).double(), torch.randint(3, (4,))
    points = [Point(1.0, engine.flat.vector)]
    tape = engine.record(points, x, y)
    own = tape.weighted_sum(torch.ones(1, 4).double())[: engine.model.inner.weight.numel()]
    assert isinstance(engine._way, Rows)
    assert own.norm() > 0.01


@pytest.mark.parametrize("between", [drop_connect, weight_noise])
def test_a_model_that_goes_into_training_mode_is_compared_anew(between):
    engine = engine_in_float64(Drawing(between).eval())
    x, y = torch.randn(4, 6).double(), torch.randint(3, (4,))
    points = [Point(1.0, engine.flat.vector)]
    assert_right(engine, (x, y))
    assert isinstance(engine._way, Books)
    engine.model.train()
    own = engine.record(points, x, y).weighted_sum(torch.ones(1, 4).double())[: engine.model.inner.weight.numel()]
    assert own.norm() > 0.01


def mixup(model, x, h):
    return 0.5 * h + 0.5 * h.roll(1, 0) if torch.rand(()) < 0.3 else h


def mixup_of_python(model, x, h):
    return 0.5 * h + 0.5 * h.roll(1, 0) if random.random() < 0.9 else h


def cut_mix(model, x, h):
    return 0.5 * h + 0.5 * h[torch.randperm(len(h))] if torch.bernoulli(torch.tensor(0.1)) else h


def of_the_next(model, x, h):
    following = torch.cat([h[1:], h[-1:]])
    return F.dropout(h, 0.1) + 0.1 * following


def through_a_gate_of_zero(model, x, h):
    return F.dropout(h + (h - h.mean(0)) @ model.gate, 0.1)


@pytest.mark.parametrize("between", [mixup, mixup_of_python, cut_mix, of_the_next, through_a_gate_of_zero])
def test_mixing_beside_draws_changes_no_other_sample(between):
    model = Drawing(between).train()
    model.gate = nn.Parameter(torch.zeros(6, 6))
    engine = engine_in_float64(model)
    x, y = torch.randn(4, 6).double(), torch.randint(3, (4,))
    other = x.clone()
    other[3] = 100.0
    points = [Point(1.0, engine.flat.vector)]
    engine.record(points, x, y)
    with torch.no_grad():
        model.gate.add_(1.0)
    for seed in range(20):
        norms = []
        for samples in (x, other):
            torch.manual_seed(seed)
            random.seed(seed)
            norms.append(engine.record(points, samples, y).norms()[0, :3])
        assert torch.equal(*norms)


def drop_path(model, x, h):
    return x + h * x.new_empty(len(x), 1).bernoulli_(0.8) / 0.8


def gumbel(model, x, h):
    return h * F.gumbel_softmax(x, dim=1)


HARMLESS = {
    "dropout": lambda model, x, h: F.dropout(h, 0.4),
    "dropout of features": lambda model, x, h: F.dropout1d(h.unsqueeze(2), 0.4).squeeze(2),
    "drop path": drop_path,
    "noise": lambda model, x, h: h + torch.randn_like(h),
    "uniform noise": lambda model, x, h: h * torch.empty_like(h).uniform_(0.5, 1.5),
    "gumbel": gumbel,
    "layer drop": lambda model, x, h: h if torch.rand(()) < 0.5 else x,
    "layer drop of python": lambda model, x, h: h if random.random() < 0.5 else x,
    "attention": lambda model, x, h: F.scaled_dot_product_attention(
        *(h.view(-1, 1, 2, 3),) * 3, dropout_p=0.3
    ).reshape_as(h),
}


@pytest.mark.parametrize("name", HARMLESS)
def test_draws_that_mix_nothing_keep_books(name):
    engine = engine_in_float64(Drawing(HARMLESS[name]).train())
    x, y = torch.randn(8, 6).double(), torch.randint(3, (8,))
    engine.record([Point(1.0, engine.flat.vector)], x, y)
    assert isinstance(engine._way, Books)


def test_iterates_share_draws_of_python_and_numpy():
    def scaled(model, x, h):
        return h * random.random() + x * np.random.random()

    engine = engine_in_float64(Drawing(scaled).train())
    x, y = torch.randn(4, 6).double(), torch.randint(3, (4,))
    here, there = engine.flat.vector, engine.flat.vector + 0.1 * torch.randn_like(engine.flat.vector)

    def total(*points):
        random.seed(3)
        np.random.seed(4)
        tape = engine.record([Point(*point) for point in points], x, y)
        return tape.weighted_sum(torch.ones(1, 4).double())

    total((1.0, here), (1.0, there))  # settles the way
    assert isinstance(engine._way, Books)
    want = 1.5 * total((1.0, here)) - 0.5 * total((1.0, there))
    torch.testing.assert_close(total((1.5, here), (-0.5, there)), want)


def test_a_dropout_that_kernels_have_of_their_own_drops_nothing_in_the_backward_pass_either():
    """As that of a GPU's recurrent layers, whose backward pass has no tag."""
    with torch.library._scoped_library("dpbench_tests", "FRAGMENT") as library:
        library.define("rnn_backward(Tensor grad, float dropout) -> Tensor")
        library.impl("rnn_backward", lambda grad, dropout: grad * dropout, "CPU")
        with held_still(0.5) as drew:
            assert float(torch.ops.dpbench_tests.rnn_backward(torch.ones(()), 0.3)) == 0
            assert drew()


def test_draws_that_can_not_be_held_still_make_no_books():
    engine = engine_in_float64(Drawing(lambda model, x, h: torch.poisson(h.exp()) * h).train())
    with pytest.warns(UserWarning, match="random numbers by poisson"):
        engine.record([Point(1.0, engine.flat.vector)], torch.randn(4, 6).double(), torch.randint(3, (4,)))
    assert isinstance(engine._way, Rows)


ONE = torch.ones(())
PROBABILITIES = torch.tensor([[0.2, 0.3, 0.5], [0.6, 0.3, 0.1]])
# (a draw, what it is at the level 0.5)
DRAWS = {
    "rand": (lambda: torch.rand(2, 3), torch.full((2, 3), 0.5)),
    "rand_like": (lambda: torch.rand_like(torch.zeros(2)), torch.full((2,), 0.5)),
    "uniform_": (lambda: torch.zeros(2).uniform_(1, 3), torch.full((2,), 2.0)),
    "randn": (lambda: torch.randn(3), torch.zeros(3)),
    "normal_": (lambda: torch.zeros(3).normal_(4, 2), torch.full((3,), 4.0)),
    "normal": (lambda: torch.normal(torch.tensor([1.0, 2.0]), 3.0), torch.tensor([1.0, 2.0])),
    "exponential_": (lambda: torch.zeros(2).exponential_(2), torch.full((2,), 0.34657359)),
    "bernoulli": (lambda: torch.bernoulli(torch.tensor([0.4, 0.6])), torch.tensor([0.0, 1.0])),
    "bernoulli_": (lambda: torch.zeros(2).bernoulli_(0.6), torch.ones(2)),
    "randint": (lambda: torch.randint(2, 8, (2,)), torch.tensor([5, 5])),
    "random_": (lambda: torch.zeros(2, dtype=torch.long).random_(0, 10), torch.tensor([5, 5])),
    "randperm": (lambda: torch.randperm(4), torch.tensor([2, 3, 0, 1])),
    "multinomial": (lambda: torch.multinomial(PROBABILITIES, 1), torch.tensor([[1], [0]])),
    "dropout": (lambda: F.dropout(torch.ones(3), 0.4), torch.full((3,), 1 / 0.6)),
    "with a generator": (lambda: torch.rand(2, generator=torch.Generator()), torch.full((2,), 0.5)),
}


@pytest.mark.parametrize("name", DRAWS)
def test_draws_are_their_quantile(name):
    draw, want = DRAWS[name]
    state = torch.get_rng_state()
    with held_still(0.5) as drew:
        assert not drew()
        torch.testing.assert_close(draw(), want)
        assert drew()
    assert torch.equal(torch.get_rng_state(), state)


def test_decisions_fall_both_ways_at_the_levels():
    for p in (0.05, 0.3, 0.7, 0.95):
        decisions = []
        for level in LEVELS:
            with held_still(level):
                decisions.append(bool(torch.rand(()) < p))
        assert set(decisions) == {True, False}


def test_draws_of_python_and_numpy_go_on_as_before():
    random.seed(1)
    first = random.random()
    random.seed(1)
    with held_still(0.5):
        one = random.random()
    with held_still(0.5):
        assert random.random() == one
    assert random.random() == first


DRAWS_OF_OTHERS = [random.random, lambda: random.gauss(0, 1), np.random.random, np.random.standard_normal]


@pytest.mark.parametrize("draw", DRAWS_OF_OTHERS)
def test_draws_of_python_and_numpy_are_noticed(draw):
    with held_still(0.5) as drew:
        assert not drew()
    with held_still(0.5) as drew:
        draw()
        assert drew()


def test_a_pass_without_draws_is_told_apart():
    x = torch.randn(1, 1, 2, 3)
    with LevelDraws(0.5, of_one_shape=False) as draws:
        F.scaled_dot_product_attention(x, x, x)
        torch.zeros(2).sum()
    assert not draws.drew
    with pytest.raises(UnknownDraw), LevelDraws(0.5, of_one_shape=False):
        torch.poisson(torch.ones(2))


def test_the_backward_pass_of_an_attention_drops_nothing_either():
    """Its operator has no tag that says it is random."""
    q, k, v = (torch.randn(1, 2, 8, 16, requires_grad=True) for _ in range(3))
    attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    want = torch.autograd.grad(attention(q, k, v)[0].square().sum(), (q, k, v))
    with held_still(0.5):
        found = torch.autograd.grad(attention(q, k, v, 0.5)[0].square().sum(), (q, k, v))
    for ours, theirs in zip(found, want, strict=True):
        torch.testing.assert_close(ours, theirs)


# Losses and passes with effects


def regularised(model, share=0.1):
    return lambda outputs, targets: (
        cross_entropy(outputs, targets) + share * sum(parameter.square().sum() for parameter in model.parameters())
    )


def test_a_loss_that_reads_parameters_keeps_that_part():
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
    assert_right(engine_in_float64(model, regularised(model)), (torch.randn(4, 6).double(), torch.randint(3, (4,))))


@pytest.mark.parametrize("draw", [lambda: torch.rand(()), lambda: torch.poisson(ONE)])
def test_seeds_are_not_shared_where_a_model_draws(draw):
    model = Drawing(lambda model, x, h: h * float(draw())).train()
    fused = FusedGradients(model, FlatParameters(model), cross_entropy)
    assert "draws random numbers" in (fused.objection(torch.randn(4, 6), torch.randint(3, (4,))) or "")


def test_seeds_are_not_shared_where_a_loss_reads_parameters():
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
    x, y = torch.randn(4, 6), torch.randint(3, (4,))
    plain = FusedGradients(model, FlatParameters(model), cross_entropy)
    assert plain.objection(x, y) is None
    fused = FusedGradients(model, FlatParameters(model), regularised(model))
    assert fused.objection(x, y) == "the model falls back to materialised per-sample gradients"


@pytest.mark.parametrize("share", [0.1, 3e-5])
def test_in_single_precision_too(share):
    """Where the loss is read by itself, no rounding hides it, however little it adds."""
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
    x, y = torch.randn(4, 6), torch.randint(3, (4,))
    engine = PerSampleGradients(model, FlatParameters(model), regularised(model, share))
    plain = PerSampleGradients(model, engine.flat, cross_entropy)
    sums = [
        one.record([Point(1.0, engine.flat.vector)], x, y).weighted_sum(torch.ones(1, 4)) for one in (engine, plain)
    ]
    assert isinstance(plain._way, Books)
    torch.testing.assert_close((sums[0] - sums[1]) / (8 * share), engine.flat.vector, rtol=1e-2, atol=1e-3)


class Renormalising(OfTokens):
    def hidden(self, ids):
        return F.embedding(ids, self.embedding.weight, max_norm=0.5).mean(1)


class Shrinking(OfTokens):
    def hidden(self, ids):
        self.inner.weight.data = self.inner.weight.data * 0.9
        return self.inner(self.embedding(ids)).mean(1)


@pytest.mark.parametrize(("kind", "name"), [(Renormalising, "embedding.weight"), (Shrinking, "inner.weight")])
def test_a_pass_that_changes_parameters_is_refused(kind, name):
    engine = engine_in_float64(kind())
    before = engine.flat.vector.clone()
    with pytest.raises(UserError, match=f"changes its parameter '{name}'"):
        engine.record([Point(1.0, engine.flat.vector)], TOKENS, CLASSES)
    assert torch.equal(engine.flat.vector, before)


class Remembering(nn.Module):
    """Centres what it reads by a mean of all samples so far, kept where and when a case says."""

    def __init__(self, place, beside=None):
        super().__init__()
        self.layer, self.place, self.beside = nn.Linear(6, 3), place, beside
        if place == "attribute":
            self.mean = torch.zeros(6)
        else:
            self.register_buffer("mean", torch.zeros(6))

    def forward(self, x):
        if self.place != "buffer, with gradients alone" or torch.is_grad_enabled():
            mean = 0.99 * self.mean + 0.01 * x.detach().mean(0).to(self.mean.dtype)
            self.mean = mean if self.place == "attribute" else self.mean.copy_(mean)
        if callable(self.beside):
            x = x + 1e-3 * self.beside(x)
        return self.layer(x - self.mean.to(x.dtype))


KEEPING = {
    "what can't be copied": lambda: Remembering("buffer", threading.Lock()),
    "what draws otherwise": lambda: Remembering("buffer", lambda x: torch.empty_like(x).cauchy_()),
    "what has gradients": lambda: Remembering("buffer, with gradients alone"),
    "what is no buffer": lambda: Remembering("attribute"),
}


@pytest.mark.parametrize("case", KEEPING)
def test_a_model_that_keeps_values_of_its_samples_is_refused_for(case):
    engine = engine_in_float64(KEEPING[case]().train())
    before = {name: buffer.clone() for name, buffer in engine.model.named_buffers()}
    where = "outside of its buffers" if case == "what is no buffer" else "in the buffer 'mean'"
    with pytest.raises(UserError, match=where):
        engine.record([Point(1.0, engine.flat.vector)], torch.randn(4, 6).double(), CLASSES)
    assert all(torch.equal(buffer, before[name]) for name, buffer in engine.model.named_buffers())


class Carrying(nn.Module):
    """Goes on where the batch before ended."""

    def __init__(self):
        super().__init__()
        self.cell, self.head, self.state = nn.GRUCell(6, 5), nn.Linear(5, 3), None

    def forward(self, x):
        state = self.state if self.state is not None and len(self.state) == len(x) else x.new_zeros(len(x), 5)
        hidden = self.cell(x, state)
        self.state = hidden.detach()
        return self.head(hidden)


@pytest.mark.parametrize("gain", [1.0, 0.0])
def test_a_state_that_is_carried_from_batch_to_batch_is_refused(gain):
    """Also where the last layer begins at zero, and all losses are the same."""
    model = Carrying()
    with torch.no_grad():
        model.head.weight.mul_(gain)
    engine = engine_in_float64(model)
    with pytest.raises(UserError, match="another one after a pass of other samples"):
        engine.record([Point(1.0, engine.flat.vector)], torch.randn(4, 6).double(), CLASSES)


class Caching(nn.Linear):
    """Keeps what does not depend on samples: a table made in the first pass."""

    table = None

    def forward(self, x):
        if self.table is None:
            self.table = torch.linspace(0, 1, x.shape[1], dtype=x.dtype)
        return super().forward(x + self.table)


def test_what_is_made_once_for_all_samples_may_be_kept():
    assert_right(engine_in_float64(Caching(6, 3)), (torch.randn(4, 6).double(), torch.randint(3, (4,))))


class Counting(nn.Module):
    """Counts its passes, and mixes samples where it is told to, so that each has a pass of its own."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 3)
        self.register_buffer("passes", torch.zeros(()))

    def forward(self, x):
        self.passes += 1
        h = self.layer(x)
        return h - h.mean(0).detach()


def test_one_pass_for_each_sample_counts_as_one():
    model = Counting().train()
    engine = engine_in_float64(model)
    for _ in range(3):
        engine.record([Point(1.0, engine.flat.vector)], torch.randn(5, 6).double(), torch.randint(3, (5,)))
    assert isinstance(engine._way, Rows)
    assert float(model.passes) == 3


class CountingPasses(nn.Linear):
    def __init__(self):
        super().__init__(6, 3)
        self.register_buffer("passes", torch.zeros(()))

    def forward(self, x):
        self.passes += 1
        return super().forward(x)


class CountingSamples(nn.Linear):
    def __init__(self):
        super().__init__(6, 3)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        self.seen += len(x)
        return super().forward(x)


def test_a_model_that_counts_samples_is_refused():
    """Each batch is drawn at random, so that their sizes are the samples' secret, too."""
    engine = engine_in_float64(CountingSamples().train())
    with pytest.raises(UserError, match="counts its samples in the buffer 'seen'"):
        engine.record([Point(1.0, engine.flat.vector)], torch.randn(4, 6).double(), CLASSES)
    assert int(engine.model.seen) == 0


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("kind", [CountingPasses, Counting])
def test_to_a_counter_of_passes_a_logical_batch_is_one(kind, apart, monkeypatch):
    """However many micro-batches it takes, and where memory runs out."""
    engine = engine_in_float64(kind().train())
    point, clipped = Point(1.0, engine.flat.vector), []
    original = PerSampleGradients.record_by

    def limited(self, way, points, x, y):
        tape = original(self, way, points, x, y)
        if len(y) > 20 and clipped:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return tape

    monkeypatch.setattr(PerSampleGradients, "record_by", limited)
    for sizes in ((21,), (3, 21, 1), (2, 2)):
        batch = [(torch.randn(size, 6).double(), torch.randint(3, (size,))) for size in sizes]
        request = Request(engine, [point, point] if apart else [point], batch, torch.ones_like, apart=apart)
        clipped.append(request.alone())
    assert engine.most == 10
    assert float(engine.model.passes) == len(clipped) * (2 if apart else 1)


class Asserting(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.scale = nn.Linear(6, 3), nn.Parameter(torch.rand(3))

    def forward(self, x):
        h = self.layer(x)
        scaled = h * self.scale
        assert scaled.shape == h.shape
        return scaled


class WithALock(nn.Linear):
    def __init__(self):
        super().__init__(6, 3)
        self.lock = threading.Lock()


class WithoutAGraph(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.head = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x):
        with torch.no_grad():
            target = self.inner(x)
        return self.head(torch.tanh(self.inner(x) - 0.5 * target))


@pytest.mark.parametrize("kind", [Asserting, WithALock, WithoutAGraph])
def test_models_that_the_comparison_stumbles_over(kind):
    assert_right(engine_in_float64(kind().train()), (torch.randn(4, 6).double(), torch.randint(3, (4,))))


def test_sequences_without_tokens():
    class Summing(OfTokens):
        def hidden(self, ids):
            return torch.tanh(self.inner(self.embedding(ids))).sum(1)

    assert_right(engine_in_float64(Summing()), (TOKENS, CLASSES), (TOKENS[:, :0], CLASSES))


def test_a_loss_that_is_no_value_per_sample_is_refused():
    engine = engine_in_float64(nn.Linear(6, 3), lambda outputs, targets: F.cross_entropy(outputs, targets))
    with pytest.raises(UserError, match=r"the loss of . rows has shape \(\)"):
        engine.record([Point(1.0, engine.flat.vector)], torch.randn(4, 6).double(), CLASSES)


class Centring(nn.Linear):
    def forward(self, x):
        return super().forward(x.sub_(0.5).mul_(2))


@pytest.mark.parametrize("views", [1, 2])
def test_a_model_that_changes_its_input_is_refused(views):
    """Else the second iterate would see something else than the first."""
    model = Centring(6, 3).double()
    engine = PerSampleGradients(model, FlatParameters(model), cross_entropy, views=views)
    x = torch.randn(4, views, 6).double() if views > 1 else torch.randn(4, 6).double()
    with pytest.raises(UserError, match="changes its input in place"):
        engine.record([Point(1.0, engine.flat.vector)], x, CLASSES)


def test_parameters_that_can_not_be_one_vector_are_refused():
    with pytest.raises(UserError, match="no shape yet"):
        FlatParameters(nn.Sequential(nn.LazyLinear(3)))
    with pytest.raises(UserError, match="no parameters to train"):
        FlatParameters(nn.Linear(2, 2).requires_grad_(False))
    with pytest.raises(UserError, match="some parameters are float32 and some float64"):
        FlatParameters(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double()))
    tied = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
    tied[1].weight = nn.Parameter(tied[0].weight.t())
    with pytest.raises(UserError, match=r"'0\.weight' and '1\.weight' of the model share memory"):
        FlatParameters(tied)


@pytest.mark.parametrize("buffer", [False, True])
def test_what_is_not_trained_may_not_be_part_of_what_is(buffer):
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
    part = model[0].weight.detach()[1:].t()
    if buffer:
        model[1].register_buffer("also", part)
    else:
        model[1].also = nn.Parameter(part, requires_grad=False)
    with pytest.raises(UserError, match=r"'0\.weight' and '1\.also' of the model share memory"):
        FlatParameters(model)
    model[1].also = torch.empty(7)[2:5].requires_grad_(False) if buffer else nn.Parameter(part.clone(), False)
    assert len(FlatParameters(model)) == 17


def test_parameters_that_are_parts_of_one_tensor_stay_what_they_are():
    whole = torch.arange(12.0).view(3, 4)
    model = nn.ParameterList([nn.Parameter(whole[:, :2]), nn.Parameter(whole[:, 2:])])
    flat = FlatParameters(model)
    assert torch.equal(flat.vector, torch.cat([whole[:, :2].flatten(), whole[:, 2:].flatten()]))
    assert torch.equal(FlatParameters(model).vector, flat.vector)


def freeze(model):
    model[0].weight.requires_grad_(False)


def unfreeze(model):
    model[2].requires_grad_(True)


def exchange(model):
    model[0] = nn.Linear(4, 4, dtype=torch.float64)


def assign(model):
    model.load_state_dict({name: 2 * values for name, values in model.state_dict().items()}, assign=True)


def move(model):
    model.float().double()


@pytest.mark.parametrize("kind", [PerSampleGradients, FusedGradients])
@pytest.mark.parametrize(
    ("change", "what"),
    [(freeze, "frozen"), (unfreeze, "unfrozen"), (exchange, "exchanged"), (assign, "exchanged"), (move, "moved")],
)
def test_parameters_that_are_not_those_of_the_vector_any_more_are_refused(change, what, kind):
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    model[2].requires_grad_(False)
    engine = kind(model, FlatParameters(model), cross_entropy)
    x, y = torch.randn(5, 4).double(), torch.randint(3, (5,))
    points = [Point(1.0, engine.flat.vector)]
    request = Request(engine, points, [(x, y)], torch.ones_like)

    def computed():
        return engine.clipped_sums([request, request]) if kind is FusedGradients else [request.alone()]

    assert not any(isinstance(found, Exception) for found in computed())
    change(model)
    for asked in (computed, lambda: engine.record(points, x, y)):
        with pytest.raises(UserError, match=rf"parameters of the model were .*{what}"):
            asked()
    assert all(parameter.grad is None for parameter in model.parameters())


# Norms of parts that cancel


class Difference(nn.Module):
    """A layer of two inputs that nearly agree, or both as tokens of one call."""

    def __init__(self, calls):
        super().__init__()
        self.layer, self.calls = nn.Linear(64, 64, bias=False), calls

    def forward(self, x):
        if self.calls == 1:
            h = self.layer(x)
            return (h[:, 0] - h[:, 1]).sum(1)
        return (self.layer(x[:, 0]) - self.layer(x[:, 1])).sum(1)


def difference(calls, scale):
    model = Difference(calls)
    engine = restricted(PerSampleGradients(model, FlatParameters(model), lambda outputs, _: outputs), {"gram"})
    base = scale * torch.randn(24, 1, 64)
    x = torch.cat([base, base + 0.05 * torch.randn(24, 1, 64)], 1)
    return engine, x, torch.zeros(24)


def largest_clipped(engine, x, y):
    """Norm of one sample's part of the sum that is clipped to 1, the largest of all samples."""
    points = [Point(1.0, engine.flat.vector)]
    clip = lambda norms: (1 / norms).clamp(max=1)  # noqa: E731
    parts = [engine.clipped_sum(points, [(x[i : i + 1], y[i : i + 1])], clip).total.norm() for i in range(len(x))]
    return float(torch.stack(parts).max())


@pytest.mark.parametrize("scale", [1.0, 10.0, 100.0, 1000.0])
@pytest.mark.parametrize("calls", [1, 2])
def test_no_sample_exceeds_its_bound_where_its_parts_cancel(calls, scale):
    engine, x, y = difference(calls, scale)
    assert largest_clipped(engine, x, y) < 1.002
    found = engine.clipped_sum([Point(1.0, engine.flat.vector)], [(x, y)], torch.ones_like)
    want = 8 * (x[:, 0].double() - x[:, 1].double()).norm(dim=1)
    torch.testing.assert_close(found.norms.double(), want, rtol=1e-4, atol=0)


@pytest.mark.parametrize("calls", [1, 2])
def test_inner_products_in_single_precision_would_let_samples_exceed_it(calls, monkeypatch):
    # The comparison of a batch would notice.
    monkeypatch.setattr("dpbench.gradients.settle.short_norm", lambda *_: None)
    monkeypatch.setattr("dpbench.gradients.tape.CANCELLING", 0.0)
    assert largest_clipped(*difference(calls, 1000.0)) > 1.5


def test_seeds_that_share_a_pass_have_norms_as_exact():
    engine, x, y = difference(2, 1000.0)
    vectors = [engine.flat.vector + 0.1 * torch.randn_like(engine.flat.vector) for _ in range(2)]
    fused = restricted(FusedGradients(engine.model, engine.flat, engine.loss), {"gram"})
    clip = lambda norms: (1 / norms).clamp(max=1)  # noqa: E731
    requests = [Request(engine, [Point(1.0, vector)], [(x, y)], clip) for vector in vectors]
    want = 8 * (x[:, 0].double() - x[:, 1].double()).norm(dim=1)
    for found in fused.clipped_sums(requests):
        torch.testing.assert_close(found.norms.double(), want, rtol=1e-4, atol=0)


def test_no_warning_where_books_are_kept():
    engine = engine_in_float64(nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_right(engine, (torch.randn(4, 6).double(), torch.randint(3, (4,))))
    assert isinstance(engine._way, Books)


# Numbers near the largest there is


@pytest.mark.parametrize("magnitude", [1e37, 3e38])
def test_one_sample_of_huge_inputs_does_not_stop_a_run(magnitude):
    """Batches 4 and 16 are compared with autograd, and whether that ends a run must not hang on one sample."""
    model = nn.Sequential(nn.Linear(20, 64), nn.Tanh(), nn.Linear(64, 3))
    engine = PerSampleGradients(model, FlatParameters(model), cross_entropy)
    for batch in range(1, 17):
        x, y = torch.randn(100, 20), torch.randint(3, (100,))
        if batch in (4, 16):
            x[:7] = magnitude * torch.randn(7, 20).sign()
        found = engine.clipped_sum([Point(1.0, engine.flat.vector)], [(x, y)], lambda norms: (1 / norms).clamp(max=1))
        assert found.total.isfinite().all()


@pytest.mark.parametrize("strategy", ["pass", "hold", "gram"])
def test_a_factor_above_one_does_not_take_a_finite_gradient_beyond_all_numbers(strategy):
    """A sample that the model is sure of has hardly a gradient, and automatic clipping scales it up: inf times 0."""
    model = nn.Sequential(nn.Linear(20, 64), nn.Tanh(), nn.Linear(64, 3))
    x, y = torch.randn(17, 20), torch.randint(3, (17,))
    x[16] = 1e37 * torch.randn(20).sign()
    with torch.no_grad():
        y[16] = model(x[16:]).argmax()
        model[2].bias[y[16]] += 20
    engine = restricted(PerSampleGradients(model, FlatParameters(model), cross_entropy), {strategy})
    points = [Point(1.0, engine.flat.vector)]
    with_it, without = (
        engine.clipped_sum(points, [(x[:count], y[:count])], lambda norms: 1 / (norms + 0.01)) for count in (17, 16)
    )
    assert 0 < with_it.norms[16] < 1e-3
    assert float((with_it.total - without.total).norm()) < 1.001
