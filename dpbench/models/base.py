"""The contract of a model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

from torch import nn

from dpbench.data import Dataset, ImageDataset, TextDataset
from dpbench.errors import UserError, require
from dpbench.stage import is_own


@dataclass
class Model(ABC):
    """Settings of a model.

    Attributes:
        name: which model.
    """

    name: str = ""

    def check(self, dataset: Any) -> None:
        """Raise `UserError` unless the model fits the data set, of whatever kind; reads no data."""
        if not isinstance(dataset, ImageDataset):
            raise self._misfit("images", dataset)

    @abstractmethod
    def build(self, dataset: Any) -> nn.Module:
        """The module for a data set that `check` lets pass; draws its weights from torch's generator.

        It maps inputs (B, ...) to logits (B, classes), or (B, T, ids) of next tokens.
        """

    def _misfit(self, takes: str, dataset: Dataset) -> UserError:
        """The data set is of another kind than what the model takes, in words."""
        message = f"takes {takes}, but dataset={dataset.name} has {dataset.holds}"
        if is_own(type(self)):
            for_texts, for_images = isinstance(dataset, TextDataset), isinstance(dataset, ImageDataset)
            extended = "TextModel" if for_texts else "Model" if for_images else "Dense"
            message += f"; extend dpbench.models.{extended} for these"
        return UserError(message, field="model", value=self.name)

    def _require_pixels(self, dataset: ImageDataset, sizes: tuple[int, ...]) -> None:
        Model.check(self, dataset)
        if dataset.height != dataset.width or dataset.height not in sizes:
            wanted = " or ".join(f"{size}x{size}" for size in sizes)
            raise UserError(
                f"takes images of {wanted} pixels, but dataset={dataset.name} has {dataset.height}x{dataset.width}",
                field="model",
                value=self.name,
            )

    def _require_grey_or_colour(self, dataset: ImageDataset) -> None:
        Model.check(self, dataset)
        if dataset.channels not in (1, 3):
            raise UserError(
                f"takes images of 1 or 3 channels, but dataset={dataset.name} has {dataset.channels}",
                field="model",
                value=self.name,
            )


@dataclass
class PretrainedModel(Model):
    """Settings of a model that may begin with weights which somebody else has trained.

    Attributes:
        pretrained: where they come from, of the kinds that the model reads; null: random weights.
    """

    pretrained: str | None = None


def require_size(size: int | None) -> None:
    """Raise `UserError` unless a model's image_size is one."""
    require(size is None or size > 0, "model.image_size", size, "a whole number > 0, or null")


def require_transformer(width: int, depth: int, heads: int) -> None:
    """Raise `UserError` unless a transformer can have tokens of this width, this depth, and these heads."""
    for name, value in (("depth", depth), ("heads", heads)):
        require(value > 0, f"model.{name}", value, "a whole number > 0")
    require(width > 0 and width % heads == 0, "model.width", width, f"a multiple of the {heads} heads")
