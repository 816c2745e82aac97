"""Folders of images as ImageNet has them, decoded once and mapped from disk, with pictures that these tests draw."""

import math
import os
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import assembled, composed
from PIL import Image
from torchvision.transforms import v2

from dpbench.data import Split
from dpbench.data.image_sources import IMAGES
from dpbench.data.sources import State
from dpbench.errors import UserError
from dpbench.privacy.sampling import PoissonSampler
from dpbench.privacy.uniform import SeededUniform
from dpbench.training.evaluation import evaluate
from dpbench.training.lockstep import alone
from dpbench.training.loop import train

CLASSES = ("n01440764", "n01443537", "n02084071")
TRAIN, TEST = 4, 2  # of each class
SIZES = ((40, 24), (24, 24), (18, 33), (64, 50))


def draw_pictures(root):
    """Pictures of several shapes and formats, the last one of a class grey."""
    noise = np.random.default_rng(0)
    for split, count in (("train", TRAIN), ("val", TEST)):
        for name in CLASSES:
            folder = root / "imagenet" / split / name
            folder.mkdir(parents=True)
            for i in range(count):
                width, height = SIZES[i % len(SIZES)]
                mode, shape = ("L", (height, width)) if i == 3 else ("RGB", (height, width, 3))
                picture = Image.fromarray(noise.integers(0, 256, shape, dtype=np.uint8), mode)
                picture.save(folder / (f"{name}_{i}.JPEG" if i % 2 == 0 else f"{name}_{i}.png"))


@pytest.fixture
def root(tmp_path):
    draw_pictures(tmp_path)
    return tmp_path


def dataset(*overrides, pixels=16):
    sizes = (f"dataset.height={pixels}", f"dataset.width={pixels}", "dataset.classes=3")
    counts = (f"dataset.train_size={3 * TRAIN}", f"dataset.test_size={3 * TEST}", "batch_size=4")
    return composed("dataset=imagenet", "model=linear", *sizes, *counts, *overrides)


def loaded(root, *overrides, **settings):
    return dataset(*overrides, **settings).dataset.load(root, download=False)


def test_pictures_are_resized_and_cut_as_torchvision_does(root):
    splits = loaded(root)
    assert splits.train.labels.tolist() == [0] * TRAIN + [1] * TRAIN + [2] * TRAIN
    assert splits.test.labels.tolist() == [0] * TEST + [1] * TEST + [2] * TEST
    for split, place in ((splits.train, "train"), (splits.test, "val")):
        paths = sorted((root / "imagenet" / place).glob("*/*"))
        assert len(split) == len(paths)
        for image, path in zip(split.images, paths, strict=True):
            picture = v2.functional.center_crop(v2.functional.resize(Image.open(path).convert("RGB"), 16), 16)
            assert torch.equal(image, v2.functional.pil_to_tensor(picture))


def test_decoded_pixels_are_all_that_a_run_needs(root):
    before = loaded(root)
    for split in ("train", "val"):
        (root / "imagenet" / split).rename(root / f"elsewhere-{split}")
    after = loaded(root)
    assert torch.equal(before.train.images, after.train.images)
    assert torch.equal(before.test.labels, after.test.labels)
    with pytest.raises(UserError, match=r"dataset=imagenet: .*imagenet/train has no images in folders of classes; ask"):
        loaded(root, pixels=8)


def test_each_size_is_decoded_for_itself(root):
    assert loaded(root, pixels=8).train.images.shape == (12, 3, 8, 8)
    assert loaded(root, pixels=24).train.images.shape == (12, 3, 24, 24)
    source = IMAGES["imagenet"]
    assert "decoded at 8, 24 pixels" in source.state(root)[1]
    for split in ("train", "val"):
        (root / "imagenet" / split).rename(root / f"elsewhere-{split}")
    assert source.state(root) == (State.PRESENT, "decoded at 8, 24 pixels")


def test_many_pictures_are_decoded_by_several_processes(root, monkeypatch):
    monkeypatch.setattr("dpbench.data.image_folders.WORTH_WORKERS", 1)
    monkeypatch.setattr("dpbench.data.image_folders.DECODED_AT_ONCE", 5)
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    apart = loaded(root).train.images.clone()
    monkeypatch.setattr("dpbench.data.image_folders.WORTH_WORKERS", math.inf)
    for path in (root / "imagenet" / "pixels-16").iterdir():
        path.unlink()
    (root / "imagenet" / "pixels-16").rmdir()
    assert torch.equal(loaded(root).train.images, apart)


def test_pixels_are_mapped_and_the_file_stays_as_it_is(root):
    images = loaded(root).train.images
    maps = Path("/proc/self/maps")
    assert not maps.exists() or str(root / "imagenet" / "pixels-16" / "train.npy") in maps.read_text()
    images[0] = 0
    assert int(loaded(root).train.images[0].max()) > 0


