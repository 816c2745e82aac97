"""Coordinates of the gradients of a run, kept for study: signal and noise (DOPPLER, sec. 4)."""

from __future__ import annotations

import io

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dpbench.stage import State

Array = NDArray[np.float64]


class GradientRecorder:
    """Keeps chosen coordinates of the gradients of every step, before and after noise; a `step.Recorder`.

    NOT PRIVATE: the un-noised gradients are kept. Set ``step.recorder`` to one to record, for study on public data.
    """

    def __init__(self, coordinates: Tensor) -> None:
        """Choose what is kept: the coordinates with these indices, shape (K,)."""
        self._coordinates = coordinates
        self._unnoised: list[Tensor] = []
        self._private: list[Tensor] = []

    @classmethod
    def at_random(cls, dimension: int, count: int, generator: torch.Generator) -> GradientRecorder:
        """Keep so many coordinates of vectors of this dimension, or all if there are fewer."""
        chosen = torch.randperm(dimension, generator=generator, device=generator.device)[:count]
        return cls(chosen.sort().values)

    def unnoised(self, gradient: Tensor) -> None:
        """Keep a clipped mean, shape (d,)."""
        self._unnoised.append(gradient[self._coordinates].cpu())

    def private(self, gradient: Tensor) -> None:
        """Keep a private gradient, shape (d,)."""
        self._private.append(gradient[self._coordinates].cpu())

    def state_dict(self) -> State:
        """What was kept so far; which coordinates is for whoever makes the recorder."""
        return {"unnoised": _stacked(self._unnoised), "private": _stacked(self._private)}

    def load_state_dict(self, state: State) -> None:
        """Continue from a state that `state_dict` returned."""
        self._unnoised, self._private = list(state["unnoised"].unbind()), list(state["private"].unbind())

    @property
    def signal(self) -> Array:
        """Un-noised clipped means, shape (T, K)."""
        return _array(self._unnoised)

    @property
    def observed(self) -> Array:
        """Private gradients g_t, shape (T, K)."""
        return _array(self._private)

    def archive(self) -> bytes:
        """``signal`` and ``observed`` as a NumPy archive (.npz), marked as not private."""
        mark = np.array("not private: `signal` holds un-noised gradients")
        buffer = io.BytesIO()
        np.savez_compressed(buffer, signal=self.signal, observed=self.observed, privacy=mark)
        return buffer.getvalue()


def _stacked(rows: list[Tensor]) -> Tensor:
    return torch.stack(rows) if rows else torch.empty(0)


def _array(rows: list[Tensor]) -> Array:
    return np.array([row.double().numpy() for row in rows], dtype=np.float64)
