"""Random views of images, drawn on the device."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from dpbench.errors import UserError, require


@dataclass
class Augmentation:
    """Random crops and flips; with several views of a sample, its gradient is their mean (De et al. 2022, sec. 3).

    The mean is taken before clipping, so a sample's contribution has the same bound whatever the number of views.

    Attributes:
        copies: K, views of each sample.
        crop: the image is moved by up to so many pixels each way; what enters is its mirror image.
        flip: mirrored left to right with probability 1/2.
    """

    copies: int = 1
    crop: int = 0
    flip: bool = False

    def __post_init__(self) -> None:
        require(self.copies >= 1, "augmentation.copies", self.copies, "a whole number >= 1")
        require(self.crop >= 0, "augmentation.crop", self.crop, "a whole number >= 0")
        if self.copies > 1 and not self.crop and not self.flip:
            raise UserError(
                "all views would be the same; choose crop or flip", field="augmentation.copies", value=self.copies
            )

    def views(self, images: Tensor, generator: torch.Generator) -> Tensor:
        """Views of images (B, C, H, W): (B, K, C, H, W), or (B, C, H, W) where K is 1."""
        if not self.crop and not self.flip:
            return images
        batch, channels, height, width = images.shape
        count = batch * self.copies

        def draw(values: int) -> Tensor:
            return torch.randint(values, (count, 1), generator=generator, device=images.device)

        def along(size: int) -> Tensor:
            return torch.arange(size, device=images.device)

        rows = draw(2 * self.crop + 1) + along(height)
        columns = draw(2 * self.crop + 1) + along(width)
        if self.flip:
            columns = torch.where(draw(2) == 1, columns.flip(1), columns)
        padded = F.pad(images, (self.crop,) * 4, mode="reflect")
        sample = along(batch).repeat_interleave(self.copies)
        views = padded[
            sample[:, None, None, None],
            along(channels)[None, :, None, None],
            rows[:, None, :, None],
            columns[:, None, None, :],
        ]
        return views if self.copies == 1 else views.view(batch, self.copies, channels, height, width)
