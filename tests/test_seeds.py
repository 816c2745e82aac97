"""Several seeds in one pass: what each gets is what it would have got alone, and none can change another."""

import importlib
import random
from contextlib import ExitStack
from copy import deepcopy
from io import StringIO

import pytest
import torch
import torch.nn.functional as F
from gradient_checks import restricted
from helpers import composed, step_of
from rich.console import Console
from small_models import PassCounter, TimeFirst
from torch import nn
from torch.func import functional_call, grad, vmap

from dpbench.clip import AutomaticClip, ThresholdClip
from dpbench.errors import UserError
from dpbench.filters import Exponential
from dpbench.gradients import FlatParameters, FusedGradients, PerSampleGradients, Request
from dpbench.gradients.summands import BySeed, Factored, Held, summand_of
from dpbench.gradients.uses import GreyPatches, Outer, Patches, Strategy, Term
from dpbench.gradients.weights import StackedWeights
from dpbench.models.layers import WSConv2d
from dpbench.optim import Adam
from dpbench.query import OnePoint, Point, TwoPoint
from dpbench.training import fusing
from dpbench.training.display import Display
from dpbench.training.lockstep import alone, together
from dpbench.training.loop import Metrics
from dpbench.training.losses import per_sample_loss


class Text(nn.Module):
    """Two tables, one of them read with shared positions and used again as the last layer."""

    def __init__(self):
        super().__init__()
        self.words, self.places = nn.Embedding(11, 6, padding_idx=0), nn.Embedding(5, 6)
        self.norm, self.scale = nn.LayerNorm(6), nn.RMSNorm(6)
        self.mix, self.last = nn.Linear(6, 6, bias=False), nn.Linear(6, 11)
        self.last.weight = self.words.weight

    def forward(self, ids):
        x = self.norm(self.words(ids) + self.places(torch.arange(5).unsqueeze(0)))
        return self.last(self.scale(torch.tanh(self.mix(x))).mean(1))


class Convolutions(nn.Sequential):
    """Padding of every kind, groups, dilation, one dimension, and a group norm of what is not contiguous."""

    def __init__(self):
        super().__init__(
            nn.Conv2d(2, 4, 3, padding="same", padding_mode="reflect"),
            nn.Tanh(),
            nn.Conv2d(4, 8, (3, 2), stride=2, padding=1, groups=2, bias=False),
            Transposed(),
            nn.GroupNorm(2, 8),
            nn.Flatten(2),
            nn.Conv1d(8, 4, 3, dilation=2),
            nn.GroupNorm(2, 4, affine=False),
            nn.Flatten(),
            nn.LazyLinear(3),
        )
        self(torch.zeros(1, 2, 8, 8))


class Standardised(nn.Sequential):
    def __init__(self):
        super().__init__(WSConv2d(2, 4, 3), nn.Tanh(), WSConv2d(4, 6, 3, stride=2), nn.Flatten(), nn.Linear(24, 3))


class Transposed(nn.Module):
    def forward(self, x):
        return x.transpose(2, 3)


def of_config(*overrides):
    config = composed(*overrides)
    data = config.dataset
    return lambda: config.model.build(data), (data.channels, data.height, data.width), data.classes


SMALL_RESNET = ("dataset=cifar10", "model=wrn_16_4", "model.depth=10", "model.width=1")
MODELS = {
    "linear": of_config("dataset=mnist", "model=linear"),
    "mlp": of_config("model=mlp"),
    "cnn_small": of_config("dataset=mnist", "model=cnn_small"),
    "cnn5": of_config("dataset=mnist", "model=cnn5"),
    "wide_resnet": of_config(*SMALL_RESNET),
    "standardised": (Standardised, (2, 8, 8), 3),
    "convolutions": (Convolutions, (2, 8, 8), 3),
    "text": (Text, None, 11),
}
SLOW = ("cnn5", "wide_resnet")
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-5}
CLIPS = {"flat": AutomaticClip(), "per_layer": ThresholdClip(scope="per_layer")}


def built(name, seed, dtype=torch.float64):
    """A model all of whose parameters depend on the seed."""
    make, _, _ = MODELS[name]
    torch.manual_seed(seed)
    model = make()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model.to(dtype).train()


