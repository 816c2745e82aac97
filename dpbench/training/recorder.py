"""Gradients of a run, kept for study: coordinates of signal and noise (DOPPLER, sec. 4), norms (DC-SGD, fig. 4)."""

from __future__ import annotations

import io

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dpbench.state import State

Array = NDArray[np.float64]


class GradientRecorder:
    """Keeps chosen coordinates of the gradients of every step, before and after noise, and the norms of the last step.

    A `step.Recorder`. NOT PRIVATE: un-noised gradients and norms of samples are kept. Set ``step.recorder`` to one to
    record, for study on public data.
    """

    def __init__(self, coordinates: Tensor) -> None:
        """Choose what is kept: the coordinates with these indices, shape (K,)."""
        self._coordinates = coordinates
        self._unnoised: list[Tensor] = []
        self._private: list[Tensor] = []
        self._norms = torch.empty(0)
        self._error_weight = 0.0

    @classmethod
    def at_random(cls, dimension: int, count: int, generator: torch.Generator) -> GradientRecorder:
        """Keep `count` coordinates of vectors of this dimension, or all if there are fewer."""
        chosen = torch.randperm(dimension, generator=generator, device=generator.device)[:count]
        return cls(chosen.sort().values)

    def unnoised(self, gradient: Tensor) -> None:
        """Keep a clipped mean, shape (d,)."""
        self._unnoised.append(gradient[self._coordinates].cpu())

    def norms(self, norms: Tensor, error_weight: float) -> None:
        """Keep the norms of a step's samples, shape (B,), and its K, in place of those of the step before."""
        self._norms, self._error_weight = norms.to("cpu", copy=True), error_weight

    def private(self, gradient: Tensor) -> None:
        """Keep a private gradient, shape (d,)."""
        self._private.append(gradient[self._coordinates].cpu())

    def state_dict(self) -> State:
        """What was kept so far; which coordinates is for whoever makes the recorder."""
        of_last = {"norms": self._norms, "error_weight": self._error_weight}
        return {"unnoised": _stacked(self._unnoised), "private": _stacked(self._private), **of_last}

    def load_state_dict(self, state: State) -> None:
        """Continue from a state that `state_dict` returned."""
        self._unnoised, self._private = (list(state[name].cpu().unbind()) for name in ("unnoised", "private"))
        self._norms, self._error_weight = state["norms"].cpu(), state["error_weight"]

    @property
    def signal(self) -> Array:
        """Un-noised clipped means, shape (T, K)."""
        return _array(self._unnoised)

    @property
    def observed(self) -> Array:
        """Private gradients g_t, shape (T, K)."""
        return _array(self._private)

    def archive(self) -> bytes:
        """A NumPy archive (.npz), marked as not private.

        ``signal`` and ``observed``; of the last step ``norms``, float64 of shape (B,), inf for a gradient that is not
        finite, and ``error_weight``, see `PrivateStep.error_weight`.
        """
        mark = np.array("not private: `signal` holds un-noised gradients, `norms` those of samples")
        norms, weight = self._norms.double().numpy(), np.array(self._error_weight)
        buffer = io.BytesIO()
        np.savez_compressed(
            buffer, signal=self.signal, observed=self.observed, norms=norms, error_weight=weight, privacy=mark
        )
        return buffer.getvalue()


def _stacked(rows: list[Tensor]) -> Tensor:
    return torch.stack(rows) if rows else torch.empty(0)


def _array(rows: list[Tensor]) -> Array:
    return np.array([row.double().numpy() for row in rows], dtype=np.float64)
