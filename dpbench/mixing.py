"""DiSK's weight c of the gradient at the probe (Zhang et al. 2024, Alg. 3), for all stages that need it."""

from __future__ import annotations

import math

from dpbench.errors import require

# Up to this, sums in float32 keep a sample's contribution within a thousandth of its bound.
LARGEST_WEIGHT = 1e4


def mixing_weight(kappa: float, gamma: float) -> float:
    """The weight c = (1 - κ)/(κγ), exactly 1 where rounding alone keeps it from that."""
    weight = (1 - kappa) / (kappa * gamma)
    return 1.0 if abs(weight - 1) < 1e-12 else weight


def require_mixing(stage: str, kappa: float, gamma: float) -> None:
    """Raise `UserError` unless κ and γ of a stage make a usable weight.

    Args:
        stage: that has them, such as "query".
        kappa: κ, in (0, 1].
        gamma: γ, not zero.
    """
    require(0 < kappa <= 1, f"{stage}.kappa", kappa, "a number in (0, 1]")
    require(gamma != 0 and math.isfinite(gamma), f"{stage}.gamma", gamma, "a finite number but 0")
    fits = (1 - kappa) <= LARGEST_WEIGHT * abs(kappa * gamma)
    told = f"so large that (1 - κ)/(κ|γ|) is at most {LARGEST_WEIGHT:g}, here with κ = {kappa:g}"
    require(fits, f"{stage}.gamma", gamma, told)
