"""Ways to break the private step, each as a function that patches it; the parts they break are the real ones."""

from collections.abc import Callable

import pytest
import torch

from dpbench.noise import Noise
from dpbench.privacy import PoissonSampler
from dpbench.query import Point
from dpbench.step import PrivateStep

Break = Callable[[pytest.MonkeyPatch], None]


def noise_times(factor: float) -> Break:
    def break_it(patch):
        draw = Noise.draw
        patch.setattr(Noise, "draw", lambda self, out, generator: draw(self, out, generator).mul_(factor))

    return break_it


def missing_clip(patch):
    def clipped_sum(self, batch, threshold):
        points = self.query.points(self.gradients.flat.vector)
        return self.gradients.clipped_sum(points, batch, torch.ones_like)

    patch.setattr(PrivateStep, "clipped_sum", clipped_sum)


def clip_after_the_mean(patch):
    """The mean over the batch is clipped in place of each sample."""

    def clipped_sum(self, batch, threshold):
        points = self.query.points(self.gradients.flat.vector)
        total, losses = self.gradients.clipped_sum(points, batch, torch.ones_like)
        norm = total.norm() / max(1, len(losses))
        return total * self.clip.factors(norm.view(1, 1), threshold).squeeze(), losses

    patch.setattr(PrivateStep, "clipped_sum", clipped_sum)


def points_clipped_separately(patch):
    """Each point's gradient is clipped, then they are mixed: norm up to Σ_j |w_j| C."""

    def clipped_sum(self, batch, threshold):
        batch = list(batch)
        total, losses = torch.zeros_like(self.gradients.flat.vector), None
        for weight, iterate in self.query.points(self.gradients.flat.vector):
            part, losses = self.gradients.clipped_sum(
                [Point(1.0, iterate)], batch, lambda norms: self.clip.factors(norms, threshold)
            )
            total.add_(part, alpha=weight)
        return total, losses

    patch.setattr(PrivateStep, "clipped_sum", clipped_sum)


def noise_reused_between_steps(patch):
    draw = Noise.draw
    first = {}

    def drawn_once(self, out, generator):
        if id(generator) not in first:
            first[id(generator)] = (generator, draw(self, out, generator).clone())
        return out.copy_(first[id(generator)][1])

    patch.setattr(Noise, "draw", drawn_once)


def divided_by_the_actual_batch_size(patch):
    clipped_sum, release = PrivateStep.clipped_sum, PrivateStep.release
    size = {}

    def counted(self, batch, threshold):
        total, losses = clipped_sum(self, batch, threshold)
        size[self] = max(1, len(losses))
        return total, losses

    def scaled(self, total, threshold):
        return release(self, total, threshold).mul_(self.expected_batch / size[self])

    patch.setattr(PrivateStep, "clipped_sum", counted)
    patch.setattr(PrivateStep, "release", scaled)


def sampled_twice(patch):
    """Whatever is in either of two draws takes part, for one entry in the ledger."""
    draw = PoissonSampler.draw
    patch.setattr(PoissonSampler, "draw", lambda self: torch.cat([draw(self), draw(self)]).unique())
