"""The sums that engines are asked for, and their values by one backward pass per sample."""

from __future__ import annotations

import math
from collections.abc import Sequence
from copy import deepcopy
from statistics import median
from typing import NamedTuple

import torch
from torch import Tensor, nn

from benchmarks.models import Case
from dpbench.training.losses import per_sample_loss

# Scale of the normal displacement of the second iterate, the probe, from the first.
PROBE = 0.01
# Samples whose median norm is the threshold, so that some are clipped and some are not.
THRESHOLD_SAMPLES = 8


# Numbers whose squares are added up in float32.
NORM_CHUNK = 2**18

# A vector in pieces, one for each parameter.
Pieces = Sequence[Tensor]


class Mixture(NamedTuple):
    """Weights of the gradients at the current iterate and at the probe, in this order."""

    current: float
    probe: float


ONE_POINT = Mixture(1.0, 0.0)
DISK = Mixture(-0.4, 1.4)
PMLF = Mixture(0.5, 0.5)


def trained(model: nn.Module) -> list[nn.Parameter]:
    """The trained parameters, in the order of every flat vector here."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def probe_of(iterate: Tensor) -> Tensor:
    """The second iterate that goes with the first, shape (d,); the same at every call."""
    generator = torch.Generator().manual_seed(1)
    return iterate + PROBE * torch.randn(iterate.shape, generator=generator).to(iterate)


class Reference:
    """Exact sums over the samples of a case, each sample's gradient from a backward pass of its own.

    Attributes:
        threshold: C, chosen by the case.
        clipped: Σ_i clip(Σ_j w_j ∇f(θ_j; x_i)) of each mixture, shape (d,).
        plain: Σ_i ∇f(θ; x_i), shape (d,).
    """

    def __init__(self, case: Case) -> None:
        self._case = case
        self._models = (case.model, deepcopy(case.model))
        parameters = trained(self._models[1])
        iterate = nn.utils.parameters_to_vector(parameters).detach()
        nn.utils.vector_to_parameters(probe_of(iterate), parameters)
        few = [_norm(self._gradient(0, sample)) for sample in range(min(THRESHOLD_SAMPLES, case.batch))]
        self.threshold = median(few)
        plain = _zeros(parameters)
        clipped = {mixture: _zeros(parameters) for mixture in (ONE_POINT, DISK, PMLF)}
        mixed = _zeros(parameters)
        for sample in range(case.batch):
            current, probe = self._gradient(0, sample), self._gradient(1, sample)
            _add(plain, current, 1.0)
            for mixture, totals in clipped.items():
                if mixture != ONE_POINT:
                    _mix(mixed, current, probe, mixture)
                vector = current if mixture == ONE_POINT else mixed
                _add(totals, vector, min(1.0, self.threshold / _norm(vector)))
        self.plain = flattened(plain)
        self.clipped = {mixture: flattened(totals) for mixture, totals in clipped.items()}

    def _gradient(self, point: int, sample: int) -> Pieces:
        model, one = self._models[point], slice(sample, sample + 1)
        loss = per_sample_loss(model(self._case.inputs[one]), self._case.targets[one]).sum()
        return torch.autograd.grad(loss, trained(model))


def flattened(pieces: Pieces) -> Tensor:
    """The flat vector, shape (d,)."""
    return torch.cat([piece.detach().reshape(-1) for piece in pieces])


def _zeros(parameters: Pieces) -> list[Tensor]:
    return [torch.zeros_like(parameter, requires_grad=False) for parameter in parameters]


def _add(totals: Pieces, vector: Pieces, factor: float) -> None:
    for total, piece in zip(totals, vector, strict=True):
        total.add_(piece, alpha=factor)


def _mix(out: Pieces, current: Pieces, probe: Pieces, mixture: Mixture) -> None:
    for piece, a, b in zip(out, current, probe, strict=True):
        torch.mul(a, mixture.current, out=piece).add_(b, alpha=mixture.probe)


def _norm(vector: Pieces) -> float:
    # In float32 a sum of many squares would be off by more than the engines are.
    parts = (part for piece in vector for part in piece.reshape(-1).split(NORM_CHUNK))
    return math.sqrt(sum(float(part.dot(part)) for part in parts))
