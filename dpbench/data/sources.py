"""Where a data set comes from, and how a copy of it is known to be whole.

`python -m dpbench.data` lists and checks every source in `catalogue.py`, whatever it holds.
"""

from __future__ import annotations

import hashlib
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import ClassVar, NamedTuple

from torch import Tensor
from typing_extensions import override

from dpbench.errors import UserError
from dpbench.files import require_no_file

# train images, train labels, test images, test labels; images uint8 (N, C, H, W).
Images = tuple[Tensor, Tensor, Tensor, Tensor]
Shape = tuple[int, int, int, int]


# What helps where the data are not where they are looked for.
ELSEWHERE = "point data.root (or the environment variable DPBENCH_DATA)"


class State(StrEnum):
    """How a data set stands on this machine."""

    PRESENT = "present"
    DOWNLOADABLE = "can be downloaded"
    LICENSED = "needs a licence"
    DAMAGED = "damaged"


class Problem(NamedTuple):
    """What is wrong with a copy.

    Attributes:
        text: names the file, relative to the data root.
        absent: something is missing; else what is there is damaged.
    """

    text: str
    absent: bool


@dataclass(frozen=True)
class Source(ABC):
    """Where a data set comes from.

    Attributes:
        name: of the data set, as in ``dataset=<name>``.
        title: as a person would call it.
        train: known number of training samples.
        test: known number of test samples.
        by_hand: what a person must do to have it, such as asking for a licence; empty where it can be fetched.
    """

    name: str
    title: str
    train: int
    test: int
    by_hand: str = ""

    # What a person does with files that are damaged.
    REPAIR: ClassVar[str] = "delete it and fetch it anew"

    @property
    def built_in(self) -> bool:
        """Whether it comes with a library, without files under the data root."""
        return False

    @abstractmethod
    def problems(self, root: Path, *, thorough: bool) -> list[Problem]:
        """What is wrong with the copy under a data root; nothing if it is whole.

        Args:
            root: data root.
            thorough: read all files, for their sums or counts; else only see what is there.
        """

    def state(self, root: Path) -> tuple[State, str]:
        """How the data set stands under a data root, at a glance, and what is to say about it."""
        problems = self.problems(root, thorough=False)
        damage = next((problem.text for problem in problems if not problem.absent), None)
        if damage is not None:
            return State.DAMAGED, damage
        if problems:
            return (State.LICENSED, self.by_hand) if self.by_hand else (State.DOWNLOADABLE, problems[0].text)
        return State.PRESENT, ""

    def require_whole(self, root: Path) -> None:
        """Check all files.

        Raises:
            UserError: a file is missing or damaged.
        """
        problems = self.problems(root, thorough=True)
        if problems:
            self.require_folder(root, download=False)
        for problem in sorted(problems, key=lambda problem: problem.absent):
            if not problem.absent:
                raise self.error(f"{problem.text} under data.root={root}; {self.REPAIR}")
            remedy = self.by_hand or "set data.download=true to fetch it"
            raise self.error(
                f"no complete copy under data.root={root} ({problem.text}); {remedy}, or {ELSEWHERE} at one"
            )

    def require_folder(self, root: Path, *, download: bool) -> None:
        """Check that a data root is a folder, or is to be made by fetching something to it.

        Raises:
            UserError: it is another file, or there is nothing.
        """
        if os.path.isdir(root):  # False also of names that no file system takes
            return
        require_no_file(root, "data.root", f"{ELSEWHERE} at one")
        if self.by_hand or not download:
            remedy = self.by_hand or f"set data.download=true to fetch dataset={self.name} to it"
            raise UserError(f"no such folder; {remedy}, or {ELSEWHERE} at another", field="data.root", value=root)

    def error(self, message: str) -> UserError:
        """A sentence about this data set."""
        return UserError(message, field="dataset", value=self.name)


@dataclass(frozen=True)
class Fetchable(Source):
    """A data set that is fetched to a data root."""

    @abstractmethod
    def fetch(self, root: Path) -> None:
        """Put the files under a data root, from the official source; raises whatever goes wrong."""

    def obtain(self, root: Path, *, download: bool) -> None:
        """Check all files, after fetching them where some are missing and may be fetched.

        Raises:
            UserError: a file is missing or damaged, or can't be fetched.
        """
        if download and any(problem.absent for problem in self.problems(root, thorough=False)):
            self.require_folder(root, download=True)
            try:
                self.fetch(root)
            except Exception as error:  # whatever the network, the disk and the archive run into
                raise self.error(f"can't be fetched to data.root={root} ({type(error).__name__}: {error})") from error
        self.require_whole(root)


@dataclass(frozen=True)
class File:
    """A file of a data set.

    Attributes:
        path: relative to the data root.
        md5: of the whole file, as published or as derived from what is; empty where it is not known.
        size: bytes; None where only the sum is known.
    """

    path: str
    md5: str = ""
    size: int | None = None

    def problem(self, root: Path, *, thorough: bool) -> Problem | None:
        """What is wrong with it under a data root."""
        path = root / self.path
        if not os.path.isfile(path):  # also of names that no file system takes
            return Problem(f"{self.path} is missing", absent=True)
        try:
            size = path.stat().st_size
            if self.size is not None and size != self.size:
                return Problem(f"{self.path} has {size:,} bytes instead of {self.size:,}", absent=False)
            if thorough and self.md5 and _md5(path) != self.md5:
                return Problem(f"{self.path} is corrupt (another MD5 sum than {self.md5})", absent=False)
        except OSError as error:
            return Problem(f"{self.path} can't be read ({error.strerror})", absent=False)
        return None


def _md5(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "md5").hexdigest()


@contextmanager
def fetched(url: str, root: Path) -> Iterator[Path]:
    """The files of an archive, in a folder that is there within the context.

    It lies under the data root, so that what is moved from it is there whole or not at all, and an archive that was
    fetched in part is not taken for the whole one at the next attempt.
    """
    from torchvision.datasets.utils import download_and_extract_archive

    root.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=".fetched-", dir=root) as folder:
        download_and_extract_archive(url, folder)
        yield Path(folder)


@dataclass(frozen=True)
class FileSource(Source):
    """A data set of a few files whose sums are known.

    Attributes:
        files: all that are read.
    """

    files: tuple[File, ...] = ()

    @override
    def problems(self, root: Path, *, thorough: bool) -> list[Problem]:
        with ThreadPoolExecutor() as pool:  # sums of several files at once
            found = list(pool.map(lambda file: file.problem(root, thorough=thorough), self.files))
        return [problem for problem in found if problem is not None]


@dataclass(frozen=True)
class ImageSource(Source):
    """A data set that can be read as images."""

    @abstractmethod
    def read(self, root: Path, shapes: tuple[Shape, Shape], *, download: bool) -> Images:
        """Images and labels; whoever reads them compares them with what is declared.

        Args:
            root: data root.
            shapes: (N, C, H, W) wanted of the training and the test images; a source may know only one.
            download: fetch what is missing.

        Raises:
            UserError: a file is missing, truncated or corrupt.
        """
