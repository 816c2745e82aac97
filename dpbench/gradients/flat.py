"""A model's trainable parameters as one flat vector."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from itertools import chain
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter, is_lazy

from dpbench.errors import UserError


class FlatParameters:
    """Keeps all trainable parameters of a model in one contiguous vector, of which they are views.

    Noise, filters and iterates are then single operations on one vector of shape (d,).

    Attributes:
        vector: current parameters θ, shape (d,); the model computes with it.
        names: parameter names in the order of the vector.
        parameters: the parameters in the same order.
    """

    def __init__(self, model: nn.Module) -> None:
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        if not named:
            raise UserError("the model has no parameters to train; set requires_grad on some of them")
        for name, parameter in named:
            if isinstance(parameter, UninitializedParameter):
                raise UserError(f"parameter {name!r} has no shape yet; run the lazy model on an example first")
            if parameter.dtype not in (torch.float32, torch.float64):
                raise UserError(f"parameter {name!r} is {parameter.dtype}; train in float32 or float64")
        trained = {id(parameter) for _, parameter in named}
        others = chain(model.named_parameters(), model.named_buffers(), _attributes(model))
        _require_apart(named, [(name, t) for name, t in others if id(t) not in trained])
        if len({parameter.dtype for _, parameter in named}) > 1:
            raise UserError("some parameters are float32 and some float64; make all of them one or the other")
        self.names = [name for name, _ in named]
        self.parameters = [parameter for _, parameter in named]
        self._sizes = [parameter.numel() for parameter in self.parameters]
        self.vector = torch.cat([parameter.detach().reshape(-1) for parameter in self.parameters])
        self._attach(self.vector)

    def __len__(self) -> int:
        """Number of trainable parameters d."""
        return self.vector.numel()

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """One with a vector of its own, of which the parameters of a model that is copied with it are views."""
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        vars(copied).update({name: deepcopy(value, memo) for name, value in vars(self).items()})
        copied._attach(copied.vector)
        return copied

    def _attach(self, vector: Tensor) -> None:
        for parameter, view in zip(self.parameters, self.views(vector), strict=True):
            parameter.data = view

    def require_of(self, model: nn.Module) -> None:
        """Raise `UserError` unless these are the parameters that the model trains, and it computes with the vector.

        Of another one that requires a gradient, backward passes would leave that of all samples in its ``.grad``.
        """
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        memory = self.vector.untyped_storage().data_ptr()
        if list(map(id, trained)) != list(map(id, self.parameters)):
            what = "were frozen, unfrozen or exchanged"
        elif any(parameter.untyped_storage().data_ptr() != memory for parameter in trained):
            what = "were moved to other memory"
        else:
            return
        raise UserError(
            f"parameters of the model {what} after they were made one vector; do that before, and then make "
            "FlatParameters, and what is made of it"
        )

    def views(self, vector: Tensor) -> list[Tensor]:
        """Views of a vector of shape (..., d) in the shapes (..., *parameter)."""
        parts = vector.split(self._sizes, dim=-1)
        return [part.view((*part.shape[:-1], *p.shape)) for part, p in zip(parts, self.parameters, strict=True)]

    @contextmanager
    def at(self, iterate: Tensor) -> Iterator[None]:
        """Let the model compute with another vector of shape (d,); afterwards θ is back, bit for bit."""
        if iterate is self.vector:
            yield
            return
        self._attach(iterate)
        try:
            yield
        finally:
            self._attach(self.vector)

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """Let autograd take the parameters for constants."""
        for parameter in self.parameters:
            parameter.requires_grad_(False)
        try:
            yield
        finally:
            for parameter in self.parameters:
                parameter.requires_grad_()

    def part(self, vector: Tensor) -> Tensor:
        """What belongs to these parameters of a vector of shape (d,): all."""
        return vector

    def moved(self) -> None:
        """The optimizer has moved the parameters, and with them the vector."""

    def set_gradient(self, gradient: Tensor) -> None:
        """Make the parameters' ``.grad`` views of a vector of shape (d,), for torch optimizers."""
        for parameter, view in zip(self.parameters, self.views(gradient), strict=True):
            parameter.grad = view


def _attributes(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The tensors that a model has as plain attributes, by name, and without those that are set anew in each pass."""
    for prefix, module in model.named_modules():
        for name, value in vars(module).items():
            # As torch's spectral norm does with a weight, which was its parameter's memory before the first pass.
            if isinstance(value, Tensor) and f"{name}_orig" not in module._parameters:
                yield f"{prefix}.{name}".removeprefix("."), value


def _require_apart(named: Sequence[tuple[str, Tensor]], others: Sequence[tuple[str, Tensor]]) -> None:
    """Raise `UserError` where a number belongs to two parameters, or to one and to what is not trained."""
    by_storage: dict[int, list[tuple[str, Tensor]]] = {}
    for name, parameter in named:
        if not parameter.is_meta and parameter.numel() > 0:
            by_storage.setdefault(parameter.untyped_storage().data_ptr(), []).append((name, parameter))
    beside: dict[int, list[tuple[str, Tensor]]] = {}
    for name, t in others:
        if not is_lazy(t) and t.layout == torch.strided and t.numel() > 0 and t.dtype == named[0][1].dtype:
            beside.setdefault(t.untyped_storage().data_ptr(), []).append((name, t))
    for address, sharing in by_storage.items():
        if len(sharing) == 1 and address not in beside:
            continue
        # Of each number of the storage the parameter that it belongs to, from 1 on.
        owner = torch.zeros(sharing[0][1].untyped_storage().nbytes() // sharing[0][1].element_size(), dtype=torch.int32)
        for i, (name, t) in enumerate(sharing + beside.get(address, [])):
            own = owner.as_strided(t.shape, t.stride(), t.storage_offset())
            if (first := int(own.max())) > 0:
                other = sharing[first - 1][0]
                raise UserError(
                    f"{other!r} and {name!r} of the model share memory, which training parameters as one vector would "
                    "end; share one Parameter instead, and transpose or cut it where it is used"
                )
            if i < len(sharing):
                own.fill_(i + 1)
