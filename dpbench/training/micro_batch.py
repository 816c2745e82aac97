"""How many samples are computed at once.

A function of the run and the kind of device, not of what else happens on it, so that a run that is repeated rounds
as it did before. Where memory runs out all the same, the gradients halve it (gradients/per_sample.py).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

import torch
from torch import Tensor, nn

from dpbench import cache
from dpbench.config import RunConfig
from dpbench.config.identity import plain
from dpbench.devices import ROWS_ON_CPU, describe, may_be_out_of_memory, total_memory
from dpbench.gradients import PerSampleGradients
from dpbench.gradients.buffers import buffers_kept
from dpbench.query import Point

# Largest share of the device's memory that one micro-batch may take.
MEMORY_SHARE = 0.5
# On a CPU, whose caches are small, more samples at once than ROWS_ON_CPU gain nothing, but where they take few bytes:
# operations of small models cost more to start than to carry out.
BYTES_ON_CPU = 2**27
# Two numbers of samples with which the need of memory is measured on a GPU; the next two where there is too little.
MEASURED = ((8, 16), (4, 8), (2, 4), (1, 2))


def fitting_micro_batch(config: RunConfig, model: nn.Module, gradients: PerSampleGradients) -> int:
    """Samples whose gradients can be computed at once in the share of memory that a micro-batch may take."""
    vector = gradients.flat.vector
    if not vector.is_cuda:
        need = _bytes_by_outputs(config, model, vector)
        wanted = max(ROWS_ON_CPU // config.augmentation.copies, BYTES_ON_CPU // need)
        return max(1, min(_fitting(need, vector), wanted))
    key = [describe(vector.device), torch.__version__, *(plain(part) for part in _what_needs_memory(config))]
    known = cache.read("micro_batch", key)
    if isinstance(known, int) and known > 0:
        return known
    with gradients.undisturbed():  # a run that goes on has found its way already
        allowed = MEMORY_SHARE * total_memory(vector.device)
        fitting = measured_fit(lambda count: _peak(config, gradients, count), allowed)
    cache.write("micro_batch", key, fitting)
    return fitting


def fused_rows(config: RunConfig, model: nn.Module, gradients: PerSampleGradients, seeds: int) -> int:
    """Samples of `seeds` seeds that are computed at once: what fits; on a CPU as many of each as it has alone.

    There, fewer of each gain nothing over one seed after the other.
    """
    if config.micro_batch is not None:
        return config.micro_batch
    alone = fitting_micro_batch(config, model, gradients)
    if gradients.flat.vector.is_cuda:
        return alone
    vector = gradients.flat.vector
    return min(seeds * alone, _fitting(_bytes_by_outputs(config, model, vector), vector))


def measured_fit(peak: Callable[[int], int], allowed: float) -> int:
    """Samples that fit into `allowed` bytes, from the peaks of two measured counts."""
    for fewer, count in MEASURED:
        try:
            few, more = peak(fewer), peak(count)
        except (RuntimeError, MemoryError) as error:
            if not may_be_out_of_memory(error, count):
                raise
            continue
        each = max(1.0, (more - few) / (count - fewer))
        return max(1, int((allowed - (few - fewer * each)) / each))
    return 1


def _what_needs_memory(config: RunConfig) -> list[object]:
    data = config.dataset
    return [
        config.model,
        [*data.sample_shape, data.classes],
        config.augmentation,
        config.query.most_points,
        config.precision,
    ]


def _peak(config: RunConfig, gradients: PerSampleGradients, count: int) -> int:
    """Largest number of bytes allocated while the gradients of `count` blank samples are computed."""
    device = gradients.flat.vector.device
    inputs, targets = blank(config, count, device)
    points = [Point(1.0, gradients.flat.vector)] * config.query.most_points
    gradients.compare_anew()
    with torch.random.fork_rng(devices=[device]):
        for _ in range(2):  # the first one also compares and times
            torch.cuda.reset_peak_memory_stats(device)
            tape = gradients.record(points, inputs, targets)
            tape.weighted_sum(tape.norms())
            del tape
    return torch.cuda.max_memory_allocated(device)


def blank(config: RunConfig, count: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """So many blank inputs and targets, as training would see them."""
    inputs, targets = config.dataset.blank(count, device)
    return config.augmentation.views(inputs, torch.Generator(device)), targets


def _fitting(need: int, vector: Tensor) -> int:
    return int(MEMORY_SHARE * total_memory(vector.device) / need)


def _bytes_by_outputs(config: RunConfig, model: nn.Module, vector: Tensor) -> int:
    """Bytes for a sample, from the sizes of what the layers give: kept twice, and the gradients, at each iterate."""
    outputs = 0

    def count(module: nn.Module, inputs: tuple[Tensor, ...], output: object) -> None:
        nonlocal outputs
        outputs += output.numel() if isinstance(output, Tensor) else 0

    inputs, _ = blank(config, 1, vector.device)
    if config.augmentation.copies > 1:
        inputs = inputs.flatten(0, 1)
    with ExitStack() as hooks, torch.no_grad(), buffers_kept(model):
        for layer in model.modules():
            if not list(layer.children()):
                hooks.callback(layer.register_forward_hook(count).remove)
        model(inputs)
    return vector.element_size() * (6 * outputs + len(vector) // 4) * config.query.most_points