def samples(name, count, seed, dtype=torch.float64):
    _, shape, classes = MODELS[name]
    torch.manual_seed(1000 + seed)
    inputs = torch.randint(11, (count, 5)) if shape is None else torch.randn(count, *shape, dtype=dtype)
    return inputs, torch.randint(classes, (count,))


class Seeds:
    """Engines of several seeds of a model, their points and their batches, in micro-batches of at most 4."""

    def __init__(self, name, sizes, points=1, clip="flat", dtype=torch.float64, threshold=0.5, rows=1000):
        self.models = [built(name, seed, dtype) for seed in range(len(sizes))]
        settings = {"per_layer": clip == "per_layer"}
        flats = [FlatParameters(model) for model in self.models]
        self.engines = [
            PerSampleGradients(model, flat, per_sample_loss, **settings)
            for model, flat in zip(self.models, flats, strict=True)
        ]
        self.batches = [samples(name, size, seed, dtype) for seed, size in enumerate(sizes)]
        self.clip, self.threshold, self.count = CLIPS[clip], threshold, points
        self.fused = FusedGradients(self.models[0], flats[0], per_sample_loss, rows=rows, **settings)

    def points(self, seed):
        here = self.engines[seed].flat.vector
        torch.manual_seed(seed)
        there = here + 0.05 * torch.randn_like(here)
        return [Point(1.0, here)] if self.count == 1 else [Point(1.4, there), Point(-0.4, here)]

    def requests(self):
        return [self.request(seed) for seed in range(len(self.engines))]

    def request(self, seed):
        inputs, targets = self.batches[seed]
        batch = zip(inputs.split(4), targets.split(4), strict=True) if len(targets) else iter(())
        bound = self.threshold * (1 + seed)  # thresholds that follow the data differ between seeds
        return Request(self.engines[seed], self.points(seed), batch, lambda norms: self.clip.factors(norms, bound))


