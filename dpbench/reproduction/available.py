"""Whether what a cell needs is on this machine, at a glance: data, tokenizer, weights, and what scores it."""

from __future__ import annotations

from functools import cache as remembered
from pathlib import Path

from dpbench.claims import Cell
from dpbench.data import TextDataset
from dpbench.data.sources import Source, State
from dpbench.data.tokenizers import tokenizer_here
from dpbench.models.pretrained import weights_here
from dpbench.reproduction.facts import Facts
from dpbench.scores import wordnet

# Metrics that no record holds.
NOT_RECORDED = {"validation_accuracy": "a validation split, on which no run is evaluated"}


class Available:
    """Looks once at what is here.

    Attributes:
        root: data root.
        download: data sets that are not here may be fetched.
    """

    def __init__(self, root: Path, *, download: bool) -> None:
        self.root = root
        self.download = download
        self._data: dict[str, str | None] = {}

    def lacks(self, cell: Cell, facts: Facts) -> str | None:
        """What a cell needs that is not here, in words; None for nothing."""
        if cell.metric in NOT_RECORDED:
            return NOT_RECORDED[cell.metric]
        lacking = self.weights(cell, facts) or self.data(facts)
        if lacking is None and cell.metric == "meteor" and not _wordnet_here():
            return "WordNet (python -m nltk.downloader wordnet)"
        return lacking

    @staticmethod
    def weights(cell: Cell, facts: Facts) -> str | None:
        """Which weights of its model are not here."""
        source = facts.weights
        return None if source is None or _weights_here(source) else f"weights {cell.needs.weights or source}"

    def data(self, facts: Facts) -> str | None:
        """What of its data set is not here."""
        dataset = facts.dataset
        tokenizer = dataset.tokenizer if isinstance(dataset, TextDataset) else None
        key = f"{dataset.name} {tokenizer}"
        if key not in self._data:
            self._data[key] = self._lacking(dataset.source, tokenizer)
        return self._data[key]

    def _lacking(self, source: Source, tokenizer: str | None) -> str | None:
        state, _ = source.state(self.root)
        if state != State.PRESENT and not (self.download and state == State.DOWNLOADABLE):
            return f"data {source.name}" + (f" ({state})" if state == State.DAMAGED else "")
        if tokenizer is not None and not self.download and not tokenizer_here(tokenizer, self.root):
            return f"tokenizer {tokenizer}"
        return None


@remembered
def _weights_here(source: str) -> bool:
    return weights_here(source)


@remembered
def _wordnet_here() -> bool:
    return wordnet() is not None
