"""Stage 3, noise: the relative scale s_t of the noise of each step, and its correlation in time."""

from dpbench.noise.base import ConstantNoise, Noise
from dpbench.noise.correlated import BandedNoise, CorrelatedNoise, TreeNoise
from dpbench.noise.released import DiskReleasedNoise, UnderstatedNoise
from dpbench.noise.varying import DecayingNoise, GrowingNoise, StepSizeNoise

__all__ = [
    "BandedNoise",
    "ConstantNoise",
    "CorrelatedNoise",
    "DecayingNoise",
    "DiskReleasedNoise",
    "GrowingNoise",
    "Noise",
    "StepSizeNoise",
    "TreeNoise",
    "UnderstatedNoise",
]
