import itertools
import re
from collections import Counter

import pytest
import torch
from cli import run
from helpers import assembled, composed
from scipy.stats import chisquare

from dpbench.config import config_hash
from dpbench.data import Augmentation
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
