"""The comparison of a way to per-sample gradients with plain autograd, before it is relied on and again later."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from copy import deepcopy

import torch
from torch import Tensor, nn

from dpbench.devices import out_of_memory
from dpbench.gradients.buffers import buffers_kept
from dpbench.gradients.draws import LEVELS, held_still
from dpbench.gradients.flat import FlatParameters
from dpbench.gradients.recording import Read
from dpbench.gradients.tape import Tape
from dpbench.gradients.uses.base import SMALLEST_SQUARE
from dpbench.state import State

# Losses of samples, shape (n,), from what the model reads of them and their targets.
Losses = Callable[[Tensor, Tensor], Tensor]
# Those of a sample's inputs and targets, and the type of the inputs.
Shapes = tuple[tuple[int, ...], tuple[int, ...], str]

# Samples compared.
SAMPLES = 3
# How far the parameters are moved for the comparison, so that none of their gradients is zero by initialisation.
MOVE = 0.02
# Largest deviation, relative to a parameter's own gradient and to that of all; models may use float32 inside.
TOLERANCE = {torch.float64: (1e-4, 1e-5), torch.float32: (1e-2, 1e-3)}
# The same for the sum over a batch that autocast computes in bfloat16.
TOLERANCE_IN_HALF = (0.2, 0.05)
# How far a loss may be from that of the same samples before, relative and absolute: kernels may add up in any order.
AFTER_OTHERS, AFTER_OTHERS_IN_HALF = (1e-4, 1e-5), (0.02, 0.01)
# Models with more parameters are compared in float32, whatever that hides, to save memory.
LARGE = 50_000_000


def is_due(number: int) -> bool:
    """Whether the comparison of this one is due: of 1, 4, 16, 64, ..."""
    return number & (number - 1) == 0 and number.bit_length() % 2 == 1


def modes_of(model: nn.Module) -> tuple[bool, ...]:
    """Which parts of a model are in training mode."""
    return tuple(module.training for module in model.modules())


class Compared:
    """The batches that were compared so far.

    Attributes:
        most: samples of the largest one.
    """

    def __init__(self) -> None:
        self.most = 0
        self._shapes: set[Shapes] = set()
        self._reads: set[Read] = set()

    def has_like(self, inputs: Tensor, targets: Tensor) -> bool:
        """Whether samples of one of them had the shapes that these have."""
        return _of_samples(inputs, targets) in self._shapes

    def has_read(self, reads: set[Read]) -> bool:
        """Whether layers read all this in one or another of them; else the rows of samples may be others this time."""
        return reads <= self._reads

    def add(self, inputs: Tensor, targets: Tensor, samples: int, reads: set[Read]) -> None:
        """A batch of `samples` samples like these was compared, in which layers read this."""
        self.most = max(self.most, samples)
        self._shapes.add(_of_samples(inputs, targets))
        self._reads |= reads

    def state_dict(self) -> State:
        """Of plain values."""
        return {"most": self.most, "shapes": sorted(self._shapes), "reads": sorted(self._reads)}

    def load_state_dict(self, state: State) -> None:
        """Go on as the state was saved."""
        self.most, self._shapes, self._reads = state["most"], set(state["shapes"]), set(state["reads"])


class Doubts:
    """What deviated from what it stands for when it was last compared with it.

    That may be by rounding alone: a sample at a kink of the model, as of a ReLU, then has another gradient. But hardly
    in two passes on end, so what is in doubt is compared again the next time.
    """

    def __init__(self) -> None:
        self._doubted: set[Hashable] = set()

    def __contains__(self, key: Hashable) -> bool:
        """Whether this one did, and is to be compared again."""
        return key in self._doubted

    def note(self, key: Hashable, *, deviates: bool) -> bool:
        """Note whether this one deviates now; returns whether it is wrong, as it did so the last time, too."""
        wrong = deviates and key in self._doubted
        if deviates:
            self._doubted.add(key)
        else:
            self._doubted.discard(key)
        return wrong


def _of_samples(inputs: Tensor, targets: Tensor) -> Shapes:
    return tuple(inputs.shape[1:]), tuple(targets.shape[1:]), str(inputs.dtype)


def some(t: Tensor) -> Tensor:
    """The first samples, repeated where there are fewer; with one alone every dimension looks like that of samples."""
    return t[torch.arange(SAMPLES, device=t.device) % len(t)]


def nearby(vector: Tensor, seed: int) -> Tensor:
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
    if bool(tape.doubtful()):
        tape.refine()
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


def deviation_of_sums(flat: FlatParameters, have: Tensor, want: Tensor, *, of_parts: Tensor | None) -> str | None:
    """What of a sum over a batch, shape (d,), deviates from autograd's, or None.

    Args:
        flat: the parameters.
        have: the sum.
        want: what autograd gives.
        of_parts: where both were computed in bfloat16 the norms of the parts that `want` is the sum of, added up: what
            is rounded is in proportion to them, however small the sum is. Else None.
    """
    of_own, of_all = TOLERANCE[flat.vector.dtype] if of_parts is None else TOLERANCE_IN_HALF
    whole = want.norm() if of_parts is None else of_parts
    for name, one, other in zip(flat.names, flat.views(have), flat.views(want), strict=True):
        if not bool((one - other).norm() <= of_own * other.norm() + of_all * whole):
            return f"in a batch, gradients of {name!r} deviate from autograd's"
    return None


def deviation_of_norms(have: Tensor, want: Tensor, *, half: bool) -> str | None:
    """What deviates where norms of the samples of a batch, shape (B,), are taken in another way, or None.

    Of all together: one sample at a kink of the model, as of a ReLU, has another gradient by rounding alone.
    """
    tolerance = sum(TOLERANCE_IN_HALF if half else TOLERANCE[want.dtype])
    return None if bool((have - want).norm() <= tolerance * want.norm()) else "in a batch, norms deviate"


def short_norm(flat: FlatParameters, tape: Tape, which: int) -> str | None:
    """What is wrong with the norm of one sample if it is less than that of what a sum has of the sample, or None."""
    if bool(tape.doubtful()):
        tape.refine()
    only = torch.zeros_like(tape.norms())
    only[:, which] = 1
    summed = tape.weighted_sum(only).norm()
    # Of a gradient that no clip scales up to its bound, squares may underflow.
    if bool(tape.whole_norms()[which] < (1 - sum(TOLERANCE[flat.vector.dtype])) * summed - SMALLEST_SQUARE**0.5):
        return "in a batch, norms are less than those of what is summed"
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
    except Exception as error:
        if out_of_memory(error):
            raise
        return None
    for module in copy.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
        elif isinstance(module, (nn.MultiheadAttention, nn.LSTM)):
            module.dropout = 0.0
    return copy


def draws_at_random(model: nn.Module, losses: Losses, inputs: Tensor, targets: Tensor) -> bool:
    """Whether a pass of a model draws from the generators of torch, Python or NumPy."""
    with torch.no_grad(), buffers_kept(model), held_still(LEVELS[0], of_one_shape=True) as drew:
        losses(inputs, targets)
        return drew()


def mixes_samples(model: nn.Module, losses: Losses, level: float | None, inputs: Tensor, targets: Tensor) -> bool:
    """Whether losses depend on a sample that is not their own, at the same random draws.

    Args:
        model: that of the losses.
        losses: in its mode.
        level: of random draws; None for a model that draws nothing.
        inputs: of n samples, shape (n, ...).
        targets: of n samples.
    """

    def drawn(inputs: Tensor, which: slice = slice(None)) -> Tensor:
        with torch.no_grad(), buffers_kept(model), held_still(level):
            return losses(inputs, targets[which])

    count = len(targets)
    together = drawn(inputs)
    if losses_differ(together, torch.cat([drawn(inputs[i : i + 1], slice(i, i + 1)) for i in range(count)])):
        return True
    for i in range(count):
        others = inputs.clone()
        others[i] = inputs[(i + 1) % count]
        rest = [j for j in range(count) if j != i]
        if losses_differ(together[rest], drawn(others)[rest]):
            return True
    return False


def losses_differ(one: Tensor, other: Tensor, *, half: bool = False) -> bool:
    """Whether losses of the same samples, computed in different batches, are not the same.

    Args:
        one: of n samples, shape (n,).
        other: of the same.
        half: both were computed in bfloat16.
    """
    of_own, of_all = TOLERANCE_IN_HALF if half else TOLERANCE.get(one.dtype, TOLERANCE[torch.float32])
    return not torch.allclose(one, other, rtol=of_own, atol=of_all, equal_nan=True)
