"""Wide residual networks as De et al. (2022) train them privately."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from dpbench.data import ImageDataset
from dpbench.errors import require
from dpbench.models.base import Model
from dpbench.models.layers import WSConv2d

Conv = Callable[..., nn.Conv2d]


@dataclass
class WideResNet(Model):
    """WRN-depth-width with ReLU before each group norm and, by default, standardised weights (De et al. 2022).

    Weights begin as torch draws them, sqrt(3) smaller than theirs, and biases are not zero.

    Attributes:
        depth: 6 n + 4 layers, n blocks in each of the three stages.
        width: factor on the 16, 32 and 64 channels of the stages.
        groups: of each group norm.
        weight_standardised: standardise the filters of all convolutions.
    """

    name: str = "wrn_16_4"
    depth: int = 16
    width: int = 4
    groups: int = 16
    weight_standardised: bool = True

    def __post_init__(self) -> None:
        require(self.depth >= 10 and self.depth % 6 == 4, "model.depth", self.depth, "6 n + 4 with n >= 1")
        require(self.width > 0, "model.width", self.width, "a whole number > 0")
        fits = self.groups > 0 and 16 % self.groups == 0
        require(fits, "model.groups", self.groups, "a divisor of 16")

    @override
    def build(self, dataset: ImageDataset) -> nn.Module:
        conv: Conv = WSConv2d if self.weight_standardised else nn.Conv2d
        channels = 16
        layers: list[nn.Module] = [conv(dataset.channels, channels, 3, padding=1)]
        for stage in range(3):
            out = 16 * self.width * 2**stage
            for block in range((self.depth - 4) // 6):
                stride = 2 if stage > 0 and block == 0 else 1
                layers.append(_Block(channels, out, stride, self.groups, conv, first=block == 0))
                channels = out
        head = [nn.ReLU(), nn.GroupNorm(self.groups, channels), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
        return nn.Sequential(*layers, *head, nn.Linear(channels, dataset.classes))


class _Block(nn.Module):
    """Two convolutions beside a skip path, which the first block of a stage sends through a 1x1 convolution."""

    def __init__(self, channels: int, out: int, stride: int, groups: int, conv: Conv, *, first: bool) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(groups, channels), conv(channels, out, 3, stride=stride, padding=1)
        self.norm2, self.conv2 = nn.GroupNorm(groups, out), conv(out, out, 3, padding=1)
        self.skip = (
            nn.Sequential(nn.ReLU(), nn.GroupNorm(groups, channels), conv(channels, out, 1, stride=stride))
            if first
            else nn.Identity()
        )

    @override
    def forward(self, x: Tensor) -> Tensor:
        h = self.conv1(self.norm1(F.relu(x)))
        output: Tensor = self.conv2(self.norm2(F.relu(h))) + self.skip(x)
        return output
