import hashlib
import os
import pickle
import shutil
import zipfile
from contextlib import redirect_stdout
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BytesIO, StringIO
from pathlib import Path
from threading import Thread
from urllib.error import URLError

import numpy as np
import pytest
import torch
import torchvision
from scipy.io import savemat

from dpbench.config import compose_jobs, conf_folder
from dpbench.data import Split
from dpbench.data.__main__ import main as catalogue_main
from dpbench.data.catalogue import SOURCES
from dpbench.data.image_sources import IMAGES
from dpbench.data.sources import File, FileSource
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


@pytest.mark.usefixtures("made_up_files")
def test_cifar100_is_read_from_its_layout(tmp_path):
    write_cifar100(tmp_path)
    declared = dataset("cifar100", *SMALL)
    splits = declared.load(tmp_path, download=False)
    assert splits.train.images.shape == (20, 3, 32, 32)
    assert splits.test.labels.tolist() == list(range(10))


@pytest.mark.usefixtures("made_up_files")
def test_too_few_images_are_damage(tmp_path):
    write_cifar100(tmp_path)
    with pytest.raises(UserError, match=r"dataset=cifar100: the training split has images of shape \(20, 3, 32, 32\)"):
        dataset("cifar100").load(tmp_path, download=False)


@pytest.mark.usefixtures("made_up_files")
def test_label_outside_the_classes_is_damage(tmp_path):
    write_cifar100(tmp_path)
    declared = dataset(
        "cifar100", "dataset.train_size=20", "dataset.test_size=10", "dataset.classes=15", "batch_size=5"
    )
    with pytest.raises(UserError, match=r"training split has a label outside 0\.\.14"):
        declared.load(tmp_path, download=False)


def write_svhn(root, sizes=(20, 10)):
    """MATLAB files as the authors give them: pixels (H, W, C, N), labels (N, 1) with 10 for the digit 0."""
    pixels = []
    for name, size in zip(("train", "test"), sizes, strict=True):
        pixels.append(np.random.default_rng(size).integers(0, 256, (32, 32, 3, size), dtype=np.uint8))
        labels = (np.arange(size, dtype=np.uint8) % 10 + 1)[:, None]
        (root / "svhn").mkdir(parents=True, exist_ok=True)
        savemat(root / "svhn" / f"{name}_32x32.mat", {"X": pixels[-1], "y": labels})
    return pixels


@pytest.mark.usefixtures("made_up_files")
def test_svhn_is_read_from_its_layout(tmp_path):
    train, test = write_svhn(tmp_path)
    splits = dataset("svhn", *SMALL).load(tmp_path, download=False)
    assert splits.train.labels.tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9, 0] * 2
    assert splits.test.images.shape == (10, 3, 32, 32)
    for channel, row, column, index in ((0, 3, 30, 7), (2, 31, 0, 9)):
        assert splits.train.images[index, channel, row, column] == train[row, column, channel, index]
        assert splits.test.images[index, channel, row, column] == test[row, column, channel, index]


# Files that are missing or damaged


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("mnist", "MNIST/raw/train-images-idx3-ubyte"),
        ("fashion_mnist", "FashionMNIST/raw/train-images-idx3-ubyte"),
        ("cifar10", "cifar-10-batches-py/data_batch_1"),
        ("cifar100", "cifar-100-python/train"),
        ("svhn", "svhn/train_32x32.mat"),
    ],
)
def test_missing_data_say_which_file_and_where_to_get_it(name, file, tmp_path):
    message = rf"dataset={name}: no complete copy under .*\({file} is missing\).*data.download=true.*DPBENCH_DATA"
    with pytest.raises(UserError, match=message) as caught:
        dataset(name).load(tmp_path, download=False)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["mnist", "sst2", "adult", "imagenet"])
def test_a_data_root_that_is_no_folder_is_called_that(name, tmp_path):
    source, elsewhere = SOURCES[name], "point data.root (or the environment variable DPBENCH_DATA)"
    remedy = source.by_hand or f"set data.download=true to fetch dataset={name} to it"
    (tmp_path / "file").write_text("")
    for file, says in (
        ("nowhere", f"no such folder; {remedy}, or {elsewhere} at another"),
        ("file", f"is no folder; {elsewhere} at one"),
    ):
        with pytest.raises(UserError) as caught:
            source.require_whole(tmp_path / file)
        assert str(caught.value) == f"data.root={tmp_path / file}: {says}"


