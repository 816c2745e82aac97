"""Per-sample gradients of whole models, against one plain backward pass per sample in float64."""

import copy
import re
import warnings
from dataclasses import dataclass
from types import MethodType

import pytest
import torch
import torch.nn.functional as F
from gradient_checks import (
    DEVICE,
    EXACT,
    FALLBACK,
    assert_exact,
    cross_entropy,
    engine_in_float64,
    next_token,
    plain_gradients,
)
from small_models import NarrowResNet
from torch import nn
from torchvision.models import convnext, resnet, vision_transformer

from dpbench.data import ImageDataset
from dpbench.errors import PlainWarning, UserError
from dpbench.gradients import FlatParameters, PerSampleGradients
from dpbench.models import CNN5, SmallCNN, WideResNet
from dpbench.query import Point

DOUBLE = {torch.float64: 1e-9}
MNIST = ImageDataset(name="mnist", channels=1, height=28, width=28, classes=3)
CIFAR = ImageDataset(name="cifar10", channels=3, height=32, width=32, classes=3, mean=[0.0] * 3, std=[1.0] * 3)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(5)


def images(batch, dataset=CIFAR):
    return torch.rand(batch, dataset.channels, dataset.height, dataset.width)


class Call(nn.Module):
    """A model of transformers as a function of one tensor: pixels, or ids of which those that pad are masked."""

    def __init__(self, model, *, argument="input_ids", pad=None):
        super().__init__()
        self.model, self.argument, self.pad = model, argument, pad

    def forward(self, x):
        more = {} if self.pad is None else {"attention_mask": (x != self.pad).long()}
        return self.model(**{self.argument: x}, **more).logits


def ids_with_padding(batch, length, rows, pad):
    ids = torch.randint(3, rows, (batch, length))
    for i in range(batch):
        ids[i, length - i % 3 :] = pad
    return ids


# Convolutional networks


@pytest.mark.parametrize("dataset", [MNIST, CIFAR], ids=["28", "32"])
def test_cnn5(dataset):
    assert_exact(CNN5().build(dataset), images(3, dataset), spread=0.02)


def test_small_cnn():
    assert_exact(SmallCNN().build(MNIST), images(4, MNIST), spread=0.05)


class ViewsMaps(nn.Module):
    """A network that takes its maps for vectors, which their layout in memory must allow."""

    def __init__(self):
        super().__init__()
        self.maps = nn.Sequential(nn.Conv2d(1, 3, 3), nn.Tanh(), nn.MaxPool2d(2), nn.Conv2d(3, 4, 2), nn.Tanh())
        self.head = nn.Linear(16, 3)

    def forward(self, x):
        maps = self.maps(x)
        return self.head(maps.view(len(maps), 16))


def test_a_network_that_views_its_maps_keeps_books():
    assert_exact(ViewsMaps(), torch.rand(4, 1, 8, 8))


class OwnGroupNorm(nn.GroupNorm):
    """As libraries have theirs."""


@pytest.mark.skipif(DEVICE.type != "cpu", reason="layouts for a CPU")
@pytest.mark.parametrize(
    ("between", "last"),
    [
        ([nn.Tanh(), nn.MaxPool2d(2)], True),
        ([nn.GroupNorm(2, 4), nn.MaxPool2d(2)], False),
        ([OwnGroupNorm(2, 4), nn.MaxPool2d(2)], False),
        ([nn.AvgPool2d(2)], False),
    ],
    ids=["max", "group norm", "group norm of another class", "average"],
)
@pytest.mark.parametrize("channels", [1, 2])
def test_pools_read_maps_whose_channels_come_last(between, last, channels):
    """On a CPU, where torch's kernels for maxima are vectorised in that layout alone."""
    model = nn.Sequential(nn.Conv2d(channels, 4, 3), *between, nn.Conv2d(4, 3, 2), nn.Flatten(), nn.Linear(12, 3))
    x, labels = torch.rand(4, channels, 8, 8), torch.arange(4) % 3
    flat = FlatParameters(model)
    engine = PerSampleGradients(model, flat, cross_entropy)
    engine.record([Point(1.0, flat.vector)], x, labels)
    read = []
    for layer in model[2:-2]:
        layer.register_forward_pre_hook(lambda _, inputs: read.append(not inputs[0].is_contiguous()))
    engine.record([Point(1.0, flat.vector)], x, labels)
    assert read
    assert all(each == last for each in read)


