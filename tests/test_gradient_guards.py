"""Models whose books would be wrong without a sign: by batches of another kind, rare uses, and ways taken before."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from gradient_checks import assert_right, cross_entropy, engine_in_float64
from small_models import CountingPasses, TimeFirst
from torch import nn

from dpbench.errors import UserError
from dpbench.gradients import FlatParameters, PerSampleGradients
from dpbench.gradients.settle import problem_in_batch
from dpbench.gradients.tape import Tape
from dpbench.gradients.verify import nearby
from dpbench.gradients.way import Books, Rows
from dpbench.query import Point

pytestmark = [
    pytest.mark.usefixtures("seeded"),
    pytest.mark.filterwarnings("ignore:falling back to materialised"),
]


# Batches that are larger, or of samples of another shape


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
    with torch.no_grad(), engine.flat.at(nearby(engine.flat.vector, 1)):  # where the fourth batch is compared
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


class Led(nn.Module):
    """Adds the first of many samples to each of them, before any parameter is used."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        return self.head(x + x[:1] if len(x) > 8 else x)


def test_a_model_that_mixes_samples_in_halves_of_a_batch_too_goes_one_by_one():
    """With the same sample, so that no half shows it; nor do gradients of sums, which are right for what was mixed."""
    engine = engine_in_float64(Led())
    assert_right(engine, (torch.randn(40, 4).double(), torch.randint(3, (40,))))
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sums_that_are_a_twentieth_too_short_are_found_where_nothing_is_computed_in_half_precision(dtype, monkeypatch):
    model = nn.Linear(4, 3).to(dtype)
    engine = PerSampleGradients(model, FlatParameters(model), cross_entropy)
    batch = [Point(1.0, engine.flat.vector)], torch.randn(12, 4, dtype=dtype), torch.randint(3, (12,))
    assert problem_in_batch(engine, Books(1), *batch, seed=0) is None
    whole = Tape.weighted_sum
    monkeypatch.setattr(Tape, "weighted_sum", lambda self, factors: 0.95 * whole(self, factors))
    assert "gradients of 'weight' deviate" in (problem_in_batch(engine, Books(1), *batch, seed=0) or "")


def test_memory_that_runs_out_in_double_precision_is_no_reason_to_compare_in_single_precision(monkeypatch):
    model, tried = nn.Linear(4, 3), []

    def agreeing(engine, copy, inputs, targets):
        tried.append(copy.weight.dtype)
        raise torch.OutOfMemoryError

    monkeypatch.setattr("dpbench.gradients.settle._agreeing", agreeing)
    engine = PerSampleGradients(model, FlatParameters(model), cross_entropy)
    with pytest.raises(torch.OutOfMemoryError):
        engine.record([Point(1.0, engine.flat.vector)], torch.randn(5, 4), torch.randint(3, (5,)))
    assert tried == [torch.float64]


NOT_FINITE = "first samples of a batch, .* are not finite: such a batch takes one backward pass per sample"


def test_the_way_is_found_in_the_first_batch_whose_first_samples_are_whole():
    engine = engine_in_float64(nn.Linear(4, 3))
    x, y = torch.randn(5, 4).double(), torch.randint(3, (5,))
    broken = x.index_fill(0, torch.tensor([0]), torch.nan)
    with pytest.warns(UserWarning, match=NOT_FINITE):
        engine.record([Point(1.0, engine.flat.vector)], broken, y)
    assert engine._way is None
    engine.record([Point(1.0, engine.flat.vector)], x, y)
    assert isinstance(engine._way, Books)


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
    with pytest.warns(UserWarning, match=NOT_FINITE):
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


def test_no_warning_where_books_are_kept():
    engine = engine_in_float64(nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_right(engine, (torch.randn(4, 6).double(), torch.randint(3, (4,))))
    assert isinstance(engine._way, Books)
