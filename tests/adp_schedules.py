"""Schedules of ADP-SGD: those of its experiments by their formulas, and the noise that goes with any."""

import math
from functools import partial

import numpy as np

from dpbench.noise import StepSizeNoise
from dpbench.stage import Course


def linear_in_root(steps):
    """Schedule (i) of adp.md 2.4, as alpha_t = 1/sqrt(eta_t)."""
    slope = (0.1 - 1e-10) / math.sqrt(steps)
    return tuple((0.1 - slope * math.sqrt(t)) ** -0.5 for t in range(steps))


def inverse_root(steps):
    """Schedule (ii)."""
    return tuple((20 + t) ** 0.25 for t in range(steps))


# adp.md 2.4: alpha_t = 1/sqrt(eta_t), t = 0..T-1, of DP-SGD and of the two schedules; on 256 of 50,000 samples.
FACTORS = {"dp": lambda steps: (1.0,) * steps, "i": linear_in_root, "ii": inverse_root}
RATE = 0.00512


def prepared(stage, schedule, steps):
    stage.prepare(Course(steps, 10, partial(schedule.factor, steps=steps)))
    return stage


def scales(schedule, steps):
    stage = prepared(StepSizeNoise(), schedule, steps)
    return np.array([stage.scale(t) for t in range(steps)])


def rates(schedule, steps):
    return np.array([schedule.factor(t, steps) for t in range(steps)])