@pytest.mark.parametrize("standardised", [False, True])
def test_wide_resnet(standardised):
    model = WideResNet(depth=10, width=1, weight_standardised=standardised).build(CIFAR)
    for name, parameter in model.named_parameters():
        if name.endswith("gain"):
            nn.init.uniform_(parameter, 0.5, 1.5)
    assert_exact(model, images(3), spread=0.02)


@pytest.mark.parametrize("kind", ["hold", "pass", "gram"])
def test_wide_resnet_by_every_kind_of_strategy(kind):
    model = WideResNet(depth=10, width=1).build(CIFAR)
    assert_exact(model, images(3), spread=0.02, points=(1, 2), strategies=frozenset({kind}), tolerances=DOUBLE)


def test_wide_resnet_with_views():
    model = WideResNet(depth=10, width=1).build(CIFAR)
    x = torch.rand(2, 3, 3, 32, 32)
    assert_exact(model, x, spread=0.02, views=3, points=(1, 2), tolerances=DOUBLE)


@pytest.mark.slow
def test_wide_resnet_16_4():
    # ReLU and norms of 16 layers pass rounding on, so float32 is compared with less precision.
    tolerances = {torch.float64: 1e-9, torch.float32: 1e-4}
    assert_exact(WideResNet().build(CIFAR), images(3), spread=0.01, points=(1, 2), tolerances=tolerances)


def halves(channels):
    return nn.GroupNorm(2, channels)


@pytest.mark.parametrize("blocks", [[2, 2, 2, 2], [3, 4, 6, 3]], ids=["18", "34"])
def test_resnet_of_torchvision(blocks):
    assert_exact(
        NarrowResNet(resnet.BasicBlock, blocks, 3, norm_layer=halves), images(3), spread=0.02, tolerances=DOUBLE
    )


@pytest.mark.slow
@pytest.mark.parametrize("build", [resnet.resnet18, resnet.resnet34])
def test_resnet_of_torchvision_in_full_width(build):
    model = build(num_classes=3, norm_layer=lambda channels: nn.GroupNorm(32, channels))
    assert_exact(model, images(3), spread=0.005, points=(1, 2), tolerances=DOUBLE)


def test_bottleneck_resnet_of_channels_last_pixels():
    model = resnet.ResNet(resnet.Bottleneck, [1, 1, 1, 1], num_classes=3, norm_layer=halves, width_per_group=4)
    x = images(3).to(memory_format=torch.channels_last)
    assert_exact(model, x, spread=0.01, points=(1, 2), tolerances=DOUBLE)


def test_convnext_of_torchvision():
    """Its layer norm of maps is a subclass that computes something else, so books are of no use."""
    settings = [convnext.CNBlockConfig(8, 12, 1), convnext.CNBlockConfig(12, None, 1)]
    model = convnext.ConvNeXt(settings, layer_scale=0.1, num_classes=3).eval()
    assert_exact(model, images(3), books=False, points=(1, 2), tolerances=DOUBLE)


# Vision transformers


def test_vision_transformer_of_torchvision():
    model = vision_transformer.VisionTransformer(16, 4, 2, 2, 16, 32, num_classes=3)
    nn.init.normal_(model.heads.head.weight)
    assert_exact(model, torch.rand(4, 3, 16, 16))


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_vision_transformer_of_transformers(attention):
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        image_size=16,
        patch_size=4,
        num_labels=3,
        attn_implementation=attention,
    )
    model = ViTForImageClassification(config).eval()
    assert all(parameter.requires_grad for parameter in model.parameters())
    # The eager attention of this model takes its softmax in float32, whatever the precision of the model.
    tolerances = EXACT if attention == "sdpa" else {torch.float64: 1e-6, torch.float32: 1e-5}
    assert_exact(Call(model, argument="pixel_values"), torch.rand(4, 3, 16, 16), tolerances=tolerances)


@pytest.mark.parametrize("pool", ["token", "avg", "map"])
def test_vision_transformer_of_timm(pool):
    timm = pytest.importorskip("timm.models.vision_transformer")
    model = timm.VisionTransformer(
        img_size=16,
        patch_size=4,
        embed_dim=16,
        depth=2,
        num_heads=2,
        mlp_ratio=2.0,
        num_classes=3,
        init_values=1e-5,
        global_pool=pool,
        qk_norm=pool == "avg",
    )
    assert_exact(model, torch.rand(4, 3, 16, 16), tolerances=DOUBLE)


