"""Random draws held still, so that a sample sees alone what it sees in a batch."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import NormalDist
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

from dpbench.randomness import Generators

# Decisions by chance fall both ways at these quantiles, one after the other.
LEVELS = (0.02, 0.5, 0.98)
# The argument of kernels that drop values of their own, which is set to 0.
OWN_DROPOUT = ("dropout_p", "dropout")
# Kernels that only set up the generators of such a one, and can't do so for a dropout of 0.
STATES = ("aten::_cudnn_init_dropout_state",)


class UnknownDraw(RuntimeError):
    """A draw that can't be held still."""


class LevelDraws(TorchDispatchMode):
    """Lets each of torch's draws be a quantile of what it is drawn from, whatever its shape; dropout drops nothing.

    A model then is a function of its input, in training mode too.

    Attributes:
        drew: whether anything was drawn.
    """

    def __init__(self, level: float, *, of_one_shape: bool) -> None:
        """Nothing drawn so far.

        Args:
            level: of the quantile, between 0 and 1.
            of_one_shape: all passes have inputs of one shape, so that it is enough to let a draw whose quantile is not
                known draw the same each time.
        """
        super().__init__()  # type: ignore[no-untyped-call]
        self.drew = False
        self._level = level
        self._of_one_shape = of_one_shape

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # The backward pass of an attention, or of a GPU's recurrent layer, has its dropout too, but no tag.
        dropout = any(argument.name in OWN_DROPOUT for argument in func._schema.arguments)
        if torch.Tag.nondeterministic_seeded not in func.tags and not dropout:
            return func(*args, **kwargs)
        if func._schema.name in STATES:
            return func(*args, **kwargs)
        given: dict[str, Any] = {argument.name: argument.default_value for argument in func._schema.arguments}
        given |= dict(zip(given, args, strict=False)) | kwargs
        name = func._schema.name.removeprefix("aten::").removesuffix("_").removesuffix("_like")
        if name == "native_dropout":
            self.drew = True
            return _dropped_nothing(given["input"], given["p"] if given["train"] is not False else 0.0)
        if name in QUANTILES:
            self.drew = True
            quantile = QUANTILES[name](self._level, given)
            drawn: Tensor = func(*args, **kwargs)  # of the right shape and kind
            return drawn.copy_(quantile) if isinstance(quantile, Tensor) else drawn.fill_(quantile)
        own = next((argument for argument in OWN_DROPOUT if argument in given), None)
        if own is None and self._of_one_shape:
            self.drew = True
            torch.manual_seed(round(1000 * self._level))
            return func(*args, **(kwargs | ({"generator": None} if "generator" in given else {})))
        if own is None:
            raise UnknownDraw(f"the model draws random numbers by {name}, which a comparison can't hold still")
        self.drew |= given[own] != 0
        at = list(given).index(own)
        if at < len(args):
            return func(*args[:at], 0.0, *args[at + 1 :], **kwargs)
        return func(*args, **(kwargs | {own: 0.0}))


@contextmanager
def held_still(level: float | None, *, of_one_shape: bool = False) -> Iterator[Callable[[], bool]]:
    """One pass of a model in which torch's draws are a quantile, and those of Python and NumPy begin anew.

    All generators are afterwards as they were.

    Args:
        level: of the quantile, between 0 and 1; None for a model that draws nothing, which is left alone.
        of_one_shape: this pass is compared with passes whose inputs have the same shape alone.

    Yields:
        Whether anything was drawn so far.
    """
    if level is None:
        yield lambda: False
        return
    generators, seed = Generators(range(torch.cuda.device_count())), round(1000 * level)
    before = generators.state_dict()
    random.seed(seed)
    np.random.seed(seed)
    begun = random.getstate()

    def drew() -> bool:
        of_numpy = np.random.RandomState(seed).random_sample() != np.random.random_sample()
        return draws.drew or of_numpy or random.getstate() != begun

    try:
        with LevelDraws(level, of_one_shape=of_one_shape) as draws:
            yield drew
    finally:
        generators.load_state_dict(before)


def _dropped_nothing(t: Tensor, p: float) -> tuple[Tensor, Tensor]:
    """What dropout gives where it drops nothing, and its mask."""
    return t * (0.0 if p == 1 else 1 / (1 - p)), torch.ones_like(t, dtype=torch.bool)


def _bernoulli(level: float, given: dict[str, Any]) -> Tensor | float:
    p = given.get("p", given["self"])
    return p > level if isinstance(p, Tensor) else float(p > level)


def _whole_number(level: float, given: dict[str, Any]) -> Tensor | float:
    low, high = given.get("low", given.get("from")) or 0, given.get("high", given.get("to"))
    if high is None:
        high = 2**20
    quantile: Tensor | float = low + (level * (high - low)) // 1
    return quantile


def _normal(level: float, given: dict[str, Any]) -> Tensor | float:
    quantile: Tensor | float = given.get("mean", 0.0) + given.get("std", 1.0) * NormalDist().inv_cdf(level)
    return quantile


def _multinomial(level: float, given: dict[str, Any]) -> Tensor:
    shares = given["self"].cumsum(-1) / given["self"].sum(-1, keepdim=True)
    first = (shares < level).sum(-1, keepdim=True)
    following: Tensor = first + torch.arange(given["num_samples"], device=first.device)
    return following.remainder(given["self"].shape[-1])


# Of a draw's name, without its ending, what the level and its arguments give; broadcast to the draw's shape.
QUANTILES: dict[str, Callable[[float, dict[str, Any]], Tensor | float]] = {
    "bernoulli": _bernoulli,
    "exponential": lambda level, given: -math.log1p(-level) / given["lambd"],
    "multinomial": _multinomial,
    "normal": _normal,
    "rand": lambda level, given: level,
    "randint": _whole_number,
    "randn": _normal,
    "random": _whole_number,
    # Never the order as it is, which would hide that something is put into another one.
    "randperm": lambda level, given: torch.arange(given["n"]).roll(1 + math.floor(level * (given["n"] - 1))),
    "uniform": lambda level, given: given["from"] + level * (given["to"] - given["from"]),
}
