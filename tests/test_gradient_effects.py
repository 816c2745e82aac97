"""Losses and passes with effects, and parameters that change otherwise than by their vector."""

import threading

import pytest
import torch
import torch.nn.functional as F
from gradient_checks import assert_right, cross_entropy, engine_in_float64
from small_models import CLASSES, TOKENS, CountingPasses, TokenClassifier
from torch import nn

from dpbench.errors import UserError
from dpbench.gradients import FlatParameters, PerSampleGradients
from dpbench.gradients.fused import FusedGradients
from dpbench.gradients.request import Request
from dpbench.gradients.way import Books, Rows
from dpbench.query import Point

pytestmark = [
    pytest.mark.usefixtures("seeded"),
    pytest.mark.filterwarnings("ignore:falling back to materialised"),
]


def regularised(model, share=0.1):
    return lambda outputs, targets: (
        cross_entropy(outputs, targets) + share * sum(parameter.square().sum() for parameter in model.parameters())
    )


def test_a_loss_that_reads_parameters_keeps_that_part():
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
    assert_right(engine_in_float64(model, regularised(model)), (torch.randn(4, 6).double(), torch.randint(3, (4,))))


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


class Renormalising(TokenClassifier):
    def hidden(self, ids):
        return F.embedding(ids, self.embedding.weight, max_norm=0.5).mean(1)


class Shrinking(TokenClassifier):
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


class CentringByTheFirst(nn.Module):
    """Centres by the mean of the first batch that it sees, in any pass or in one with gradients."""

    def __init__(self, always):
        super().__init__()
        self.layer, self.always, self.mean = nn.Linear(6, 3), always, None

    def forward(self, x):
        if self.mean is None and (self.always or torch.is_grad_enabled()):
            self.mean = x.detach().mean(0)
        return self.layer(x if self.mean is None else x - self.mean)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("always", [True, False])
def test_a_model_that_keeps_something_of_its_first_batch_alone_is_refused(always, shared):
    """Each time, since it has not seen a sample by then."""
    engine = engine_in_float64(CentringByTheFirst(always).train())
    x, y = torch.randn(5, 6).double(), torch.randint(3, (5,))
    if shared:
        fused = FusedGradients(engine.model, engine.flat, cross_entropy)
        with pytest.raises(UserError, match="another one after a pass of other samples"):
            fused.objection(x, y)
    for _ in range(2):
        with pytest.raises(UserError, match="another one after a pass of other samples"):
            engine.record([Point(1.0, engine.flat.vector)], x, y)


class Loudest(nn.Module):
    """Keeps the largest number that it has seen in a buffer, or in what is none and is not read for the next."""

    def __init__(self, buffer):
        super().__init__()
        self.layer = nn.Linear(6, 3)
        if buffer:
            self.register_buffer("most", torch.zeros(()))
        else:
            self.most = torch.zeros(())

    def forward(self, x):
        read = 0 if "most" in self._buffers else self.most.to(x.dtype)
        out = self.layer(x * (1 + read))
        self.most = torch.maximum(self.most, x.detach().abs().max().to(self.most.dtype))
        return out


@pytest.mark.parametrize("count", [1, 2, 5])
@pytest.mark.parametrize(
    ("model", "where"),
    [
        (lambda: Loudest(buffer=True), "in the buffer 'most'"),
        (lambda: Loudest(buffer=False), "another one after a pass of other samples"),
        (lambda: CentringByTheFirst(True), "another one after a pass of other samples"),
    ],
)
def test_samples_that_are_all_alike_hide_nothing_that_is_kept_of_them(model, where, count):
    """As the only one of a micro-batch is, which is compared with itself."""
    engine = engine_in_float64(model().train())
    x = torch.randn(1, 6).double().expand(count, 6).clone()
    with pytest.raises(UserError, match=where):
        engine.record([Point(1.0, engine.flat.vector)], x, torch.zeros(count, dtype=torch.int64))


class Reading(nn.Module):
    """Takes ids of which the first is 1, and says so of others; in training it keeps the largest one, or nothing."""

    def __init__(self, keeps):
        super().__init__()
        self.table, self.keeps = nn.Embedding(9, 3), keeps
        self.register_buffer("most", torch.zeros((), dtype=torch.int64))

    def forward(self, ids):
        if not bool((ids[:, 0] == 1).all()):
            raise ValueError("a text begins with 1")
        if self.keeps:
            self.most = torch.maximum(self.most, ids.max())
        return self.table(ids).sum(1)


def test_a_model_need_not_take_what_samples_are_compared_with():
    ids, targets = torch.tensor([[1, 4, 2], [1, 8, 3], [1, 2, 2], [1, 5, 5]]), torch.tensor([0, 2, 1, 1])
    assert_right(engine_in_float64(Reading(keeps=False)), (ids, targets))
    engine = engine_in_float64(Reading(keeps=True).train())
    with pytest.raises(UserError, match="in the buffer 'most'"):
        engine.record([Point(1.0, engine.flat.vector)], ids[[0, 2, 1, 3]], targets)


class Distilled(nn.Module):
    """Learns from a teacher that is none of its modules."""

    def __init__(self, teacher):
        super().__init__()
        self.layer, self.teacher = nn.Linear(6, 3), [teacher]

    def forward(self, x):
        return self.layer(x) - 0.5 * self.teacher[0](x)