def test_vision_transformer_of_timm_with_groups():
    timm = pytest.importorskip("timm.models.vision_transformer")
    model = timm.VisionTransformer(
        img_size=16, patch_size=4, embed_dim=16, depth=1, num_heads=2, num_classes=3, init_values=1e-5
    )
    groups = [
        ("cls_token", "pos_embed"),
        ("patch_embed.proj",),
        ("blocks.0.norm1",),
        ("blocks.0.attn.qkv",),
        ("blocks.0.attn.proj",),
        ("blocks.0.ls1",),
        ("blocks.0.norm2",),
        ("blocks.0.mlp.fc1",),
        ("blocks.0.mlp.fc2",),
        ("blocks.0.ls2",),
        ("norm.",),
        ("head.",),
    ]
    assert_exact(model, torch.rand(4, 3, 16, 16), per_layer=groups, tolerances=DOUBLE)


# Language


def tiny_bert(kind, **options):
    import transformers

    config = getattr(transformers, f"{kind}Config")(
        vocab_size=40,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=16,
        num_labels=3,
        **options,
    )
    return getattr(transformers, f"{kind}ForSequenceClassification")(config).eval()


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize(("kind", "pad"), [("Roberta", 1), ("Bert", 0)])
def test_bert(kind, pad, attention):
    model = tiny_bert(kind, attn_implementation=attention)
    ids = ids_with_padding(4, 8, 40, pad)
    assert_exact(Call(model, pad=pad), ids, tolerances=EXACT if attention == "sdpa" else DOUBLE)


def test_bert_without_padding_or_mask():
    assert_exact(Call(tiny_bert("Bert")), torch.randint(40, (4, 8)), tolerances=DOUBLE)


def test_batches_of_different_lengths():
    model = Call(tiny_bert("Roberta"), pad=1).double()
    flat = FlatParameters(model)
    engine = PerSampleGradients(model, flat, cross_entropy)
    for batch, length in ((4, 8), (1, 5), (5, 5), (3, 3), (2, 12)):
        ids, y = ids_with_padding(batch, length, 40, 1), torch.randint(3, (batch,))
        ids[:, 0] = 2
        _, want = plain_gradients(model, flat.vector, ids, y)
        tape = engine.record([Point(1.0, flat.vector)], ids, y)
        torch.testing.assert_close(tape.norms()[0], want.norm(dim=1), rtol=1e-9, atol=0)
        total = tape.weighted_sum(torch.ones(1, batch, dtype=torch.float64))
        torch.testing.assert_close(total, want.sum(0), rtol=1e-9, atol=1e-12)


def tiny_gpt2(**options):
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=30, n_positions=12, n_embd=16, n_layer=2, n_head=2, n_inner=32, **options)
    return GPT2LMHeadModel(config).eval()


def next_tokens(outputs, ids):
    return next_token(outputs[:, :-1], ids[:, 1:])


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_gpt2(attention):
    model = tiny_gpt2(attn_implementation=attention)
    assert model.lm_head.weight is model.transformer.wte.weight
    ids = torch.randint(30, (4, 9))
    assert_exact(Call(model), ids, ids, loss=next_tokens, tolerances=EXACT if attention == "sdpa" else DOUBLE)


class Characters(nn.Module):
    """A classifier of strings by an LSTM of two layers."""

    def __init__(self, dropout=0.0):
        super().__init__()
        self.table = nn.Embedding(26, 8)
        self.lstm = nn.LSTM(8, 10, num_layers=2, batch_first=True, dropout=dropout)
        self.head = nn.Linear(10, 3)

    def forward(self, ids):
        return self.head(self.lstm(self.table(ids))[0][:, -1])


def test_lstm_over_characters():
    assert_exact(Characters(), torch.randint(26, (4, 9)))


@pytest.mark.parametrize("targets", [["query", "value"], "all-linear"], ids=["attention", "all"])
def test_lora(targets):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(task_type="SEQ_CLS", r=4, target_modules=targets, lora_dropout=0.0)
    model = peft.get_peft_model(tiny_bert("Roberta"), config)
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert all("lora_" in name or "classifier" in name for name in trained)
    assert_exact(Call(model, pad=1), ids_with_padding(4, 8, 40, 1))


def encoder(*before):
    layer = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True)
    return nn.Sequential(*before, nn.TransformerEncoder(layer, 2), nn.Flatten(), nn.Linear(40, 3))


def test_transformer_encoder_of_torch():
    assert_exact(encoder(nn.Linear(4, 8)), torch.randn(4, 5, 4))


