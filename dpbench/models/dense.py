"""Models without structure."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import nn
from typing_extensions import override

from dpbench.data import ImageDataset
from dpbench.errors import require
from dpbench.models.base import Model


def _pixels(dataset: ImageDataset) -> int:
    return dataset.channels * dataset.height * dataset.width


@dataclass
class Linear(Model):
    """Softmax regression; 7,850 parameters on 28x28 pixels and 10 classes."""

    name: str = "linear"

    @override
    def build(self, dataset: ImageDataset) -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(_pixels(dataset), dataset.classes))


@dataclass
class MLP(Model):
    """Fully connected layers with tanh.

    Attributes:
        hidden: widths of the hidden layers.
    """

    name: str = "mlp"
    hidden: list[int] = field(default_factory=lambda: [64])

    def __post_init__(self) -> None:
        require(all(width > 0 for width in self.hidden), "model.hidden", list(self.hidden), "widths > 0")

    @override
    def build(self, dataset: ImageDataset) -> nn.Module:
        layers: list[nn.Module] = [nn.Flatten()]
        width = _pixels(dataset)
        for hidden in self.hidden:
            layers += [nn.Linear(width, hidden), nn.Tanh()]
            width = hidden
        return nn.Sequential(*layers, nn.Linear(width, dataset.classes))
