"""What is measured: models, each with a batch of random data."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn
from typing_extensions import override

from dpbench.config import compose_jobs
from dpbench.data import ImageDataset
from dpbench.gradients import FlatParameters, PerSampleGradients
from dpbench.models import CNN5, Model, WideResNet
from dpbench.training.losses import per_sample_loss

# Built model, inputs and targets of a batch.
Built = tuple[nn.Module, Tensor, Tensor]


@dataclass(frozen=True)
class Case:
    """A model and one batch, on a device.

    Attributes:
        model: maps inputs (B, ...) to logits; in training mode, all parameters trained.
        inputs: shape (B, ...).
        targets: labels, shape (B,); the loss of all cases is cross-entropy.
    """

    model: nn.Module
    inputs: Tensor
    targets: Tensor

    @property
    def batch(self) -> int:
        """Batch size B."""
        return len(self.inputs)

    @property
    def device(self) -> torch.device:
        """Where model and batch are."""
        return self.inputs.device

    def copy(self) -> nn.Module:
        """A model of one's own."""
        return deepcopy(self.model)

    @cached_property
    def gradients(self) -> PerSampleGradients:
        """dpbench's, of a copy of the model; all that dpbench computes shares them.

        Finding the way to a model's gradients and comparing them with autograd's takes longer than all that is timed.
        """
        model = self.copy()
        return PerSampleGradients(model, FlatParameters(model), per_sample_loss)


@dataclass(frozen=True)
class Spec:
    """How a case is made.

    Attributes:
        title: the model as a table names it.
        build: maps batch size and whether to build a small version (for tests) to model and batch.
        batch: batch size by type of device.
    """

    title: str
    build: Callable[[int, bool], Built]
    batch: dict[str, int]


SMALL_BATCH = 6


class Logits(nn.Module):
    """A transformers model that takes one tensor and returns logits."""

    def __init__(self, model: nn.Module, argument: str) -> None:
        super().__init__()
        self.model = model
        self.argument = argument

    @override
    def forward(self, x: Tensor) -> Tensor:
        """Logits of a batch."""
        logits: Tensor = self.model(**{self.argument: x}).logits
        return logits


def _on_images(settings: Model, dataset_name: str, batch: int) -> Built:
    dataset = compose_jobs([f"dataset={dataset_name}"], multirun=False)[0].config.dataset
    assert isinstance(dataset, ImageDataset)
    inputs = torch.randn(batch, dataset.channels, dataset.height, dataset.width)
    return settings.build(dataset), inputs, torch.randint(dataset.classes, (batch,))


def _cnn5_28(batch: int, small: bool) -> Built:
    return _on_images(CNN5(), "mnist", batch)


def _cnn5_32(batch: int, small: bool) -> Built:
    return _on_images(CNN5(), "cifar10", batch)


def _wide_resnet(batch: int, small: bool, *, standardised: bool) -> Built:
    depth, width = (10, 1) if small else (16, 4)
    return _on_images(WideResNet(depth=depth, width=width, weight_standardised=standardised), "cifar10", batch)


def _wrn(batch: int, small: bool) -> Built:
    return _wide_resnet(batch, small, standardised=False)


def _wrn_ws(batch: int, small: bool) -> Built:
    return _wide_resnet(batch, small, standardised=True)


def _vit(batch: int, small: bool) -> Built:
    from transformers import ViTConfig, ViTForImageClassification

    pixels, width, layers, heads = (32, 24, 2, 3) if small else (224, 192, 12, 3)
    config = ViTConfig(
        image_size=pixels,
        patch_size=16,
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    config.num_labels = 10
    model = Logits(ViTForImageClassification(config), "pixel_values")
    return model, torch.randn(batch, 3, pixels, pixels), torch.randint(10, (batch,))


def _roberta(batch: int, small: bool) -> Built:
    from transformers import RobertaConfig, RobertaForSequenceClassification

    vocabulary, tokens, width, layers = (200, 8, 16, 1) if small else (50265, 64, 256, 4)
    config = RobertaConfig(
        vocab_size=vocabulary,
        max_position_embeddings=514,
        type_vocab_size=1,
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    config.num_labels = 2
    model = Logits(RobertaForSequenceClassification(config), "input_ids")
    # Ids below 5 are special tokens (padding, mask, ...).
    return model, torch.randint(5, vocabulary, (batch, tokens)), torch.randint(2, (batch,))


SPECS: dict[str, Spec] = {
    "cnn5_28": Spec("CNN-5, 28 px", _cnn5_28, {"cpu": 256, "cuda": 1024}),
    "cnn5_32": Spec("CNN-5, 32 px", _cnn5_32, {"cpu": 256, "cuda": 1024}),
    "wrn": Spec("WRN-16-4, group norm", _wrn, {"cpu": 32, "cuda": 256}),
    "wrn_ws": Spec("WRN-16-4, group norm, standardised weights", _wrn_ws, {"cpu": 32, "cuda": 256}),
    "roberta": Spec("RoBERTa, 4 layers, width 256, 64 tokens", _roberta, {"cpu": 32, "cuda": 128}),
    "vit": Spec("ViT-tiny, 224 px", _vit, {"cpu": 16, "cuda": 128}),
}


def build_case(name: str, device: torch.device, *, small: bool = False) -> Case:
    """The named model with a batch of random data, the same at every call."""
    spec = SPECS[name]
    torch.manual_seed(0)
    model, inputs, targets = spec.build(SMALL_BATCH if small else spec.batch[device.type], small)
    return Case(model.to(device).train(), inputs.to(device), targets.to(device))
