"""What others wrote runs nothing here: settings, records, data, weights and tokenizers, and names of any kind."""

import csv
import json
import os
import pickle
import re
import resource
import shutil
import socket
import struct
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from cli import ROOT, run, status
from helpers import accept_made_up_files
from torch import nn

import dpbench
from dpbench.claims import Run
from dpbench.cli.table import Row, as_csv, print_table
from dpbench.config import compose_jobs
from dpbench.console import make_console
from dpbench.data.catalogue import SOURCES
from dpbench.data.image_folders import ImageFolders
from dpbench.data.image_sources import IMAGES
from dpbench.data.sources import File
from dpbench.data.table_sources import TABLES
from dpbench.data.text_sources import TEXTS
from dpbench.data.tokenizers import open_tokenizer
from dpbench.errors import UserError, visible
from dpbench.models.pretrained import load_pretrained
from dpbench.report.curves import power_spectra
from dpbench.report.page import _environment
from dpbench.report.runs import Configuration, Group, RunView
from dpbench.scores import text_scores
from dpbench.spreadsheet import as_text
from dpbench.tracking.damage import damage_of
from dpbench.tracking.reading import Recorded
from dpbench.tracking.safe_yaml import parse_yaml


@pytest.fixture
def mark(tmp_path) -> Iterator[Path]:
    """A file that is there as soon as any of the attacks has had its code run."""
    path = tmp_path / "mark"
    yield path
    assert not path.exists(), "code of the attack was run"


class Evil:
    """What a pickle can do when it is loaded."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.system, (f"touch '{self.mark}'",)


def evil_yaml(mark: Path) -> str:
    return f"!!python/object/apply:os.system [\"touch '{mark}'\"]"


def test_the_attacks_themselves_would_succeed(tmp_path):
    for k, attack in enumerate(
        (
            lambda mark: pickle.loads(pickle.dumps(Evil(mark))),
            lambda mark: yaml.unsafe_load(evil_yaml(mark)),
        )
    ):
        attack(tmp_path / f"mark{k}")
        assert (tmp_path / f"mark{k}").exists()


# Settings.


def own_folder(tmp_path: Path, mark: Path, option: str) -> Path:
    """A folder of options of one's own with a module whose import would show."""
    folder = tmp_path / "own"
    (folder / "filter").mkdir(parents=True)
    (folder / "filter" / "evil.yaml").write_text(option)
    (folder / "evil_filters.py").write_text(f"open({str(mark)!r}, 'w')\n")
    return folder


@pytest.mark.parametrize("key", ["_target_", "hydra"])
def test_options_can_name_nothing_that_is_called(tmp_path, mark, key):
    value = "os.system" if key != "hydra" else "{launcher: {_target_: os.system}}"
    option = f"defaults:\n  - /schema/filter@_here_: identity\n  - _self_\n{key}: {value}\n"
    outcome = run(tmp_path / "results", "-cd", str(own_folder(tmp_path, mark, option)), "filter=evil")
    assert outcome.code == 2
    assert outcome.error()


def test_yaml_of_options_makes_no_objects(tmp_path, mark):
    outcome = run(
        tmp_path / "results", "-cd", str(own_folder(tmp_path, mark, f"b: {evil_yaml(mark)}\n")), "filter=evil"
    )
    assert outcome.code == 2


def test_a_folder_that_is_not_named_is_not_searched(tmp_path, mark, monkeypatch):
    """Not even the one that the command is called in, in which a stranger may have left files."""
    option = "defaults:\n  - /schema/filter@_here_: evil_filters.Evil\n  - _self_\n"
    folder = own_folder(tmp_path, mark, option)
    shutil.copytree(folder / "filter", folder / "conf" / "filter")
    monkeypatch.chdir(folder)
    outcome = run(tmp_path / "results", "filter=evil")
    assert outcome.code == 2
    assert outcome.error().startswith("filter=evil: expected one of")


@pytest.mark.parametrize("line", ["filter._target_=os.system", "query._target_=os.system", "+x._target_=os.system"])
def test_nothing_that_is_typed_is_called(line):
    with pytest.raises(UserError):
        compose_jobs([line], multirun=False)


def test_no_setting_but_the_data_root_takes_its_value_from_the_environment():
    """A value of the environment ends in records, on pages and at W&B."""
    found = [
        (path.relative_to(ROOT / "conf"), line.strip())
        for path in (ROOT / "conf").rglob("*.yaml")
        for line in path.read_text().splitlines()
        if "oc.env" in line
    ]
    assert [line for _, line in found] == ["root: ${oc.env:DPBENCH_DATA,.data}"]


