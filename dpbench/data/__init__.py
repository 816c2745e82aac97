"""Data sets: thin over torchvision, scikit-learn, datasets and tokenizers, on the device if they fit."""

from dpbench.data.augmentation import Augmentation, AutoAugment
from dpbench.data.base import Dataset
from dpbench.data.images import ImageDataset
from dpbench.data.shards import Shard
from dpbench.data.splits import Prompts, Samples, Split, Splits
from dpbench.data.tables import TableDataset
from dpbench.data.text import TextDataset
from dpbench.data.tokens import IGNORED, TokenSplit

__all__ = [
    "IGNORED",
    "Augmentation",
    "AutoAugment",
    "Dataset",
    "ImageDataset",
    "Prompts",
    "Samples",
    "Shard",
    "Split",
    "Splits",
    "TableDataset",
    "TextDataset",
    "TokenSplit",
]