@pytest.mark.parametrize("training", [True, False])
def test_transformer_encoder_of_torch_as_first_layer_keeps_books(training):
    assert_exact(encoder().train(training), torch.randn(4, 5, 8), points=(1, 2), tolerances=DOUBLE)


# Dropout


class AttentionWithDropout(nn.Module):
    def __init__(self, weights):
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, dropout=0.5, batch_first=True)
        self.head, self.weights = nn.Linear(8, 3), weights

    def forward(self, x):
        return self.head(self.attention(x, x, x, need_weights=self.weights)[0].mean(1))


@dataclass
class Dropping:
    """A model with dropout of 0.5, in training mode.

    Attributes:
        model: any model.
        inputs: of four samples.
        as_autograd: a plain pass draws the same masks.
    """

    model: nn.Module
    inputs: torch.Tensor
    as_autograd: bool = True


def dropping(name):
    x, ids = torch.randn(4, 5, 8), torch.randint(3, 26, (4, 7))
    half = {"hidden_dropout_prob": 0.5, "attention_probs_dropout_prob": 0.5, "classifier_dropout": 0.5}
    cases = {
        "layers": lambda: Dropping(
            nn.Sequential(nn.Linear(8, 9), nn.Dropout(), nn.LayerNorm(9), nn.Dropout(), nn.Flatten(), nn.Linear(45, 3)),
            x,
        ),
        "roberta, sdpa": lambda: Dropping(Call(tiny_bert("Roberta", **half)), ids),
        "roberta, eager": lambda: Dropping(Call(tiny_bert("Roberta", attn_implementation="eager", **half)), ids),
        "lstm": lambda: Dropping(Characters(dropout=0.5), ids, as_autograd=False),
        "attention": lambda: Dropping(AttentionWithDropout(weights=False), x),
        "attention with weights": lambda: Dropping(AttentionWithDropout(weights=True), x),
        "fallback": lambda: Dropping(
            nn.Sequential(nn.Linear(8, 9), nn.PReLU(), nn.Dropout(), nn.Flatten(), nn.Linear(45, 3)),
            x,
            as_autograd=False,
        ),
    }
    case = cases[name]()
    case.model.double().train()
    case.inputs = case.inputs.double() if case.inputs.is_floating_point() else case.inputs
    return case


DROPPING = ["layers", "roberta, sdpa", "roberta, eager", "lstm", "attention", "attention with weights", "fallback"]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", DROPPING)
def test_iterates_share_dropout(name):
    case = dropping(name)
    y = torch.randint(3, (4,))
    flat = FlatParameters(case.model)
    engine = PerSampleGradients(case.model, flat, cross_entropy)
    here, there = flat.vector, flat.vector + 0.1 * torch.randn_like(flat.vector)
    factors = torch.randn(1, 4, dtype=torch.float64)

    def recorded(*points, seed=7):
        torch.manual_seed(seed)
        tape = engine.record([Point(*point) for point in points], case.inputs, y)
        return tape.norms()[0], tape.weighted_sum(factors)

    def assert_equal(got, want):
        for one, other in zip(got, want, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)

    once = recorded((1.0, here))  # also the first record, whose check must draw nothing
    assert_equal(recorded((1.0, here)), once)
    assert_equal(recorded((0.7, here), (0.3, here)), once)
    mixture = recorded((1.4, there), (-0.4, here))[1]
    torch.testing.assert_close(mixture, 1.4 * recorded((1.0, there))[1] - 0.4 * once[1], rtol=1e-9, atol=1e-12)
    assert ((recorded((1.0, here), seed=8)[0] - once[0]).abs() > 1e-3 * once[0]).any()
    assert case.model.training
    if case.as_autograd:
        torch.manual_seed(7)
        losses = cross_entropy(case.model(case.inputs), y)
        gradients = torch.autograd.grad(losses @ factors[0], flat.parameters, allow_unused=True, materialize_grads=True)
        torch.testing.assert_close(once[1], torch.cat([g.flatten() for g in gradients]), rtol=1e-9, atol=1e-12)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["layers", "lstm", "fallback"])
@pytest.mark.parametrize("weights", [(1.0,), (0.7, 0.3)])
def test_generator_moves_on_between_records(name, weights):
    case = dropping(name)
    y = torch.randint(3, (4,))
    flat = FlatParameters(case.model)
    engine = PerSampleGradients(case.model, flat, cross_entropy)
    points = [Point(weight, flat.vector) for weight in weights]
    norms, states = [], [torch.get_rng_state()]
    for _ in range(3):
        norms.append(engine.record(points, case.inputs, y).norms())
        assert not any(torch.equal(torch.get_rng_state(), state) for state in states)
        states.append(torch.get_rng_state())
    assert not torch.allclose(norms[0], norms[1])
    assert not torch.allclose(norms[1], norms[2])


