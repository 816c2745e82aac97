"""The attack in one run with many canaries, each included by a fair coin (Steinke, Nasr & Jagielski 2023)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dpbench.audit.bounds import one_run_eps_at_least
from dpbench.audit.canaries import canary_samples, with_canaries
from dpbench.audit.result import Finding
from dpbench.audit.settings import AuditSettings, audited
from dpbench.audit.tap import Tap
from dpbench.config import RunConfig, config_hash
from dpbench.data import Split, Splits
from dpbench.training.assemble import assemble
from dpbench.training.budget import budget, open_ledger
from dpbench.training.lockstep import alone
from dpbench.training.loop import train
from dpbench.training.randomness import generator

# Directions that no canary has: they show the scale of the noise.
SILENT = 512
# Share of the canaries that is guessed to be in, and as many to be out. Fixed before the run, so that the bound
# needs no correction for a choice.
SHARE = 0.25


class Scores:
    """How likely each canary took part, from all private gradients: the sum over steps of the log-likelihood ratio.

    Under the claim, a canary's coordinate of g_t, in units of its noise, is N(0, 1), or N(1/z, 1) when it was sampled,
    with probability q. The units are read off the coordinates without canary.

    Attributes:
        total: shape (m,), float64.
    """

    def __init__(self, config: RunConfig, canaries: int, multiplier: float, device: torch.device) -> None:
        self.total = torch.zeros(canaries, dtype=torch.float64, device=device)
        self._rate = config.sampling_rate
        self._multipliers = [multiplier * config.noise.scale(step) for step in range(config.steps)]
        self._steps = 0

    def see(self, gradient: Tensor) -> None:
        """Add what the next private gradient, shape (m + SILENT,), tells."""
        pulled, silent = gradient.double().split([len(self.total), SILENT])
        unit = silent.square().mean().sqrt().clamp(min=torch.finfo(torch.float32).tiny)
        mu = 1 / self._multipliers[self._steps]
        self._steps += 1
        taking_part = math.log(self._rate) + mu * pulled / unit - mu**2 / 2
        absent = torch.full_like(pulled, math.log1p(-self._rate) if self._rate < 1 else -math.inf)
        self.total += torch.logaddexp(taking_part, absent)


def attack_run(config: RunConfig, settings: AuditSettings, device: torch.device, risk: float) -> Finding:
    """Train once on canaries alone, with the run's own loop, sampler, step and ledger, and guess which took part.

    Args:
        config: the run to audit.
        settings: number of canaries and steps.
        device: where to run.
        risk: probability with which the bound may exceed the truth.
    """
    count = settings.canaries
    config = audited(with_canaries(config, count + SILENT), steps=settings.steps, batch_size=config.batch_size)
    multiplier = budget(config).noise_multiplier
    ledger = open_ledger(config, multiplier)
    parts = assemble(config, device, multiplier, ledger)
    coins = generator(config.seed, "audit", torch.device("cpu"), config_hash(config))
    included = (torch.rand(count, generator=coins) < 0.5).to(device)
    scores = Scores(config, count, multiplier, device)
    Tap.into(parts.step, scores.see)
    alone(train(config, parts, _splits(included), ledger, on_step=lambda _: None, on_evaluation=lambda _: None))
    guesses = 2 * max(1, round(SHARE * count))
    right = right_guesses(scores.total, included, guesses)
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
            "most_that_could_be_shown": one_run_eps_at_least(guesses, guesses, count, delta, risk),
        },
    )


def right_guesses(scores: Tensor, included: Tensor, guesses: int) -> int:
    """Right guesses when half of them say "in" for the highest scores (m,), and half "out" for the lowest."""
    order = scores.argsort()
    half = guesses // 2
    return int(included[order[-half:]].sum() + (~included[order[:half]]).sum())


def _splits(included: Tensor) -> Splits:
    """The included canaries as training data; the loop evaluates on one sample."""

    def split(directions: Tensor) -> Split:
        samples, labels = canary_samples(directions)
        return Split.of(samples, labels, highest=1, mean=[0.0], std=[1.0]).to(included.device)

    members = included.nonzero().squeeze(1)
    return Splits(split(members), split(members.new_zeros(1)))
