"""Random views of images, drawn on the device."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import override

from dpbench.errors import UserError, require


def resized(images: Tensor, size: int) -> Tensor:
    """Images (B, C, H, W) as squares of `size` pixels a side, bilinearly; what shrinks is smoothed before."""
    if images.shape[-2:] == (size, size):
        return images
    return F.interpolate(images, (size, size), mode="bilinear", antialias=True)


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
        if self.copies > 1 and not self.random:
            raise UserError(
                "all views would be the same; choose crop or flip", field="augmentation.copies", value=self.copies
            )

    @property
    def random(self) -> bool:
        """Whether two views of an image can differ."""
        return self.crop > 0 or self.flip

    def views(self, images: Tensor, generator: torch.Generator) -> Tensor:
        """Views of images (B, C, H, W): (B, K, C, H, W), or (B, C, H, W) where K is 1."""
        if not self.random:
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


@dataclass
class AutoAugment(Augmentation):
    """AutoAugment's policy for CIFAR-10 as torchvision has it, then crops and flips (Cubuk et al. 2019, table 7).

    Each view draws one of 25 pairs of operations, and of each of the two whether it is carried out.

    Attributes:
        size: pixels a side to which images are resized before anything is drawn, that of the model; null leaves them.
        mean: of the data set, which its images are normalised by.
        std: of the data set.
    """

    size: int | None = None
    mean: list[float] = field(default_factory=lambda: [0.0])
    std: list[float] = field(default_factory=lambda: [1.0])

    @property
    @override
    def random(self) -> bool:
        return True

    @override
    def views(self, images: Tensor, generator: torch.Generator) -> Tensor:
        from dpbench.data.autoaugment import autoaugment  # takes seconds to import

        images = images if self.size is None else resized(images, self.size)
        mean, std = (torch.tensor(of, device=images.device).view(-1, 1, 1) for of in (self.mean, self.std))
        # The operations are defined on bytes.
        levels = (images * std + mean).mul_(255).round_().clamp_(0, 255).to(torch.uint8)
        changed = autoaugment(levels.repeat_interleave(self.copies, dim=0), generator)
        moved = Augmentation(crop=self.crop, flip=self.flip).views((changed / 255 - mean) / std, generator)
        return moved if self.copies == 1 else moved.unflatten(0, (len(images), self.copies))
