"""Passes of a model by a given way: losses and per-sample gradients of one micro-batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypedDict

import torch
from torch import Tensor, nn

from dpbench.errors import require
from dpbench.gradients.choice import Chooser
from dpbench.gradients.flat import FlatParameters
from dpbench.gradients.functional import by_vmap, one_by_one
from dpbench.gradients.loss import Loss, sample_losses
from dpbench.gradients.owners import Owners
from dpbench.gradients.pooling import wants_channels_last
from dpbench.gradients.recording import HOLD, Parameters, Read, Recording, direct
from dpbench.gradients.summands import Growing, Held
from dpbench.gradients.tape import Tape
from dpbench.gradients.uses import Direct
from dpbench.gradients.uses.base import full
from dpbench.gradients.verify import without_fast_paths
from dpbench.gradients.way import Books, Rows, Way
from dpbench.gradients.weights import Weights
from dpbench.query import Point
from dpbench.randomness import Generators


class PassOptions(TypedDict, total=False):
    """Options of `Passes`, for what extends it."""

    per_layer: bool
    views: int
    autocast: torch.dtype | None


class Passes:
    """Makes passes of a model.

    Attributes:
        model: maps inputs to outputs.
        flat: its parameters that are trained.
        loss: per-sample losses of outputs and targets.
        per_layer: one group of parameters per layer instead of one for all.
        views: K.
        in_half: autocast runs the model.
        owners: of the parameters.
        channels_last: books are kept fastest where convolutions give their channels last.
        reads: what layers that keep books have read in the last pass.
    """

    def __init__(
        self,
        model: nn.Module,
        flat: FlatParameters,
        loss: Loss,
        *,
        per_layer: bool = False,
        views: int = 1,
        autocast: torch.dtype | None = None,
    ) -> None:
        """Find out which layers have parameters to train.

        Args:
            model: maps inputs (B, ...) to outputs whose dimension 0 is the sample.
            flat: its trainable parameters.
            loss: per-sample losses (B,) of outputs and targets.
            per_layer: one group of parameters per layer instead of one for all.
            views: K; where it is more than 1, inputs are (B, K, ...) and a sample's loss is the mean over its views.
            autocast: torch.bfloat16 to let autocast run the model in it; norms and sums are taken in float32.

        Raises:
            UserError: a layer mixes samples, or autocast is to run the model in another type than bfloat16.
        """
        # The range of float16 is too small for gradients that nothing scales: they would be zeros, or infinite.
        require(autocast in (None, torch.bfloat16), "autocast", autocast, "torch.bfloat16, or None")
        self.flat = flat
        self.model = model
        self.loss = loss
        self.per_layer = per_layer
        self.views = views
        self.in_half = autocast is not None
        self.owners = Owners(model, flat, per_layer=per_layer)
        self.channels_last = wants_channels_last([layer for layer, _ in self.owners.known], flat.vector.device)
        self.reads: set[Read] = set()
        self._autocast = autocast
        self._chooser = Chooser()

    @property
    def groups(self) -> int:
        """G, how many groups of parameters have a norm of their own."""
        return max(self.owners.groups.values()) + 1

    def losses(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """f(θ; x_i), shape (B,), by the model itself.

        Args:
            inputs: (B, ...), or (B, K, ...) with K > 1 views of each sample.
            targets: (B, ...).
        """
        return sample_losses(self.model, self.loss, inputs, targets, self.views)

    def one_by_one(self) -> Rows:
        """The way that is right by definition."""
        return Rows(one_by_one(self.model, self.flat, self.loss, self.views), by_plain_autograd=True)

    def by_vmap(self) -> Rows:
        """The way by torch.func."""
        return Rows(by_vmap(self.model, self.flat, self.loss, self.views), by_plain_autograd=False)

    def way_of(self, plain: dict[str, Any]) -> Way:
        """The way whose `plain()` this is, for this model."""
        if "by_plain_autograd" in plain:
            return self.one_by_one() if plain["by_plain_autograd"] else self.by_vmap()
        return Books(**plain)

    def of_copy(self, copy: nn.Module) -> Passes:
        """The same for a copy of the model, in full precision and with one group."""
        return Passes(copy, FlatParameters(copy), self.loss, views=self.views)

    def autocast(self) -> torch.autocast:
        """The context in which the model runs.

        It keeps no weights in half precision from one use to the next: within a context of somebody else torch would
        keep them for longer than the iterate that they are of.
        """
        return torch.autocast(self.flat.vector.device.type, self._autocast, enabled=self.in_half, cache_enabled=False)

    def record_by(self, way: Way, points: Sequence[Point], inputs: Tensor, targets: Tensor) -> Tape:
        """Per-sample gradients of one micro-batch, by a way that is not compared with anything.

        Args:
            way: of the model.
            points: (weight, iterate) pairs; iterates have shape (d,).
            inputs: (B, ...), B > 0, or (B, K, ...) with K > 1 views of each sample.
            targets: (B, ...).

        Returns:
            The tape, valid until the parameters change; its losses are those of the first point.
        """
        summands: dict[Parameters, Growing] = {}
        losses: list[Tensor] = []
        self.reads = set()
        # A pass that is recorded as a CUDA graph draws nothing, and generators can't be read meanwhile.
        capturing = inputs.is_cuda and torch.cuda.is_current_stream_capturing()
        generators = generators_of(inputs)
        before = generators.state_dict() if (len(points) > 1 or way.draws) and not capturing else None
        for weight, iterate in points:
            # The same masks at all iterates. Also at the first: cuDNN's recurrent layers draw theirs from a state of
            # their own, which loading a generator makes anew.
            if before is not None:
                generators.load_state_dict(before)
            # Backward passes too read the parameters, so everything happens at the iterate.
            with self.flat.at(iterate):
                if isinstance(way, Books):
                    found = self._keep_books(way, weight, len(points), inputs, targets, summands)
                else:
                    with self.autocast():
                        found, rows = way.gradients(inputs, targets)
                    self._add_rows(rows.mul_(weight), summands)
            losses.append(full(found.detach()))
        return Tape(losses[0], self.flat, summands, self.owners.groups)

    def _keep_books(
        self,
        way: Books,
        weight: float | Tensor,
        points: int,
        inputs: Tensor,
        targets: Tensor,
        summands: dict[Parameters, Growing],
        weights: Weights | None = None,
    ) -> Tensor:
        """Losses at these weights; what their gradients are made of goes to the summands.

        Args:
            way: of book-keeping.
            weight: of the point; for all samples, or of each, shape (B,).
            points: how many there are.
            inputs: as for `record_by`.
            targets: as for `record_by`.
            summands: of all points so far.
            weights: what the layers compute with; the parameters as they are by default.
        """
        rows, weights = len(targets) * self.views, weights or Weights(channels_last=way.channels_last)
        recording = Recording(len(targets), rows, points, self.flat.parameters, self._chooser, summands, weights)
        with self.flat.frozen(), torch.enable_grad():
            with self.owners.watched(recording, way.leading), without_fast_paths(), self.autocast():
                losses = full(self.losses(inputs, targets))
            self.reads |= recording.reads
            if losses.requires_grad:
                losses.backward(torch.ones_like(losses) * weight)
        return losses

    def _add_rows(self, rows: Tensor, summands: dict[Parameters, Growing]) -> None:
        sizes = [parameter.numel() for parameter in self.flat.parameters]
        for parameter, part in zip(self.flat.parameters, rows.split(sizes, 1), strict=True):
            summand = summands.setdefault((parameter,), Held(HOLD))
            summand.add(direct(part), Direct((tuple(parameter.shape),)))


def generators_of(inputs: Tensor) -> Generators:
    """Those that a model may draw from for these inputs."""
    return Generators([inputs.device] if inputs.is_cuda else [])
