"""What holds for every test."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

# One file of each data set, below the data root.
MARKS = {
    "mnist": "MNIST/raw/train-images-idx3-ubyte",
    "fashion_mnist": "FashionMNIST/raw/train-images-idx3-ubyte",
    "cifar10": "cifar-10-batches-py/data_batch_1",
}


@pytest.fixture(scope="session", autouse=True)
def _cache_of_the_tests(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Calibrations are shared by the tests and kept from the user's cache, in subprocesses too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DPBENCH_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


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