def test_all_yaml_is_read_by_safe_loaders_and_no_pickle_by_our_own_code():
    package = Path(dpbench.__file__).parent
    for path in package.rglob("*.py"):
        text = path.read_text()
        for word in ("unsafe_load", "full_load", "import pickle", "pickle.load", "allow_pickle=True", "eval(open"):
            assert word not in text, f"{path}: {word}"
        for call in re.findall(r"torch\.load\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)", text):
            assert "weights_only=True" in call, f"{path}: {call}"
        assert text.count("torch.load(") == len(
            re.findall(r"torch\.load\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)", text)
        )
        for line in text.splitlines():
            assert "yaml.load(" not in line or "Loader=" in line, f"{path}: {line}"
            assert "trust_remote_code=True" not in line, f"{path}: {line}"


# Records.


@pytest.mark.parametrize(
    "text",
    [
        evil_yaml(Path("MARK")),
        f"eps: {evil_yaml(Path('MARK'))}",
        "[" * 100_000,
        "a: " + "{b: " * 100_000,
        "- " * 100_000,
        "a: &a [x, x]\nb: &b [*a, *a]\nc: [*b, *b]\n",
        "a: &a [*a]\n",
        "[1, 2]",
        "",
    ],
    ids=["object", "nested object", "lists", "mappings", "block", "aliases", "endless", "list", "empty"],
)
def test_settings_of_a_record_are_plain_values_or_none_at_all(tmp_path, mark, text):
    text = text.replace("MARK", str(mark))
    (tmp_path / "config.yaml").write_text(text)
    assert Recorded(tmp_path).settings == {}


def test_an_archive_of_gradients_holds_no_objects(tmp_path, mark):
    np.savez(tmp_path / "gradients.npz", signal=np.array([Evil(mark)], dtype=object), observed=np.zeros((4, 1)))
    (tmp_path / "config.yaml").write_text("filter: {}")
    assert power_spectra([Run(0, 1.0, tmp_path, 1.0)]) is None


SCRIPT = "<script>alert(1)</script>"


HALF = np.zeros((4, 2))


@pytest.mark.parametrize(
    "content",
    [b"", b"PK\x03\x04 cut", b"version https://git-lfs.github.com/spec/v1\n", {"signal": HALF},
     {"signal": HALF, "observed": HALF[:2]}, {"signal": HALF, "observed": HALF + np.inf},
     {"signal": HALF.astype(str), "observed": HALF.astype(str)}],
    ids=["empty", "cut", "pointer", "lacks one", "of two shapes", "not finite", "texts"],
)  # fmt: skip
def test_recorded_gradients_that_cannot_be_read_are_named_and_left_out(tmp_path, content, capsys):
    path = tmp_path / "gradients.npz"
    path.write_bytes(content) if isinstance(content, bytes) else np.savez(path, **content)
    assert power_spectra([Run(0, 1.0, tmp_path, 1.0)]) is None
    assert "gradients.npz: can't be read (" in " ".join(capsys.readouterr().err.split())


def test_a_record_s_texts_are_texts_on_the_page():
    run_of = RunView(0, f"failed: {SCRIPT}", {"eps": 1.0, "perplexity": 2.0}, 1.0, None, (), 8.16)
    config = {
        "overrides": [f"tracker.project={SCRIPT}", "algo=disk; touch mark"],
        "optim": {"kind": SCRIPT, "x": SCRIPT},
    }
    ledger = {"accountant": SCRIPT, "sampler": SCRIPT, "neighbouring": SCRIPT, "correlation": SCRIPT}
    config["choices"] = {"algo": SCRIPT, "optim": SCRIPT}
    one = Configuration("abc", (run_of,), config, ledger, (), (SCRIPT,))
    module: Any = _environment().get_template("run.html.jinja").module
    html = str(module.details(one, Group(f"adp/{SCRIPT}.yaml", (one,)), None)) + str(module.settings(one.settings))
    assert "<script" not in html
    assert html.count("&lt;script&gt;") >= 4
    # What a reader copies to a shell is one word for each override.
    assert "'algo=disk; touch mark'" in one.command


