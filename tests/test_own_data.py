"""Data of a person's own: the example of the documentation as it stands, all kinds, and what is refused."""

import json
import math
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from cli import read, records, run, status
from documented_examples import OWN_DATA, OWN_METHOD, typed, write_own_method
from PIL import Image

from dpbench.config import compose_jobs
from dpbench.data import ImageDataset, TableDataset, TextDataset
from dpbench.data.own import own_images
from dpbench.data.sources import State
from dpbench.errors import PlainWarning, UserError

SHAPE = {"classes": 3, "train_size": 6, "test_size": 3}
LABELS = {"train": np.array([0, 1, 2, 2, 1, 0]), "test": np.array([2, 1, 0])}


@pytest.fixture
def example(tmp_path, monkeypatch):
    """The files of the page, under the names it gives them."""
    shown = re.findall(r"`(my_conf/\S+\.yaml)`(?:[^`]|`[^`\n]+`)*```yaml\n(.*?)```", OWN_DATA, re.DOTALL)
    programs = [one for one in re.findall(r"```python\n(.*?)```", OWN_DATA, re.DOTALL) if "loadtxt" not in one]
    (tmp_path / "my_conf/dataset").mkdir(parents=True)
    for (name, content), program in zip(shown, programs, strict=True):
        (tmp_path / name).write_text(content)
        folder = tmp_path / "data" / Path(name).stem
        folder.mkdir(parents=True)
        monkeypatch.chdir(folder)
        exec(program, {})
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_rows_of_a_csv_file_are_scaled_by_the_bounds_that_the_page_states(tmp_path, monkeypatch):
    (program,) = (one for one in re.findall(r"```python\n(.*?)```", OWN_DATA, re.DOTALL) if "loadtxt" in one)
    monkeypatch.chdir(tmp_path)
    Path("sensors.csv").write_text("pressure,temperature,state\n50,-40,2\n100,10,0\n120,60,1\n")
    exec(program, {})
    with np.load("train.npz") as arrays:
        assert arrays["inputs"].tolist() == [[0.5, 0.0], [1.0, 0.5], [1.0, 1.0]]
        assert arrays["labels"].tolist() == [2, 0, 1]
        assert (arrays["inputs"].dtype, arrays["labels"].dtype) == (np.float32, np.int64)


def test_the_example_learns_with_every_method_that_the_page_names(example):
    settings = ("device=cpu", "tracker=disabled", "evaluation.every_epochs=null")
    for words in typed(OWN_DATA):
        outcome = run(example / "results", *words, "data.root=data", settings=settings)
        assert (outcome.code, outcome.err) == (0, "")
    found = records(example / "results")
    assert len(found) == 5
    for record in found:
        assert status(record) == "finished"
        assert read(record, "summary.json")["test_accuracy"]["final"] > 0.6  # by guessing a third, or half


@pytest.fixture
def own_models(example):
    """The models of the other page beside the data sets of this one."""
    return write_own_method(example)


def test_models_of_ones_own_learn_from_rows_and_from_texts(example, own_models):
    typed_there = typed(OWN_METHOD)[-2:]
    for words in typed_there:
        outcome = run(example / "results", *words, "data.root=data", settings=("device=cpu", "tracker=disabled"))
        assert (outcome.code, outcome.err) == (0, "")
    summaries = [read(record, "summary.json") for record in records(example / "results")]
    assert {(one["dataset"], one["model"]) for one in summaries} == {("sensors", "gated"), ("reviews", "words")}
    assert all(one["test_accuracy"]["final"] > 0.6 for one in summaries)  # by guessing a third, or half


def test_padding_does_not_matter_to_the_model_of_texts(own_models):
    config = compose_jobs(["dataset=reviews", "model=words"], multirun=False, config_dirs=[own_models])[0].config
    torch.manual_seed(0)
    model = config.model.build(config.dataset).double()
    ids = torch.randint(256, (4, 7))
    padded = torch.cat([ids, torch.full((4, 5), config.dataset.padding)], 1)
    torch.testing.assert_close(model(padded), model(ids), rtol=1e-12, atol=1e-12)
    assert not torch.allclose(model(padded), model(torch.cat([ids, ids[:, :5]], 1)))


