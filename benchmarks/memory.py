"""Peak memory of one gradient above model and data."""

from __future__ import annotations

import gc
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.engines import ENGINES
from benchmarks.models import build_case
from dpbench.devices import prepare_device
from dpbench.gradients.replay import LAUNCHED

# Samples of the first warm-up, which loads libraries.
WARMUP_SAMPLES = 2
# So many that dpbench has recorded its pass, and replayed it.
CALLS_ON_GPU = LAUNCHED + 2


def peak_memory(name: str, engine: str, device: str, threads: int, small: bool) -> int:
    """Bytes that torch holds at the peak of one gradient above what it held before; call it in a process of its own.

    Resident memory would add what the system's allocator keeps of freed memory, which differs from one process to the
    next. A gradient of the same batch comes before: trials of one's own machine are no part of what is measured.
    """
    warnings.simplefilter("ignore")
    torch.set_num_threads(threads)
    if device == "cuda":  # as in timing.py
        prepare_device(torch.device(device))
    case = build_case(name, torch.device(device), small=small)
    # The threshold has no influence on memory.
    compute = ENGINES[engine].build(case, 1.0)
    compute(case.inputs[:WARMUP_SAMPLES], case.targets[:WARMUP_SAMPLES])
    peak_of = _peak_on_gpu if case.device.type == "cuda" else peak_on_cpu
    return peak_of(lambda: compute(case.inputs, case.targets))


def peak_on_cpu(compute: Callable[[], object]) -> int:
    """Bytes of torch's tensors at the peak of the second call, above those that were there before it.

    Args:
        compute: what it holds when it returns is freed.
    """
    compute()
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        compute()
    with TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        recorded.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text())["traceEvents"]
    return max(int(event["args"]["Total Allocated"]) for event in events if event["name"] == "[memory]")


def _peak_on_gpu(compute: Callable[[], object]) -> int:
    """Bytes that torch takes from the GPU for these calls, with what recorded passes keep for themselves."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_reserved()
    for _ in range(CALLS_ON_GPU):
        compute()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_reserved() - before
