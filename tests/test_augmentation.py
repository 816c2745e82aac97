import itertools
import re
from collections import Counter

import pytest
import torch
from cli import run
from draws import generator
from helpers import assembled, composed
from scipy.stats import chisquare
from torchvision.transforms import v2

from dpbench.config import config_hash
from dpbench.data import Augmentation, AutoAugment
from dpbench.data.autoaugment import autoaugment
from dpbench.errors import UserError
from dpbench.query import Point


def numbered(batch, channels, height, width):
    """Images whose pixels all differ."""
    count = batch * channels * height * width
    return torch.arange(count, dtype=torch.float32).view(batch, channels, height, width)


def reflected(image, crop):
    """The image (C, H, W) with its mirror image around it, written out."""
    _, height, width = image.shape

    def inside(i, size):
        i = abs(i)
        return i if i < size else 2 * (size - 1) - i

    rows = [inside(i, height) for i in range(-crop, height + crop)]
    columns = [inside(i, width) for i in range(-crop, width + crop)]
    return torch.stack([torch.stack([image[:, r, c] for c in columns], -1) for r in rows], 1)


def possible_views(image, crop, flip):
    """How many of the equally likely draws (row, column, mirrored) give each view of an image."""
    _, height, width = image.shape
    padded = reflected(image, crop)
    draws = Counter()
    for row, column, mirrored in itertools.product(range(2 * crop + 1), range(2 * crop + 1), range(1 + flip)):
        window = padded[:, row : row + height, column : column + width]
        draws[as_key(window.flip(2) if mirrored else window)] += 1
    return draws


def as_key(image):
    return tuple(image.flatten().tolist())


@pytest.mark.parametrize(("crop", "flip"), [(2, True), (1, False), (0, True)])
def test_views_are_uniform_over_all_crops_and_flips(crop, flip):
    images = numbered(3, 2, 5, 4)
    copies = 400
    views = Augmentation(copies=copies, crop=crop, flip=flip).views(images, torch.Generator().manual_seed(0))
    assert views.shape == (3, copies, 2, 5, 4)
    for image, of_image in zip(images, views, strict=True):
        draws = possible_views(image, crop, flip)
        counts = Counter(as_key(view) for view in of_image)
        assert counts.keys() <= draws.keys()
        expected = [copies * times / draws.total() for times in draws.values()]
        # Nine tests in all: one in a thousand fails by chance for another seed.
        assert chisquare([counts[key] for key in draws], expected).pvalue > 1e-4


def test_one_view_has_the_shape_of_the_images_and_none_draws_nothing():
    images = numbered(3, 1, 6, 6)
    generator = torch.Generator().manual_seed(0)
    before = generator.get_state()
    assert Augmentation().views(images, generator) is images
    assert torch.equal(generator.get_state(), before)
    assert Augmentation(crop=2, flip=True).views(images, generator).shape == images.shape


def test_empty_batches_have_no_views():
    views = Augmentation(copies=4, crop=2, flip=True).views(torch.zeros(0, 1, 6, 6), torch.Generator())
    assert views.shape == (0, 4, 1, 6, 6)


def test_sensitivity_does_not_grow_with_the_views():
    """One sample with many views of large gradients moves the clipped sum by no more than the threshold."""
    overrides = ["augmentation=crop_flip", "augmentation.copies=8", "clip=threshold", "threshold.norm=0.5"]
    parts = assembled(composed(*overrides))
    step = parts.step
    torch.manual_seed(0)
    views, labels = 1000 * torch.randn(4, 8, 1, 8, 8), torch.randint(10, (4,))
    with_all, *_ = step.request([(views, labels)], 0.5).alone()
    without_one, *_ = step.request([(views[1:], labels[1:])], 0.5).alone()
    moved = float((with_all - without_one).norm())
    assert 0.49 < moved <= 0.5 * (1 + 1e-5)


def test_gradients_are_averaged_over_views_before_they_are_clipped():
    parts = assembled(composed("augmentation=crop_flip", "augmentation.copies=3"))
    gradients, model = parts.step.gradients, parts.model
    torch.manual_seed(0)
    views, label = torch.randn(1, 3, 1, 8, 8), torch.tensor([4])
    mean = torch.zeros_like(gradients.flat.vector)
    for view in views[0]:
        loss = torch.nn.functional.cross_entropy(model(view.unsqueeze(0)), label)
        mean += torch.cat([g.flatten() for g in torch.autograd.grad(loss, gradients.flat.parameters)]) / 3
    tape = gradients.record([Point(1.0, gradients.flat.vector)], views, label)
    torch.testing.assert_close(tape.weighted_sum(torch.ones(1, 1)), mean)
    torch.testing.assert_close(tape.norms()[0, 0], mean.norm())


