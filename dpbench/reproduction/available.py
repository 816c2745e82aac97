"""Whether what a run or a cell needs is on this machine, at a glance: data, tokenizer, weights, and what scores it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cache as remembered
from pathlib import Path
from typing import NamedTuple

from dpbench.claims import Cell
from dpbench.claims.notation import in_one_form
from dpbench.data import TextDataset
from dpbench.data.sources import Source, State
from dpbench.data.tokenizers import tokenizer_here
from dpbench.files import names_weights_file
from dpbench.models.pretrained import hub_repository, weights_here
from dpbench.reproduction.facts import Facts
from dpbench.scores import wordnet


class Missing(NamedTuple):
    """Something that is not here.

    Attributes:
        what: it is, in words.
        told: what there is to say about it: what is wrong, or how to have it.
        fetched: whether data.download=true has it fetched.
    """

    what: str
    told: str
    fetched: bool


class Available:
    """Looks once at what is here.

    Attributes:
        root: data root.
        download: what is not here and can be fetched is fetched.
    """

    def __init__(self, root: Path, *, download: bool, cells: Iterable[Cell] = ()) -> None:
        """Nothing looked at.

        Args:
            root: data root.
            download: what is not here and can be fetched is to be fetched.
            cells: all that will be asked about, of which some share runs: a run without what scores it for one of
                them would have to be made again.
        """
        self.root = root
        self.download = download
        self._data: dict[str, list[Missing]] = {}
        scored = [cell for cell in cells if cell.metric == "meteor"]
        self._for_meteor = {in_one_form(candidate) for cell in scored for candidate in cell.candidates}

    def lacks(self, cell: Cell, facts: Facts) -> str | None:
        """What a cell needs that is not here and will not be fetched, in words; None for nothing."""
        lacking = self.weights(facts) or self.data(facts)
        if lacking is None and self._takes_wordnet(cell) and not _wordnet_here():
            return "WordNet, for METEOR (python -m nltk.downloader wordnet)"
        return lacking

    def _takes_wordnet(self, cell: Cell) -> bool:
        return cell.metric == "meteor" or not self._for_meteor.isdisjoint(map(in_one_form, cell.candidates))

    def weights(self, facts: Facts) -> str | None:
        """Which weights of its model are not here and will not be fetched, and how to have them."""
        missing = missing_weights(facts)
        if missing is None or (self.download and missing.fetched):
            return None
        remedy = f"data.download=true, or: {missing.told}" if missing.fetched else "to be made: docs/reproducing.md"
        return f"{missing.what} ({remedy})"

    def data(self, facts: Facts) -> str | None:
        """What of its data set is not here and will not be fetched."""
        return next((missing.what for missing in self.missing_data(facts)), None)

    def missing_data(self, facts: Facts) -> list[Missing]:
        """All of its data set that is not here and will not be fetched."""
        tokenizer = facts.dataset.tokenizer if isinstance(facts.dataset, TextDataset) else None
        key = f"{facts.dataset.name} {tokenizer}"
        if key not in self._data:
            found = self._looked_for(facts.dataset.source, tokenizer)
            self._data[key] = [missing for missing in found if not (self.download and missing.fetched)]
        return self._data[key]

    def _looked_for(self, source: Source, tokenizer: str | None) -> Iterator[Missing]:
        state, told = source.state(self.root)
        if state != State.PRESENT:
            damaged = f" ({state})" if state == State.DAMAGED else ""
            if state == State.LICENSED:
                told = f"{source.problems(self.root, thorough=False)[0].text}; {told}"
            yield Missing(f"data {source.name}{damaged}", told, fetched=state == State.DOWNLOADABLE)
        if tokenizer is not None and not tokenizer_here(tokenizer, self.root):
            yield Missing(f"tokenizer {tokenizer}", "data.download=true fetches it", fetched=True)


def missing_weights(facts: Facts) -> Missing | None:
    """The weights of a run's model, if it begins with some that are not here."""
    return None if facts.weights is None else _missing_weights(facts.weights)


@remembered
def _missing_weights(source: str) -> Missing | None:
    if weights_here(source):
        return None
    if names_weights_file(source):
        return Missing(f"weights {source}", "no such file or folder", fetched=False)
    return Missing(f"weights {source}", f"hf download {hub_repository(source)}", fetched=True)


@remembered
def _wordnet_here() -> bool:
    return wordnet() is not None