def assert_same(got, want, dtype=torch.float64):
    assert float((got.total - want.total).norm()) <= TOLERANCE[dtype] * float(want.total.norm())
    for mine, other in ((got.losses, want.losses), (got.norms, want.norms)):
        torch.testing.assert_close(mine, other, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.fixture
def no_lone_pass(monkeypatch):
    """Nothing falls back to a pass of its own."""
    monkeypatch.setattr("dpbench.gradients.fused._Share.compute", lambda *_: pytest.fail("computed alone"))


@pytest.mark.parametrize(
    ("name", "points", "clip"),
    [(name, 2, "per_layer") for name in MODELS] + [(name, 1, "flat") for name in MODELS if name not in SLOW],
)
def test_clipped_sums_of_several_seeds_are_those_of_each_alone(name, points, clip, no_lone_pass):
    seeds = Seeds(name, [2, 1] if name in SLOW else [4, 2, 3], points, clip)
    for got, want in zip(seeds.fused.clipped_sums(seeds.requests()), seeds.requests(), strict=True):
        assert_same(got, want.alone())


@pytest.mark.parametrize("name", ["linear", "mlp", "cnn_small", "standardised"])
def test_clipped_sums_in_float32(name, no_lone_pass):
    seeds = Seeds(name, [4, 3], 2, dtype=torch.float32)
    for got, want in zip(seeds.fused.clipped_sums(seeds.requests()), seeds.requests(), strict=True):
        assert_same(got, want.alone(), torch.float32)


@pytest.mark.parametrize("name", ["mlp", "convolutions"])
def test_clipped_sums_equal_those_of_torch_func(name, no_lone_pass):
    seeds = Seeds(name, [4, 1, 3], 2, threshold=0.1)

    def of_one(parameters, sample, target):
        output = functional_call(seeds.models[0], parameters, (sample.unsqueeze(0),))
        return F.cross_entropy(output, target.unsqueeze(0))

    for seed, (total, losses, *_) in enumerate(seeds.fused.clipped_sums(seeds.requests())):
        flat, (inputs, targets) = seeds.engines[seed].flat, seeds.batches[seed]
        mixture = 0
        for weight, iterate in seeds.points(seed):
            parameters = dict(zip(flat.names, flat.views(iterate.clone()), strict=True))
            rows = vmap(grad(of_one), (None, 0, 0))(parameters, inputs, targets)
            mixture = mixture + weight * torch.cat([rows[name].flatten(1) for name in flat.names], 1)
        norms = mixture.norm(dim=1, keepdim=True)
        want = (mixture * 0.1 * (1 + seed) / (norms + CLIPS["flat"].stabiliser)).sum(0)
        torch.testing.assert_close(total, want, rtol=1e-9, atol=1e-12)
        assert len(losses) == len(targets)


@pytest.mark.parametrize("rows", [1, 7, 12])
@pytest.mark.parametrize("sizes", [[9, 1, 0], [0, 0, 0], [0, 5, 0], [4, 4, 4], [13, 2, 6]])
def test_batches_of_any_size_and_any_number_of_rows_at_once(sizes, rows):
    seeds = Seeds("mlp", sizes, rows=rows)
    for got, want in zip(seeds.fused.clipped_sums(seeds.requests()), seeds.requests(), strict=True):
        assert_same(got, want.alone())


def test_a_batch_without_samples_adds_zero():
    total, losses, *_ = Seeds("mlp", [0, 3]).fused.clipped_sums(Seeds("mlp", [0, 3]).requests())[0]
    assert (float(total.abs().sum()), len(losses)) == (0.0, 0)


def test_seeds_whose_points_weigh_differently_are_computed_all_the_same():
    seeds = Seeds("mlp", [3, 3], 2)

    def requests():
        first, second = seeds.requests()
        return [first, second._replace(points=second.points[:1])]

    for got, want in zip(seeds.fused.clipped_sums(requests()), requests(), strict=True):
        assert_same(got, want.alone())


@pytest.mark.parametrize("what", ["apart", "remainder"])
@pytest.mark.filterwarnings("error:seeds computed one by one")  # as they would be once that was found to be wrong
def test_points_clipped_apart_and_what_clips_leave_over_are_computed_all_the_same(what):
    """DP-PMLF as released, and DiceSGD: a pass that seeds share has neither."""
    seeds = Seeds("mlp", [3, 3], 2)
    together, alone = ([request._replace(**{what: True}) for request in seeds.requests()] for _ in range(2))
    for got, request in zip(seeds.fused.clipped_sums(together), alone, strict=True):
        want = request.alone()
        assert_same(got, want)
        if what == "remainder":
            torch.testing.assert_close(got.remainder, want.remainder, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["linear", "convolutions"])
def test_a_broken_sample_adds_nothing_and_changes_no_other_seed(name, broken):
    good, bad = Seeds(name, [4, 4, 2]), Seeds(name, [4, 4, 2])
    bad.batches[1][0][2].fill_(broken)
    of_good, of_bad = (seeds.fused.clipped_sums(seeds.requests()) for seeds in (good, bad))
    for seed in (0, 2):
        assert torch.equal(of_good[seed][0], of_bad[seed][0])
        assert torch.equal(of_good[seed][1], of_bad[seed][1])
    want, *_ = bad.request(1).alone()
    assert torch.equal(of_bad[1][0], want)
    assert want.isfinite().all()


def test_a_seed_whose_parameters_are_not_finite_changes_no_other_one():
    good, bad = Seeds("cnn_small", [3, 3, 1]), Seeds("cnn_small", [3, 3, 1])
    bad.engines[0].flat.vector.fill_(float("nan"))  # the one whose model all rows go through
    of_good, of_bad = (seeds.fused.clipped_sums(seeds.requests()) for seeds in (good, bad))
    assert float(of_bad[0][0].abs().sum()) == 0
    for seed in (1, 2):
        assert torch.equal(of_good[seed][0], of_bad[seed][0])


def test_an_error_in_one_seed_is_its_own():
    seeds = Seeds("mlp", [3, 3, 3])
    want = seeds.request(0).alone()
    seeds.batches[1][1][0] = 99  # no such class
    with pytest.warns(UserWarning, match="seeds computed one by one"):
        first, second, third = seeds.fused.clipped_sums(seeds.requests())
    assert isinstance(second, Exception)
    assert_same(first, want)
    assert_same(third, seeds.request(2).alone())


def test_a_batch_that_can_not_be_read_is_an_error_of_its_seed():
    seeds = Seeds("mlp", [6, 6])

    def torn():
        yield next(seeds.request(0).batch)
        raise OSError("torn")

    first, second = seeds.fused.clipped_sums([seeds.request(0)._replace(batch=torn()), seeds.request(1)])
    assert isinstance(first, OSError)
    assert_same(second, seeds.request(1).alone())


def test_where_memory_runs_out_fewer_rows_are_computed_at_once(monkeypatch):
    seeds = Seeds("mlp", [9, 7, 4], rows=12)
    original = FusedGradients.record_together

    def scarce(self, points, inputs, *rest):
        if len(inputs) > 6:
            raise torch.OutOfMemoryError("no memory")
        return original(self, points, inputs, *rest)

    monkeypatch.setattr(FusedGradients, "record_together", scarce)
    for got, want in zip(seeds.fused.clipped_sums(seeds.requests()), seeds.requests(), strict=True):
        assert_same(got, want.alone())
    assert seeds.fused.rows == 6


@pytest.mark.parametrize("kind", ["hold", "pass", "gram"])
@pytest.mark.parametrize("name", ["text", "convolutions", "standardised"])
def test_every_strategy_gives_the_same(name, kind, monkeypatch):
    seeds = Seeds(name, [3, 2], 2)
    used = set()
    original = BySeed.__init__, Held.__init__, Factored.__init__
    for i, of in enumerate((BySeed, Held, Factored)):
        monkeypatch.setattr(of, "__init__", lambda self, *a, i=i, of=of: (used.add(of), original[i](self, *a))[1])
    restricted(seeds.fused, {kind})
    for got, want in zip(seeds.fused.clipped_sums(seeds.requests()), seeds.requests(), strict=True):
        assert_same(got, want.alone())
    assert used >= ({Held} if kind == "hold" else {Factored})


@pytest.mark.parametrize("kind", ["hold", "pass", "gram"])
def test_samples_in_a_summand_for_each_seed_are_kept_and_added_up_as_those_of_one(kind):
    a, b, factors = torch.randn(6, 5, 4).double(), torch.randn(6, 5, 3).double(), torch.randn(6).double()
    use, strategy = Outer(((3, 4),)), Strategy(kind)
    by_seed, of_one = BySeed([summand_of(use, strategy, 1) for _ in range(2)]), summand_of(use, strategy, 1)
    for summand in (by_seed, of_one):
        summand.add(Term(a, b), use)
    for own, want in zip(by_seed.squares(), of_one.squares(), strict=True):
        torch.testing.assert_close(own, want.expand(6))
    kept = torch.tensor([True, False, True, True, True, False])
    by_seed.keep(kept)
    total = torch.zeros(3, 4).double()
    by_seed.add_weighted_sum(factors, [total])
    torch.testing.assert_close(total, torch.einsum("n,ntp,ntd->pd", factors * kept, b, a))


# What a GPU computes differently, on a CPU.


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv2d(4, 6, 3, padding=1),
        nn.Conv2d(4, 6, (2, 3), stride=2, groups=2, padding="valid"),
        nn.Conv2d(4, 6, 3, padding=2, padding_mode="circular"),
    ],
)
def test_grouped_convolutions_are_those_of_each_seed(layer, bias):
    layer = deepcopy(layer).double()
    if not bias:
        layer.bias = None
    values = {parameter: torch.randn(3, *parameter.shape, dtype=torch.float64) for parameter in layer.parameters()}
    x = torch.randn(6, 4, 7, 8, dtype=torch.float64)
    got = StackedWeights(values, 3, grouped=True).convolution(layer, x, values[layer.weight], layer.bias)
    for seed, rows in enumerate(x.chunk(3)):
        own = {name: values[parameter][seed] for name, parameter in layer.named_parameters()}
        torch.testing.assert_close(got[2 * seed : 2 * seed + 2], functional_call(layer, own, (rows,)))


