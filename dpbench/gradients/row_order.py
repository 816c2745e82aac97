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
PLACED = {"index_add", "index_copy", "index_reduce", "scatter", "scatter_add", "scatter_reduce"}
# Operations that cut or turn what is along a dimension by numbers, which Python may have of the data.
CUT = {"roll", "slice", "split", "split_with_sizes", "unsafe_split", "unsafe_split_with_sizes"}
# Operations that put pieces side by side.
JOINED = {"cat", "stack"}
# Products of two matrices, or of a batch of them, by the names of both: with one that the data make, as a permutation
# is, of all rows.
PRODUCTS = {
    "addmm": ("mat1", "mat2"), "addmv": ("mat", "vec"), "baddbmm": ("batch1", "batch2"), "bmm": ("self", "mat2"),
    "mm": ("self", "mat2"), "mv": ("self", "vec"),
}  # fmt: skip
# Operations that give nothing of what they are given but its shape and type.
OF_SHAPE = {"empty_like", "full_like", "new_empty", "new_full", "new_ones", "new_zeros", "ones_like", "zeros_like"}


class RowChoices(TorchDispatchMode):
    """Follows what is made of a model's input, and notes the first operation that picks rows of it by data.

    Attributes:
        first: the operation; None so far.
    """

    def __init__(self, inputs: Tensor) -> None:
        """Nothing seen so far.

        Args:
            inputs: of the model.
        """
        super().__init__()  # type: ignore[no-untyped-call]
        self.first: str | None = None
        self._rows = len(inputs)
        self._numbers_read = 0
        self._of_data: dict[int, Tensor] = {}  # by address; kept, so that no address is used twice
        self._of_sample: dict[int, tuple[Tensor, int]] = {}  # what one row alone was made into, and which, by identity
        self._follow(inputs)

    @property
    def read_by_python(self) -> bool:
        """Whether several numbers of the data have left torch, and may come back as indices."""
        return self._numbers_read >= self._rows

    def note_read(self, several: bool) -> None:
        """Python or NumPy reads one number of the data, or several at once."""
        self._numbers_read += self._rows if several else 1

    def _follow(self, t: Tensor) -> None:
        self._of_data[t.untyped_storage().data_ptr()] = t

    def is_of_data(self, t: Any) -> bool:
        """Whether a tensor was made of the model's input."""
        return isinstance(t, Tensor) and t.untyped_storage().data_ptr() in self._of_data

    def _sample(self, t: Tensor) -> int | None:
        """The row of the model's input that alone a tensor was made of, where the model has taken one out."""
        _, sample = self._of_sample.get(id(t), (t, None))
        return sample

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        read = [t for t in tree_leaves((args, kwargs)) if self.is_of_data(t)]
        if not read:
            return func(*args, **kwargs)
        name = func._schema.name.removeprefix("aten::")
        plain = name if name.startswith("_") else name.removesuffix("_")
        given: dict[str, Any] = {argument.name: argument.default_value for argument in func._schema.arguments}
        given |= dict(zip(given, args, strict=False)) | kwargs
        if self.first is None and self._chooses(plain, given):
            self.first = name
        samples = self._samples_of(plain, given, read)
        outputs = func(*args, **kwargs)
        if plain not in OF_SHAPE:
            for place, output in enumerate(tree_leaves(outputs)):
                if isinstance(output, Tensor):
                    self._follow(output)
                    self._of_sample.pop(id(output), None)
                    if samples:
                        self._of_sample[id(output)] = output, samples[place % len(samples)]
        return outputs

    def _samples_of(self, name: str, given: dict[str, Any], read: Sequence[Tensor]) -> Sequence[int]:
        """The rows of the model's input that alone an operation's outputs are made of; empty where there are none."""
        cuts = name in ("select", "unbind") and len(read[0]) == self._rows
        if cuts and self._goes_through_samples(read[0], given["dim"]):
            return [given["index"] % self._rows] if name == "select" else range(self._rows)
        samples = {self._sample(t) for t in read}
        sample = samples.pop() if len(samples) == 1 else None
        return [] if sample is None else [sample]

    def _goes_through_samples(self, t: Tensor, dim: int) -> bool:
        """Whether a dimension may be that of the samples: the first one of what was made of more than one of them."""
        return self.is_of_data(t) and t.dim() > 0 and dim % t.dim() == 0 and self._sample(t) is None

    def _chooses(self, name: str, given: dict[str, Any]) -> bool:
        if name == "_local_scalar_dense":
            self.note_read(several=False)
        if name in BY_DATA or (name == "repeat_interleave" and self.is_of_data(given["repeats"])):
            return True
        if name == "embedding":  # rows of data as a table
            return self.is_of_data(given["weight"]) and not self._in_order(given["indices"], len(given["weight"]))
        if name in JOINED:
            return self._joins_rows(given["tensors"], given["dim"] % (given["tensors"][0].dim() + (name == "stack")))
        if name == "copy":  # of a row that the model took out, to where it may have read that it belongs
            return self.read_by_python and self._sample(given["src"]) is not None
        if name in PRODUCTS:
            return self._multiplies_rows(*(given[which] for which in PRODUCTS[name]))
        rows = given.get("self")
        if not isinstance(rows, Tensor) or rows.dim() == 0:
            return False
        if name in CUT:
            dims = (given["dims"] or [0]) if name == "roll" else [given["dim"]]
            # One number tells where to cut the samples, but hardly where to cut their tokens.
            told = self.read_by_python or (self._numbers_read > 0 and len(rows) == self._rows)
            return told and any(self._goes_through_samples(rows, dim) for dim in dims)
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

    def _joins_rows(self, pieces: Sequence[Tensor], dim: int) -> bool:
        """Whether rows that the model took out are put together, in an order and cut as Python may have read."""
        samples = {self._sample(t) for t in pieces if self.is_of_data(t)}
        return self.read_by_python and dim == 0 and len(samples) > 1

    def _multiplies_rows(self, left: Tensor, right: Tensor) -> bool:
        """Whether a product may add up what belongs to several samples, both of whose factors the data make."""
        if not (self.is_of_data(left) and self.is_of_data(right)):
            return False
        of_one = self._sample(left) is not None and self._sample(left) == self._sample(right)
        apart = left.dim() == 3 and len(left) % self._rows == 0
        return not (of_one or apart)

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
        if func in self.READS and self._choices.is_of_data(args[0]):
            self._choices.note_read(several=args[0].numel() > 1)
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