@pytest.mark.parametrize(
    ("dataset", "model", "says"),
    [
        ("sensors", "patches", "takes images, but dataset=sensors has rows of numbers; extend dpbench.models.Dense"),
        ("sensors", "words", "takes texts, but dataset=sensors has rows of numbers; extend dpbench.models.Dense for"),
        ("sst2", "patches", "takes images, but dataset=sst2 has texts; extend dpbench.models.TextModel for these"),
        ("sst2", "gated", "takes images or rows of numbers, but dataset=sst2 has texts; extend dpbench.models.TextM"),
        ("scans", "words", "takes texts, but dataset=scans has images; extend dpbench.models.Model for these"),
    ],
)
def test_what_a_model_of_ones_own_should_extend_is_said(own_models, dataset, model, says):
    typed = [f"dataset={dataset}", f"model={model}"]
    if dataset == "sst2":  # whose tokens are the model's
        with pytest.raises(UserError, match="or a class that extends"):
            compose_jobs(typed, multirun=False, config_dirs=[own_models])
        typed += ["dataset.tokenizer=bytes", "dataset.vocabulary=259", "dataset.padding=258"]
    with pytest.raises(UserError, match=re.escape(f"model={model}: {says}")):
        compose_jobs(typed, multirun=False, config_dirs=[own_models])


def test_a_plan_says_what_is_missing(example):
    settings = ("device=cpu", "tracker=disabled")
    words = [*typed(OWN_DATA)[0], "plan=true", "data.root=data"]
    assert "not here" not in run(example / "results", *words, settings=settings).out
    (example / "data/sensors/test.npz").unlink()
    told = " ".join(run(example / "results", *words, settings=settings).out.split())
    assert "not here: data sensors; sensors/test.npz is missing" in told
    outcome = run(example / "results", *typed(OWN_DATA)[0], "data.root=data", settings=settings)
    assert outcome.code == 2
    assert outcome.err.count("\n") == 1
    assert "sensors/test.npz is missing" in outcome.err
    assert "write sensors/train.npz and sensors/test.npz" in outcome.err
    assert "data.download" not in outcome.err  # nobody could fetch it


# Rows of numbers.


def write_arrays(root, inputs, labels=LABELS):
    (root / "mine").mkdir(exist_ok=True)
    for split, of_split in inputs.items():
        np.savez(root / f"mine/{split}.npz", inputs=of_split, labels=labels[split])


def rows(dtype=np.float64) -> dict[str, np.ndarray]:
    values = np.random.default_rng(0).normal(size=(9, 4)).astype(dtype)
    return {"train": values[:6], "test": values[6:]}


def table(**settings) -> TableDataset:
    return TableDataset(name="mine", features=4, **{**SHAPE, **settings})


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16, np.int64, np.uint8, np.bool_])
def test_rows_of_any_type_of_number(tmp_path, dtype):
    written = rows(dtype)
    write_arrays(tmp_path, written, {split: labels.astype(np.int8) for split, labels in LABELS.items()})
    splits = table().load(tmp_path, download=False)
    for split, name in ((splits.train, "train"), (splits.test, "test")):
        found, labels = split.take(slice(None))
        assert found.dtype == torch.float32
        np.testing.assert_array_equal(found.numpy(), written[name].astype(np.float32))
        assert labels.tolist() == LABELS[name].tolist()


def unreadable(kind):
    def write(root):
        write_arrays(root, rows())
        path = root / "mine/train.npz"
        match kind:
            case "text":
                path.write_text("inputs")
            case "cut":
                path.write_bytes(path.read_bytes()[:200])
            case "one array":
                with path.open("wb") as stream:
                    np.save(stream, rows()["train"])
            case "other names":
                np.savez(path, x=rows()["train"], y=LABELS["train"])
            case "objects":
                np.savez(path, inputs=np.array([{}] * 6), labels=LABELS["train"])

    return write


def written(inputs=None, **labels):
    return lambda root: write_arrays(root, {**rows(), **(inputs or {})}, {**LABELS, **labels})