# Cubuk et al. 2019, table 7: pairs of operations with their probabilities and magnitudes.
POLICY = """
Invert 0.1 7, Contrast 0.2 6; Rotate 0.7 2, TranslateX 0.3 9; Sharpness 0.8 1, Sharpness 0.9 3;
ShearY 0.5 8, TranslateY 0.7 9; AutoContrast 0.5 8, Equalize 0.9 2; ShearY 0.2 7, Posterize 0.3 7;
Color 0.4 3, Brightness 0.6 7; Sharpness 0.3 9, Brightness 0.7 9; Equalize 0.6 5, Equalize 0.5 1;
Contrast 0.6 7, Sharpness 0.6 5; Color 0.7 7, TranslateX 0.5 8; Equalize 0.3 7, AutoContrast 0.4 8;
TranslateY 0.4 3, Sharpness 0.2 6; Brightness 0.9 6, Color 0.2 8; Solarize 0.5 2, Invert 0.0 3;
Equalize 0.2 0, AutoContrast 0.6 0; Equalize 0.2 8, Equalize 0.6 4; Color 0.9 9, Equalize 0.6 6;
AutoContrast 0.8 4, Solarize 0.2 8; Brightness 0.1 3, Color 0.7 0; Solarize 0.4 5, AutoContrast 0.9 3;
TranslateY 0.9 9, TranslateY 0.7 9; AutoContrast 0.9 2, Solarize 0.8 3; Equalize 0.8 8, Invert 0.1 3;
TranslateY 0.7 9, AutoContrast 0.9 1
"""


def outcomes(image, name, chance, magnitude):
    """What an operation of the policy makes of an image of bytes, each with its probability."""
    policy = v2.AutoAugment(v2.AutoAugmentPolicy.CIFAR10)
    magnitudes, signed = policy._AUGMENTATION_SPACE[name]
    levels = magnitudes(10, *image.shape[1:])
    level = 0.0 if levels is None else float(levels[int(magnitude)])
    if 1 - chance > 1e-9:
        yield 1 - chance, image
    for sign in (1, -1) if signed else (1,):
        changed = policy._apply_image_or_video_transform(image, name, sign * level, policy.interpolation, policy._fill)
        yield chance / (2 if signed else 1), changed


def test_autoaugment_draws_each_pair_of_the_published_policy_as_often_as_it_should():
    picture = (torch.arange(3 * 12 * 10, dtype=torch.float64) * 37 % 251).to(torch.uint8).view(3, 12, 10)
    mean, std = [0.5, 0.4, 0.3], [0.2, 0.25, 0.3]
    chances = Counter()
    pairs = [[op.split() for op in pair.split(",")] for pair in POLICY.split(";")]
    for first, second in pairs:
        for chance, once in outcomes(picture, first[0], float(first[1]), first[2]):
            for then, twice in outcomes(once, second[0], float(second[1]), second[2]):
                for view in (twice, twice.flip(2)):
                    chances[as_key(view)] += chance * then / len(pairs) / 2
    assert sum(chances.values()) == pytest.approx(1)
    shape = (-1, 1, 1)
    normalised = (picture / 255 - torch.tensor(mean).view(shape)) / torch.tensor(std).view(shape)
    copies = 4000
    augmentation = AutoAugment(copies=copies, flip=True, mean=mean, std=std)
    (views,) = augmentation.views(normalised.unsqueeze(0), torch.Generator().manual_seed(0))
    levels = ((views * torch.tensor(std).view(shape) + torch.tensor(mean).view(shape)) * 255).round()
    counts = Counter(as_key(view) for view in levels)
    assert counts.keys() <= chances.keys()
    # Rare views together, so that five of each kind are expected; fails by chance for one seed in 10,000.
    common = [key for key in chances if copies * chances[key] >= 5]
    rest = 1 - sum(chances[key] for key in common)
    found = [counts[key] for key in common]
    expected = [*(copies * chances[key] for key in common), copies * rest]
    assert chisquare([*found, copies - sum(found)], expected).pvalue > 1e-4


def test_autoaugment_leaves_the_global_generator_alone_and_goes_by_its_own():
    augmentation, images = AutoAugment(flip=True), torch.rand(8, 3, 9, 9)
    before = torch.get_rng_state()
    first, second = (augmentation.views(images, torch.Generator().manual_seed(seed)) for seed in (0, 0))
    other = augmentation.views(images, torch.Generator().manual_seed(1))
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(first, second)
    assert not torch.equal(first, other)
    assert augmentation.views(images[:0], torch.Generator()).shape == (0, 3, 9, 9)


