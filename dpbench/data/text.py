"""Text data sets: what is declared of them, and whether what is read agrees."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from dpbench.data.base import Dataset
from dpbench.data.encoding import Texts, encoded, prompts
from dpbench.data.own import own_texts, require_name
from dpbench.data.splits import Prompts, Samples, Splits
from dpbench.data.text_sources import TEXTS, TextSource
from dpbench.data.tokenizers import Tokenizer, open_tokenizer
from dpbench.data.tokens import TokenSplit
from dpbench.errors import PlainWarning, UserError, require

SHARED_PROMPTS = "null for texts to be continued, of which some share a beginning: it would be on both sides"


@dataclass
class TextDataset(Dataset):
    """Texts or pairs of texts, each of a class; or, with one class, texts of which a language model learns the end.

    Attributes:
        max_length: most tokens of a sample; the rest is cut off.
        tokenizer: the model's; see `open_tokenizer`.
        vocabulary: number of ids that the model knows.
        padding: id that the model takes for padding.
        beams: hypotheses that a language model follows when it continues texts; 1 is greedy.
        most_tokens: longest continuation; 0: none is asked for.
    """

    max_length: int = 128
    tokenizer: str = ""
    vocabulary: int = 1
    padding: int = 0
    beams: int = 5
    most_tokens: int = 64

    @override
    def __post_init__(self) -> None:
        require_name(self.name, TEXTS)
        super().__post_init__()
        self._require_positive("vocabulary")
        if self.generates:
            require(self.validation_size is None, "dataset.validation_size", self.validation_size, SHARED_PROMPTS)
        require(self.beams >= 1, "dataset.beams", self.beams, "a whole number >= 1")
        require(self.most_tokens >= 0, "dataset.most_tokens", self.most_tokens, "a whole number >= 0")
        require(self.max_length >= 4, "dataset.max_length", self.max_length, "a whole number >= 4")

    @property
    @override
    def source(self) -> TextSource:
        known = TEXTS.get(self.name)
        return known or own_texts(self.name, self.train_size, self.test_size, generates=self.generates)

    @property
    @override
    def holds(self) -> str:
        return "texts"

    @property
    @override
    def sample_shape(self) -> tuple[int, ...]:
        return (self.max_length,)

    @property
    @override
    def one_shape(self) -> bool:
        return False

    @property
    @override
    def generates(self) -> bool:
        return self.classes == 1

    @override
    def blank(self, count: int, device: torch.device) -> tuple[Tensor, Tensor]:
        shape = (count, self.max_length)
        word = (self.padding + 1) % self.vocabulary
        ids = torch.full(shape, word, dtype=torch.int64, device=device)
        targets = torch.zeros(shape if self.generates else shape[:1], dtype=torch.int64, device=device)
        return ids, targets

    @override
    def load(self, root: Path, *, download: bool) -> Splits:
        tokenizer = open_tokenizer(self.tokenizer, root, download=download)
        self._require_tokens(tokenizer)
        texts = self.source.read(root, download=download)
        for split, want in (("train", self.train_size), ("test", self.test_size)):
            self._require_samples(split, len(texts[split].first), want, root)
        splits: dict[str, Samples] = {}
        for split, of_split in texts.items():
            if of_split.labels is not None:
                self._require_labels(split, of_split.labels, root)
            made = encoded(of_split, tokenizer, padding=self.padding, longest=self.max_length)
            if self.generates:
                self._require_predicted(split, made)
            elif len(made.tokens) > 1 and bool((made.tokens == self.padding).any()):
                told = (
                    f"is a token of {split} texts, which the model would take for padding; choose an id that none has"
                )
                raise UserError(told, field="model.padding", value=self.padding)
            splits[split] = made
        asked = self._prompts(texts["test"], tokenizer) if self.generates and self.most_tokens else None
        return Splits(splits.pop("train"), splits.pop("test"), splits, asked)

    @override
    def inputs(self, samples: Any, root: Path) -> Tensor:
        """Ids (B, T) of texts, or of pairs of texts; of a language model those that it is to go on from."""
        of_one = {1 if isinstance(sample, str) else _texts_in(sample) for sample in samples}
        if isinstance(samples, str) or len(of_one) > 1 or not of_one <= {1, 2}:
            raise UserError("has a list of texts, or of pairs of texts", field="dataset", value=self.name)
        tokenizer = open_tokenizer(self.tokenizer, root, download=False)
        if self.generates:
            ids = [one[-self.max_length :] for one in prompts(list(samples), tokenizer)]  # which end where it goes on
        else:
            pairs = [(text,) if isinstance(text, str) else text for text in samples]
            first, *rest = (list(part) for part in zip(*pairs, strict=True))
            ids = tokenizer.encode(first, rest[0] if rest else None, self.max_length)
        split = TokenSplit.of(ids, [0] * len(ids), padding=self.padding, longest=self.max_length, generates=False)
        return split.take(slice(None))[0]

    def _require_predicted(self, split: str, samples: TokenSplit) -> None:
        """Refuse prompts that are all too long, and tell of some that are: their samples count in N and add nothing."""
        told = int((samples.labels >= samples.lengths(slice(None))).sum())
        longer = f"more: all prompts of the {split} split are longer, and nothing is left to predict"
        require(told < len(samples), "dataset.max_length", self.max_length, longer)
        if told:
            warnings.warn(
                f"dataset.max_length={self.max_length}: of {len(samples):,} samples of the {split} split {told:,} have "
                "longer prompts, and nothing is left to predict",
                PlainWarning,
                stacklevel=2,
            )

    def _require_tokens(self, tokenizer: Tokenizer) -> None:
        if tokenizer.vocabulary > self.vocabulary:
            raise UserError(
                f"has {tokenizer.vocabulary:,} ids, but model.vocabulary={self.vocabulary}",
                field="model.tokenizer",
                value=self.tokenizer,
            )
        if tokenizer.padding not in (None, self.padding):
            raise UserError(
                f"expected {tokenizer.padding}, the padding id of model.tokenizer={self.tokenizer}",
                field="model.padding",
                value=self.padding,
            )

    def _prompts(self, texts: Texts, tokenizer: Tokenizer) -> Prompts:
        references: dict[str, list[str]] = {}
        for told, said in zip(texts.first, texts.second or [], strict=True):
            references.setdefault(told, []).append(said)
        ids = prompts(list(references), tokenizer)
        return Prompts(ids, list(references.values()), tokenizer.end, tokenizer.decode)


def _texts_in(sample: object) -> int:
    """How many texts a sample is made of; 0 where it is of something else."""
    if not isinstance(sample, (list, tuple)) or not all(isinstance(part, str) for part in sample):
        return 0
    return len(sample)
