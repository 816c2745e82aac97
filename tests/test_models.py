import math

import pytest
import torch
from torch import nn

from dpbench.config import compose_jobs
from dpbench.errors import UserError


def built(dataset, model, *overrides):
    config = compose_jobs([f"dataset={dataset}", f"model={model}", *overrides], multirun=False)[0].config
    return config.model.build(config.dataset), config.dataset


@pytest.mark.parametrize(
    ("dataset", "model", "parameters"),
    [
        ("mnist", "cnn_small", 28_058),
        ("fashion_mnist", "cnn_small", 28_058),
        ("mnist", "linear", 7_850),
        ("mnist", "cnn5", 411_850),
        ("cifar10", "cnn5", 412_426),
        ("cifar100", "cnn5", 619_876),
        ("digits", "mlp", 64 * 64 + 64 + 64 * 10 + 10),
        ("digits", "linear", 650),
    ],
)
def test_models_have_the_papers_parameter_counts_and_map_to_logits(dataset, model, parameters):
    module, data = built(dataset, model)
    assert sum(p.numel() for p in module.parameters()) == parameters
    assert module(torch.rand(3, data.channels, data.height, data.width)).shape == (3, data.classes)


def test_cnn5_pads_28_pixels_to_32():
    module, _ = built("mnist", "cnn5")
    image = torch.rand(2, 1, 28, 28)
    framed = nn.functional.pad(image, (2, 2, 2, 2))
    torch.testing.assert_close(module(image), module[1:](framed))


def test_small_cnn_sees_a_grey_image_on_three_channels():
    module, _ = built("mnist", "cnn_small")
    image = torch.rand(2, 1, 28, 28)
    torch.testing.assert_close(module(image), module[1:](torch.cat([image] * 3, dim=1)))


def test_mlp_takes_its_widths():
    module, _ = built("digits", "mlp", "model.hidden=[20,30]")
    assert [tuple(p.shape) for p in module.parameters() if p.dim() == 2] == [(20, 64), (30, 20), (10, 30)]


@pytest.mark.parametrize(
    ("dataset", "model", "sizes"),
    [("digits", "cnn5", "28x28 or 32x32"), ("digits", "cnn_small", "28x28"), ("cifar10", "cnn_small", "28x28")],
)
def test_models_refuse_pictures_that_do_not_fit(dataset, model, sizes):
    with pytest.raises(UserError, match=f"model={model}: takes images of {sizes} pixels, but dataset={dataset} has"):
        built(dataset, model)


@pytest.mark.parametrize(("dataset", "model"), [("mnist", "cnn5"), ("mnist", "cnn_small"), ("digits", "mlp")])
def test_samples_do_not_mix(dataset, model):
    module, data = built(dataset, model)
    batch = torch.rand(4, data.channels, data.height, data.width)
    alone = torch.cat([module(image.unsqueeze(0)) for image in batch])
    torch.testing.assert_close(module(batch), alone, atol=math.sqrt(torch.finfo(torch.float32).eps) / 10, rtol=1e-4)
