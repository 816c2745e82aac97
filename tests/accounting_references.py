"""Plans of equal releases, and eps by dp-accounting itself."""

import math

import dp_accounting

from dpbench.privacy import Part, Plan, Release
from dpbench.privacy.sampling import POISSON

# What is released beside each sum of a plan.
BESIDE = (Part("histogram", 5.0),)


def equal_plan(q, z, steps, scheme=POISSON):
    epoch = math.ceil(1 / q) if scheme.passes else 0
    return Plan.of([Release(q, z)] * steps, scheme, epoch)


def by_hand(accountant, releases, delta=1e-5):
    """Eps of Poisson-sampled releases, (q, z) and how often."""
    for (q, z), times in releases:
        sampled = dp_accounting.PoissonSampledDpEvent(q, dp_accounting.GaussianDpEvent(z))
        accountant.compose(dp_accounting.SelfComposedDpEvent(sampled, times))
    return accountant.get_epsilon(delta)
