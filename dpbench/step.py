"""The private step: query, clip, noise, filter, optimizer, in that order."""

from __future__ import annotations

import inspect
import math
from collections.abc import Generator, Iterable, Sequence
from functools import partial
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from dpbench.clip import Clip
from dpbench.errors import UserError, require
from dpbench.filters import Filter
from dpbench.gradients import Clipped, MicroBatch, PerSampleGradients, Request
from dpbench.noise import Noise
from dpbench.privacy.gaussian import GaussianSource, SeededGaussian, add_noise
from dpbench.privacy.ledger import Ledger
from dpbench.privacy.plan import Release
from dpbench.query import Query
from dpbench.state import State
from dpbench.threshold import Threshold
from dpbench.threshold.base import LARGEST, SMALLEST
from dpbench.update import Moved, tell, update

# What a configuration has for a private step, by name.
STAGES = ("query", "clip", "threshold", "noise", "filter")
_REMEMBERING = ("gradients", *STAGES)


class Recorder(Protocol):
    """Sees the gradients of every step, in tensors that it may not keep but by copying; of shape (d,) or as said."""

    def unnoised(self, gradient: Tensor) -> None:
        """The clipped sum over the expected batch size, before noise."""

    def norms(self, norms: Tensor, error_weight: float) -> None:
        """Norms of the samples' gradients before clipping, shape (B,), and what `PrivateStep.error_weight` says."""

    def private(self, gradient: Tensor) -> None:
        """g_t."""


class Seen(NamedTuple):
    """What a step saw of its batch, which is not private, and the threshold that it took, which is.

    Attributes:
        losses: of each sample, shape (B,).
        norms: of each sample's gradient before clipping, shape (B,); inf where it is not finite.
        threshold: C_t.
    """

    losses: Tensor
    norms: Tensor
    threshold: float


