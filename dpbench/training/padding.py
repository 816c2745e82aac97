"""Whether a model reads the padding of texts, whose width the other texts of a batch decide."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from dpbench.data.splits import Samples
from dpbench.data.subset import Subset
from dpbench.data.tokens import TokenSplit
from dpbench.errors import UserError
from dpbench.gradients import PerSampleGradients
from dpbench.gradients.buffers import buffers_kept
from dpbench.gradients.draws import LEVELS, UnknownDraw, held_still
from dpbench.gradients.verify import AFTER_OTHERS, AFTER_OTHERS_IN_HALF, nearby, without_fast_paths

# Of the samples in the order of their lengths, those that are compared with and without the padding of the longest.
COMPARED = (0.0, 0.25, 0.5)


def require_padding_unread(make: Callable[[], PerSampleGradients], split: Samples) -> None:
    """Raise `UserError` where the loss of a text changes with how far it is filled up.

    It then depends on the longest text of its batch, so that one text changes what others add to a sum, beyond its
    own bound.

    Args:
        make: makes gradients of such a model, which is not trained: one that keeps something of the first samples that
            it sees has to be found out in training.
        split: of which some samples are tried; nothing where samples have one shape.
    """
    split = split.whole if isinstance(split, Subset) else split
    if not isinstance(split, TokenSplit):
        return
    gradients = make()
    lengths = split.lengths(slice(None))
    order = lengths.argsort(stable=True)[int((lengths == 0).sum()) :]
    tolerance = AFTER_OTHERS_IN_HALF if gradients.in_half else AFTER_OTHERS
    for share in COMPARED if len(order) > 1 else ():
        one = order[int(share * (len(order) - 1))]
        alone, beside = split.take(one.view(1)), split.take(torch.stack([one, order[-1]]))
        if alone[0].shape[1] < beside[0].shape[1] and not torch.allclose(
            _loss(gradients, *alone), _loss(gradients, beside[0][:1], beside[1][:1]), *tolerance, equal_nan=True
        ):
            raise UserError(
                "the model reads padding: the loss of a text changes with how far it is filled up, and so with the "
                "other texts of its batch, which no bound of a text covers; mask what equals the data set's padding"
            )


def _loss(gradients: PerSampleGradients, inputs: Tensor, targets: Tensor) -> Tensor:
    """Of one sample, in the neighbourhood of the parameters: where they begin outputs may all be zero."""
    flat, model = gradients.flat, gradients.model

    with (
        flat.at(nearby(flat.vector, 0)),
        torch.no_grad(),
        gradients.autocast(),
        without_fast_paths(),
        buffers_kept(model),
    ):
        try:
            with held_still(LEVELS[0]):
                return gradients.losses(inputs, targets)
        except UnknownDraw:
            model.eval()
            try:
                return gradients.losses(inputs, targets)
            finally:
                model.train()
