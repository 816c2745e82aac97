"""Texts: data, tokens, models, gradients of each pair of the papers, and scores of what a language model says."""

import itertools
import json
import math
import re
import warnings
from collections import Counter
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import huggingface_hub
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import torch.nn.functional as F
import transformers
from cli import PLAIN, ROOT, run, write_option
from gradient_checks import plain_gradients
from helpers import assembled, composed
from huggingface_hub.errors import LocalEntryNotFoundError
from specifications import artefacts

from dpbench.claims.notation import alternatives
from dpbench.clip import ThresholdClip
from dpbench.data import IGNORED, Prompts, Splits, TokenSplit
from dpbench.data.encoding import Texts, encoded, prompts
from dpbench.data.sources import File
from dpbench.data.text_sources import TEXTS
from dpbench.data.tokenizers import Bytes, open_tokenizer
from dpbench.errors import UserError
from dpbench.gradients import FlatParameters, PerSampleGradients
from dpbench.scores import text_scores
from dpbench.scores.cider import cider
from dpbench.training.evaluation import evaluate, evaluate_language_model
from dpbench.training.generation import continuations
from dpbench.training.loop import _evaluated
from dpbench.training.losses import next_token_loss, per_sample_loss
from dpbench.training.padding import require_padding_unread
from dpbench.training.team import Team

# Data


def test_sst2_is_whole_and_read_as_declared(data_root):
    root = data_root("sst2")
    texts = TEXTS["sst2"].read(root, download=False)
    # The counts that GLUE is known to have.
    assert (len(texts["train"].first), sum(texts["train"].labels)) == (67_349, 37_569)
    assert (len(texts["test"].first), sum(texts["test"].labels)) == (872, 444)
    assert texts["train"].first[1] == "contains no wit , only labored gags "


def test_rte_is_whole_and_read_as_declared(data_root):
    texts = TEXTS["rte"].read(data_root("rte"), download=False)
    assert [len(texts[split].first) for split in ("train", "test")] == [2_490, 277]
    assert texts["train"].first[0] == "No Weapons of Mass Destruction Found in Iraq Yet."
    assert texts["train"].second[0] == "Weapons of Mass Destruction Found in Iraq."
    assert texts["train"].labels[:2] == [1, 0]


def test_e2e_is_whole_and_read_as_declared(data_root):
    texts = TEXTS["e2e"].read(data_root("e2e"), download=False)
    assert {name: len(split.first) for name, split in texts.items()} == {
        "train": 42_061,
        "test": 4_693,
        "validation": 4_672,
    }
    assert len(set(texts["test"].first)) == 630


@pytest.fixture
def small(monkeypatch, tmp_path):
    """Writes a small data set in a published layout, of which as many samples are known."""

    def write(name, files, *, samples=None):
        source = TEXTS[name]
        parts = []
        for part in source.parts:
            text = files[part.name]
            path = tmp_path / part.file.path
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
            lines = len(text.splitlines()) - (path.suffix != ".jsonl")
            parts.append(replace(part, file=File(part.file.path), samples=(samples or {}).get(part.name, lines)))
        files = tuple(part.file for part in parts)
        monkeypatch.setitem(TEXTS, name, replace(source, parts=tuple(parts), files=files))
        return tmp_path

    return write


QNLI = 'index\tquestion\tsentence\tlabel\n0\tWho?\tHe "said.\tentailment\n1\tWhy?\tNo.\tnot_entailment\n'
MNLI = "index\tsentence1\tsentence2\tx\tgold_label\n0\tA man.\tA boy.\t-\tcontradiction\n1\tA.\tB.\t-\tneutral\n"
QQP = "id\tquestion1\tquestion2\tis_duplicate\n0\ta?\tb?\t1\n1\tbroken\n2\tc?\td?\t0\n"
E2E = 'mr,ref\n"name[A], area[b]","A is, well, in b."\n"name[A], area[b]",In b there is A.\nname[C],C it is.\n'
DART = [
    {"tripleset": [["A", "IS", "b"], ["C", "HAS", "d"]], "annotations": [{"text": "A is b."}, {"text": "C has d."}]},
    {"tripleset": [["E", "IS", "f"]], "annotations": [{"source": "x", "text": "E is f."}]},
]
ALL = ("train", "test", "validation")


def test_published_layouts(small):
    """An unpaired quote, a line of another shape, several references of one input, and triples."""
    root = small("qnli", {"train": QNLI, "test": QNLI})
    assert TEXTS["qnli"].read(root, download=False)["train"] == (["Who?", "Why?"], ['He "said.', "No."], [0, 1])
    small("mnli", {"train": MNLI, "test": MNLI, "mismatched": MNLI})
    found = TEXTS["mnli"].read(root, download=False)
    assert list(found) == ["train", "test", "mismatched"]
    assert found["mismatched"].labels == [2, 1]
    small("qqp", {"train": QQP, "test": QQP}, samples={"train": 2, "test": 2})
    assert TEXTS["qqp"].read(root, download=False)["train"] == (["a?", "c?"], ["b?", "d?"], [1, 0])
    small("e2e", dict.fromkeys(ALL, E2E))
    assert TEXTS["e2e"].read(root, download=False)["test"].second == [
        "A is, well, in b.",
        "In b there is A.",
        "C it is.",
    ]
    lines = "".join(json.dumps(entry) + "\n" for entry in DART)
    small(
        "dart",
        dict.fromkeys(ALL, lines),
        samples=dict.fromkeys(ALL, 3),
    )
    told = TEXTS["dart"].read(root, download=False)["train"]
    assert told == (["A : IS : b | C : HAS : d"] * 2 + ["E : IS : f"], ["A is b.", "C has d.", "E is f."], None)


def test_names_are_split_at_random_but_always_alike(tmp_path, monkeypatch):
    monkeypatch.setitem(TEXTS, "names", replace(TEXTS["names"], train=72, test=18))
    (tmp_path / "names").mkdir()
    for i in range(18):
        (tmp_path / "names" / f"Language{i:02}.txt").write_text("".join(f"Näme{i}{k}\n" for k in range(5)))
    once, again = (TEXTS["names"].read(tmp_path, download=False) for _ in range(2))
    assert once == again
    assert len(once["train"].first) == 72
    both = [(n, y) for split in once.values() for n, y in zip(split.first, split.labels, strict=True)]
    assert sorted(both) == sorted((f"Näme{i}{k}", i) for i in range(18) for k in range(5))


