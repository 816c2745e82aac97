"""Named random streams, each derived from the seed alone, so that one more draw in one shifts no other."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch

STREAMS = ("weights", "sampling", "noise", "model")


def stream_seed(seed: int, name: str) -> int:
    """64-bit seed of a named stream."""
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return int.from_bytes(digest[:8], "big", signed=True)


def generator(seed: int, name: str, device: torch.device) -> torch.Generator:
    """Generator of a named stream on a device.

    Noise for privacy has a stream of its own. It is a seeded pseudo-random generator, fit for experiments; a
    deployment that must withstand an adversary who can guess the seed needs a cryptographic one.
    """
    if name not in STREAMS:
        raise ValueError(f"unknown stream {name!r}; known: {', '.join(STREAMS)}")
    return torch.Generator(device).manual_seed(stream_seed(seed, name))


@contextmanager
def global_stream(seed: int, name: str, device: torch.device) -> Iterator[None]:
    """Let torch's global generators be a named stream; afterwards they are what they were."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(stream_seed(seed, name))
        yield
