"""The model of a record, taken as the documentation says, against what the record says of it."""

import hashlib
import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from cli import ROOT, final_accuracy, records, run
from safetensors.torch import save_file

from dpbench.errors import UserError
from dpbench.trained import load_trained

QUICK = ("device=cpu", "tracker=disabled", "privacy.accountant=rdp", "keep_model=true")
PAGE = (ROOT / "docs/running.md").read_text()


def trained_by(folder: Path, *typed: str) -> Path:
    outcome = run(folder, *typed, settings=QUICK)
    assert (outcome.code, outcome.err) == (0, "")
    (record,) = records(folder)
    return record


def share(logits: torch.Tensor, labels: torch.Tensor) -> float:
    return (logits.argmax(1) == labels).double().mean().item()


def as_documented(record: Path, samples):
    (program,) = re.findall(r"```python\n(from dpbench.trained.*?)```", PAGE, re.DOTALL)
    names = {"samples": samples}
    with torch.no_grad():
        exec(program.replace("results/runs/<hash>/<seed>", str(record)), names)
    return names["logits"]


@pytest.mark.parametrize("typed", [(), ("averaging=exponential",), ("epochs=0.05", "model=cnn_small", "dataset=mnist")])
def test_images_are_classified_as_the_record_says(tmp_path, data_root, typed):
    root = data_root("mnist") if typed[-1:] == ("dataset=mnist",) else tmp_path
    record = trained_by(tmp_path / "results", "epochs=0.5", f"data.root={root}", *typed)
    test = load_trained(record).dataset.load(root, download=False).test
    assert share(as_documented(record, test.images), test.labels) == pytest.approx(final_accuracy(record), abs=1e-3)


def test_images_are_taken_as_they_are_stored_and_in_no_other_scale(tmp_path):
    trained = load_trained(trained_by(tmp_path, "epochs=0.3"))
    pixels = torch.arange(64).remainder(17).view(1, 1, 8, 8)
    mean, std = trained.dataset.mean[0], trained.dataset.std[0]
    expected = (pixels.double() / 16 - mean) / std
    torch.testing.assert_close(trained.inputs(pixels.to(torch.uint8)).double(), expected, rtol=1e-5, atol=1e-5)
    with pytest.raises(UserError, match="dataset=digits: has pixels that are whole numbers from 0 to 16, not float32"):
        trained.inputs(pixels / 16)
    wide = pixels.numpy().astype(np.uint16)
    torch.testing.assert_close(trained.inputs(wide).double(), expected, rtol=1e-5, atol=1e-5)
    for beyond, told in ((pixels + 1, "from 1 to 17"), (pixels - 1, "from -1 to 15"), (pixels > 3, "bool")):
        with pytest.raises(UserError, match=f"whole numbers from 0 to 16, not {told}"):
            trained.inputs(beyond)
    for wrong in (["a"], [pixels[0].tolist(), [[1, 2]]], [None]):
        with pytest.raises(UserError, match="dataset=digits: has images, and these make no tensor: "):
            trained.inputs(wrong)


@pytest.fixture
def texts(tmp_path) -> Path:
    (tmp_path / "data/mine").mkdir(parents=True)
    (tmp_path / "conf/dataset").mkdir(parents=True)
    for split, size in (("train", 60), ("test", 20)):
        lines = [
            {"text": f"word {'no' * (i % 2)} {i}", "text_pair": "yes" * (i % 3), "label": i % 2} for i in range(size)
        ]
        (tmp_path / f"data/mine/{split}.jsonl").write_text("\n".join(map(json.dumps, lines)))
    (tmp_path / "conf/dataset/mine.yaml").write_text(
        (ROOT / "conf/dataset/sst2.yaml").read_text()
        .replace("name: sst2", "name: mine").replace("67349", "60").replace("872", "20").replace("1024", "20")
    )  # fmt: skip
    return tmp_path


BYTES = ("model.tokenizer=bytes", "model.vocabulary=259", "model.padding=258")


ENCODER = ("model.width=8", "model.depth=2", "model.heads=2", "model.longest=32", "model.pretrained=null")
ENCODERS = (("roberta_base", "all"), ("roberta_base", "lora"), ("bert_base", "last_layer"))


@pytest.mark.parametrize("model", ENCODERS, ids="-".join)
def test_an_encoder_of_texts_is_taken_by_its_class(texts, model):
    name, trains = model
    record = trained_by(
        texts / "results", "-cd", str(texts / "conf"), "dataset=mine", f"data.root={texts / 'data'}", "epochs=2",
        f"model={name}", f"model.trained={trains}", *ENCODER, *BYTES, "dataset.max_length=24",
    )  # fmt: skip
    lines = [json.loads(line) for line in (texts / "data/mine/test.jsonl").read_text().splitlines()]
    logits = as_documented(record, [(line["text"], line["text_pair"]) for line in lines])
    assert share(logits, torch.tensor([line["label"] for line in lines])) == pytest.approx(final_accuracy(record))
    config = (record / "config.yaml").read_text()
    assert re.findall(r"^  (?:kind: TextEncoder|family: .*)$", config, re.MULTILINE) == [
        "  kind: TextEncoder",
        f"  family: {name.removesuffix('_base')}",
    ]


