"""Who owns a model's parameters: layers of known kinds, which keep books, or other modules."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn

from dpbench.gradients.flat import FlatParameters
from dpbench.gradients.layers import Forward, forward_of, refuse_mixing
from dpbench.gradients.pooling import max_pooling
from dpbench.gradients.recording import Recording


class Owners:
    """The owners of the parameters that a model trains.

    Attributes:
        known: layers that keep books, and their computations (layers.py); max pooling too, which has no parameters.
        groups: of each parameter.
    """

    def __init__(self, model: nn.Module, flat: FlatParameters, *, per_layer: bool = False) -> None:
        """Find them.

        Args:
            model: any model.
            flat: its trainable parameters.
            per_layer: one group of parameters per layer instead of one for all.

        Raises:
            UserError: a layer mixes samples.
        """
        self.known: list[tuple[nn.Module, Forward]] = []
        self.groups: dict[Tensor, int] = {}
        self._direct: list[tuple[nn.Module, str, Tensor]] = []
        trained = {id(parameter) for parameter in flat.parameters}
        claimed: set[nn.Module] = set()
        for name, layer in model.named_modules():
            refuse_mixing(name, layer)
            if layer in claimed:
                continue
            forward = forward_of(layer)
            whole = forward is not None
            slots = [(slot, p) for slot, p in layer.named_parameters(recurse=whole) if id(p) in trained]
            if forward is max_pooling:
                self.known.append((layer, forward))
            if not slots:
                continue
            group = len(set(self.groups.values())) if per_layer else 0
            for _, parameter in slots:
                self.groups.setdefault(parameter, group)
            if forward is not None:
                self.known.append((layer, forward))
                claimed.update(layer.modules())
            else:
                self._direct += [(layer, slot, parameter) for slot, parameter in slots]

    @property
    def layers(self) -> list[nn.Module]:
        """Those that have parameters to train, and keep books."""
        return [layer for layer, forward in self.known if forward is not max_pooling]

    @property
    def direct(self) -> list[str]:
        """Names of parameters that no known layer owns, within their modules."""
        return [slot for _, slot, _ in self._direct]

    def watched(self, recording: Recording, leading: int) -> AbstractContextManager[None]:
        """Let layers keep books, and each row have its own copy of the parameters outside of them.

        Args:
            recording: of the pass.
            leading: dimensions between the row and those of such a parameter.
        """
        return self._replaced(
            lambda layer, forward: partial(forward, recording, layer),
            lambda parameter: _repeated(recording, parameter, leading),
        )

    def constant(self) -> AbstractContextManager[None]:
        """Let autograd take parameters for constants wherever books see a use of them."""
        return self._replaced(lambda layer, _: _of_constants(layer), Tensor.detach)

    @contextmanager
    def _replaced(
        self, forwards: Callable[[nn.Module, Forward], Forward], values: Callable[[Tensor], Tensor]
    ) -> Iterator[None]:
        """Let layers have other forwards, and the owners of parameters outside of them other values."""
        own = [(layer, vars(layer).get("forward")) for layer, _ in self.known]
        slots = {owner: list(owner._parameters) for owner, _, _ in self._direct}
        for layer, forward in self.known:
            layer.forward = forwards(layer, forward)
        for owner, slot, parameter in self._direct:
            del owner._parameters[slot]
            setattr(owner, slot, values(parameter))
        try:
            yield
        finally:
            for layer, forward_before in own:
                del layer.forward
                if forward_before is not None:
                    layer.forward = forward_before
            for owner, slot, parameter in self._direct:
                delattr(owner, slot)
                setattr(owner, slot, parameter)  # as it was set before: some modules keep what is set in a second place
            for owner, names in slots.items():  # in their order, which decides by which of two names one is known
                for name in names:
                    owner._parameters[name] = owner._parameters.pop(name)


def _of_constants(layer: nn.Module) -> Forward:
    """The layer's own computation, for which autograd takes its parameters for constants."""
    forward, trained = layer.forward, [parameter for parameter in layer.parameters() if parameter.requires_grad]

    def of_constants(*args: Any, **kwargs: Any) -> Any:
        for parameter in trained:
            parameter.requires_grad_(False)
        try:
            return forward(*args, **kwargs)
        finally:
            for parameter in trained:
                parameter.requires_grad_()

    return of_constants


def _repeated(recording: Recording, parameter: Tensor, leading: int) -> Tensor:
    if parameter.dim() > 1 and parameter.shape[0] == 1:
        return recording.expanded(parameter, recording.rows).squeeze(1)
    return recording.expanded(parameter, recording.rows, leading)