@pytest.mark.parametrize(("kind", "groups", "channels"), [(Patches, 2, 4), (GreyPatches, 1, 1)])
def test_grouped_weighted_sums_are_those_of_each_seed(kind, groups, channels):
    use = kind(((6, 2, 3, 3),), stride=(2, 1), padding=(1, 1), groups=groups)
    a, b = torch.randn(6, 2, channels, 7, 8).double(), torch.randn(6, 2, 6, 4, 8).double()
    factors, got = torch.rand(3, 2).double(), torch.zeros(3, 6, 2, 3, 3).double()
    use.add_grouped_sums(Term(a, b), factors, [got])
    for seed in range(3):
        own, want = slice(2 * seed, 2 * seed + 2), torch.zeros(6, 2, 3, 3).double()
        use.add_weighted_sum(Term(a[own], b[own]), factors[seed], [want])
        torch.testing.assert_close(got[seed], want)


# The comparison with autograd before seeds share a pass.


@pytest.mark.parametrize("name", MODELS)
def test_models_of_known_layers_pass_the_comparison(name):
    seeds = Seeds(name, [2], dtype=torch.float32)
    assert seeds.fused.objection(*samples(name, 4, 0, torch.float32)) is None


def _neighbours(values):
    return values.roll(1, 0)


MUTANTS = {
    "weights of the neighbour": ("weights.StackedWeights.of", lambda of: lambda self, p: _neighbours(of(self, p))),
    "gains of the neighbour": (
        "weights.StackedWeights.repeated",
        lambda of: lambda self, p, rows: of(self, p, rows).roll(rows // self.seeds, 0),
    ),
    "sums go to the neighbour": (
        "uses.Outer.add_weighted_sums",
        lambda of: lambda self, term, factors, onto: of(self, term, factors.roll(1, 0), onto),
    ),
    "sums go to all": (
        "uses.Outer.add_weighted_sums",
        lambda of: lambda self, term, factors, onto: (of(self, term, factors, onto), onto[0].add_(onto[0].roll(1, 0))),
    ),
    "norms of the neighbour": (
        "tape.Tape.norms",
        lambda of: lambda self: of(self) if self._seeds is None else of(self).roll(3, 1),
    ),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_what_mixes_seeds_is_found_out(mutant, monkeypatch):
    name, change = MUTANTS[mutant]
    path, attribute = name.rsplit(".", 1)
    owner = _resolved(f"dpbench.gradients.{path}")
    seeds = Seeds("cnn5" if "gains" in mutant else "mlp", [2])
    kept = getattr(owner, attribute)
    monkeypatch.setattr(owner, attribute, change(kept))
    objection = seeds.fused.objection(*samples("cnn5" if "gains" in mutant else "mlp", 4, 0))
    assert objection is not None
    assert "deviate from autograd's" in objection


def _resolved(path):
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


class Scaled(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Flatten(), nn.Linear(64, 10))
        self.gain = nn.Parameter(torch.ones(10))

    def forward(self, x):
        return super().forward(x) * self.gain


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(8, 10, batch_first=True)

    def forward(self, x):
        return self.lstm(x.squeeze(1))[0].mean(1)


class LayerDrop(nn.Sequential):
    def forward(self, x):
        x = x.flatten(1)
        return self[0](x if random.random() < 0.5 else x.tanh())


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (Scaled(), "'gain' is used outside"),
        (Recurrent(), "LSTM takes one seed at a time"),
        (nn.Sequential(nn.Flatten(), nn.Dropout(1e-6), nn.Linear(64, 10)), "draws random numbers"),
        (LayerDrop(nn.Linear(64, 10)), "draws random numbers"),
        (PassCounter(), "a pass changes the model's buffer 'passes', which each seed has its own of"),
    ],
)
def test_models_that_can_not_share_a_pass_say_why(model, reason):
    fused = FusedGradients(model, FlatParameters(model), per_sample_loss)
    images, before = torch.randn(4, 1, 8, 8), torch.get_rng_state()
    assert reason in fused.objection(images, torch.arange(4))
    assert torch.equal(torch.get_rng_state(), before)


