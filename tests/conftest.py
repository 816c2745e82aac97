"""What holds for every test."""

import hashlib
import logging
import os
import pickle
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from cli import only_record, run
from dp_accounting.rdp import rdp_privacy_accountant
from helpers import accept_made_up_files, precision
from made_up_evidence import World
from omegaconf import DictConfig
from results_command import age_by

from dpbench.config import compose
from dpbench.reproduction.times import Speed, Times
from dpbench.tracking import provenance

# The models are tiny: more threads only wait for each other.
os.environ["OMP_NUM_THREADS"] = "1"
torch.set_num_threads(1)

pytest.register_assert_rewrite(
    "documented_examples",
    "gradient_checks",
    "made_up_locks",
    "resuming",
    "small_models",
    "team_resuming",
    "wandb_log",
)
BY_HYDRA = compose._compose

# One file of each data set or tokenizer, below the data root.
MARKS = {
    "mnist": "MNIST/raw/train-images-idx3-ubyte",
    "fashion_mnist": "FashionMNIST/raw/train-images-idx3-ubyte",
    "cifar10": "cifar-10-batches-py/data_batch_1",
    "adult": "adult/adult.data",
    "rte": "glue/RTE/train.tsv",
    "sst2": "glue/SST-2/train.tsv",
    "e2e": "e2e_nlg/trainset.csv",
    "roberta-base": "tokenizers/roberta-base/vocab.json",
    "gpt2": "tokenizers/gpt2/vocab.json",
    "bert-base-uncased": "tokenizers/bert-base-uncased/vocab.txt",
}


@pytest.fixture(scope="session")
def of_all_processes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that the processes of these tests share."""
    of_this_process = tmp_path_factory.getbasetemp()
    return of_this_process.parent if "PYTEST_XDIST_WORKER" in os.environ else of_this_process


@pytest.fixture(scope="session", autouse=True)
def _cache_of_the_tests(of_all_processes: Path) -> Iterator[None]:
    """Calibrations are shared by the tests, their processes too, and kept from the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DPBENCH_CACHE", str(of_all_processes / "cache"))
        yield


@pytest.fixture(scope="session", autouse=True)
def _compositions_of_the_tests(of_all_processes: Path) -> Iterator[None]:
    """What Hydra composes of built-in options alone is shared likewise: it takes longer than most of their runs."""
    folder, known = of_all_processes / "compositions", dict[str, bytes]()
    folder.mkdir(exist_ok=True)

    def composed(overrides: Sequence[str], config_dirs: Sequence[Path]) -> DictConfig:
        if config_dirs:
            return BY_HYDRA(overrides, config_dirs)
        key = repr((sys.path, *overrides))  # where Hydra looks for further options, and what is typed
        if key not in known:
            file = folder / hashlib.sha256(key.encode()).hexdigest()
            if not file.exists():
                fresh = file.with_suffix(f".{os.getpid()}")
                fresh.write_bytes(pickle.dumps(BY_HYDRA(overrides, config_dirs)))
                fresh.replace(file)
            known[key] = file.read_bytes()
        return pickle.loads(known[key])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compose, "_compose", composed)
        yield


@pytest.fixture(scope="session", autouse=True)
def _answers_of_the_tests() -> Iterator[None]:
    """What every run asks for and is told the same is found once: bounds of a step's RDP, and the state of git."""
    name = "_compute_rdp_poisson_subsampled_gaussian"  # a private one, which other versions may not have
    bounds, git = getattr(rdp_privacy_accountant, name, None), provenance._git

    @cache
    def bounds_of(q: float, noise_multiplier: float, orders: tuple[float, ...]) -> np.ndarray:
        return bounds(q, noise_multiplier, orders)

    @cache
    def said_of(source: str, *arguments: str) -> str | None:
        return git(*arguments)

    def known_bounds(q: float, noise_multiplier: float, orders: Sequence[float]) -> np.ndarray:
        return bounds_of(q, noise_multiplier, tuple(orders)).copy()

    with pytest.MonkeyPatch.context() as patch:
        if bounds is not None:
            patch.setattr(rdp_privacy_accountant, name, known_bounds)
        patch.setattr(provenance, "_git", lambda *arguments: said_of(provenance.__file__, *arguments))
        yield


@pytest.fixture(autouse=True)
def _modules_of_the_test(monkeypatch: pytest.MonkeyPatch) -> None:
    """Folders of options that Python is told of in a test are forgotten after it."""
    monkeypatch.setattr(sys, "path", [*sys.path])


@pytest.fixture
def composed_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing that Hydra composed before is taken for what it composes."""
    monkeypatch.setattr(compose, "_compose", BY_HYDRA)


@pytest.fixture(scope="session")
def _small_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    results = tmp_path_factory.mktemp("small")
    assert run(results).code == 0
    return results


@pytest.fixture
def results_of_a_run(_small_run: Path, tmp_path: Path) -> Path:
    """A results folder of its own that holds the finished record of a small run."""
    return shutil.copytree(_small_run, tmp_path / "results")


@pytest.fixture
def store(results_of_a_run: Path) -> Path:
    """The record of a finished run, as it was a day ago."""
    age_by(results_of_a_run)
    return results_of_a_run


@pytest.fixture
def record(store: Path) -> Path:
    """Its folder there."""
    return only_record(store)


@pytest.fixture
def shared_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every configuration samples alike and draws the same noise, so that two of them can be compared exactly."""
    for module in ("assemble", "loop"):
        monkeypatch.setattr(f"dpbench.training.{module}.config_hash", lambda _: "")


@pytest.fixture
def quiet_accountants() -> Iterator[None]:
    """Without the warnings of dp-accounting and Opacus of each order that they leave out or end at."""
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    logger.setLevel(level)


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing that was kept before is found."""
    monkeypatch.setenv("DPBENCH_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def known_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    """No device is measured."""
    monkeypatch.setattr(Times, "speed", Speed(flops=1e9, overhead=1e-3))


@pytest.fixture
def seeded() -> None:
    torch.manual_seed(3)


@pytest.fixture
def in_float64() -> Iterator[None]:
    """Sums are made without the rounding of float32, which group norm of few pixels enlarges."""
    with precision(torch.float64):
        yield


@pytest.fixture
def world(tmp_path: Path) -> World:
    """Claims and no records yet."""
    return World(tmp_path)


@pytest.fixture
def made_up_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of data sets that are there count as whole."""
    accept_made_up_files(monkeypatch)


@pytest.fixture
def data_root() -> Callable[[str], Path]:
    """The data root, if it holds a data set; else the test is skipped, or fails where data must be there."""

    def root(name: str) -> Path:
        folder = Path(os.environ.get("DPBENCH_DATA", ".data"))
        if not (folder / MARKS[name]).exists():
            message = f"no {name} under {folder}; set DPBENCH_DATA to a data root that has it"
            if os.environ.get("DPBENCH_TESTS_NEED_DATA"):
                pytest.fail(message)
            pytest.skip(message)
        return folder

    return root
