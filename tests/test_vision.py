"""Each vision model of the papers with each of its image data sets: composed in full, and one private step of each."""

import math
import warnings
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torchvision
from gradient_checks import plain_gradients
from helpers import assembled, composed
from small_models import NarrowResNet
from torchvision.models import efficientnet, resnet

from dpbench.clip import ThresholdClip
from dpbench.models import VisionTransformer, WideResNet

pytestmark = pytest.mark.usefixtures("in_float64")
CLIPPED_AT = 0.5

# Data set, model, and what the papers set besides. Sources: the sections on experiments of the five papers.
PAIRS = [
    # DOPPLER
    ("mnist", "linear"),
    ("cifar10", "cnn5"),
    ("cifar10", "efficientnet_b0"),
    ("cifar10", "resnet50_bit"),
    # DiSK; WRN-40-4 is of De et al., whose networks it takes over
    ("mnist", "cnn5"),
    ("cifar100", "wrn_16_4"),
    ("cifar10", "wrn_40_4"),
    ("cifar100", "vit_small"),
    ("imagenet", "resnet50"),
    # DP-PMLF
    ("mnist", "resnet18", "model.image_size=224"),
    ("fashion_mnist", "vit_small"),
    ("cifar10", "cnn5", "model.logits=100"),
    ("cifar10", "vit_small", "model.trained=layers"),
    # DC-SGD
    ("mnist", "cnn_small"),
    ("cifar10", "resnet34"),
    ("svhn", "resnet18", "model.image_size=28"),
    # ADP
    ("cifar10", "cnn_abadi", "model.trained=dense"),
    ("mnist", "cnn_small_grey"),
    # Beyond the papers: the stem for small images
    ("cifar10", "resnet18", "model.stem=small"),
]
# The same models on images of the same shape, or with other settings.
AGAIN = [
    ("cifar10", "vit_small"),
    ("cifar10", "vit_tiny"),
    ("cifar100", "cnn5"),
    ("cifar10", "wrn_16_4"),
    ("imagenet", "vit_small"),
    ("fashion_mnist", "linear"),
    ("fashion_mnist", "cnn5"),
    ("fashion_mnist", "resnet18", "model.image_size=224"),
    ("cifar10", "resnet18", "model.image_size=224"),
    ("cifar100", "resnet18", "model.image_size=224"),
    ("mnist", "vit_small"),
    ("cifar10", "resnet18"),
    ("svhn", "resnet34", "model.image_size=28"),
    ("cifar100", "cnn_abadi"),
]


def config_of(pair, *overrides):
    """The run of a pair, which composing checks."""
    dataset, model, *settings = pair
    return composed(f"dataset={dataset}", f"model={model}", *settings, *overrides)


def narrow_efficientnet(**settings):
    blocks, last = efficientnet._efficientnet_conf("efficientnet_b0", width_mult=0.25, depth_mult=0.5)
    settings["stochastic_depth_prob"] = 0.0
    return efficientnet.EfficientNet(blocks, last_channel=last, **settings)


@pytest.fixture
def narrow_libraries(monkeypatch):
    """Models of torchvision and timm with few channels and blocks."""
    import timm.models.resnetv2 as bit

    blocks = {"resnet18": (resnet.BasicBlock, [1, 1, 1, 1]), "resnet34": (resnet.BasicBlock, [1, 2, 1, 1])}
    for name, (block, layers) in {**blocks, "resnet50": (resnet.Bottleneck, [1, 1, 1, 1])}.items():
        monkeypatch.setattr(resnet, name, partial(NarrowResNet, block, layers))
    monkeypatch.setattr(torchvision.models, "efficientnet_b0", narrow_efficientnet)
    wide = bit.ResNetV2
    monkeypatch.setattr(
        bit,
        "ResNetV2",
        lambda layers, **settings: wide([1, 1, 1, 1], channels=(64, 128, 128, 256), stem_chs=64, **settings),
    )


def narrowed(config):
    """The same run with a smaller model, and of ImageNet smaller images and fewer classes."""
    model, data = config.model, config.dataset
    if isinstance(model, VisionTransformer):
        model = replace(model, width=24, heads=3, depth=2, image_size=32)
    elif isinstance(model, WideResNet):
        model = replace(model, width=1, depth=10)
    elif getattr(model, "image_size", None) == 224:
        model = replace(model, image_size=36)
    if data.name == "imagenet":
        data = replace(data, height=32, width=32, classes=7)
    optim = replace(config.optim, lr=1.0)
    return replace(
        config, model=model, dataset=data, clip=ThresholdClip(), optim=optim, batch_size=16, micro_batch=2, epochs=1.0
    )


@pytest.mark.parametrize(
    "pair",
    [*PAIRS, *(pytest.param(pair, marks=pytest.mark.slow) for pair in AGAIN)],
    ids=lambda pair: "-".join(pair).replace("model.", ""),
)
def test_a_private_step_of_every_pair_keeps_books_and_clips_exactly(pair, narrow_libraries):
    """The clipped sum is that of plain autograd in float64, each sample alone, and the step follows it."""
    full = config_of(pair)
    assert len(full.release_plan()) == math.ceil(full.epochs * full.dataset.train_size / full.batch_size)
    config = narrowed(full)
    torch.manual_seed(1)
    data = config.dataset
    x = torch.randn(3, data.channels, data.height, data.width)
    y = torch.randint(data.classes, (3,))
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # the engine warns where it keeps no books
        parts = assembled(config)
        flat = parts.step.gradients.flat
        before = flat.vector.clone()
        _, rows = plain_gradients(parts.model, before, x, y)
        want = (rows * (CLIPPED_AT / rows.norm(dim=1)).clamp(max=1).unsqueeze(1)).sum(0)
        batch = list(zip(x.split(2), y.split(2), strict=True))
        got, *_ = parts.step.request(batch, CLIPPED_AT).alone()
        parts.step.threshold.norm = CLIPPED_AT
        parts.step(batch)
    assert rows.norm(dim=1).min() > 0
    assert torch.linalg.vector_norm(got - want) < 1e-9 * want.norm()
    step = (before - flat.vector) * config.batch_size
    assert torch.linalg.vector_norm(step - want) < 1e-9 * want.norm()


@pytest.mark.parametrize(
    "pair",
    [("cifar10", "resnet50_bit"), ("cifar10", "efficientnet_b0"), ("cifar10", "vit_tiny", "model.trained=layers")],
    ids=lambda pair: pair[1],
)
def test_mixtures_of_two_iterates_are_clipped_exactly(pair, narrow_libraries):
    """DiSK's mixture of gradients at two points, whose kinds of layers are used nowhere else."""
    config = narrowed(config_of(pair, "algo=disk"))
    torch.manual_seed(2)
    x, y = torch.randn(3, 3, 32, 32), torch.randint(10, (3,))
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        parts = assembled(config)
        parts.step([(x, y)])
        vector = parts.step.gradients.flat.vector
        points = parts.step.query.points(vector)
        mixture = sum(p.weight * plain_gradients(parts.model, p.iterate, x, y)[1] for p in points)
        parts.step.query = SimpleNamespace(points=lambda _: points, most_points=2, clipped_apart=False)
        got, *_ = parts.step.request([(x, y)], CLIPPED_AT).alone()
    assert len(points) == 2
    want = (mixture * (CLIPPED_AT / mixture.norm(dim=1)).clamp(max=1).unsqueeze(1)).sum(0)
    assert torch.linalg.vector_norm(got - want) < 1e-9 * want.norm()
