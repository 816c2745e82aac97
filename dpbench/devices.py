"""Which device a run uses, and how."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from dpbench.errors import UserError

# Rows of a model's input that are computed at once on a CPU, or more of a small model.
ROWS_ON_CPU = 128
# Where the system does not tell.
ASSUMED_MEMORY = 2**32
# What is said where memory ran out by errors that have no type of their own: of the CPU, CUDA, cuBLAS and cuDNN.
NO_MEMORY = (
    "can't allocate memory",
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
)


def choose_device(name: str) -> torch.device:
    """The device of a name: "auto" (a GPU if there is one), "cpu", "cuda" or "cuda:<index>".

    Raises:
        UserError: no such device here.
    """
    count = torch.cuda.device_count()
    if name == "auto":
        return torch.device("cuda" if count else "cpu")
    device = torch.device(name)
    if device.type == "cuda" and (device.index or 0) >= count:
        raise UserError(f"torch can use {count} GPUs here; use auto or cpu", field="device", value=name)
    return device


def describe(device: torch.device) -> str:
    """A device as a person would name it."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"cpu, {torch.get_num_threads()} threads"


def total_memory(device: torch.device) -> int:
    """Bytes of memory that a device has."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    if "SC_PHYS_PAGES" in os.sysconf_names:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return ASSUMED_MEMORY


def fastest_seconds(works: Sequence[Callable[[], object]], device: torch.device, rounds: int) -> list[float]:
    """The fastest of a few rounds of each, in turn; the others were disturbed, and the first one sets things up."""

    def once(work: Callable[[], object]) -> float:
        start = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - start

    found = [[once(work) for work in works] for _ in range(1 + rounds)]
    return [min(times) for times in zip(*found[1:], strict=True)]


def prepare_device(device: torch.device) -> None:
    """Settings of the process under which training is exact and fast.

    Float32 products are not rounded to TensorFloat-32 or bfloat16, in which the norms that bound a sample would be off
    by up to 1e-3 or more; convolutions are deterministic; and on a CPU, memory that was freed is reused instead of
    given back, because fresh pages cost more than the arithmetic on them.
    """
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    # What is set for all kinds of products at once would be inherited by these two.
    cudnn: Any = torch.backends.cudnn
    cudnn.conv.fp32_precision = cudnn.rnn.fp32_precision = "ieee"
    for products in _of_processors():
        products.fp32_precision = "ieee"
    torch.backends.cudnn.deterministic = True
    if device.type == "cpu":
        keep_freed_memory()


def require_exact_products(device: torch.device) -> None:
    """Raise `UserError` where float32 products may be rounded: on a GPU, to TensorFloat-32, by torch's own settings."""
    cudnn: Any = torch.backends.cudnn
    on_gpu = device.type == "cuda"
    settings = (torch.backends.cuda.matmul, cudnn.conv, cudnn.rnn) if on_gpu else _of_processors()
    rounded = {str(of.fp32_precision) for of in settings} & {"tf32", "bf16"}
    if rounded:
        to = " and ".join({"tf32": "TensorFloat-32", "bf16": "bfloat16"}[one] for one in sorted(rounded))
        raise UserError(
            f"this process lets a {'GPU' if on_gpu else 'CPU'} round products to {to}, so that norms, which bound what "
            "a sample adds, would be off by up to 1e-3 or more; call dpbench.devices.prepare_device(device) before "
            "anything is computed"
        )


def _of_processors() -> tuple[Any, ...]:
    """Where torch holds whether products on a CPU may be rounded."""
    mkldnn: Any = torch.backends.mkldnn
    return mkldnn.matmul, mkldnn.conv, mkldnn.rnn


def require_no_autocast(device: torch.device) -> None:
    """Raise `UserError` within a context of autocast, in which norms and sums of gradients would be rounded, too.

    One sample then changes the rounding of a whole sum, by more than what it is clipped to.
    """
    if torch.is_autocast_enabled(device.type):
        raise UserError(
            "a private step within torch.autocast would round the sum of clipped gradients, so that a sample could "
            "move it by more than it is clipped to; take the step outside of that context: "
            "PerSampleGradients(..., autocast=torch.bfloat16), or precision=bfloat16, has the model alone run in it"
        )


def keep_freed_memory() -> bool:
    """Let the C library (glibc) keep freed memory for this process; whether it does.

    The options are those of mallopt(3): M_MMAP_MAX (-4), so that large blocks come from the heap, and
    M_TRIM_THRESHOLD (-1), so that the heap does not shrink.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    return bool(mallopt(-4, 0) and mallopt(-1, -1))


def out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out."""
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or any(said in str(error) for said in NO_MEMORY)


def may_be_out_of_memory(error: BaseException, samples: int) -> bool:
    """The same of a computation with `samples` samples, or that cuDNN found no way for it, which needs memory, too.

    Where it finds none for one sample, it has none at all.
    """
    no_way = "unable to find an engine to execute this computation" in str(error)
    return out_of_memory(error) or (samples > 1 and no_way)
