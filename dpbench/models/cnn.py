"""Small convolutional networks of the papers."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn
from typing_extensions import override

from dpbench.data import ImageDataset
from dpbench.models.base import Model


@dataclass
class CNN5(Model):
    """The five-layer CNN of DOPPLER, DiSK and DP-PMLF, with group norm.

    Four blocks of 3x3 convolution (32, 64, 128, 256 channels), tanh, 2x2 max pooling (first three) and group norm
    (16 groups), then a 3x3 convolution to the classes and average pooling. 28x28 images are padded to 32x32.
    412,426 parameters on CIFAR-10, 411,850 on MNIST.
    """

    name: str = "cnn5"

    @override
    def check(self, dataset: ImageDataset) -> None:
        self._require_pixels(dataset, (28, 32))

    @override
    def build(self, dataset: ImageDataset) -> nn.Module:
        self.check(dataset)
        layers: list[nn.Module] = [nn.ZeroPad2d((32 - dataset.height) // 2)] if dataset.height < 32 else []
        channels = dataset.channels
        for width in (32, 64, 128, 256):
            layers += [nn.Conv2d(channels, width, 3, padding=1), nn.Tanh()]
            if width < 256:
                layers.append(nn.MaxPool2d(2))
            layers.append(nn.GroupNorm(16, width))
            channels = width
        head = [nn.Conv2d(channels, dataset.classes, 3, padding=1), nn.AvgPool2d(4), nn.Flatten()]
        return nn.Sequential(*layers, *head)


@dataclass
class SmallCNN(Model):
    """The two-convolution tutorial CNN on three channels; 28,058 parameters with 10 classes (DC-SGD, MNIST).

    A grey image is repeated on the three channels.
    """

    name: str = "cnn_small"

    @override
    def check(self, dataset: ImageDataset) -> None:
        self._require_pixels(dataset, (28,))

    @override
    def build(self, dataset: ImageDataset) -> nn.Module:
        self.check(dataset)
        return nn.Sequential(
            *([_ToThreeChannels()] if dataset.channels == 1 else []),
            nn.Conv2d(3, 16, 8, stride=2, padding=3),
            nn.ReLU(),
            nn.MaxPool2d(2, stride=1),
            nn.Conv2d(16, 32, 4, stride=2),
            nn.ReLU(),
            nn.MaxPool2d(2, stride=1),
            nn.Flatten(),
            nn.Linear(512, 32),
            nn.ReLU(),
            nn.Linear(32, dataset.classes),
        )


class _ToThreeChannels(nn.Module):
    """Repeats a grey image on three channels."""

    def forward(self, x: Tensor) -> Tensor:
        return x.expand(-1, 3, -1, -1)
