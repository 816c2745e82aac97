"""What is remembered from step to step, and saved with a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from dpbench.history import History

State = dict[str, Any]


class Remembering:
    """Something whose state is some of its attributes.

    Attributes:
        remembers: their names, which have no underscore before them in the state. They are None, tensors, plain values,
            lists and dictionaries of these, or a `History`.
    """

    remembers: ClassVar[tuple[str, ...]] = ()

    def state_dict(self) -> State:
        """Copies of everything it remembers between steps, as tensors and plain values."""
        return {name.removeprefix("_"): _copied(getattr(self, name)) for name in self.remembers}

    def load_state_dict(self, state: State) -> None:
        """Continue from a copy of a state that `state_dict` returned.

        Raises:
            ValueError: it is of something that remembers something else.
        """
        names = {name.removeprefix("_"): name for name in self.remembers}
        if state.keys() != names.keys():
            kept = ", ".join(sorted(names)) or "no state"
            raise ValueError(f"{type(self).__name__} keeps {kept}, got {sorted(state)}")
        for key, name in names.items():
            held = getattr(self, name)
            if isinstance(held, History):
                held.restore(state[key])
            else:
                setattr(self, name, _copied(state[key]))


def _copied(value: Any) -> Any:
    if isinstance(value, History):
        return value.copies()
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, list):
        return [_copied(item) for item in value]
    if isinstance(value, dict):
        return {key: _copied(item) for key, item in value.items()}
    return value


def same_state(one: Any, other: Any) -> bool:
    """Whether two nested states are the same bit for bit, so that NaN is the same as itself."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        same = one.shape == other.shape and one.dtype == other.dtype
        return same and torch.equal(_bits(one), _bits(other.to(one.device)))
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        return one.shape == other.shape and one.dtype == other.dtype and one.tobytes() == other.tobytes()
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(same_state(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(same_state, one, other))
    return bool(one == other or (one != one and other != other))


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8) if tensor.dim() > 0 else tensor.reshape(1).view(torch.uint8)
