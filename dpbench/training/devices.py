"""Which device a run uses, and how many samples fit on it at once."""

from __future__ import annotations

import os

import torch
from torch import Tensor, nn

from dpbench.errors import UserError
from dpbench.gradients import FlatParameters

# Largest share of the free memory that one micro-batch may take.
MEMORY_SHARE = 0.25
# Where the system does not tell.
ASSUMED_FREE = 2**31
# More samples at once gain nothing on a CPU, whose caches are small.
LARGEST_ON_CPU = 64


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


def free_memory(device: torch.device) -> int:
    """Free bytes on a device."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    if "SC_AVPHYS_PAGES" in os.sysconf_names:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return ASSUMED_FREE


def fitting_micro_batch(model: nn.Module, flat: FlatParameters, sample: Tensor) -> int:
    """How many samples' gradients and activations fit into the share of memory that a micro-batch may take.

    Args:
        model: the model, on its device.
        flat: its trainable parameters; their per-sample gradients are held twice at the most.
        sample: one input, shape (1, ...).
    """
    outputs = 0

    def count(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        nonlocal outputs
        outputs += output.numel()

    handles = [layer.register_forward_hook(count) for layer in model.modules() if not list(layer.children())]
    with torch.no_grad():
        model(sample)
    for handle in handles:
        handle.remove()
    numbers = 2 * len(flat) + 4 * (outputs + sample.numel())
    fitting = int(MEMORY_SHARE * free_memory(flat.vector.device) / (4 * numbers))
    return max(1, fitting if flat.vector.is_cuda else min(fitting, LARGEST_ON_CPU))
