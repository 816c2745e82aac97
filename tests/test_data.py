import os
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
import torchvision

from dpbench.config import compose_jobs
from dpbench.data import Split
from dpbench.errors import UserError


def dataset(name, *overrides):
    return compose_jobs([f"dataset={name}", *overrides], multirun=False)[0].config.dataset


@pytest.mark.parametrize("name", ["mnist", "fashion_mnist", "cifar10"])
def test_real_data_load_as_declared(name, data_root):
    declared = dataset(name)
    splits = declared.load(data_root(name), download=False)
    assert (len(splits.train), len(splits.test)) == (declared.train_size, declared.test_size)
    assert splits.train.images.dtype == torch.uint8
    assert torch.equal(splits.test.labels.bincount(), torch.full((10,), 1000)) or name == "mnist"
    images, labels = splits.train.take(torch.arange(0, len(splits.train), 5))
    assert images.shape[1:] == (declared.channels, declared.height, declared.width)
    assert labels.unique().tolist() == list(range(10))
    for channel in images.transpose(0, 1):
        assert abs(float(channel.mean())) < 0.05
        assert float(channel.std()) == pytest.approx(1, abs=0.05)


def test_mnist_pixels_are_torchvisions(data_root):
    root = data_root("mnist")
    splits = dataset("mnist", "dataset.mean=[0.0]", "dataset.std=[1.0]").load(root, download=False)
    reference = torchvision.datasets.MNIST(str(root), train=False)
    images, labels = splits.test.take(torch.tensor([0, 17, 9999]))
    for image, label, index in zip(images, labels, (0, 17, 9999), strict=True):
        picture, want = reference[index]
        torch.testing.assert_close(image, torchvision.transforms.functional.to_tensor(picture))
        assert int(label) == want


def test_digits_are_scikit_learns_split_without_overlap():
    splits = dataset("digits").load(Path("nowhere"), download=False)
    assert (len(splits.train), len(splits.test)) == (1437, 360)
    assert int(splits.train.images.max()) == 16
    both = torch.cat([splits.train.images, splits.test.images]).flatten(1)
    assert len(both.unique(dim=0)) == 1797
    shares = splits.test.labels.bincount() / (splits.test.labels.bincount() + splits.train.labels.bincount())
    assert (shares - 0.2).abs().max() < 0.01


def test_normalisation_is_per_channel():
    raw = torch.randint(0, 256, (6, 2, 3, 3), dtype=torch.uint8)
    split = Split.of(raw, torch.arange(6), highest=255, mean=[0.5, 0.25], std=[0.2, 0.4])
    images, labels = split.take(torch.tensor([4, 1]))
    want = torch.stack([(raw[[4, 1], 0] / 255 - 0.5) / 0.2, (raw[[4, 1], 1] / 255 - 0.25) / 0.4], dim=1)
    torch.testing.assert_close(images, want)
    assert labels.tolist() == [4, 1]


def test_batches_cover_each_index_once_and_an_empty_batch_has_none():
    split = Split.of(torch.zeros(10, 1, 2, 2, dtype=torch.uint8), torch.arange(10), highest=255, mean=[0.0], std=[1.0])
    parts = [labels.tolist() for _, labels in split.batches(torch.tensor([1, 3, 5, 8, 9]), 2)]
    assert parts == [[1, 3], [5, 8], [9]]
    assert list(split.batches(torch.tensor([], dtype=torch.int64), 2)) == []


SMALL = ("dataset.train_size=20", "dataset.test_size=10", "batch_size=5")


def write_cifar100(root, sizes=(20, 10)):
    folder = root / "cifar-100-python"
    folder.mkdir(parents=True)
    for name, size in zip(("train", "test"), sizes, strict=True):
        entry = {
            "data": np.zeros((size, 3072), dtype=np.uint8),
            "fine_labels": [i % 100 for i in range(size)],
        }
        (folder / name).write_bytes(pickle.dumps(entry))
    (folder / "meta").write_bytes(pickle.dumps({"fine_label_names": [str(i) for i in range(100)]}))


@pytest.fixture
def any_checksum(monkeypatch):
    monkeypatch.setattr("torchvision.datasets.cifar.check_integrity", lambda *_: True)


def test_cifar100_is_read_from_its_layout(tmp_path, any_checksum):
    write_cifar100(tmp_path)
    declared = dataset("cifar100", *SMALL)
    splits = declared.load(tmp_path, download=False)
    assert splits.train.images.shape == (20, 3, 32, 32)
    assert splits.test.labels.tolist() == list(range(10))


def test_too_few_images_are_damage(tmp_path, any_checksum):
    write_cifar100(tmp_path)
    with pytest.raises(UserError, match=r"dataset=cifar100: the training split has images of shape \(20, 3, 32, 32\)"):
        dataset("cifar100").load(tmp_path, download=False)


def test_label_outside_the_classes_is_damage(tmp_path, any_checksum):
    write_cifar100(tmp_path)
    declared = dataset(
        "cifar100", "dataset.train_size=20", "dataset.test_size=10", "dataset.classes=15", "batch_size=5"
    )
    with pytest.raises(UserError, match=r"training split has a label outside 0\.\.14"):
        declared.load(tmp_path, download=False)


@pytest.mark.parametrize("name", ["mnist", "fashion_mnist", "cifar10", "cifar100"])
def test_missing_data_say_where_to_get_them(name, tmp_path):
    with pytest.raises(UserError, match=f"dataset={name}: no complete copy under .*data.download=true.*DPBENCH_DATA"):
        dataset(name).load(tmp_path, download=False)


def test_a_truncated_file_is_one_sentence(tmp_path, data_root):
    source = data_root("mnist") / "MNIST" / "raw"
    target = tmp_path / "MNIST" / "raw"
    target.mkdir(parents=True)
    for file in source.iterdir():
        os.symlink(file.resolve(), target / file.name)
    images = target / "train-images-idx3-ubyte"
    images.unlink()
    images.write_bytes((source / images.name).read_bytes()[:1_000_000])
    with pytest.raises(UserError, match=r"dataset=mnist: can't be read from data.root=") as caught:
        dataset("mnist").load(tmp_path, download=False)
    assert "\n" not in str(caught.value)