@pytest.mark.parametrize(
    ("broken", "says"),
    [
        (QNLI[:60], r"glue/QNLI/train.tsv has 1 samples instead of 2 .*; delete it and fetch it anew"),
        (QNLI.replace("\tnot_entailment", "\t"), "has 1 samples instead of 2"),
        ("\xff", "has 0 samples instead of 2"),
    ],
)
def test_a_truncated_file_is_named(small, broken, says):
    root = small("qnli", {"train": broken, "test": QNLI}, samples={"train": 2})
    with pytest.raises(UserError, match=says):
        TEXTS["qnli"].read(root, download=False)


def test_a_file_of_other_bytes_is_named(small):
    root = small("dart", dict.fromkeys(ALL, '{"tripleset": [["A", "B'))
    with pytest.raises(UserError, match=r"dart/train.jsonl can't be read \(JSONDecodeError\)"):
        TEXTS["dart"].read(root, download=False)
    (root / "dart/train.jsonl").write_bytes(b"\xff\xfe")
    with pytest.raises(UserError, match=r"dart/train.jsonl can't be read \(UnicodeDecodeError\)"):
        TEXTS["dart"].read(root, download=False)


def test_missing_files_and_corrupt_sums_are_said(tmp_path):
    with pytest.raises(UserError, match=r"no complete copy .*train.tsv is missing.* set data.download=true"):
        TEXTS["sst2"].read(tmp_path, download=False)
    for name in ("train", "dev"):
        path = tmp_path / f"glue/SST-2/{name}.tsv"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("sentence\tlabel\na\t0\n")
    with pytest.raises(UserError, match=r"glue/SST-2/train.tsv is corrupt \(another MD5"):
        TEXTS["sst2"].read(tmp_path, download=False)


def test_what_the_hub_gives_is_read_alike(tmp_path, monkeypatch):
    import datasets

    def load(*arguments, split, revision):
        assert (arguments, revision) == (("nyu-mll/glue", "mnli"), None)
        return datasets.Dataset.from_dict({"premise": [split], "hypothesis": ["b"], "label": [2], "idx": [0]})

    monkeypatch.setattr(datasets, "load_dataset", load)
    found = TEXTS["mnli"].read(tmp_path, download=True)
    assert found["mismatched"] == (["validation_mismatched"], ["b"], [2])


STRING = {"dtype": "string", "_type": "Value"}
# Data sets of which the hub has a script: the features of its conversion, as they were written when `datasets` ran
# scripts, and a row.
SCRIPTED = {
    "e2e": (
        {"meaning_representation": STRING, "human_reference": STRING},
        lambda split: {"meaning_representation": "name[A]", "human_reference": f"A of {split}."},
    ),
    "dart": (
        {
            "tripleset": {"_type": "Sequence", "feature": {"_type": "Sequence", "feature": STRING}},
            "subtree_was_extended": {"dtype": "bool", "_type": "Value"},
            "annotations": {"_type": "Sequence", "feature": {"source": STRING, "text": STRING}},
        },
        lambda split: {
            "tripleset": [["A", "OF", split]],
            "subtree_was_extended": None,
            "annotations": {"source": ["x"], "text": [f"A of {split}."]},
        },
    ),
}


@pytest.mark.parametrize("folder", ["default", "of_another_name"])
@pytest.mark.parametrize("name", SCRIPTED)
def test_what_the_hub_has_a_script_for_is_read_from_its_conversion(name, folder, tmp_path, monkeypatch):
    """By the library itself, to which folders on this machine are repositories at their revisions."""
    import datasets

    source, (features, row) = TEXTS[name], SCRIPTED[name]
    script = tmp_path / "main" / source.hub[0]
    script.mkdir(parents=True)
    (script / f"{script.name}.py").write_text("")
    told = json.dumps({"info": {"features": features}})
    for part in source.parts:
        path = tmp_path / "refs/convert/parquet" / source.hub[0] / folder / part.hub / "0000.parquet"
        path.parent.mkdir(parents=True)
        rows = pa.Table.from_pylist([row(part.hub)]).replace_schema_metadata({"huggingface": told})
        pq.write_table(rows, path)
    load = datasets.load_dataset

    def of_this_machine(repository, *names, split, revision=None):
        place = str(tmp_path / (revision or "main") / repository)
        return load(place, *names, split=split, cache_dir=str(tmp_path / "cache"))

    monkeypatch.setattr(datasets, "load_dataset", of_this_machine)
    found = source.read(tmp_path / "root", download=True)
    assert {part.name: found[part.name].second for part in source.parts} == {
        part.name: [f"A of {part.hub}."] for part in source.parts
    }


