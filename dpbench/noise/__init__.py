"""Stage 3, noise: the relative scale s_t of the noise of each step, and its correlation in time."""

from dpbench.noise.base import ConstantNoise, Noise
from dpbench.noise.released import DiskReleasedNoise, UnderstatedNoise
from dpbench.noise.varying import DecayingNoise, GrowingNoise, StepSizeNoise

__all__ = [
    "ConstantNoise",
    "DecayingNoise",
    "DiskReleasedNoise",
    "GrowingNoise",
    "Noise",
    "StepSizeNoise",
    "UnderstatedNoise",
]