def beside_the_model(place):
    """A model, its loss, and tensors that both depend on beside the parameters."""
    teacher, temperature = nn.Linear(6, 3).double(), torch.ones((), dtype=torch.float64, requires_grad=True)
    if place == "model":
        return Distilled(teacher), cross_entropy, list(teacher.parameters())
    return nn.Linear(6, 3), lambda outputs, targets: cross_entropy(outputs / temperature, targets), [temperature]


@pytest.mark.parametrize("place", ["model", "loss"])
def test_no_gradient_of_all_samples_is_left_outside_of_the_model(place):
    model, loss, others = beside_the_model(place)
    engine = engine_in_float64(model.train(), loss)
    x, y = torch.randn(5, 6).double(), torch.randint(3, (5,))
    with pytest.raises(UserError, match=r"a gradient by a tensor of shape .* that is no parameter of the model"):
        engine.record([Point(1.0, engine.flat.vector)], x, y)
    assert all(other.grad is None for other in others)
    for other in others:
        other.requires_grad_(False)
    assert_right(engine, (x, y))


class OfInputGradients(nn.Module):
    """Adds the gradient of an energy by the input, which each pass lets require one."""

    def __init__(self):
        super().__init__()
        self.inner, self.head = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x):
        with torch.enable_grad():
            x.requires_grad_()
            energy = x.pow(4).sum()
            (force,) = torch.autograd.grad(energy, x, create_graph=True)
        return self.head(torch.tanh(self.inner(x)) + force)


def test_what_a_pass_makes_for_itself_may_require_a_gradient():
    engine = engine_in_float64(OfInputGradients())
    x, y = torch.randn(5, 6).double(), torch.randint(3, (5,))
    engine.record([Point(1.0, engine.flat.vector)], x, y)
    assert isinstance(engine._way, Books)
    assert_right(engine, (x.detach(), y))


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
    class Summing(TokenClassifier):
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


@pytest.mark.parametrize("cut", [lambda w: w, lambda w: w[1:].t(), lambda w: w.view(-1)[2:4]])
def test_nor_may_a_plain_attribute_be(cut):
    """It would stay as it was while training moves the parameter."""
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
    model[1].also = cut(model[0].weight.detach())
    with pytest.raises(UserError, match=r"'0\.weight' and '1\.also' of the model share memory"):
        FlatParameters(model)
    model[1].also = model[1].also.clone()
    assert len(FlatParameters(model)) == 17


def test_attributes_that_follow_their_parameter_may_share_its_memory():
    """The parameter itself, and the weight that spectral norm sets anew in each pass."""
    model = nn.Sequential(nn.utils.spectral_norm(nn.Linear(4, 4)), nn.Linear(4, 3)).eval()
    assert model[0].weight.data_ptr() == model[0].weight_orig.data_ptr()
    object.__setattr__(model[1], "also", model[1].weight)
    engine = engine_in_float64(model)
    assert_right(engine, (torch.randn(5, 4).double(), torch.randint(3, (5,))))
    engine.flat.vector.add_(1.0)
    assert torch.equal(model[1].also, model[1].weight)


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


# Parameters outside of known layers, which others stand for within a pass


class ByTwoNames(nn.Module):
    """Has a parameter under two names, the second of which nothing uses."""

    def __init__(self):
        super().__init__()
        self.layer, self.head = nn.Linear(6, 6), nn.Linear(6, 3)
        self.scale, self.shift = nn.Parameter(torch.randn(6)), nn.Parameter(torch.randn(6))
        self.also = self.scale

    def forward(self, x):
        return self.head(torch.tanh(self.layer(x) * self.scale + self.shift))


def test_a_parameter_of_two_names_keeps_its_place():
    """Else the model would seem to train other parameters in the second batch."""
    model = ByTwoNames()
    names = list(dict(model.named_parameters()))
    engine = engine_in_float64(model)
    for _ in range(3):
        assert_right(engine, (torch.randn(5, 6).double(), torch.randint(3, (5,))))
    assert isinstance(engine._way, Books)
    assert list(dict(model.named_parameters())) == names


class RecurrentInEvaluation(nn.Module):
    """Puts a layer behind another one that keeps its parameters in two places, in evaluation alone."""

    def __init__(self):
        super().__init__()
        self.layer, self.recurrent, self.head = nn.Linear(6, 6), nn.GRU(6, 6, batch_first=True), nn.Linear(6, 3)

    def forward(self, x):
        h = torch.tanh(self.layer(x))
        return self.head(h if self.training else self.recurrent(h.unsqueeze(1))[0].squeeze(1))


def test_a_layer_that_keeps_its_parameters_twice_has_both_back():
    model = RecurrentInEvaluation().double()
    x, y = torch.randn(5, 6).double(), torch.randint(3, (5,))
    before = model.eval()(x)
    assert_right(engine_in_float64(model.train()), (x, y))
    pairs = zip(model.recurrent._flat_weights, model.recurrent.parameters(), strict=True)
    assert all(one is other for one, other in pairs)
    assert torch.equal(model.eval()(x), before)
