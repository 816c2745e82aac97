"""Named random streams, each with a seed of its own, so that one more draw in one shifts no other.

Sampling, noise, augmentation and what a model draws, such as dropout, also depend on what the run is: two runs that
shared noise would cancel it between them, and the eps of several runs adds up only where their draws are independent.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch

STREAMS = ("weights", "sampling", "augmentation", "noise", "side", "model", "audit", "recording", "synthetic")


def stream_seed(seed: int, name: str, run: str = "") -> int:
    """Seed of a named stream, of one run alone where its hash is given. torch's CPU generator uses 32 of its bits."""
    digest = hashlib.sha256(f"{seed}/{name}/{run}".encode()).digest()
    return int.from_bytes(digest[:8], "big", signed=True)


def generator(seed: int, name: str, device: torch.device, run: str = "") -> torch.Generator:
    """Generator of a named stream on a device, of one run alone where its hash is given.

    Noise for privacy has a stream of its own. It is a seeded pseudo-random generator, fit for experiments; for a model
    that is released, against an adversary who can guess the seed, there is `privacy.secure_noise`.
    """
    if name not in STREAMS:
        raise ValueError(f"unknown stream {name!r}; known: {', '.join(STREAMS)}")
    return torch.Generator(device).manual_seed(stream_seed(seed, name, run))


@contextmanager
def global_stream(seed: int, name: str, run: str = "") -> Iterator[None]:
    """Let torch's global generators be a named stream; afterwards they are what they were."""
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        torch.manual_seed(stream_seed(seed, name, run))
        yield
