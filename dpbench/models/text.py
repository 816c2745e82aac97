"""Models of text: ids (B, T) that are filled up with the padding id."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from typing_extensions import override

from dpbench.data import Dataset, TextDataset
from dpbench.errors import UserError, require
from dpbench.models.base import Model, require_transformer


@dataclass
class TextModel(Model):
    """Settings of a model of text, which maps ids (B, T) to logits.

    Attributes:
        tokenizer: that makes its ids; see `dpbench.data.tokenizers.open_tokenizer`.
        vocabulary: number of ids, V.
        padding: id that fills samples up, which the model ignores.
        longest: most tokens of an input.
    """

    tokenizer: str = "bert-base-uncased"
    vocabulary: int = 30522
    padding: int = 0
    longest: int = 512

    def __post_init__(self) -> None:
        require(self.vocabulary > 0, "model.vocabulary", self.vocabulary, "a whole number > 0")
        known = 0 <= self.padding < self.vocabulary
        require(known, "model.padding", self.padding, f"an id below model.vocabulary={self.vocabulary}")
        require(self.longest > 0, "model.longest", self.longest, "a whole number > 0")

    @override
    def check(self, dataset: Dataset) -> None:
        if not isinstance(dataset, TextDataset):
            raise self._misfit("texts", dataset)
        most = dataset.max_length
        require(most <= self.longest, "dataset.max_length", most, f"at most the {self.longest} of model={self.name}")
        if dataset.generates != self.generates:
            task = "continues texts" if self.generates else "classifies texts"
            other = "has texts to continue" if dataset.generates else "has classes"
            raise UserError(f"{task}, but dataset={dataset.name} {other}", field="model", value=self.name)

    @property
    def generates(self) -> bool:
        """Whether it gives logits of the next token, (B, T, V); else of the classes, (B, classes)."""
        return False


@dataclass
class SmallTransformer(TextModel):
    """A transformer encoder for training from scratch: pre-norm blocks, whose outputs are averaged over the tokens.

    Attributes:
        width: of a token, a multiple of the heads.
        depth: blocks.
        heads: of the attention.
    """

    name: str = "text_small"
    width: int = 64
    depth: int = 1
    heads: int = 4

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        require_transformer(self.width, self.depth, self.heads)

    @override
    def build(self, dataset: Dataset) -> nn.Module:
        return _Averaging(self, dataset.classes)


class _Averaging(nn.Module):
    """The module of `SmallTransformer`."""

    def __init__(self, settings: SmallTransformer, classes: int) -> None:
        super().__init__()
        width, heads = settings.width, settings.heads
        self.padding = settings.padding
        self.words = nn.Embedding(settings.vocabulary, width)
        self.places = nn.Embedding(settings.longest, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, heads, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(settings.depth)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)

    @override
    def forward(self, ids: Tensor) -> Tensor:
        filling = ids == self.padding
        x = self.words(ids) + self.places(torch.arange(ids.shape[1], device=ids.device).unsqueeze(0))
        # An attention that may look at nothing is NaN; what an empty text looks at does not matter, none of it is kept.
        unseen = filling & ~filling.all(1, keepdim=True)
        for block in self.blocks:
            x = block(x, src_key_padding_mask=unseen)
        kept = (~filling).unsqueeze(-1).to(x.dtype)
        logits: Tensor = self.head((self.norm(x) * kept).sum(1) / kept.sum(1).clamp(min=1))
        return logits


@dataclass
class CharacterLSTM(TextModel):
    """Two layers of LSTM over bytes (DC-SGD, names; sizes of the example that comes with Opacus).

    Attributes:
        embedded: width of a byte.
        hidden: width of the layers.
        depth: layers.
    """

    name: str = "lstm"
    tokenizer: str = "bytes"
    vocabulary: int = 259
    padding: int = 258
    embedded: int = 64
    hidden: int = 128
    depth: int = 2

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("embedded", "hidden", "depth"):
            require(getattr(self, name) > 0, f"model.{name}", getattr(self, name), "a whole number > 0")

    @override
    def build(self, dataset: Dataset) -> nn.Module:
        return _LastState(self, dataset.classes)


class _LastState(nn.Module):
    """The module of `CharacterLSTM`: what the last layer says at the last token."""

    def __init__(self, settings: CharacterLSTM, classes: int) -> None:
        super().__init__()
        self.padding = settings.padding
        self.table = nn.Embedding(settings.vocabulary, settings.embedded)
        self.lstm = nn.LSTM(settings.embedded, settings.hidden, settings.depth, batch_first=True)
        self.head = nn.Linear(settings.hidden, classes)

    @override
    def forward(self, ids: Tensor) -> Tensor:
        outputs, _ = self.lstm(self.table(ids))
        last = ((ids != self.padding).sum(1) - 1).clamp(min=0)
        where = last.view(-1, 1, 1).expand(-1, 1, outputs.shape[2])
        logits: Tensor = self.head(outputs.gather(1, where).squeeze(1))
        return logits
