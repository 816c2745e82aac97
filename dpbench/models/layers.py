"""Layers that torch does not have."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from typing_extensions import override


class WSConv2d(nn.Conv2d):
    """Convolution with scaled weight standardisation and a gain per output channel (Brock et al. 2021; De et al. 2022).

    Each filter w_p becomes gain_p (w_p - mean) / sqrt(max(n var, 1e-4)) over its n weights before it is applied.

    Attributes:
        gain: shape (P,), 1 at first.
    """

    SMALLEST = 1e-4

    def __init__(
        self, in_channels: int, out_channels: int, kernel_size: int, *, stride: int = 1, padding: int = 0
    ) -> None:
        super().__init__(in_channels, out_channels, kernel_size, stride=stride, padding=padding)
        self.gain = nn.Parameter(torch.ones(out_channels))

    def statistics(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and inverse scale of each filter of weights (..., C, kh, kw), shape (..., 1) each."""
        filters = weight.flatten(-3)
        var, mean = torch.var_mean(filters, dim=-1, correction=0, keepdim=True)
        return mean, torch.rsqrt((var * filters.shape[-1]).clamp(min=self.SMALLEST))

    def standardised(self) -> Tensor:
        """The filters without their gain, shape (P, C, kh, kw)."""
        mean, scale = self.statistics(self.weight)
        return ((self.weight.flatten(1) - mean) * scale).view_as(self.weight)

    @override
    def forward(self, input: Tensor) -> Tensor:
        weight = self.standardised() * self.gain.view(-1, 1, 1, 1)
        output: Tensor = self._conv_forward(input, weight, self.bias)
        return output
