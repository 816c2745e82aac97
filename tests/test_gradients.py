"""Clipped sums against Opacus and torch.func, and models that have no gradient of a sample."""

import copy

import pytest
import torch
import torch.nn.functional as F
from clipped_sums import CLIPS, IMAGE_MODELS, built, clipped_sum, engine_of, tapes
from gradient_checks import func_gradients, relative
from opacus import GradSampleModule
from opacus.optimizers import DPOptimizer
from torch import nn

from dpbench.errors import UserError
from dpbench.gradients import FlatParameters, PerSampleGradients
from dpbench.query import Point
from dpbench.training.losses import per_sample_loss


def opacus_gradients(model, flat, iterate, inputs, labels):
    """Per-sample gradients by Opacus in hooks mode at an iterate, float64 (B, d)."""
    with flat.at(iterate):
        hooked = GradSampleModule(copy.deepcopy(model), loss_reduction="sum")
    F.cross_entropy(hooked(inputs), labels, reduction="sum").backward()
    return torch.cat([p.grad_sample.flatten(1).double() for p in hooked.parameters()], dim=1)


def layers_of(model) -> list[int]:
    """For each entry of the flat vector, the number of its layer."""
    owners = [layer for layer in model.modules() if list(layer.parameters(recurse=False))]
    return [i for i, layer in enumerate(owners) for p in layer.parameters(recurse=False) for _ in range(p.numel())]


def reference_sum(gradients, clip_name: str, layers: list[int], threshold: float):
    """Σ_i clip(v_i) in float64, each rule written out as its paper prints it."""
    groups = torch.tensor(layers) if clip_name.endswith("per_layer") else torch.zeros(len(layers), dtype=torch.int64)
    count = int(groups.max()) + 1
    bound = threshold / count**0.5
    total = torch.zeros_like(gradients[0])
    for group in range(count):
        v = gradients[:, groups == group]
        norm = v.norm(dim=1, keepdim=True)
        rule = clip_name.removesuffix("_per_layer")
        if rule == "threshold":
            clipped = v * (bound / norm).clamp(max=1)
        elif rule == "automatic":
            clipped = v * bound / (norm + 0.01)
        elif rule == "automatic_exact":
            clipped = v * bound / norm
        elif rule == "normalised":
            clipped = v / threshold * (bound / norm).clamp(max=1)
        else:
            clipped = v
        total[groups == group] = clipped.sum(0)
    return total


@pytest.mark.parametrize("points", [1, 2])
@pytest.mark.parametrize("name", IMAGE_MODELS)
def test_clipped_sums_equal_opacus(name, points):
    batch = 6
    model, inputs, labels = built(name, batch)
    flat = FlatParameters(model)
    probe = flat.vector + 0.02 * torch.randn_like(flat.vector)
    weights = [(1.0, flat.vector)] if points == 1 else [(1.4, probe), (-0.4, flat.vector)]
    mixture = sum(w * opacus_gradients(model, flat, at, inputs, labels) for w, at in weights)
    threshold = float(mixture.norm(dim=1).median())  # so that some are longer than it and some shorter
    layers = layers_of(model)
    for per_layer in (False, True):
        engine = PerSampleGradients(model, flat, per_sample_loss, per_layer=per_layer)
        clips = {clip_name: clip for clip_name, clip in CLIPS.items() if (clip.scope == "per_layer") == per_layer}
        want = {clip_name: reference_sum(mixture, clip_name, layers, threshold) for clip_name in clips}
        for micro in (batch, 4):
            recorded = tapes(engine, [Point(*w) for w in weights], inputs, labels, micro)
            for clip_name, clip in clips.items():
                found = clipped_sum(recorded, clip, threshold)
                assert relative(found, want[clip_name]) < 1e-5, (clip_name, micro)