def test_weights_that_a_model_began_with_are_not_needed(texts):
    settings = ("-cd", str(texts / "conf"), "dataset=mine", f"data.root={texts / 'data'}", "model=roberta_base")
    sizes = (*ENCODER[:-1], *BYTES, "dataset.max_length=24", "model.trained=last_layer")
    first = trained_by(texts / "first", *settings, *sizes, "model.pretrained=null", "epochs=0.5")
    weights = texts / "elsewhere.safetensors"
    save_file(load_trained(first).model.net.state_dict(), weights)
    record = trained_by(texts / "second", *settings, *sizes, f"model.pretrained={weights}", "epochs=0.5")
    origin = json.loads((record / "provenance.json").read_text())
    assert origin["weights"] == hashlib.sha256(weights.read_bytes()).hexdigest()
    assert {"transformers", "tokenizers", "rouge-score"} <= origin["versions"].keys()
    assert "weights" not in json.loads((first / "provenance.json").read_text())
    before = {name: value.clone() for name, value in load_trained(record).model.state_dict().items()}
    weights.unlink()
    after = load_trained(record).model.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], before[name]) for name in before)


def test_texts_are_classified_as_the_record_says(texts):
    settings = ("-cd", str(texts / "conf"), "dataset=mine", f"data.root={texts / 'data'}", "epochs=2", *BYTES)
    record = trained_by(texts / "results", *settings)
    lines = [json.loads(line) for line in (texts / "data/mine/test.jsonl").read_text().splitlines()]
    logits = as_documented(record, [(line["text"], line["text_pair"]) for line in lines])
    labels = torch.tensor([line["label"] for line in lines])
    assert share(logits, labels) == pytest.approx(final_accuracy(record), abs=1e-9)
    # One text without a pair, too, with no column for what is not there.
    assert as_documented(record, ["word"]).shape == (1, 2)
    trained = load_trained(record)
    for wrong in ("word", ["word", ("two", "words")], [("a", "b", "c")], [1, 2], [("word", 3)], [{"text": "word"}]):
        with pytest.raises(UserError, match="dataset=mine: has a list of texts, or of pairs of texts"):
            trained.inputs(wrong)
    with pytest.raises(UserError, match="dataset=mine: has samples, of which none is given"):
        trained.inputs([])
    with pytest.raises(UserError, match=rf"no record of a run, .*; it has those of the seeds 0, such as {record}$"):
        load_trained(record.parent)


def test_rows_are_taken_as_they_are(tmp_path):
    record = trained_by(tmp_path, "dataset=digits", "model=linear", "epochs=0.3")
    (record / "config.yaml").write_text(
        re.sub(
            r"(?ms)^dataset:.*?^augmentation:",
            "dataset:\n  kind: TableDataset\n  name: mine\n  classes: 10\n  features: 64\naugmentation:",
            (record / "config.yaml").read_text(),
        )
    )
    rows = torch.randn(5, 64)
    model = load_trained(record).model
    torch.testing.assert_close(as_documented(record, rows.double().numpy()), model(rows), rtol=0, atol=0)
    with pytest.raises(UserError, match=r"dataset=mine: has samples of shape \(64\), not \(8, 8\)"):
        as_documented(record, torch.zeros(5, 8, 8))


# What is changed in config.yaml, and what is said then.
CHANGED = {
    "of another model": ("hidden:\n  - 64", "hidden:\n  - 32", "can't be read as the weights of this model"),
    "no such class": ("kind: MLP", "kind: MPL", "model.kind=MPL: expected one of Linear, MLP"),
    "no such setting": ("hidden:\n  - 64", "hiden:\n  - 64", "model has settings that MLP can't have"),
    "own class gone": ("kind: MLP", "kind: my_nets.Net", "/schema/model=my_nets.Net: there is no module my_nets"),
}


def spoil(record: Path, kind: str) -> str:
    """What is said then."""
    config, weights = record / "config.yaml", record / "model.safetensors"
    if kind == "nothing there":
        config.unlink()
        return "no record of a run"
    if kind == "no model kept":
        weights.unlink()
        return "the run kept no model; keep_model=true force=true"
    if kind == "cut":
        weights.write_bytes(weights.read_bytes()[:100])
        return "can't be read as the weights of this model"
    before, after, says = CHANGED[kind]
    config.write_text(config.read_text().replace(before, after))
    return says


@pytest.mark.parametrize("kind", ["nothing there", "no model kept", "cut", *CHANGED])
def test_what_is_wrong_with_a_record_is_a_sentence(tmp_path, kind):
    record = trained_by(tmp_path, "epochs=0.3")
    says = spoil(record, kind)
    with pytest.raises(UserError, match=re.escape(says)):
        load_trained(record)