class PrivateStep:
    """One step of any method: the data are used left of g_t and never after it.

    g_t = (Σ_i clip(Σ_j w_j ∇f(θ_j; x_i)) + N(0, (z s_t Δ_t)² I)) / E[B], where z is the noise multiplier, s_t the
    relative scale of the noise, Δ_t the sensitivity that query and clip promise at threshold C_t, and E[B] the expected
    batch size. The division by E[B] uses no data. Each release is in the ledger before it is used. Where noise is
    correlated, N is row t of a matrix mechanism's noise in place of an independent draw. Where the clip feeds back,
    what it makes of earlier steps is added to the sum.

    Attributes:
        moved: the parameters that filter and optimizer move: all of them, unless processes share that work.
        recorder: gets un-noised and private gradients and norms of every step, for study; what it keeps is not private.

    Raises:
        UserError: noise multiplier, sampling rate or expected batch size is none.
        ValueError: both sources would give the same numbers, the optimizer moves other parameters than those of the
            gradients or computes the loss anew, the gradients have norms of other groups of parameters than the clip's
            scope says, or the ledger's plan is for noise of another correlation between steps, or one that begins anew
            at other steps, whose eps says nothing of this one's.
    """

    def __init__(
        self,
        gradients: PerSampleGradients,
        *,
        query: Query,
        clip: Clip,
        threshold: Threshold,
        noise: Noise,
        filter: Filter,
        optimizer: torch.optim.Optimizer,
        noise_multiplier: float,
        sampling_rate: float,
        expected_batch: float,
        ledger: Ledger,
        noise_source: GaussianSource,
        side_source: GaussianSource,
    ) -> None:
        require(0 <= noise_multiplier < math.inf, "noise_multiplier", noise_multiplier, "a finite number >= 0")
        require(0 < sampling_rate <= 1, "sampling_rate", sampling_rate, "a share of the data, above 0 and at most 1")
        require(0 < expected_batch < math.inf, "expected_batch", expected_batch, "a finite number > 0")
        optimized = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        if optimized != set(map(id, gradients.flat.parameters)):
            raise ValueError("the optimizer has other parameters than the gradients are of; make it of flat.parameters")
        closure = inspect.signature(optimizer.step).parameters.get("closure")
        if closure is not None and closure.default is inspect.Parameter.empty:
            raise ValueError(
                f"{type(optimizer).__name__} computes the loss anew within its step, a further use of the data; "
                "take an optimizer that needs gradients alone"
            )
        if isinstance(noise_source, SeededGaussian) and noise_source.repeats(side_source):
            raise ValueError("noise_source and side_source would give the same numbers; seed them differently")
        if gradients.per_layer != (clip.scope == "per_layer"):
            raise ValueError(
                f'the clip has the scope "{clip.scope}"; make the gradients for it, '
                f"PerSampleGradients(..., per_layer={clip.scope == 'per_layer'})"
            )
        if noise.correlation != ledger.plan.correlation:
            raise ValueError(
                f"the ledger's plan is for noise of correlation {ledger.plan.correlation}, not of {noise.correlation} "
                "as this noise has; make the plan with correlation=noise.correlation"
            )
        if noise.correlation is not None and noise.correlation.restart and noise.course.epoch != ledger.plan.epoch:
            raise ValueError(
                f"this noise begins anew every {noise.course.epoch} steps and in the ledger's plan every "
                f"{ledger.plan.epoch}; prepare it with the epoch of the plan"
            )
        self.gradients = gradients
        self.query, self.clip, self.threshold, self.noise, self.filter = query, clip, threshold, noise, filter
        self.optimizer = optimizer
        self.noise_multiplier = noise_multiplier
        self.sampling_rate = sampling_rate
        self.expected_batch = expected_batch
        self.ledger = ledger
        self.noise_source, self.side_source = noise_source, side_source
        self.moved: Moved = gradients.flat
        self.recorder: Recorder | None = None
        self.steps = 0
        self._noise = torch.empty_like(gradients.flat.vector, dtype=noise_source.dtype)

    def __call__(self, batch: Iterable[MicroBatch]) -> Tensor:
        """Take the step, as `take` does, with the clipped sum computed at once.

        Returns:
            The per-sample losses, shape (B,), which are not private.
        """
        step = self.take(batch)
        request = next(step)
        try:
            step.send(request.alone())
        except StopIteration as end:
            seen: Seen = end.value
            return seen.losses
        raise AssertionError("a step asks once")

    @torch.no_grad()
    def take(self, batch: Iterable[MicroBatch]) -> Generator[Request, Clipped, Seen]:
        """Take the step, halting where whoever carries it out computes the clipped sum, maybe with those of others.

        Args:
            batch: the logical batch as it was sampled, in micro-batches; none at all is a step of noise alone.

        Yields:
            The request, to which the clipped sum is sent.

        Returns:
            What it saw of the batch.
        """
        threshold = self._threshold()
        found = yield self.request(batch, threshold)
        if found.remainder is not None:
            self.clip.feed_back(found.total, found.remainder, threshold, self.expected_batch)
        self.reveal(found, threshold)
        private_gradient = self.release(found, threshold).div_(self.expected_batch)
        # Right of here: post-processing. Nothing below touches the batch.
        if self.recorder is not None:
            self.recorder.private(private_gradient)
        update(self.moved, private_gradient, self.noise_std(self.steps, threshold), self.filter, self.optimizer)
        self.steps += 1
        return Seen(found.losses, found.norms, threshold)

    def request(self, batch: Iterable[MicroBatch], threshold: float) -> Request:
        """What is asked of the gradients: Σ_i clip(G_i).

        Raises:
            TypeError: the batch is one micro-batch, not several.
            UserError: the query has more points than it promised.
        """
        if isinstance(batch, Tensor) or (isinstance(batch, Sequence) and any(isinstance(p, Tensor) for p in batch)):
            raise TypeError("a step takes micro-batches, pairs of inputs and targets: step([(inputs, targets)])")
        points = self.query.points(self.gradients.flat.vector)
        if len(points) > self.query.most_points:
            message = f"expected at most the {self.query.most_points} points that it promised, not {len(points)}"
            raise UserError(f"{message} at step {self.steps}", field="query", value=type(self.query).__name__)
        factors = partial(self.clip.factors, threshold=threshold)
        apart, feeds_back = self.query.clipped_apart, self.clip.feeds_back
        return Request(self.gradients, points, batch, factors, apart=apart, remainder=feeds_back)

    def _threshold(self) -> float:
        """C_t, for which float32 factors keep the clip's promise and noise can be made."""
        threshold = self.threshold.value(self.steps)
        if not SMALLEST <= threshold <= LARGEST:
            message = f"expected thresholds from {SMALLEST:g} to {LARGEST:g}, not {threshold:g} at step {self.steps}"
            raise UserError(message, field="threshold", value=type(self.threshold).__name__)
        if self.noise_multiplier > 0 and not 0 < (sensitivity := self.sensitivity(threshold)) < math.inf:
            message = f"expected a finite sensitivity > 0, not {sensitivity:g} at step {self.steps}"
            raise UserError(message, field="clip", value=type(self.clip).__name__)
        return threshold

    def sensitivity(self, threshold: float) -> float:
        """Δ_t: largest change of the clipped sum when one sample is added or removed."""
        return self.query.sensitivity * self.clip.sensitivity(threshold)

    def noise_std(self, step: int, threshold: float) -> float:
        """Standard deviation of the noise in each coordinate of g_t; public."""
        multiplier = self.noise_multiplier * self.noise.scale(step)
        if multiplier == 0:
            return 0.0
        return multiplier * self.noise.deviation(step) * self.sensitivity(threshold) / self.expected_batch

    def error_weight(self, step: int, threshold: float) -> float:
        """K, so that the noise of all d coordinates has the expected square K C² at threshold C; public.

        In units of gradients, of which the clip keeps more or less than the whole where it scales.
        """
        noise = self.noise_std(step, threshold) / self.clip.kept_whole(threshold)
        return len(self.gradients.flat.vector) * (noise / threshold) ** 2

    def reveal(self, found: Clipped, threshold: float) -> None:
        """Show the un-noised sum and the samples' norms to a recorder, and the sum's to an optimizer that reads it.

        An optimizer declares that it does. The one way past the noise: what comes of it is not covered by the ledger.
        No run goes it unless it is asked to by name (a recorder, or ``optim.uncertified=true``).
        """
        if self.recorder is not None:
            self.recorder.unnoised(found.total / self.expected_batch)
            self.recorder.norms(found.norms, self.error_weight(self.steps, threshold))
        if any("unnoised_norm" in group for group in self.optimizer.param_groups):
            tell(self.optimizer, unnoised_norm=float(found.total.norm()) / self.expected_batch)

    def release(self, found: Clipped, threshold: float) -> Tensor:
        """The clipped sum with its noise, in place, and what the threshold asks for beside it; both in the ledger."""
        multiplier = self.noise_multiplier * self.noise.scale(self.steps)
        self.ledger.record(Release(self.sampling_rate, multiplier, self.threshold.beside))
        if self.threshold.beside:
            self.threshold.observe(found.norms)
            # What is chosen is the threshold of the next step, and there may be other noise in that.
            following = min(self.steps + 1, len(self.ledger.plan) - 1)
            error_weight = self.error_weight(following, threshold)
            self.threshold.release(self.side_source if multiplier > 0 else None, error_weight)
        if multiplier > 0:
            drawn = self.noise.draw(self._noise, self.noise_source)
            add_noise(found.total, drawn, multiplier * self.sensitivity(threshold), self.noise_source)
        return found.total

    def state_dict(self) -> State:
        """State of gradients, stages, optimizer and step counter; parameters and generators are their owners'.

        Filter and optimizer remember what they do of the parameters that they move, see `moved`.
        """
        return {
            "steps": self.steps,
            "optimizer": self.optimizer.state_dict(),
            **{name: getattr(self, name).state_dict() for name in _REMEMBERING},
        }

    def load_state_dict(self, state: State) -> None:
        """Continue from a state that `state_dict` returned; what it lacks of gradients and stages stays as it is."""
        self.steps = state["steps"]
        self.optimizer.load_state_dict(state["optimizer"])
        for name in _REMEMBERING:
            if name in state:
                getattr(self, name).load_state_dict(state[name])
