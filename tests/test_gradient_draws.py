"""Models that draw at random: which draws keep books, share iterates, and mix samples."""

import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from gradient_checks import assert_right, cross_entropy, engine_in_float64
from torch import nn

from dpbench.gradients import FlatParameters, PerSampleGradients, Request
from dpbench.gradients.draws import LEVELS, LevelDraws, UnknownDraw, held_still
from dpbench.gradients.fused import FusedGradients
from dpbench.gradients.passes import Passes
from dpbench.gradients.way import Books, Rows
from dpbench.query import Point
from dpbench.randomness import Generators

pytestmark = [
    pytest.mark.usefixtures("seeded"),
    pytest.mark.filterwarnings("ignore:falling back to materialised"),
]


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


@pytest.mark.parametrize("most", [None, 3])
def test_iterates_that_are_clipped_apart_share_draws(most):
    """Also where a micro-batch has to be halved, or is drawn for after others."""
    model = Drawing(HARMLESS["dropout"]).train().double()
    engine = PerSampleGradients(model, FlatParameters(model), cross_entropy)
    x, y = torch.randn(10, 6).double(), torch.randint(3, (10,))
    batch = list(zip(x.split(5), y.split(5), strict=True))
    here, there = (Point(1.0, engine.flat.vector + shift) for shift in (0.0, 0.1))

    def total(*points):
        engine.most = most
        torch.manual_seed(3)
        return Request(engine, points, batch, lambda norms: 0.1 / norms, apart=True).alone().total

    torch.testing.assert_close(total(here, there), total(here) + total(there))
    torch.testing.assert_close(total(here, here, here), 3 * total(here))


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


@pytest.mark.parametrize("draw", [lambda: torch.rand(()), lambda: torch.poisson(ONE)])
def test_seeds_are_not_shared_where_a_model_draws(draw):
    model = Drawing(lambda model, x, h: h * float(draw())).train()
    fused = FusedGradients(model, FlatParameters(model), cross_entropy)
    assert "draws random numbers" in (fused.objection(torch.randn(4, 6), torch.randint(3, (4,))) or "")


class DropoutOfItsOwn(nn.Module):
    """As in cuDNN's recurrent layers: masks come from a state that is seeded by the generator when that was set."""

    def __init__(self):
        super().__init__()
        self.linear, self.state, self.masks = nn.Linear(6, 3), torch.Generator(), []
        self.was_set = True

    def forward(self, x):
        if self.was_set:
            self.state.manual_seed(int(torch.randint(2**31, ())))
            self.was_set = False
        mask = torch.rand(x.shape, generator=self.state) < 0.5
        self.masks.append(mask)
        return self.linear(x * mask)


def test_iterates_share_the_masks_of_layers_whose_dropout_has_a_state_of_its_own(monkeypatch):
    model = DropoutOfItsOwn()
    setting = Generators.load_state_dict

    def noticed(self, state):
        setting(self, state)
        model.was_set = True

    monkeypatch.setattr(Generators, "load_state_dict", noticed)
    flat = FlatParameters(model)
    passes = Passes(model, flat, cross_entropy)
    points = [Point(1.4, flat.vector + 0.1), Point(-0.4, flat.vector)]
    x, y = torch.randn(4, 6), torch.randint(3, (4,))
    for _ in range(2):
        model.masks.clear()
        passes.record_by(passes.one_by_one(), points, x, y)
        first, second = (torch.cat(model.masks[start : start + 4]) for start in (0, 4))
        assert torch.equal(first, second)
    assert 0 < first.float().mean() < 1
