"""Stage 1, query: which per-sample vector is released, Σ_j w_j ∇f(θ_j; x_i) over public iterates θ_j."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from torch import Tensor
from typing_extensions import override

from dpbench.errors import require
from dpbench.stage import Stage, State


class Point(NamedTuple):
    """One term of the query: `weight` times the gradient at `iterate`, a flat vector of shape (d,)."""

    weight: float
    iterate: Tensor


@dataclass
class Query(Stage):
    """Chooses the points of a step from the current iterate and from what it remembers of earlier ones.

    Attributes:
        most_points: how many there can be.
    """

    most_points: ClassVar[int] = 1

    def points(self, iterate: Tensor) -> list[Point]:
        """Points of the next step. Called once a step.

        Args:
            iterate: current parameters θ_t, shape (d,); a live buffer that the optimizer will overwrite.
        """
        raise NotImplementedError


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

    most_points: ClassVar[int] = 2

    kappa: float = 0.7
    gamma: float = 0.5

    def __post_init__(self) -> None:
        require(0 < self.kappa <= 1, "query.kappa", self.kappa, "a number in (0, 1]")
        require(self.gamma != 0 and math.isfinite(self.gamma), "query.gamma", self.gamma, "a finite number but 0")
        self._previous: Tensor | None = None

    @property
    def probe_weight(self) -> float:
        """The mixing coefficient c."""
        weight = (1 - self.kappa) / (self.kappa * self.gamma)
        return 1.0 if abs(weight - 1) < 1e-12 else weight

    @override
    def points(self, iterate: Tensor) -> list[Point]:
        weight = self.probe_weight
        if self._previous is None:
            self._previous = iterate.clone()
            return [Point(1.0, iterate)]
        if weight == 0:
            return [Point(1.0, iterate)]
        probe = iterate + self.gamma * (iterate - self._previous)
        self._previous.copy_(iterate)
        if weight == 1:
            return [Point(1.0, probe)]
        return [Point(weight, probe), Point(1 - weight, iterate)]

    @override
    def state_dict(self) -> State:
        return {} if self._previous is None else {"previous": self._previous.clone()}

    @override
    def load_state_dict(self, state: State) -> None:
        self._previous = state["previous"].clone() if state else None
