"""Plans of equal releases, eps by dp-accounting itself, and multipliers that dp_pmlf.md prints."""

import math

import dp_accounting

from dpbench.privacy import Part, Plan, Release
from dpbench.privacy.sampling import POISSON

# What is released beside each sum of a plan.
BESIDE = (Part("histogram", 5.0),)

# dp_pmlf.md 2.6: RDP by bisection to 0.01 in eps, B = 1000; (N, epochs, power of 1/N that delta is): at eps = 1..8.
DP_PMLF = {
    (60_000, 25, 1): "2.6953 1.5674 1.2012 1.0266 0.9222 0.8521 0.7999 0.7596",
    (60_000, 25, 1.1): "2.8516 1.6357 1.2476 1.0596 0.9485 0.8740 0.8197 0.7776",
    (60_000, 100, 1): "5.1562 2.8223 2.0312 1.6382 1.4038 1.2488 1.1395 1.0583",
    (60_000, 100, 1.1): "5.4688 2.9688 2.1240 1.7041 1.4551 1.2903 1.1743 1.0876",
    (50_000, 20, 1): "2.6172 1.5381 1.1890 1.0193 0.9174 0.8478 0.7962 0.7559",
    (50_000, 20, 1.1): "2.7734 1.6113 1.2329 1.0522 0.9436 0.8704 0.8167 0.7745",
    (50_000, 50, 1): "4.0234 2.2266 1.6357 1.3452 1.1719 1.0583 0.9778 0.9167",
    (50_000, 50, 1.1): "4.2578 2.3438 1.7090 1.3953 1.2109 1.0901 1.0046 0.9406",
    (50_000, 100, 1): "5.5859 3.0469 2.1875 1.7554 1.4990 1.3281 1.2085 1.1188",
    (50_000, 100, 1.1): "5.9375 3.2031 2.2852 1.8286 1.5552 1.3745 1.2463 1.1511",
    (392_702, 20, 1): "1.2305 0.8813 0.7581 0.6903 0.6448 0.6113 0.5850 0.5638",
    (392_702, 20, 1.1): "1.2939 0.9131 0.7806 0.7086 0.6607 0.6256 0.5980 0.5757",
    (104_743, 20, 1): "1.9531 1.2012 0.9680 0.8551 0.7849 0.7352 0.6970 0.6668",
    (104_743, 20, 1.1): "2.0508 1.2476 0.9985 0.8789 0.8051 0.7532 0.7135 0.6818",
    (363_846, 20, 1): "1.2598 0.8911 0.7666 0.6970 0.6506 0.6168 0.5899 0.5684",
    (363_846, 20, 1.1): "1.3184 0.9229 0.7886 0.7153 0.6665 0.6311 0.6030 0.5804",
    (67_349, 20, 1): "2.3242 1.3867 1.0889 0.9448 0.8575 0.7971 0.7520 0.7162",
    (67_349, 20, 1.1): "2.4609 1.4453 1.1255 0.9729 0.8807 0.8179 0.7703 0.7330",
}


def equal_plan(q, z, steps, scheme=POISSON):
    epoch = math.ceil(1 / q) if scheme.passes else 0
    return Plan.of([Release(q, z)] * steps, scheme, epoch)


def by_hand(accountant, releases, delta=1e-5):
    """Eps of Poisson-sampled releases, (q, z) and how often."""
    for (q, z), times in releases:
        sampled = dp_accounting.PoissonSampledDpEvent(q, dp_accounting.GaussianDpEvent(z))
        accountant.compose(dp_accounting.SelfComposedDpEvent(sampled, times))
    return accountant.get_epsilon(delta)