def test_clipped_sum_equals_what_opacus_optimizer_accumulates():
    model, inputs, labels = built("cnn_small", 16)
    flat = FlatParameters(model)
    hooked = GradSampleModule(copy.deepcopy(model), loss_reduction="sum")
    optimizer = DPOptimizer(
        torch.optim.SGD(hooked.parameters(), lr=0.1), noise_multiplier=0.0, max_grad_norm=1.5, expected_batch_size=16
    )
    F.cross_entropy(hooked(inputs), labels, reduction="sum").backward()
    optimizer.clip_and_accumulate()
    want = torch.cat([p.summed_grad.reshape(-1) for p in optimizer.params])
    engine = PerSampleGradients(model, flat, per_sample_loss)
    recorded = tapes(engine, [Point(1.0, flat.vector)], inputs, labels, 6)
    assert relative(clipped_sum(recorded, CLIPS["threshold"], 1.5), want.double()) < 1e-5


class TextModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 6, padding_idx=0)
        self.norm = nn.LayerNorm(6)
        self.mix = nn.Linear(6, 6, bias=False)
        self.head = nn.Linear(6, 3)

    def forward(self, ids):
        x = self.norm(self.embedding(ids))
        return self.head(torch.tanh(self.mix(self.mix(x))).mean(1))  # one layer called twice


def conv2d(**options):
    return nn.Sequential(
        nn.Conv2d(4, 6, 3, **options), nn.GroupNorm(2, 6), nn.ReLU(inplace=True), nn.Flatten(), nn.LazyLinear(3)
    )


def conv1d(**options):
    return nn.Sequential(nn.Conv1d(4, 6, 3, **options), nn.Tanh(), nn.Flatten(), nn.LazyLinear(3))


LAYERS = {
    "embedding, layer norm, shared linear": (TextModel, lambda: torch.randint(11, (7, 5))),
    "linear on 4-d input": (
        lambda: nn.Sequential(nn.Linear(5, 4), nn.LayerNorm((3, 4)), nn.Flatten(), nn.Linear(24, 3)),
        lambda: torch.randn(7, 2, 3, 5),
    ),
    "conv2d stride": (lambda: conv2d(stride=2), lambda: torch.randn(7, 4, 9, 8)),
    "conv2d padding": (lambda: conv2d(padding=(1, 2), bias=False), lambda: torch.randn(7, 4, 6, 5)),
    "conv2d dilation, groups": (lambda: conv2d(dilation=2, groups=2), lambda: torch.randn(7, 4, 9, 9)),
    "conv2d same, even kernel": (
        lambda: nn.Sequential(nn.Conv2d(4, 6, (2, 4), padding="same"), nn.Flatten(), nn.LazyLinear(3)),
        lambda: torch.randn(7, 4, 5, 6),
    ),
    "conv2d valid": (lambda: conv2d(padding="valid"), lambda: torch.randn(7, 4, 5, 6)),
    "conv1d stride, padding": (lambda: conv1d(stride=2, padding=2), lambda: torch.randn(7, 4, 11)),
    "conv1d groups, dilation, same": (
        lambda: conv1d(groups=2, dilation=2, padding="same"),
        lambda: torch.randn(7, 4, 9),
    ),
    "group norm without affine": (
        lambda: nn.Sequential(nn.GroupNorm(2, 4, affine=False), nn.Flatten(), nn.LazyLinear(3)),
        lambda: torch.randn(7, 4, 3),
    ),
}


@pytest.mark.parametrize("name", LAYERS)
def test_layer_rules_equal_torch_func_in_float64(name):
    torch.manual_seed(1)
    make, inputs = LAYERS[name]
    model, x = make(), inputs()
    model(x)  # lazy layers take their shapes
    model.double()
    x = x.double() if x.is_floating_point() else x
    y = torch.randint(3, (7,))
    flat = FlatParameters(model)
    other = flat.vector + 0.1 * torch.randn_like(flat.vector)

    want = 2.5 * func_gradients(model, flat, other, x, y) - 1.5 * func_gradients(model, flat, flat.vector, x, y)
    engine = PerSampleGradients(model, flat, per_sample_loss)
    tape = engine.record([Point(2.5, other), Point(-1.5, flat.vector)], x, y)
    torch.testing.assert_close(tape.norms()[0], want.norm(dim=1))
    factors = torch.randn(1, 7, dtype=torch.float64)
    torch.testing.assert_close(tape.weighted_sum(factors), factors[0] @ want)


