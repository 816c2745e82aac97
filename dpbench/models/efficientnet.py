"""EfficientNet of torchvision, with group norm in place of batch norm."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn
from typing_extensions import override

from dpbench.data import ImageDataset
from dpbench.errors import require
from dpbench.models.base import Model, require_size
from dpbench.models.inputs import colour_input
from dpbench.models.layers import group_norm


@dataclass
class EfficientNet(Model):
    """torchvision's EfficientNet-B0 with group norm (DOPPLER), without dropout or stochastic depth.

    4,020,358 parameters with 10 classes. Grey images are repeated on three channels.

    Attributes:
        groups: largest number of groups of a norm, which has gcd(groups, channels).
        image_size: pixels a side to which images are resized on the device; null leaves them as they are.
    """

    name: str = "efficientnet_b0"
    groups: int = 32
    image_size: int | None = None

    def __post_init__(self) -> None:
        require(self.groups > 0, "model.groups", self.groups, "a whole number > 0")
        require_size(self.image_size)

    @override
    def check(self, dataset: ImageDataset) -> None:
        self._require_grey_or_colour(dataset)

    @override
    def build(self, dataset: ImageDataset) -> nn.Module:
        from torchvision.models import efficientnet_b0

        net: nn.Module = efficientnet_b0(
            num_classes=dataset.classes,
            norm_layer=lambda channels: group_norm(channels, self.groups),
            dropout=0.0,
            stochastic_depth_prob=0.0,
        )
        return nn.Sequential(*colour_input(dataset, self.image_size), net)
