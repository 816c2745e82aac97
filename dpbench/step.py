"""The private step: query, clip, noise, filter, optimizer, in that order."""

from __future__ import annotations

from collections.abc import Generator, Iterable

import torch
from torch import Tensor

from dpbench.clip import Clip
from dpbench.filters import Filter
from dpbench.gradients import Clipped, MicroBatch, PerSampleGradients, Request
from dpbench.noise import Noise
from dpbench.privacy.gaussian import GaussianSource
from dpbench.privacy.ledger import Ledger
from dpbench.privacy.plan import Release
from dpbench.query import Query
from dpbench.stage import State
from dpbench.threshold import Threshold


class PrivateStep:
    """One step of any method: the data are used left of g_t and never after it.

    g_t = (Σ_i clip(Σ_j w_j ∇f(θ_j; x_i)) + N(0, (z s_t Δ_t)² I)) / E[B], where z is the noise multiplier, s_t the
    relative scale of the noise, Δ_t the sensitivity that the clip promises at threshold C_t, and E[B] the expected
    batch size. The division by E[B] uses no data. Each release is in the ledger before it is used.
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
        self.gradients = gradients
        self.query, self.clip, self.threshold, self.noise, self.filter = query, clip, threshold, noise, filter
        self.optimizer = optimizer
        self.noise_multiplier = noise_multiplier
        self.sampling_rate = sampling_rate
        self.expected_batch = expected_batch
        self.ledger = ledger
        self.noise_source, self.side_source = noise_source, side_source
        self.steps = 0
        self._noise = torch.empty_like(gradients.flat.vector)

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
            losses: Tensor = end.value
            return losses
        raise AssertionError("a step asks once")

    @torch.no_grad()
    def take(self, batch: Iterable[MicroBatch]) -> Generator[Request, Clipped, Tensor]:
        """Take the step, halting where whoever carries it out computes the clipped sum, maybe with those of others.

        Args:
            batch: the logical batch as it was sampled, in micro-batches; none at all is a step of noise alone.

        Yields:
            The request, to which the clipped sum is sent.

        Returns:
            The per-sample losses, shape (B,), which are not private.
        """
        threshold = self.threshold.value(self.steps)
        found = yield self.request(batch, threshold)
        private_gradient = self.release(found, threshold).div_(self.expected_batch)
        # Right of here: post-processing. Nothing below touches the batch.
        self.gradients.flat.set_gradient(self.filter.apply(private_gradient))
        self.optimizer.step()
        self.steps += 1
        return found.losses

    def request(self, batch: Iterable[MicroBatch], threshold: float) -> Request:
        """What is asked of the gradients: Σ_i clip(G_i)."""
        points = self.query.points(self.gradients.flat.vector)
        return Request(self.gradients, points, batch, lambda norms: self.clip.factors(norms, threshold))

    def release(self, found: Clipped, threshold: float) -> Tensor:
        """The clipped sum with its noise, in place, and what the threshold asks for beside it; both in the ledger."""
        multiplier = self.noise_multiplier * self.noise.scale(self.steps)
        self.ledger.record(Release(self.sampling_rate, multiplier, self.threshold.beside))
        deviation = multiplier * self.clip.sensitivity(threshold) if multiplier > 0 else 0.0
        if self.threshold.beside:
            self.threshold.observe(found.norms)
            weight = len(found.total) * (deviation / (self.expected_batch * threshold)) ** 2
            self.threshold.release(self.side_source if multiplier > 0 else None, weight)
        if multiplier > 0:
            found.total.add_(self.noise.draw(self._noise, self.noise_source), alpha=deviation)
        return found.total

    def state_dict(self) -> State:
        """State of gradients, stages, optimizer and step counter; parameters and generators are their owners'."""
        return {
            "steps": self.steps,
            "optimizer": self.optimizer.state_dict(),
            **{name: getattr(self, name).state_dict() for name in _STAGES},
        }

    def load_state_dict(self, state: State) -> None:
        """Continue from a state that `state_dict` returned."""
        self.steps = state["steps"]
        self.optimizer.load_state_dict(state["optimizer"])
        for name in _STAGES:
            getattr(self, name).load_state_dict(state[name])


_STAGES = ("gradients", "query", "clip", "threshold", "noise", "filter")