# Models without books


class Odd(nn.Module):
    """A matrix that enters the output twice, and once through its square."""

    def __init__(self):
        super().__init__()
        self.matrix = nn.Parameter(torch.randn(6, 6))
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        return self.head(torch.tanh(x @ self.matrix @ self.matrix.t() + (self.matrix**2).sum(0)))


class Twofold(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.head = nn.Bilinear(6, 6, 5), nn.Linear(5, 3)

    def forward(self, x):
        return self.head(torch.tanh(self.layer(x, x.flip(1))))


class Gated(nn.Module):
    """A recurrent layer, which torch.func cannot map over samples."""

    def __init__(self, kind, **options):
        super().__init__()
        self.layer = kind(3, 4, **options)
        self.head = nn.Linear(options.get("proj_size", 4), 3)

    def forward(self, x):
        x = x.unflatten(1, (2, 3))
        if self.layer.batch_first:
            return self.head(self.layer(x)[0][:, -1])
        return self.head(self.layer(x.transpose(0, 1))[0][-1])


class Doubled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


class Outside(nn.Module):
    """Uses the weight of a layer without the layer."""

    def __init__(self):
        super().__init__()
        self.layer, self.head = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x):
        return self.head(torch.tanh(self.layer(x) @ self.layer.weight))


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.utils.parametrizations.weight_norm(nn.Linear(6, 4))
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        return self.head(torch.tanh(self.layer(x)))


class SequenceFirst(nn.Module):
    """Reads tokens along dimension 0."""

    def __init__(self):
        super().__init__()
        self.layer, self.head = nn.Linear(1, 4), nn.Linear(4, 3)

    def forward(self, x):
        return self.head(torch.tanh(self.layer(x.t().unsqueeze(2))).mean(0))


WITHOUT_BOOKS = {
    "prelu": lambda: nn.Sequential(nn.Linear(6, 5), nn.PReLU(5), nn.Linear(5, 3)),
    "prelu, first": lambda: nn.Sequential(nn.PReLU(), nn.Linear(6, 3)),
    "odd": Odd,
    "bilinear": Twofold,
    "doubled": lambda: nn.Sequential(Doubled(6, 5), nn.Tanh(), Doubled(5, 3)),
    "outside": Outside,
    "weight norm": Normed,
    "sequence first": SequenceFirst,
    "gru": lambda: Gated(nn.GRU, batch_first=True),
    "gru, sequence first": lambda: Gated(nn.GRU),
    "rnn": lambda: Gated(nn.RNN, batch_first=True),
    "lstm, sequence first": lambda: Gated(nn.LSTM),
    "lstm with a projection": lambda: Gated(nn.LSTM, proj_size=2, batch_first=True),
}


@pytest.mark.parametrize("name", WITHOUT_BOOKS)
def test_models_without_books_fall_back_with_one_warning(name):
    torch.manual_seed(11)
    # On a GPU torch's own kernel of weight norm is off by 1e-8.
    less = {torch.float64: 1e-7, torch.float32: 1e-5} if DEVICE.type == "cuda" and name == "weight norm" else EXACT
    assert_exact(WITHOUT_BOOKS[name](), torch.randn(4, 6), books=False, tolerances=less)
    model = WITHOUT_BOOKS[name]().double()
    flat = FlatParameters(model)
    engine = PerSampleGradients(model, flat, cross_entropy)
    x, y = torch.randn(4, 6).double(), torch.randint(3, (4,))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            engine.record([Point(0.7, flat.vector), Point(0.3, flat.vector)], x, y)
    # torch.func warns of some layers on its own account.
    messages = [str(w.message) for w in caught if w.category is PlainWarning and FALLBACK in str(w.message)]
    assert len(messages) == 1
    # The reason comes last: which parameter deviates, or what was raised.
    assert re.fullmatch(FALLBACK + r": [^()]+ \(.{10,}\)", messages[0], re.DOTALL)


def test_warning_names_the_parameter_that_is_used_past_its_layer():
    model = Outside()
    flat = FlatParameters(model)
    with pytest.warns(UserWarning, match=FALLBACK + r".*\(parameter 'layer\.weight' is used past its layer, or "):
        PerSampleGradients(model, flat, cross_entropy).record(
            [Point(1.0, flat.vector)], torch.randn(4, 6), torch.randint(3, (4,))
        )


