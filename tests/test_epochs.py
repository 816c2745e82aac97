"""One private epoch on each real data set, by a model that suits it. Minutes each."""

import json
import math

import pytest
from cli import run

PLAIN = ("device=cpu", "tracker=disabled", "privacy.accountant=rdp", "eps=8", "epochs=1")
# What a guess of the largest class of the test split would reach, and three standard deviations of it on that split.
GUESSES = {
    "mnist": 0.1135 + 3 * 0.0032,
    "fashion_mnist": 0.1 + 3 * 0.003,
    "cifar10": 0.1 + 3 * 0.003,
    "adult": 0.7638 - 3 * 0.0033,  # one epoch of softmax regression has just learnt the majority
    "sst2": 0.5092 - 3 * 0.017,  # likewise; more epochs are in test_text.py
    "rte": 0.5271 - 3 * 0.03,  # 2,490 pairs are too few to learn it privately
}
SUITABLE = {
    "mnist": ("model=cnn_small",),
    "fashion_mnist": ("model=cnn_small",),
    "cifar10": ("model=cnn5",),
    "adult": ("model=linear",),
    "sst2": ("model=text_small", "algo=dpadam", "dataset.max_length=64"),
    "rte": ("model=text_small", "algo=dpadam"),
}
TINY_GPT2 = (
    "model=gpt2", "model.pretrained=null", "model.width=32", "model.depth=1", "model.heads=2", "model.dropout=0",
    "model.longest=128",
)  # fmt: skip


def summary_of(results, *settings):
    outcome = run(results, *settings, settings=PLAIN)
    assert outcome.code == 0, outcome
    (folder,) = (results / "runs").glob("*/0")
    return json.loads((folder / "summary.json").read_text())


@pytest.mark.slow
@pytest.mark.parametrize("name", list(SUITABLE))
def test_an_epoch_of_classes(name, data_root, tmp_path):
    summary = summary_of(tmp_path, f"dataset={name}", f"data.root={data_root(name)}", *SUITABLE[name])
    assert summary["test_accuracy"]["final"] >= GUESSES[name]
    assert summary["eps"] <= 8


@pytest.mark.slow
def test_an_epoch_of_a_language_model_is_scored_by_five_metrics(data_root, tmp_path):
    """The frequencies of tokens alone would give a perplexity of 163 on the test split."""
    # The step suits weights from nothing; that of the data set is for pretrained ones.
    settings = (
        "dataset=e2e",
        f"data.root={data_root('e2e')}",
        "algo=dpadam",
        "optim.lr=0.01",
        "dataset.beams=1",
        *TINY_GPT2,
    )
    summary = summary_of(tmp_path, *settings)
    assert summary["perplexity"] < 100
    meteor = "meteor" if "meteor" in summary else "meteor_without_synonyms"
    assert all(math.isfinite(summary[name]) for name in ("bleu", "rouge_l", meteor, "nist", "cider"))


@pytest.mark.parametrize(("name", "file"), [("qnli", "glue/QNLI/train.tsv"), ("dart", "dart/train.jsonl")])
def test_a_data_set_without_its_training_split_is_one_sentence(name, file, data_root, tmp_path):
    root = data_root("sst2")
    if (root / file).exists():
        pytest.skip(f"{file} is there")
    settings = TINY_GPT2 if name == "dart" else ("model=text_small",)
    outcome = run(tmp_path, f"dataset={name}", f"data.root={root}", *settings, settings=PLAIN)
    assert outcome.code == 2
    assert f"{file} is missing" in outcome.error()
