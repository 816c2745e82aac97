"""Models without structure."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from torch import nn
from typing_extensions import override

from dpbench.data import Dataset
from dpbench.errors import require
from dpbench.models.base import Model


@dataclass
class Dense(Model):
    """A model of images or of rows of numbers, whose shape is the data set's `sample_shape`."""

    @override
    def check(self, dataset: Dataset) -> None:
        if not dataset.one_shape:
            raise self._misfit("images or rows of numbers", dataset)


@dataclass
class Linear(Dense):
    """Softmax regression; 7,850 parameters on 28x28 pixels and 10 classes."""

    name: str = "linear"

    @override
    def build(self, dataset: Dataset) -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(dataset.sample_shape), dataset.classes))


@dataclass
class MLP(Dense):
    """Fully connected layers with tanh.

    Attributes:
        hidden: widths of the hidden layers.
    """

    name: str = "mlp"
    hidden: list[int] = field(default_factory=lambda: [64])

    def __post_init__(self) -> None:
        require(all(width > 0 for width in self.hidden), "model.hidden", list(self.hidden), "widths > 0")

    @override
    def build(self, dataset: Dataset) -> nn.Module:
        layers: list[nn.Module] = [nn.Flatten()]
        width = math.prod(dataset.sample_shape)
        for hidden in self.hidden:
            layers += [nn.Linear(width, hidden), nn.Tanh()]
            width = hidden
        return nn.Sequential(*layers, nn.Linear(width, dataset.classes))
