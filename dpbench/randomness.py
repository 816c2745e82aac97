"""Named random streams, each with a seed of its own, so that one more draw in one shifts no other.

Sampling, noise, augmentation and what a model draws, such as dropout, also depend on what the run is: two runs that
shared noise would cancel it between them, and the eps of several runs adds up only where their draws are independent.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import numpy as np
import torch

from dpbench.state import State

STREAMS = (
    "weights",
    "sampling",
    "augmentation",
    "noise",
    "side",
    "model",
    "audit",
    "recording",
    "synthetic",
    "validation",
)


def stream_seed(seed: int, name: str, run: str = "") -> int:
    """Seed of a named stream, of one run alone where its hash is given. torch's CPU generator uses 32 of its bits."""
    return int.from_bytes(_digest(seed, name, run)[:8], "big", signed=True)


def _digest(seed: int, name: str, run: str) -> bytes:
    """32 bytes, any part of which seeds a generator."""
    return hashlib.sha256(f"{seed}/{name}/{run}".encode()).digest()


def generator(seed: int, name: str, device: torch.device, run: str = "") -> torch.Generator:
    """Generator of a named stream on a device, of one run alone where its hash is given.

    Noise for privacy has a stream of its own. It is a seeded pseudo-random generator, fit for experiments; for a model
    that is released, against an adversary who can guess the seed, there is `privacy.secure_noise`.
    """
    if name not in STREAMS:
        raise ValueError(f"unknown stream {name!r}; known: {', '.join(STREAMS)}")
    return torch.Generator(device).manual_seed(stream_seed(seed, name, run))


class Generators:
    """The global generators that a model may draw from: torch's, Python's, and NumPy's old one."""

    def __init__(self, devices: Iterable[torch.device | int]) -> None:
        """Set up.

        Args:
            devices: GPUs whose generators are meant too.
        """
        self._devices = tuple(devices)

    def state_dict(self) -> State:
        """Where they are, as tensors and plain values."""
        numpy = np.random.get_state(legacy=False)
        numpy["state"]["key"] = numpy["state"]["key"].tolist()
        return {
            "torch": [torch.get_rng_state(), *map(torch.cuda.get_rng_state, self._devices)],
            "python": random.getstate(),
            "numpy": numpy,
        }

    def load_state_dict(self, state: State) -> None:
        """Let them draw again what they drew after a state that `state_dict` returned."""
        of_cpu, *of_devices = state["torch"]
        torch.set_rng_state(of_cpu)
        for device, of_device in zip(self._devices, of_devices, strict=True):
            torch.cuda.set_rng_state(of_device, device)
        random.setstate(state["python"])
        np.random.set_state(state["numpy"])


@contextmanager
def global_stream(seed: int, name: str, run: str = "") -> Iterator[None]:
    """Let the global generators be a named stream; afterwards they are what they were.

    Each has bits of its own: from the same ones NumPy's draws what Python's or torch's does.
    """
    generators = Generators(range(torch.cuda.device_count()))
    before, digest = generators.state_dict(), _digest(seed, name, run)
    torch.manual_seed(stream_seed(seed, name, run))
    random.seed(digest[8:16])
    np.random.seed(list(digest[16:]))
    try:
        yield
    finally:
        generators.load_state_dict(before)
