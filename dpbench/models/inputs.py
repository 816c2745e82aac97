"""What happens to images on the device before the first layer of a model with fixed wants."""

from __future__ import annotations

from torch import Tensor, nn
from typing_extensions import override

from dpbench.data import ImageDataset
from dpbench.data.augmentation import resized


class ToThreeChannels(nn.Module):
    """Repeats grey images (B, 1, H, W) on three channels."""

    @override
    def forward(self, x: Tensor) -> Tensor:
        return x.expand(-1, 3, -1, -1)


class Resize(nn.Module):
    """Resizes images (B, C, H, W) to squares, but for those that come as such from their augmentation."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size

    @override
    def forward(self, x: Tensor) -> Tensor:
        return resized(x, self.size)


def colour_input(dataset: ImageDataset, size: int | None) -> list[nn.Module]:
    """Layers that make three channels, of `size` pixels a side where that is given, of images with one or three."""
    layers: list[nn.Module] = []
    if size is not None and (dataset.height, dataset.width) != (size, size):
        layers.append(Resize(size))
    if dataset.channels == 1:
        layers.append(ToThreeChannels())
    return layers