@pytest.mark.parametrize(
    ("write", "settings", "says"),
    [
        (unreadable("text"), {}, "train.npz can't be read as np.savez writes"),
        (unreadable("cut"), {}, "train.npz can't be read"),
        (unreadable("one array"), {}, "train.npz can't be read"),
        (unreadable("other names"), {}, "inputs is not a file in the archive"),
        (unreadable("objects"), {}, "Object arrays cannot be loaded"),
        (written(train=np.array([0.0, 1, 2, 2, 1, 0])), {}, r"float64 of shape \(6,\), expected whole numbers"),
        (written(train=LABELS["train"][:, None]), {}, r"int64 of shape \(6, 1\), expected whole numbers"),
        (written(train=LABELS["train"][:5]), {}, r"has 5 labels, and inputs that are float64 of shape \(6, 4\)"),
        (written({"train": rows()["train"][:, :, None]}), {}, r"expected numbers of shape \(N, F\)"),
        (written({"train": rows()["train"].astype(str)}), {}, r"expected numbers of shape \(N, F\)"),
        (written({"test": np.full((3, 4), np.nan)}), {}, "a number that float32 does not hold, in row 0"),
        (written({"test": np.full((3, 4), 1e39)}), {}, "a number that float32 does not hold, in row 0"),
        (written(), {"train_size": 7}, "the training split has 6 samples, expected 7"),
        (written(), {"classes": 2}, r"a label outside 0\.\.1"),
        (written(), {"features": 5}, "dataset.features=5: expected 4, as read"),
    ],
)
def test_rows_that_are_not_what_was_declared_are_one_sentence(tmp_path, write, settings, says):
    write(tmp_path)
    dataset = TableDataset(name="mine", **{"features": 4, **SHAPE, **settings})
    with pytest.raises(UserError, match=says) as raised:
        dataset.load(tmp_path, download=False)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("name", ["../mine", "/mine", "a/b", "", ".hidden", "a b", "mine\n"])
def test_a_name_is_a_folder_directly_under_the_data_root(name):
    for make in (TableDataset, ImageDataset, TextDataset):
        with pytest.raises(UserError, match=r"a folder under data\.root with data of your own"):
            make(name=name)


# Images.


def images(*, channels: int) -> dict[str, np.ndarray]:
    """Pixels of 9 images, (C, H, W) = (channels, 5, 6)."""
    values = np.random.default_rng(0).integers(0, 256, (9, channels, 5, 6), dtype=np.uint8)
    return {"train": values[:6], "test": values[6:]}


def image_data(channels: int, height: int = 5, width: int = 6, **settings) -> ImageDataset:
    normal = {"mean": [0.0] * channels, "std": [1.0] * channels}
    return ImageDataset(name="mine", channels=channels, height=height, width=width, **{**SHAPE, **normal, **settings})


@pytest.mark.parametrize(
    ("channels", "order"), [(1, (0, 1, 2, 3)), (1, (0, 2, 3, 1)), (1, None), (3, (0, 1, 2, 3)), (3, (0, 2, 3, 1))]
)
def test_images_in_every_order_of_dimensions(tmp_path, channels, order):
    drawn = images(channels=channels)
    kept = {name: one[:, 0] if order is None else one.transpose(order) for name, one in drawn.items()}
    write_arrays(tmp_path, kept)
    splits = image_data(channels).load(tmp_path, download=False)
    found, labels = splits.train.take(slice(None))
    np.testing.assert_array_equal(found.numpy(), np.float32(drawn["train"]) * np.float32(1 / 255))
    assert labels.tolist() == LABELS["train"].tolist()
    assert len(splits.test) == 3


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda one: one.astype(np.float32), "expected pixels as bytes"),
        (lambda one: one[..., :5], r"images of shape \(6, 3, 5, 5\) and 6 labels, expected \(6, 3, 5, 6\)"),
        (lambda one: one.transpose(0, 1, 3, 2), r"images of shape \(6, 3, 6, 5\)"),
    ],
)
def test_images_that_are_not_what_was_declared_are_one_sentence(tmp_path, change, says):
    write_arrays(tmp_path, {name: change(one) for name, one in images(channels=3).items()})
    with pytest.raises(UserError, match=says) as raised:
        image_data(3).load(tmp_path, download=False)
    assert "\n" not in str(raised.value)