def test_a_record_s_texts_do_nothing_to_a_terminal():
    escape = "\x1b]0;owned\x07\x1b[2J"
    row = Row(f"algo=x{escape}", {}, f"failed{escape}", f"why{escape}", f"/r[red]{escape}\r\n/0")
    console = make_console()
    console.file = shown = StringIO()
    print_table([row], console)
    console.print(f"  {escape} [red]:bug: \u202egpj.exe", style="red")
    text = shown.getvalue()
    assert not set(text) & {"\x1b", "\x07", "\r", "\u202e"}
    assert r"\x1b]0;owned\x07\x1b[2J" in text
    assert "[red]:bug:" in text


def test_what_is_visible_stays_as_it_is():
    assert visible("a b 'ü' \N{GREEK SMALL LETTER ALPHA}=1/N^1.1") == "a b 'ü' α=1/N^1.1"
    assert visible("a\nb\t\x00\x9b\udc80") == r"a\nb\t\x00\x9b\udc80"


def test_a_cell_that_begins_a_line_anew_is_no_formula_and_numbers_are_numbers():
    assert as_text("\r=1") == "'\r=1"
    for number in ("-1.5", "+3", "-1e-05", "-inf", "a=b", ""):
        assert as_text(number) == number


@pytest.mark.parametrize("start", ["=", "+", "-", "@", "\t"])
def test_no_cell_of_a_table_is_a_formula(start):
    attack = f"{start}HYPERLINK(1)"
    summary = {"test_accuracy": {"final": -0.5, "best": 0.5}, "eps": 1.0, "steps": attack}
    (cells,) = csv.DictReader(StringIO(as_csv([Row(attack, summary, "finished", None, attack)])))
    assert [cells[name] for name in ("run", "steps", "folder")] == [f"'{attack}"] * 3
    assert cells["test accuracy, last (%)"] == "-50.0"


# Data.


@pytest.mark.parametrize("name", ["cifar10", "cifar100"])
def test_pickles_of_cifar_are_not_loaded_unless_their_sums_are_right(tmp_path, mark, name):
    for file in IMAGES[name].files:
        path = tmp_path / file.path
        path.parent.mkdir(parents=True, exist_ok=True)
        content = pickle.dumps(Evil(mark))
        with path.open("wb") as stream:
            stream.write(content)
            stream.truncate(file.size or len(content))
    shapes = ((50_000, 3, 32, 32), (10_000, 3, 32, 32))
    with pytest.raises(UserError, match=r"is corrupt|bytes instead of"):
        IMAGES[name].read(tmp_path, shapes, download=False)


def test_tokens_in_the_cache_hold_no_objects(tmp_path, mark, monkeypatch):
    from dpbench.data.encoding import _kept
    from dpbench.data.tokens import TokenSplit

    made = TokenSplit.of([[1, 2]], [0], padding=0, longest=4, generates=False)
    np.savez(
        tmp_path / "t.npz", **{name: np.array([Evil(mark)], dtype=object) for name in ("tokens", "starts", "labels")}
    )
    tokens, _, _ = _kept(tmp_path / "t.npz", lambda: made)
    assert tokens.tolist() == [1, 2]


def test_decoded_images_hold_no_objects(tmp_path, mark):
    source = ImageFolders("imagenet", "made up", 1, 1, classes=1)
    folder = tmp_path / "imagenet" / "pixels-8"
    folder.mkdir(parents=True)
    (folder.parent / "pixels-old").mkdir()
    for name in ("train", "train-labels", "val", "val-labels"):
        np.save(folder / f"{name}.npy", np.array([Evil(mark)], dtype=object), allow_pickle=True)
    with pytest.raises(UserError, match="is damaged"):
        source.read(tmp_path, ((1, 3, 8, 8), (1, 3, 8, 8)), download=False)
    assert "decoded at 8 pixels" in source.state(tmp_path)[1]