def test_autoaugment_then_crops_and_flips_by_the_same_generator():
    settings = {"mean": [0.5, 0.4, 0.3], "std": [0.2, 0.3, 0.1]}
    images, made = torch.rand(6, 3, 8, 8, generator=generator(3)), generator(4)
    mean, std = (torch.tensor(of).view(-1, 1, 1) for of in settings.values())
    changed = autoaugment((images * 255).round().to(torch.uint8).repeat_interleave(2, dim=0), made)
    want = Augmentation(crop=2, flip=True).views((changed / 255 - mean) / std, made)
    found = AutoAugment(copies=2, crop=2, flip=True, **settings).views((images - mean) / std, generator(4))
    torch.testing.assert_close(found, want.view(6, 2, 3, 8, 8))


def test_autoaugment_is_of_images_as_large_as_the_model_takes_them():
    """As the codes of DOPPLER and DP-PMLF have it, resized first (doppler.md 4.0)."""
    images, made = torch.rand(6, 3, 8, 8, generator=generator(5)), generator(6)
    large = v2.functional.resize(images, [20, 20], antialias=True)
    want = Augmentation(flip=True).views(autoaugment((large * 255).round().to(torch.uint8), made) / 255, made)
    torch.testing.assert_close(AutoAugment(size=20, flip=True).views(images, generator(6)), want)
    of_set = AutoAugment(flip=True).views(images, generator(6))
    assert not torch.allclose(v2.functional.resize(of_set, [20, 20], antialias=True), want, atol=0.1)


def test_autoaugment_has_the_size_of_the_model():
    cifar = ("augmentation=autoaugment", "dataset=cifar10")
    assert composed(*cifar, "model=cnn5").augmentation.size is None
    assert composed(*cifar, "model=resnet18").augmentation.size is None
    assert composed(*cifar, "model=resnet18", "model.image_size=224").augmentation.size == 224
    assert composed(*cifar, "model=vit_small").augmentation.size == 224
    assert composed(*cifar, "model=vit_small", "augmentation.size=null").augmentation.size is None
    for model, here in (("vit_small", "224"), ("cnn5", "null"), ("resnet18", "null")):
        sentence = rf"augmentation\.size=48: expected null, or model\.image_size, here {here}"
        with pytest.raises(UserError, match=sentence):
            composed(*cifar, f"model={model}", "augmentation.size=48")


def test_a_model_that_resizes_trains_on_large_views_and_is_tested_on_images_as_they_are(tmp_path):
    model = ("model=resnet18", "model.image_size=16", "model.stem=small")
    outcome = run(tmp_path, "augmentation=autoaugment", *model, "batch_size=16", "epochs=0.04")
    assert (outcome.code, outcome.err) == (0, "")


def test_autoaugment_changes_each_image_by_itself():
    """Those that an operation falls to go through it together, among them equalisation, which is by an image's own."""
    augmentation, images = AutoAugment(), torch.rand(400, 3, 8, 8)
    others = torch.cat([images[:200], torch.rand(200, 3, 8, 8) ** 4])
    first, second = (augmentation.views(of, torch.Generator().manual_seed(0)) for of in (images, others))
    assert torch.equal(first[:200], second[:200])
    assert not torch.equal(first[:200], images[:200])


def test_autoaugment_knows_by_what_images_are_normalised():
    config = composed("augmentation=autoaugment", "dataset=cifar10")
    assert (config.augmentation.mean, config.augmentation.std) == (config.dataset.mean, config.dataset.std)


def test_autoaugment_takes_grey_and_coloured_images_as_its_operations_do():
    means = ("dataset.mean=[0,0,0,0]", "dataset.std=[1,1,1,1]")
    with pytest.raises(UserError, match=r"dataset\.channels=4: expected 1 or 3, of which augmentation=autoaugment"):
        composed("augmentation=autoaugment", "dataset.channels=4", *means)
    with pytest.raises(TypeError, match="1 or 3"):
        v2.functional.equalize(v2.functional.adjust_saturation(torch.zeros(4, 8, 8, dtype=torch.uint8), 2))
    for name in ("digits", "cifar10"):
        assert composed("augmentation=autoaugment", f"dataset={name}").augmentation.random


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("augmentation.copies=2", r"augmentation\.copies=2: all views would be the same; choose crop or flip"),
        ("augmentation.copies=0", r"augmentation\.copies=0: expected a whole number >= 1"),
        ("augmentation.crop=-1", r"augmentation\.crop=-1: expected a whole number >= 0"),
        ("augmentation.crop=8", r"augmentation\.crop=8: expected fewer pixels than the 8 of dataset=digits"),
        ("precision=float16", r"precision=float16: expected one of float32, bfloat16"),
    ],
)
def test_bad_settings_are_refused(override, sentence, tmp_path):
    outcome = run(tmp_path, override)
    assert outcome.code == 2
    assert re.search(sentence, outcome.error())


def test_precision_and_augmentation_are_part_of_a_run_but_the_memory_layout_is_not():
    base = config_hash(composed())
    assert config_hash(composed("channels_last=true")) == base
    assert config_hash(composed("precision=bfloat16")) != base
    assert config_hash(composed("augmentation=crop_flip")) != base
