"""Vision transformers of timm, from random or pretrained weights."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from typing_extensions import override

from dpbench.data import ImageDataset
from dpbench.errors import require
from dpbench.models.base import PretrainedModel, require_transformer
from dpbench.models.inputs import colour_input
from dpbench.models.pretrained import OtherModelError, Weights, load_pretrained, train_only

TRAINED: dict[str, Callable[[str], bool]] = {
    "all": lambda name: True,
    "layers": lambda name: name not in ("cls_token", "pos_embed"),
    "head": lambda name: name.startswith("head."),
}


@dataclass
class VisionTransformer(PretrainedModel):
    """timm's ViT with a class token (Dosovitskiy et al. 2021; DOPPLER, DiSK, DP-PMLF).

    Parameters with 10 classes: 5,526,346 (tiny), 21,669,514 (small). Images are resized on the device; grey ones are
    repeated on three channels.

    Attributes:
        image_size: pixels a side to which images are resized, a multiple of the patch size.
        patch: pixels a side of a patch.
        width: of a token, a multiple of the heads.
        depth: blocks.
        heads: of the attention.
        pretrained: weights to begin with, in timm's or transformers' layout: a file (safetensors, or a state_dict),
            a folder with one, a hub repository (owner/name) or a timm model (vit_small_patch16_224.augreg_in21k); the
            head is new, and positions are interpolated to the image size. Null: random weights.
        trained: "all", "layers" (class token and positions stay; what DP-PMLF's code trains) or "head".
    """

    name: str = "vit_small"
    image_size: int = 224
    patch: int = 16
    width: int = 384
    depth: int = 12
    heads: int = 6
    trained: str = "all"

    def __post_init__(self) -> None:
        require(self.patch > 0, "model.patch", self.patch, "a whole number > 0")
        fits = self.image_size > 0 and self.image_size % self.patch == 0
        require(fits, "model.image_size", self.image_size, f"a multiple of the patch size {self.patch}")
        require_transformer(self.width, self.depth, self.heads)
        require(self.trained in TRAINED, "model.trained", self.trained, f"one of {', '.join(TRAINED)}")

    @override
    def check(self, dataset: ImageDataset) -> None:
        self._require_grey_or_colour(dataset)

    @override
    def build(self, dataset: ImageDataset) -> nn.Module:
        from timm.models import vision_transformer

        net = vision_transformer.VisionTransformer(
            img_size=self.image_size,
            patch_size=self.patch,
            embed_dim=self.width,
            depth=self.depth,
            num_heads=self.heads,
            num_classes=dataset.classes,
        )
        if self.pretrained is not None:

            def adapt(weights: Weights) -> Weights:
                named = in_timms_layout(weights)
                patches = named.get("patch_embed.proj.weight")
                # timm would resample them as it does the positions.
                if patches is not None and patches.ndim == 4 and patches.shape[-1] != self.patch:
                    raise OtherModelError(f"their patches have {patches.shape[-1]} pixels, not {self.patch}")
                return vision_transformer.checkpoint_filter_fn(named, net)

            load_pretrained(net, self.pretrained, head="head.", adapt=adapt)
        train_only(net, TRAINED[self.trained])
        return nn.Sequential(*colour_input(dataset, self.image_size), net)


# Names of transformers' ViT as its files have them, in the order in which they are replaced, and timm's.
RENAMED = (
    (r"^vit\.", ""),
    (r"^embeddings\.cls_token", "cls_token"),
    (r"^embeddings\.position_embeddings", "pos_embed"),
    (r"^embeddings\.patch_embeddings\.projection", "patch_embed.proj"),
    (r"^encoder\.layer\.", "blocks."),
    (r"attention\.output\.dense", "attn.proj"),
    (r"intermediate\.dense", "mlp.fc1"),
    (r"(?<!attention\.)output\.dense", "mlp.fc2"),
    (r"layernorm_before", "norm1"),
    (r"layernorm_after", "norm2"),
    (r"^layernorm\.", "norm."),
    (r"^classifier\.", "head."),
)


def in_timms_layout(weights: Weights) -> Weights:
    """Weights of transformers' ViT under timm's names, its queries, keys and values as one; others as they are."""
    if not any("embeddings.patch_embeddings" in name for name in weights):
        return weights
    renamed: Weights = {}
    for name, value in weights.items():
        for pattern, replacement in RENAMED:
            name = re.sub(pattern, replacement, name)
        if not name.startswith("pooler."):  # which classifies nothing
            renamed[name] = value
    for name in [name for name in renamed if ".attention.attention.query." in name]:
        parts: list[Tensor] = [renamed.pop(name.replace("query", part)) for part in ("query", "key", "value")]
        renamed[name.replace("attention.attention.query", "attn.qkv")] = torch.cat(parts)
    return renamed
