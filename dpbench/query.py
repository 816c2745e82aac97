"""Stage 1, query: which per-sample vector is released, Σ_j w_j ∇f(θ_j; x_i) over public iterates θ_j."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from torch import Tensor
from typing_extensions import override

from dpbench.errors import require
from dpbench.history import History
from dpbench.mixing import mixing_weight, require_mixing
from dpbench.stage import Stage

# Each is a pass over every batch.
MOST_POINTS = 1000


class Point(NamedTuple):
    """One term of the query: `weight` times the gradient at `iterate`, a flat vector of shape (d,)."""

    weight: float
    iterate: Tensor


@dataclass
class Query(Stage, ABC):
    """Chooses the points of a step from the current iterate and from what it remembers of earlier ones.

    Attributes:
        clipped_apart: whether the gradient at each point is clipped on its own instead of their mixture.
    """

    clipped_apart: ClassVar[bool] = False

    @property
    def most_points(self) -> int:
        """How many points there can be."""
        return 1

    @property
    def sensitivity(self) -> float:
        """Largest norm of a sample's contribution, over that of one clipped vector."""
        return 1.0

    @abstractmethod
    def points(self, iterate: Tensor) -> list[Point]:
        """Points of the next step, the current iterate first if it is one of them. Called once a step.

        Args:
            iterate: current parameters θ_t, shape (d,); a live buffer that the optimizer will overwrite.
        """


@dataclass
class OnePoint(Query):
    """The gradient at the current iterate: DP-SGD (Abadi et al. 2016)."""

    @override
    def points(self, iterate: Tensor) -> list[Point]:
        return [Point(1.0, iterate)]


@dataclass
class TwoPoint(Query):
    """The gradient mixed with one at a probe ahead along the last displacement (DiSK, Zhang et al. 2024, Alg. 3).

    h_i = c ∇f(θ_t + γ d_{t-1}; x_i) + (1 - c) ∇f(θ_t; x_i) with c = (1 - κ)/(κγ) and d_{t-1} = θ_t - θ_{t-1}.
    At t = 0 both points coincide. Where a weight is zero (κ = 1, or γ = (1 - κ)/κ) that point is not evaluated.

    Attributes:
        kappa: weight of the new gradient in the filter that goes with this query, in (0, 1].
        gamma: length of the probe in units of the last displacement; not zero.
    """

    remembers = ("_previous",)

    kappa: float = 0.7
    gamma: float = 0.5

    def __post_init__(self) -> None:
        require_mixing("query", self.kappa, self.gamma)
        self._previous: Tensor | None = None

    @property
    @override
    def most_points(self) -> int:
        return 1 if self.probe_weight in (0, 1) else 2

    @property
    def probe_weight(self) -> float:
        """The mixing coefficient c."""
        return mixing_weight(self.kappa, self.gamma)

    @override
    def points(self, iterate: Tensor) -> list[Point]:
        weight = self.probe_weight
        if self._previous is None:
            self._previous = iterate.clone()
            return [Point(1.0, iterate)]
        if weight == 0:
            return [Point(1.0, iterate)]
        probe = (iterate - self._previous).mul_(self.gamma).add_(iterate)
        self._previous.copy_(iterate)
        if weight == 1:
            return [Point(1.0, probe)]
        return [Point(1 - weight, iterate), Point(weight, probe)]


@dataclass
class LastIterates(Query):
    """Gradients at the last iterates, all on the current batch: per-sample momentum (DP-PMLF, Xu et al. 2025, eq. 2).

    v_i = Σ_{j<k} w_j ∇f(θ_{t-j}; x_i) with w_j proportional to decay^j. Before the first iterate there is that one
    again (start="pad", evaluated once), or nothing (start="truncate"), where normalised weights still sum to 1.

    Attributes:
        length: k from 1 to 1000, iterates in the window, the current one included.
        decay: β in [0, 1]; 0 is the gradient at the current iterate alone.
        normalised: whether the weights sum to 1; without, w_0 = 1 (InnerOuter, Xiao et al. 2023).
        start: "pad" or "truncate".
    """

    remembers = ("_iterates",)

    length: int = 2
    decay: float = 0.1
    normalised: bool = True
    start: str = "pad"

    def __post_init__(self) -> None:
        fits = 1 <= self.length <= MOST_POINTS
        require(fits, "query.length", self.length, f"a whole number from 1 to {MOST_POINTS}")
        require(0 <= self.decay <= 1, "query.decay", self.decay, "a number in [0, 1]")
        require(self.start in ("pad", "truncate"), "query.start", self.start, "pad or truncate")
        self._iterates = History(self.most_points)

    @property
    @override
    def most_points(self) -> int:
        return self.length if self.decay > 0 else 1

    def weights(self, available: int) -> list[float]:
        """w_0, w_1, ..., of as many lags as can be used where `available` different iterates are known."""
        powers = [self.decay**lag for lag in range(self.most_points)]
        if self.start == "truncate":
            powers = powers[:available]
        known = [*powers[: available - 1], math.fsum(powers[available - 1 :])]  # the oldest stands for those before it
        total = math.fsum(powers) if self.normalised else 1.0
        return [power / total for power in known]

    @override
    def points(self, iterate: Tensor) -> list[Point]:
        if self.most_points == 1:
            return [Point(1.0, iterate)]
        self._iterates.push(iterate)
        # The current iterate itself, not its copy: where it is the only one, the run is that of one point.
        _, *past = self._iterates
        weights = self.weights(len(self._iterates))
        return [Point(weight, point) for weight, point in zip(weights, [iterate, *past], strict=True)]


@dataclass
class ApartIterates(Query):
    """What the code published with DP-PMLF computes: Σ_j clip(∇f(θ_{t-j}; x_i)) at the lags j = 0, 2, 3, ..., k.

    Each gradient is clipped on its own and none is weighted, so a sample contributes up to k times the bound of one;
    the noise is for that. Before the first iterate there is that one again. (The code itself adds k times less noise,
    which is a run of this with ``privacy.noise_multiplier`` k times smaller and the eps that this really spends.)

    Attributes:
        length: k from 1 to 1000, number of gradients.
    """

    remembers = ("_iterates",)

    clipped_apart: ClassVar[bool] = True

    length: int = 2

    def __post_init__(self) -> None:
        fits = 1 <= self.length <= MOST_POINTS
        require(fits, "query.length", self.length, f"a whole number from 1 to {MOST_POINTS}")
        self._iterates = History(self.length + 1)

    @property
    @override
    def most_points(self) -> int:
        return self.length

    @property
    @override
    def sensitivity(self) -> float:
        return float(self.length)

    @override
    def points(self, iterate: Tensor) -> list[Point]:
        if self.length == 1:
            return [Point(1.0, iterate)]
        self._iterates.push(iterate)
        past = list(self._iterates)
        lagged = [past[min(lag, len(past) - 1)] for lag in range(2, self.length + 1)]
        return [Point(1.0, iterate), *(Point(1.0, point) for point in lagged)]