def test_published_arrays_of_dart_are_made_lines_as_the_page_says(tmp_path, monkeypatch):
    (program,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs/data_and_models.md").read_text(), re.DOTALL)
    (tmp_path / "dart").mkdir()
    monkeypatch.chdir(tmp_path / "dart")
    for split in ("train", "dev", "test"):
        entries = [{**DART[0], "subtree_was_extended": False}, DART[1]]
        Path(f"dart-v1.1.1-full-{split}.json").write_text(json.dumps(entries, indent=2))
    exec(program, {})

    def read(samples):
        parts = tuple(replace(part, samples=samples) for part in TEXTS["dart"].parts)
        return replace(TEXTS["dart"], parts=parts).read(tmp_path, download=False)

    told = Texts(["A : IS : b | C : HAS : d"] * 2 + ["E : IS : f"], ["A is b.", "C has d.", "E is f."], None)
    assert read(samples=3) == dict.fromkeys(ALL, told)
    with pytest.raises(UserError, match=r"dart/train.jsonl has 3 samples instead of 4"):
        read(samples=4)


def test_a_hub_that_is_not_there_is_said(tmp_path, monkeypatch):
    import datasets

    def load(*arguments, split, revision):
        raise ConnectionError("no route\nto it")

    monkeypatch.setattr(datasets, "load_dataset", load)
    with pytest.raises(UserError, match=r"qqp: can't be fetched from the hub's nyu-mll/glue \(ConnectionError"):
        TEXTS["qqp"].read(tmp_path, download=True)


# Tokens


@pytest.mark.parametrize(
    ("name", "one", "two"),
    [
        # As the papers' own tokenizers have them.
        ("roberta-base", [0, 31414, 232, 328, 2], [0, 31414, 2, 2, 8331, 328, 2]),
        ("bert-base-uncased", [101, 7592, 2088, 999, 102], [101, 7592, 102, 2088, 999, 102]),
        ("gpt2", [15496, 995, 0], [15496, 6894, 0]),
    ],
)
def test_real_tokenizers(name, one, two, data_root):
    tokenizer = open_tokenizer(name, data_root(name), download=False)
    assert tokenizer.encode(["Hello world!"], None, 16) == [one]
    assert tokenizer.encode(["Hello"], ["world!"], 16) == [two]
    assert len(tokenizer.encode(["Hello " * 50], None, 16)[0]) == 16
    for ids in (tokenizer.plain(["hello world!"])[0], tokenizer.encode(["hello world!"], None, 16)[0]):
        assert tokenizer.decode(ids) == "hello world!"


@pytest.mark.parametrize(("padding", "refused"), [(0, True), (50257, False)])
def test_a_padding_id_that_is_a_token_of_texts_is_refused(padding, refused, tmp_path, data_root):
    """gpt2's tokenizer has none, and its id 0 is an exclamation mark."""
    root = own_reviews(tmp_path, data_root("gpt2"), ["Good!", "bad"])
    data = composed(
        "dataset=sst2", "model=text_small", "model.tokenizer=gpt2", "model.vocabulary=50258", f"model.padding={padding}"
    ).dataset
    data = replace(data, name="reviews", train_size=2, test_size=2)
    if refused:
        with pytest.raises(UserError, match=r"model.padding=0: is a token of train texts, which the model would take"):
            data.load(root, download=False)
    else:
        assert len(data.load(root, download=False).train) == 2


def own_reviews(folder, shared, texts):
    """A data root with these texts as both splits, and the tokenizers of another one."""
    (folder / "reviews").mkdir()
    lines = "".join(json.dumps({"text": text, "label": i % 2}) + "\n" for i, text in enumerate(texts))
    for split in ("train", "test"):
        (folder / "reviews" / f"{split}.jsonl").write_text(lines)
    (folder / "tokenizers").symlink_to((shared / "tokenizers").resolve())
    return folder


def test_prompts_that_leave_nothing_to_predict_are_counted_and_go_on_from_their_end(tmp_path):
    data = composed(
        "dataset=e2e", "model=gpt2", "model.tokenizer=bytes", "model.vocabulary=259", "model.padding=258",
        "dataset.max_length=8",
    ).dataset  # fmt: skip
    data = replace(data, name="stories", train_size=2, test_size=2, most_tokens=0)
    (tmp_path / "stories").mkdir()
    lines = [{"prompt": "short", "completion": "end"}, {"prompt": "much longer", "completion": "end"}]
    for split in ("train", "test"):
        (tmp_path / "stories" / f"{split}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.warns(UserWarning, match=r"max_length=8: of 2 samples of the train split 1 have longer prompts"):
        data.load(tmp_path, download=False)
    tokenizer = open_tokenizer("bytes", None, download=False)
    whole = prompts(["much longer"], tokenizer)[0]
    assert len(whole) > 8
    assert data.inputs(["much longer"], tmp_path).tolist() == [whole[-8:]]


@pytest.mark.parametrize("name", ["bert-base-cased", "bert-base-uncased"])
def test_a_vocabulary_alone_keeps_the_case_that_its_name_says(name, tmp_path):
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "Café", "PARIS", "cafe", "paris", *map(str, range(100))]
    folder = tmp_path / "tokenizers" / name
    folder.mkdir(parents=True)
    (folder / "vocab.txt").write_text("\n".join(words) + "\n", encoding="utf-8")
    tokenizer = open_tokenizer(name, tmp_path, download=False)
    told = ["Café", "PARIS"] if name.endswith("-cased") else ["cafe", "paris"]
    assert [words[i] for i in tokenizer.encode(["Café PARIS"], None, 16)[0]] == ["[CLS]", *told, "[SEP]"]


def test_bytes():
    tokenizer = open_tokenizer("bytes", None, download=False)
    assert tokenizer.encode(["é", "abcdef"], None, 5) == [[256, 195, 169, 257], [256, 97, 98, 99, 257]]
    assert tokenizer.decode([256, 195, 169, 257]) == "é"


def test_a_tokenizer_that_is_missing_or_damaged_is_said(tmp_path):
    with pytest.raises(UserError, match=r"=gpt2: nothing in .*tokenizers/gpt2, and openai-community/gpt2"):
        open_tokenizer("gpt2", tmp_path, download=False)
    (tmp_path / "tokenizers/gpt2").mkdir(parents=True)
    with pytest.raises(UserError, match=r"model.tokenizer=gpt2: "):
        open_tokenizer("gpt2", tmp_path, download=False)
    (tmp_path / "tokenizers/gpt2/vocab.json").write_text("{")
    (tmp_path / "tokenizers/gpt2/merges.txt").write_text("")
    with pytest.raises(UserError, match=r"model.tokenizer=gpt2: .*can't be read"):
        open_tokenizer("gpt2", tmp_path, download=False)


COMMIT = "0123456789" * 4


def test_a_tokenizer_in_the_hubs_cache_is_taken_as_it_is(tmp_path, monkeypatch):
    """With data.download=true, too; the hub is asked only for one that is not there, and but once if it is silent."""
    snapshot = tmp_path / "models--owner--words/snapshots" / COMMIT
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "hello", *map(str, range(100))]
    (tmp_path / "vocab.txt").write_text("\n".join(words) + "\n")
    transformers.BertTokenizerFast.from_pretrained(str(tmp_path)).save_pretrained(snapshot)
    transformers.BertConfig().save_pretrained(snapshot)
    (tmp_path / "models--owner--words/refs").mkdir()
    (tmp_path / "models--owner--words/refs/main").write_text(COMMIT)
    asked = []

    def silent(repository, name):
        asked.append((repository, name))
        raise LocalEntryNotFoundError("no answer")

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", silent)
    for download in (False, True):
        tokenizer = open_tokenizer("owner/words", tmp_path, download=download)
        assert tokenizer.encode(["hello"], None, 16) == [[2, 5, 3]]
    with pytest.raises(UserError, match="owner/other is not in the cache of the hub"):
        open_tokenizer("owner/other", tmp_path, download=False)
    assert asked == []
    with pytest.raises(UserError, match="owner/other is not to be had from the hub"):
        open_tokenizer("owner/other", tmp_path, download=True)
    assert asked == [("owner/other", "tokenizer_config.json")]


def split_of(lengths, *, generates=False, padding=0, longest=20):
    samples = [list(range(1, n + 1)) for n in lengths]
    labels = [1] * len(lengths) if generates else [n % 3 for n in lengths]
    return TokenSplit.of(samples, labels, padding=padding, longest=longest, generates=generates)


