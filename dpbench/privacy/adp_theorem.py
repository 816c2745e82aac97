"""ADP's calibration theorem: one noise level for a whole schedule of noise factors, and when its proof holds.

Here to reproduce the paper's settings. It is no replacement for an accountant: its eps is some 10 to 67 times
what an accountant finds for the same noise, and most settings of the paper violate its conditions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dpbench.errors import require
from dpbench.privacy.closed_forms import gaussian_delta

CONSTANT = 16.0  # the paper's C_eps


class _Condition(NamedTuple):
    """What is asked, in a line, and both sides of it; it holds where value <= limit."""

    statement: str
    value: float
    limit: float


@dataclass(frozen=True)
class AdpTheorem:
    """The calibration theorem for one schedule (ADP, Theorem C.1; Theorem 4.1 for batches of one sample).

        sigma^2 = (16 G)^2 B / (n eps)^2 * sum_t 1/alpha_t^2,    B = log(16 T m / (n delta)) log(1.25/delta)

    Step t adds noise of standard deviation alpha_t sigma to the *mean* gradient of a batch, clipped at G. As noise
    multiplier (noise on the sum over G) that is alpha_t z with z = sigma m / G, which does not depend on G. All
    factors times a constant changes no alpha_t z.

    Neighbours: one sample replaced. Batches: m of n samples, uniformly, without replacement, anew in each step. The
    factors must be fixed before training.

    Attributes:
        factors: alpha_1..alpha_T, each > 0; all 1 for DP-SGD, sqrt(b_t) = 1/sqrt(eta_t) for ADP-SGD.
        samples: n.
        batch_size: m.
        delta: of the whole run, in (0, 1).
        as_in_main_text: B has m = 1 in it whatever the batch size, as the paper's main text; no theorem for m > 1.
    """

    factors: tuple[float, ...]
    samples: int
    batch_size: int
    delta: float
    as_in_main_text: bool = False

    def __post_init__(self) -> None:
        require(len(self.factors) > 0, "factors", "()", "one factor for each step, at least one")
        require(min(self.factors) > 0, "factors", min(self.factors), "numbers > 0")
        require(self.samples >= 1, "samples", self.samples, "an integer >= 1")
        require(1 <= self.batch_size <= self.samples, "batch_size", self.batch_size, f"1..{self.samples}")
        most = min(1.0, 12.5 * self.batch_size * len(self.factors) / self.samples)
        require(0 < self.delta < most, "delta", self.delta, f"a number in (0, {most:g})")

    @property
    def log_factor(self) -> float:
        """B, written B_delta in the paper."""
        passes = len(self.factors) * self._batch_in_log / self.samples
        return math.log(16 * passes / self.delta) * math.log(1.25 / self.delta)

    @property
    def _batch_in_log(self) -> int:
        return 1 if self.as_in_main_text else self.batch_size

    @cached_property
    def _sums(self) -> NDArray[np.float64]:
        return np.cumsum(np.asarray(self.factors, dtype=np.float64) ** -2)

    def inverse_squares(self, steps: int | None = None) -> float:
        """Sum of 1/alpha_t^2 over the first `steps` steps, all by default."""
        taken = len(self.factors) if steps is None else steps
        require(0 <= taken <= len(self.factors), "steps", taken, f"0..{len(self.factors)}")
        return float(self._sums[taken - 1]) if taken else 0.0

    @property
    def constant(self) -> float:
        """K = sqrt(B sum 1/alpha^2)/n, so that sigma = G K / (eps/16)."""
        return math.sqrt(self.log_factor * self.inverse_squares()) / self.samples

    def noise_multiplier(self, eps: float) -> float:
        """Noise multiplier z for eps > 0, 16 times the paper's normalised budget; step t multiplies it by alpha_t."""
        require(eps > 0, "eps", eps, "a number > 0")
        return CONSTANT * self.batch_size * self.constant / eps

    def spent(self, noise_multiplier: float, steps: int | None = None) -> float:
        """Eps of the first `steps` steps with multipliers alpha_t z, all by default; inverse of `noise_multiplier`.

        B stays that of the whole run, so that the last value is the eps calibrated for.

        Args:
            noise_multiplier: z > 0.
            steps: 0..T.
        """
        require(noise_multiplier > 0, "noise_multiplier", noise_multiplier, "a number > 0")
        root = math.sqrt(self.log_factor * self.inverse_squares(steps))
        return CONSTANT * self.batch_size * root / (self.samples * noise_multiplier)

    @property
    def step_delta(self) -> float:
        """The proof's delta_0, n delta / (12.5 T m): failure probability of one step before subsampling."""
        return self.delta * self.samples / (12.5 * len(self.factors) * self.batch_size)

    def largest_step_eps(self, eps: float) -> float:
        """Largest eps of a single step before subsampling, by the classical bound at `step_delta`."""
        smallest = min(self.factors) * self.noise_multiplier(eps)
        return 2 * math.sqrt(2 * math.log(1.25 / self.step_delta)) / smallest

    def unmet(self, eps: float) -> tuple[str, ...]:
        """The conditions of the proof that are not met at a total eps, in words; none where eps is a guarantee.

        The paper asks for a largest eps of a step of at most 1 (with its misprint corrected: the square root of
        n^2 eps^2 log(1.25/delta_0) / (32 m^2 B alpha_t^2 sum 1/alpha^2) is the eps of step t). It is used twice, for
        the classical Gaussian bound and for exp(x) - 1 <= 2x; here just that is asked for, which holds a little
        further.
        """
        step = self.largest_step_eps(eps)
        step_log = math.log(1.25 / self.step_delta)
        conditions = (
            _Condition(
                "the exact delta of a step at its largest eps before subsampling is at most delta_0",
                gaussian_delta(step, step / math.sqrt(2 * step_log)),
                self.step_delta,
            ),
            _Condition(
                "(exp(x) - 1)/x <= 2 at the largest eps x of a step before subsampling",
                math.expm1(step) / step if step < 700 else math.inf,  # beyond, no float
                2.0,
            ),
            _Condition("a batch is at most half of the samples", self.batch_size, self.samples / 2),
            _Condition("a batch is no larger than B has it", self.batch_size, self._batch_in_log),
            _Condition(
                "eps^2 log(1.25/delta_0) <= 8 B log(1.25/delta): the second term of the composition is the smaller",
                eps * eps * step_log,
                8 * self.log_factor * math.log(1.25 / self.delta),
            ),
        )
        return tuple(
            f"{one.statement} (here {one.value:.3g}, limit {one.limit:.3g})"
            for one in conditions
            if not one.value <= one.limit
        )
