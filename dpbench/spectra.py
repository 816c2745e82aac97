"""Spectra of recorded gradients: what part of them is signal, at which frequencies (DOPPLER, sec. 4).

Signals are arrays of shape (T, K): T steps of K coordinates, each a series of its own; powers are summed over
the K. Frequencies are in cycles per step.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]


class Spectrum(NamedTuple):
    """Power at each frequency.

    Attributes:
        frequencies: k/T for k = -T/2..T/2-1, shape (T,), ascending.
        power: P(k) = (1/T) Σ_coordinates |Σ_t s_t exp(-2πi k t/T)|², shape (T,); its mean is the mean of ‖s_t‖².
    """

    frequencies: Array
    power: Array


def spectrum(signal: ArrayLike) -> Spectrum:
    """The power spectral density: the DFT of the biased circular auto-correlation."""
    values = np.asarray(signal, dtype=np.float64)
    power = np.abs(np.fft.fft(values, axis=0)) ** 2
    frequencies = np.fft.fftfreq(len(values))
    return Spectrum(np.fft.fftshift(frequencies), np.fft.fftshift(power.sum(axis=1) / len(values)))


def autocorrelation(signal: ArrayLike, lags: int) -> Array:
    """φ(τ), the mean of ⟨s_t, s_{t-τ}⟩ over the T - τ pairs, for τ = 0..lags (DOPPLER, sec. 4).

    Args:
        signal: s, shape (T, K).
        lags: the largest τ, below T.

    Returns:
        Shape (lags + 1,).
    """
    values = np.asarray(signal, dtype=np.float64)
    steps = len(values)
    return np.array([(values[lag:] * values[: steps - lag]).sum() / (steps - lag) for lag in range(lags + 1)])


def signal_to_noise(signal: ArrayLike, noise: ArrayLike, b: ArrayLike = (1.0,), a: ArrayLike = ()) -> float:
    """Power of the signal over that of the noise behind a filter, Σ_ν |H(ν)|² P_s(ν) over Σ_ν |H(ν)|² P_w(ν).

    Args:
        signal: un-noised gradients, shape (T, K).
        noise: what private ones have beside them, shape (T, K).
        b: taps of the gradients; of no filter by default.
        a: feedback taps a_1, a_2, ...
    """
    wanted, unwanted = spectrum(signal), spectrum(noise)
    gain = np.abs(frequency_response(b, a, wanted.frequencies)) ** 2
    return float((gain * wanted.power).sum() / (gain * unwanted.power).sum())


def frequency_response(b: ArrayLike, a: ArrayLike, frequencies: ArrayLike) -> NDArray[np.complex128]:
    """H(ν) = Σ b_τ e^{-2πiντ}/(1 + Σ a_τ e^{-2πiντ}) for feedback taps a_1, a_2, ..., as filters hold them."""
    from scipy import signal  # takes a second, which most commands have no use for

    feedback = [1.0, *np.atleast_1d(np.asarray(a, dtype=np.float64))]
    response: NDArray[np.complex128] = signal.freqz(b, feedback, worN=2 * np.pi * np.asarray(frequencies))[1]
    return response
