"""What a pass of a model leaves behind of its samples, past the sums that get noise."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy

import torch
from torch import Tensor, nn

from dpbench.devices import out_of_memory
from dpbench.gradients.buffers import buffers_kept
from dpbench.gradients.draws import LEVELS, held_still
from dpbench.gradients.flat import FlatParameters
from dpbench.gradients.verify import AFTER_OTHERS, AFTER_OTHERS_IN_HALF, Losses

KEPT_OUTSIDE = (
    "the loss of a sample is another one after a pass of other samples, for the model keeps something outside of its "
    "buffers, which neither the bound of a sample nor a checkpoint covers; leave that out, or, if it is but a counter, "
    "make it a buffer"
)


def keeps_of_first_pass(
    model: nn.Module, losses_of: Callable[[nn.Module], Losses], inputs: Tensor, targets: Tensor, *, half: bool
) -> str | None:
    """What a model keeps of its first samples alone, outside of buffers, as a sentence, or None.

    Copies begin with different samples, and then see the same. Of a model that can't be copied nothing is said.

    Args:
        model: has seen no sample.
        losses_of: those of a copy, in its mode.
        inputs: of n samples, shape (n, ...).
        targets: of n samples.
        half: losses are computed in bfloat16.
    """

    def after(first: Tensor) -> Tensor | None:
        try:
            copy = deepcopy(model)
            losses = losses_of(copy)
            before = {name: parameter.detach().clone() for name, parameter in copy.named_parameters()}
            with torch.enable_grad(), held_still(LEVELS[0], of_one_shape=True):
                with buffers_kept(copy):
                    losses(first, targets)
                _put_back(copy, before)
            with torch.no_grad(), held_still(LEVELS[0], of_one_shape=True):
                return losses(inputs, targets)
        except Exception as error:
            if out_of_memory(error):
                raise
            return None

    own = after(inputs)
    if own is None:
        return None
    for first in (_of_second(inputs), _made_of(inputs)):
        other = after(first)
        if other is not None and not _agree(own, other, half=half):
            return KEPT_OUTSIDE
    return None


def keeps_of_samples(model: nn.Module, losses: Losses, inputs: Tensor, targets: Tensor, *, half: bool) -> str | None:
    """What a model keeps of its samples where that would leave with it without noise, as a sentence, or None.

    That is a buffer that a pass in training mode fills with what depends on the samples or on their number, but not one
    that changes by itself, such as a counter of passes; any parameter that a pass changes; and anything else that
    changes the loss of samples after a pass of others, so that a sample adds to the gradients of those after it.
    Buffers and parameters are put back.

    Args:
        model: that of the losses.
        losses: in its mode; with gradients, as in training, and without.
        inputs: of n samples, shape (n, ...).
        targets: of n samples.
        half: losses are computed in bfloat16.
    """
    for mode in (torch.enable_grad, torch.no_grad):
        problem = _keeps_in(mode, model, losses, inputs, targets, half=half)
        if problem is not None:
            return problem
    return None


def _keeps_in(
    mode: type[torch.enable_grad | torch.no_grad],
    model: nn.Module,
    losses: Losses,
    inputs: Tensor,
    targets: Tensor,
    *,
    half: bool,
) -> str | None:
    """`keeps_of_samples`, of passes with gradients or without."""
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    changed: list[str | None] = []

    def after(samples: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Losses of samples, and the buffers behind their pass."""
        try:
            with buffers_kept(model), mode(), held_still(LEVELS[0], of_one_shape=True):
                found = losses(samples, targets[: len(samples)]).detach()
                return found, {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
        finally:
            changed.append(_put_back(model, before))

    first, buffers = after(inputs)
    others = [after(_of_second(inputs))[1]]
    try:
        others.append(after(_made_of(inputs))[1])
    except Exception as error:  # a model need not take what are no samples
        if out_of_memory(error):
            raise
    again, _ = after(inputs)
    fewer = after(inputs[:-1])[1] if buffers else {}
    if (parameter := next(filter(None, changed), None)) is not None:
        return f"a pass of the model changes its parameter {parameter!r}, without noise; leave that to the optimizer"
    for name, buffer in buffers.items():
        if not all(name in other and _same(buffer, other[name]) for other in others):
            return (
                f"the model keeps values of its samples in the buffer {name!r}, which would leave with it without "
                "noise; leave that out"
            )
        if name not in fewer or not _same(buffer, fewer[name]):
            return (
                f"the model counts its samples in the buffer {name!r}, so that the number of those that were drawn "
                "would leave with it without noise; leave that out"
            )
    return None if _agree(first, again, half=half) else KEPT_OUTSIDE


def leaves_gradients(flat: FlatParameters, losses: Losses, inputs: Tensor, targets: Tensor) -> str | None:
    """What is wrong where a backward pass leaves the gradient of all samples in a tensor that is no parameter, or None.

    Such a tensor is a leaf of two graphs, while one that a pass makes for itself is gone with it.

    Args:
        flat: the parameters, to which the gradient does not go.
        losses: of their model.
        inputs: of n samples, shape (n, ...).
        targets: of n samples.
    """
    graphs: list[list[Tensor]] = []
    for _ in range(2):
        try:
            with flat.frozen(), torch.enable_grad(), held_still(LEVELS[0], of_one_shape=True):
                found = losses(inputs.detach().clone(), targets.detach().clone())
        except Exception as error:
            if out_of_memory(error):
                raise
            return None  # no way by books, whose backward passes alone leave gradients
        if not found.requires_grad:
            return None
        graphs.append(_leaves(found))
    for leaf in graphs[0]:
        if any(leaf is other for other in graphs[1]):
            return (
                f"the loss has a gradient by a tensor of shape {tuple(leaf.shape)} that is no parameter of the model, "
                "whose .grad would hold that of all samples without noise; make it a parameter of the model, or "
                "detach it"
            )
    return None


def changed_buffer(model: nn.Module, losses: Losses, inputs: Tensor, targets: Tensor) -> str | None:
    """The name of a buffer that a pass in training changes, such as a counter; None for none."""
    with buffers_kept(model), torch.enable_grad(), held_still(LEVELS[0], of_one_shape=True):
        before = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
        losses(inputs, targets)
        found = model.named_buffers()
        return next((name for name, buffer in found if name not in before or not _same(buffer, before[name])), None)


def _of_second(inputs: Tensor) -> Tensor:
    """As many samples, each of which is the second one: what a model can read are samples."""
    return inputs[1:2].expand_as(inputs).clone()


def _made_of(inputs: Tensor) -> Tensor:
    """As many that are unlike these, which may all be one sample: numbers are moved, ids change places."""
    if inputs.is_floating_point():
        return 1 - 2 * inputs
    return inputs.amin() + inputs.amax() - inputs


def _agree(one: Tensor, other: Tensor, *, half: bool) -> bool:
    """Whether two passes gave the same losses of the same samples."""
    return torch.allclose(one, other, *(AFTER_OTHERS_IN_HALF if half else AFTER_OTHERS), equal_nan=True)


def _leaves(losses: Tensor) -> list[Tensor]:
    """The tensors that a backward pass would add gradients to."""
    found: list[Tensor] = []
    seen, waiting = set(), [losses.sum().grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node.next_functions:
            waiting += [before for before, _ in node.next_functions]
        elif hasattr(node, "variable"):
            found.append(node.variable)
    return found


def _put_back(model: nn.Module, before: dict[str, Tensor]) -> str | None:
    """The name of a parameter that is not what it was, after all are; None for none."""
    changed = None
    for name, parameter in model.named_parameters():
        if name not in before:
            changed = name
        elif not _same(parameter, before[name]):
            changed = name
            with torch.no_grad():
                parameter.copy_(before[name])
    return changed


def _same(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are equal, where they are not a number too."""
    return one.shape == other.shape and bool(((one == other) | ((one != one) & (other != other))).all())
