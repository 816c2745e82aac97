"""Data sets of rows of numbers: what is declared of them, and whether what is read agrees."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor
from typing_extensions import override

from dpbench.data.base import Dataset
from dpbench.data.own import own_table, require_name
from dpbench.data.splits import Split, Splits
from dpbench.data.table_sources import TABLES, TableSource
from dpbench.errors import UserError, require


@dataclass
class TableDataset(Dataset):
    """Rows of numbers, each of a class.

    Attributes:
        features: numbers in a row, F.
    """

    features: int = 1

    @override
    def __post_init__(self) -> None:
        require_name(self.name, TABLES)
        super().__post_init__()
        self._require_positive("features")

    @property
    @override
    def source(self) -> TableSource:
        return TABLES.get(self.name) or own_table(self.name, self.train_size, self.test_size)

    @property
    @override
    def holds(self) -> str:
        return "rows of numbers"

    @property
    @override
    def sample_shape(self) -> tuple[int, ...]:
        return (self.features,)

    @override
    def inputs(self, samples: Any, root: Path) -> Tensor:
        rows = self._numbers(samples).float()
        if not rows.isfinite().all():
            raise UserError("has rows of finite numbers", field="dataset", value=self.name)
        return rows

    @override
    def load(self, root: Path, *, download: bool) -> Splits:
        train, test = self.source.read(root, download=download)
        for split, (rows, labels), want in (("training", train, self.train_size), ("test", test, self.test_size)):
            self._require_samples(split, len(rows), want, root)
            self._require_labels(split, labels, root)
            require(rows.shape[1] == self.features, "dataset.features", self.features, f"{rows.shape[1]}, as read")
        return Splits(Split.raw(*train), Split.raw(*test))
