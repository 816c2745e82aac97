"""Stage 5, optimizer: ĝ_t → θ_{t+1}. Never sees data."""

from dpbench.optim.adagrad_norm import AdaGradNorm, UncertifiedAdaGradNorm
from dpbench.optim.base import Optimizer, PlacesFilter
from dpbench.optim.filtered_adam import AdamBC, FilteredAdam
from dpbench.optim.galore import GaLore
from dpbench.optim.standard import SGD, Adam, AdamW

__all__ = [
    "SGD",
    "AdaGradNorm",
    "Adam",
    "AdamBC",
    "AdamW",
    "FilteredAdam",
    "GaLore",
    "Optimizer",
    "PlacesFilter",
    "UncertifiedAdaGradNorm",
]