def test_batches_hold_each_sample_once_beside_others_of_its_length():
    lengths = [3, 17, 4, 9, 20, 2, 18]
    split = split_of(lengths)
    indices = torch.tensor([6, 0, 2, 3, 4, 5])
    found = []
    for ids, labels in split.batches(indices, 2):
        own = (ids != 0).sum(1)
        assert ids.shape[1] == min(20, -(-int(own.max()) // 8) * 8)
        for row, n, label in zip(ids, own.tolist(), labels.tolist(), strict=True):
            assert row[:n].tolist() == list(range(1, n + 1))
            assert label == n % 3
            found.append(n)
    assert found == sorted(lengths[i] for i in indices)
    assert list(split.batches(torch.tensor([], dtype=torch.int64), 2)) == []
    assert sum(len(labels) for _, labels in split.everything(3)) == len(lengths)


@pytest.mark.parametrize("lengths", [[0, 0, 3], [0, 0]])
def test_empty_texts_are_padding_alone_whatever_is_beside_them(lengths):
    split = split_of(lengths)
    model = assembled(composed("dataset=sst2", "model=text_small")).model
    answers = [model(ids) for ids, _ in split.batches(torch.arange(len(lengths)), 2)]
    loss = evaluate(model, split, 1000).loss
    assert loss == pytest.approx(F.cross_entropy(torch.cat(answers), split.labels).item())
    assert torch.equal(split.take(torch.tensor([0, 1]))[0], torch.zeros(2, 8, dtype=torch.int64))
    # A text of nothing is told apart by nothing: what is left of the model is the bias of its head.
    torch.testing.assert_close(answers[0], model.head.bias.expand(2, -1))


def test_a_language_model_is_asked_for_what_it_is_not_told():
    texts = Texts(["ab", "a"], ["cde", "b"], None)
    split = encoded(texts, Bytes(), padding=258, longest=6)
    ids, targets = split.take(torch.tensor([0, 1]))
    a, b, space, c, d, e, end = (*b"ab cde", 257)
    assert ids.tolist() == [[a, b, end, space, c, d], [a, end, space, b, end, 258]]
    no = IGNORED
    # Of the first sample, the last letter and the end are cut off.
    assert targets.tolist() == [[no, no, space, c, d, e], [no, space, b, end, no, no]]


def test_tokens_are_made_once_and_again_where_the_file_is_damaged(tmp_path, monkeypatch):
    monkeypatch.setenv("DPBENCH_CACHE", str(tmp_path))
    calls = []

    class Counting(Bytes):
        def plain(self, texts):
            calls.append(len(texts))
            return super().plain(texts)

    texts = Texts(["ab", "c"], None, [0, 1])
    first = encoded(texts, Counting(), padding=258, longest=6)
    again = encoded(texts, Counting(), padding=258, longest=6)
    assert len(calls) == 1
    (file,) = (tmp_path / "tokens").iterdir()
    file.write_bytes(file.read_bytes()[:50])
    third = encoded(texts, Counting(), padding=258, longest=6)
    assert len(calls) == 2
    encoded(texts, Counting(), padding=258, longest=7)
    assert len(calls) == 3
    for other in (again, third):
        assert torch.equal(first.tokens, other.tokens)
        assert torch.equal(first.starts, other.starts)


# Losses and evaluation


def test_next_token_loss_is_the_mean_over_what_is_asked():
    torch.manual_seed(0)
    logits, targets = torch.randn(2, 3, 5), torch.tensor([[IGNORED, 4, 1], [2, IGNORED, IGNORED]])
    logs = logits.log_softmax(-1)
    want = torch.stack([-(logs[0, 1, 4] + logs[0, 2, 1]) / 2, -logs[1, 0, 2]])
    torch.testing.assert_close(next_token_loss(logits, targets), want)
    nothing = next_token_loss(logits, torch.full_like(targets, IGNORED))
    assert nothing.tolist() == [0, 0]


def test_evaluations_count_samples_and_tokens():
    split = split_of([3, 9, 4, 2])
    found = evaluate(lambda_model(lambda ids: F.one_hot((ids > 0).sum(1) % 2, 3).double()), split, 3)
    # Right where n % 3 == n % 2 of lengths 3, 9, 4, 2: none, none, no, no but 4 -> 1 and 0, 2 -> 2 and 0.
    assert found.accuracy == sum(n % 3 == n % 2 for n in (3, 9, 4, 2)) / 4
    split = split_of([3, 9, 4], generates=True)
    found = evaluate_language_model(lambda_model(lambda ids: 9.0 * F.one_hot(ids + 1, 30)), split, 2)
    assert found.accuracy == 1
    assert found.loss == pytest.approx(math.log(1 + 29 * math.exp(-9)), rel=1e-5)


def test_evaluation_of_a_language_model_drops_nothing_out():
    split = split_of([3, 9, 4], generates=True)
    certain = lambda_model(lambda ids: 9.0 * F.one_hot(ids + 1, 30))
    dropping = torch.nn.Sequential(certain, torch.nn.Dropout(0.5))
    assert evaluate_language_model(dropping, split, 2) == evaluate_language_model(certain, split, 2)
    assert dropping.training


def lambda_model(function):
    class Model(torch.nn.Module):
        def forward(self, ids):
            return function(ids)

    return Model()


# Models

COUNTS = [
    # DP-PMLF 4.2 and DC-SGD T21, with two classes and with MNLI's three; GPT-2 as published.
    (("dataset=sst2", "model=roberta_base"), 124_647_170, 124_647_170),
    (("dataset=mnli", "model=roberta_base"), 124_647_939, 124_647_939),
    (("dataset=qnli", "model=bert_base"), None, 7_680_002),
    (("dataset=e2e",), 124_439_808, 124_439_808),
    # transformers' RobertaForSequenceClassification of that size; with LoRA its head, and two factors of rank 16 beside
    # each layer's queries and values.
    (("dataset=sst2", "model=roberta_large"), 355_361_794, 355_361_794),
    (("dataset=sst2", "model=roberta_base_lora"), None, 768 * 769 + 769 * 2 + 12 * 4 * 16 * 768),
    (("dataset=sst2", "model=roberta_large_lora"), None, 1024 * 1025 + 1025 * 2 + 24 * 4 * 16 * 1024),
]


@pytest.mark.parametrize(("overrides", "all_of_them", "trained"), COUNTS, ids=lambda value: str(value))
def test_parameters_are_as_many_as_the_papers_have(overrides, all_of_them, trained):
    config = composed(*overrides)
    with torch.device("meta"):
        model = replace(config.model, pretrained=None).build(config.dataset)
    parameters = list(model.parameters())
    assert all_of_them in (None, sum(p.numel() for p in parameters))
    assert sum(p.numel() for p in parameters if p.requires_grad) == trained


def tiny(config):
    """The same run with a smaller model of the same kind."""
    model, data = config.model, config.dataset
    if model.name in ("text_small", "lstm"):
        changes = {"width": 8, "heads": 2} if model.name == "text_small" else {"embedded": 4, "hidden": 6}
    else:
        changes = {"width": 8, "heads": 2, "depth": 2, "pretrained": None, "dropout": 0.0}
    small = {"vocabulary": 40, "padding": model.padding % 40, "longest": 24}
    changes |= {"separator": 30} if hasattr(model, "separator") else {}
    data = replace(data, vocabulary=40, padding=small["padding"], max_length=12)
    optim = replace(config.optim, lr=1.0)
    model = replace(model, **small, **changes)
    return replace(config, model=model, dataset=data, clip=ThresholdClip(), optim=optim, batch_size=16, micro_batch=2)


PAIRS = [
    ("sst2", "text_small"),
    ("sst2", "roberta_base"),  # DOPPLER, DiSK, DP-PMLF
    ("mnli", "roberta_base"),
    ("qnli", "roberta_base"),
    ("qqp", "roberta_base"),
    ("e2e", "gpt2"),
    ("dart", "gpt2"),
    ("qnli", "bert_base"),  # DC-SGD
    ("names", "lstm"),
]
SIZES = ("base_lora", "large", "large_lora")
PAIRS += [(name, f"roberta_{size}") for name in ("sst2", "mnli", "qnli", "qqp") for size in SIZES]  # DiSK
# Whose mixtures of two iterates are tried at every test; those of the others in the slow ones.
MIXED = [("sst2", "roberta_base"), ("e2e", "gpt2")]


def test_pairs_are_all_that_the_papers_train():
    found = set()
    for cell in (cell for artefact in artefacts().values() for cell in artefact.cells if cell.runs):
        named = [alternatives(cell.overrides[group]) for group in ("dataset", "model") if group in cell.overrides]
        found |= {pair for pair in itertools.product(*named) if pair[0] in TEXTS and len(pair) == 2}
    assert found == set(PAIRS) - {("sst2", "text_small")}


@pytest.mark.usefixtures("in_float64")
@pytest.mark.parametrize(
    ("pair", "algorithm"),
    [
        *((pair, "dpsgd") for pair in PAIRS),
        *(pytest.param(pair, "disk", marks=[] if pair in MIXED else pytest.mark.slow) for pair in PAIRS),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
def test_a_private_step_of_every_pair_keeps_books_and_clips_exactly(pair, algorithm):
    """The clipped sum of samples of different lengths is that of plain autograd in float64, each sample alone."""
    dataset, model = pair
    config = tiny(composed(f"dataset={dataset}", f"model={model}", f"algo={algorithm}"))
    torch.manual_seed(1)
    padding, generates = config.dataset.padding, config.dataset.generates
    words = [i for i in range(40) if i not in (padding, 30)]
    samples = [[words[k] for k in torch.randint(len(words), (n,))] for n in (5, 11, 9)]
    for sample in samples:
        sample[len(sample) // 2] = 30  # the separator
    labels = [2, 4, 3] if generates else [0, 1, config.dataset.classes - 1]
    split = TokenSplit.of(samples, labels, padding=padding, longest=12, generates=generates)
    batch = list(split.batches(torch.arange(3), 2))
    loss = next_token_loss if generates else per_sample_loss
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="falling back to materialised")
        parts = assembled(config)
        # Weights away from zero, where LoRA's factors begin.
        torch.nn.init.normal_(parts.step.gradients.flat.vector, std=0.2)
        points = parts.step.query.points(parts.step.gradients.flat.vector)
        if algorithm == "disk":
            parts.step(batch)
            points = parts.step.query.points(parts.step.gradients.flat.vector)
            assert len(points) == 2
        rows = torch.cat(
            [
                sum(p.weight * plain_gradients(parts.model, p.iterate, *one, loss=loss)[1] for p in points)
                for one in batch
            ]
        )
        factors = []

        def clip(norms):
            factors.append((0.5 * norms.median() / norms).clamp(max=1))
            return factors[-1]

        got, *_ = parts.step.gradients.clipped_sum(points, batch, clip)
    want = (torch.cat(factors, 1)[0].unsqueeze(1) * rows).sum(0)
    assert rows.norm(dim=1).min() > 0
    assert torch.linalg.vector_norm(got - want) < 1e-9 * want.norm()


@pytest.mark.parametrize("name", ["roberta_base", "bert_base", "lstm", "text_small"])
def test_padding_changes_nothing(name):
    dataset = {"lstm": "names", "bert_base": "qnli"}.get(name, "sst2")
    config = tiny(composed(f"dataset={dataset}", f"model={name}"))
    torch.manual_seed(0)
    model = config.model.build(config.dataset).eval()
    ids = torch.tensor([[3, 4, 30, 5, 7]])
    filled = F.pad(ids, (0, 6), value=config.dataset.padding)
    torch.testing.assert_close(model(ids), model(filled), rtol=1e-5, atol=1e-6)


class Pooling(torch.nn.Module):
    """Averages over all positions, or over those that are no padding; draws like dropout, or otherwise."""

    def __init__(self, masked, draw=None):
        super().__init__()
        self.embedding, self.head = torch.nn.Embedding(259, 8), torch.nn.Linear(8, 3)
        self.masked, self.draw = masked, draw or torch.nn.Dropout(0.5)
        torch.nn.init.zeros_(self.head.weight)

    def forward(self, ids):
        real = (ids != 258).unsqueeze(2) if self.masked else torch.ones_like(ids, dtype=torch.bool).unsqueeze(2)
        return self.head(self.draw((torch.tanh(self.embedding(ids)) * real).sum(1) / real.sum(1)))


class Noisy(torch.nn.Module):
    def forward(self, x):
        return x + 0.1 * torch.empty_like(x).cauchy_() if self.training else x


@pytest.mark.parametrize("draw", [torch.nn.Dropout(0.5), Noisy()])
def test_a_model_that_reads_padding_is_refused(draw):
    samples = [[5] * n for n in (3, 40, 7, 12)]
    split = TokenSplit.of(samples, [0, 1, 2, 0], padding=258, longest=64, generates=False)
    for masked in (True, False):
        model = Pooling(masked, draw).train()
        gradients = PerSampleGradients(model, FlatParameters(model), per_sample_loss)
        if masked:
            require_padding_unread(lambda gradients=gradients: gradients, split)
            continue
        with pytest.raises(UserError, match="the model reads padding"):
            require_padding_unread(lambda gradients=gradients: gradients, split)
        assert all(module.training for module in model.modules())
        one_length = TokenSplit.of([[5] * 8] * 4, [0, 1, 2, 0], padding=258, longest=64, generates=False)
        require_padding_unread(lambda gradients=gradients: gradients, one_length)


CENTRING = """\
from dataclasses import dataclass

import torch

from dpbench.models import TextModel


@dataclass
class Centring(TextModel):
    def build(self, dataset):
        return Centred(dataset.classes)


class Centred(torch.nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.table, self.head, self.centre = torch.nn.Embedding(259, 8), torch.nn.Linear(8, classes), None

    def forward(self, ids):
        kept = (ids != 258).unsqueeze(-1)
        mean = (self.table(ids) * kept).sum(1) / kept.sum(1).clamp(min=1)
        if self.centre is None:
            self.centre = mean.detach().mean(0)
        return self.head(torch.tanh(mean - self.centre))
"""


@pytest.mark.parametrize("micro_batch", [1, 4])
def test_a_model_that_keeps_something_of_the_first_texts_that_it_sees_is_refused(small, tmp_path, micro_batch):
    """So nothing may be shown to it before, as by the comparison of texts with and without padding."""
    lines = "".join(f"{'a long ' * (n % 3)}text {n}\t{n % 2}\n" for n in range(12))
    root = small("sst2", {"train": f"sentence\tlabel\n{lines}", "test": f"sentence\tlabel\n{lines}"})
    conf = tmp_path / "my_conf"
    conf.mkdir()
    (conf / "centring.py").write_text(CENTRING)
    write_option(conf, "centring", "centring.Centring", "name: centring\ntokenizer: bytes", group="model")
    outcome = run(
        tmp_path / "results", "-cd", str(conf), "dataset=sst2", "model=centring", "model.vocabulary=259",
        "model.padding=258", "dataset.train_size=12", "dataset.test_size=12", f"data.root={root}", "batch_size=4",
        "epochs=2", f"micro_batch={micro_batch}", settings=PLAIN,
    )  # fmt: skip
    assert outcome.code == 1
    assert "another one after a pass of other samples" in outcome.err


def test_weights_of_masked_language_modelling_are_loaded_under_a_new_head(tmp_path):
    """Under the names of published files: RoBERTa with its language head, BERT with gamma and beta."""
    for name, dataset, kind in (("roberta_base", "sst2", "Roberta"), ("bert_base", "qnli", "Bert")):
        config = tiny(composed(f"dataset={dataset}", f"model={name}"))
        model = config.model
        settings = getattr(transformers, f"{kind}Config")(
            vocab_size=40,
            hidden_size=8,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=32,
            max_position_embeddings=24 + (model.padding + 1 if kind == "Roberta" else 0),
            type_vocab_size=1 if kind == "Roberta" else 2,
        )
        published = getattr(transformers, f"{kind}Model")(settings)
        head = {"lm_head.bias": torch.zeros(3), "cls.predictions.bias": torch.zeros(3)}
        weights = {f"{kind.lower()}.{name}": value for name, value in published.state_dict().items()} | head
        weights[f"{kind.lower()}.embeddings.position_ids"] = torch.arange(24)
        old = {n.replace("LayerNorm.weight", "LayerNorm.gamma"): value for n, value in weights.items()}
        torch.save(old, tmp_path / "pytorch_model.bin")
        built = replace(model, pretrained=str(tmp_path)).build(config.dataset)
        for name, value in built.net.state_dict().items():
            assert name.startswith("classifier.") or torch.equal(value, weights[name])
        torch.save(published.state_dict(), tmp_path / "pytorch_model.bin")  # without a head, and so without a prefix
        bare = replace(model, pretrained=str(tmp_path)).build(config.dataset)
        for name, value in bare.net.state_dict().items():
            assert name.startswith("classifier.") or torch.equal(value, weights[name])


def test_gpt2_is_loaded_from_published_names_and_stays_tied(tmp_path):
    config = tiny(composed("dataset=e2e"))
    torch.manual_seed(3)
    source = config.model.build(config.dataset).eval()
    weights = {
        n.removeprefix("transformer."): value for n, value in source.net.state_dict().items() if "lm_head" not in n
    }
    weights |= {"h.0.attn.bias": torch.ones(1), "h.1.attn.masked_bias": torch.ones(())}
    torch.save(weights, tmp_path / "pytorch_model.bin")
    built = replace(config.model, pretrained=str(tmp_path)).build(config.dataset).eval()
    ids = torch.tensor([[1, 2, 3]])
    assert torch.equal(source(ids), built(ids))
    assert built.net.lm_head.weight is built.net.transformer.wte.weight
    whole = {**source.net.state_dict(), "lm_head.weight": source.net.lm_head.weight + 1}
    torch.save(whole, tmp_path / "pytorch_model.bin")
    with pytest.raises(UserError, match="weights of another model: their head is not the embedding of the tokens"):
        replace(config.model, pretrained=str(tmp_path)).build(config.dataset)


def test_missing_weights_are_said(tmp_path):
    config = tiny(composed("dataset=e2e"))
    with pytest.raises(UserError, match=r"model.pretrained=.*/none.safetensors: there is no such file"):
        replace(config.model, pretrained=str(tmp_path / "none.safetensors")).build(config.dataset)


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (("dataset=sst2", "model=linear"), "model=linear: a data set of texts needs a text model"),
        (("dataset=mnist", "model=text_small"), "model=text_small: takes texts, but dataset=mnist has images"),
        (("dataset=e2e", "model=text_small"), "classifies texts, but dataset=e2e has texts to continue"),
        (("dataset=sst2", "model=gpt2"), "model=gpt2: continues texts, but dataset=sst2 has classes"),
        (("dataset=sst2", "augmentation=crop_flip"), "applies to images only, but dataset=sst2 has texts"),
        (("dataset=sst2", "dataset.max_length=600"), "dataset.max_length=600: expected at most the 512"),
        (("dataset=sst2", "model.heads=3"), "model.width=64: expected a multiple of the 3 heads"),
        (("dataset=sst2", "model=roberta_base", "model.trained=some"), "model.trained=some: expected one of all, head"),
    ],
)
def test_what_does_not_go_together_is_said(overrides, says):
    with pytest.raises(UserError, match=says):
        composed(*overrides)


def test_a_tokenizer_of_another_model_is_said(data_root):
    root = data_root("gpt2")
    with pytest.raises(UserError, match=r"model.tokenizer=gpt2: has 50,257 ids, but model.vocabulary=30522"):
        composed("dataset=sst2", "model.tokenizer=gpt2").dataset.load(root, download=False)
    with pytest.raises(UserError, match=r"model.padding=3: expected 0, the padding id"):
        composed("dataset=sst2", "model.padding=3").dataset.load(root, download=False)


# Scores

SAID = [
    "the blue spice is a coffee shop in the city centre",
    "alimentum is not family friendly",
    "a cheap pub near the river",
]
WRITTEN = [
    ["the blue spice coffee shop is in the city centre", "blue spice is a coffee shop in the centre of the city"],
    ["alimentum in the city centre is not family friendly"],
    ["near the river there is a cheap pub", "a cheap pub by the river", "the pub near the river is cheap and cheerful"],
]


@pytest.mark.parametrize(
    ("first", "of_first", "score"),
    [
        (SAID[0], WRITTEN[0], 4.976822170993604),
        (
            "the pub the pub by the river the river",
            ["the pub by the river", "a pub near the river the river"],
            4.011140786514809,
        ),
    ],
    ids=["once", "repeated"],
)
def test_cider_is_that_of_the_captioning_tools(first, of_first, score):
    """What pycocoevalcap 1.2 prints for these texts."""
    said = [text.split() for text in (first, *SAID[1:])]
    written = [[text.split() for text in texts] for texts in (of_first, *WRITTEN[1:])]
    assert cider(said, written) == pytest.approx(score)


def common(one, other):
    """Length of the longest sequence of words that both have in this order."""
    if not one or not other:
        return 0
    if one[0] == other[0]:
        return 1 + common(one[1:], other[1:])
    return max(common(one[1:], other), common(one, other[1:]))


def rouge_l(said, written):
    """F-measure of the reference that is nearest by it, of words as they are; Lin 2004."""
    found = []
    for text in written:
        shared = common(said.lower().split(), text.lower().split())
        found.append(2 * shared / (len(said.split()) + len(text.split())))
    return max(found)


def bleu(said, written):
    """Of a corpus, with words as they are; Papineni et al. 2002: the reference that is nearest in length counts."""
    logs, lengths, nearest = [], 0, 0
    for n in range(1, 5):
        met = total = 0
        for text, texts in zip(said, written, strict=True):
            grams = [Counter(zip(*(one.split()[i:] for i in range(n)), strict=False)) for one in (text, *texts)]
            met += sum(min(count, max(other[gram] for other in grams[1:])) for gram, count in grams[0].items())
            total += sum(grams[0].values())
        logs.append(math.log(met / total))
    for text, texts in zip(said, written, strict=True):
        size = len(text.split())
        lengths += size
        nearest += min((abs(len(other.split()) - size), len(other.split())) for other in texts)[1]
    return math.exp(min(0.0, 1 - nearest / lengths) + sum(logs) / 4)


def test_bleu_and_rouge_l_are_those_of_their_papers_over_all_references():
    said = ["The blue spice is a coffee shop in the centre", "it serves cheap pubs near the river", "a cheap pub"]
    written = [
        ["blue spice coffee shop is in the city", "The blue spice is a coffee shop in the centre of the city"],
        ["it is cheap near the river", "It serves a cheap pub near the river", "it serves cheap food near the river"],
        ["the pub by the river is a cheap pub", "a cheap pub by the river"],
    ]
    scores = text_scores(said, written)
    assert scores["bleu"] == pytest.approx(100 * bleu(said, written))
    assert scores["rouge_l"] == pytest.approx(100 * fmean(map(rouge_l, said, written)))
    assert any(rouge_l(one, texts) > rouge_l(one, texts[:1]) for one, texts in zip(said, written, strict=True))


def nist(said, written):
    """With one reference each; Doddington 2002, eq. 2 and 3, whose brevity costs half at two thirds of the length."""
    grams = [
        [Counter(zip(*(text.split()[i:] for i in range(n)), strict=False)) for text in written] for n in range(1, 6)
    ]
    together = [sum(of_texts, Counter()) for of_texts in grams]
    words = sum(together[0].values())
    found = 0.0
    for n in range(1, 6):
        met = total = 0.0
        for text, wanted in zip(said, grams[n - 1], strict=True):
            own = Counter(zip(*(text.split()[i:] for i in range(n)), strict=False))
            total += sum(own.values())
            for gram, count in own.items():
                before = together[n - 2][gram[:-1]] if n > 1 else words
                if wanted[gram]:
                    met += min(count, wanted[gram]) * math.log2(before / together[n - 1][gram])
        found += met / total
    ratio = min(1.0, sum(len(text.split()) for text in said) / words)
    return found * 0.5 ** (math.log(ratio) / math.log(2 / 3)) ** 2


def test_nist_is_that_of_its_paper():
    said = ["the blue spice is a coffee shop", "it serves cheap pubs near the river", "a cheap pub"]
    written = [
        "the blue spice is a cheap coffee shop",
        "it serves cheap food near the river",
        "a cheap pub by the river",
    ]
    found = text_scores(said, [[text] for text in written])["nist"]
    assert found == pytest.approx(nist(said, written), rel=1e-12)
    assert found != pytest.approx(nist(written, said), rel=1e-2)


@pytest.mark.parametrize(
    ("said", "written", "score"),
    [
        ("a cheap pub", "a cheap pub", 1 - 0.5 / 27),  # three words in one piece
        ("pub cheap", "cheap pub", 0.5),  # in two pieces, which costs half
        ("a cheap bar", "a cheap pub nearby", (1 - 0.5 / 8) / (0.9 * 2 + 0.1 * 1.5)),  # P = 2/3, R = 1/2
        ("a cheap pubs", "a cheap pub", 1 - 0.5 / 27),  # by its stem
    ],
)
def test_meteor_is_that_of_its_paper(said, written, score, monkeypatch):
    """Banerjee and Lavie 2005 with NLTK's weights: PR/(0.9 P + 0.1 R), less half of it times (pieces/matches)³."""
    monkeypatch.setattr("dpbench.scores.texts.wordnet", lambda: None)
    assert text_scores([said], [[written]])["meteor_without_synonyms"] == pytest.approx(score, rel=1e-12)


def test_the_other_scores_do_not_see_capitals():
    plain = text_scores(SAID, WRITTEN)
    capital = text_scores([text.title() for text in SAID], [[text.upper() for text in texts] for texts in WRITTEN])
    assert set(plain) >= {"nist", "cider"}
    assert len(plain) == 5
    for name in set(plain) - {"bleu"}:
        assert capital[name] == plain[name] > 0


def test_scores_of_the_same_and_of_nothing():
    same = text_scores(SAID, [[text] for text in SAID])
    assert same["bleu"] == pytest.approx(100)
    assert same["rouge_l"] == pytest.approx(100)
    assert same["cider"] == pytest.approx(10)
    assert all(value == 0 for value in text_scores(["", "", ""], WRITTEN).values())
    assert len(same) == 5


# Runs


def test_a_classifier_is_evaluated_on_further_splits_by_their_names():
    """As on MNLI's mismatched development set: what is right is counted one by one."""
    config = tiny(composed("dataset=mnli", "model=roberta_base", "algo=dpsgd"))
    torch.manual_seed(2)
    parts = assembled(config)
    matched, mismatched = (
        TokenSplit.of(
            torch.randint(2, 29, (9, 7)).tolist(),
            torch.randint(3, (9,)).tolist(),
            padding=config.dataset.padding,
            longest=12,
            generates=False,
        )
        for _ in range(2)
    )
    test, more = _evaluated(config, parts, Splits(matched, matched, {"mismatched": mismatched}), Team(), last=False)
    for split, loss, accuracy in (
        (matched, test.loss, test.accuracy),
        (mismatched, more["mismatched_loss"], more["mismatched_accuracy"]),
    ):
        ids, labels = split.take(slice(0, 9))
        with torch.no_grad():
            logits = parts.model.eval()(ids)
        assert accuracy == pytest.approx(float((logits.argmax(1) == labels).double().mean()))
        assert loss == pytest.approx(float(F.cross_entropy(logits, labels)), rel=1e-5)
    assert set(more) == {"mismatched_loss", "mismatched_accuracy"}
    assert more["mismatched_loss"] != test.loss


def words_of(names):
    rows = [f'"name[{n}], area[{a}]",{n} is in the {a}.\n' for n in names for a in ("city", "country", "park", "sea")]
    return "mr,ref\n" + "".join(rows)


def test_a_tiny_gpt2_learns_to_describe_and_is_scored(small, tmp_path):
    """Trained with clipping alone it says afterwards what the told words ask for better than at first."""
    root = small("e2e", {"train": words_of("ABCDEFGH"), "test": words_of("AB"), "validation": words_of("CD")})
    settings = (
        "dataset=e2e", "model=gpt2", "model.tokenizer=bytes", "model.vocabulary=259", "model.padding=258",
        "model.width=32", "model.depth=1", "model.heads=2", "model.pretrained=null", "model.dropout=0",
        "model.longest=64", "dataset.max_length=60", "dataset.most_tokens=30", "dataset.beams=2",
        "dataset.train_size=32", "dataset.test_size=8", f"data.root={root}", "algo=dpadam", "eps=inf",
        "batch_size=16", "epochs=60", "optim.lr=0.01", "evaluation.every_steps=60",
    )  # fmt: skip
    outcome = run(tmp_path / "results", *settings, settings=PLAIN)
    assert outcome.code == 0, outcome
    (folder,) = (tmp_path / "results/runs").glob("*/0")
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["perplexity"] < lines[0]["perplexity"] < 259
    assert lines[-1]["perplexity"] == pytest.approx(math.exp(lines[-1]["test_loss"]))
    assert lines[-1]["validation_perplexity"] < 2
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["validation_loss"] == pytest.approx(math.log(lines[-1]["validation_perplexity"]))
    meteor = "meteor" if "meteor" in summary else "meteor_without_synonyms"
    for name in ("bleu", "rouge_l", meteor, "nist", "cider"):
        assert math.isfinite(summary[name])
    assert summary["rouge_l"] > 75  # the answer to another prompt has two words of three in common with what is asked


@pytest.mark.parametrize("most_tokens", [5, 100])
def test_prompts_that_leave_a_model_no_room_are_told_from_their_end(most_tokens):
    config = composed(
        "dataset=e2e", "model=gpt2", "model.tokenizer=bytes", "model.vocabulary=259", "model.padding=258",
        "model.width=16", "model.depth=1", "model.heads=2", "model.pretrained=null", "model.longest=16",
        "dataset.max_length=16",
    )  # fmt: skip
    torch.manual_seed(0)
    model = config.model.build(config.dataset)
    drawn = torch.randint(256, (60,)).tolist()
    room = max(16 - most_tokens, 1)
    prompts = Prompts([[*drawn, 257], [7, 257]], [[""], [""]], 257, lambda ids: " ".join(map(str, ids)))
    said = continuations(model, prompts, beams=1, most_tokens=most_tokens, batch=2)
    model.eval()
    for told, answer in zip(([*drawn, 257][-room:], [7, 257][-room:]), said, strict=True):
        ids = list(told)
        while len(ids) < len(told) + min(most_tokens, 15):
            ids.append(int(model(torch.tensor([ids]))[0, -1].argmax()))
        ids = ids[len(told) :]
        assert answer == " ".join(map(str, ids[: ids.index(257)] if 257 in ids else ids))


@pytest.mark.slow
def test_the_small_transformer_learns_sst2_and_better_without_privacy(data_root, tmp_path):
    """Each by three standard deviations: of a guess on 872 sentences, 1.7 %, above the majority class, 50.9 %; of the
    difference of two such shares above the private run. Seen: 59.4 % at eps = 8, 77.8 % without privacy.
    """
    settings = (
        "dataset=sst2", "eps=8,inf", f"data.root={data_root('sst2')}", "dataset.max_length=64", "algo=dpadam",
        "clip=threshold", "threshold.norm=4", "-m",
    )  # fmt: skip
    outcome = run(tmp_path / "results", *settings, settings=PLAIN)
    assert outcome.code == 0, outcome
    files = [json.loads(file.read_text()) for file in (tmp_path / "results/runs").glob("*/0/summary.json")]
    private, other = (found["test_accuracy"]["final"] for found in sorted(files, key=lambda f: not f["private"]))
    assert private > 0.509 + 3 * 0.017
    assert other > private + 3 * math.sqrt(2) * 0.017
