"""From texts to ids: pretrained tokenizers, and bytes."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from typing_extensions import override

from dpbench.errors import UserError

BYTES = "bytes"
# Tokenizers whose vocabularies may lie in `<data root>/tokenizers/<name>/`: transformers' class and hub repository.
KNOWN = {
    "gpt2": ("GPT2TokenizerFast", "openai-community/gpt2"),
    "roberta-base": ("RobertaTokenizerFast", "FacebookAI/roberta-base"),
    "roberta-large": ("RobertaTokenizerFast", "FacebookAI/roberta-large"),
    "bert-base-uncased": ("BertTokenizerFast", "google-bert/bert-base-uncased"),
    "bert-base-cased": ("BertTokenizerFast", "google-bert/bert-base-cased"),
}
# What a vocabulary alone does not say, and transformers takes for true.
OF_NAMES = {"bert-base-cased": {"do_lower_case": False}}
# A file that these have on the hub, as most others do.
CONFIG = "tokenizer_config.json"
# No vocabulary has fewer ids.
FEWEST = 100


class Tokenizer(Protocol):
    """Makes ids of texts.

    Attributes:
        name: tells tokenizers apart whose ids differ.
        vocabulary: number of ids.
        padding: id that fills up; None where the tokenizer has none.
        end: id that ends a text.
    """

    name: str
    vocabulary: int
    padding: int | None
    end: int

    def encode(self, first: Sequence[str], second: Sequence[str] | None, longest: int) -> list[list[int]]:
        """Ids of texts, or of pairs, with the marks around them, cut to the longest."""

    def plain(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of texts without marks."""

    def decode(self, ids: list[int]) -> str:
        """The text of ids, without marks."""


class Bytes(Tokenizer):
    """UTF-8 bytes between a start and an end mark: ids 0..255, then start, end and padding."""

    name = BYTES
    vocabulary, start, end, padding = 259, 256, 257, 258

    @override
    def encode(self, first: Sequence[str], second: Sequence[str] | None, longest: int) -> list[list[int]]:
        texts = first if second is None else [f"{a}\n{b}" for a, b in zip(first, second, strict=True)]
        return [[self.start, *ids[: longest - 2], self.end] for ids in self.plain(texts)]

    @override
    def plain(self, texts: Sequence[str]) -> list[list[int]]:
        return [list(text.encode()) for text in texts]

    @override
    def decode(self, ids: list[int]) -> str:
        return bytes(i for i in ids if i < 256).decode(errors="replace")


class Pretrained(Tokenizer):
    """A tokenizer of transformers."""

    def __init__(self, name: str, found: Any) -> None:
        self._found = found
        self.vocabulary = len(found)
        self.padding = found.pad_token_id
        self.end = found.eos_token_id if found.eos_token_id is not None else found.sep_token_id
        contents = found.backend_tokenizer.to_str()
        self.name = f"{name}-{hashlib.sha256(contents.encode()).hexdigest()[:16]}"

    @override
    def encode(self, first: Sequence[str], second: Sequence[str] | None, longest: int) -> list[list[int]]:
        texts = (list(first),) if second is None else (list(first), list(second))
        ids: list[list[int]] = self._found(*texts, truncation=True, max_length=longest)["input_ids"]
        return ids

    @override
    def plain(self, texts: Sequence[str]) -> list[list[int]]:
        ids: list[list[int]] = self._found(list(texts), add_special_tokens=False)["input_ids"]
        return ids

    @override
    def decode(self, ids: list[int]) -> str:
        return str(self._found.decode(ids, skip_special_tokens=True))


def open_tokenizer(name: str, root: Path, *, download: bool) -> Tokenizer:
    """A tokenizer by name.

    Args:
        name: "bytes"; one of `KNOWN`, from `tokenizers/<name>/` under the data root, or from the hub; a folder that
            transformers saved one to; or the id of a hub repository.
        root: data root.
        download: fetch it from the hub where it is neither here nor in the hub's cache, which is taken as it is.

    Raises:
        UserError: it is not there or can't be read.
    """
    if name == BYTES:
        return Bytes()
    import huggingface_hub
    import transformers

    source = _kind_and_source(name)[1]
    local = _local(name, root)
    here = os.path.isdir(local)  # pathlib raises where a name is longer than a file system takes
    libraries = transformers.logging, huggingface_hub.logging
    levels = [library.get_verbosity() for library in libraries]
    for library in libraries:
        library.set_verbosity(logging.ERROR)  # the hub's tells of each attempt
    try:
        if here:
            return _opened(name, str(local), local=True)
        try:
            return _opened(name, source, local=True)
        except Exception:  # of what the cache lacks
            if not download:
                raise
        _require_answer(source)
        return _opened(name, source, local=False)
    except Exception as error:  # whatever the network and the parsing of damaged files run into
        if here:
            raise _error(name, f"{local} can't be read ({type(error).__name__}); fetch its files anew") from error
        where = f"nothing in {local}" if name in KNOWN else f"no folder {local}"
        remedy = "not to be had from the hub" if download else "not in the cache of the hub"
        raise _error(
            name,
            f"{where}, and {source} is {remedy}; set data.download=true where there is a network, or put the files of "
            "the tokenizer into that folder",
        ) from error
    finally:
        for library, level in zip(libraries, levels, strict=True):
            library.set_verbosity(level)


def _require_answer(repository: str) -> None:
    """Raise whatever asking the hub for one file runs into: transformers would ask for each of them, for minutes."""
    import huggingface_hub
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    try:
        huggingface_hub.hf_hub_download(repository, CONFIG)
    except LocalEntryNotFoundError:
        raise
    except EntryNotFoundError:  # a repository without it
        return


def _opened(name: str, source: str, *, local: bool) -> Pretrained:
    """The tokenizer in a folder or a repository; raises whatever reading it runs into."""
    import transformers

    found = getattr(transformers, _kind_and_source(name)[0]).from_pretrained(
        source,
        local_files_only=local,
        trust_remote_code=False,  # without it transformers asks whoever sits at the terminal
        **OF_NAMES.get(name, {}),
    )
    opened = Pretrained(name, found)
    # Where files are missing, transformers may make a tokenizer that knows no words.
    if opened.vocabulary < FEWEST:
        raise FileNotFoundError
    return opened


def tokenizer_here(name: str, root: Path) -> bool:
    """Whether `open_tokenizer` would find files of it without a network; reads none of them."""
    if name == BYTES:
        return True
    if os.path.isdir(_local(name, root)):
        return True
    import huggingface_hub

    try:
        found = huggingface_hub.try_to_load_from_cache(_kind_and_source(name)[1], CONFIG)
    except ValueError:  # no name of a repository
        return False
    return isinstance(found, str)


def _local(name: str, root: Path) -> Path:
    """The folder that a tokenizer may lie in."""
    return root / "tokenizers" / name if name in KNOWN else Path(name).expanduser()


def _kind_and_source(name: str) -> tuple[str, str]:
    """The class of transformers that reads a tokenizer, and its repository on the hub."""
    return KNOWN.get(name, ("AutoTokenizer", name))


def _error(name: str, message: str) -> UserError:
    return UserError(message, field="model.tokenizer", value=name)