class Inheriting(nn.Linear):
    """Adds to the layer, but not to what it computes."""

    def __init__(self, *args):
        super().__init__(*args)
        self.calls = 0


class Repeating(nn.Linear):
    """Computes what the layer computes; but nobody can know."""

    def forward(self, x):
        return F.linear(x, self.weight, self.bias)


@pytest.mark.parametrize(("kind", "books"), [(Inheriting, True), (Repeating, False)])
def test_subclasses_keep_books_if_they_inherit_the_computation(kind, books):
    assert_exact(nn.Sequential(kind(6, 5), nn.Tanh(), kind(5, 3)), torch.randn(4, 6), books=books)


@pytest.mark.parametrize("package", ["torch", "torchvision", "transformers", "timm", "dpbench"])
def test_subclasses_of_packages_that_are_trusted_keep_books(package):
    repeating = type("Repeating", (Repeating,), {"__module__": f"{package}.models.layers"})
    assert_exact(nn.Sequential(repeating(6, 5), nn.Tanh(), repeating(5, 3)), torch.randn(4, 6))
    # They are compared all the same.
    doubled = type("Doubled", (Doubled,), {"__module__": f"{package}.models.layers"})
    assert_exact(nn.Sequential(doubled(6, 5), nn.Tanh(), doubled(5, 3)), torch.randn(4, 6), books=False)


# What a check of the first samples of the first batch must not miss


class Ordinals(nn.Module):
    """Adds embeddings of positions that have no dimension of the batch."""

    def __init__(self, length):
        super().__init__()
        self.table, self.positions = nn.Embedding(7, 4), nn.Embedding(length, 4)
        self.head = nn.Linear(4, 3)

    def forward(self, ids):
        positions = torch.arange(ids.shape[1], device=ids.device)
        return self.head(torch.tanh(self.table(ids) + self.positions(positions)).mean(1))


class TwiceInTraining(nn.Linear):
    def forward(self, x):
        return super().forward(x) * (2 if self.training else 1)


def assert_exact_on(engine, model, x, y, which=slice(None)):
    flat = engine.flat
    _, want = plain_gradients(model, flat.vector, x[which], y[which])
    tape = engine.record([Point(1.0, flat.vector)], x, y)
    torch.testing.assert_close(tape.norms()[0][which], want.norm(dim=1), rtol=1e-9, atol=0)
    if which == slice(None):
        total = tape.weighted_sum(torch.ones(1, len(y), dtype=torch.float64))
        torch.testing.assert_close(total, want.sum(0), rtol=1e-9, atol=1e-12)


def test_positions_without_a_batch():
    assert_exact(Ordinals(12), torch.randint(7, (4, 12)), books=False)


@pytest.mark.filterwarnings(f"ignore:{FALLBACK}")
def test_first_batch_of_one_sample():
    model = Ordinals(12)
    engine = engine_in_float64(model)
    for batch in (1, 4):
        assert_exact_on(engine, model, torch.randint(7, (batch, 12)), torch.randint(3, (batch,)))


@pytest.mark.filterwarnings(f"ignore:{FALLBACK}")
def test_head_of_zeros_in_the_first_batch():
    model = Ordinals(12)
    nn.init.zeros_(model.head.weight)
    engine = engine_in_float64(model)
    x, y = torch.randint(7, (4, 12)), torch.randint(3, (4,))
    engine.record([Point(1.0, engine.flat.vector)], x, y)
    nn.init.normal_(model.head.weight)
    assert_exact_on(engine, model, x, y)


@pytest.mark.filterwarnings(f"ignore:{FALLBACK}")
def test_subclass_that_differs_in_training_mode():
    model = nn.Sequential(TwiceInTraining(6, 5), nn.Tanh(), nn.Linear(5, 3)).train()
    assert_exact_on(engine_in_float64(model), model, torch.randn(4, 6).double(), torch.randint(3, (4,)))


@pytest.mark.filterwarnings(f"ignore:{FALLBACK}")
def test_first_sample_without_a_finite_gradient():
    model = nn.Sequential(Doubled(6, 5), nn.Tanh(), nn.Linear(5, 3))
    x, y = torch.randn(4, 6).double(), torch.randint(3, (4,))
    broken = x.clone()
    broken[0] = torch.nan
    engine = engine_in_float64(model)
    assert_exact_on(engine, model, broken, y, slice(1, None))
    # The comparison is made as soon as it can be.
    with pytest.warns(UserWarning, match=FALLBACK):
        assert_exact_on(engine, model, x, y)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_exact_on(engine, model, broken, y, slice(1, None))


