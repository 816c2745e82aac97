"""The noise multiplier of a run, within its budget."""

from __future__ import annotations

import math

from dpbench.config.schema import RunConfig
from dpbench.errors import UserError
from dpbench.privacy import Calibration, Ledger, calibrate, epsilon
from dpbench.privacy.accountants import SMALLEST_MULTIPLIER, quick_bound


def noise_multiplier(config: RunConfig) -> Calibration:
    """The calibrated multiplier, or the configured one if it stays within eps.

    Raises:
        UserError: the configured multiplier would spend more than eps, or no multiplier can reach eps.
    """
    given = config.privacy.noise_multiplier
    plan = config.release_plan()
    accountant = config.privacy.accountant
    if given is not None and given < SMALLEST_MULTIPLIER:
        raise UserError("expected at least 1e-6", field="privacy.noise_multiplier", value=given)
    if given is None:
        return calibrate(plan, config.eps, config.delta_value, accountant)
    # Far beyond the budget the cheap bound is enough to refuse, where an exact one could take minutes.
    rough = quick_bound(plan.scaled(given), config.delta_value)
    if rough > 10 * config.eps + 10:
        spent = rough
    else:
        spent = epsilon(plan.scaled(given), config.delta_value, accountant, eps_scale=config.eps)
    if spent > config.eps:
        raise UserError(
            f"spends eps={spent:.4g} over {config.steps} steps, more than eps={config.eps:g}; leave it null to "
            "calibrate it",
            field="privacy.noise_multiplier",
            value=given,
        )
    return Calibration(given, spent, 0.0)


def open_ledger(config: RunConfig, multiplier: float) -> Ledger:
    """An empty ledger for the run's plan at this multiplier."""
    plan = config.release_plan().scaled(multiplier)
    return Ledger(plan, eps=config.eps, delta=config.delta_value, accountant=config.privacy.accountant)


def in_words(config: RunConfig, found: Calibration) -> str:
    """One line: what noise the run adds and why."""
    if math.isinf(config.eps):
        bounded = math.isfinite(config.clip.sensitivity(1.0))
        return f"eps=inf: not private; no noise, clipping {'on' if bounded else 'off'}"
    how = "given" if config.privacy.noise_multiplier is not None else f"{found.seconds:.1f} s"
    if found.seconds == 0 and config.privacy.noise_multiplier is None:
        how = "cached"
    return (
        f"noise multiplier {found.noise_multiplier:.4f} for eps={config.eps:g}, delta={config.delta_value:.3g} over "
        f"{config.steps} steps at sampling rate {config.sampling_rate:.4g} ({config.privacy.accountant}, {how})"
    )
