"""What is released, what it costs, and the record of both."""

from dpbench.privacy.accountants import ACCOUNTANTS, epsilon, tightest
from dpbench.privacy.calibration import Calibration, calibrate, calibrated
from dpbench.privacy.ledger import BudgetError, Ledger
from dpbench.privacy.plan import Part, Plan, Release
from dpbench.privacy.sampling import SCHEMES, Sampler, Scheme, make_sampler

__all__ = [
    "ACCOUNTANTS",
    "SCHEMES",
    "BudgetError",
    "Calibration",
    "Ledger",
    "Part",
    "Plan",
    "Release",
    "Sampler",
    "Scheme",
    "calibrate",
    "calibrated",
    "epsilon",
    "make_sampler",
    "tightest",
]
