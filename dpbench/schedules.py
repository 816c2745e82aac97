"""Learning-rate schedules: a factor on ``optim.lr`` for each step."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

from typing_extensions import override

from dpbench.errors import require


@dataclass
class Schedule(ABC):
    """Gives the factor of each step."""

    @abstractmethod
    def factor(self, step: int, steps: int) -> float:
        """Factor at step t = 0..T-1 of T steps."""


@dataclass
class Constant(Schedule):
    """1 throughout."""

    @override
    def factor(self, step: int, steps: int) -> float:
        return 1.0


@dataclass
class Cosine(Schedule):
    """Linear warm-up, then half a cosine down to a floor (Loshchilov & Hutter 2017).

    Attributes:
        warmup: fraction of the steps that warm up, in [0, 1).
        floor: factor at the end, in [0, 1].
    """

    warmup: float = 0.05
    floor: float = 0.0

    def __post_init__(self) -> None:
        require(0 <= self.warmup < 1, "schedule.warmup", self.warmup, "a number in [0, 1)")
        require(0 <= self.floor <= 1, "schedule.floor", self.floor, "a number in [0, 1]")

    @override
    def factor(self, step: int, steps: int) -> float:
        warm = math.ceil(round(self.warmup * steps, 9))  # 0.07 * 100 is above 7
        if step < warm:
            return (step + 1) / warm
        progress = (step - warm) / max(1, steps - warm)
        return self.floor + (1 - self.floor) * (1 + math.cos(math.pi * progress)) / 2


@dataclass
class InverseSqrt(Schedule):
    """1/sqrt(a + c t): ADP's schedule (ii) with a = 20, c = 1 and optim.lr = 1 (Wu et al. 2021).

    Attributes:
        a: offset from 1e-12 to 1e12.
        c: growth from 0 to 1e12.
    """

    a: float = 20.0
    c: float = 1.0

    def __post_init__(self) -> None:
        require(1e-12 <= self.a <= 1e12, "schedule.a", self.a, "a number from 1e-12 to 1e12")
        require(0 <= self.c <= 1e12, "schedule.c", self.c, "a number from 0 to 1e12")

    @override
    def factor(self, step: int, steps: int) -> float:
        return 1 / math.sqrt(self.a + self.c * step)


@dataclass
class SqrtDecay(Schedule):
    """1 - (1 - e) sqrt(t/T): ADP's schedule (i) with e = 1e-9 and optim.lr = 0.1 (Wu et al. 2021).

    Attributes:
        end: e, factor that step T would have, in [0, 1].
    """

    end: float = 1e-9

    def __post_init__(self) -> None:
        require(0 <= self.end <= 1, "schedule.end", self.end, "a number in [0, 1]")

    @override
    def factor(self, step: int, steps: int) -> float:
        return 1 - (1 - self.end) * math.sqrt(step / steps)