@contextmanager
def memory_of(size: int) -> Iterator[None]:
    """The process gets no more than so many bytes of address space beside what it has."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


@pytest.mark.parametrize("accepted", [False, True], ids=["its sum is known", "its sum is not known"])
def test_a_header_that_claims_billions_of_images_allocates_nothing(tmp_path, monkeypatch, accepted):
    raw = tmp_path / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for file in IMAGES["mnist"].files:
        shape = (2**31 - 1, 28, 28) if "idx3" in file.path else (2**31 - 1,)
        header = struct.pack(f">BBBB{len(shape)}I", 0, 0, 8, len(shape), *shape)
        (tmp_path / file.path).write_bytes(header + bytes(1000))
    if accepted:
        accept_made_up_files(monkeypatch)
    shapes = ((60_000, 1, 28, 28), (10_000, 1, 28, 28))
    with memory_of(1 << 30), pytest.raises(UserError) as caught:
        IMAGES["mnist"].read(tmp_path, shapes, download=False)
    assert "\n" not in str(caught.value)
    assert ("instead of" if not accepted else "can't be read") in str(caught.value)


def made_up(name: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A source of texts of whose files no sums are known."""
    from dataclasses import replace

    source: Any = TEXTS[name]
    parts = tuple(replace(part, file=File(part.file.path), samples=2) for part in source.parts)
    return replace(source, parts=parts, files=tuple(part.file for part in parts))


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("dart", "[" * 100_000),
        ("dart", '{"tripleset": 3, "annotations": []}'),
        ("dart", '["a"]'),
        ("e2e", "mr,ref\n" + "x" * 200_000 + ",y\n"),
        ("e2e", "mr,ref\n" + '"' + "x\n" * 200_000),
        ("e2e", "mr,ref\n" + "a,b\n" * 5),
        ("qqp", "id\tquestion1\tquestion2\tis_duplicate\n" + "0\ta\tb\t1\n" * 5),
    ],
    ids=["deep", "number", "list", "long field", "open quote", "more lines", "more rows"],
)
def test_texts_of_another_form_are_told_in_a_sentence(tmp_path, monkeypatch, name, line):
    source = made_up(name, monkeypatch)
    for part in source.parts:
        path = tmp_path / part.file.path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(line)
    with pytest.raises(UserError, match=r"can't be read|has more samples instead of 2"):
        source.read(tmp_path, download=False)


@pytest.mark.parametrize("name", ["adult", "names"])
def test_an_archive_is_unpacked_nowhere_else(tmp_path, monkeypatch, name):
    root = tmp_path / "outer" / "root"
    root.mkdir(parents=True)
    inner = ["data/names/Arabic.txt"] if name == "names" else ["adult.data", "adult.test"]

    def fetch(url: str, folder: str, filename: str, md5: str | None = None) -> None:
        Path(folder).mkdir(parents=True, exist_ok=True)
        with zipfile.ZipFile(Path(folder) / filename, "w") as archive:
            for file in inner:
                archive.writestr(file, "x")
            for attack in ("../evil", "../../evil", "../../../evil", "/evil", f"{tmp_path}/evil"):
                archive.writestr(attack, "evil")

    monkeypatch.setattr("torchvision.datasets.utils.download_url", fetch)
    (TABLES | TEXTS)[name].fetch(root)
    assert [path for path in tmp_path.rglob("evil") if root not in path.parents] == []
    assert not Path("/evil").exists()


# Weights and tokenizers.


@pytest.mark.parametrize("how", ["folder", "file", "plain pickle", "named safetensors"])
def test_weights_are_tensors_and_run_nothing(tmp_path, mark, how):
    (tmp_path / "model").mkdir()
    file = tmp_path / "model" / ("model.safetensors" if how == "named safetensors" else "pytorch_model.bin")
    weights = {"weight": Evil(mark), "bias": torch.zeros(2)}
    if how == "plain pickle":
        file.write_bytes(pickle.dumps(weights))
    else:
        torch.save(weights, file)
    with pytest.raises(UserError, match="can't be read as weights"):
        load_pretrained(nn.Linear(2, 2), str(file.parent if how == "folder" else file), head="head")


def test_weights_are_read_without_their_pickle_whatever_the_library_s_default_is(tmp_path, monkeypatch):
    asked = []

    def load(path: str, *, weights_only: bool = False) -> dict[str, torch.Tensor]:
        asked.append(weights_only)
        return nn.Linear(2, 2).state_dict()

    monkeypatch.setattr("timm.models.load_state_dict", load)
    (tmp_path / "weights.bin").touch()
    load_pretrained(nn.Linear(2, 2), str(tmp_path / "weights.bin"), head="head")
    assert asked == [True]


def saved_tokenizer(folder: Path, **config: Any) -> Path:
    from tokenizers import Tokenizer, models

    folder.mkdir()
    Tokenizer(models.WordLevel({f"w{i}": i for i in range(200)}, unk_token="w0")).save(str(folder / "tokenizer.json"))
    content = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "w1", **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(content))
    return folder


def test_a_tokenizer_brings_no_code_and_nobody_is_asked(tmp_path, mark, monkeypatch):
    folder = saved_tokenizer(tmp_path / "tok", auto_map={"AutoTokenizer": ["evil.T", "evil.T"]}, tokenizer_class="T")
    (folder / "evil.py").write_text(f"open({str(mark)!r}, 'w')\n")
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked"))
    with pytest.raises(UserError, match="can't be read"):
        open_tokenizer(str(folder), tmp_path, download=False)


