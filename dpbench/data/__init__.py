"""Data sets: thin over torchvision and scikit-learn, on the device if they fit."""

from dpbench.data.augmentation import Augmentation
from dpbench.data.images import ImageDataset
from dpbench.data.resident import Split, Splits

__all__ = ["Augmentation", "ImageDataset", "Split", "Splits"]
