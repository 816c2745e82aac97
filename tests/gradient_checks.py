"""Per-sample gradients against one plain backward pass per sample in float64."""

import copy
import math
import os
import warnings
from typing import NamedTuple

import torch
import torch.nn.functional as F
from hypothesis import settings
from hypothesis import strategies as st
from torch import nn
from torch.func import functional_call, grad, vmap

from dpbench.devices import prepare_device
from dpbench.errors import PlainWarning
from dpbench.gradients import FlatParameters, PerSampleGradients
from dpbench.gradients.choice import Chooser
from dpbench.gradients.way import Books
from dpbench.models.layers import WSConv2d
from dpbench.query import Point

# Where the engine computes; references are computed on the CPU.
DEVICE = torch.device(os.environ.get("DPBENCH_TESTS_DEVICE", "cpu"))
prepare_device(DEVICE)

# Weights of 1, 2 and 4 iterates.
WEIGHTS = {1: (0.8,), 2: (1.4, -0.4), 4: (0.6, -0.9, 1.1, 0.2)}

EXACT = {torch.float64: 1e-9, torch.float32: 1e-5}

FALLBACK = "falling back to materialised per-sample gradients for this model"

SHAPES = settings(derandomize=True, deadline=None, max_examples=14)

seeds = st.integers(0, 2**20)


def cross_entropy(outputs, targets):
    return F.cross_entropy(outputs, targets, reduction="none")


def plain_gradients(model, iterate, inputs, targets, loss=cross_entropy, views=1):
    """Losses (B,) and gradients (B, d) in float64: each sample goes through a copy of the model alone, by autograd."""
    alone = copy.deepcopy(model).double()
    parameters = [p for p in alone.parameters() if p.requires_grad]
    for parameter, piece in zip(parameters, iterate.double().split([p.numel() for p in parameters]), strict=True):
        parameter.data.copy_(piece.view_as(parameter))
    losses, rows = [], []
    for i in range(len(targets)):
        sample = inputs[i] if views > 1 else inputs[i : i + 1]
        value = loss(alone(sample), targets[i : i + 1].repeat_interleave(views, 0)).mean()
        gradients = torch.autograd.grad(value, parameters, allow_unused=True, materialize_grads=True)
        losses.append(value.detach())
        rows.append(torch.cat([g.flatten() for g in gradients]))
    return torch.stack(losses), torch.stack(rows)


def func_gradients(model, flat, iterate, inputs, targets):
    """Gradients (B, d) by torch.func."""

    def loss(vector, sample, target):
        parameters = dict(zip(flat.names, flat.views(vector), strict=True))
        return cross_entropy(functional_call(model, parameters, (sample.unsqueeze(0),)), target.unsqueeze(0))[0]

    return vmap(grad(loss), in_dims=(None, 0, 0))(iterate.clone(), inputs, targets)


def iterates_of(vector, count, spread):
    """The vector and others near it, all of which float32 can represent."""
    others = [vector + spread * torch.randn_like(vector) for _ in range(count - 1)]
    return [point.float().double() for point in (vector, *others)]


def relative(got, want):
    return float((got.double().cpu() - want).norm() / want.norm())


class PlainReference(NamedTuple):
    """What an engine is compared with: `plain_gradients` at some iterates."""

    targets: torch.Tensor
    iterates: list
    plain: list


def reference_of(model, inputs, targets=None, *, loss=cross_entropy, views=1, points=(1, 2, 4), spread=0.1):
    """By what `assert_exact` is given."""
    model.double()
    inputs = inputs.float().double() if inputs.is_floating_point() else inputs
    targets = torch.randint(3, (len(inputs),)) if targets is None else targets
    iterates = iterates_of(FlatParameters(model).vector, max(points), spread)
    return PlainReference(
        targets, iterates, [plain_gradients(model, at, inputs, targets, loss, views) for at in iterates]
    )


