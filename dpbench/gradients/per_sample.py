"""Per-sample gradients of Σ_j w_j f(θ_j; x_i): their norms, and their weighted sums."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from dpbench.errors import UserError
from dpbench.gradients.flat import FlatParameters
from dpbench.gradients.rules import Rule, refuse_mixing, rule_for
from dpbench.query import Point

Loss = Callable[[Tensor, Tensor], Tensor]


class _Call(NamedTuple):
    """One call of a layer: what the rule needs."""

    layer: nn.Module
    rule: Rule
    input: Tensor
    output: GradientEdge


class Tape:
    """Per-sample gradients of one micro-batch, G_i = Σ_j w_j ∇f(θ_j; x_i), ready to be clipped and summed.

    A sample whose gradient is not finite counts with norm inf and adds exactly nothing to any sum, whatever its
    factor: one broken sample can neither stop training nor exceed its bound.

    Attributes:
        losses: f(θ_J; x_i) at the last point J of the query, shape (B,), detached.
    """

    def __init__(self, losses: Tensor, gradients: list[Tensor], groups: Sequence[int]) -> None:
        self.losses = losses
        self._gradients = gradients  # per parameter, each (B, *shape), in the order of the flat vector
        self._groups = groups
        self._norms = self._compute_norms()

    def _compute_norms(self) -> Tensor:
        squares = self.losses.new_zeros(max(self._groups) + 1, len(self.losses))
        for gradient, group in zip(self._gradients, self._groups, strict=True):
            squares[group] += gradient.flatten(1).square().sum(1)
        norms = squares.sqrt().nan_to_num(nan=torch.inf, posinf=torch.inf)
        broken = norms.isinf().any(0)
        if broken.any():
            for gradient in self._gradients:
                gradient[broken] = 0.0
            norms[:, broken] = torch.inf
        return norms

    def norms(self) -> Tensor:
        """Norms of each parameter group and sample, shape (G, B)."""
        return self._norms

    def weighted_sum(self, factors: Tensor) -> Tensor:
        """Σ_i factor_i G_i as a flat vector.

        Args:
            factors: shape (G, B), a factor for each parameter group and sample.

        Returns:
            Shape (d,).
        """
        parts = [
            factors[group] @ gradient.flatten(1) for gradient, group in zip(self._gradients, self._groups, strict=True)
        ]
        return torch.cat(parts)


class PerSampleGradients:
    """Computes tapes of a model by hooks on its layers.

    One forward pass and one backward pass for output gradients only per iterate; per-sample parameter gradients
    then come from each layer's input and output gradient (rules.py) and add up over iterates before any norm is
    taken, so clipping sees the mixture, exactly. They are held for one micro-batch: B·d numbers.

    Attributes:
        flat: the parameters that are trained.
    """

    def __init__(self, model: nn.Module, flat: FlatParameters, loss: Loss, *, per_layer: bool = False) -> None:
        """Check that every trainable parameter belongs to a layer with a rule.

        Args:
            model: maps inputs (B, ...) to outputs whose dimension 0 is the sample.
            flat: its trainable parameters.
            loss: per-sample losses (B,) of outputs and targets.
            per_layer: one group of parameters per layer instead of one for all.

        Raises:
            UserError: a layer mixes samples or has no rule.
        """
        self.flat = flat
        self._model = model
        self._loss = loss
        self._rules: dict[nn.Module, Rule] = {}
        group_of: dict[int, int] = {}
        for name, layer in model.named_modules():
            refuse_mixing(name, layer)
            own = [p for p in layer.parameters(recurse=False) if p.requires_grad]
            if own:
                self._rules[layer] = rule_for(name, layer)
                group_of.update({id(p): len(self._rules) - 1 if per_layer else 0 for p in own})
        self._groups = [group_of[id(parameter)] for parameter in flat.parameters]
        self._checked = False

    def record(self, points: Sequence[Point], inputs: Tensor, targets: Tensor) -> Tape:
        """Per-sample gradients of one micro-batch.

        Args:
            points: (weight, iterate) pairs; iterates have shape (d,).
            inputs: (B, ...), B > 0.
            targets: (B, ...).
        """
        total: dict[Tensor, Tensor] = {}
        for weight, iterate in points:
            losses, gradients = self._at(iterate, inputs, targets)
            for parameter, gradient in gradients.items():
                if parameter in total:
                    total[parameter].add_(gradient, alpha=weight)
                else:
                    total[parameter] = gradient if weight == 1 else gradient.mul_(weight)
        batch = len(inputs)
        ordered = [total[p] if p in total else p.new_zeros(batch, *p.shape).detach() for p in self.flat.parameters]
        return Tape(losses, ordered, self._groups)

    def _at(self, iterate: Tensor, inputs: Tensor, targets: Tensor) -> tuple[Tensor, dict[Tensor, Tensor]]:
        """Losses and per-sample gradients at one iterate."""
        # Backward passes too read the parameters, so everything happens at the iterate.
        with self.flat.at(iterate), torch.enable_grad():
            calls: list[_Call] = []
            handles = [layer.register_forward_hook(self._recorder(calls)) for layer in self._rules]
            try:
                losses = self._loss(self._model(inputs), targets)
            finally:
                for handle in handles:
                    handle.remove()
            total = losses.sum()
            output_gradients: tuple[Tensor | None, ...] = torch.autograd.grad(
                total, [call.output for call in calls], allow_unused=True, retain_graph=not self._checked
            )
            with torch.no_grad():
                gradients = _collect(calls, output_gradients)
            if not self._checked:
                self._checked = self._check(total, gradients)
        return losses.detach(), gradients

    def _check(self, loss: Tensor, gradients: dict[Tensor, Tensor]) -> bool:
        """Compare the sum over samples with autograd's, once: a parameter used outside its layer would be missed.

        Returns:
            Whether it could be compared: all gradients are finite.
        """
        finite = True
        expected: tuple[Tensor | None, ...] = torch.autograd.grad(loss, self.flat.parameters, allow_unused=True)
        for name, parameter, want in zip(self.flat.names, self.flat.parameters, expected, strict=True):
            if want is None:
                continue
            if not want.isfinite().all():
                finite = False
                continue
            got = gradients[parameter].sum(0) if parameter in gradients else torch.zeros_like(want)
            scale = gradients[parameter].abs().sum(0).max() if parameter in gradients else want.abs().max()
            if (got - want).abs().max() > 1e-3 * scale:
                raise UserError(
                    f"parameter {name!r} is used outside its layer, so its per-sample gradients are incomplete"
                )
        return finite

    def _recorder(self, calls: list[_Call]) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], None]:
        def record(layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            calls.append(_Call(layer, self._rules[layer], inputs[0].detach(), get_gradient_edge(output)))

        return record


def _collect(calls: Sequence[_Call], output_gradients: Sequence[Tensor | None]) -> dict[Tensor, Tensor]:
    """Per-sample parameter gradients of all calls; those of a layer called twice add up."""
    gradients: dict[Tensor, Tensor] = {}
    for call, output_gradient in zip(calls, output_gradients, strict=True):
        if output_gradient is None:
            continue
        for parameter, gradient in call.rule(call.layer, call.input, output_gradient).items():
            if parameter in gradients:
                gradients[parameter] += gradient
            else:
                gradients[parameter] = gradient
    return gradients
