"""The attack in one run with many canaries, each included by a fair coin (Steinke, Nasr & Jagielski 2023)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from typing_extensions import override

from dpbench.audit.bounds import one_run_eps_at_least
from dpbench.audit.canaries import canary_samples, with_canaries
from dpbench.audit.result import Finding
from dpbench.audit.settings import AuditSettings, audited
from dpbench.audit.tap import Tap
from dpbench.config import RunConfig, config_hash
from dpbench.data import Split, Splits
from dpbench.privacy.correlation import Correlation
from dpbench.randomness import generator
from dpbench.training.assemble import assemble
from dpbench.training.budget import budget, open_ledger
from dpbench.training.lockstep import alone
from dpbench.training.loop import train

# Directions that no canary has: they show the scale of the noise.
SILENT = 512
# Share of the canaries that is guessed to be in, and as many to be out. Fixed before the run, so that the bound
# needs no correction for a choice.
SHARE = 0.25


class Scores:
    """How likely each canary took part, from all private gradients: the logarithm of a likelihood ratio.

    The unit of a step's noise is read off the coordinates without canary. In it, under the claim, a canary's coordinate
    is noise of the run's correlation, plus 1/z in steps that it takes part in.
    """

    def __init__(self, config: RunConfig, canaries: int, multiplier: float) -> None:
        self._config = config
        self._canaries = canaries
        self._multiplier = multiplier
        self._seen: list[Tensor] = []

    def see(self, gradient: Tensor) -> None:
        """Keep what the next private gradient, shape (m + SILENT,), tells."""
        pulled, silent = gradient.double().split([self._canaries, SILENT])
        unit = silent.square().mean().sqrt().clamp(min=torch.finfo(torch.float32).tiny)
        self._seen.append(pulled * (self._config.noise.deviation(len(self._seen)) / unit))

    def total(self) -> Tensor:
        """Scores of all canaries, shape (m,), float64."""
        seen = torch.stack(self._seen)
        correlation = self._config.noise.correlation
        return self._of_samples(seen) if correlation is None else self._of_passes(seen, correlation)

    def _of_samples(self, seen: Tensor) -> Tensor:
        """In each step a canary takes part with probability q, and noise is independent."""
        scales = [self._config.noise.scale(step) for step in range(len(seen))]
        mu = 1 / (self._multiplier * seen.new_tensor(scales).unsqueeze(1))
        rate = self._config.sampling_rate
        taking_part = math.log(rate) + mu * seen - mu**2 / 2
        absent = torch.full_like(seen, math.log1p(-rate) if rate < 1 else -math.inf)
        return torch.logaddexp(taking_part, absent).sum(0)

    def _of_passes(self, seen: Tensor, correlation: Correlation) -> Tensor:
        """A canary takes part at one place of all passes, each as likely; C makes the noise independent."""
        epoch = self._config.release_plan().epoch
        strategy = seen.new_tensor(correlation.strategy(len(seen), epoch))
        marks = torch.stack([strategy[:, place::epoch].sum(1) for place in range(epoch)]) / self._multiplier
        of_places = marks @ (strategy @ seen) - marks.square().sum(1, keepdim=True) / 2
        return of_places.logsumexp(0)


@dataclass
class Places(Split):
    """Places for samples, some of them empty: what an empty one adds to a batch is nothing.

    Attributes:
        taken: whether there is a sample, boolean of shape (N,).
    """

    taken: Tensor = field(kw_only=True)

    @override
    def batches(self, indices: Tensor, size: int) -> Iterator[tuple[Tensor, Tensor]]:
        yield from super().batches(indices[self.taken[indices]], size)


def one_run(config: RunConfig, settings: AuditSettings) -> RunConfig:
    """The run that is attacked: canaries alone, in as many places as there are samples, or canaries if those are more.

    So the number of places, which sampling rate and passes are made of, does not depend on which canaries are in.
    """
    config = with_canaries(config, settings.canaries + SILENT)
    size = max(config.dataset.trained_on, settings.canaries)
    config = replace(config, delta=config.delta_value, dataset=replace(config.dataset, train_size=size))
    return audited(config, steps=settings.steps, batch_size=config.batch_size)


def attack_run(config: RunConfig, settings: AuditSettings, device: torch.device, risk: float) -> Finding:
    """Train once on canaries alone, with the run's own loop, sampler, step and ledger, and guess which took part.

    Args:
        config: the run to audit.
        settings: number of canaries and steps.
        device: where to run.
        risk: probability with which the bound may exceed the truth.
    """
    count = settings.canaries
    config = one_run(config, settings)
    multiplier = budget(config).noise_multiplier
    ledger = open_ledger(config, multiplier)
    parts = assemble(config, device, multiplier, ledger)
    coins = generator(config.seed, "audit", torch.device("cpu"), config_hash(config))
    included = (torch.rand(count, generator=coins) < 0.5).to(device)
    scores = Scores(config, count, multiplier)
    Tap.into(parts.step, scores.see)
    splits = _splits(included, config.dataset.trained_on)
    alone(train(config, parts, splits, ledger, on_step=lambda _: None, on_evaluation=lambda _: None))
    guesses = 2 * max(1, round(SHARE * count))
    right = right_guesses(scores.total(), included, guesses)
    delta = config.delta_value
    claimed = ledger.epsilon()
    shown = one_run_eps_at_least(right, guesses, count, delta, risk)
    return Finding(
        attack=f"one run of {len(ledger)} steps",
        attacked=f"{count} canaries, each in by a fair coin",
        delta=delta,
        risk=risk,
        claimed_eps=claimed,
        eps_at_least=shown,
        violated=shown > claimed,
        details={
            "sampling_rate": config.sampling_rate,
            "noise_multiplier": multiplier,
            "canaries": count,
            "guesses": guesses,
            "right": right,
            "unseen": [part.name for part in config.threshold.beside],
            "most_that_could_be_shown": one_run_eps_at_least(guesses, guesses, count, delta, risk),
        },
    )


def right_guesses(scores: Tensor, included: Tensor, guesses: int) -> int:
    """Right guesses when half of them say "in" for the highest scores (m,), and half "out" for the lowest."""
    order = scores.argsort()
    half = guesses // 2
    return int(included[order[-half:]].sum() + (~included[order[:half]]).sum())


def _splits(included: Tensor, size: int) -> Splits:
    """The included canaries as training data, in `size` places; the loop evaluates on one sample."""
    samples, labels = canary_samples(torch.arange(size, device=included.device))
    all_places = Split.of(samples, labels, highest=1, mean=[0.0], std=[1.0]).to(included.device)
    taken = torch.zeros(size, dtype=torch.bool, device=included.device)
    taken[: len(included)] = included
    first = replace(all_places, images=samples[:1], labels=labels[:1])
    return Splits(Places(**vars(all_places), taken=taken), first)