def test_pixels_beyond_what_was_declared_are_one_sentence(tmp_path):
    write_arrays(tmp_path, images(channels=1))
    with pytest.raises(UserError, match=r"the training split has pixels up to 2\d\d"):
        image_data(1, highest=16).load(tmp_path, download=False)


def test_bytes_in_their_whole_range_are_not_looked_at():
    """All of a large data set would be read from disk."""

    class Mapped(torch.Tensor):
        def max(self, *_, **__):
            raise AssertionError("read")

    class Source:
        def read(self, root, shapes, *, download):
            made = [torch.zeros(shape, dtype=torch.uint8).as_subclass(Mapped) for shape in shapes]
            return made[0], torch.tensor(LABELS["train"]), made[1], torch.tensor(LABELS["test"])

    class Declared(ImageDataset):
        source = Source()

    data = Declared(name="mine", channels=1, height=2, width=2, mean=[0.0], std=[1.0], **SHAPE)
    assert len(data.load(Path("nowhere"), download=False).train) == 6


def test_rows_that_are_not_finite_are_no_inputs(tmp_path):
    data = TableDataset(name="mine", features=2, **SHAPE)
    assert data.inputs([[1.0, 2.0]], tmp_path).tolist() == [[1.0, 2.0]]
    for broken in (math.nan, math.inf):
        with pytest.raises(UserError, match="dataset=mine: has rows of finite numbers"):
            data.inputs([[1.0, broken]], tmp_path)


def draw_folders(root):
    """Two pictures of each of three classes to train on, and one for the test, of the shades 0, 80 and 160."""
    for split, count in (("train", 2), ("val", 1)):
        for shade, name in enumerate(("apple", "pear", "quince")):
            (root / "mine" / split / name).mkdir(parents=True)
            for i in range(count):
                Image.new("RGB", (9, 7), (80 * shade,) * 3).save(root / "mine" / split / name / f"{i}.png")


def test_folders_of_classes_are_read_as_those_of_imagenet(tmp_path):
    draw_folders(tmp_path)
    dataset = image_data(3, 4, 4)
    assert dataset.source.problems(tmp_path, thorough=True) == []
    splits = dataset.load(tmp_path, download=False)
    found, labels = splits.train.take(slice(None))
    assert labels.tolist() == [0, 0, 1, 1, 2, 2]
    torch.testing.assert_close(found, (labels * 80 / 255).view(6, 1, 1, 1).expand(6, 3, 4, 4).float())
    assert splits.test.labels.tolist() == [0, 1, 2]
    told = "3 folders of classes instead of 4 under data.root=.*; put that right, or the settings of the data set$"
    with pytest.raises(UserError, match=told):
        image_data(3, 4, 4, classes=4).load(tmp_path, download=False)


def test_pictures_that_came_or_went_after_they_were_decoded_are_told(tmp_path):
    """Here one is found to be of another class; those that are decoded are of the class of before until then."""
    draw_folders(tmp_path)
    dataset = image_data(3, 4, 4)
    dataset.load(tmp_path, download=False)
    dataset.load(tmp_path, download=False)  # without a warning, which would be an error here
    folders = tmp_path / "mine/train"
    (folders / "apple/0.png").rename(folders / "pear/2.png")
    with pytest.warns(PlainWarning, match=r"train/apple was changed after .*/mine/pixels-4 was made of it"):
        splits = dataset.load(tmp_path, download=False)
    assert splits.train.labels.tolist() == [0, 0, 1, 1, 2, 2]
    shutil.rmtree(tmp_path / "mine/pixels-4")
    assert dataset.load(tmp_path, download=False).train.labels.tolist() == [0, 1, 1, 1, 2, 2]


