"""Text data sets: GLUE, E2E, DART and names, from files under the data root or from the Hugging Face hub."""

from __future__ import annotations

import csv
import json
from abc import abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from typing_extensions import override

from dpbench.data.encoding import Texts
from dpbench.data.sources import Fetchable, File, FileSource, Problem, Source, fetched

Row = dict[str, Any]

# The hub's conversion of a repository, for those that hold no more than a script, which `datasets` does not run.
CONVERTED = "refs/convert/parquet"


@dataclass(frozen=True)
class Part:
    """A split.

    Attributes:
        name: "train", "test", or that of a further split.
        file: where it is under the data root.
        hub: its name on the hub.
        samples: known number.
    """

    name: str
    file: File
    hub: str
    samples: int


@dataclass(frozen=True)
class TextSource(Source):
    """A data set of which texts can be read."""

    @abstractmethod
    def read(self, root: Path, *, download: bool) -> dict[str, Texts]:
        """Texts of the splits "train" and "test", and of others.

        Args:
            root: data root.
            download: fetch what is missing.

        Raises:
            UserError: a file is missing, truncated or corrupt.
        """


@dataclass(frozen=True)
class TextTable(FileSource, TextSource):
    """Splits in a file each, or in the cache of the library `datasets`, which fetches them from the hub.

    Attributes:
        parts: the splits.
        hub: arguments for `datasets.load_dataset`.
        revision: of the repository there; null: the newest.
        columns: of the files: the texts, then the label where there is one.
        hub_columns: the same on the hub.
        labels: names of the labels in the files, in order; none where they are numbers.
        pairs: a sample has two texts.
    """

    parts: tuple[Part, ...] = ()
    hub: tuple[str, ...] = ()
    revision: str | None = None
    columns: tuple[str, ...] = ()
    hub_columns: tuple[str, ...] = ()
    labels: tuple[str, ...] = ()
    pairs: bool = False

    @override
    def problems(self, root: Path, *, thorough: bool) -> list[Problem]:
        problems = super().problems(root, thorough=thorough)
        if thorough and not problems:
            for part in self.parts:
                # One more than there should be is enough to tell.
                found = sum(1 for _ in islice(self._rows(root / part.file.path), part.samples + 1))
                if found != part.samples:
                    more = "more" if found > part.samples else f"{found:,}"
                    text = f"{part.file.path} has {more} samples instead of {part.samples:,}"
                    problems.append(Problem(text, absent=False))
        return problems

    @override
    def read(self, root: Path, *, download: bool) -> dict[str, Texts]:
        if download and any(problem.absent for problem in super().problems(root, thorough=False)):
            try:
                found = {part.name: self._texts(self._from_hub(part), self.hub_columns) for part in self.parts}
            except Exception as error:  # whatever the network, the disk and the hub run into
                why = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
                raise self.error(f"can't be fetched from the hub's {self.hub[0]} ({why})") from error
            return found
        self.require_whole(root)
        return {part.name: self._texts(self._rows(root / part.file.path), self.columns) for part in self.parts}

    def _from_hub(self, part: Part) -> Iterable[Row]:
        import datasets

        rows: Iterable[Row] = datasets.load_dataset(*self.hub, split=part.hub, revision=self.revision)
        return rows

    def _rows(self, path: Path) -> Iterator[Row]:
        """The complete lines of a file; some published ones have lines of their own making."""
        tabs = path.suffix == ".tsv"
        try:
            with path.open(newline="", encoding="utf-8") as stream:
                if tabs:
                    rows = csv.DictReader(stream, delimiter="\t", quoting=csv.QUOTE_NONE)
                else:
                    rows = csv.DictReader(stream)
                for row in rows:
                    values = [row.get(column) for column in self.columns]
                    if None not in values and (not self.labels or values[-1] in self.labels):
                        yield row
        except (csv.Error, UnicodeDecodeError, OSError) as error:
            raise self.error(f"{path} can't be read ({type(error).__name__}); fetch it anew") from error

    def _texts(self, rows: Iterable[Row], columns: tuple[str, ...]) -> Texts:
        first, second, labels = columns[0], columns[1] if self.pairs else None, columns[1 + self.pairs :]
        kept = list(rows)
        return Texts(
            [str(row[first]) for row in kept],
            None if second is None else [str(row[second]) for row in kept],
            [self._label(row[labels[0]]) for row in kept] if labels else None,
        )

    def _label(self, value: str | int) -> int:
        try:
            return self.labels.index(value) if isinstance(value, str) and self.labels else int(value)
        except ValueError as error:
            raise self.error(f"a label is {value!r}, not a number; the file is damaged") from error


