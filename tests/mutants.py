"""Ways to break the private step, each as a function that patches it; the parts they break are the real ones."""

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch

from dpbench.gradients import Request
from dpbench.noise import CorrelatedNoise, Noise
from dpbench.privacy.sampling import PoissonSampler
from dpbench.query import Point
from dpbench.step import PrivateStep

Break = Callable[[pytest.MonkeyPatch], None]


def noise_times(factor: float) -> Break:
    def scaled(draw):
        return lambda self, out, source: draw(self, out, source).mul_(factor)

    def break_it(patch):
        for kind in (Noise, CorrelatedNoise):
            patch.setattr(kind, "draw", scaled(kind.draw))

    return break_it


def missing_clip(patch):
    request = PrivateStep.request
    patch.setattr(PrivateStep, "request", lambda self, *rest: request(self, *rest)._replace(factors=torch.ones_like))


def clip_after_the_mean(patch):
    """The mean over the batch is clipped in place of each sample."""
    missing_clip(patch)
    release = PrivateStep.release

    def clipped(self, found, threshold):
        norm = found.total.norm() / max(1, len(found.losses))
        total = found.total * self.clip.factors(norm.view(1, 1), threshold).squeeze()
        return release(self, found._replace(total=total), threshold)

    patch.setattr(PrivateStep, "release", clipped)


class Separately(NamedTuple):
    """A request that clips each point's gradient and then mixes them: norm up to Σ_j |w_j| C."""

    request: Request

    def alone(self):
        gradients, points, batch, *rest = self.request
        batch = list(batch)
        found = [gradients.clipped_sum([Point(1.0, iterate)], batch, rest[0]) for _, iterate in points]
        total = sum(part.total * weight for part, (weight, _) in zip(found, points, strict=True))
        return found[-1]._replace(total=total)


def points_clipped_separately(patch):
    request = PrivateStep.request
    patch.setattr(PrivateStep, "request", lambda self, *rest: Separately(request(self, *rest)))


def noise_reused_between_steps(patch):
    draw = Noise.draw
    first = {}

    def drawn_once(self, out, source):
        if id(source) not in first:
            first[id(source)] = (source, draw(self, out, source).clone())
        return out.copy_(first[id(source)][1])

    patch.setattr(Noise, "draw", drawn_once)


def divided_by_the_actual_batch_size(patch):
    release = PrivateStep.release

    def scaled(self, found, threshold):
        return release(self, found, threshold).mul_(self.expected_batch / max(1, len(found.losses)))

    patch.setattr(PrivateStep, "release", scaled)


def sampled_twice(patch):
    """Whatever is in either of two draws takes part, for one entry in the ledger."""
    draw = PoissonSampler.draw
    patch.setattr(PoissonSampler, "draw", lambda self: torch.cat([draw(self), draw(self)]).unique())
