"""The contract of a model."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from dpbench.data import ImageDataset
from dpbench.errors import UserError


@dataclass
class Model:
    """Settings of a model.

    Attributes:
        name: which model.
    """

    name: str = ""

    def check(self, dataset: ImageDataset) -> None:
        """Raise `UserError` unless the model fits the data set; reads no data."""

    def build(self, dataset: ImageDataset) -> nn.Module:
        """The module, which maps (B, C, H, W) to logits (B, classes); draws its weights from torch's generator."""
        raise NotImplementedError

    def _require_pixels(self, dataset: ImageDataset, sizes: tuple[int, ...]) -> None:
        if dataset.height != dataset.width or dataset.height not in sizes:
            wanted = " or ".join(f"{size}x{size}" for size in sizes)
            raise UserError(
                f"takes images of {wanted} pixels, but dataset={dataset.name} has {dataset.height}x{dataset.width}",
                field="model",
                value=self.name,
            )