# The network.


@pytest.fixture
def attempts(monkeypatch) -> list[Any]:
    """Attempts of this process to reach anything."""
    found: list[Any] = []

    def refuse(*arguments: Any, **_: Any) -> None:
        found.append(arguments)
        raise OSError("tests have no network")

    for name in ("connect", "connect_ex"):
        monkeypatch.setattr(socket.socket, name, refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    return found


def test_nothing_is_fetched_that_was_not_asked_for(tmp_path, attempts):
    from safetensors.torch import save_file

    for name in SOURCES:
        with suppress(UserError):
            SOURCES[name].require_whole(tmp_path)
    for name in ("sst2", "e2e", "names", "dart"):
        with pytest.raises(UserError):
            TEXTS[name].read(tmp_path, download=False)
    for tokenizer in ("bert-base-uncased", "gpt2", "owner/name", str(tmp_path / "nowhere")):
        with pytest.raises(UserError):
            open_tokenizer(tokenizer, tmp_path, download=False)
    assert open_tokenizer(str(saved_tokenizer(tmp_path / "tok")), tmp_path, download=False).vocabulary == 200
    save_file(nn.Linear(2, 2).state_dict(), tmp_path / "model.safetensors")
    load_pretrained(nn.Linear(2, 2), str(tmp_path), head="head")
    assert text_scores(["a b c d e f"], [["a b c d e f"]])["bleu"] == pytest.approx(100)
    assert attempts == []


def test_a_run_without_a_tracker_reaches_for_nothing(tmp_path, attempts):
    assert run(tmp_path, "eps=inf").code == 0
    assert attempts == []


# Names.

ODD = "a b=c,d 'ünï' \"q\" [red] $HOME ;x"


def test_folders_may_have_any_names_and_values_any_lines(tmp_path):
    """As they stand in quotes of Hydra's grammar; W&B and the sweep's own record included."""
    results = tmp_path / ODD
    typed = str(results).replace("'", "\\'")
    outcome = run(
        tmp_path / "other", f"results_dir='{typed}'", "tracker.project='two\nlines'", "-m", "eps=inf", "seed=0,1"
    )
    assert (outcome.code, outcome.err) == (0, "")
    assert [status(path) for path in sorted(results.glob("runs/*/*"))] == ["finished"] * 2
    assert len(list(results.glob("sweeps/*/table.csv"))) == 1
    for record in results.glob("runs/*/*"):
        assert damage_of(Recorded.read(record)) is None
        assert parse_yaml((record / "config.yaml").read_text())["tracker"]["project"] == "two\nlines"
    assert sorted(path.name for path in tmp_path.iterdir()) == [ODD]
    assert f"{results}/runs/" in outcome.out


LONG = 300 * "a"


@pytest.mark.parametrize("data", ["mnist", "names model=lstm"])
def test_a_data_root_that_no_file_system_takes_is_bad_input(tmp_path, data):
    outcome = run(tmp_path / "results", *f"dataset={data}".split(), f"data.root={LONG}", "eps=inf")
    assert outcome.code == 2
    assert outcome.error().partition("=")[0] in ("dataset", "data.root")


@pytest.mark.parametrize("name", [LONG, f"/{2000 * 'b/'}", "a\0b"])
def test_weights_and_tokenizers_that_no_file_system_takes_are_bad_input(tmp_path, name, attempts):
    with pytest.raises(UserError, match=r"^model\.pretrained="):
        load_pretrained(nn.Linear(2, 2), name, head="head")
    with pytest.raises(UserError, match=r"^model\.tokenizer="):
        open_tokenizer(name, tmp_path, download=False)


def test_a_results_folder_of_an_endless_name_is_bad_input(tmp_path):
    assert run(tmp_path / LONG).error().endswith("can't be written (File name too long); name a folder that can")


@pytest.mark.parametrize(
    "line", ["tracker.mode='x\ny'", "tracker.mode='x\x1b[31m'", "device=cpu\nfoo=1", "foo\n\x1b[2J"]
)
def test_bad_input_is_one_line_whatever_was_typed(tmp_path, line):
    outcome = run(tmp_path / "results", line)
    assert outcome.code == 2
    assert outcome.error().isprintable()


def test_a_composed_run_holds_what_was_typed_and_nothing_of_the_environment(monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "a-secret")
    (job,) = compose_jobs(["eps=2"], multirun=False)
    assert "a-secret" not in repr(job)
