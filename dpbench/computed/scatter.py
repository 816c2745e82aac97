"""How much less the gradients of a batch scatter by per-sample momentum, measured along noisy descents on digits.

DP-PMLF's lemma has their variance fall by ρ² = 1/Σ w_j², for gradients at different iterates that are independent.
Those of one sample are not, and the paper measures nothing (dp_pmlf.md 6.B-16). Data and settings are ours.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from dpbench.query import LastIterates
from dpbench.randomness import generator

BATCH = 256
STEPS = 50
LR = 0.5
THRESHOLD = 1.0
SEED = 0

MODELS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(64, 10),
    "MLP": lambda: nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10)),
}


def measured_factor(model: str, query: LastIterates, noise_multiplier: float) -> float:
    """Σ ‖g_i - ḡ‖² / Σ ‖v_i - v̄‖² over the batches of a run of DP-PMLF that query all of their iterates.

    g_i is a sample's gradient at the current iterate, v_i its momentum; bars are means over the batch. What moves the
    iterates is v, clipped and under noise, as in a private run; no filter. Pixels are in [0, 1], all is in float64.

    Args:
        model: of `MODELS`.
        query: the momentum; it starts by padding, and is used up.
        noise_multiplier: z of each step's sum.
    """
    from sklearn.datasets import load_digits  # takes a second

    digits = load_digits()
    pictures, labels = torch.from_numpy(digits.data / 16), torch.from_numpy(digits.target)
    draws, noise = (generator(SEED, "synthetic", torch.device("cpu"), name) for name in ("scatter", "scatter noise"))
    network = MODELS[model]().double()
    gradients = _per_sample(network)
    iterate = torch.cat([_initial(shape, draws).flatten() for shape in _shapes(network).values()])
    before = after = 0.0
    for _ in range(STEPS):
        batch = torch.rand(len(labels), generator=draws) < BATCH / len(labels)
        points = query.points(iterate)
        rows = [gradients(point.iterate, pictures[batch], labels[batch]) for point in points]
        momentum = sum((point.weight * row for point, row in zip(points, rows, strict=True)), torch.zeros(()))
        if len(points) == query.length:
            before += _scatter(rows[0])
            after += _scatter(momentum)
        clipped = momentum * (THRESHOLD / momentum.norm(dim=1, keepdim=True)).clamp(max=1)
        drawn = torch.empty_like(iterate).normal_(generator=noise)
        iterate = iterate - LR * (clipped.sum(0) + noise_multiplier * THRESHOLD * drawn) / BATCH
    return before / after


def _scatter(rows: Tensor) -> float:
    """Σ ‖row - mean‖² of rows of shape (B, d)."""
    return float((rows - rows.mean(0)).square().sum())


def _shapes(network: nn.Module) -> dict[str, torch.Size]:
    return {name: parameter.shape for name, parameter in network.named_parameters()}


def _initial(shape: torch.Size, draws: torch.Generator) -> Tensor:
    """Normal weights of variance 1/(number of inputs), no biases."""
    values = torch.zeros(shape, dtype=torch.float64)
    return values.normal_(0, shape[1] ** -0.5, generator=draws) if len(shape) > 1 else values


def _per_sample(network: nn.Module) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Gradients of shape (B, d) of the cross-entropy at parameters of shape (d,)."""
    shapes = _shapes(network)

    def loss(parameters: Tensor, picture: Tensor, label: Tensor) -> Tensor:
        parts = parameters.split([shape.numel() for shape in shapes.values()])
        named = {name: part.view(shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)}
        return nn.functional.cross_entropy(functional_call(network, named, (picture,)), label)

    return vmap(grad(loss), in_dims=(None, 0, 0))