@dataclass(frozen=True)
class Dart(TextTable):
    """Sets of triples, each with sentences that people wrote; one sample a sentence.

    Files have an entry of the published arrays a line, and no sums: these depend on what makes lines of the arrays.
    """

    @override
    def _from_hub(self, part: Part) -> Iterable[Row]:
        return self._sentences(super()._from_hub(part))

    @override
    def _rows(self, path: Path) -> Iterator[Row]:
        try:
            with path.open(encoding="utf-8") as stream:
                yield from self._sentences(json.loads(line) for line in stream)
        except (ValueError, KeyError, TypeError, RecursionError, OSError) as error:
            raise self.error(f"{path} can't be read ({type(error).__name__}); fetch it anew") from error

    def _sentences(self, entries: Iterable[Row]) -> Iterator[Row]:
        for entry in entries:
            triples = " | ".join(" : ".join(triple) for triple in entry["tripleset"])
            written = entry["annotations"]
            texts = written["text"] if isinstance(written, dict) else [one["text"] for one in written]
            for text in texts:
                yield {"triples": triples, "text": text}


@dataclass(frozen=True)
class Names(Fetchable, TextSource):
    """Names of people in files named after languages, `names/<language>.txt`; a random fifth, fixed, is the test split.

    The data of the tutorial on character-level networks at pytorch.org.
    """

    URL = "https://download.pytorch.org/tutorial/data.zip"
    LANGUAGES = 18

    @override
    def problems(self, root: Path, *, thorough: bool) -> list[Problem]:
        files = sorted((root / "names").glob("*.txt"))
        if not files:
            return [Problem("names has no files", absent=True)]
        if len(files) != self.LANGUAGES:
            return [Problem(f"names has {len(files)} files instead of {self.LANGUAGES}", absent=False)]
        found = len(self._names(root)) if thorough else self.train + self.test
        if found != self.train + self.test:
            return [Problem(f"names has {found:,} names instead of {self.train + self.test:,}", absent=False)]
        return []

    @override
    def fetch(self, root: Path) -> None:
        with fetched(self.URL, root) as folder:
            (folder / "data" / "names").rename(root / "names")

    def _names(self, root: Path) -> list[tuple[str, int]]:
        files = sorted((root / "names").glob("*.txt"))
        try:
            return [
                (name.strip(), label)
                for label, path in enumerate(files)
                for name in path.read_text(encoding="utf-8").splitlines()
                if name.strip()
            ]
        except (UnicodeDecodeError, OSError) as error:
            raise self.error(f"a file of {root / 'names'} can't be read ({type(error).__name__})") from error

    @override
    def read(self, root: Path, *, download: bool) -> dict[str, Texts]:
        from sklearn.model_selection import train_test_split

        self.obtain(root, download=download)
        train, test = train_test_split(self._names(root), test_size=self.test, random_state=0)
        return {
            split: Texts([name for name, _ in rows], None, [label for _, label in rows])
            for split, rows in (("train", train), ("test", test))
        }


def _table(kind: type[TextTable], name: str, title: str, parts: tuple[Part, ...], **settings: Any) -> TextTable:
    files = tuple(part.file for part in parts)
    return kind(name, title, parts[0].samples, parts[1].samples, parts=parts, files=files, **settings)


ENTAILS = ("entailment", "not_entailment")

