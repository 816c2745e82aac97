"""Sums over logical batches: micro-batches of any size, broken samples, and memory that runs out."""

import copy
import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from clipped_sums import CLIPS, built, clipped_sum, engine_of, tapes
from gradient_checks import restricted
from torch import nn

from dpbench.gradients import FlatParameters, PerSampleGradients, Tape
from dpbench.gradients.request import Request
from dpbench.gradients.settle import problem_in_batch
from dpbench.gradients.way import Books, Rows
from dpbench.query import Point
from dpbench.randomness import global_stream
from dpbench.training.losses import per_sample_loss


def whole_batches(per_layer=False, model="mlp"):
    """An engine, its points and a batch of six; two points, so that the mixture is what is clipped."""
    model, inputs, labels = built(model, 6)
    flat = FlatParameters(model)
    engine = PerSampleGradients(model, flat, per_sample_loss, per_layer=per_layer)
    other = flat.vector + 0.02 * torch.randn_like(flat.vector)
    return engine, [Point(1.4, other), Point(-0.4, flat.vector)], inputs, labels


def micro_batches(inputs, labels, size):
    return list(zip(inputs.split(size), labels.split(size), strict=True))


def clip_of(name, threshold=0.5):
    return lambda norms: CLIPS[name].factors(norms, threshold)


@pytest.mark.parametrize("micro", [6, 4, 1])
@pytest.mark.parametrize("name", CLIPS)
def test_sum_of_a_batch_is_that_of_its_tapes(name, micro):
    engine, points, x, y = whole_batches(per_layer=name.endswith("per_layer"))
    recorded = tapes(engine, points, x, y, 6)
    total, losses, *_ = engine.clipped_sum(points, iter(micro_batches(x, y, micro)), clip_of(name))
    torch.testing.assert_close(total, clipped_sum(recorded, CLIPS[name], 0.5))
    torch.testing.assert_close(losses, recorded[0].losses)


# Numbers of broken samples: one, several, whole micro-batches of the size 2 and 3 and all.
BROKEN = [[0], [5], [2, 4], [0, 1], [0, 1, 2], [3, 4, 5], [1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5]]


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("broken", BROKEN, ids=str)
@pytest.mark.parametrize("model", ["mlp", "cnn_small"])
def test_sample_without_a_finite_gradient_adds_nothing(model, broken, value):
    engine, points, x, y = whole_batches(model=model)
    good = [i for i in range(6) if i not in broken]
    clips = ["threshold", "none"]
    want = {name: engine.clipped_sum(points, [(x[good], y[good])][: len(good)], clip_of(name)) for name in clips}
    x[broken] = value
    if len(broken) > 1:  # one pixel is enough
        x[broken[0]] = 0.5
        x[broken[0]].view(-1)[20] = value
    for name, micro in (("none", 6), ("threshold", 6), ("threshold", 3), ("none", 2), ("threshold", 1)):
        total, losses, *_ = engine.clipped_sum(points, micro_batches(x, y, micro), clip_of(name))
        assert len(losses) == 6
        torch.testing.assert_close(total, want[name][0])
        torch.testing.assert_close(losses[good], want[name][1])
        assert good or torch.equal(total, torch.zeros_like(total))


@pytest.mark.parametrize("per_layer", [False, True])
def test_norms_of_broken_samples_are_infinite_for_factors(per_layer):
    engine, points, x, y = whole_batches(per_layer)
    x[1], x[4] = torch.nan, torch.inf
    seen = []

    def factors(norms):
        seen.append(norms.clone())
        return torch.ones_like(norms)

    total, *_ = engine.clipped_sum(points, micro_batches(x, y, 6), factors)
    broken = torch.tensor([False, True, False, False, True, False])
    assert torch.equal(seen[0].isinf().any(0), broken)
    assert not any(norms.isnan().any() for norms in seen)
    assert all(norms.shape[0] == seen[0].shape[0] for norms in seen)
    torch.testing.assert_close(
        total, engine.record(points, x[~broken], y[~broken]).weighted_sum(torch.ones(len(seen[0]), 4))
    )