def test_frozen_parameters_take_no_part():
    model, inputs, labels = built("cnn_small", 4)
    whole = FlatParameters(copy.deepcopy(model))
    for parameter in list(model.parameters())[:4]:
        parameter.requires_grad_(False)
    flat = FlatParameters(model)
    assert len(flat) < len(whole)
    engine = PerSampleGradients(model, flat, per_sample_loss)
    tape = engine.record([Point(1.0, flat.vector)], inputs, labels)
    want = opacus_gradients_of_trainable(model, inputs, labels)
    assert relative(tape.weighted_sum(torch.ones(1, 4)), want.sum(0)) < 1e-5


def opacus_gradients_of_trainable(model, inputs, labels):
    hooked = GradSampleModule(copy.deepcopy(model), loss_reduction="sum")
    F.cross_entropy(hooked(inputs), labels, reduction="sum").backward()
    return torch.cat([p.grad_sample.flatten(1).double() for p in hooked.parameters() if p.requires_grad], dim=1)


def test_batch_norm_is_refused_with_advice():
    with pytest.raises(UserError, match=r"'1' is batch normalisation.*use group normalisation"):
        engine_of(nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2)))


@pytest.mark.parametrize("frozen", [nn.BatchNorm1d(3, affine=False), nn.BatchNorm1d(3).requires_grad_(False)])
def test_batch_norm_that_is_not_trained_mixes_samples_all_the_same(frozen):
    with pytest.raises(UserError, match="'1' is batch normalisation"):
        engine_of(nn.Sequential(nn.Linear(3, 3), frozen, nn.Linear(3, 3)))


@pytest.mark.parametrize("affine", [False, True])
def test_instance_norm_that_keeps_statistics_is_refused_with_advice(affine):
    with pytest.raises(UserError, match=r"'1' keeps statistics.*set track_running_stats=False"):
        engine_of(nn.Sequential(nn.Conv2d(3, 3, 1), nn.InstanceNorm2d(3, affine=affine, track_running_stats=True)))


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
@pytest.mark.parametrize("option", [{"max_norm": 1.0}, {"scale_grad_by_freq": True}, {"sparse": True}])
def test_embedding_without_a_per_sample_gradient_is_refused_with_advice(kind, option):
    table = kind(5, 3, **option)
    for layer in (table, table.requires_grad_(False)):
        with pytest.raises(UserError, match=r"'0' is an embedding with max_norm.*leave them unset"):
            engine_of(nn.Sequential(layer, nn.Linear(3, 3)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_parameters_in_half_precision_are_refused_with_advice(dtype):
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3).to(dtype))
    with pytest.raises(UserError, match=r"'1\.weight' is torch\.b?float16; train in float32 or float64"):
        FlatParameters(model)
    model[1].requires_grad_(False)
    assert len(FlatParameters(model)) == 12


def test_evaluating_elsewhere_leaves_the_parameters_bit_for_bit():
    model, inputs, labels = built("mlp", 5)
    flat = FlatParameters(model)
    before = flat.vector.clone()
    engine = PerSampleGradients(model, flat, per_sample_loss)
    engine.record([Point(0.3, torch.randn_like(before)), Point(0.7, flat.vector)], inputs, labels)
    with pytest.raises(RuntimeError), flat.at(torch.zeros_like(before)):
        raise RuntimeError
    assert torch.equal(flat.vector, before)
    for parameter, view in zip(flat.parameters, flat.views(flat.vector), strict=True):
        assert parameter.data_ptr() == view.data_ptr()
