"""Curves of runs: learning curves from metrics.jsonl, spectra and expected errors from gradients.npz."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from dpbench.claims import Cell, Run
from dpbench.claims.evidence import value_in
from dpbench.spectra import frequency_response, spectrum
from dpbench.threshold.histogram import expected_error
from dpbench.tracking.reading import Recorded, tell
from dpbench.tracking.record import GRADIENTS

# So many frequencies are drawn; the powers between two of them are averaged.
FREQUENCIES = 200
# So many thresholds are, from 0 to a bit above the largest norm, or to where noise alone is a bit more than the error
# at 0 if that is before it.
THRESHOLDS, BEYOND = 200, 1.1

Array = NDArray[np.float64]
Values = tuple[float, ...]
Found = TypeVar("Found")


class Learning(NamedTuple):
    """A learning curve.

    Attributes:
        x: epochs or steps.
        mean: over the runs, in the unit of the cell.
        spread: sample standard deviation at each x; None for one run.
    """

    x: Values
    mean: Values
    spread: Values | None


class Spectra(NamedTuple):
    """Powers, means over runs.

    Attributes:
        frequencies: in cycles per step, positive.
        signal: of the gradients before noise.
        noise: of what was added.
        applied: of the private gradients behind the filter, in its steady state.
    """

    frequencies: Values
    signal: Values
    noise: Values
    applied: Values


class Errors(NamedTuple):
    """Expected squared error of a released gradient over the threshold, mean over runs.

    Attributes:
        thresholds: C.
        errors: Ê(C), of the norms of a step themselves.
    """

    thresholds: Values
    errors: Values


def learning_curve(cell: Cell, runs: Sequence[Run], x: str) -> Learning | None:
    """The number of a cell over the course of its runs, at the evaluations that all of them have.

    Args:
        cell: says which number, in which unit.
        runs: of the cell.
        x: "epoch" or "step".

    Returns:
        None where no record has the number at any evaluation.
    """
    courses = [course for course in (_course(cell, run.folder, x) for run in runs) if course]
    if not courses:
        return None
    shared = sorted(set.intersection(*(set(course) for course in courses)))
    columns = [[course[place] for course in courses] for place in shared]
    spread = tuple(map(statistics.stdev, columns)) if len(courses) > 1 else None
    return Learning(tuple(shared), tuple(map(statistics.fmean, columns)), spread)


def _course(cell: Cell, folder: Path, x: str) -> dict[float, float]:
    """The number at each evaluation of a run, by epoch or step."""
    found = {}
    for entries in Recorded(folder).metrics:
        value = value_in(cell, entries)
        if value is not None and x in entries:
            found[float(entries[x])] = value
    return found


def power_spectra(runs: Sequence[Run]) -> Spectra | None:
    """Spectra of the gradients that runs recorded; None where none of them did."""
    found = [one for one in (_spectra(run.folder) for run in runs) if one is not None]
    if not found:
        return None
    steps = min(len(powers[0]) for powers in found)
    means = [np.mean([powers[i][:steps] for powers in found], axis=0) for i in range(4)]
    return Spectra(*(_thinned(one) for one in means))


def expected_errors(runs: Sequence[Run]) -> Errors | None:
    """Of the norms that runs recorded of their last step (DC-SGD, figure 4); None where none of them did.

    Norms that are not finite are left out: such a sample contributes nothing.
    """
    kept = [found for found in (_kept(run.folder, _of_last_step) for run in runs) if found is not None]
    if not kept:
        return None
    ends = [min(norms.max(), math.sqrt(np.mean(norms**2) / weight) if weight else math.inf) for norms, weight in kept]
    thresholds = np.linspace(0, BEYOND * max(ends), THRESHOLDS + 1)[1:]
    errors = [expected_error(thresholds, norms, np.ones_like(norms), weight) for norms, weight in kept]
    return Errors(tuple(thresholds.tolist()), tuple(np.mean(errors, axis=0).tolist()))


def _of_last_step(archive: Mapping[str, Array]) -> tuple[Array, float]:
    """The norms of the last step's samples, shape (B,), and K."""
    norms, weight = archive["norms"], float(archive["error_weight"])
    finite = norms[np.isfinite(norms)]
    if norms.ndim != 1 or not finite.max(initial=0.0) > 0 or not 0 <= weight < math.inf:
        raise ValueError("norms and error_weight are not those of a step")
    return finite, weight


def _spectra(folder: Path) -> tuple[Array, ...] | None:
    """Frequencies, and the powers of signal, noise and filtered gradients of one run."""
    kept = _kept(folder, _of_all_steps)
    if kept is None:
        return None
    signal, observed = kept
    frequencies, before = spectrum(signal)
    seen = spectrum(observed).power
    taps = Recorded(folder).settings.get("filter", {})
    gain = np.ones_like(frequencies)
    if "b" in taps and "a" in taps:
        gain = np.abs(frequency_response(taps["b"], taps["a"], frequencies)) ** 2
    positive = frequencies > 0
    return frequencies[positive], before[positive], spectrum(observed - signal).power[positive], (gain * seen)[positive]


def _of_all_steps(archive: Mapping[str, Array]) -> tuple[Array, Array]:
    """Gradients before and after noise, shape (T, K)."""
    signal, observed = archive["signal"], archive["observed"]
    if signal.ndim != 2 or signal.shape != observed.shape or not np.isfinite(observed - signal).all():
        raise ValueError("signal and observed are no finite numbers of one shape, steps and coordinates")
    return signal, observed


def _kept(folder: Path, read: Callable[[Mapping[str, Array]], Found]) -> Found | None:
    """What a run's archive of gradients has; None where there is none, or, which is told, where it can't be read."""
    try:
        with np.load(folder / GRADIENTS) as archive:
            return read(archive)
    except FileNotFoundError:
        return None
    except (OSError, EOFError, ValueError, TypeError, KeyError, BadZipFile) as error:
        tell(folder, {GRADIENTS: f"can't be read ({error})"}, damaged=False)
        return None


def _thinned(values: Array) -> Values:
    return tuple(float(part.mean()) for part in np.array_split(values, min(FREQUENCIES, len(values))))