class Turning(nn.Module):
    """Past a size of its inputs, or of its batch, its layer is not what computes its output."""

    def __init__(self, of_batch):
        super().__init__()
        self.inner, self.head, self.of_batch = nn.Linear(6, 6), nn.Linear(6, 3), of_batch

    def forward(self, x):
        y = self.inner(x)
        if self.of_batch:
            return self.head(torch.tanh(y - y.mean(0).detach() if len(x) > 40 else y))
        large = x.abs().amax(1, keepdim=True) > 3
        if large.any():
            y = torch.where(large, F.linear(x.tanh(), self.inner.weight), y)
        return self.head(torch.tanh(y))


def fused_of(build, seeds=3):
    engines = []
    for seed in range(seeds):
        torch.manual_seed(seed)
        model = build()
        engines.append(PerSampleGradients(model, FlatParameters(model), per_sample_loss))
    return engines, FusedGradients(engines[0].model, engines[0].flat, per_sample_loss)


def sums_of(engines, fused, x, y):
    clip = AutomaticClip()
    requests = [
        Request(engine, [Point(1.0, engine.flat.vector)], [(x, y)], lambda norms: clip.factors(norms, 1.0))
        for engine in engines
    ]
    return fused.clipped_sums(requests), requests


def test_shared_passes_are_compared_again_on_the_way():
    engines, fused = fused_of(lambda: Turning(of_batch=False))
    torch.manual_seed(9)
    x, y = torch.randn(20, 6).clamp(-2, 2), torch.randint(3, (20,))
    assert fused.objection(x[:9], y[:9]) is None
    for step in range(4):
        if step > 0:
            x[0, 0] = 9.0
        found, _ = sums_of(engines, fused, x, y)
        assert [isinstance(one, UserError) for one in found] == [step == 3] * 3
    assert "are wrong in this one" in str(found[0])


