"""Releases, and the plan of the releases that a run will make."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import NamedTuple

from dpbench.errors import require
from dpbench.privacy.correlation import Correlation
from dpbench.privacy.sampling import POISSON, Scheme

# Noise below this counts as none, which is valid: its inverse square may be no float.
LEAST_NOISE = 1e-150
# Of the inverse of a sampling rate, which is mostly a whole number.
ROUNDING = 1e-6


class Part(NamedTuple):
    """Something else that is released about the same batch, at a noise of its own.

    Attributes:
        name: what it is, such as "histogram of norms".
        noise_multiplier: standard deviation of its noise over what one sample adds at most, in L2 norm; calibration
            leaves it as it is.
    """

    name: str
    noise_multiplier: float


class Release(NamedTuple):
    """One use of the data: a sum over a sampled batch with Gaussian noise, and what is released beside it.

    Attributes:
        sampling_rate: q = B/N, the expected share of the data in the batch.
        noise_multiplier: standard deviation of the noise over the bound C of one sample's term; 0 without noise.
        beside: other private releases about the same batch.
    """

    sampling_rate: float
    noise_multiplier: float
    beside: tuple[Part, ...] = ()

    @property
    def joint(self) -> Release:
        """The one Gaussian release that all parts together are: 1/z² is the sum of theirs.

        Scaled to unit noise, the parts are one vector with independent noise, whose sensitivity is the root of the
        sum of their squares (DC-SGD, theorem on the joint release).
        """
        if not self.beside:
            return self
        multipliers = (self.noise_multiplier, *(part.noise_multiplier for part in self.beside))
        if min(multipliers) < LEAST_NOISE:
            return Release(self.sampling_rate, 0.0)
        return Release(self.sampling_rate, sum(z**-2 for z in multipliers) ** -0.5)


class Repeat(NamedTuple):
    """Equal releases in a row."""

    release: Release
    times: int


@dataclass(frozen=True)
class Plan:
    """The releases of a run, in order, run-length encoded.

    Before calibration the multipliers are the relative scales s_t; `scaled` turns them into z s_t.

    Attributes:
        runs: the releases.
        scheme: how batches are sampled, and with that the neighbouring relation.
        epoch: releases in which a sample takes part once, where the scheme passes over the data; else 0.
        correlation: of the noise between steps; None where it is independent.
    """

    runs: tuple[Repeat, ...]
    scheme: Scheme = field(default=POISSON)
    epoch: int = 0
    correlation: Correlation | None = None

    def __post_init__(self) -> None:
        for rate in {run.release.sampling_rate for run in self.runs}:
            require(0 < rate <= 1, "sampling_rate", rate, "a share of the data, above 0 and at most 1")
        if self.scheme.passes and self.epoch < 1:
            raise ValueError(f"{self.scheme.name}: the plan needs the number of releases in an epoch")
        for rate in {run.release.sampling_rate for run in self.runs} if self.scheme.passes else ():
            # An epoch of more releases would have a sample take part less often than it does.
            most = math.ceil(1 / rate - ROUNDING)
            require(
                self.epoch <= most, "epoch", self.epoch, f"at most the {most} releases in which all samples are used"
            )
        if self.correlation is not None and not self.correlation.covers(self.scheme):
            raise ValueError(f"{self.scheme.name}: no bound on where a sample takes part in correlated noise")

    @classmethod
    def of(
        cls,
        releases: Iterable[Release],
        scheme: Scheme = POISSON,
        epoch: int = 0,
        correlation: Correlation | None = None,
    ) -> Plan:
        """The plan that makes these releases one after the other."""
        runs = tuple(Repeat(release, sum(1 for _ in group)) for release, group in groupby(releases))
        return cls(runs, scheme, epoch, correlation)

    def scaled(self, noise_multiplier: float) -> Plan:
        """The same plan with the noise multiplier of every release times z; what is beside it stays."""
        return replace(
            self,
            runs=tuple(
                Repeat(r._replace(noise_multiplier=r.noise_multiplier * noise_multiplier), n) for r, n in self.runs
            ),
        )

    def prefix(self, releases: int) -> Plan:
        """The first `releases` of them."""
        return self.between(0, releases)

    def between(self, first: int, end: int) -> Plan:
        """The releases from the first to before the end, counted from 0."""
        runs = []
        position = 0
        for release, times in self.runs:
            taken = min(end, position + times) - max(first, position)
            if taken > 0:
                runs.append(Repeat(release, taken))
            position += times
        return replace(self, runs=tuple(runs))

    @property
    def smallest_multiplier(self) -> float:
        """Of all releases; inf where there are none."""
        return min((run.release.joint.noise_multiplier for run in self.runs), default=math.inf)

    def __len__(self) -> int:
        """Number of releases."""
        return sum(run.times for run in self.runs)