@pytest.mark.parametrize("worth_workers", [1, 1000])
def test_a_picture_that_cannot_be_decoded_is_named_and_leaves_nothing(root, monkeypatch, worth_workers):
    monkeypatch.setattr("dpbench.data.image_folders.WORTH_WORKERS", worth_workers)
    path = root / "imagenet" / "train" / CLASSES[1] / f"{CLASSES[1]}_2.JPEG"
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(UserError) as caught:
        loaded(root)
    assert str(caught.value) == f"dataset=imagenet: {path} can't be decoded; take another copy of it"
    assert sorted(p.name for p in (root / "imagenet").iterdir()) == ["train", "val"]


@pytest.mark.parametrize(
    ("dtype", "ending"), [(np.uint16, "png"), (np.uint16, "tif"), (np.int32, "tif"), (np.float32, "tif")]
)
def test_grey_levels_that_bytes_do_not_hold_are_refused_rather_than_made_white(root, dtype, ending):
    (root / "imagenet" / "train" / CLASSES[0] / f"{CLASSES[0]}_3.png").unlink()
    path = root / "imagenet" / "train" / CLASSES[0] / f"{CLASSES[0]}_3.{ending}"
    levels = np.linspace(0, 60_000, 24 * 24).reshape(24, 24).astype(dtype)
    Image.fromarray(levels).save(path)
    with Image.open(path) as picture:  # which is what Pillow does to them
        assert np.mean(np.asarray(picture.convert("RGB")) == 255) > 0.99
    with pytest.raises(UserError) as caught:
        loaded(root)
    told = f"dataset=imagenet: {path} has grey levels of more than 8 bits; save it with levels from 0 to 255"
    assert str(caught.value) == told


@pytest.mark.parametrize("file", ["train.npy", "val-labels.npy"])
@pytest.mark.parametrize("kept", [0, 50, 130, None])
def test_decoded_pixels_that_are_damaged_are_one_sentence(root, file, kept):
    loaded(root)
    path = root / "imagenet" / "pixels-16" / file
    if kept is None:
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:kept])
    complaint = rf"^dataset=imagenet: {path} is damaged; delete .*pixels-16, which is made again$"
    with pytest.raises(UserError, match=complaint):
        loaded(root)


@pytest.mark.parametrize(("setting", "declared"), [("train_size", 3 * TRAIN + 1), ("test_size", 3 * TEST + 1)])
def test_decoded_pixels_of_other_images_than_there_are_now_are_named(root, setting, declared):
    loaded(root)
    split = "train" if setting == "train_size" else "val"
    first = next((root / "imagenet" / split / CLASSES[0]).glob("*.png"))
    (first.parent / "one_more.png").write_bytes(first.read_bytes())
    told = rf"pixels-16 has {declared - 1} decoded images, and dataset\.{setting}={declared}; where images were added"
    with pytest.raises(UserError, match=told):
        loaded(root, f"dataset.{setting}={declared}")
    for path in (root / "imagenet" / "pixels-16").iterdir():
        path.unlink()
    (root / "imagenet" / "pixels-16").rmdir()
    assert len(getattr(loaded(root, f"dataset.{setting}={declared}"), split.replace("val", "test"))) == declared


def test_counts_are_checked_before_anything_is_decoded(root):
    with pytest.raises(UserError, match=r"imagenet/train has 12 images instead of 13$"):
        loaded(root, "dataset.train_size=13")
    (root / "imagenet" / "val" / CLASSES[2]).rename(root / "imagenet" / "val" / "n09999999")
    with pytest.raises(UserError, match="the class n02084071 is in only one of train and val"):
        loaded(root)
    assert not list((root / "imagenet").glob("*pixels*"))


def test_images_are_squares(root):
    with pytest.raises(UserError, match=r"dataset.width=8: expected 16 as dataset.height"):
        loaded(root, "dataset.width=8")


def test_decoding_needs_room(root, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 100}))
    with pytest.raises(UserError, match=r"decoding at 16 pixels needs 0 GB under .*, which are not free"):
        loaded(root)


def test_check_counts_classes_and_pictures(root):
    source = IMAGES["imagenet"]
    assert [p.text for p in source.problems(root, thorough=False)] == [
        "imagenet/train has 3 folders of classes instead of 1,000",
        "imagenet/val has 3 folders of classes instead of 1,000",
    ]
    small = type(source)("imagenet", "", 12, 6, "licence", classes=3)
    assert small.problems(root, thorough=True) == []
    (root / "imagenet" / "val" / CLASSES[0] / f"{CLASSES[0]}_0.JPEG").unlink()
    assert [p.text for p in small.problems(root, thorough=True)] == ["imagenet/val has 5 images instead of 6"]


