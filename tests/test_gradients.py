import copy

import pytest
import torch
import torch.nn.functional as F
from opacus import GradSampleModule
from opacus.optimizers import DPOptimizer
from torch import nn
from torch.func import functional_call, grad, vmap

from dpbench.clip import AutomaticClip, NoClip, NormalisedClip, ThresholdClip
from dpbench.config import compose_jobs
from dpbench.errors import UserError
from dpbench.gradients import FlatParameters, PerSampleGradients, rules
from dpbench.query import Point
from dpbench.training.assemble import per_sample_loss

CLIPS = {
    "threshold": ThresholdClip(),
    "automatic": AutomaticClip(stabiliser=0.01),
    "automatic_exact": AutomaticClip(stabiliser=0.0),
    "normalised": NormalisedClip(),
    "none": NoClip(),
    "threshold_per_layer": ThresholdClip(scope="per_layer"),
    "automatic_per_layer": AutomaticClip(scope="per_layer"),
    "normalised_per_layer": NormalisedClip(scope="per_layer"),
}
SETTINGS = {
    "linear": ("mnist", "linear"),
    "mlp": ("digits", "mlp"),
    "cnn_small": ("mnist", "cnn_small"),
    "cnn5_28": ("mnist", "cnn5"),
    "cnn5_32": ("cifar10", "cnn5"),
}


def built(name: str, batch: int):
    dataset, model = SETTINGS[name]
    config = compose_jobs([f"dataset={dataset}", f"model={model}"], multirun=False)[0].config
    torch.manual_seed(0)
    data = config.dataset
    inputs = torch.rand(batch, data.channels, data.height, data.width)
    return config.model.build(data), inputs, torch.randint(data.classes, (batch,))


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
    total = torch.zeros_like(gradients)
    for group in range(count):
        v = torch.where(groups == group, gradients, 0.0)
        norm = v.norm(dim=1, keepdim=True)
        rule = clip_name.removesuffix("_per_layer")
        if rule == "threshold":
            total += v * (bound / norm).clamp(max=1)
        elif rule == "automatic":
            total += v * bound / (norm + 0.01)
        elif rule == "automatic_exact":
            total += v * bound / norm
        elif rule == "normalised":
            total += v / threshold * (bound / norm).clamp(max=1)
        else:
            total += v
    return total.sum(0)


def tapes(engine, points, inputs, labels, micro):
    return [engine.record(points, x, y) for x, y in zip(inputs.split(micro), labels.split(micro), strict=True)]


def clipped_sum(recorded, clip, threshold):
    return sum(tape.weighted_sum(clip.factors(tape.norms(), threshold)) for tape in recorded)


def relative_error(got, want):
    return float((got.double() - want).norm() / want.norm())


@pytest.mark.parametrize("points", [1, 2])
@pytest.mark.parametrize("name", SETTINGS)
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
        for micro in (batch, 4):
            recorded = tapes(engine, [Point(*w) for w in weights], inputs, labels, micro)
            for clip_name, clip in CLIPS.items():
                if (clip.scope == "per_layer") == per_layer:
                    want = reference_sum(mixture, clip_name, layers, threshold)
                    assert relative_error(clipped_sum(recorded, clip, threshold), want) < 1e-5, (clip_name, micro)


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
    assert relative_error(clipped_sum(recorded, CLIPS["threshold"], 1.5), want.double()) < 1e-5


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
def test_layer_rules_equal_torch_func_in_float64(name, monkeypatch):
    monkeypatch.setattr(rules, "CONV_CHUNK", 3)
    torch.manual_seed(1)
    make, inputs = LAYERS[name]
    model, x = make(), inputs()
    model(x)  # lazy layers take their shapes
    model.double()
    x = x.double() if x.is_floating_point() else x
    y = torch.randint(3, (7,))
    flat = FlatParameters(model)
    other = flat.vector + 0.1 * torch.randn_like(flat.vector)

    def loss(vector, sample, label):
        parameters = dict(zip(flat.names, flat.views(vector), strict=True))
        return F.cross_entropy(functional_call(model, parameters, (sample.unsqueeze(0),)), label.unsqueeze(0))

    def per_sample(vector):
        return vmap(grad(loss), in_dims=(None, 0, 0))(vector.clone(), x, y)

    want = 2.5 * per_sample(other) - 1.5 * per_sample(flat.vector)
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
    assert relative_error(tape.weighted_sum(torch.ones(1, 4)), want.sum(0)) < 1e-5


def opacus_gradients_of_trainable(model, inputs, labels):
    hooked = GradSampleModule(copy.deepcopy(model), loss_reduction="sum")
    F.cross_entropy(hooked(inputs), labels, reduction="sum").backward()
    return torch.cat([p.grad_sample.flatten(1).double() for p in hooked.parameters() if p.requires_grad], dim=1)


def engine_of(model):
    return PerSampleGradients(model, FlatParameters(model), per_sample_loss)


def test_batch_norm_is_refused_with_advice():
    with pytest.raises(UserError, match=r"'1' is batch normalisation.*use group normalisation"):
        engine_of(nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2)))


@pytest.mark.parametrize("frozen", [nn.BatchNorm1d(3, affine=False), nn.BatchNorm1d(3).requires_grad_(False)])
def test_batch_norm_that_is_not_trained_mixes_samples_all_the_same(frozen):
    with pytest.raises(UserError, match="'1' is batch normalisation"):
        engine_of(nn.Sequential(nn.Linear(3, 3), frozen, nn.Linear(3, 3)))


def test_layer_without_a_rule_is_refused():
    with pytest.raises(UserError, match="'0' of type PReLU has no per-sample rule"):
        engine_of(nn.Sequential(nn.PReLU(), nn.Linear(2, 2)))


def test_subclass_of_a_known_layer_is_refused():
    class Doubled(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    with pytest.raises(UserError, match="Doubled has no per-sample rule"):
        engine_of(nn.Sequential(Doubled(2, 2)))


def test_parameter_used_outside_its_layer_is_noticed():
    class Leaky(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 3)

        def forward(self, x):
            return self.layer(x) @ self.layer.weight

    engine = engine_of(Leaky())
    with pytest.raises(UserError, match=r"'layer\.weight' is used outside its layer"):
        engine.record([Point(1.0, engine.flat.vector)], torch.randn(4, 3), torch.randint(3, (4,)))


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


def test_sample_without_a_finite_gradient_adds_nothing():
    model, inputs, labels = built("mlp", 6)
    flat = FlatParameters(model)
    engine = PerSampleGradients(model, flat, per_sample_loss)
    points = [Point(1.0, flat.vector)]
    good = torch.tensor([0, 1, 3, 5])
    inputs[2], inputs[4] = torch.nan, torch.inf
    for clip in CLIPS.values():
        if clip.scope == "flat":
            want = clipped_sum(tapes(engine, points, inputs[good], labels[good], 6), clip, 1.0)
            got = clipped_sum(tapes(engine, points, inputs, labels, 6), clip, 1.0)
            torch.testing.assert_close(got, want)