@pytest.mark.parametrize("what", ["total", "norms"])  # of rows in another order the sum is right, but for clipping
@pytest.mark.parametrize("off", [{4}, {4, 5}, {5}])
def test_a_shared_pass_that_differs_once_is_computed_alone_and_the_next_is_compared(monkeypatch, off, what):
    """As where a sample is on the edge of a ReLU; the fourth pass is one of those that are compared."""
    engines, fused = fused_of(lambda: nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)))
    x, y = torch.randn(8, 6), torch.randint(3, (8,))
    together, passes = FusedGradients._together, iter(range(1, 10))

    def otherwise(self, pieces):
        number, found = next(passes), together(self, pieces)
        if number in off:
            found[1] = found[1]._replace(**{what: 1.5 * getattr(found[1], what)})
        return found

    monkeypatch.setattr(FusedGradients, "_together", otherwise)
    for number in range(1, 7):
        found, requests = sums_of(engines, fused, x, y)
        if number == 5 and off == {4, 5}:
            assert [isinstance(one, UserError) for one in found] == [False, True, False]
            assert "a pass that several seeds share gives one what it would not get alone" in str(found[1])
            return
        if number == 5 and off == {5}:  # which nobody compares
            continue
        for got, request in zip(found, requests, strict=True):
            assert_same(got, request.alone(), torch.float32)


def test_seeds_whose_rows_mix_where_they_are_many_go_on_one_by_one():
    engines, fused = fused_of(lambda: Turning(of_batch=True))
    torch.manual_seed(9)
    x, y = torch.randn(20, 6), torch.randint(3, (20,))
    assert fused.objection(x[:9], y[:9]) is None
    with pytest.warns(UserWarning, match="seeds computed one by one"):
        found, requests = sums_of(engines, fused, x, y)
    for _ in range(2):
        for got, request in zip(found, requests, strict=True):
            assert_same(got, request._replace(batch=[(x, y)]).alone(), torch.float32)
        found, requests = sums_of(engines, fused, x, y)


@pytest.mark.filterwarnings("ignore:falling back to materialised")
def test_seeds_whose_rows_mix_in_samples_of_another_shape_go_on_one_by_one():
    engines, fused = fused_of(lambda: TimeFirst(6, 6))
    torch.manual_seed(9)
    x, y = torch.randn(6, 2, 6), torch.randint(3, (6,))
    assert fused.objection(x[:, :1], y) is None
    sums_of(engines, fused, x[:, :1], y)
    with pytest.warns(UserWarning, match="seeds computed one by one"):
        found, requests = sums_of(engines, fused, x, y)
    for got, request in zip(found, requests, strict=True):
        assert_same(got, request._replace(batch=[(x, y)]).alone(), torch.float32)


def test_models_that_differ_in_what_they_do_not_train_are_not_alike():
    first, second = (nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)) for _ in range(2))
    assert fusing._alike([first, second])
    for model in (first, second):
        model[0].requires_grad_(False)
    assert not fusing._alike([first, second])
    second[0].load_state_dict(first[0].state_dict())
    assert fusing._alike([first, second])
    for model, mean in ((first, 0.0), (second, 1.0)):
        model.register_buffer("mean", torch.tensor(mean))
    assert not fusing._alike([first, second])


# Steps.


def private_steps(name, query, dtype):
    """A step for each of three seeds, with noise of its own."""
    steps = []
    for seed in range(3):
        stages = {"clip": AutomaticClip(), "filter": Exponential(kappa=0.7), "optim": Adam(lr=0.01)}
        releases = {"noise_multiplier": 0.5, "sampling_rate": 0.1, "expected_batch": 3.0, "steps": 4}
        steps.append(step_of(built(name, seed, dtype), query=deepcopy(query), seed=seed, **stages, **releases))
    return steps


