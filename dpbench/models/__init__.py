"""Models, each a dataclass of its settings that builds a torch module for a data set."""

from dpbench.models.base import Model, PretrainedModel
from dpbench.models.cnn import CNN5, AbadiCNN, SmallCNN
from dpbench.models.dense import MLP, Dense, Linear
from dpbench.models.efficientnet import EfficientNet
from dpbench.models.language import GPT2, NextToken, TextEncoder
from dpbench.models.residual import BiTResNet, ResNet
from dpbench.models.text import CharacterLSTM, SmallTransformer, TextModel
from dpbench.models.vit import VisionTransformer
from dpbench.models.wide_resnet import WideResNet

__all__ = [
    "CNN5",
    "GPT2",
    "MLP",
    "AbadiCNN",
    "BiTResNet",
    "CharacterLSTM",
    "Dense",
    "EfficientNet",
    "Linear",
    "Model",
    "NextToken",
    "PretrainedModel",
    "ResNet",
    "SmallCNN",
    "SmallTransformer",
    "TextEncoder",
    "TextModel",
    "VisionTransformer",
    "WideResNet",
]
