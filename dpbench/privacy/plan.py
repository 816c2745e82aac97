"""Releases, and the plan of the releases that a run will make."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import groupby
from typing import NamedTuple


class Release(NamedTuple):
    """One use of the data: a sum over a Poisson sample with Gaussian noise.

    Neighbouring relation: add or remove one sample.

    Attributes:
        sampling_rate: q, probability with which each sample takes part.
        noise_multiplier: standard deviation of the noise over the sensitivity of the sum; 0 without noise.
    """

    sampling_rate: float
    noise_multiplier: float


class Repeat(NamedTuple):
    """Equal releases in a row."""

    release: Release
    times: int


@dataclass(frozen=True)
class Plan:
    """The releases of a run, in order, run-length encoded.

    Before calibration the multipliers are the relative scales s_t; `scaled` turns them into z s_t.
    """

    runs: tuple[Repeat, ...]

    @classmethod
    def of(cls, releases: Iterable[Release]) -> Plan:
        """The plan that makes these releases one after the other."""
        return cls(tuple(Repeat(release, sum(1 for _ in group)) for release, group in groupby(releases)))

    def scaled(self, noise_multiplier: float) -> Plan:
        """The same plan with every noise multiplier times z."""
        return replace(
            self,
            runs=tuple(
                Repeat(Release(r.sampling_rate, r.noise_multiplier * noise_multiplier), n) for r, n in self.runs
            ),
        )

    def prefix(self, releases: int) -> Plan:
        """The first so many releases."""
        runs = []
        for release, times in self.runs:
            taken = min(times, releases)
            if taken:
                runs.append(Repeat(release, taken))
            releases -= taken
        return Plan(tuple(runs))

    def __len__(self) -> int:
        """Number of releases."""
        return sum(run.times for run in self.runs)