@pytest.mark.parametrize("name", ["mnist", "adult", "imagenet"])
def test_data_are_not_looked_for_below_a_root_that_is_no_folder(name, tmp_path):
    with pytest.raises(UserError, match=r"^data\.root=.*/nowhere: no such folder; "):
        dataset(name).load(tmp_path / "nowhere", download=False)
    assert not [*tmp_path.iterdir()]


def test_nothing_is_fetched_to_a_file(tmp_path, monkeypatch):
    monkeypatch.setattr("torchvision.datasets.svhn.download_url", lambda *_: pytest.fail("fetched"))
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"^data\.root=.*/file: is no folder"):
        dataset("svhn").load(tmp_path / "file", download=True)


def test_built_in_data_need_no_root(tmp_path):
    assert len(dataset("digits").load(tmp_path / "nowhere", download=False).train) == 1437


def copy_of_mnist(source, target):
    """A data root whose files are links, but for the training images."""
    (target / "MNIST" / "raw").mkdir(parents=True)
    for file in (source / "MNIST" / "raw").iterdir():
        os.symlink(file.resolve(), target / "MNIST" / "raw" / file.name)
    images = target / "MNIST" / "raw" / "train-images-idx3-ubyte"
    content = images.read_bytes()
    images.unlink()
    return images, content


def test_truncated_and_corrupt_files_are_one_sentence(tmp_path, data_root):
    images, content = copy_of_mnist(data_root("mnist"), tmp_path)
    flipped = bytearray(content)
    flipped[1_000_000] ^= 1
    for damaged, complaint in (
        (content[:1_000_000], "has 1,000,000 bytes instead of 47,040,016"),
        (bytes(flipped), "is corrupt (another MD5 sum than 6bbc9ace898e44ae57da46a324031adb)"),
    ):
        images.write_bytes(damaged)
        for download in (False, True):
            with pytest.raises(UserError) as caught:
                dataset("mnist").load(tmp_path, download=download)
            want = (
                f"MNIST/raw/train-images-idx3-ubyte {complaint} under data.root={tmp_path}; delete it and fetch it anew"
            )
            assert str(caught.value) == f"dataset=mnist: {want}"


def test_one_missing_file_of_several_is_named(tmp_path, data_root):
    copy_of_mnist(data_root("mnist"), tmp_path)
    with pytest.raises(UserError, match=r"\(MNIST/raw/train-images-idx3-ubyte is missing\)"):
        dataset("mnist").load(tmp_path, download=False)


def test_what_is_missing_is_fetched_if_asked(tmp_path, monkeypatch):
    """The network is one that these tests make up; the sums of its files are those the source then knows."""
    sizes = (20, 10)
    write_svhn(tmp_path / "origin", sizes)
    names = ("svhn/train_32x32.mat", "svhn/test_32x32.mat")
    sums = [hashlib.md5((tmp_path / "origin" / name).read_bytes()).hexdigest() for name in names]
    files = tuple(File(name, md5) for name, md5 in zip(names, sums, strict=True))
    monkeypatch.setitem(IMAGES, "svhn", replace(IMAGES["svhn"], files=files))
    monkeypatch.setattr("torchvision.datasets.svhn.check_integrity", lambda path, _: Path(path).exists())
    fetched = []

    def download(url, root, filename, md5):
        fetched.append(filename)
        Path(root).mkdir(parents=True, exist_ok=True)
        shutil.copy(tmp_path / "origin" / "svhn" / filename, root)

    monkeypatch.setattr("torchvision.datasets.svhn.download_url", download)
    declared = dataset("svhn", *SMALL)
    for _ in range(2):
        splits = declared.load(tmp_path / "root", download=True)
        assert (len(splits.train), len(splits.test)) == sizes
    assert sorted(fetched) == ["test_32x32.mat", "train_32x32.mat"]


def write_mnist(folder, name, size):
    """A file of MNIST's format, of labels (name ends in idx1) or of images: a magic number, its shape, and bytes."""
    shape = (size,) if "idx1" in name else (size, 28, 28)
    head = np.array([0x800 + len(shape), *shape], dtype=">u4")
    (folder / name).write_bytes(head.tobytes() + np.full(shape, 3, dtype=np.uint8).tobytes())


