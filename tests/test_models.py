import math
import re
from types import SimpleNamespace

import numpy as np
import pytest
import timm
import torch
from helpers import composed
from model_references import IN_ORDER, averaging_transformer, last_state_lstm, wide_resnet
from peft.tuners.lora import LoraLayer
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torchvision.transforms.v2.functional import resize

from dpbench import models
from dpbench.config import compose_jobs
from dpbench.data import ImageDataset
from dpbench.errors import UserError
from dpbench.models.inputs import Resize
from dpbench.models.layers import StdConv2d, WSConv2d


def built(dataset, model, *overrides):
    config = compose_jobs([f"dataset={dataset}", f"model={model}", *overrides], multirun=False)[0].config
    return config.model.build(config.dataset), config.dataset


def built_nowhere(*overrides):
    """A large model without its weights."""
    config = composed(*overrides, "model.pretrained=null")
    with torch.device("meta"):
        return config.model.build(config.dataset)


@pytest.mark.parametrize(
    ("dataset", "model", "parameters"),
    [
        ("mnist", "cnn_small", 28_058),
        ("fashion_mnist", "cnn_small", 28_058),
        ("mnist", "linear", 7_850),
        ("mnist", "cnn5", 411_850),
        ("cifar10", "cnn5", 412_426),
        ("cifar100", "cnn5", 619_876),
        ("digits", "mlp", 64 * 64 + 64 + 64 * 10 + 10),
        ("digits", "linear", 650),
        ("mnist", "cnn_small_grey", 26_010),
        ("cifar10", "cnn_abadi", 4_864 + 102_464 + 1_573_248 + 147_840 + 3_850),
        ("cifar10", "resnet18", 11_181_642),
        ("svhn", "resnet18", 11_181_642),
        ("cifar100", "resnet18", 11_227_812),
        ("cifar10", "resnet34", 21_289_802),
        ("cifar10", "resnet50_bit", 23_520_842),
        ("cifar10", "resnet50", 25_557_032 - 990 * 2049 + 26_560),  # torchvision's of 10 classes, and a gain per filter
        ("cifar10", "efficientnet_b0", 5_288_548 - 990 * 1281),  # torchvision's with 1000 classes, less the head's
        ("cifar10", "wrn_16_4", 2_753_818),
        ("cifar10", "wrn_40_4", 8_961_306),
    ],
)
def test_models_have_the_papers_parameter_counts_and_map_to_logits(dataset, model, parameters):
    module, data = built(dataset, model)
    assert sum(p.numel() for p in module.parameters()) == parameters
    assert module(torch.rand(3, data.channels, data.height, data.width)).shape == (3, data.classes)


def drawn(module):
    """The module in double precision, all of its parameters drawn: a norm that begins with 1 and 0 could hide."""
    generator = torch.Generator().manual_seed(0)
    for parameter in module.double().parameters():
        fan = max(1, parameter[0].numel())
        parameter.data = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) / fan**0.5
    return module


@pytest.mark.parametrize(
    ("dataset", "model"),
    [("mnist", "cnn5"), ("cifar10", "cnn5"), ("mnist", "cnn_small"), ("cifar10", "cnn_abadi"), ("digits", "mlp")],
)
@torch.no_grad()
def test_models_compute_what_their_descriptions_say(dataset, model):
    module, data = built(dataset, model)
    drawn(module)
    x = torch.rand(3, data.channels, data.height, data.width, dtype=torch.float64)
    parameters = iter(list(module.parameters()))
    expected = IN_ORDER[model](parameters, x)
    assert next(parameters, None) is None
    assert expected.std(0).min() > 1e-3
    torch.testing.assert_close(module(x), expected)


@torch.no_grad()
def test_a_wide_residual_network_computes_what_its_description_says():
    module, _ = built("cifar10", "wrn_16_4")
    drawn(module)
    x = torch.rand(3, 3, 32, 32, dtype=torch.float64)
    expected = wide_resnet(module.state_dict(), x)
    assert expected.std(0).min() > 1e-3
    torch.testing.assert_close(module(x), expected)