@pytest.mark.parametrize(("split", "sizes"), [("train", (4, 3)), ("val", (6, 2))])
def test_a_class_of_which_a_split_has_no_pictures(tmp_path, split, sizes):
    draw_folders(tmp_path)
    for path in (tmp_path / "mine" / split / "pear").iterdir():
        path.unlink()
    splits = image_data(3, 4, 4, train_size=sizes[0], test_size=sizes[1]).load(tmp_path, download=False)
    expected = {"train": [0, 0, 1, 1, 2, 2], "val": [0, 1, 2]}
    expected[split] = [label for label in expected[split] if label != 1]
    assert [splits.train.labels.tolist(), splits.test.labels.tolist()] == list(expected.values())


def test_folders_give_three_colours_which_is_said_before_they_are_decoded(tmp_path):
    draw_folders(tmp_path)
    with pytest.raises(UserError, match=r"dataset\.channels=1: expected 3: images in folders are decoded"):
        image_data(1, 4, 4).load(tmp_path, download=False)
    assert not list((tmp_path / "mine").glob("*pixels*"))


def test_no_images_at_all_say_both_ways_to_bring_them(tmp_path):
    assert own_images("mine", 6, 3, 3).state(tmp_path)[0] != State.PRESENT
    with pytest.raises(
        UserError, match=r"write mine/train.npz and mine/test.npz, or put images into mine/train/<class>"
    ):
        image_data(3).load(tmp_path, download=False)


# Texts.

SENTENCES = [{"text": f"w{i} plain", "label": i % 3} for i in range(6)]
PAIRS = [{**row, "text_pair": f"second {i}"} for i, row in enumerate(SENTENCES)]
TOLD = [{"prompt": f"name : w{i}", "completion": f"w{i} is its name"} for i in range(6)]


def write_lines(root, train, test=None):
    (root / "mine").mkdir(exist_ok=True)
    for split, lines in (("train", train), ("test", train[:3] if test is None else test)):
        text = "".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines)
        (root / f"mine/{split}.jsonl").write_text(text)


def text_data(**settings) -> TextDataset:
    tokens = {"tokenizer": "bytes", "vocabulary": 259, "padding": 258, "max_length": 64}
    return TextDataset(name="mine", **{**SHAPE, **tokens, **settings})


@pytest.mark.parametrize("lines", [SENTENCES, PAIRS], ids=["texts", "pairs"])
def test_texts_are_those_of_the_lines(tmp_path, lines):
    write_lines(tmp_path, [*lines[:3], "", *lines[3:]])
    source = text_data().source
    read_ = source.read(tmp_path, download=False)["train"]
    assert read_.first == [line["text"] for line in lines]
    assert read_.second == ([line["text_pair"] for line in lines] if "text_pair" in lines[0] else None)
    assert read_.labels == [0, 1, 2, 0, 1, 2]


def test_texts_to_continue_are_those_of_the_lines(tmp_path):
    write_lines(tmp_path, TOLD)
    found = text_data(classes=1).source.read(tmp_path, download=False)
    assert found["train"].first == [line["prompt"] for line in TOLD]
    assert found["train"].second == [line["completion"] for line in TOLD]
    assert found["train"].labels is None


@pytest.mark.parametrize(
    ("line", "settings", "says"),
    [
        ("{", {}, "train.jsonl can't be read, at line 7 or near"),
        ("[" * 100_000, {}, "train.jsonl can't be read, at line 7 or near"),
        ("[]", {}, 'line 7 of .*train.jsonl is no object with a text "text" and a whole number "label"'),
        ({"text": 1, "label": 0}, {}, "line 7"),
        ({"text": "a", "label": "0"}, {}, "line 7"),
        ({"text": "a", "label": True}, {}, "line 7"),
        ({"text": "a"}, {}, "line 7"),
        ({"text": "a", "text_pair": 1, "label": 0}, {}, "line 7"),
        (
            {"text": "cut \ud83d", "label": 0},
            {},
            r"train.jsonl can't be read, at line 7 or near .*surrogates not allowed",
        ),
        ({"text": "a", "text_pair": "b", "label": 0}, {}, "has lines with text_pair and lines without"),
        ({"text": "a", "label": 0}, {"classes": 1}, 'line 1 of .* no object with texts "prompt" and "completion"'),
        ({"text": "a", "label": 0}, {}, "the train split has 7 samples, expected 6"),
        ({"text": "a", "label": 3}, {"train_size": 7}, r"the train split has a label outside 0\.\.2"),
        ({"text": "a", "label": 2**63}, {"train_size": 7}, r"the train split has a label outside 0\.\.2"),
    ],
)
def test_texts_that_are_not_what_was_declared_are_one_sentence(tmp_path, monkeypatch, line, settings, says):
    monkeypatch.setenv("DPBENCH_CACHE", str(tmp_path / "cache"))
    write_lines(tmp_path, [*SENTENCES, line], SENTENCES[:3])
    with pytest.raises(UserError, match=says) as raised:
        text_data(**settings).load(tmp_path, download=False)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("lines", [(PAIRS, SENTENCES[:3]), (SENTENCES, PAIRS[:3])])
