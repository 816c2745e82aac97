"""The run over models: each is timed in a process, and each memory cell has a process of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.engines import ENGINES, NON_PRIVATE
from benchmarks.machine import describe
from benchmarks.memory import peak_memory
from benchmarks.models import SPECS
from benchmarks.process import MeasurementError, in_own_process
from benchmarks.timing import Settings, time_model

# Seconds after which a process is stopped: far more than any takes.
TIMING_TIMEOUT = 900.0
MEMORY_TIMEOUT = 180.0
MEMORY_CELLS_AT_ONCE = 2

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
        engines: keys of `ENGINES`; the non-private one always takes part.
        settings: of the timing.
        memory: measure memory too.
        show: called with the results of each model when they are there.
    """
    results: Results = {
        "machine": describe(settings),
        "settings": asdict(settings),
        "engines": sorted({NON_PRIVATE, *engines}, key=list(ENGINES).index),
        "models": {},
    }
    # What dpbench finds out about this machine is found out anew, not taken from an earlier run's cache.
    with TemporaryDirectory(prefix="dpbench-benchmarks-") as cache:
        # torch's profiler, which counts memory, would say that it finds no GPU.
        alone = partial(in_own_process, environment={"DPBENCH_CACHE": cache, "KINETO_LOG_LEVEL": "99"})
        for model in models:
            result = _measured(alone, model, results["engines"], settings, memory=memory)
            results["models"][model] = {"title": SPECS[model].title, **result}
            show(results["models"][model])
    return results


def _measured(
    alone: Callable[..., Any], model: str, engines: Sequence[str], settings: Settings, *, memory: bool
) -> Results:
    """Times and memory of one model, or why it failed as a whole."""
    try:
        timed = alone(time_model, model, engines, settings, timeout=TIMING_TIMEOUT)
    except MeasurementError as error:
        return {"failed": str(error)}
    engines = [name for name, entry in timed["engines"].items() if memory and "failed" not in entry]
    # Memory does not depend on speed, so cells may share the processor; a GPU's memory they would share too.
    at_once = min(MEMORY_CELLS_AT_ONCE, settings.threads) if settings.device == "cpu" else 1
    cell = partial(_memory, alone, model, settings, settings.threads // at_once)
    with ThreadPoolExecutor(at_once) as pool:
        cells = dict(zip(engines, pool.map(cell, engines), strict=True))
    base = cells.get(NON_PRIVATE, {}).get("bytes")
    for entry in cells.values():
        if "bytes" in entry and base:
            entry["ratio"] = entry["bytes"] / base
    return {**timed, "memory": cells}


def _memory(alone: Callable[..., Any], model: str, settings: Settings, threads: int, engine: str) -> Results:
    try:
        peak = alone(peak_memory, model, engine, settings.device, threads, settings.small, timeout=MEMORY_TIMEOUT)
    except MeasurementError as error:
        return {"failed": str(error)}
    return {"bytes": peak}
