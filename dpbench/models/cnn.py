"""Small convolutional networks of the papers."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from torch import nn
from typing_extensions import override

from dpbench.data import ImageDataset
from dpbench.errors import require
from dpbench.models.base import Model, PretrainedModel
from dpbench.models.inputs import ToThreeChannels
from dpbench.models.pretrained import load_pretrained, train_only


@dataclass
class CNN5(Model):
    """The five-layer CNN of DOPPLER, DiSK and DP-PMLF, with group norm.

    Four blocks of 3x3 convolution (32, 64, 128, 256 channels), tanh, 2x2 max pooling (first three) and group norm
    (16 groups), then a 3x3 convolution to the classes and average pooling. 28x28 images are padded to 32x32.
    412,426 parameters on CIFAR-10, 411,850 on MNIST.

    Attributes:
        logits: outputs of the last layer; null for the number of classes. DP-PMLF's code has 100 whatever the data.
    """

    name: str = "cnn5"
    logits: int | None = None

    @override
    def check(self, dataset: ImageDataset) -> None:
        self._require_pixels(dataset, (28, 32))
        enough = self.logits is None or self.logits >= dataset.classes
        allowed = f"at least the {dataset.classes} classes of dataset={dataset.name}, or null"
        require(enough, "model.logits", self.logits, allowed)

    @override
    def build(self, dataset: ImageDataset) -> nn.Module:
        layers: list[nn.Module] = [nn.ZeroPad2d((32 - dataset.height) // 2)] if dataset.height < 32 else []
        channels = dataset.channels
        for width in (32, 64, 128, 256):
            layers += [nn.Conv2d(channels, width, 3, padding=1), nn.Tanh()]
            if width < 256:
                layers.append(nn.MaxPool2d(2))
            layers.append(nn.GroupNorm(16, width))
            channels = width
        head = [nn.Conv2d(channels, self.logits or dataset.classes, 3, padding=1), nn.AvgPool2d(4), nn.Flatten()]
        return nn.Sequential(*layers, *head)


@dataclass
class SmallCNN(Model):
    """The two-convolution tutorial CNN: 28,058 parameters with 10 classes on three channels (DC-SGD, MNIST).

    Attributes:
        repeat_grey: repeat a grey image on three channels; else its first layer has one, 26,010 parameters in all
            (the reading of ADP's MNIST network).
    """

    name: str = "cnn_small"
    repeat_grey: bool = True

    @override
    def check(self, dataset: ImageDataset) -> None:
        self._require_pixels(dataset, (28,))

    @override
    def build(self, dataset: ImageDataset) -> nn.Module:
        repeated = dataset.channels == 1 and self.repeat_grey
        return nn.Sequential(
            *([ToThreeChannels()] if repeated else []),
            nn.Conv2d(3 if repeated else dataset.channels, 16, 8, stride=2, padding=3),
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


@dataclass
class AbadiCNN(PretrainedModel):
    """Two 5x5 convolutions and two dense layers, as Abadi et al. 2016 fine-tune; the reading of ADP's CIFAR network.

    Twice 64 channels, ReLU and 2x2 max pooling, then twice 384 units with ReLU. 1,832,266 parameters on CIFAR-10.

    Attributes:
        pretrained: file with the weights to begin with, of which the last layer is left out; null: random weights.
        trained: "all", or "dense" for the three dense layers.
    """

    name: str = "cnn_abadi"
    trained: str = "all"

    def __post_init__(self) -> None:
        require(self.trained in ("all", "dense"), "model.trained", self.trained, "one of all, dense")

    @override
    def check(self, dataset: ImageDataset) -> None:
        self._require_pixels(dataset, (28, 32))

    @override
    def build(self, dataset: ImageDataset) -> nn.Module:
        pixels = dataset.height // 4 * (dataset.width // 4)
        net = nn.Sequential(
            OrderedDict(
                conv1=nn.Conv2d(dataset.channels, 64, 5, padding=2),
                relu1=nn.ReLU(),
                pool1=nn.MaxPool2d(2),
                conv2=nn.Conv2d(64, 64, 5, padding=2),
                relu2=nn.ReLU(),
                pool2=nn.MaxPool2d(2),
                flatten=nn.Flatten(),
                dense1=nn.Linear(64 * pixels, 384),
                relu3=nn.ReLU(),
                dense2=nn.Linear(384, 384),
                relu4=nn.ReLU(),
                head=nn.Linear(384, dataset.classes),
            )
        )
        if self.pretrained is not None:
            load_pretrained(net, self.pretrained, head="head.")
        train_only(net, lambda name: self.trained == "all" or name.startswith(("dense", "head")))
        return net
