"""The attack on one step by many runs of it, with and without one canary."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from dpbench.audit.bounds import eps_of, mu_at_least, noticeable_factor
from dpbench.audit.result import Finding
from dpbench.audit.tap import Tap
from dpbench.audit.targets import Restart, Target, releases_since
from dpbench.gradients import MicroBatch
from dpbench.privacy import Plan, Release, epsilon
from dpbench.privacy.sampling import PoissonSampler
from dpbench.randomness import global_stream
from dpbench.training.assemble import draws_of

# Runs, as a share of those that judge, from which the thresholds are chosen; they judge nothing.
PILOT_SHARE = 0.25
FEWEST_PILOTS = 50
# What is computed of each private gradient; the canary makes both larger.
STATISTICS = ("projection", "quietness")


class Counts(NamedTuple):
    """Errors of a test on runs that did not choose it."""

    false_positives: int
    misses: int
    runs: int


@dataclass(frozen=True)
class Observations:
    """Statistics of all runs without and with the canary, shape (runs, statistics) each."""

    without: Tensor
    with_canary: Tensor


def attack_step(
    target: Target, runs: int, risk: float, on_run: Callable[[int, int], object] = lambda done, total: None
) -> Finding:
    """Run a step many times and bound what it reveals of the canary.

    The attacker knows parameters, other samples and the canary, and sees g_t. All runs start from one public state
    and are independent. Two statistics are judged, each at a threshold that other runs chose: the projection of g_t on
    the canary's direction, and how small the rest of g_t is, which tells the size of the batch where the sum is
    divided by it. Where the target's sampling rate is 1 all samples take part and nothing is sampled; else each batch
    is drawn by the sampler.

    Args:
        target: what to attack; its step is left somewhere.
        runs: with the canary and as many without, besides those that choose the thresholds.
        risk: probability with which the larger of the two bounds may exceed the truth.
        on_run: told after each run how many are done, of how many.
    """
    pilots = max(FEWEST_PILOTS, round(PILOT_SHARE * runs))
    total = 2 * (pilots + runs)
    observe = Observer(target, lambda done: on_run(done, total))
    with global_stream(target.config.seed, "model"):
        pilot, judged = observe(pilots), observe(runs)
    own = risk / len(STATISTICS)
    config = target.config
    rate, delta = config.sampling_rate, config.delta_value
    bounds: dict[str, float] = {}
    counts: dict[str, Counts] = {}
    for k, name in enumerate(STATISTICS):
        threshold = choose_threshold(pilot.without[:, k], pilot.with_canary[:, k], own, rate)
        counts[name] = count_errors(judged.without[:, k], judged.with_canary[:, k], threshold)
        bounds[name] = _bound(counts[name], own, rate)
    best = max(bounds, key=lambda name: bounds[name])
    claimed = math.sqrt(sum(release.joint.noise_multiplier**-2 for release in observe.releases))
    # What is released beside the sum has a share in the claim, and is not seen.
    of_sums = math.sqrt(sum(release.noise_multiplier**-2 for release in observe.releases))
    noticed = noticeable_factor(of_sums, claimed, runs, own) if rate == 1 and claimed else None
    scheme = config.privacy.scheme
    # Given the noise of the steps before, which is public here, that of one step is independent.
    plan = Plan.of(observe.releases, scheme, epoch=int(scheme.passes))
    spent = epsilon(plan, delta, config.privacy.valid_accountant, eps_scale=config.eps)
    return Finding(
        attack="one step, batches sampled" if rate < 1 else "one step, full batch",
        attacked=target.attacked,
        delta=delta,
        risk=risk,
        claimed_eps=spent,
        eps_at_least=eps_of(bounds[best], delta, sampling_rate=rate),
        violated=bounds[best] > claimed,
        details={
            "claimed_mu": claimed,
            "mu_at_least": bounds[best],
            "reach": target.reach,
            "sampling_rate": rate,
            "runs_with_canary": runs,
            "runs_without": runs,
            "statistic": best,
            "notices_noise_too_small_by": noticed,
            "unseen": [part.name for part in config.threshold.beside],
            "errors": {name: found._asdict() for name, found in counts.items()},
        },
    )


class Observer:
    """Runs a target's step and reads the statistics off its private gradient.

    Attributes:
        releases: what the ledger recorded of the step, in the last run.
    """

    def __init__(self, target: Target, on_run: Callable[[int], object]) -> None:
        self.releases: list[Release] = []
        self._done = 0
        self._on_run = on_run
        self._target = target
        self._restart = Restart(target.step)
        self._seen = torch.empty_like(target.direction)
        Tap.into(target.step, self._see)
        self._without = target.others
        (x, y), (canary_x, canary_y) = target.others, target.canary
        self._with_canary = torch.cat([x, canary_x]), torch.cat([y, canary_y])
        draws = draws_of(target.config, target.direction.device)
        rate = target.config.sampling_rate
        sizes = (len(self._without[1]), len(self._with_canary[1]))
        self._samplers = {size: PoissonSampler(size, size * rate, draws) for size in sizes} if rate < 1 else {}

    def __call__(self, runs: int) -> Observations:
        """So many runs without the canary, and with it."""
        batches = (self._without, self._with_canary)
        return Observations(*(torch.stack([self._run(batch) for _ in range(runs)]) for batch in batches))

    def _see(self, gradient: Tensor) -> None:
        self._seen.copy_(gradient)

    def _run(self, batch: MicroBatch) -> Tensor:
        self._restart()
        inputs, labels = batch
        if self._samplers:
            drawn = self._samplers[len(labels)].draw()
            inputs, labels = inputs[drawn], labels[drawn]
        step = self._target.step
        before = len(step.ledger)
        step([(inputs, labels)] if len(labels) else [])
        self.releases = releases_since(step, before)
        self._done += 1
        self._on_run(self._done)
        along = self._seen @ self._target.direction
        rest = (self._seen.square().sum() - along.square()).clamp(min=0).sqrt()
        return torch.stack([along, -rest])


def choose_threshold(without: Tensor, with_canary: Tensor, risk: float, rate: float) -> float:
    """A threshold, from pilot runs: in the middle, or where not every run has the canary, that of the largest bound.

    The middle of the medians is best for two Gaussians of one width, and steadier than a search. Of equally large
    bounds, the middle one counts.
    """
    if rate == 1:
        return float(without.median() + with_canary.median()) / 2
    values = torch.cat([without, with_canary]).unique()
    candidates = (values[1:] + values[:-1]) / 2 if len(values) > 1 else values
    bounds = [_bound(count_errors(without, with_canary, float(c)), risk, rate) for c in candidates]
    largest = max(bounds)
    best = [k for k, bound in enumerate(bounds) if bound == largest]
    return float(candidates[best[len(best) // 2]])


def count_errors(without: Tensor, with_canary: Tensor, threshold: float) -> Counts:
    """Errors of the test that says "the canary is there" above the threshold."""
    # What is not a number says nothing, and is not above the threshold.
    return Counts(int((without > threshold).sum()), int((~(with_canary > threshold)).sum()), len(without))


def _bound(counts: Counts, risk: float, rate: float) -> float:
    wrong, missed, runs = counts
    return mu_at_least(wrong, runs, missed, runs, risk, sampling_rate=rate)
