"""Per-sample gradients of linear combinations over iterates, exact."""

from dpbench.gradients.flat import FlatParameters
from dpbench.gradients.per_sample import PerSampleGradients
from dpbench.gradients.tape import Tape

__all__ = ["FlatParameters", "PerSampleGradients", "Tape"]
