"""Checkpoints of a run on disk: written as a whole or not at all, checked when read, the last two kept.

A file is a line that names the format, the SHA-256 of what follows, and a file of torch.save that holds tensors and
plain values alone, so that loading one executes no code. It is not for publication: it has the generators of samples
and noise, and what stages keep of gradients that were never released.
"""

from __future__ import annotations

import hashlib
import io
import os
import re
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.serialization import default_restore_location as restored

from dpbench.devices import out_of_memory
from dpbench.files import sync_folder
from dpbench.state import State

HEADER = b"dpbench checkpoint 1\n"
DIGEST = hashlib.sha256().digest_size
# Older ones are removed once a new one is on disk.
KEPT = 2
NAME = re.compile(r"checkpoint-(\d+)\.pt")
PLAIN = (str, int, float, bool, type(None))


class DamagedError(Exception):
    """A checkpoint can't be used; in words that go on from "the checkpoint of step 12"."""


class Checkpoints:
    """The checkpoints in the folder of a run.

    Attributes:
        folder: where they lie.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def steps(self) -> list[int]:
        """Steps that there are checkpoints of, the last one first."""
        names = os.listdir(self.folder) if self.folder.is_dir() else []
        return sorted((int(found[1]) for name in names if (found := NAME.fullmatch(name))), reverse=True)

    def path(self, step: int) -> Path:
        """The file of a step."""
        return self.folder / f"checkpoint-{step:08d}.pt"

    def write(self, step: int, state: State, check: Callable[[], object] = lambda: None) -> None:
        """Write the checkpoint of a step, and remove those that are no longer needed.

        Whatever goes wrong, the older ones stay and no part of a new one is left.

        Args:
            step: steps taken.
            state: tensors and plain values.
            check: called before the new one takes its place; what it raises leaves all as it was.

        Raises:
            OSError: it can't be written; the disk may be full.
            TypeError: the state has something that could not be loaded again.
        """
        payload = packed(state)
        handle, part = tempfile.mkstemp(dir=self.folder, prefix=".checkpoint.")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(HEADER + hashlib.sha256(payload).digest())
                file.write(payload)
                file.flush()
                os.fsync(file.fileno())
            check()
            os.replace(part, self.path(step))
        except BaseException:
            Path(part).unlink(missing_ok=True)
            raise
        sync_folder(self.folder)
        for old in self.steps()[KEPT:]:
            self.path(old).unlink(missing_ok=True)

    def read(self, step: int, device: torch.device) -> State:
        """The checkpoint of a step; what was on a GPU is on this device.

        Raises:
            DamagedError: it is not what was written.
        """
        try:
            content = self.path(step).read_bytes()
        except OSError as error:
            raise DamagedError(f"can't be read ({error.strerror})") from error
        header, digest, payload = _cut(content)
        if header != HEADER:
            raise DamagedError("is of another format" if header.startswith(HEADER[:18]) else "is damaged")
        if hashlib.sha256(payload).digest() != digest:
            raise DamagedError("is damaged: its checksum differs")
        return unpacked(payload, device)

    def set_aside(self, step: int) -> Path:
        """Rename the checkpoint of a step, so that it is not read again; where it is now."""
        path = self.path(step)
        aside = path.with_suffix(".unusable")
        path.replace(aside)
        return aside

    def remove(self) -> None:
        """Remove all checkpoints but those that were set aside."""
        for step in self.steps():
            self.path(step).unlink(missing_ok=True)


def packed(state: State) -> memoryview:
    """A state as bytes, of which `unpacked` makes it again.

    Raises:
        TypeError: it has something that could not be loaded again.
        MemoryError: there is no room for them.
    """
    for where, value in _leaves(state):
        if type(value) not in PLAIN and not isinstance(value, Tensor):
            raise TypeError(f"{where} is a {type(value).__name__}; only tensors and plain values can be loaded")
    content = io.BytesIO()
    try:
        torch.save(state, content)
    except (MemoryError, RuntimeError) as error:  # the latter where torch can't end a file that there is no room for
        if MemoryError in (type(error), type(error.__context__)):
            raise MemoryError("memory ran out") from error
        raise
    return content.getbuffer()


def can_not_be_had(error: Exception) -> bool:
    """Whether an error on the way to a state as bytes says that there are none, and nothing else."""
    return isinstance(error, TypeError) or out_of_memory(error)


def unpacked(payload: memoryview, device: torch.device) -> State:
    """The state that bytes were made of; what was on a GPU is on this device.

    Raises:
        DamagedError: it can't be loaded.
    """
    try:
        state = torch.load(
            io.BytesIO(payload),
            map_location=lambda storage, place: restored(storage, str(device) if place.startswith("cuda") else place),
            weights_only=True,
        )
    except Exception as error:  # of any kind: what is in the file is not ours
        if out_of_memory(error):
            raise
        raise DamagedError(f"can't be loaded ({type(error).__name__})") from error
    if not isinstance(state, dict):
        raise DamagedError("holds no state of a run")
    return state


def _cut(content: bytes) -> tuple[bytes, bytes, memoryview]:
    start = len(HEADER) + DIGEST
    return content[: len(HEADER)], content[len(HEADER) : start], memoryview(content)[start:]


def _leaves(value: Any, where: str = "") -> Iterator[tuple[str, Any]]:
    """Everything in nested dictionaries and lists, and where it is."""
    if type(value) is dict:
        for key, item in value.items():
            yield from _leaves(item, f"{where}.{key}" if where else str(key))
    elif type(value) in (list, tuple):
        for i, item in enumerate(value):
            yield from _leaves(item, f"{where}.{i}")
    else:
        yield where, value
