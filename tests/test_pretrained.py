"""Models that begin with weights from elsewhere, which these tests make themselves."""

import hashlib
from dataclasses import replace

import huggingface_hub
import pytest
import torch
from helpers import assembled, composed
from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError
from safetensors.torch import save_file
from timm.models.vision_transformer import VisionTransformer
from transformers import ViTConfig, ViTForImageClassification, ViTModel

from dpbench import models
from dpbench.data import ImageDataset
from dpbench.errors import UserError
from dpbench.models.pretrained import weights_digest, weights_here

CIFAR10 = ImageDataset("cifar10", channels=3, height=32, width=32, mean=[0.0] * 3, std=[1.0] * 3)


def tiny(source, **settings):
    return models.VisionTransformer(
        **{"image_size": 32, "patch": 8, "width": 24, "heads": 3, "depth": 2, "pretrained": str(source), **settings}
    )


def built(source, **settings):
    """The network behind the layers that prepare images."""
    return tiny(source, **settings).build(CIFAR10)[-1]


def timms(classes=7, size=32):
    torch.manual_seed(3)
    return VisionTransformer(img_size=size, patch_size=8, embed_dim=24, depth=2, num_heads=3, num_classes=classes)


@pytest.fixture
def saved(tmp_path):
    model = timms()
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    return model, tmp_path / "model.safetensors"


def assert_same_features(net, want):
    x = torch.rand(2, 3, 32, 32)
    torch.testing.assert_close(net.forward_features(x)[:, 0], want(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["file", "folder", "state_dict", "checkpoint"])
def test_weights_in_timms_layout(saved, kind, tmp_path):
    model, file = saved
    source = file.parent if kind == "folder" else file
    if kind in ("state_dict", "checkpoint"):
        source = tmp_path / "weights.pth"
        weights = model.state_dict()
        torch.save({"model": weights} if kind == "checkpoint" else weights, source)
    net = built(source)
    assert_same_features(net, lambda x: model.forward_features(x)[:, 0])
    assert net.head.weight.shape == (10, 24)


def test_the_head_is_new_even_for_as_many_classes(saved, tmp_path):
    model = timms(classes=10)
    save_file(model.state_dict(), tmp_path / "ten.safetensors")
    assert not torch.equal(built(tmp_path / "ten.safetensors").head.weight, model.head.weight)


@pytest.mark.parametrize("pooled", [False, True], ids=["classifier", "body with a pooler"])
def test_weights_in_the_layout_of_transformers(pooled, tmp_path):
    torch.manual_seed(4)
    config = ViTConfig(
        hidden_size=24,
        num_hidden_layers=2,
        num_attention_heads=3,
        intermediate_size=96,
        image_size=32,
        patch_size=8,
        num_labels=5,
    )
    model = ViTModel(config, add_pooling_layer=True).eval() if pooled else ViTForImageClassification(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(tmp_path)
    body = model if pooled else model.vit
    assert_same_features(built(tmp_path), lambda x: body(pixel_values=x).last_hidden_state[:, 0].detach())


def test_positions_are_interpolated_to_the_image_size(saved):
    model, file = saved
    net = built(file, image_size=64)
    assert net.pos_embed.shape == (1, 65, 24)
    # A field of positions that is constant stays so, whatever the interpolation; the class token's stays its own.
    with torch.no_grad():
        model.pos_embed[:, 1:] = 0.25
    save_file(model.state_dict(), file)
    grown = built(file, image_size=64).pos_embed
    torch.testing.assert_close(grown[:, 1:], torch.full((1, 64, 24), 0.25))
    torch.testing.assert_close(grown[:, 0], model.pos_embed[:, 0])


def test_only_the_new_head_is_trained_by_a_private_step(saved):
    model, file = saved
    config = composed("dataset=cifar10", "model=vit_small", "batch_size=10")
    parts = assembled(replace(config, model=tiny(file, trained="head")))
    assert len(parts.step.gradients.flat.vector) == 24 * 10 + 10
    before = parts.model[-1].head.weight.clone()
    parts.step([(torch.randn(4, 3, 32, 32), torch.arange(4))])
    assert not torch.equal(parts.model[-1].head.weight, before)
    assert torch.equal(parts.model[-1].blocks[0].attn.qkv.weight, model.blocks[0].attn.qkv.weight)


def test_network_of_cifar100_is_fine_tuned_on_cifar10(tmp_path):
    """ADP's practice: everything but the last layer comes from the other data set."""
    torch.manual_seed(0)
    trained = models.AbadiCNN().build(replace(CIFAR10, name="cifar100", classes=100))
    save_file(trained.state_dict(), tmp_path / "cifar100.safetensors")
    net = models.AbadiCNN(pretrained=str(tmp_path / "cifar100.safetensors")).build(CIFAR10)
    assert net.head.weight.shape == (10, 384)
    for name, value in trained.state_dict().items():
        assert name.startswith("head") or torch.equal(net.state_dict()[name], value)


# Weights that are not there


def refusal(source, **settings):
    with pytest.raises(UserError) as caught:
        built(source, **settings)
    text = str(caught.value)
    assert text.startswith(f"model.pretrained={source}: ")
    assert "\n" not in text
    return text.removeprefix(f"model.pretrained={source}: ")


def test_missing_files_and_folders_without_weights(tmp_path):
    for source in (tmp_path / "none.safetensors", "weights.pth", "./vit"):
        assert refusal(source).startswith("there is no such file or folder; name one, or a Hugging Face repository")
    assert refusal(tmp_path) == "the folder holds no model.safetensors or pytorch_model.bin"


def test_damaged_files(saved):
    _, file = saved
    file.write_bytes(file.read_bytes()[:500])
    assert "model.safetensors can't be read as weights" in refusal(file)


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"depth": 3}, "they lack blocks.2.norm1.weight"),
        ({"depth": 1}, "they have blocks.1.attn.proj.bias besides"),
        ({"width": 48}, "cls_token has shape (1, 1, 24), not (1, 1, 48)"),
    ],
)
def test_weights_of_another_model(saved, settings, complaint):
    assert refusal(saved[1], **settings) == f"these are weights of another model: {complaint}"


