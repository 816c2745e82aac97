"""Per-sample gradients of linear combinations over iterates, exact."""

from dpbench.gradients.clipped import Clipped
from dpbench.gradients.flat import FlatParameters
from dpbench.gradients.fused import FusedGradients
from dpbench.gradients.per_sample import PerSampleGradients
from dpbench.gradients.request import MicroBatch, Request
from dpbench.gradients.tape import Tape

__all__ = ["Clipped", "FlatParameters", "FusedGradients", "MicroBatch", "PerSampleGradients", "Request", "Tape"]
