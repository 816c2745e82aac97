"""The run over models: each is timed in a process, then each memory cell has a process of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.engines import NON_PRIVATE, NON_PRIVATE_REPLAYED, takes_part
from benchmarks.machine import describe
from benchmarks.memory import peak_memory
from benchmarks.models import SPECS
from benchmarks.process import MeasurementError, in_own_process
from benchmarks.timing import Settings, time_model

# Seconds after which a process is stopped: far more than any takes.
TIMING_TIMEOUT = 900.0
MEMORY_TIMEOUT = 180.0
MEMORY_CELLS_AT_ONCE = 2
MEMORY_CELLS_AT_ONCE_ON_GPU = 16

Results = dict[str, Any]


def measure(
    models: Iterable[str],
    engines: Sequence[str],
    settings: Settings,
    *,
    memory: bool,
    show: Callable[[Results], None] = lambda result: None,
) -> Results:
    """Everything that is measured, and where.

    Args:
        models: keys of `SPECS`.
        engines: keys of `ENGINES`; the non-private one always takes part, and what needs a GPU only where there is one.
        settings: of the timing.
        memory: measure memory too.
        show: called with the times of each model when they are there; memory comes after all of them.
    """
    results: Results = {
        "machine": describe(settings),
        "settings": asdict(settings),
        "engines": takes_part(engines, settings.device),
        "models": {},
    }
    # What dpbench finds out about this machine is found out anew, not taken from an earlier run's cache.
    with TemporaryDirectory(prefix="dpbench-benchmarks-") as cache:
        # torch's profiler, which counts memory, would say that it finds no GPU.
        alone = partial(in_own_process, environment={"DPBENCH_CACHE": cache, "KINETO_LOG_LEVEL": "99"})
        for model in models:
            results["models"][model] = {
                "title": SPECS[model].title,
                **_timed(alone, model, results["engines"], settings),
            }
            show(results["models"][model])
        if memory:
            _measure_memory(alone, results["models"], settings)
    return results


def _timed(alone: Callable[..., Any], model: str, engines: Sequence[str], settings: Settings) -> Results:
    """Times of one model, or why it failed as a whole."""
    try:
        timed: Results = alone(time_model, model, engines, settings, timeout=TIMING_TIMEOUT)
    except MeasurementError as error:
        return {"failed": str(error)}
    return {**timed, "memory": {}}


def _measure_memory(alone: Callable[..., Any], models: dict[str, Results], settings: Settings) -> None:
    """Add the memory of all that could be timed."""
    # It does not depend on speed, so cells may share the processor, and a GPU, whose memory each takes little of.
    most = MEMORY_CELLS_AT_ONCE if settings.device == "cpu" else MEMORY_CELLS_AT_ONCE_ON_GPU
    at_once = min(most, settings.threads)
    cell = partial(_memory, alone, settings, settings.threads // at_once)
    works = [
        (name, engine)
        for name, model in models.items()
        for engine, entry in model.get("engines", {}).items()
        if "failed" not in entry and engine != NON_PRIVATE_REPLAYED  # which has its memory before it is asked
    ]
    with ThreadPoolExecutor(at_once) as pool:
        for (name, engine), found in zip(works, pool.map(lambda work: cell(*work), works), strict=True):
            models[name]["memory"][engine] = found
    for model in models.values():
        base = model.get("memory", {}).get(NON_PRIVATE, {}).get("bytes")
        for entry in model.get("memory", {}).values():
            if "bytes" in entry and base:
                entry["ratio"] = entry["bytes"] / base


def _memory(alone: Callable[..., Any], settings: Settings, threads: int, model: str, engine: str) -> Results:
    try:
        peak = alone(peak_memory, model, engine, settings.device, threads, settings.small, timeout=MEMORY_TIMEOUT)
    except MeasurementError as error:
        return {"failed": str(error)}
    return {"bytes": peak}
