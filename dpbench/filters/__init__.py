"""Stage 4, filter: post-processing of the private gradient g_t over steps. Never sees data."""

from dpbench.filters.base import Filter, Identity
from dpbench.filters.exponential import Exponential
from dpbench.filters.recursive import RecursiveLowPass

__all__ = ["Exponential", "Filter", "Identity", "RecursiveLowPass"]