TEXTS: dict[str, TextSource] = {
    source.name: source
    for source in (
        _table(
            TextTable,
            "sst2",
            "GLUE SST-2, sentiment of sentences",
            (
                Part("train", File("glue/SST-2/train.tsv", "da409a0a939379ed32a470bc0f7fe99a"), "train", 67_349),
                Part("test", File("glue/SST-2/dev.tsv", "268856b487b2a31a28c0a93daaff7288"), "validation", 872),
            ),
            hub=("nyu-mll/glue", "sst2"),
            columns=("sentence", "label"),
            hub_columns=("sentence", "label"),
        ),
        _table(
            TextTable,
            "qnli",
            "GLUE QNLI, questions and sentences",
            (
                Part("train", File("glue/QNLI/train.tsv"), "train", 104_743),
                Part("test", File("glue/QNLI/dev.tsv", "3f9bee4d3ed4554cea548df75bd94ec7"), "validation", 5_463),
            ),
            hub=("nyu-mll/glue", "qnli"),
            columns=("question", "sentence", "label"),
            hub_columns=("question", "sentence", "label"),
            labels=ENTAILS,
            pairs=True,
        ),
        _table(
            TextTable,
            "rte",
            "GLUE RTE, premises and hypotheses",
            (
                Part("train", File("glue/RTE/train.tsv", "791051bd1bdc71a74ad2d674d5c256ca"), "train", 2_490),
                Part("test", File("glue/RTE/dev.tsv", "973cb4178d4534cf745a01c309d4a66c"), "validation", 277),
            ),
            hub=("nyu-mll/glue", "rte"),
            columns=("sentence1", "sentence2", "label"),
            hub_columns=("sentence1", "sentence2", "label"),
            labels=ENTAILS,
            pairs=True,
        ),
        _table(
            TextTable,
            "qqp",
            "GLUE QQP, pairs of questions",
            (
                Part("train", File("glue/QQP/train.tsv"), "train", 363_846),
                Part("test", File("glue/QQP/dev.tsv"), "validation", 40_430),
            ),
            hub=("nyu-mll/glue", "qqp"),
            columns=("question1", "question2", "is_duplicate"),
            hub_columns=("question1", "question2", "label"),
            labels=("0", "1"),
            pairs=True,
        ),
        _table(
            TextTable,
            "mnli",
            "GLUE MNLI, premises and hypotheses",
            (
                Part("train", File("glue/MNLI/train.tsv"), "train", 392_702),
                Part("test", File("glue/MNLI/dev_matched.tsv"), "validation_matched", 9_815),
                Part("mismatched", File("glue/MNLI/dev_mismatched.tsv"), "validation_mismatched", 9_832),
            ),
            hub=("nyu-mll/glue", "mnli"),
            columns=("sentence1", "sentence2", "gold_label"),
            hub_columns=("premise", "hypothesis", "label"),
            labels=("entailment", "neutral", "contradiction"),
            pairs=True,
        ),
        _table(
            TextTable,
            "e2e",
            "E2E NLG, restaurants",
            (
                Part("train", File("e2e_nlg/trainset.csv", "530eb457155d788912309689cab6f36d"), "train", 42_061),
                Part("test", File("e2e_nlg/testset_w_refs.csv", "630c2ad9466add8074d62735fe1c193a"), "test", 4_693),
                Part("validation", File("e2e_nlg/devset.csv", "41ab9e06dd4e08ce2a3408f5f652e921"), "validation", 4_672),
            ),
            hub=("tuetschek/e2e_nlg",),
            revision=CONVERTED,
            columns=("mr", "ref"),
            hub_columns=("meaning_representation", "human_reference"),
            pairs=True,
        ),
        _table(
            Dart,
            "dart",
            "DART 1.1.1, sentences of triples",
            (
                Part("train", File("dart/train.jsonl"), "train", 62_659),
                Part("test", File("dart/test.jsonl"), "test", 12_552),
                Part("validation", File("dart/dev.jsonl"), "validation", 6_980),
            ),
            hub=("Yale-LILY/dart",),
            revision=CONVERTED,
            columns=("triples", "text"),
            hub_columns=("triples", "text"),
            pairs=True,
        ),
        Names("names", "names of people by language", 16_059, 4_015),
    )
}