@pytest.mark.usefixtures("made_up_files")
def test_files_of_an_old_torchvision_do_not_stand_in_for_those_that_are_fetched(tmp_path, monkeypatch):
    (tmp_path / "MNIST/processed").mkdir(parents=True)
    for name, size in (("training", 7), ("test", 5)):
        old = torch.zeros(size, 28, 28, dtype=torch.uint8), torch.zeros(size, dtype=torch.int64)
        torch.save(old, tmp_path / f"MNIST/processed/{name}.pt")

    def download(url, *, download_root, filename, md5):
        write_mnist(Path(download_root), filename.removesuffix(".gz"), 20 if "train" in filename else 10)

    monkeypatch.setattr("torchvision.datasets.mnist.download_and_extract_archive", download)
    splits = dataset("mnist", *SMALL).load(tmp_path, download=True)
    for split, size in ((splits.train, 20), (splits.test, 10)):
        assert split.labels.tolist() == [3] * size
        assert torch.equal(split.images, torch.full((size, 1, 28, 28), 3, dtype=torch.uint8))


def test_a_network_that_fails_is_one_sentence(tmp_path, monkeypatch):
    def fail(*_, **__):
        raise URLError("no route to host")

    monkeypatch.setattr("torchvision.datasets.svhn.download_url", fail)
    with pytest.raises(UserError, match=r"dataset=svhn: can't be fetched to data.root=.*URLError.*no route") as caught:
        dataset("svhn").load(tmp_path, download=True)
    assert "\n" not in str(caught.value)


# Archives that the network has, what they hold, what is read of it, and where an earlier attempt may have left a part.
ARCHIVES = {
    "adult": ("adult.zip", ["Index", "adult.data", "adult.test"], ["adult/adult.data", "adult/adult.test"], "adult"),
    "names": (
        "data.zip",
        ["data/eng-fra.txt", *(f"data/names/{i:02}.txt" for i in range(18))],
        [f"names/{i:02}.txt" for i in range(18)],
        ".names",
    ),
}


class Server(BaseHTTPRequestHandler):
    """Announces the whole archive, and sends so much of it."""

    whole, sent = b"", 0

    def do_HEAD(self):
        self.send_response(200)
        self.send_header("Content-Length", str(len(self.whole)))
        self.end_headers()

    def do_GET(self):
        self.do_HEAD()
        self.wfile.write(self.whole[: self.sent])

    def log_message(self, *_):
        pass


@pytest.fixture
def address():
    with ThreadingHTTPServer(("127.0.0.1", 0), Server) as server:
        Thread(target=server.serve_forever).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.usefixtures("made_up_files")
@pytest.mark.parametrize("name", ARCHIVES)
@pytest.mark.parametrize("left", [False, True])
def test_an_archive_that_was_fetched_in_part_is_fetched_anew(name, left, address, tmp_path, monkeypatch):
    file, held, wanted, leftover = ARCHIVES[name]
    with BytesIO() as content:
        with zipfile.ZipFile(content, "w") as archive:
            for one in held:
                archive.writestr(one, "word\n")
        monkeypatch.setattr(Server, "whole", content.getvalue())
    most = len(Server.whole) - 20
    source = replace(SOURCES[name], train=14, test=4)
    monkeypatch.setattr(type(source), "URL", f"{address}/{file}")
    if left:
        (tmp_path / leftover).mkdir()
        (tmp_path / leftover / file).write_bytes(Server.whole[:most])
    before = sorted(tmp_path.rglob("*"))
    monkeypatch.setattr(Server, "sent", most)
    with pytest.raises(UserError, match=rf"^dataset={name}: can't be fetched to data\.root=\S+ \(BadZipFile: "):
        source.obtain(tmp_path, download=True)
    assert sorted(tmp_path.rglob("*")) == before
    monkeypatch.setattr(Server, "sent", len(Server.whole))
    source.obtain(tmp_path, download=True)
    found = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    assert found == {*wanted, *([f"{leftover}/{file}"] if left else [])}


# The catalogue


def test_declarations_agree_with_the_catalogue():
    options = {path.stem for path in (conf_folder() / "dataset").glob("*.yaml")}
    assert options >= set(IMAGES) <= set(SOURCES)
    for name in IMAGES:
        declared = dataset(name)
        assert (declared.train_size, declared.test_size) == (SOURCES[name].train, SOURCES[name].test)