def taken(step, name, seed, sizes, dtype):
    for t, size in enumerate(sizes):
        inputs, targets = samples(name, size, 10 * seed + t, dtype)
        yield from step.take(zip(inputs.split(2), targets.split(2), strict=True) if size else [])
    return step.gradients.flat.vector


SIZES = ([3, 1, 0, 2], [0, 4, 0], [2, 3])  # of each seed, step by step; some stop early


@pytest.mark.parametrize(
    ("name", "query", "dtype"),
    [
        ("linear", OnePoint(), torch.float64),
        ("linear", TwoPoint(), torch.float32),
        ("mlp", TwoPoint(), torch.float64),
        ("cnn_small", TwoPoint(), torch.float64),
        ("cnn_small", OnePoint(), torch.float32),
        pytest.param("cnn5", TwoPoint(), torch.float64, marks=pytest.mark.slow),
        pytest.param("wide_resnet", TwoPoint(), torch.float64, marks=pytest.mark.slow),
    ],
)
def test_runs_in_step_end_where_separate_ones_do(name, query, dtype):
    found = []
    for how in ("alone", "together"):
        steps = private_steps(name, query, dtype)
        runs = [taken(step, name, seed, SIZES[seed], dtype) for seed, step in enumerate(steps)]
        gradients = steps[0].gradients
        fused = FusedGradients(gradients.model, gradients.flat, per_sample_loss)
        found.append([alone(run) for run in runs] if how == "alone" else together(runs, fused.clipped_sums))
        releases = [len(step.ledger) for step in steps]
        assert releases == [len(SIZES[seed]) for seed in range(3)]
    for separate, fused_one in zip(*found, strict=True):
        assert float((separate - fused_one).norm()) <= TOLERANCE[dtype] * float(separate.norm())


def test_what_a_run_lets_out_is_raised_when_the_others_have_ended():
    ended = []

    def run_of(seed):
        for _ in range(2 + seed):
            yield seed
            if seed == 0:
                raise OSError("disk full")
        ended.append(seed)

    with pytest.raises(OSError, match="disk full"):
        together([run_of(0), run_of(1), run_of(2)], lambda requests: requests)
    assert ended == [1, 2]


def test_seeds_that_end_one_after_the_other_share_their_last_line(monkeypatch):
    monkeypatch.setattr("dpbench.training.display.SECONDS_BETWEEN_LINES", -1)
    shown = StringIO()
    with Display(Console(file=shown, width=160), steps=2) as display, ExitStack() as runs:
        ends = [ExitStack() for _ in range(3)]
        for end in ends:
            end.enter_context(display.watching())
            runs.enter_context(end)
        for end, accuracy in zip(ends, (0.5, 0.75, 0.7), strict=True):
            display.evaluation(Metrics(2, 1.0, accuracy, 1, 0.5, 1.0, accuracy, 3.0, 0.1, 1, 1.0, (accuracy,)))
            end.close()
    assert shown.getvalue().splitlines() == [
        "  step 2/2  loss 0.650  accuracy 65.00 % (50.00 to 75.00, 3 seeds)  eps 3.000  0 s left",
    ]


def test_seeds_share_a_line_with_their_mean_and_range(monkeypatch):
    monkeypatch.setattr("dpbench.training.display.SECONDS_BETWEEN_LINES", -1)
    shown = StringIO()
    with Display(Console(file=shown, width=160), steps=4) as display:
        first, second = display.watching(), display.watching()
        with first:
            with second:
                for accuracy in (0.5, 0.75):
                    display.evaluation(Metrics(2, 1.0, accuracy, 1, 0.5, 1.0, accuracy, 3.0, 0.1, 1, 1.0, (accuracy,)))
            display.evaluation(Metrics(4, 2.0, 0.25, 1, 0.5, 1.0, 0.5, 4.0, 0.1, 1, 2.0, (0.5,)))
    assert shown.getvalue().splitlines() == [
        "  step 2/4  loss 0.625  accuracy 62.50 % (50.00 to 75.00, 2 seeds)  eps 3.000  1 s left",
        "  step 4/4  loss 0.250  accuracy 50.00 %  eps 4.000  0 s left",
    ]