def assert_exact(
    model,
    inputs,
    targets=None,
    *,
    reference=None,
    loss=cross_entropy,
    views=1,
    points=(1, 2, 4),
    strategies=None,
    per_layer=None,
    spread=0.1,
    books=True,
    checked=True,
    tolerances=EXACT,
):
    """Norms, random weighted sums, clipped sums and losses of the engine equal those of `plain_gradients`.

    Args:
        model: any model.
        inputs: shape (B, ...), or (B, K, ...) with K views.
        targets: shape (B, ...); three classes if not given.
        reference: of this model and these inputs, where it is known.
        loss: per-sample losses.
        views: K.
        points: how many iterates, each number a check.
        strategies: kinds of strategies that the engine may take.
        per_layer: for each group, how the names of its parameters begin; None for one group.
        spread: distance of the iterates.
        books: the engine must keep books, without a warning; else it must fall back, with one; None for either.
        checked: the engine compares its books with autograd first, as it does for users.
        tolerances: by precision.
    """
    if reference is None:
        reference = reference_of(model, inputs, targets, loss=loss, views=views, points=points, spread=spread)
    targets, iterates, plain = reference
    inputs = inputs.float().double() if inputs.is_floating_point() else inputs
    groups = groups_of(FlatParameters(model), per_layer)
    factors = torch.randn(int(groups.max()) + 1, len(inputs), dtype=torch.float64).float().double()
    for dtype, tolerance in tolerances.items():
        twin = copy.deepcopy(model).to(DEVICE, dtype)
        engine = PerSampleGradients(twin, FlatParameters(twin), loss, per_layer=per_layer is not None, views=views)
        restricted(engine, strategies)
        typed = inputs.to(DEVICE, dtype) if inputs.is_floating_point() else inputs.to(DEVICE)
        if not checked:
            trust(engine, Books(1, channels_last=engine.channels_last), typed, targets)
        complaints = []
        for count in points:
            weighted = list(zip(WEIGHTS[count], iterates, plain, strict=False))
            want = sum(weight * gradients for weight, _, (_, gradients) in weighted)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                at_iterates = [Point(weight, at.to(DEVICE, dtype)) for weight, at, _ in weighted]
                tape = engine.record(at_iterates, typed, targets.to(DEVICE))
            complaints += [str(w.message) for w in caught if w.category is PlainWarning and FALLBACK in str(w.message)]
            assert_tape(tape, want, groups, factors, tolerance)
            torch.testing.assert_close(tape.losses.double().cpu(), weighted[0][2][0], rtol=tolerance, atol=tolerance)
        assert books is None or len(complaints) == (not books), complaints


class Restricted(Chooser):
    """Chooses among strategies of these kinds alone, where a use has any."""

    def __init__(self, kinds):
        super().__init__()
        self.kinds = kinds

    def _candidates(self, use, term, points):
        allowed = super()._candidates(use, term, points)
        among = {s: cost for s, cost in use.strategies(term, points).items() if s.kind in self.kinds}
        return {s: cost for s, cost in among.items() if s in allowed} or among or allowed


def restricted(engine, kinds):
    """The engine, which takes strategies of these kinds alone from now on; None for any."""
    if kinds is not None:
        engine._chooser = Restricted(kinds)
    return engine


def trust(engine, way, inputs, targets):
    """Let an engine take a way without comparing it in one of the next batches like this one."""
    engine._way, engine._batches = way, 4
    engine._compared_batches.add(inputs, targets, len(targets), set())
    engine._compared_batches.has_read = lambda reads: True


def groups_of(flat, per_layer):
    """For each number of the flat vector, its group."""
    if per_layer is None:
        return torch.zeros(len(flat), dtype=torch.int64)
    numbers = []
    for name, parameter in zip(flat.names, flat.parameters, strict=True):
        (group,) = [i for i, beginnings in enumerate(per_layer) if name.startswith(beginnings)]
        numbers.append(torch.full((parameter.numel(),), group))
    return torch.cat(numbers)


