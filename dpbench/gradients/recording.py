"""One pass of a model: what its layers read, and the gradients of what they gave.

Parameters are constants to autograd, so the backward pass makes output gradients only, never weight gradients. Each
arrives at the part of the tape that it belongs to as soon as it is there, and is let go where it isn't needed again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from typing_extensions import override

from dpbench.errors import UserError
from dpbench.gradients.choice import Chooser
from dpbench.gradients.summands import BySeed, Growing, Tied, summand_of
from dpbench.gradients.uses import Direct, Lookup, Outer, Strategy, Term, Use, can_tie
from dpbench.gradients.uses.base import full
from dpbench.gradients.weights import Weights

HOLD = Strategy("hold", "grouped")

Parameters = tuple[Tensor, ...]

# What a layer read in a call: the place of its first parameter among those that are trained, rows for each sample, and
# the shape of a row.
Read = tuple[float, ...]


class Part(NamedTuple):
    """What a call of a layer adds to the per-sample gradients of some of its parameters.

    Attributes:
        parameters: one for each shape of the use.
        use: how they enter the call.
        term: makes the term from the gradient of the call's output.
    """

    parameters: Parameters
    use: Use
    term: Callable[[Tensor], Term]


class Recording:
    """Watches the calls of one pass at one iterate, and adds what they give to summands.

    Attributes:
        samples: B.
        rows: rows of the model's input, a multiple of B, a sample's rows one after the other.
        weights: what the layers compute with.
        reads: what they read.
    """

    def __init__(
        self,
        samples: int,
        rows: int,
        points: int,
        trained: Iterable[Tensor],
        chooser: Chooser,
        summands: dict[Parameters, Growing],
        weights: Weights,
    ) -> None:
        self.samples = samples
        self.rows = rows
        self.weights = weights
        self._points = points
        self.reads: set[Read] = set()
        self._trained = {id(parameter): place for place, parameter in enumerate(trained)}
        self._chooser = chooser
        self._summands = summands
        self._calls: dict[Parameters, list[Use]] = {}
        self._together: dict[int, tuple[int, ...]] = {}
        self._anchor: Tensor | None = None

    def watch(self, output: Tensor, read: Tensor, parts: Iterable[Part]) -> Tensor:
        """Let the parts have the gradient of a call's output once it is there.

        Args:
            output: what the call gave.
            read: what the parts' terms need of the call's input; must not be changed in place.
            parts: those whose parameters are not trained are left out.

        Returns:
            The output, for the layer to return.
        """
        waiting = [part for part in parts if self._trains(part)]
        if not waiting:
            return output
        self._note(waiting[0], len(read), read.shape[1:])
        for part in waiting:
            self._expect(part)
        if output._is_view():  # autograd drops the hooks of a view that is changed in place
            output = torch.ops.aten._unsafe_view(output, output.shape)
        if not output.requires_grad:
            output = self._rooted(output)
        version = read._version
        kept: Tensor | None = read

        def receive(gradient: Tensor) -> None:
            nonlocal waiting, kept
            if kept is not None and kept._version != version:
                raise UserError("the model changes the input of a layer in place, which its gradient needs")
            # The graph, and this function with it, lives on; what the call read need not.
            gradient, ready, waiting, kept = gradient.detach(), waiting, [], None
            for part in ready:
                self._add(part, gradient)

        output.register_hook(receive)
        return output

    def expanded(self, parameter: Tensor, rows: int, leading: int = 0) -> Tensor:
        """A parameter repeated for each row, with `leading` more dimensions of 1 before its own.

        The gradient of the copies is the parameter's, per row.

        Returns:
            Shape (rows, 1, ..., *parameter).
        """
        copies = self.weights.repeated(parameter, rows).view(rows, *[1] * leading, *parameter.shape)
        part = Part((parameter,), Direct((tuple(parameter.shape),)), lambda b: self.per_row(parameter, b))
        if self._trains(part):
            self._note(part, rows, ())
            self._expect(part)
            copies.requires_grad_().register_hook(lambda b: self._add(part, b.detach()))
        return copies

    def per_row(self, parameter: Tensor, gradients: Tensor) -> Term:
        """The term of a parameter whose gradients per row are given, shape (n, ..., *parameter)."""
        gradients = gradients.reshape(self.samples, -1, *parameter.shape)
        # A copy, because terms are added up in place and autograd may need its own.
        return direct(gradients[:, 0].clone() if gradients.shape[1] == 1 else full(gradients).sum(1))

    def per_sample(self, t: Tensor) -> Tensor:
        """Shape (n, ...) as (B, n/B, ...): the rows of each sample.

        Raises:
            UserError: dimension 0 does not go through the samples.
        """
        if len(t) % self.samples:
            raise UserError(f"a layer reads {len(t)} rows of {self.samples} samples, so it mixes them")
        return t.reshape(self.samples, -1, *t.shape[1:])

    def tokens(self, t: Tensor) -> Tensor:
        """Shape (n, ..., d) as (B, T, d): all vectors of each sample."""
        return self.per_sample(t).flatten(1, -2)

    def spread(self, t: Tensor) -> Tensor:
        """What all samples share, shape (1, ...), as a row for each of them."""
        return t.expand(self.rows, *t.shape[1:]) if len(t) == 1 and self.rows > 1 else t

    def _trains(self, part: Part) -> bool:
        trained = [id(parameter) in self._trained for parameter in part.parameters]
        if any(trained) and not all(trained):
            raise UserError("of a layer with weight standardisation, train both weight and gain, or none")
        return all(trained)

    def _note(self, part: Part, rows: int, of_row: Sequence[int]) -> None:
        """A call reads `rows` rows of the shape `of_row`."""
        self.reads.add((self._trained[id(part.parameters[0])], rows / self.samples, *of_row))

    def _expect(self, part: Part) -> None:
        """Count a call.

        Raises:
            UserError: a parameter of the part belongs to another summand, and norms would lack their inner product.
        """
        together = tuple(map(id, part.parameters))
        for parameter in together:
            if self._together.setdefault(parameter, together) != together:
                raise UserError("a layer with weight standardisation shares its weight or gain, but not both")
        self._calls.setdefault(part.parameters, []).append(part.use)

    def _rooted(self, output: Tensor) -> Tensor:
        """The output, from which on autograd keeps a graph."""
        if self._anchor is None:
            self._anchor = torch.zeros((), device=output.device, requires_grad=True)
        rooted: Tensor = _Root.apply(output, self._anchor)
        return rooted

    def _add(self, part: Part, gradient: Tensor) -> None:
        term = part.term(gradient)
        if part.parameters not in self._summands:
            self._summands[part.parameters] = self._summand(part, term)
        self._summands[part.parameters].add(term, part.use)

    def _summand(self, part: Part, term: Term) -> Growing:
        calls = self._calls[part.parameters]
        kinds = list(dict.fromkeys(calls))
        if len(kinds) == 2 and can_tie(*kinds):
            return Tied()
        seeds = self.weights.seeds
        # The pixels of calls on maps of different sizes have no common Gram matrix.
        if len(kinds) > 1 or (len(calls) > 1 and not isinstance(part.use, (Outer, Lookup))):
            strategy, expected = HOLD, 1
        else:
            expected = self._points * len(calls)
            strategy = self._chooser.choose(part.use, term.by_seed(seeds)[0], expected)
        # Neither what a seed's samples share nor held chunks may span seeds.
        if seeds > 1 and (term.extra is not None or (strategy.kind == "hold" and strategy.chunk)):
            return BySeed([summand_of(part.use, strategy, expected) for _ in range(seeds)])
        return summand_of(part.use, strategy, expected)


def direct(gradients: Tensor) -> Term:
    """The term of per-sample gradients that are there already, shape (B, *parameter); they may be overwritten."""
    return Term(gradients, gradients)


class _Root(torch.autograd.Function):
    """Makes a tensor that no trained parameter came before the beginning of a graph; in place, so nothing is copied."""

    @staticmethod
    @override
    def forward(ctx: Any, output: Tensor, anchor: Tensor) -> Tensor:
        ctx.mark_dirty(output)
        return output

    @staticmethod
    @once_differentiable
    @override
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None]:
        return None, None