def test_pairs_are_not_scored_as_single_texts_nor_these_as_pairs(tmp_path, lines):
    write_lines(tmp_path, *lines)
    with pytest.raises(UserError, match=r"only one of train\.jsonl and test\.jsonl has text_pair"):
        text_data().load(tmp_path, download=False)


@pytest.mark.parametrize(("letters", "split"), [((30, 2), "train"), ((2, 30), "test")])
def test_prompts_that_leave_nothing_to_predict_are_refused(tmp_path, monkeypatch, letters, split):
    monkeypatch.setenv("DPBENCH_CACHE", str(tmp_path / "cache"))
    train, test = ([{"prompt": "x" * n, "completion": "y"}] * size for n, size in zip(letters, (6, 3), strict=True))
    write_lines(tmp_path, train, test)
    says = f"dataset.max_length=16: expected more: all prompts of the {split} split are longer, and nothing is left"
    with pytest.raises(UserError, match=re.escape(says)):
        text_data(classes=1, max_length=16).load(tmp_path, download=False)
    text_data(classes=1, max_length=32).load(tmp_path, download=False)


OWN_MODEL = """
from dataclasses import dataclass

from torch import nn

from dpbench.models.text import TextModel


class Net(nn.Module):
    def __init__(self, vocabulary, classes):
        super().__init__()
        self.embedding, self.head = nn.Embedding(vocabulary, 8), nn.Linear(8, classes)

    def forward(self, ids):
        return self.head(self.embedding(ids).mean(1))


@dataclass
class Pooled(TextModel):
    name: str = "pooled"
    tokenizer: str = "bytes"
    vocabulary: int = 259
    padding: int = 258

    def build(self, dataset):
        return Net(self.vocabulary, dataset.classes)
"""


def test_a_model_of_texts_that_reads_padding_is_refused_before_a_step(tmp_path, monkeypatch):
    monkeypatch.setenv("DPBENCH_CACHE", str(tmp_path / "cache"))
    write_lines(tmp_path, [{**line, "text": line["text"] * (1 + 3 * i)} for i, line in enumerate(SENTENCES)])
    (tmp_path / "conf/model").mkdir(parents=True)
    (tmp_path / "conf/my_padding_model.py").write_text(OWN_MODEL)
    (tmp_path / "conf/model/pooled.yaml").write_text(
        "defaults:\n  - /schema/model@_here_: my_padding_model.Pooled\n  - _self_\n"
    )
    outcome = run(tmp_path / "results", *described(tmp_path, "pooled"), settings=())
    assert outcome.code != 0
    assert "the model reads padding" in outcome.err
    assert records(tmp_path / "results") == []


