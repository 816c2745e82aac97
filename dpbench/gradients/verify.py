"""The comparison of a way to per-sample gradients with plain autograd, made once before it is relied on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from copy import deepcopy

import torch
from torch import Tensor, nn

from dpbench.gradients.flat import FlatParameters
from dpbench.gradients.tape import Tape

# Losses of samples, shape (n,), from what the model reads of them.
Losses = Callable[[Tensor], Tensor]

# Samples compared.
SAMPLES = 3
# How far the parameters are moved for the comparison, so that none of their gradients is zero by initialisation.
MOVE = 0.02
# Largest deviation, relative to a parameter's own gradient and to that of all; models may use float32 inside.
TOLERANCE = {torch.float64: (1e-4, 1e-5), torch.float32: (1e-2, 1e-3)}
# Models with more parameters are compared in float32, whatever that hides, to save memory.
LARGE = 50_000_000


def some(t: Tensor) -> Tensor:
    """The first samples, repeated where there are fewer; with one alone every dimension looks like that of samples."""
    return t[torch.arange(SAMPLES, device=t.device) % len(t)]


def moved(vector: Tensor, seed: int) -> Tensor:
    """A vector in the neighbourhood of another."""
    generator = torch.Generator(vector.device).manual_seed(seed)
    noise = torch.randn(vector.shape, generator=generator, device=vector.device, dtype=vector.dtype)
    return vector + MOVE * noise


def deviation(flat: FlatParameters, tape: Tape, references: Iterable[Tensor], seeds: int = 1) -> str | None:
    """What of a tape deviates from the gradients of its samples, or None; one after the other, to save memory.

    Args:
        flat: the parameters.
        tape: of one seed or several.
        references: of each sample (d,); or of S seeds (S d,), zero but for the seed of the sample.
        seeds: S.
    """
    of_own, of_all = TOLERANCE[flat.vector.dtype]
    sizes = [parameter.numel() for parameter in flat.parameters] * seeds
    norms = tape.norms()
    for i, reference in enumerate(references):
        whole = reference.norm()
        only = torch.zeros_like(norms)
        only[:, i] = 1
        got = tape.weighted_sum(only).flatten()
        for name, have, want in zip(flat.names * seeds, got.split(sizes), reference.split(sizes), strict=True):
            if not bool((have - want).norm() <= of_own * want.norm() + of_all * whole):
                return f"gradients of {name!r} deviate from autograd's"
        norm = norms[:, i].norm()
        if not bool((norm - whole).abs() <= (of_own + of_all) * whole + 1e-12):
            return "norms deviate from autograd's"
    return None


@contextmanager
def without_fast_paths() -> Iterator[None]:
    """Let torch's attention layers call their parts in evaluation mode too."""
    enabled = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(enabled)


def undisturbed_copy(model: nn.Module) -> nn.Module | None:
    """A copy of a model, in its mode but without dropout; None if it can't be copied."""
    try:
        copy = deepcopy(model)
    except RuntimeError as error:
        if out_of_memory(error):
            raise
        return None
    for module in copy.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
        elif isinstance(module, (nn.MultiheadAttention, nn.LSTM)):
            module.dropout = 0.0
    return copy


def draws_at_random(model: nn.Module, losses: Losses, inputs: Tensor) -> bool:
    """Whether the losses of a model depend on torch's generator."""
    return not torch.equal(*(_drawn(model, losses, inputs, seed)[0] for seed in range(2)))


def keeps_of_samples(model: nn.Module, losses: Losses, inputs: Tensor) -> str | None:
    """The name of a buffer that a pass in training mode fills with what depends on the samples, or None.

    It would leave with the model without noise. Buffers that change by themselves, such as counters, are none of these.
    """
    others = inputs[1:2].expand_as(inputs).clone()  # what a model can read are samples
    one, other = (_drawn(model, losses, x, 0)[1] for x in (inputs, others))
    return next((name for name in one if not torch.equal(one[name], other[name])), None)


def mixes_samples(model: nn.Module, losses: Losses, inputs: Tensor) -> bool:
    """Whether losses depend on a sample that is not their own, at the same random draws."""
    others = inputs.clone()
    others[0] = inputs[1]
    one, other = (_drawn(model, losses, x, 0)[0][1:] for x in (inputs, others))
    of_own, of_all = TOLERANCE[one.dtype] if one.dtype in TOLERANCE else TOLERANCE[torch.float32]
    return not torch.allclose(one, other, rtol=of_own, atol=of_all, equal_nan=True)


def _drawn(model: nn.Module, losses: Losses, inputs: Tensor, seed: int) -> tuple[Tensor, dict[str, Tensor]]:
    """Losses at a seed, and the buffers after it; the model has its buffers of before again."""
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    with torch.no_grad(), torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        torch.manual_seed(seed)
        found = losses(inputs)
        after = {name: buffer.clone() for name, buffer in model.named_buffers() if name in before}
        for name, buffer in model.named_buffers():
            if name in before and buffer.shape == before[name].shape:
                buffer.copy_(before[name])
    return found, after


def consumes_randomness(losses: Callable[[], Tensor]) -> bool:
    """Whether computing the losses of a model draws from torch's generators, whatever becomes of the numbers."""
    devices = range(torch.cuda.device_count())
    with torch.no_grad(), torch.random.fork_rng(devices=devices):

        def states() -> list[Tensor]:
            return [torch.get_rng_state(), *(torch.cuda.get_rng_state(device) for device in devices)]

        before = states()
        losses()
        return not all(torch.equal(*pair) for pair in zip(before, states(), strict=True))


def out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out."""
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "can't allocate memory" in str(error)