def assert_tape(tape, want, groups, factors, tolerance):
    norms = torch.stack([want[:, groups == g].norm(dim=1) for g in range(len(factors))])
    assert tape.norms().shape == norms.shape
    deviation = float(((tape.norms().double().cpu() - norms).abs() / norms).max())
    assert deviation < tolerance
    sums = (factors[groups].t() * want).sum(0)
    assert relative(tape.weighted_sum(factors.to(tape.norms())), sums) < tolerance
    threshold = float(norms.median())
    clipped = ((threshold / norms).clamp(max=1)[groups].t() * want).sum(0)
    assert relative(tape.weighted_sum((threshold / tape.norms()).clamp(max=1)), clipped) < tolerance


def read_out(*layers, example):
    """The layers and a linear map to three classes."""
    model = nn.Sequential(*layers, nn.Flatten(), nn.LazyLinear(3))
    model(example)
    return model


def standardised(channels, out, kernel, spread=0.1, **options):
    """WSConv2d with gains, one filter of which varies so little that its scale is bounded; how far iterates may go."""
    layer = WSConv2d(channels, out, kernel, **options)
    with torch.no_grad():
        layer.gain.copy_(0.5 + torch.rand(out))
        layer.weight[0] *= 1e-3
        layer.gain[1:2] *= -1
    spreads = [torch.full_like(p, spread) for _, p in layer.named_parameters()]
    names = [name for name, _ in layer.named_parameters()]
    spreads[names.index("weight")][0] = 1e-4
    return layer, torch.cat([s.flatten() for s in spreads]).double()


def assert_standardised_exact(layer, spread, x, **options):
    model, spread = standardised_model(layer, spread, x)
    assert_exact(model, x, spread=spread, **options)


def standardised_model(layer, spread, x):
    """A model of the layer, and how far iterates may go."""
    model = read_out(layer, nn.Tanh(), example=x)
    scale = layer.statistics(layer.weight)[1].flatten()
    assert math.isclose(scale[0].item(), layer.SMALLEST**-0.5, rel_tol=1e-6)
    if layer.weight[0].numel() > 1:
        assert (scale[1:] < 0.9 * scale[0]).all()
    rest = sum(p.numel() for p in model.parameters()) - len(spread)
    return model, torch.cat([spread, torch.full((rest,), 0.1).double()])


def next_token(outputs, targets):
    """The mean over tokens of a sample's losses."""
    return F.cross_entropy(outputs.flatten(0, 1), targets.flatten(), reduction="none").view(targets.shape).mean(1)


def engine_in_float64(model, loss=cross_entropy):
    model.double()
    return PerSampleGradients(model, FlatParameters(model), loss)


def one_by_one(engine, x, y):
    """Gradients (B, d) by plain autograd, of the model itself and each sample alone."""
    losses = [engine.loss(engine.model(x[i : i + 1]), y[i : i + 1]).sum() for i in range(len(y))]
    options = {"allow_unused": True, "materialize_grads": True}
    parts = [torch.autograd.grad(loss, engine.flat.parameters, **options) for loss in losses]
    return torch.stack([torch.cat([part.flatten() for part in of_sample]) for of_sample in parts])


def assert_right(engine, *batches):
    """Norms and clipped sums of one batch after the other are those of plain autograd, sample by sample."""
    for x, y in batches:
        points = [Point(1.0, engine.flat.vector)]
        want = one_by_one(engine, x, y)
        norms = want.norm(dim=1)
        bound = float(norms.median())
        torch.testing.assert_close(engine.record(points, x, y).norms()[0], norms, rtol=1e-9, atol=1e-12)
        found = engine.clipped_sum(points, [(x, y)], lambda norms, bound=bound: (bound / norms).clamp(max=1))
        torch.testing.assert_close(found.total, (bound / norms).clamp(max=1) @ want, rtol=1e-9, atol=1e-12)