def test_no_factor_lets_a_broken_sample_in():
    engine, points, x, y = whole_batches()
    x[2] = torch.nan
    good = torch.tensor([0, 1, 3, 4, 5])
    want = engine.record(points, x[good], y[good]).weighted_sum(torch.ones(1, 5))
    for odd in (0.0, 1.0, torch.inf, torch.nan):
        total, *_ = engine.clipped_sum(
            points, [(x, y)], lambda norms, odd=odd: torch.where(norms.isinf(), odd, torch.ones_like(norms))
        )
        torch.testing.assert_close(total, want)


def test_gradients_too_long_for_a_finite_norm_add_nothing():
    torch.manual_seed(0)
    engine = engine_of(nn.Sequential(nn.Linear(8, 3)))
    points, x, y = [Point(1.0, engine.flat.vector)], torch.randn(6, 8), torch.arange(6) % 3
    x[3] *= -1e25
    good = torch.tensor([0, 1, 2, 4, 5])
    want = engine.record(points, x[good], y[good]).weighted_sum(torch.ones(1, 5))
    found = engine.clipped_sum(points, [(x, y)], torch.ones_like)
    assert found.norms[3].isinf()
    torch.testing.assert_close(found.total, want)


def test_long_inputs_that_a_model_makes_nothing_of_break_no_sample():
    """Squares of inputs are beyond the largest number; the gradient, past tanh's ends, is ordinary."""
    engine, points, x, y = whole_batches()
    x[3] = 1e25
    found = engine.clipped_sum(points, [(x, y)], torch.ones_like)
    x[3] = 1e15
    want = engine.clipped_sum(points, [(x, y)], torch.ones_like)
    torch.testing.assert_close(found.norms, want.norms)
    torch.testing.assert_close(found.total, want.total)


def test_model_without_books_leaves_broken_samples_out_too():
    torch.manual_seed(0)
    model, x, y = nn.Sequential(nn.Linear(3, 4), nn.PReLU(4), nn.Linear(4, 3)), torch.randn(6, 3), torch.arange(6) % 3
    engine = engine_of(model)
    points = [Point(1.0, engine.flat.vector)]
    x[0], x[4] = torch.nan, torch.inf
    good = torch.tensor([1, 2, 3, 5])
    with pytest.warns(UserWarning, match="falling back to materialised"):
        want, *_ = engine.clipped_sum(points, [(x[good], y[good])], clip_of("threshold"))
    for micro in (6, 2, 1):
        total, *_ = engine.clipped_sum(points, micro_batches(x, y, micro), clip_of("threshold"))
        torch.testing.assert_close(total, want)


@pytest.mark.parametrize("per_layer", [False, True])
def test_empty_batch_gives_zero_and_no_losses(per_layer):
    engine, points, _, _ = whole_batches(per_layer)
    for batch in ([], iter(())):
        total, losses, *_ = engine.clipped_sum(points, batch, clip_of("threshold"))
        assert torch.equal(total, torch.zeros_like(engine.flat.vector))
        assert losses.shape == (0,)


@pytest.mark.parametrize("apart", [False, True])
def test_micro_batches_without_samples_add_nothing(apart):
    """Such as the only one of a draw that had no sample."""
    engine, points, x, y = whole_batches()
    points = [*points, Point(-0.5, points[0].iterate + 0.1)]
    empty = (x[:0], y[:0])
    for batches in ([[empty], []], [[empty, (x, y), empty], [(x, y)]]):
        got, want = (Request(engine, points, batch, clip_of("threshold"), apart).alone() for batch in batches)
        torch.testing.assert_close(got.total, want.total)
        torch.testing.assert_close(got.losses, want.losses)