@pytest.mark.parametrize(
    ("settings", "reference"),
    [
        (
            models.SmallTransformer(vocabulary=20, padding=7, longest=6, width=6, heads=2, depth=2),
            lambda p, ids: averaging_transformer(p, ids, heads=2, depth=2),
        ),
        (
            models.CharacterLSTM(vocabulary=20, padding=7, longest=6, embedded=3, hidden=4, depth=2),
            lambda p, ids: last_state_lstm(p, ids, depth=2),
        ),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
@torch.no_grad()
def test_models_of_text_compute_of_each_text_what_their_descriptions_say(settings, reference):
    module = drawn(settings.build(SimpleNamespace(classes=3))).train()
    texts = [[3, 1, 4, 1, 5, 9], [2, 6, 5], [8]]
    filled = torch.tensor([text + [7] * (6 - len(text)) for text in texts])
    expected = [reference(iter(list(module.parameters())), torch.tensor(text)) for text in texts]
    torch.testing.assert_close(module(filled), torch.stack(expected))


@torch.no_grad()
def test_bert_tells_the_second_text_of_a_pair_from_the_first():
    """Types as the paper has them: the first mark belongs to the first text, the last one to the second."""
    sizes = {"vocabulary": 20, "longest": 8, "width": 8, "depth": 1, "heads": 2, "dropout": 0.0}
    module = drawn(
        models.TextEncoder(name="bert", family="bert", separator=9, **sizes).build(SimpleNamespace(classes=3))
    )
    ids = torch.tensor([[1, 4, 5, 9, 6, 9, 0, 0], [1, 4, 9, 6, 7, 8, 2, 9]])
    types = torch.tensor([[0, 0, 0, 0, 1, 1, 0, 0], [0, 0, 0, 1, 1, 1, 1, 1]])
    logits = module.net(input_ids=ids, attention_mask=(ids != 0).long(), token_type_ids=types).logits
    torch.testing.assert_close(module(ids), logits)
    assert (module.net(input_ids=ids, attention_mask=(ids != 0).long()).logits - logits).abs().min() > 1e-3


class ReadOnTheHost(TorchDispatchMode):
    """Counts numbers that the host asks for, which on a GPU waits and can't be recorded."""

    read = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.read += func.overloadpacket is torch.ops.aten._local_scalar_dense
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("family", ["roberta", "bert"])
@torch.no_grad()
def test_encoders_ask_the_host_for_nothing(family):
    sizes = {"vocabulary": 20, "longest": 8, "width": 8, "depth": 2, "heads": 2, "padding": 1}
    module = models.TextEncoder(name=family, family=family, separator=9, **sizes).build(SimpleNamespace(classes=3))
    ids = torch.tensor([[0, 4, 5, 9, 6, 9, 1, 1], [0, 4, 9, 6, 7, 8, 2, 9]])
    with ReadOnTheHost() as mode:
        module.eval()(ids)
    assert mode.read == 0


PUBLISHED = {
    # What the config.json of roberta-base, bert-base-cased and gpt2 says.
    "roberta_base": {
        "vocab_size": 50265, "max_position_embeddings": 514, "type_vocab_size": 1, "layer_norm_eps": 1e-5,
        "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072,
        "hidden_act": "gelu", "hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1, "pad_token_id": 1,
    },
    "bert_base": {
        "vocab_size": 28996, "max_position_embeddings": 512, "type_vocab_size": 2, "layer_norm_eps": 1e-12,
        "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072,
        "hidden_act": "gelu", "hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1, "pad_token_id": 0,
    },
    "gpt2": {
        "vocab_size": 50257, "n_positions": 1024, "n_embd": 768, "n_layer": 12, "n_head": 12,
        "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5, "resid_pdrop": 0.1, "embd_pdrop": 0.1,
        "attn_pdrop": 0.1, "bos_token_id": 50256, "eos_token_id": 50256,
    },
}  # fmt: skip


@pytest.mark.parametrize(
    ("data", "model"), [("sst2", "roberta_base"), ("qnli", "bert_base"), ("e2e", "gpt2")], ids=PUBLISHED
)
def test_language_models_are_set_up_as_published(data, model):
    """Some of it shows in no shape, and weights that were trained with it would be loaded all the same."""
    found = built_nowhere(f"dataset={data}", f"model={model}").net.config.to_dict()
    assert {key: found[key] for key in PUBLISHED[model]} == PUBLISHED[model]
    without = built_nowhere(f"dataset={data}", f"model={model}", "model.dropout=0").net
    assert {layer.p for layer in without.modules() if isinstance(layer, nn.Dropout)} == {0.0}
    dropped = {key: value for key, value in without.config.to_dict().items() if re.search("drop(out_prob)?$", key)}
    assert len(dropped) >= 2
    assert set(dropped.values()) == {0.0}


def test_lora_trains_factors_of_queries_and_values_as_they_are_and_the_head():
    """Hu et al. 2022, with alpha equal to the rank."""
    net = built_nowhere("dataset=sst2", "model=roberta_base", "model.trained=lora", "model.lora_rank=3").net
    trained = {name for name, parameter in net.named_parameters() if parameter.requires_grad}
    head = {name for name in trained if ".classifier." in name}
    factors = {re.sub(r"^.*encoder\.layer\.(\d+)\.attention\.self\.", r"\1 ", name) for name in trained - head}
    kinds = {f"{part}.lora_{side}" for part in ("query", "value") for side in "AB"}
    assert factors == {f"{layer} {kind}.default.weight" for layer in range(12) for kind in kinds}
    assert len(head) == 4
    scaled = [layer.scaling["default"] for layer in net.modules() if isinstance(layer, LoraLayer)]
    assert len(scaled) == 24
    assert set(scaled) == {1.0}


def test_filters_are_standardised_by_their_variance_or_by_what_it_is_at_least():
    layer = WSConv2d(2, 3, 3).double()
    with torch.no_grad():
        layer.weight[1] = 0.5 + 1e-3 * torch.randn(2, 3, 3, dtype=torch.float64)  # whose n var is below 1e-4
        layer.weight[2] = 0.5
        layer.gain.copy_(torch.tensor([1.0, 2.0, 3.0]))
    filters = layer.weight.detach().flatten(1).numpy()
    variances = filters.var(1)
    assert 18 * variances[1] < 1e-4 < 18 * variances[0]
    wanted = (filters - filters.mean(1, keepdims=True)) / np.sqrt([[18 * variances[0]], [1e-4], [1e-4]])
    np.testing.assert_allclose(layer.standardised().detach().flatten(1).numpy(), wanted, atol=1e-12)


def test_standardising_a_networks_filters_leaves_the_weights_that_it_began_with():
    torch.manual_seed(1)
    plain, _ = built("cifar10", "resnet18")
    torch.manual_seed(1)
    standardised, _ = built("cifar10", "resnet18", "model.weight_standardised=true")
    state = standardised.state_dict()
    assert all(torch.equal(state[name], value) for name, value in plain.state_dict().items())
    assert {name.rpartition(".")[2] for name in set(state) - set(plain.state_dict())} == {"gain"}


def test_cnn5_pads_28_pixels_to_32():
    module, _ = built("mnist", "cnn5")
    image = torch.rand(2, 1, 28, 28)
    framed = nn.functional.pad(image, (2, 2, 2, 2))
    torch.testing.assert_close(module(image), module[1:](framed))


def test_small_cnn_sees_a_grey_image_on_three_channels():
    module, _ = built("mnist", "cnn_small")
    image = torch.rand(2, 1, 28, 28)
    torch.testing.assert_close(module(image), module[1:](torch.cat([image] * 3, dim=1)))


def test_mlp_takes_its_widths():
    module, _ = built("digits", "mlp", "model.hidden=[20,30]")
    assert [tuple(p.shape) for p in module.parameters() if p.dim() == 2] == [(20, 64), (30, 20), (10, 30)]


@pytest.mark.parametrize(
    ("dataset", "model", "sizes"),
    [("digits", "cnn5", "28x28 or 32x32"), ("digits", "cnn_small", "28x28"), ("cifar10", "cnn_small", "28x28")],
)
def test_models_refuse_pictures_that_do_not_fit(dataset, model, sizes):
    with pytest.raises(UserError, match=f"model={model}: takes images of {sizes} pixels, but dataset={dataset} has"):
        built(dataset, model)


@pytest.mark.parametrize("channels", [2, 4])
def test_of_what_is_neither_grey_nor_of_three_colours_the_libraries_models_are_refused(channels):
    levels = [0.5] * channels
    data = ("dataset=cifar10", f"dataset.channels={channels}", f"dataset.mean={levels}", f"dataset.std={levels}")
    says = f"takes images of 1 or 3 channels, but dataset=cifar10 has {channels}"
    for model in ("resnet18", "resnet34", "resnet50", "resnet50_bit", "efficientnet_b0", "vit_tiny", "vit_small"):
        with pytest.raises(UserError, match=f"^model={model}: {says}$"):
            composed(*data, f"model={model}")
    config = composed(*data, "model=cnn5")
    assert config.model.build(config.dataset)(torch.zeros(1, channels, 32, 32)).shape == (1, 10)


def wrn_parameters(depth, width):
    """Counted layer by layer: each convolution has weights, biases and gains, each norm two numbers a channel."""

    def conv(channels, out, size):
        return channels * out * size**2 + 2 * out

    total, channels = conv(3, 16, 3), 16
    for stage in range(3):
        out = 16 * width * 2**stage
        for block in range((depth - 4) // 6):
            total += 2 * channels + conv(channels, out, 3) + 2 * out + conv(out, out, 3)
            total += 2 * channels + conv(channels, out, 1) if block == 0 else 0
            channels = out
    return total + 2 * channels + 10 * (channels + 1)


def test_wide_residual_networks_are_counted_layer_by_layer():
    assert (wrn_parameters(16, 4), wrn_parameters(40, 4)) == (2_753_818, 8_961_306)


@pytest.mark.parametrize(("model", "parameters"), [("vit_tiny", 5_526_346), ("vit_small", 21_669_514)])
def test_vision_transformers_are_timms(model, parameters):
    net = built("cifar10", model)[0][-1]
    timms = timm.create_model(f"{model}_patch16_224", num_classes=10)
    assert sum(p.numel() for p in net.parameters()) == sum(p.numel() for p in timms.parameters()) == parameters
    timms.load_state_dict(net.state_dict())
    x = torch.rand(1, 3, 224, 224)
    torch.testing.assert_close(net(x), timms(x))


@pytest.mark.parametrize(
    ("overrides", "parameters"),
    [
        (("dataset=cifar10", "model=vit_small"), 21_669_514),
        (("dataset=cifar100", "model=vit_small"), 21_704_164),
        (("dataset=mnist", "model=cnn5", "model.logits=100"), 619_300),
        (("dataset=cifar10", "model=cnn5", "model.logits=100"), 619_876),
    ],
    ids=str,
)
def test_models_of_dp_pmlf_have_its_parameter_counts(overrides, parameters):
    """dp_pmlf.md 4.2."""
    config = composed(*overrides)
    with torch.device("meta"):
        model = config.model.build(config.dataset)
    assert sum(p.numel() for p in model.parameters()) == parameters


def test_resnet50_of_bit_is_timms():
    net = built("cifar10", "resnet50_bit")[0][-1]
    timms = timm.create_model("resnetv2_50x1_bit", num_classes=10)
    timms.load_state_dict({re.sub(r"(norm\d?)\.0\.", r"\1.", name): value for name, value in net.state_dict().items()})
    x = torch.rand(2, 3, 64, 64)
    torch.testing.assert_close(net(x), timms(x), rtol=1e-3, atol=1e-3)


def test_convolution_without_gain_is_timms():
    own = StdConv2d(3, 6, 3, stride=2, padding=1, bias=False)
    timms = timm.layers.StdConv2d(3, 6, 3, stride=2, padding=1)
    timms.load_state_dict(own.state_dict())
    x = torch.rand(2, 3, 9, 9)
    torch.testing.assert_close(own(x), timms(x), rtol=1e-4, atol=1e-5)
    assert [name for name, _ in own.named_parameters()] == ["weight"]


@pytest.mark.parametrize("model", ["resnet18", "resnet50", "resnet50_bit", "efficientnet_b0"])
def test_batch_norm_is_replaced_by_groups_as_opacus_does(model):
    """gcd(32, channels) groups, with gains."""
    norms = [
        m for m in built("cifar10", model)[0].modules() if "Norm" in type(m).__name__ and "Act" not in type(m).__name__
    ]
    assert len(norms) >= 20
    assert all(type(norm) is nn.GroupNorm and norm.affine for norm in norms)
    assert all(norm.num_groups == math.gcd(32, norm.num_channels) for norm in norms)


def test_all_filters_of_resnet50_are_standardised():
    convolutions = [m for m in built("cifar10", "resnet50")[0].modules() if isinstance(m, nn.Conv2d)]
    assert len(convolutions) == 53
    assert all(type(convolution) is WSConv2d for convolution in convolutions)


def test_stem_for_small_images_keeps_their_size():
    net = built("cifar10", "resnet18", "model.stem=small")[0][-1]
    assert net.maxpool(net.conv1(torch.rand(1, 3, 32, 32))).shape == (1, 64, 32, 32)


@pytest.mark.parametrize(("before", "after"), [(32, 48), (32, 28)])
def test_images_are_resized_as_torchvision_does(before, after):
    images = torch.rand(2, 3, before, before)
    want = resize(images, [after, after], antialias=True)
    torch.testing.assert_close(Resize(after)(images), want)
    assert Resize(before)(images) is images


def test_grey_images_are_resized_and_repeated_for_networks_of_colour():
    net, _ = built("mnist", "resnet18", "model.image_size=32")
    image = torch.rand(2, 1, 28, 28)
    torch.testing.assert_close(net(image), net[-1](Resize(32)(image).repeat(1, 3, 1, 1)))


def test_more_logits_than_classes_as_in_the_code_of_dp_pmlf():
    net, _ = built("cifar10", "cnn5", "model.logits=100")
    assert net(torch.rand(2, 3, 32, 32)).shape == (2, 100)
    assert sum(p.numel() for p in net.parameters()) == 619_876
    with pytest.raises(UserError, match=r"model.logits=10: expected at least the 100 classes of dataset=cifar100"):
        built("cifar100", "cnn5", "model.logits=10")


@pytest.mark.parametrize(
    ("model", "settings", "complaint"),
    [
        (models.ResNet, {"depth": 20}, "model.depth=20: expected one of 18, 34, 50"),
        (models.ResNet, {"stem": "big"}, "model.stem=big: expected one of imagenet, small"),
        (models.ResNet, {"image_size": 0}, "model.image_size=0: expected a whole number > 0, or null"),
        (models.BiTResNet, {"image_size": -1}, "model.image_size=-1: expected a whole number > 0, or null"),
        (models.EfficientNet, {"groups": 0}, "model.groups=0: expected a whole number > 0"),
        (
            models.VisionTransformer,
            {"image_size": 100},
            "model.image_size=100: expected a multiple of the patch size 16",
        ),
        (models.VisionTransformer, {"width": 100}, "model.width=100: expected a multiple of the 6 heads"),
        (models.VisionTransformer, {"trained": "some"}, "model.trained=some: expected one of all, layers, head"),
        (models.AbadiCNN, {"trained": "head"}, "model.trained=head: expected one of all, dense"),
    ],
)
def test_settings_that_models_refuse(model, settings, complaint):
    with pytest.raises(UserError) as caught:
        model(**settings)
    assert str(caught.value) == complaint


def test_what_trains_is_a_setting():
    data = ImageDataset("cifar10", channels=3, height=32, width=32, mean=[0.0] * 3, std=[1.0] * 3)

    def parameters(model, trained):
        named = list(model.build(data).named_parameters())
        return {name.removeprefix("1."): p for name, p in named if p.requires_grad is trained}

    small = {which: models.VisionTransformer(trained=which) for which in ("layers", "head")}
    assert set(parameters(small["head"], True)) == {"head.weight", "head.bias"}
    frozen = parameters(small["layers"], False)
    assert set(frozen) == {"cls_token", "pos_embed"}
    # The numbers that DP-PMLF's code leaves as they were initialised.
    assert sum(p.numel() for p in frozen.values()) == 76_032
    dense = parameters(models.AbadiCNN(trained="dense"), True)
    assert {name.split(".")[0] for name in dense} == {"dense1", "dense2", "head"}


@pytest.mark.parametrize(("dataset", "model"), [("mnist", "cnn5"), ("mnist", "cnn_small"), ("digits", "mlp")])
def test_samples_do_not_mix(dataset, model):
    module, data = built(dataset, model)
    batch = torch.rand(4, data.channels, data.height, data.width)
    alone = torch.cat([module(image.unsqueeze(0)) for image in batch])
    torch.testing.assert_close(module(batch), alone, atol=math.sqrt(torch.finfo(torch.float32).eps) / 10, rtol=1e-4)