# Images that are not on the device


def test_batches_are_the_same_where_images_are_not_resident():
    torch.manual_seed(0)
    images, labels = torch.randint(0, 256, (50, 2, 3, 3), dtype=torch.uint8), torch.arange(50)
    settings = {"highest": 255, "mean": [0.1, 0.2], "std": [0.3, 0.4]}
    here, away = (Split.of(images, labels, **settings, resident=resident) for resident in (True, False))
    sampler = PoissonSampler(50, 25, SeededUniform(torch.Generator().manual_seed(1)))
    for size in (1, 7, 100):
        indices = sampler.draw()
        pairs = zip(here.batches(indices, size), away.batches(indices, size), strict=True)
        assert all(torch.equal(a, c) and torch.equal(b, d) for (a, b), (c, d) in pairs)
    assert list(away.batches(torch.tensor([], dtype=torch.int64), 3)) == []


def test_only_resident_images_move():
    images, labels = torch.zeros(4, 1, 2, 2, dtype=torch.uint8), torch.arange(4)
    moved = [
        Split.of(images, labels, highest=255, mean=[0.0], std=[1.0], resident=resident).to(torch.device("meta"))
        for resident in (True, False)
    ]
    assert [split.images.device.type for split in moved] == ["meta", "cpu"]
    assert all(split.labels.device.type == split.offset.device.type == "meta" for split in moved)


def test_one_batch_is_read_ahead():
    taken, third = [], threading.Event()

    class Images(torch.Tensor):
        def index_select(self, dim, index):
            taken.append(index.tolist())
            if len(taken) == 3:
                third.set()
            return super().index_select(dim, index)

    images = torch.zeros(8, 1, 1, 1).as_subclass(Images)
    split = Split.of(images, torch.arange(8), highest=1, mean=[0.0], std=[1.0], resident=False)
    batches = split.batches(torch.arange(8), 2)
    next(batches)
    next(batches)
    assert third.wait(timeout=60), "the third batch is read only when it is asked for"
    batches.close()
    assert taken == [[0, 1], [2, 3], [4, 5]]


def test_the_thread_that_reads_ahead_touches_nothing_on_the_device():
    """While a pass is recorded on a GPU, whatever another thread asks of it breaks the recording."""

    class Watched(Split):
        def _normalised(self, images):
            assert threading.current_thread() is threading.main_thread()
            return super()._normalised(images)

    split = Watched.of(torch.zeros(8, 1, 1, 1), torch.arange(8), highest=1, mean=[0.0], std=[1.0], resident=False)
    moved = split.to(torch.device("meta"))
    here = {"images", "resident"}
    assert {name for name, value in vars(moved).items() if getattr(value, "is_meta", False)} == vars(
        moved
    ).keys() - here
    assert [len(labels) for _, labels in split.batches(torch.arange(7), 3)] == [3, 3, 1]


@pytest.mark.usefixtures("shared_streams")
def test_training_from_disk_is_training_from_memory(root):
    def trained(*overrides):
        config = dataset("privacy.accountant=rdp", "epochs=4", "optim.lr=0.1", *overrides)
        parts = assembled(config, noise_multiplier=1.0, steps=config.steps)
        splits = config.dataset.load(root, download=False)
        found = []
        alone(train(config, parts, splits, parts.step.ledger, on_step=lambda _: None, on_evaluation=found.append))
        return found, parts.step.gradients.flat.vector

    metrics, from_disk = trained()
    _, from_memory = trained("dataset.resident=true")
    assert torch.equal(from_disk, from_memory)
    assert len(metrics[-1].class_accuracy) == 3


# Evaluation


class Fixed(torch.nn.Module):
    """Gives each sample the logits that its one pixel names."""

    def __init__(self, guesses, classes):
        super().__init__()
        self.guesses, self.classes = guesses, classes

    def forward(self, x):
        return torch.nn.functional.one_hot(self.guesses[x.flatten().long()], self.classes).float()


@pytest.mark.parametrize("batch", [3, 1000])
def test_accuracy_of_each_class(batch):
    labels = torch.tensor([0, 0, 0, 1, 3, 3, 3, 3])
    guesses = torch.tensor([0, 1, 0, 1, 2, 3, 5, 0])
    pixels = torch.arange(8, dtype=torch.uint8).view(8, 1, 1, 1)
    split = Split.of(pixels, labels, highest=1, mean=[0.0], std=[1.0])
    found = evaluate(Fixed(guesses, 6), split, batch)
    assert found.class_accuracy == (pytest.approx(2 / 3), 1.0, None, 0.25)
    assert found.accuracy == pytest.approx(4 / 8)