class Memory:
    """Lets an engine run out of memory for more than so many samples, and counts what it computed.

    Attributes:
        sizes: of the micro-batches that were computed, in order.
        refused: of those that were not.
    """

    def __init__(self, monkeypatch, most, error=torch.OutOfMemoryError, message="CUDA out of memory"):
        self.sizes, self.refused = [], []
        record = PerSampleGradients.record_by

        def limited(engine, way, points, inputs, targets):
            if len(targets) > most:
                self.refused.append(len(targets))
                raise error(message)
            self.sizes.append(len(targets))
            return record(engine, way, points, inputs, targets)

        monkeypatch.setattr(PerSampleGradients, "record_by", limited)
        # Which comparisons would compute more often.
        monkeypatch.setattr("dpbench.gradients.per_sample.problem_in_batch", lambda *_: None)


OUT_OF_MEMORY = [
    (torch.OutOfMemoryError, "CUDA out of memory"),
    (RuntimeError, "[enforce fail at alloc_cpu.cpp:1] DefaultCPUAllocator: can't allocate memory: you tried to"),
    (MemoryError, ""),
    (RuntimeError, "CUDA error: out of memory"),
    (RuntimeError, "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    (RuntimeError, "GET was unable to find an engine to execute this computation"),
]


@pytest.mark.parametrize(("error", "message"), OUT_OF_MEMORY, ids=["torch", "cpu", "python", "cuda", "cublas", "cudnn"])
@pytest.mark.parametrize("most", [1, 2, 3, 4, 5])
def test_micro_batch_that_does_not_fit_is_halved(most, error, message, monkeypatch):
    engine, points, x, y = whole_batches()
    x, y = x.repeat(3, 1, 1, 1)[:13] * torch.linspace(0.5, 1.5, 13).view(-1, 1, 1, 1), y.repeat(3)[:13]
    recorded = engine.record(points, x, y)  # the model is compared here
    want = clipped_sum([recorded], CLIPS["threshold"], 0.5)
    memory = Memory(monkeypatch, most, error, message)
    for micro in (13, 7, 4, 3):
        memory.sizes.clear()
        total, losses, *_ = engine.clipped_sum(points, micro_batches(x, y, micro), clip_of("threshold"))
        torch.testing.assert_close(total, want)
        torch.testing.assert_close(losses, recorded.losses)  # in order, so none is lost or doubled
        assert sum(memory.sizes) == 13
    assert len(memory.refused) <= 4  # what doesn't fit is not tried again and again
    assert all(earlier > later for earlier, later in zip(memory.refused, memory.refused[1:], strict=False))


def test_cudnn_that_finds_no_way_for_a_batch_while_it_is_compared_halves_it(monkeypatch):
    engine, points, x, y = whole_batches()
    want, *_ = engine.clipped_sum(points, [(x, y)], clip_of("threshold"))
    engine, points, x, y = whole_batches()
    Memory(monkeypatch, 4, *OUT_OF_MEMORY[-1])
    monkeypatch.setattr("dpbench.gradients.per_sample.problem_in_batch", problem_in_batch)
    total, *_ = engine.clipped_sum(points, [(x, y)], clip_of("threshold"))
    torch.testing.assert_close(total, want)
    assert isinstance(engine.way(points, x[:3], y[:3]), Books)
    assert engine.most == 3


def test_micro_batch_with_broken_samples_that_does_not_fit(monkeypatch):
    engine, points, x, y = whole_batches()
    good = torch.tensor([0, 2, 4, 5])
    want, *_ = engine.clipped_sum(points, [(x[good], y[good])], clip_of("threshold"))
    x[1], x[3] = torch.nan, torch.inf
    memory = Memory(monkeypatch, 3)
    total, losses, *_ = engine.clipped_sum(points, [(x, y)], clip_of("threshold"))
    torch.testing.assert_close(total, want)
    assert len(losses) == 6
    assert memory.refused == [6]


@pytest.mark.parametrize("tokens", [1, 2])
@pytest.mark.parametrize("margin", [51.0, 51.4, 51.44, 51.6, 52.0])
def test_norms_hold_where_squares_underflow(tokens, margin):
    """Output gradients of some 1e-23, whose squares float32 does not hold, and an input of 1e8."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 2, bias=False))
    flat = FlatParameters(model)

    def loss(outputs, targets):
        return F.cross_entropy(outputs.flatten(1, -2).mean(1), targets, reduction="none")

    engine = restricted(PerSampleGradients(model, flat, loss), {"gram"})
    points = [Point(1.0, flat.vector)]
    with torch.no_grad():
        engine.record(points, torch.randn(4, tokens, 3), torch.zeros(4, dtype=torch.int64))
        flat.vector.copy_(torch.tensor([1.0, 0, 0, 0, 0, 0]))
    x = torch.tensor([margin, 1e8, -1e8]).expand(1, tokens, 3)
    found = engine.clipped_sum(points, [(x, torch.zeros(1, dtype=torch.int64))], clip_of("automatic_exact", 1.0))
    torch.testing.assert_close(found.total.double().norm(), torch.tensor(1.0).double(), rtol=2e-3, atol=0)


@pytest.mark.parametrize("kinds", [{"gram"}, {"pass"}, {"hold"}], ids=str)
@pytest.mark.parametrize(("name", "size"), [("automatic_exact", 1.0), ("automatic", 1e6), ("threshold", 1e9)])
def test_a_sample_whose_points_cancel_keeps_its_bound(kinds, name, size):
    """Two points of weights 2 and -1 and gradients g and 2 g, to rounding: what is left of them is short."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 2, bias=False))
    flat = FlatParameters(model)
    engine = restricted(PerSampleGradients(model, flat, per_sample_loss), kinds)
    one, other = torch.zeros(2, 2, 20)
    one[0, 0] = other[0, 1] = 1.0
    points = [Point(2.0, one.flatten()), Point(-1.0, other.flatten())]
    engine.record(points, torch.randn(16, 20), torch.zeros(16, dtype=torch.int64))
    p = torch.linspace(0.1, 0.8, 200).double()
    x = size * torch.randn(200, 20)
    x[:, 0], x[:, 1] = ((1 + p) / 2).logit(), p.logit()
    for row in x:
        found = engine.clipped_sum(points, [(row[None], torch.zeros(1, dtype=torch.int64))], clip_of(name, 1.0))
        assert found.total.double().norm() <= 1.002


@pytest.mark.parametrize("kinds", [{"gram"}, {"pass"}, {"hold"}], ids=str)
@pytest.mark.parametrize("layer", [nn.Linear(3, 2, bias=False), nn.Conv2d(3, 2, 1, bias=False)], ids=repr)
def test_tokens_of_a_sample_that_nearly_cancel_exceed_no_bound(kinds, layer):
    """Inputs of 1e7 that add up to some 0.1: norms and sums in float32 would be rounding, each another one."""
    torch.manual_seed(0)
    model = nn.Sequential(copy.deepcopy(layer))
    flat = FlatParameters(model)

    def loss(outputs, targets):
        of_tokens = outputs.flatten(2).mean(2) if outputs.dim() == 4 else outputs.mean(1)
        return F.cross_entropy(of_tokens, targets, reduction="none")

    def shaped(tokens):
        return tokens.transpose(1, 2).reshape(-1, 3, 16, 16) if isinstance(layer, nn.Conv2d) else tokens

    engine = restricted(PerSampleGradients(model, flat, loss), kinds)
    points = [Point(1.0, flat.vector)]
    y = torch.arange(8) % 2
    with torch.no_grad():
        for _ in range(16):  # comparisons with autograd, which could tell nothing of such samples, are behind
            engine.record(points, shaped(torch.randn(8, 256, 3)), y)
        flat.vector.mul_(1e-9)
    half = 1e7 * torch.randn(8, 128, 3)
    x = shaped(torch.cat([half, -half], dim=1)[:, torch.randperm(256)] + 0.1 * torch.randn(8, 256, 3))
    clip = clip_of("automatic_exact", 1.0)
    alone = [engine.clipped_sum(points, [(x[i : i + 1], y[i : i + 1])], clip).total for i in range(8)]
    assert max(float(one.norm()) for one in alone) <= 1 + 1e-5
    torch.testing.assert_close(engine.clipped_sum(points, [(x, y)], clip).total, sum(alone), rtol=0, atol=1e-5)


@pytest.mark.parametrize("kinds", [{"gram"}, {"pass"}, {"hold"}], ids=str)
@pytest.mark.parametrize("tokens", [1, 2])
def test_what_a_sample_adds_does_not_depend_on_who_else_is_there(kinds, tokens):
    """Squares beyond the largest number, and below the smallest one, beside ordinary and broken samples."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 2, bias=False))
    flat = FlatParameters(model)

    def loss(outputs, targets):
        return F.cross_entropy(outputs.flatten(1, -2).mean(1), targets, reduction="none")

    engine = restricted(PerSampleGradients(model, flat, loss), kinds)
    points = [Point(1.0, flat.vector)]
    y = torch.zeros(6, dtype=torch.int64)
    with torch.no_grad():
        engine.record(points, torch.randn(4, tokens, 3), y[:4])
        flat.vector.copy_(torch.tensor([1.0, 0, 0, 0, 0, 0]))
    x = torch.randn(6, 1, 3)
    x[1, 0] = torch.tensor([51.4, 1e8, -1e8])
    x[2, 0] = torch.tensor([-1.0, 1e25, -1e25])
    x[3, 0] = torch.tensor([60.0, 3e38, 1e38])
    x[4, 0, 0] = torch.nan
    x = x.expand(6, tokens, 3)
    clip = clip_of("automatic_exact", 1.0)
    alone = [engine.clipped_sum(points, [(x[i : i + 1], y[:1])], clip).total.double() for i in range(6)]
    sizes = torch.stack(alone).norm(dim=1)
    torch.testing.assert_close(sizes, torch.tensor([1.0, 1, 0, 1, 0, 1]).double(), rtol=2e-3, atol=0)
    for others in (range(6), (0, 2, 5), (2, 3), (0, 1, 4), (0, 3, 4, 5)):
        which = list(others)
        total = engine.clipped_sum(points, [(x[which], y[which])], clip).total.double()
        torch.testing.assert_close(total, sum(alone[i] for i in which), rtol=0, atol=1e-5)


@pytest.mark.parametrize("kinds", [{"gram"}, {"pass"}, {"hold"}], ids=str)
@pytest.mark.parametrize("points", [1, 2])
def test_a_broken_sample_changes_nothing_that_others_draw(kinds, points):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Dropout(0.5), nn.Linear(8, 6), nn.Tanh(), nn.Dropout(0.5), nn.Linear(6, 3)).train()
    flat = FlatParameters(model)
    engine = restricted(PerSampleGradients(model, flat, per_sample_loss), kinds)
    at = [Point(1.0, flat.vector), Point(-0.5, flat.vector + 0.1)][:points]
    x, y = torch.randn(6, 8), torch.arange(6) % 3
    engine.record(at, x, y)
    torch.manual_seed(1)
    want = engine.record(at, x, y).weighted_sum(torch.tensor([[1.0, 1.0, 0.0, 1.0, 1.0, 1.0]]))
    broken = x.clone()
    broken[2] = torch.nan
    kept = broken.clone()
    torch.manual_seed(1)
    found = engine.clipped_sum(at, [(broken, y)], torch.ones_like, remainder=True)
    torch.testing.assert_close(found.total, want)
    assert torch.equal(found.remainder, torch.zeros_like(want))
    assert found.norms.isinf().tolist() == [False, False, True, False, False, False]
    torch.testing.assert_close(broken, kept, equal_nan=True)  # the data stay as they are


def test_memory_that_runs_out_while_norms_and_sums_are_taken(monkeypatch):
    engine, points, x, y = whole_batches()
    want, of_all, *_ = engine.clipped_sum(points, [(x, y)], clip_of("threshold"))
    for method in ("norms", "weighted_sum"):
        with monkeypatch.context() as patch:
            original = getattr(Tape, method)

            def limited(tape, *factors, original=original):
                if len(tape.losses) > 2:
                    raise torch.OutOfMemoryError("CUDA out of memory")
                return original(tape, *factors)

            patch.setattr(Tape, method, limited)
            engine.most = None
            total, losses, *_ = engine.clipped_sum(points, [(x, y)], clip_of("threshold"))
        torch.testing.assert_close(total, want)
        torch.testing.assert_close(losses, of_all)


def dropping_every_other_feature(x):
    return F.dropout(x, 0.5)


def scaled_by_python(x):
    return x * random.random()


def scaled_by_numpy(x):
    return x * np.random.random()


class Drawn(nn.Module):
    def __init__(self, draw):
        super().__init__()
        self.draw = draw

    def forward(self, x):
        return self.draw(x)


@pytest.mark.parametrize("way", [Books, Rows])
@pytest.mark.parametrize("draw", [dropping_every_other_feature, scaled_by_python, scaled_by_numpy])
@pytest.mark.parametrize("points", [1, 2])
def test_what_is_drawn_hangs_on_the_micro_batches_not_on_where_memory_ran_out(way, draw, points, monkeypatch):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 6), Drawn(draw), nn.Linear(6, 3)).train()
    flat = FlatParameters(model)
    engine = PerSampleGradients(model, flat, per_sample_loss)
    at = [Point(1.0, flat.vector), Point(-0.5, flat.vector + 0.1)][:points]
    x, y = torch.randn(6, 8), torch.arange(6) % 3
    engine.record(at, x, y)
    if way is Rows:
        engine._way = engine.one_by_one()
    assert isinstance(engine._way, way)

    def total():
        with global_stream(1, "model"):
            return engine.clipped_sum(at, micro_batches(x, y, 6), clip_of("threshold")).total

    # Memory runs out after all of it was drawn.
    norms, refused = Tape.norms, []

    def limited(tape):
        if len(tape.losses) > 3:
            refused.append(len(tape.losses))
            raise torch.OutOfMemoryError("CUDA out of memory")
        return norms(tape)

    monkeypatch.setattr(Tape, "norms", limited)
    first, again = total(), total()
    assert refused == [6]
    assert torch.equal(first, again)


def test_one_sample_that_does_not_fit_is_an_error(monkeypatch):
    engine, points, x, y = whole_batches()
    engine.record(points, x, y)
    vector = engine.flat.vector.clone()
    Memory(monkeypatch, 0)
    for size in (1, 6):
        with pytest.raises(torch.OutOfMemoryError):
            engine.clipped_sum(points, micro_batches(x, y, size), clip_of("threshold"))
    assert torch.equal(engine.flat.vector, vector)


def test_other_errors_are_not_taken_for_lack_of_memory(monkeypatch):
    engine, points, x, y = whole_batches()
    engine.record(points, x, y)
    memory = Memory(monkeypatch, 0, RuntimeError, "shapes cannot be multiplied")
    with pytest.raises(RuntimeError, match="shapes cannot"):
        engine.clipped_sum(points, [(x, y)], clip_of("threshold"))
    assert memory.refused == [6, 6]  # the second time by plain autograd, without books


def test_what_fits_is_part_of_the_state(monkeypatch):
    engine, points, x, y = whole_batches()
    engine.record(points, x, y)
    memory = Memory(monkeypatch, 3)
    first, *_ = engine.clipped_sum(points, [(x, y)], clip_of("threshold"))
    resumed, _, _, _ = whole_batches()
    resumed.load_state_dict(engine.state_dict())
    memory.refused.clear()
    again, *_ = resumed.clipped_sum(points, [(x, y)], clip_of("threshold"))
    assert memory.refused == []
    assert torch.equal(first, again)


@pytest.mark.parametrize("p", [0.0, 0.4])
@pytest.mark.parametrize("training", [True, False])
def test_models_that_draw_at_random_are_known(p, training):
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 8), nn.Dropout(p), nn.Linear(8, 3)).train(training)
    engine = PerSampleGradients(model, FlatParameters(model), per_sample_loss)
    x, y = torch.rand(5, 4), torch.tensor([0, 1, 2, 0, 1])
    state = torch.get_rng_state()
    way = engine.way([Point(1.0, engine.flat.vector)], x, y)
    assert isinstance(way, Books)
    assert way.draws == (training and p > 0)
    assert torch.equal(torch.get_rng_state(), state)
