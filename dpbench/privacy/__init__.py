"""What is released, what it costs, and the record of both."""

from dpbench.privacy.accountants import ACCOUNTANTS, epsilon
from dpbench.privacy.calibration import Calibration, calibrate
from dpbench.privacy.ledger import BudgetError, Ledger
from dpbench.privacy.plan import Plan, Release
from dpbench.privacy.sampling import PoissonSampler

__all__ = [
    "ACCOUNTANTS",
    "BudgetError",
    "Calibration",
    "Ledger",
    "Plan",
    "PoissonSampler",
    "Release",
    "calibrate",
    "epsilon",
]