def test_first_batch_of_one_sample_of_a_scaled_vector():
    """A vector times (1, d) may have one more dimension; times (4, d) it may not."""

    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.scale, self.head = nn.Linear(6, 5), nn.Parameter(torch.rand(5)), nn.Linear(5, 3)

        def forward(self, x):
            return self.head(self.layer(x) * self.scale).view(len(x), -1)

    model = Scaled()
    engine = engine_in_float64(model)
    for batch in (1, 4):
        assert_exact_on(engine, model, torch.randn(batch, 6).double(), torch.randint(3, (batch,)))


class UnlikeInTraining(nn.Module):
    """Uses a weight without its layer, or mixes samples, in training mode only."""

    def __init__(self, how):
        super().__init__()
        self.layer, self.head, self.how = nn.Linear(6, 6), nn.Linear(6, 3), how

    def forward(self, x):
        x = self.layer(x)
        if self.training:
            x = x @ self.layer.weight if self.how == "outside" else x - x.mean(0)
        return self.head(torch.tanh(x))


@pytest.mark.filterwarnings(f"ignore:{FALLBACK}")
@pytest.mark.parametrize("how", ["outside", "mixing"])
def test_model_that_differs_in_training_mode(how):
    model = UnlikeInTraining(how).train()
    assert_exact_on(engine_in_float64(model), model, torch.randn(4, 6).double(), torch.randint(3, (4,)))


class OwnProduct(nn.Module):
    def __init__(self, by):
        super().__init__()
        self.layer, self.weight, self.by = nn.Linear(6, 6), nn.Parameter(torch.randn(6, 3)), by

    def forward(self, x):
        return self.by(self.layer(x), self.weight)


@pytest.mark.parametrize(
    "by", [torch.matmul, lambda x, w: F.linear(x, w.mT), lambda x, w: torch.einsum("ni,ij->nj", x, w)]
)
def test_a_layer_of_ones_own_that_multiplies_matrices_is_named_where_it_is_not_followed(by):
    engine = engine_in_float64(OwnProduct(by))
    x, y = torch.randn(8, 6).double(), torch.randint(3, (8,))
    told = r"parameter 'weight' is used outside of known layers such as nn\.Linear, perhaps not element by element"
    with pytest.warns(UserWarning, match=told):
        engine.record([Point(1.0, engine.flat.vector)], x, y)


class Standardised(nn.Module):
    """Standardises with the batch, and drops values at random where no dropout layer says so."""

    def __init__(self, rate):
        super().__init__()
        self.layer, self.head, self.rate = nn.Linear(6, 6), nn.Linear(6, 3), rate

    def forward(self, x):
        x = self.layer(x)
        if self.training:
            x = (x - x.mean(0)) / (x.std(0, correction=0) + 0.1)
        return self.head(F.dropout(torch.tanh(x), self.rate, self.training))


@pytest.mark.parametrize("rate", [0.0, 0.1])
def test_samples_that_are_mixed_in_training_alone_are_found_beside_random_draws(rate):
    """One sample moves the sum of the others' gradients by nothing: each is made by itself."""
    model = Standardised(rate).train()
    engine = engine_in_float64(model)
    x, y = torch.randn(8, 6).double(), torch.randint(3, (8,))
    told = r"the loss of a sample depends on other samples: it is trained on batches of one, and evaluated in larger"
    with pytest.warns(UserWarning, match=told):
        engine.record([Point(1.0, engine.flat.vector)], x, y)
    others = x.clone()
    others[0] = 100.0
    weights = torch.ones(1, 8).double()
    weights[0, 0] = 0
    sums = []
    for one in (x, others):
        torch.manual_seed(0)
        sums.append(engine.record([Point(1.0, engine.flat.vector)], one, y).weighted_sum(weights))
    torch.testing.assert_close(*sums)


@pytest.mark.filterwarnings(f"ignore:{FALLBACK}")
def test_a_first_batch_of_one_sample_does_not_settle_what_larger_ones_are():
    model = UnlikeInTraining("mixing").train()
    engine = engine_in_float64(model)
    for batch in (1, 1, 4):
        assert_exact_on(engine, model, torch.randn(batch, 6).double(), torch.randint(3, (batch,)))