def test_a_model_that_can_answer_no_prompts_is_refused_before_a_step_where_they_are_asked(tmp_path, monkeypatch):
    monkeypatch.setenv("DPBENCH_CACHE", str(tmp_path / "cache"))
    write_lines(tmp_path, TOLD)
    (tmp_path / "conf/model").mkdir(parents=True)
    generates = OWN_MODEL.replace(".mean(1)", "").replace("dataset.classes", "self.vocabulary")
    generates += "    @property\n    def generates(self):\n        return True\n"
    (tmp_path / "conf/my_answering_model.py").write_text(generates)
    (tmp_path / "conf/model/answering.yaml").write_text(
        "defaults:\n  - /schema/model@_here_: my_answering_model.Pooled\n  - _self_\n"
    )
    words = *described(tmp_path, "answering"), "dataset.classes=1"
    outcome = run(tmp_path / "results", *words, settings=())
    assert outcome.code == 2
    assert "dataset.most_tokens=64: answers to prompts come of a dpbench.models.NextToken alone" in outcome.err
    assert records(tmp_path / "results") == []
    outcome = run(tmp_path / "results", *words, "dataset.most_tokens=0", settings=())
    assert (outcome.code, outcome.err) == (0, "")
    (record,) = records(tmp_path / "results")
    assert math.isfinite(read(record, "summary.json")["perplexity"])


def test_pairs_train_a_model_of_texts(tmp_path, monkeypatch):
    monkeypatch.setenv("DPBENCH_CACHE", str(tmp_path / "cache"))
    write_lines(tmp_path, PAIRS)
    outcome = run(tmp_path / "results", *described(tmp_path, "lstm"), settings=())
    assert (outcome.code, outcome.err) == (0, "")
    (record,) = records(tmp_path / "results")
    summary = read(record, "summary.json")
    assert (summary["dataset"], summary["steps"]) == ("mine", 4)
    assert 7 < summary["eps"] <= 8


def described(folder, model):
    """Words that train a model on the lines of a folder, whose data set is described there."""
    content = {
        "defaults": [{"/schema/dataset@dataset": "text"}, {"override /model": model}, "_self_"],
        "dataset": {
            "name": "mine",
            **SHAPE,
            "max_length": 32,
            **{key: f"${{model.{key}}}" for key in ("tokenizer", "vocabulary", "padding")},
            "suggested": {"batch_size": 3, "epochs": 2, "lr": {"sgd": 1.0}},
        },
    }
    (folder / "conf/dataset").mkdir(parents=True)
    (folder / "conf/dataset/mine.yaml").write_text("# @package _global_\n" + yaml.safe_dump(content))
    own = ("-cd", str(folder / "conf"), "dataset=mine", f"data.root={folder}")
    return *own, "device=cpu", "tracker=disabled", "delta=1e-3"


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("defaults:\n  - digits\n  - _self_\nbatch_size: 50\n", "dataset/mine.yaml lacks the line # @package _global_"),
        (
            "defaults:\n  - digits\n  - override /model: mlp\n  - _self_\ndataset:\n  name: mine\n",
            "dataset/mine.yaml lacks the line # @package _global_",
        ),
        (
            "defaults:\n  - /schema/dataset@dataset: table\n  - _self_\ndataset:\n  name: mine\n",
            "dataset/mine.yaml lacks the line # @package _global_",
        ),
        (
            "# @package _global_\ndefaults:\n  - /schema/dataset@dataset: tabel\n  - _self_\n",
            "dataset/mine.yaml: /schema/dataset: tabel: expected one of images, table, text, or <module>.<Class>; "
            "did you mean table?",
        ),
        (
            "name: mine\n",
            "dataset=mine: its file names no class; its defaults need a line such as - /schema/dataset@dataset: ",
        ),
    ],
)
def test_a_slip_in_the_file_of_a_data_set_is_one_line(tmp_path, content, says):
    (tmp_path / "dataset").mkdir()
    (tmp_path / "dataset/mine.yaml").write_text(content)
    outcome = run(tmp_path / "results", "-cd", str(tmp_path), "dataset=mine")
    assert outcome.code == 2
    assert outcome.error().startswith(says)


def test_texts_to_continue_become_tokens_of_both_and_prompts(tmp_path, monkeypatch):
    monkeypatch.setenv("DPBENCH_CACHE", str(tmp_path / "cache"))
    write_lines(tmp_path, TOLD)
    splits = text_data(classes=1).load(tmp_path, download=False)
    assert splits.prompts is not None
    assert [splits.prompts.decode(ids[:-1]) for ids in splits.prompts.ids] == [line["prompt"] for line in TOLD[:3]]
    assert splits.prompts.references == [[line["completion"]] for line in TOLD[:3]]
    assert len(splits.train) == 6
