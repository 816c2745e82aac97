"""Layers that torch does not have."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from typing_extensions import override


def group_norm(channels: int, groups: int) -> nn.GroupNorm:
    """Group norm with gcd(groups, channels) groups, as Opacus puts it in the place of batch norm."""
    return nn.GroupNorm(math.gcd(groups, channels), channels)


class WSConv2d(nn.Conv2d):
    """Convolution with scaled weight standardisation and a gain per output channel (Brock et al. 2021; De et al. 2022).

    Each filter w_p becomes gain_p (w_p - mean) / sqrt(max(n var, 1e-4)) over its n weights before it is applied.

    Attributes:
        gain: shape (P,), 1 at first; a buffer in classes where it is not trained.
    """

    SMALLEST = 1e-4

    gain: Tensor

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int,
        *,
        stride: int = 1,
        padding: int = 0,
        bias: bool = True,
    ) -> None:
        super().__init__(in_channels, out_channels, kernel_size, stride=stride, padding=padding, bias=bias)
        self._begin_gain()

    def _begin_gain(self) -> None:
        self.gain = nn.Parameter(torch.ones(self.out_channels))

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


class StdConv2d(WSConv2d):
    """Convolution with filters standardised to mean 0 and variance 1, without a gain (Qiao et al. 2019), as in BiT.

    That is a gain of sqrt(n) for filters of n weights, which is not trained.
    """

    @override
    def _begin_gain(self) -> None:
        gain = torch.full((self.out_channels,), math.sqrt(self.weight[0].numel()))
        self.register_buffer("gain", gain, persistent=False)
