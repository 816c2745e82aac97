"""Residual networks of torchvision and timm, with group norm in place of batch norm."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn
from typing_extensions import override

from dpbench.data import ImageDataset
from dpbench.errors import require
from dpbench.models.base import Model, require_size
from dpbench.models.inputs import colour_input
from dpbench.models.layers import StdConv2d, WSConv2d, group_norm

DEPTHS = (18, 34, 50)
STEMS = ("imagenet", "small")


@dataclass
class ResNet(Model):
    """torchvision's ResNet with group norm (DP-PMLF, DC-SGD; DiSK's ImageNet run: depth 50, standardised weights).

    Parameters with 10 classes: 11,181,642 (18), 21,289,802 (34), 23,528,522 (50). Grey images are repeated on three
    channels.

    Attributes:
        depth: 18, 34 or 50.
        stem: "imagenet" (7x7 convolution of stride 2, then max pooling) or "small" (3x3 convolution of stride 1).
        groups: largest number of groups of a norm, which has gcd(groups, channels).
        weight_standardised: standardise the filters of all convolutions, with a gain (De et al. 2022).
        image_size: pixels a side to which images are resized on the device; null leaves them as they are.
    """

    name: str = "resnet18"
    depth: int = 18
    stem: str = "imagenet"
    groups: int = 32
    weight_standardised: bool = False
    image_size: int | None = None

    def __post_init__(self) -> None:
        require(self.depth in DEPTHS, "model.depth", self.depth, f"one of {', '.join(map(str, DEPTHS))}")
        require(self.stem in STEMS, "model.stem", self.stem, f"one of {', '.join(STEMS)}")
        require(self.groups > 0, "model.groups", self.groups, "a whole number > 0")
        require_size(self.image_size)

    @override
    def check(self, dataset: ImageDataset) -> None:
        self._require_grey_or_colour(dataset)

    @override
    def build(self, dataset: ImageDataset) -> nn.Module:
        from torchvision.models import resnet

        make: Callable[..., nn.Module] = getattr(resnet, f"resnet{self.depth}")
        net = make(num_classes=dataset.classes, norm_layer=lambda channels: group_norm(channels, self.groups))
        if self.stem == "small":
            net.conv1, net.maxpool = nn.Conv2d(3, 64, 3, padding=1, bias=False), nn.Identity()
        if self.weight_standardised:
            _standardise(net)
        return nn.Sequential(*colour_input(dataset, self.image_size), net)


@dataclass
class BiTResNet(Model):
    """timm's ResNet-50 (v2, 50x1) of BiT (Kolesnikov et al. 2019; DOPPLER).

    With pre-activation, group norm of 32 groups and standardised weights, which begin at random. 23,520,842 parameters
    with 10 classes. Grey images are repeated on three channels.

    Attributes:
        image_size: pixels a side to which images are resized on the device; null leaves them as they are.
    """

    name: str = "resnet50_bit"
    image_size: int | None = None

    def __post_init__(self) -> None:
        require_size(self.image_size)

    @override
    def check(self, dataset: ImageDataset) -> None:
        self._require_grey_or_colour(dataset)

    @override
    def build(self, dataset: ImageDataset) -> nn.Module:
        from timm.models.resnetv2 import ResNetV2

        net = ResNetV2(
            [3, 4, 6, 3],
            num_classes=dataset.classes,
            stem_type="fixed",
            conv_layer=_bit_convolution,
            norm_layer=_norm_and_relu,
        )
        return nn.Sequential(*colour_input(dataset, self.image_size), net)


def _bit_convolution(channels: int, out: int, kernel_size: int, *, stride: int = 1, **_: Any) -> StdConv2d:
    return StdConv2d(channels, out, kernel_size, stride=stride, padding=kernel_size // 2, bias=False)


def _norm_and_relu(channels: int, **_: Any) -> nn.Module:
    return nn.Sequential(group_norm(channels, 32), nn.ReLU())


def _standardise(net: nn.Module) -> None:
    """Put a `WSConv2d` with the same weights in the place of each convolution, all of which have square kernels."""
    for parent in list(net.modules()):
        for name, layer in parent.named_children():
            if type(layer) is nn.Conv2d:
                twin = WSConv2d(
                    layer.in_channels,
                    layer.out_channels,
                    layer.kernel_size[0],
                    stride=layer.stride[0],
                    padding=int(layer.padding[0]),
                    bias=layer.bias is not None,
                )
                twin.weight = layer.weight
                setattr(parent, name, twin)