def test_weights_for_patches_of_another_size(tmp_path):
    """timm would resample the patches, as it does the positions."""
    other = VisionTransformer(img_size=32, patch_size=16, embed_dim=24, depth=2, num_heads=3, num_classes=7)
    save_file(other.state_dict(), tmp_path / "model.safetensors")
    complaint = "these are weights of another model: their patches have 16 pixels, not 8"
    assert refusal(tmp_path / "model.safetensors") == complaint


def test_weights_of_models_that_resemble_a_vit(saved):
    """Keys without bias, as BEiT's; positions that are no square, as those of distilled DeiT."""
    model, file = saved
    weights = model.state_dict()
    save_file({**weights, "pos_embed": torch.zeros(1, 18, 24)}, file)
    assert refusal(file, image_size=64).startswith("these are weights of another model: they are laid out otherwise (")
    layer = "beit.encoder.layer.0.attention.attention"
    names = ("beit.embeddings.patch_embeddings.projection.weight", f"{layer}.query.bias", f"{layer}.value.bias")
    save_file({name: torch.zeros(24) for name in names}, file)
    complaint = "these are weights of another model: they are laid out otherwise (KeyError: "
    assert refusal(file).startswith(complaint)


@pytest.fixture
def hub(monkeypatch):
    """A hub that holds the given files; whoever asks is noted."""
    asked, files = [], {}

    def download(repository, name):
        asked.append((repository, name))
        if (repository, name) not in files:
            raise files.get("error", EntryNotFoundError("no such file"))
        return str(files[repository, name])

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    return asked, files


@pytest.mark.parametrize(
    ("source", "repository"),
    [
        ("owner/vit", "owner/vit"),
        ("hf-hub:owner/vit", "owner/vit"),
        ("vit_small_patch16_224.augreg_in21k", "timm/vit_small_patch16_224.augreg_in21k"),
        # As timm.create_model(..., pretrained=True) takes it; there is no repository of the bare name.
        ("vit_small_patch16_224", "timm/vit_small_patch16_224.augreg_in21k_ft_in1k"),
    ],
)
@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_weights_come_from_the_hub(saved, hub, source, repository, name):
    model, file = saved
    asked, files = hub
    files[repository, name] = file.with_name(name)
    if name.endswith(".bin"):
        torch.save(model.state_dict(), file.with_name(name))
    assert_same_features(built(source), lambda x: model.forward_features(x)[:, 0])
    assert asked[-1] == (repository, name)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (LocalEntryNotFoundError("offline"), "not in its cache, and it does not answer"),
        (EntryNotFoundError("empty"), "it holds no model.safetensors or pytorch_model.bin"),
        (OSError("refused"), "OSError"),
        (ZeroDivisionError("of a library below"), "ZeroDivisionError"),
    ],
)
def test_a_hub_that_has_no_weights_is_one_sentence(hub, error, reason):
    asked, files = hub
    files["error"] = error
    text = refusal("owner/vit")
    assert text.startswith(
        f"no such file or folder, and owner/vit can't be fetched from the Hugging Face hub ({reason})"
    )
    assert "set model.pretrained to that file" in text
    assert len(asked) == (2 if "holds" in reason else 1)


def test_weights_in_the_hubs_cache_are_found_without_a_network(tmp_path, monkeypatch):
    """Of a repository that has the older kind of file alone; the hub is not asked."""
    model, snapshot = timms(), "0123456789" * 4
    for folder in ("refs", f"snapshots/{snapshot}"):
        (tmp_path / "models--owner--vit" / folder).mkdir(parents=True)
    (tmp_path / "models--owner--vit/refs/main").write_text(snapshot)
    torch.save(model.state_dict(), tmp_path / f"models--owner--vit/snapshots/{snapshot}/pytorch_model.bin")
    asked, download = [], huggingface_hub.hf_hub_download
    digest = hashlib.sha256((tmp_path / f"models--owner--vit/snapshots/{snapshot}/pytorch_model.bin").read_bytes())
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda *of: asked.append(of[1]) or download(*of))
    assert weights_here("owner/vit")
    assert_same_features(built("owner/vit"), lambda x: model.forward_features(x)[:, 0])
    assert weights_digest("owner/vit") == digest.hexdigest()
    assert asked == []
    assert not weights_here("owner/other")
    assert "(not in its cache, and it does not answer)" in refusal("owner/other")
    assert asked == ["model.safetensors"]
