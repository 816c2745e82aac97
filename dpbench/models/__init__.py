"""Models, each a dataclass of its settings that builds a torch module for a data set."""

from dpbench.models.base import Model
from dpbench.models.cnn import CNN5, SmallCNN
from dpbench.models.dense import MLP, Linear
from dpbench.models.wide_resnet import WideResNet

__all__ = ["CNN5", "MLP", "Linear", "Model", "SmallCNN", "WideResNet"]
