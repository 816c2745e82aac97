"""Training samples that are set aside for validation: which ones, that nothing of them is learnt, what N then is."""

import json
import math

import numpy as np
import pytest
import torch
from cli import PLAIN, records, run
from helpers import composed

from dpbench.audit.canaries import with_canaries
from dpbench.config import config_hash
from dpbench.data import ImageDataset, Split, Splits, TokenSplit
from dpbench.data.shards import Shard
from dpbench.data.subset import Subset, with_validation
from dpbench.errors import UserError
from dpbench.gradients import FlatParameters, PerSampleGradients
from dpbench.results.integrity import problems_of
from dpbench.tracking.reading import Recorded
from dpbench.training.budget import budget, guarantee_of
from dpbench.training.loading import load_splits
from dpbench.training.losses import per_sample_loss
from dpbench.training.padding import require_padding_unread

PLACES = torch.tensor([7, 0, 3, 9, 4])


def images(resident=True):
    pixels = torch.randint(0, 256, (10, 1, 2, 2), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    return Split.of(pixels, torch.arange(10), highest=255, mean=[0.1], std=[0.5], resident=resident)


def texts(generates=False):
    samples = [[5 + n] * (1 + 3 * n % 7) for n in range(10)]
    labels = [0] * 10 if generates else list(range(10))
    return TokenSplit.of(samples, labels, padding=0, longest=20, generates=generates)


SPLITS = {"images": images(), "on disk": images(resident=False), "texts": texts(), "next tokens": texts(generates=True)}


def told(batches):
    """Every sample of some batches as what there is of it beside padding, in any order."""
    rows = [(inputs[i], targets[i]) for inputs, targets in batches for i in range(len(inputs))]
    return sorted((*x[x != 0].tolist(), *y[y != -100].view(-1).tolist()) for x, y in rows)


@pytest.mark.parametrize("kind", SPLITS)
def test_a_subset_has_the_samples_of_its_places_and_no_others(kind):
    whole = SPLITS[kind]
    some = Subset(whole, PLACES).to(torch.device("cpu"))
    assert len(some) == 5
    assert torch.equal(some.labels, whole.labels[PLACES])
    for indices in (torch.tensor([2, 4, 0]), slice(1, 4)):
        for found, wanted in zip(some.take(indices), whole.take(PLACES[indices]), strict=True):
            assert torch.equal(found, wanted)
    one_by_one = [whole.take(place.view(1)) for place in PLACES]
    assert told(some.everything(2)) == told(one_by_one)
    assert told(some.batches(torch.tensor([1, 4, 2]), 2)) == told([one_by_one[i] for i in (1, 4, 2)])
    assert list(some.batches(torch.tensor([], dtype=torch.int64), 2)) == []


@pytest.mark.parametrize("kind", SPLITS)
def test_processes_share_a_subset_out_among_them(kind):
    some = Subset(SPLITS[kind], PLACES)
    shares = [batch for rank in range(2) for batch in Shard(some, rank, 2).everything(2)]
    assert told(shares) == told(some.everything(2))
    drawn = torch.tensor([0, 3, 4])
    shares = [batch for rank in range(2) for batch in Shard(some, rank, 2).batches(drawn, 2)]
    assert told(shares) == told(some.batches(drawn, 2))


def test_samples_set_aside_are_some_at_random_and_the_same_ones_each_time():
    """Of data sorted by class each class gives its share; 3 sigma of a hypergeometric number is 19 of 100."""
    count, classes = 5000, 10
    labels = torch.arange(count) * classes // count
    whole = Split.of(torch.zeros(count, 1, 1, 1, dtype=torch.uint8), labels, highest=255, mean=[0.0], std=[1.0])
    splits = with_validation(Splits(whole, whole, {"other": whole}), 1000)
    assert (len(splits.train), len(splits.others["validation"])) == (4000, 1000)
    assert splits.test is splits.others["other"] is whole
    parts = [split.places for split in (splits.train, splits.others["validation"])]
    assert torch.equal(torch.cat(parts).sort().values, torch.arange(count))
    shares = splits.others["validation"].labels.bincount()
    sigma = math.sqrt(1000 * 0.1 * 0.9 * 4000 / 4999)
    assert ((shares - 100).abs() < 3 * sigma).all()
    assert shares.float().std() > 0
    torch.rand(3)  # from the global generator, which has no part in it
    again = with_validation(Splits(whole, whole), 1000)
    assert torch.equal(again.train.places, parts[0])
    more = with_validation(Splits(whole, whole), 1500).others["validation"].places
    assert set(parts[1].tolist()) < set(more.tolist())
    assert with_validation(splits, None) is splits


def test_both_parts_are_of_one_copy_on_the_device():
    config = composed("dataset=digits", "dataset.validation_size=100")
    splits = load_splits(config, torch.device("cpu"))
    assert splits.train.whole is splits.others["validation"].whole
    assert (len(splits.train), len(splits.others["validation"])) == (1337, 100)


def test_n_is_what_is_left():
    """Steps, sampling rate, delta and noise are those of a data set that has no more samples than that."""
    aside = composed("dataset=mnist", "dataset.validation_size=10000")
    fewer = composed("dataset=mnist", "dataset.train_size=50000")
    assert aside.dataset.trained_on == 50_000
    assert aside.sampling_rate == aside.batch_size / 50_000
    assert (aside.steps, aside.delta_value) == (fewer.steps, fewer.delta_value)
    assert aside.release_plan() == fewer.release_plan()
    assert budget(aside).noise_multiplier == budget(fewer).noise_multiplier
    assert "each of the 50000 training samples" in guarantee_of(aside, budget(aside))
    assert "The 10000 samples set aside for validation are not protected." in guarantee_of(aside, budget(aside))
    assert "set aside" not in guarantee_of(fewer, budget(fewer))
    passes = composed("dataset=mnist", "dataset.validation_size=10500", "privacy=shuffled", "batch_size=1000")
    assert passes.steps == passes.epochs * 50  # of which the last one has 500
    assert with_canaries(aside, 4).dataset.trained_on == 50_000


def test_a_run_with_samples_set_aside_is_another_run_and_without_the_one_it_was():
    plain = composed("dataset=mnist")
    assert config_hash(composed("dataset=mnist", "dataset.validation_size=null")) == config_hash(plain)
    hashes = {config_hash(composed("dataset=mnist", f"dataset.validation_size={n}")) for n in (1, 2, 3)}
    assert len(hashes | {config_hash(plain)}) == 4


@pytest.mark.parametrize("size", [0, -1, 1437, 2000])
def test_so_many_samples_can_not_be_set_aside(size):
    allowed = "null, or a whole number > 0 and below the 1437 training samples"
    with pytest.raises(UserError, match=f"dataset.validation_size={size}: .*{allowed}"):
        composed("dataset=digits", f"dataset.validation_size={size}")


def test_a_batch_has_no_more_samples_than_are_left():
    with pytest.raises(UserError, match=r"batch_size=1400: .*at most the 1337 training samples"):
        composed("dataset=digits", "dataset.validation_size=100", "batch_size=1400")


def test_texts_that_share_prompts_are_not_torn_apart():
    with pytest.raises(UserError, match=r"dataset.validation_size=10: .*null for texts to be continued"):
        composed("dataset=e2e", "dataset.validation_size=10")


def test_a_model_that_reads_padding_is_refused_where_samples_are_set_aside():
    class Reads(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = torch.nn.Embedding(300, 3)

        def forward(self, ids):
            return self.embedding(ids).mean(1)

    torch.manual_seed(0)
    model = Reads().train()
    gradients = PerSampleGradients(model, FlatParameters(model), per_sample_loss)
    split = TokenSplit.of([[5] * n for n in (3, 40, 7, 12)], [0, 1, 2, 0], padding=258, longest=64, generates=False)
    train = with_validation(Splits(split, split), 1).train
    with pytest.raises(UserError, match="the model reads padding"):
        require_padding_unread(lambda: gradients, train)


@pytest.fixture
def own_images(tmp_path, monkeypatch):
    """Writes images of one's own, those set aside as they are or as noise."""
    monkeypatch.chdir(tmp_path)
    draws = np.random.default_rng(0)
    (tmp_path / "my_conf/dataset").mkdir(parents=True)
    (tmp_path / "data/dots").mkdir(parents=True)
    (tmp_path / "my_conf/dataset/dots.yaml").write_text(
        "# @package _global_\n# Dots.\ndefaults:\n  - /schema/dataset@dataset: images\n  - override /model: mlp\n"
        "  - _self_\ndataset:\n  name: dots\n  channels: 1\n  height: 3\n  width: 3\n  classes: 2\n  train_size: 60\n"
        "  test_size: 20\n  highest: 255\n  mean: [0.5]\n  std: [0.25]\n  suggested:\n    batch_size: 12\n"
        "    epochs: 4\n    lr: {sgd: 1.0, adam: 0.01}\n"
    )
    pixels = {name: draws.integers(0, 256, (count, 1, 3, 3), np.uint8) for name, count in (("train", 60), ("test", 20))}

    def write(change):
        for name, of_split in pixels.items():
            labels = (of_split.reshape(len(of_split), -1).mean(1) > 127).astype(np.int64)
            shown = of_split.copy()
            if name == "train":
                change(shown, labels)
            np.savez(tmp_path / f"data/dots/{name}.npz", inputs=shown, labels=labels)

    return write


@pytest.mark.parametrize("algo", ["dpsgd", "dcsgd_e"])
def test_nothing_is_learnt_of_what_is_set_aside(own_images, tmp_path, algo):
    """With other samples there a run is the same bit for bit, but for what it says of them."""
    own_images(lambda pixels, labels: None)
    dots = ImageDataset(name="dots", channels=1, height=3, width=3, classes=2, train_size=60, test_size=20)
    splits = with_validation(dots.load(tmp_path / "data", download=False), 15)
    places = splits.others["validation"].places.numpy()
    assert len(places) == 15

    def garble(pixels, labels):
        pixels[places] = 255 - pixels[places]

    def garble_one_of_the_others(pixels, labels):
        pixels[splits.train.places[0]] = 0

    found = []
    for number, change in enumerate((lambda pixels, labels: None, garble, garble_one_of_the_others)):
        own_images(change)
        outcome = run(
            tmp_path / f"results{number}", "-cd", "my_conf", "dataset=dots", f"algo={algo}", "data.root=data",
            "dataset.validation_size=15", settings=PLAIN,
        )  # fmt: skip
        assert (outcome.code, outcome.err) == (0, "")
        assert "15 training samples set aside for validation, which eps does not protect" in outcome.out
        (folder,) = records(tmp_path / f"results{number}")
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        found.append([{key: value for key, value in line.items() if key != "seconds"} for line in lines])
        assert problems_of(Recorded.read(folder)) == []
    validation = [[(line.pop("validation_loss"), line.pop("validation_accuracy")) for line in run] for run in found]
    plain, garbled, other = found
    assert plain == garbled != other
    assert validation[0] != validation[1]
    assert all(a != b for a, b in zip(validation[0], validation[1], strict=True))
