"""The clipping threshold C_t."""

from dpbench.threshold.base import DecayingThreshold, FixedThreshold, Threshold
from dpbench.threshold.histogram import ExpectedErrorThreshold, HistogramThreshold, PercentileThreshold
from dpbench.threshold.quantile import QuantileThreshold

__all__ = [
    "DecayingThreshold",
    "ExpectedErrorThreshold",
    "FixedThreshold",
    "HistogramThreshold",
    "PercentileThreshold",
    "QuantileThreshold",
    "Threshold",
]
