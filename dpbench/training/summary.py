"""What a run came to: its summary, and whether it released what it had planned."""

from __future__ import annotations

import math
from typing import Any

from dpbench.config import RunConfig
from dpbench.privacy import Ledger
from dpbench.privacy.ledger import exceeds
from dpbench.training.budget import Budget, search_eps
from dpbench.training.loop import Metrics, to_digits
from dpbench.training.resume import Training


def why_invalid(config: RunConfig, ledger: Ledger) -> str | None:
    """What is wrong with the releases of a run that has taken all its steps; None for nothing."""
    if not ledger.complete():
        return f"{len(ledger)} of {len(ledger.plan)} planned releases were made"
    eps, spent = config.eps, ledger.epsilon()
    if config.privacy.published is None and exceeds(spent, eps):
        return f"eps={spent:.4g} was spent, more than eps={eps:g}: its noise was calibrated by another account"
    return None


def spent_by(ledger: Ledger, *, diverged: bool) -> float:
    """The eps of a run: of its releases, or where it diverged of all that it had planned.

    Where a run diverges follows from its data, and the eps up to a step that the data choose bounds nothing (Rogers,
    Roth, Ullman and Vadhan 2016); that of the whole plan does.
    """
    return (ledger.reaching(len(ledger.plan)) if diverged else ledger).epsilon()


def by_class(metrics: Metrics) -> list[float | None]:
    """The accuracy of each class, None where it has no samples."""
    return [None if accuracy is None else to_digits(accuracy) for accuracy in metrics.class_accuracy]


def summary_of(
    config: RunConfig, training: Training, ledger: Ledger, spends: Budget, *, diverged: bool
) -> dict[str, Any]:
    """What a run came to. `best` is the largest test accuracy of all evaluations: a choice made on test data.

    Args:
        config: of the run.
        training: the run, where it ended.
        ledger: of all releases that were made of it.
        spends: the budget.
        diverged: whether that is why it ended.
    """
    last = training.metrics[-1] if training.metrics else None
    line = last.as_dict() if last else {}
    multiplier, guarded = training.parts.step.noise_multiplier, training.parts.step.threshold.guarded()
    best = max(training.metrics, key=lambda m: m.test_accuracy, default=None)
    return {
        "test_accuracy": {
            "final": last.test_accuracy if last else None,
            "best": best.test_accuracy if best else None,
            "best_step": best.step if best else None,
        },
        "test_accuracy_by_class": by_class(last) if last else None,
        "test_loss": line.get("test_loss"),
        "gradient_norm": line.get("gradient_norm"),
        **(last.more if last else {}),
        **({"threshold_guards": guarded} if guarded else {}),
        "eps": spent_by(ledger, diverged=diverged),
        "target_eps": config.eps,
        "delta": config.delta_value,
        "private": math.isfinite(config.eps) and config.uncertified is None,
        "clipped": math.isfinite(config.clip.sensitivity(1.0)),
        "accountant": ledger.accountant,
        "sampler": config.privacy.sampler,
        "published_eps": ledger.published_eps,
        "search_eps": search_eps(config, spends, multiplier),
        "noise_multiplier": multiplier,
        "steps": len(ledger),
        "sampling_rate": config.sampling_rate,
        "algorithm": config.algo["name"],
        "dataset": config.dataset.name,
        "model": config.model.name,
        "seed": config.seed,
    }