class Keeping(nn.Module):
    """Keeps a running mean of what it reads, or a count of its passes."""

    def __init__(self, kept):
        super().__init__()
        self.layer, self.kept = nn.Linear(6, 3), kept
        self.register_buffer("seen", torch.zeros(6 if kept == "mean" else 1))

    def forward(self, x):
        if self.training:
            with torch.no_grad():
                self.seen.lerp_(x.detach().mean(0), 0.1) if self.kept == "mean" else self.seen.add_(1)
        return self.layer(x)


def test_a_model_that_keeps_values_of_its_samples_is_refused():
    engine = engine_in_float64(Keeping("mean").train())
    with pytest.raises(UserError, match="keeps values of its samples in the buffer 'seen'"):
        engine.record([Point(1.0, engine.flat.vector)], torch.randn(4, 6).double(), torch.randint(3, (4,)))


def test_a_count_of_passes_is_kept_and_not_moved_by_the_comparison():
    model = Keeping("count").train()
    assert_exact_on(engine_in_float64(model), model, torch.randn(4, 6).double(), torch.randint(3, (4,)))


class Bytes(nn.Module):
    """Makes its own float32 of what it reads."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x):
        return self.layer(x.float() / 255)


def weighted_cross_entropy(outputs, targets):
    return F.cross_entropy(outputs, targets, weight=torch.tensor([1.0, 2.0, 3.0]), reduction="none")


@pytest.mark.parametrize("case", ["model", "loss"])
def test_models_and_losses_that_insist_on_float32(case):
    x, y = torch.randint(255, (4, 6)), torch.randint(3, (4,))
    model = Bytes() if case == "model" else nn.Sequential(nn.Linear(6, 3))
    x, loss = (x, cross_entropy) if case == "model" else (x / 255, weighted_cross_entropy)
    flat = FlatParameters(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tape = PerSampleGradients(model, flat, loss).record([Point(1.0, flat.vector)], x, y)
    rows = [torch.autograd.grad(loss(model(x[i : i + 1]), y[i : i + 1]).sum(), flat.parameters) for i in range(4)]
    want = torch.stack([torch.cat([g.flatten() for g in row]) for row in rows])
    torch.testing.assert_close(tape.norms()[0], want.norm(dim=1))
    torch.testing.assert_close(tape.weighted_sum(torch.ones(1, 4)), want.sum(0))


# The model is left as it was


@pytest.mark.parametrize("build", [lambda: tiny_gpt2(), lambda: tiny_bert("Bert")], ids=["gpt2", "bert"])
def test_recording_leaves_the_model_as_it_was(build):
    model = Call(build())
    flat = FlatParameters(model)
    vector, before = flat.vector.clone(), copy.deepcopy(model.state_dict())
    modes = {name: module.training for name, module in model.named_modules()}
    ids = torch.randint(30, (4, 6))
    loss = next_tokens if "GPT2" in type(model.model).__name__ else cross_entropy
    engine = PerSampleGradients(model, flat, loss)
    targets = ids if loss is next_tokens else torch.randint(3, (4,))
    engine.record([Point(0.3, torch.randn_like(vector)), Point(0.7, flat.vector)], ids, targets)
    assert torch.equal(flat.vector, vector)
    assert modes == {name: module.training for name, module in model.named_modules()}
    assert all(parameter.requires_grad for parameter in flat.parameters)
    assert all("forward" not in vars(module) for module in model.modules())
    after = model.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[name], before[name]) for name in before)


def test_losses_are_those_of_the_first_point():
    model = SmallCNN().build(MNIST)
    flat = FlatParameters(model)
    engine = PerSampleGradients(model, flat, cross_entropy)
    x, y = images(4, MNIST), torch.randint(3, (4,))
    other = flat.vector + 0.1
    tape = engine.record([Point(0.5, flat.vector), Point(0.5, other)], x, y)
    torch.testing.assert_close(tape.losses, F.cross_entropy(model(x), y, reduction="none").detach())


def test_recording_keeps_the_forward_of_one_layer():
    """As accelerate and others give layers that they wrap."""
    model = nn.Sequential(nn.Linear(6, 3))
    model[0].forward = MethodType(nn.Linear.forward, model[0])
    given = model[0].forward
    engine = PerSampleGradients(model, FlatParameters(model), cross_entropy)
    engine.record([Point(1.0, engine.flat.vector)], torch.randn(4, 6), torch.randint(3, (4,)))
    assert model[0].forward is given
