"""Stage 4, filter: post-processing of the private gradient g_t over steps. Never sees data."""

from dpbench.filters.base import Filter, Identity
from dpbench.filters.designed import Butterworth, Chebyshev, Designed
from dpbench.filters.exponential import Exponential
from dpbench.filters.kalman import Kalman
from dpbench.filters.online import OnlineFIR
from dpbench.filters.recursive import RecursiveLowPass

__all__ = [
    "Butterworth",
    "Chebyshev",
    "Designed",
    "Exponential",
    "Filter",
    "Identity",
    "Kalman",
    "OnlineFIR",
    "RecursiveLowPass",
]
