"""Per-sample gradients of Σ_j w_j f(θ_j; x_i): their norms, and their weighted sums."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from copy import deepcopy
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, nn

from dpbench.errors import PlainWarning, UserError
from dpbench.gradients.choice import Chooser
from dpbench.gradients.clipped import Clipped, Factors, Running, clipped_at_once, clipped_by
from dpbench.gradients.flat import FlatParameters
from dpbench.gradients.functional import by_vmap, one_by_one
from dpbench.gradients.layers import Forward, forward_of, refuse_mixing
from dpbench.gradients.loss import Loss, sample_losses
from dpbench.gradients.pooling import max_pooling, wants_channels_last
from dpbench.gradients.recording import HOLD, Parameters, Recording, direct
from dpbench.gradients.replay import Replays, padded, replayable, rounded_up
from dpbench.gradients.settle import UNDECIDED, problem_in_batch, settle
from dpbench.gradients.summands import Held, Summand
from dpbench.gradients.tape import Tape
from dpbench.gradients.uses import Direct
from dpbench.gradients.uses.base import full
from dpbench.gradients.verify import (
    Compared,
    is_due,
    may_be_out_of_memory,
    modes_of,
    out_of_memory,
    without_fast_paths,
)
from dpbench.gradients.way import Books, Rows, Way
from dpbench.gradients.weights import Weights
from dpbench.query import Point
from dpbench.randomness import Generators
from dpbench.stage import State


class PerSampleGradients:
    """Computes tapes of a model.

    One forward pass, and one backward pass that makes output gradients only, per iterate. Layers of known kinds
    (layers.py) keep books; parameters outside such layers are repeated per sample. Before books are relied on they
    are compared with autograd, sample by sample and in float64; a model whose books are wrong, or that has other
    layers with parameters, takes `torch.func`, or one backward pass per sample, and says so.

    Attributes:
        model: maps inputs to outputs.
        flat: its parameters that are trained.
        loss: per-sample losses of outputs and targets.
        views: K.
        in_half: autocast runs the model.
        channels_last: books are kept fastest where convolutions give their channels last.
        most: samples that are computed at once at most, since memory ran out; None where it never did.
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
        strategies: frozenset[str] | None = None,
    ) -> None:
        """Find out which layers have parameters to train.

        Args:
            model: maps inputs (B, ...) to outputs whose dimension 0 is the sample.
            flat: its trainable parameters.
            loss: per-sample losses (B,) of outputs and targets.
            per_layer: one group of parameters per layer instead of one for all.
            views: K; where it is more than 1, inputs are (B, K, ...) and a sample's loss is the mean over its views.
            autocast: torch.bfloat16 to let autocast run the model in it; norms and sums are taken in float32.
            strategies: kinds of strategies to choose among (uses/base.py); None for all.

        Raises:
            UserError: a layer mixes samples.
        """
        self.flat = flat
        self.model = model
        self.loss = loss
        self.views = views
        self.in_half = autocast is not None
        self._autocast = autocast
        self._chooser = Chooser(strategies)
        self._layers: list[tuple[nn.Module, Forward]] = []
        self._direct: list[tuple[nn.Module, str, Tensor]] = []
        self._groups: dict[Tensor, int] = {}
        self._find_layers(per_layer)
        self.channels_last = wants_channels_last([layer for layer, _ in self._layers], flat.vector.device)
        self._way: Way | None = None
        self._modes = modes_of(model)
        self._samples_compared = 0
        self._batches = 0
        self._compared_batches = Compared()
        self.most: int | None = None
        self._replays = Replays(model, flat)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """A copy of the model with gradients of its own: what is bound to the model is made anew for the copy."""
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        vars(copied).update({k: deepcopy(v, memo) for k, v in vars(self).items() if k != "_replays"})
        copied._replays = Replays(copied.model, copied.flat)
        if isinstance(copied._way, Rows):
            copied._way = copied.one_by_one() if copied._way.by_plain_autograd else copied.by_vmap()
        return copied

    def _find_layers(self, per_layer: bool) -> None:
        """Layers that keep books, parameters outside of them, and the group of each parameter."""
        trained = {id(parameter): parameter for parameter in self.flat.parameters}
        claimed: set[nn.Module] = set()
        for name, layer in self.model.named_modules():
            refuse_mixing(name, layer)
            if layer in claimed:
                continue
            forward = forward_of(layer)
            whole = forward is not None
            slots = [(slot, p) for slot, p in layer.named_parameters(recurse=whole) if id(p) in trained]
            if forward is max_pooling:  # the one kind that has no parameters
                self._layers.append((layer, forward))
            if not slots:
                continue
            group = len(set(self._groups.values())) if per_layer else 0
            for _, parameter in slots:
                self._groups.setdefault(parameter, group)
            if forward is not None:
                self._layers.append((layer, forward))
                claimed.update(layer.modules())
            else:
                self._direct += [(layer, slot, parameter) for slot, parameter in slots]

    @property
    def layers(self) -> list[nn.Module]:
        """Those that have parameters to train, and keep books."""
        return [layer for layer, forward in self._layers if forward is not max_pooling]

    @property
    def direct(self) -> list[str]:
        """Names of parameters that no known layer owns, within their modules."""
        return [slot for _, slot, _ in self._direct]

    @property
    def groups(self) -> int:
        """G, how many groups of parameters have a norm of their own."""
        return max(self._groups.values()) + 1

    def clipped_sum(
        self,
        points: Sequence[Point],
        batch: Iterable[tuple[Tensor, Tensor]],
        factors: Factors,
        *,
        remainder: bool = False,
    ) -> Clipped:
        """Σ_i factor_i G_i over a logical batch.

        A sample whose gradient, or the square of its norm, is not finite adds nothing, whatever its factor: one broken
        sample can neither stop training nor exceed its bound. Where memory runs out, a micro-batch is halved, and so
        are those that follow.

        Args:
            points: (weight, iterate) pairs; iterates have shape (d,).
            batch: inputs and targets of micro-batches; no sample at all gives zero.
            factors: maps norms of shape (G, B), inf for broken samples, to factors of that shape.
            remainder: also sum what the factors leave over.

        Raises:
            TypeError: a micro-batch is no pair of tensors.
            UserError: the model trains other parameters than the flat ones.
        """
        self.flat.require_of(self.model)
        running = Running(self.flat.vector, remainder=remainder)
        for part in batch:
            waiting = [_pair(part)]
            while waiting:
                x, y = waiting.pop(0)
                if not len(y):
                    continue
                if self.most is not None and len(y) > self.most:
                    waiting = list(zip(x.split(self.most), y.split(self.most), strict=True)) + waiting
                    continue
                found = self._sum_if_it_fits(points, x, y, factors, remainder)
                if found is None:
                    self.most = len(y) // 2
                    waiting.insert(0, (x, y))
                else:
                    running.add(found)
        return running.clipped()

    def _sum_if_it_fits(
        self,
        points: Sequence[Point],
        inputs: Tensor,
        targets: Tensor,
        factors: Factors,
        remainder: bool,
    ) -> Clipped | None:
        """The sum of a micro-batch of more than no samples; None if memory ran out and halving may help."""
        count, generators = len(targets), _generators(inputs)
        before: State | None = None
        try:
            way = self.way(points, inputs, targets)
            if isinstance(way, Rows) or way.draws:
                before = generators.state_dict()
            if replayable(way, inputs):
                size = rounded_up(count)
                inputs, targets = padded(inputs, size), padded(targets, size)
                replay = self._replays.of(way, partial(self.record_by, way), points, inputs, targets)
                if replay is not None:
                    found, flags = clipped_at_once(replay, count, factors, remainder)
                    if flags == [True, False, False]:
                        return found
            return clipped_by(self._record(way, points, inputs, targets), count, factors, remainder)
        except (RuntimeError, MemoryError) as error:
            if count == 1 or not may_be_out_of_memory(error):
                raise
        if before is not None:  # what is drawn hangs on the micro-batches alone, not on where memory ran out
            generators.load_state_dict(before)
        return None

    def state_dict(self) -> State:
        """What decides how gradients are rounded: strategies, and the micro-batches that fit."""
        return {"strategies": self._chooser.state_dict(), "most": self.most}

    def load_state_dict(self, state: State) -> None:
        """Go on as the state was saved."""
        self._chooser.load_state_dict(state["strategies"])
        self.most = state["most"]

    def record(self, points: Sequence[Point], inputs: Tensor, targets: Tensor) -> Tape:
        """Per-sample gradients of one micro-batch; valid until the parameters change.

        Args:
            points: (weight, iterate) pairs; iterates have shape (d,).
            inputs: (B, ...), B > 0, or (B, K, ...) with K > 1 views of each sample.
            targets: (B, ...).

        Raises:
            UserError: gradients of this batch are wrong, though those of batches before were right; or the model trains
                other parameters than the flat ones.
        """
        self.flat.require_of(self.model)
        return self._record(self.way(points, inputs, targets), points, inputs, targets)

    def _record(self, way: Way, points: Sequence[Point], inputs: Tensor, targets: Tensor) -> Tape:
        """What a way gives, or where it fails the one that is right by definition."""
        try:
            return self.record_by(way, points, inputs, targets)
        except Exception as error:
            ran_out = may_be_out_of_memory(error) if len(targets) > 1 else out_of_memory(error)
            if ran_out or (isinstance(way, Rows) and way.by_plain_autograd):
                raise
            tape = self.record_by(self.one_by_one(), points, inputs, targets)
            self._fall_back(f"{type(error).__name__}: {error}")
            return tape

    def way(self, points: Sequence[Point], inputs: Tensor, targets: Tensor) -> Way:
        """The way for a micro-batch: that of those before, which is compared with autograd now and then.

        So it is in the first one, and where samples have another shape or there are more of them, since what a model
        does may hang on either: another way is then taken if it is wrong. It is found anew for another mode.

        Args:
            points: as for `record`.
            inputs: as for `record`.
            targets: as for `record`.

        Raises:
            UserError: gradients of this batch are wrong, though those of batches before were right.
        """
        modes = modes_of(self.model)
        # One sample alone can't tell of what depends on others.
        if self._way is None or modes != self._modes or (self._samples_compared == 1 and len(inputs) > 1):
            found = settle(self, inputs, targets)
            if found is None:
                return self.one_by_one()
            self._way, self._samples_compared, self._batches = found.way, len(inputs), 0
            self._modes, self._compared_batches = modes, Compared()
            if found.complaint:
                self._fall_back(found.complaint, found.way)
        if isinstance(self._way, Rows) and self._way.by_plain_autograd:
            return self._way
        due = self._batches + 1
        known, most = self._compared_batches.has_like(inputs, targets), self._compared_batches.most
        if known and is_due(due):
            self.require_right(points, inputs[:most], targets[:most], due.bit_length() // 2)
        if not known or len(targets) > most:
            problem = problem_in_batch(self, self._way, points, inputs, targets, 0)
            if problem not in (None, UNDECIDED) and isinstance(self._way, Books) and self._way.channels_last:
                # The model may depend on the layout, as one does that views maps as vectors.
                self._way = self._way._replace(channels_last=False)
                problem = problem_in_batch(self, self._way, points, inputs, targets, 0)
            if problem == UNDECIDED:
                return self.one_by_one()
            if problem is not None:
                self._fall_back(problem)
            self._compared_batches.add(inputs, targets, len(targets))
        self._batches = due
        return self._way

    def require_right(self, points: Sequence[Point], inputs: Tensor, targets: Tensor, seed: int) -> None:
        """Raise `UserError` where the way that was found is wrong for a micro-batch.

        Args:
            points: as for `record`.
            inputs: as for `record`.
            targets: as for `record`.
            seed: of what it is compared at.
        """
        if self._way is None or (isinstance(self._way, Rows) and self._way.by_plain_autograd):
            return
        problem = problem_in_batch(self, self._way, points, inputs, targets, seed)
        if problem not in (None, UNDECIDED):
            raise UserError(
                f"the model's per-sample gradients, which were right in its first batches, are wrong in this one "
                f"({problem}), and maybe in some before it: the rows that a layer reads may follow the data, or "
                "inputs be too large for float32; change the model or scale inputs, and train anew with force=true"
            )

    def compare_anew(self) -> None:
        """Find way and strategies anew with the next micro-batch, since those before were no real samples."""
        self._way = None
        self._chooser.choices.clear()

    def _fall_back(self, complaint: str, way: Way | None = None) -> None:
        self._way = way or self.one_by_one()
        warnings.warn(
            "falling back to materialised per-sample gradients for this model: slower, and all of them are held in "
            f"memory ({complaint})",
            PlainWarning,
            stacklevel=4,
        )

    def one_by_one(self) -> Rows:
        """The way that is right by definition."""
        return Rows(one_by_one(self.model, self.flat, self.loss, self.views), by_plain_autograd=True)

    def by_vmap(self) -> Rows:
        """The way by torch.func."""
        return Rows(by_vmap(self.model, self.flat, self.loss, self.views), by_plain_autograd=False)

    def of_copy(self, copy: nn.Module) -> PerSampleGradients:
        """The same for a copy of the model, in full precision and with one group."""
        return type(self)(copy, FlatParameters(copy), self.loss, views=self.views)

    def autocast(self) -> torch.autocast:
        """The context in which the model runs."""
        return torch.autocast(self.flat.vector.device.type, self._autocast, enabled=self.in_half)

    def record_by(self, way: Way, points: Sequence[Point], inputs: Tensor, targets: Tensor) -> Tape:
        """What `record` gives, by a way that is not compared with anything; losses are those of the first point."""
        summands: dict[Parameters, Summand] = {}
        losses: list[Tensor] = []
        # Whose passes are recorded as graphs draws nothing, and generators can't be read meanwhile.
        draws = len(points) > 1 and not (inputs.is_cuda and torch.cuda.is_current_stream_capturing())
        generators = _generators(inputs)
        before = generators.state_dict() if draws else None
        for j, (weight, iterate) in enumerate(points):
            if before is not None and j > 0:  # the same masks at all iterates
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
        return Tape(losses[0], self.flat, summands, self._groups)

    def _keep_books(
        self,
        way: Books,
        weight: float | Tensor,
        points: int,
        inputs: Tensor,
        targets: Tensor,
        summands: dict[Parameters, Summand],
        weights: Weights | None = None,
    ) -> Tensor:
        """Losses at these weights; what their gradients are made of goes to the summands.

        Args:
            way: of book-keeping.
            weight: of the point; for all samples, or of each, shape (B,).
            points: how many there are.
            inputs: as for `record`.
            targets: as for `record`.
            summands: of all points so far.
            weights: what the layers compute with; the parameters as they are by default.
        """
        rows, weights = len(targets) * self.views, weights or Weights(channels_last=way.channels_last)
        recording = Recording(len(targets), rows, points, self.flat.parameters, self._chooser, summands, weights)
        with self.flat.frozen(), torch.enable_grad():
            with self._watched(recording, way), without_fast_paths(), self.autocast():
                losses = full(sample_losses(self.model, self.loss, inputs, targets, self.views))
            if losses.requires_grad:
                losses.backward(torch.ones_like(losses) * weight)
        return losses

    def _add_rows(self, rows: Tensor, summands: dict[Parameters, Summand]) -> None:
        sizes = [parameter.numel() for parameter in self.flat.parameters]
        for parameter, part in zip(self.flat.parameters, rows.split(sizes, 1), strict=True):
            summand = summands.setdefault((parameter,), Held(HOLD))
            summand.add(direct(part), Direct((tuple(parameter.shape),)))

    def used_otherwise(self, inputs: Tensor, targets: Tensor) -> str | None:
        """The name of a parameter that books do not see a use of, or None; its gradient may be zero for these samples.

        Args:
            inputs: as for `record`.
            targets: as for `record`.
        """
        with self._replaced(lambda layer, _: _of_constants(layer), Tensor.detach), torch.enable_grad():
            losses = sample_losses(self.model, self.loss, inputs, targets, self.views)
        if not losses.requires_grad:
            return None
        parts = torch.autograd.grad(losses.sum(), self.flat.parameters, allow_unused=True)
        return next((name for name, part in zip(self.flat.names, parts, strict=True) if part is not None), None)

    def _watched(self, recording: Recording, way: Books) -> AbstractContextManager[None]:
        """Let layers keep books, and each row have its own copy of the parameters outside of them."""
        return self._replaced(
            lambda layer, forward: partial(forward, recording, layer),
            lambda parameter: _repeated(recording, parameter, way.leading),
        )

    @contextmanager
    def _replaced(
        self, forwards: Callable[[nn.Module, Forward], Forward], values: Callable[[Tensor], Tensor]
    ) -> Iterator[None]:
        """Let layers have other forwards, and the owners of parameters outside of them other values."""
        own = [(layer, vars(layer).get("forward")) for layer, _ in self._layers]
        for layer, forward in self._layers:
            layer.forward = forwards(layer, forward)
        for owner, slot, parameter in self._direct:
            del owner._parameters[slot]
            setattr(owner, slot, values(parameter))
        try:
            yield
        finally:
            for layer, forward_before in own:
                del layer.forward
                if forward_before is not None:
                    layer.forward = forward_before
            for owner, slot, parameter in self._direct:
                delattr(owner, slot)
                owner._parameters[slot] = parameter  # type: ignore[assignment]


def _of_constants(layer: nn.Module) -> Forward:
    """The layer's own computation, for which autograd takes its parameters for constants."""
    forward, trained = layer.forward, [parameter for parameter in layer.parameters() if parameter.requires_grad]

    def of_constants(*args: Any, **kwargs: Any) -> Any:
        for parameter in trained:
            parameter.requires_grad_(False)
        try:
            return forward(*args, **kwargs)
        finally:
            for parameter in trained:
                parameter.requires_grad_()

    return of_constants


def _pair(part: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """A micro-batch, if it is one."""
    if not isinstance(part, Sequence) or len(part) != 2 or not all(isinstance(one, Tensor) for one in part):
        raise TypeError(
            "a micro-batch is a pair of two tensors, inputs (B, ...) and targets (B, ...); where a model takes several "
            "inputs, make one tensor of them that its forward() takes apart"
        )
    return part


def _generators(inputs: Tensor) -> Generators:
    """Those that a model may draw from for these inputs."""
    return Generators([inputs.device] if inputs.is_cuda else [])


def _repeated(recording: Recording, parameter: Tensor, leading: int) -> Tensor:
    if parameter.dim() > 1 and parameter.shape[0] == 1:
        return recording.expanded(parameter, recording.rows).squeeze(1)
    return recording.expanded(parameter, recording.rows, leading)
