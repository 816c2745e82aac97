"""Whether the rows that a model's layers read follow the data, so that no batch shows whose they are in another one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from typing_extensions import override

# Operations whose rows are as many, or in such places, as the data say.
BY_DATA = {
    "_pack_padded_sequence", "_unique", "_unique2", "masked_scatter", "masked_select", "nonzero", "nonzero_static",
    "take", "unique_consecutive", "unique_dim",
}  # fmt: skip
# Operations that put what is along a dimension in the order of its values.
ORDERED_BY_DATA = {"kthvalue", "sort", "topk"}
# Operations that pick what is along a dimension by indices, and those that place it so.
PICKED = {"gather", "index_select"}
PLACED = {"index_add", "index_copy", "scatter", "scatter_add", "scatter_reduce"}


class RowChoices(TorchDispatchMode):
    """Follows what is made of a model's input, and notes the first operation that picks rows of it by data.

    Attributes:
        first: the operation; None so far.
        read_by_python: several numbers of the data have left torch, and may come back as indices.
    """

    def __init__(self, inputs: Tensor) -> None:
        """Nothing seen so far.

        Args:
            inputs: of the model.
        """
        super().__init__()  # type: ignore[no-untyped-call]
        self.first: str | None = None
        self.read_by_python = False
        self._rows = len(inputs)
        self._numbers_read = 0
        self._of_data: dict[int, Tensor] = {}  # by address; kept, so that no address is used twice
        self._follow(inputs)

    def _follow(self, t: Tensor) -> None:
        self._of_data[t.untyped_storage().data_ptr()] = t

    def is_of_data(self, t: Any) -> bool:
        """Whether a tensor was made of the model's input."""
        return isinstance(t, Tensor) and t.untyped_storage().data_ptr() in self._of_data

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        of_data = any(map(self.is_of_data, tree_leaves((args, kwargs))))
        if of_data and self.first is None and self._chooses(func, args, kwargs):
            self.first = func._schema.name.removeprefix("aten::")
        outputs = func(*args, **kwargs)
        if of_data:
            for output in tree_leaves(outputs):
                if isinstance(output, Tensor):
                    self._follow(output)
        return outputs

    def _chooses(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
        name = func._schema.name.removeprefix("aten::")
        name = name if name.startswith("_") else name.removesuffix("_")
        given: dict[str, Any] = {argument.name: argument.default_value for argument in func._schema.arguments}
        given |= dict(zip(given, args, strict=False)) | kwargs
        if name == "_local_scalar_dense":
            self._numbers_read += 1
            self.read_by_python |= self._numbers_read >= self._rows
        if name in BY_DATA or (name == "repeat_interleave" and self.is_of_data(given["repeats"])):
            return True
        if name == "embedding":  # rows of data as a table
            return self.is_of_data(given["weight"]) and not self._in_order(given["indices"], len(given["weight"]))
        rows = given.get("self")
        if not isinstance(rows, Tensor) or rows.dim() == 0:
            return False
        if name in ORDERED_BY_DATA:
            return bool(given["dim"] % rows.dim() == 0)
        if name in PICKED | PLACED:
            picks = given["dim"] % rows.dim() == 0 and not self._in_order(given["index"], len(rows))
        elif name in ("index", "index_put"):
            filled = name == "index_put" and given["values"].numel() == 1  # one value for all of them moves none
            by = given["indices"][0] if given["indices"] else None
            picks = by is not None and not filled and not self._in_order(by, len(rows))
        else:
            return False
        # A table that has nothing to do with the data may be read in any order.
        return picks and (name in PLACED or name == "index_put" or self.is_of_data(rows))

    def _in_order(self, indices: Tensor, rows: int) -> bool:
        """Whether indices along dimension 0 name each row once, in order, as ``x[torch.arange(len(x)), last]`` does."""
        if self.read_by_python or indices.dtype in (torch.bool, torch.uint8) or indices.dim() == 0:
            return False
        identity = torch.arange(rows, device=indices.device).view(-1, *[1] * (indices.dim() - 1))
        return len(indices) == rows and bool((indices == identity).all())


class ReadsByPython(TorchFunctionMode):
    """Notes where numbers of the data are read by Python or NumPy, of which `RowChoices` sees nothing."""

    READS = (Tensor.tolist, Tensor.numpy, Tensor.__array__)

    def __init__(self, choices: RowChoices) -> None:
        super().__init__()
        self._choices = choices

    @override
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in self.READS and args[0].numel() > 1 and self._choices.is_of_data(args[0]):
            self._choices.read_by_python = True
        return func(*args, **(kwargs or {}))


def rows_by_data(model: nn.Module, layers: Iterable[nn.Module], direct: Sequence[str], inputs: Tensor) -> str | None:
    """What is wrong with the rows that these layers of a model read, or None.

    Args:
        model: maps inputs to outputs.
        layers: those whose rows are taken to be in the order of the samples.
        direct: names of parameters outside of them, of which the same is taken wherever they are used.
        inputs: shape (n, ...).
    """
    found: list[str] = []

    def note(layer: nn.Module, _: Any) -> None:
        if choices.first is not None and not found:
            found.append(f"{type(layer).__name__} reads rows that the data choose, by {choices.first}")

    handles = [layer.register_forward_pre_hook(note) for layer in layers]
    try:
        with torch.no_grad(), RowChoices(inputs) as choices, ReadsByPython(choices):
            model(inputs)
    finally:
        for handle in handles:
            handle.remove()
    if choices.first is not None and direct and not found:
        return f"parameter {direct[0]!r} may meet rows that the data choose, by {choices.first}"
    return found[0] if found else None
