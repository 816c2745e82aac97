"""Peak memory of one gradient above model and data."""

from __future__ import annotations

import gc
import resource
import warnings
from pathlib import Path

import torch

from benchmarks.engines import build_engine
from benchmarks.models import Case, build_case
from benchmarks.process import return_freed_memory

# Samples of the warm-up, which loads libraries and makes what an engine keeps.
WARMUP_SAMPLES = 2

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")
# Written to clear_refs, it resets the peak to the present size.
_RESET_PEAK = "5"


def peak_memory(name: str, engine: str, device: str, threads: int, small: bool) -> int:
    """Bytes at the peak of one gradient above what was there before; call it in a process of its own.

    On a GPU, what torch allocated there; else the resident memory of the process.
    """
    warnings.simplefilter("ignore")
    torch.set_num_threads(threads)
    case = build_case(name, torch.device(device), small=small)
    # The threshold has no influence on memory.
    compute = build_engine(engine, case.model, 1.0)
    compute(case.inputs[:WARMUP_SAMPLES], case.targets[:WARMUP_SAMPLES])
    gc.collect()
    before = _present(case)
    compute(case.inputs, case.targets)
    return _peak(case) - before


def _present(case: Case) -> int:
    if case.device.type == "cuda":
        torch.cuda.synchronize(case.device)
        torch.cuda.reset_peak_memory_stats(case.device)
        return torch.cuda.memory_allocated(case.device)
    return_freed_memory()
    if not _STATUS.exists():
        return _largest_ever()
    _CLEAR.write_text(_RESET_PEAK)
    return _field("VmRSS")


def _peak(case: Case) -> int:
    if case.device.type == "cuda":
        torch.cuda.synchronize(case.device)
        return torch.cuda.max_memory_allocated(case.device)
    return _field("VmHWM") if _STATUS.exists() else _largest_ever()


def _field(name: str) -> int:
    """A field of the process' status, in bytes."""
    line = next(line for line in _STATUS.read_text().splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024


def _largest_ever() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
