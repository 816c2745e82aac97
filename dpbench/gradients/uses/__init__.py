"""Uses of parameters: what the per-sample gradient of each kind of layer is made of."""

from dpbench.gradients.uses.base import Factorable, Squares, Strategy, Term, Use
from dpbench.gradients.uses.direct import Direct
from dpbench.gradients.uses.lookup import Lookup, can_tie, cross_products
from dpbench.gradients.uses.outer import Outer
from dpbench.gradients.uses.patches import GreyPatches, Patches
from dpbench.gradients.uses.standardised import Standardisation, StandardisedPatches

__all__ = [
    "Direct",
    "Factorable",
    "GreyPatches",
    "Lookup",
    "Outer",
    "Patches",
    "Squares",
    "Standardisation",
    "StandardisedPatches",
    "Strategy",
    "Term",
    "Use",
    "can_tie",
    "cross_products",
]
