"""Texts as tokens, made once and kept."""

from __future__ import annotations

from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from dpbench import cache
from dpbench.data.tokenizers import Tokenizer
from dpbench.data.tokens import TokenSplit


class Texts(NamedTuple):
    """Samples as people read them.

    Attributes:
        first: texts; for language models what they are told.
        second: second texts of pairs; for language models what they are to say.
        labels: classes; None for language models.
    """

    first: list[str]
    second: list[str] | None
    labels: list[int] | None


def encoded(texts: Texts, tokenizer: Tokenizer, *, padding: int, longest: int) -> TokenSplit:
    """A split as tokens; from the cache where it was made before.

    A text to be continued is followed by the mark that ends texts, then comes what is to be said, then that mark again.

    Args:
        texts: of the split.
        tokenizer: makes ids of them.
        padding: id that fills up.
        longest: most tokens of a sample, the rest is cut off.
    """
    generates = texts.labels is None
    what = [*texts, tokenizer.name, longest]

    def make() -> TokenSplit:
        if texts.labels is not None:
            samples, labels = tokenizer.encode(texts.first, texts.second, longest), texts.labels
        else:
            told = prompts(texts.first, tokenizer)
            said = tokenizer.plain([f" {text}" for text in texts.second or []])
            samples = [[*a, *b, tokenizer.end][: longest + 1] for a, b in zip(told, said, strict=True)]
            labels = [len(ids) for ids in told]
        return TokenSplit.of(samples, labels, padding=padding, longest=longest, generates=generates)

    tokens, starts, labels = _kept(cache.place("tokens", what, ".npz"), make)
    return TokenSplit(tokens, starts, labels, padding, longest, generates)


def prompts(texts: list[str], tokenizer: Tokenizer) -> list[list[int]]:
    """What a language model is given to continue."""
    return [[*ids, tokenizer.end] for ids in tokenizer.plain(texts)]


def _kept(path: Path, make: Callable[[], TokenSplit]) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, starts and labels of a file, which is made where there is none that can be read; best effort."""
    names = ("tokens", "starts", "labels")
    try:
        with np.load(path) as archive:
            tokens, starts, labels = (torch.from_numpy(archive[name]) for name in names)
            return tokens, starts, labels
    except Exception:  # whatever the parsing of a damaged file runs into
        made = make()
    archive = BytesIO()
    np.savez(archive, **{name: getattr(made, name).numpy() for name in names})
    cache.replace(path, archive.getvalue())
    return made.tokens, made.starts, made.labels
