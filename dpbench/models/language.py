"""Language models of transformers, from random or pretrained weights."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from dpbench.data import Dataset
from dpbench.errors import require
from dpbench.models.base import PretrainedModel, require_transformer
from dpbench.models.pretrained import OtherModelError, Weights, load_pretrained, train_only
from dpbench.models.text import TextModel

FAMILIES = ("roberta", "bert")
TRAINED = ("all", "head", "last_layer", "lora")
# Where LoRA's factors go, as in Hu et al. 2022.
LORA_TARGETS = ["query", "value"]


@dataclass
class PretrainedText(PretrainedModel, TextModel):
    """Settings of a language model.

    Attributes:
        width: of a token, a multiple of the heads.
        depth: layers.
        heads: of the attention.
        dropout: share of values that are dropped in training, everywhere.
        pretrained: weights to begin with: a file, a folder with one, or a hub repository (owner/name); the head of a
            classifier is new. Null: random weights.
    """

    width: int = 768
    depth: int = 12
    heads: int = 12
    dropout: float = 0.1

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        require_transformer(self.width, self.depth, self.heads)
        require(0 <= self.dropout < 1, "model.dropout", self.dropout, "a number in [0, 1)")


@dataclass
class TextEncoder(PretrainedText):
    """RoBERTa or BERT with a new classification head (DOPPLER, DiSK, DP-PMLF; DC-SGD).

    Parameters with 2 classes: 124,647,170 (roberta_base), 355,361,794 (roberta_large); of bert_base 7,680,002 are
    trained where `trained` is last_layer. The tokens of a pair's second text are told from the first by the separator.

    Attributes:
        family: "roberta" or "bert".
        separator: id of BERT's mark between two texts.
        trained: "all"; "head"; "last_layer", with pooler and head; or "lora", factors of the queries and values in
            the place of the layers, with the head.
        lora_rank: of the factors.
    """

    family: str = "roberta"
    separator: int = 102
    trained: str = "all"
    lora_rank: int = 16

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.family in FAMILIES, "model.family", self.family, f"one of {', '.join(FAMILIES)}")
        require(self.trained in TRAINED, "model.trained", self.trained, f"one of {', '.join(TRAINED)}")
        require(self.lora_rank > 0, "model.lora_rank", self.lora_rank, "a whole number > 0")

    @override
    def build(self, dataset: Dataset) -> nn.Module:
        import transformers

        of_roberta = self.family == "roberta"
        settings: dict[str, Any] = {
            "vocab_size": self.vocabulary,
            "hidden_size": self.width,
            "num_hidden_layers": self.depth,
            "num_attention_heads": self.heads,
            "intermediate_size": 4 * self.width,
            # RoBERTa counts positions from behind the padding id.
            "max_position_embeddings": self.longest + (self.padding + 1 if of_roberta else 0),
            "type_vocab_size": 1 if of_roberta else 2,
            "layer_norm_eps": 1e-5 if of_roberta else 1e-12,
            "hidden_dropout_prob": self.dropout,
            "attention_probs_dropout_prob": self.dropout,
            "pad_token_id": self.padding,
            "num_labels": dataset.classes,
        }
        net: Any
        if of_roberta:
            net = transformers.RobertaForSequenceClassification(transformers.RobertaConfig(**settings))
        else:
            net = transformers.BertForSequenceClassification(transformers.BertConfig(**settings))
        if self.pretrained is not None:
            load_pretrained(net, self.pretrained, head="classifier.", adapt=_body(self.family))
        train_only(net, self._trains)
        if self.trained == "lora":
            net = self._with_factors(net)
        return _Classifier(net, self.padding, None if of_roberta else self.separator)

    def _trains(self, name: str) -> bool:
        last = f"{self.family}.encoder.layer.{self.depth - 1}."
        ends = ("classifier.", *((last, f"{self.family}.pooler.") if self.trained == "last_layer" else ()))
        return self.trained == "all" or name.startswith(ends)

    def _with_factors(self, net: nn.Module) -> nn.Module:
        import peft

        settings = peft.LoraConfig(
            task_type="SEQ_CLS",
            r=self.lora_rank,
            lora_alpha=self.lora_rank,
            lora_dropout=0.0,
            target_modules=LORA_TARGETS,
        )
        with warnings.catch_warnings():
            # peft asks for it by a name that transformers is giving up.
            warnings.filterwarnings("ignore", ".*is_gradient_checkpointing.* is deprecated", FutureWarning)
            found: nn.Module = peft.get_peft_model(net, settings)
        return found


class _Classifier(nn.Module):
    """A classifier of transformers as a function of ids."""

    def __init__(self, net: nn.Module, padding: int, separator: int | None) -> None:
        super().__init__()
        self.net = net
        self.padding = padding
        self.separator = separator

    @override
    def forward(self, ids: Tensor) -> Tensor:
        more = {}
        if self.separator is not None:
            separators = ids == self.separator
            second = separators.cumsum(1) - separators.long() > 0
            more["token_type_ids"] = (second & (ids != self.padding)).long()
        # As attention takes it: of a mask of two dimensions the library asks, on the host, whether it hides anything.
        seen = (ids != self.padding)[:, None, None, :]
        logits: Tensor = self.net(input_ids=ids, attention_mask=seen, **more).logits
        return logits


@dataclass
class GPT2(PretrainedText):
    """GPT-2, whose head is tied to its token embedding (DiSK); 124,439,808 parameters in the small one.

    Padding comes after a sample's tokens, which do not see it, so there is no mask.
    """

    name: str = "gpt2"
    tokenizer: str = "gpt2"
    vocabulary: int = 50257
    padding: int = 50256
    longest: int = 1024

    @property
    @override
    def generates(self) -> bool:
        return True

    @override
    def build(self, dataset: Dataset) -> nn.Module:
        import transformers

        net = transformers.GPT2LMHeadModel(
            transformers.GPT2Config(
                vocab_size=self.vocabulary,
                n_positions=self.longest,
                n_embd=self.width,
                n_layer=self.depth,
                n_head=self.heads,
                resid_pdrop=self.dropout,
                embd_pdrop=self.dropout,
                attn_pdrop=self.dropout,
                bos_token_id=self.padding,
                eos_token_id=self.padding,
            )
        )
        if self.pretrained is not None:
            load_pretrained(net, self.pretrained, adapt=_tied)
        return NextToken(net)


class NextToken(nn.Module):
    """A language model of transformers as a function of ids.

    Attributes:
        net: which can generate.
    """

    def __init__(self, net: Any) -> None:
        super().__init__()
        self.net = net

    @override
    def forward(self, ids: Tensor) -> Tensor:
        """Logits (B, T, V) of the tokens behind ids (B, T)."""
        logits: Tensor = self.net(input_ids=ids, use_cache=False).logits
        return logits


def _body(family: str) -> Callable[[Weights], Weights]:
    """What a checkpoint of masked language modelling, or of the model without a head, has for a classifier."""

    def adapt(weights: Weights) -> Weights:
        kept: Weights = {}
        bare = not any(name.startswith(f"{family}.") for name in weights)
        for name, value in weights.items():
            name = f"{family}.{name}" if bare else name
            name = re.sub(r"LayerNorm\.gamma$", "LayerNorm.weight", re.sub(r"LayerNorm\.beta$", "LayerNorm.bias", name))
            if name.endswith("position_ids") or (family == "roberta" and name.startswith("roberta.pooler.")):
                continue
            if name.startswith((f"{family}.", "classifier.")):
                kept[name] = value
        return kept

    return adapt


def _tied(weights: Weights) -> Weights:
    """GPT-2's weights as its published files have them, with or without prefix and masks, and with the tied head."""
    own = ("transformer.", "lm_head.")
    named = {name if name.startswith(own) else f"transformer.{name}": value for name, value in weights.items()}
    kept = {name: value for name, value in named.items() if not re.search(r"\.attn\.(masked_)?bias$", name)}
    embedding = kept.get("transformer.wte.weight")
    if embedding is not None:
        if not torch.equal(kept.get("lm_head.weight", embedding), embedding):
            raise OtherModelError("their head is not the embedding of the tokens")
        kept["lm_head.weight"] = embedding
    return kept
