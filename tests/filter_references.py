"""Low-pass filters: what the papers print of them, and weights, responses and correlations by their definitions."""

from fractions import Fraction

import numpy as np
import torch
from helpers import composed

# DOPPLER, Tables 2 and 4: b, a.
TAPS = {
    "sgd": ("1", ""),
    "momentum": ("0.1", "-0.9"),
    "first_v1": ("1/11 1/11", "-9/11"),
    "first_v2": ("3/11 -1/11", "-9/11"),
    "second": ("1/58 2/58 1/58", "-92/58 38/58"),
    "f1": ("0.075 0.025", "-0.9"),
    "f2": ("0.025 0.075", "-0.9"),
    "f3": ("0.1 0.1", "-0.8"),
    "f4": ("0.2 0.2", "-0.6"),
    "f5": ("0.025 0.05 0.025", "-0.9"),
    "f6": ("0.025 0.025", "-1.8 0.85"),
}

# doppler.md 3.3: SNR in the limit for c = 1/2, 0.5 * 0.95^τ, 0.5 * 0.99^τ, and for c = 1/2 at T = 1000.
SNR = {
    "sgd": (0.5, 0.5, 0.5, 0.5),
    "momentum": (9.5, 6.55172, 8.71560, 9.45481),
    "first_v1": (5.5, 4.37755, 5.23684, 5.48759),
    "first_v2": (3.92857, 3.28717, 3.77820, 3.91778),
    "second": (5.08772, 3.95221, 4.83882, 5.08739),
    "f1": (9.87013, 6.72190, 9.03253, 9.82480),
    "f2": (9.87013, 6.55172, 8.98725, 9.82497),
    "f3": (5.0, 4.06250, 4.78365, 4.98997),
    "f4": (2.5, 2.26744, 2.45074, 2.49812),
    "f5": (10.25641, 6.72414, 9.31569, 10.21119),
    "f6": (3.0, 2.56018, 2.92160, 3.01410),
}


def fractions(name):
    return [[Fraction(tap) for tap in taps.split()] for taps in TAPS[name]]


def taps(name):
    b, a = fractions(name)
    return [float(tap) for tap in b], [float(tap) for tap in a]


def catalogued(name):
    return composed("algo=doppler", f"filter={name}").filter


def outputs_of(stage, inputs):
    return torch.stack([stage.apply(g.clone()).clone() for g in inputs]) if len(inputs) else inputs


def weights(stage, steps):
    """Row t holds the weights of g_0, g_1, ... in the output of step t."""
    return outputs_of(stage, torch.eye(steps, dtype=torch.float64)).numpy()


def impulse_response_of(stage, steps):
    """κ of the recursion without start-up correction, of which the weights are κ_{t-s} / Σ_{τ≤t} κ_τ and κ_0 = b_0."""
    last = weights(stage, steps)[-1, ::-1]
    return last / last[0] * stage.b[0]


def impulse_response(name, steps):
    return impulse_response_of(catalogued(name), steps)


def normalised_snr(kappa, c):
    """Σ_{t<T} Σ_{τ≤t} c_τ κ_τ over Σ_{t<T} Σ_{τ≤t} κ_τ², by which a filter improves the bound (DOPPLER, eq. 4)."""
    return np.cumsum(np.multiply(c, kappa)).sum() / np.cumsum(np.square(kappa)).sum()