def test_sums_are_torchvisions():
    known = {md5 for _, _, md5 in torchvision.datasets.SVHN.split_list.values()}
    for kind in (torchvision.datasets.CIFAR10, torchvision.datasets.CIFAR100):
        known |= {md5 for _, md5 in kind.train_list + kind.test_list} | {kind.meta["md5"]}
    for name in ("cifar10", "cifar100", "svhn"):
        assert {file.md5 for file in IMAGES[name].files} <= known


def listed(*arguments):
    out = StringIO()
    with redirect_stdout(out):
        code = catalogue_main(list(arguments))
    return code, out.getvalue()


def line_of(text, name):
    return next(line.rstrip() for line in text.splitlines() if line.startswith(f"{name} "))


def test_list_tells_what_is_here(tmp_path, data_root):
    code, text = listed(f"data.root={data_root('mnist')}")
    assert line_of(text, "mnist").split() == ["mnist", "MNIST", "60,000", "10,000", "present"]
    code, text = listed(f"data.root={tmp_path}")
    assert code == 0
    assert line_of(text, "digits").endswith("present")
    assert line_of(text, "svhn").endswith("can be downloaded")
    assert line_of(text, "imagenet").endswith("needs a licence")
    assert "imagenet: ask for it at image-net.org" in text


def test_damage_is_listed_and_found_by_a_check(tmp_path, data_root):
    images, content = copy_of_mnist(data_root("mnist"), tmp_path)
    images.write_bytes(content[:-1])
    code, text = listed("list", "mnist", f"data.root={tmp_path}")
    assert code == 1
    assert line_of(text, "mnist").endswith("damaged")
    assert "mnist: MNIST/raw/train-images-idx3-ubyte has 47,040,015 bytes instead of 47,040,016" in text
    images.write_bytes(content[:-1] + b"\x07")
    assert listed("list", "mnist", f"data.root={tmp_path}")[0] == 0  # which looks at sizes only
    code, text = listed("check", f"data.root={tmp_path}")
    assert code == 1
    assert "mnist: MNIST/raw/train-images-idx3-ubyte is corrupt" in text
    assert "svhn: not here" in text
    images.write_bytes(content)
    assert listed("check", "mnist", f"data.root={tmp_path}") == (0, "mnist: whole\n")


def test_check_of_a_named_data_set_that_is_not_here_fails(tmp_path):
    code, text = listed("check", "svhn", f"data.root={tmp_path}")
    assert code == 1
    assert "svhn: svhn/train_32x32.mat is missing" in text


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["check", "minst"], "name=minst: expected one of digits, mnist"),
        (["mnist", "check"], "name=check: expected one of"),
        (["eps=8"], "eps=8: expected data.root=FOLDER"),
        (["data.root="], "data.root=: expected data.root=FOLDER"),
        (["--root", "data"], "name=--root: expected one of"),
    ],
)
def test_what_is_unknown_is_refused(words, said, capsys):
    assert catalogue_main(words) == 2
    assert said in " ".join(capsys.readouterr().err.split())


def test_a_data_root_without_a_name_is_refused(monkeypatch, capsys):
    monkeypatch.setenv("DPBENCH_DATA", "")
    assert catalogue_main([]) == 2
    assert "DPBENCH_DATA='': expected the name of a folder" in capsys.readouterr().err


def test_a_file_in_place_of_a_data_root_is_refused_by_the_list_too(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    for command in ("list", "check"):
        assert catalogue_main([command, f"data.root={tmp_path / 'file'}"]) == 2
        assert f"data.root={tmp_path / 'file'}: is no folder; point data.root" in capsys.readouterr().err


def test_help_names_what_there_is(capsys):
    assert catalogue_main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(word in text for word in ("list", "check", "data.root", "DPBENCH_DATA"))


def test_a_data_set_of_another_kind_is_one_entry(tmp_path, monkeypatch):
    text = b"one\ntwo\n"
    source = FileSource("words", "Two words", 1, 1, files=(File("words/all.txt", hashlib.md5(text).hexdigest(), 8),))
    monkeypatch.setitem(SOURCES, "words", source)
    assert line_of(listed(f"data.root={tmp_path}")[1], "words").endswith("can be downloaded")
    (tmp_path / "words").mkdir()
    (tmp_path / "words" / "all.txt").write_bytes(text)
    assert line_of(listed(f"data.root={tmp_path}")[1], "words").endswith("present")
    assert listed("check", "words", f"data.root={tmp_path}") == (0, "words: whole\n")
