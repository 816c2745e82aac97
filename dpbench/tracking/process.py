"""Which process holds something, and whether it has ended beyond doubt."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Self

from typing_extensions import override


@dataclass(frozen=True)
class Process:
    """A process, told apart from others that have its number on other machines or at other times.

    Attributes:
        host: name of its machine, for people.
        pid: its number.
        machine: the boot of the machine and the name space of process numbers; "" where the system doesn't tell.
        started: when it started, in ticks since that boot, which no change of the clock moves.
    """

    host: str
    pid: int
    machine: str
    started: str

    @classmethod
    def this(cls) -> Self:
        """The process that asks."""
        pid = os.getpid()
        _, started = _state_and_start(pid)
        return cls(socket.gethostname(), pid, _machine(), started)

    @classmethod
    def read(cls, content: Mapping[str, Any]) -> Self:
        """One that was written down by its attributes' names; whatever is missing there is unknown."""
        text = {name: str(content.get(name, "")) for name in ("host", "machine", "started")}
        pid = content.get("pid")
        return cls(pid=pid if isinstance(pid, int) else 0, **text)

    @override
    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"

    def gone(self) -> bool:
        """Whether it has certainly ended; False where that can't be known, as on another machine."""
        if not self.machine or self.machine != _machine() or not self.started:
            return False
        state, started = _state_and_start(self.pid)
        return state in "ZX" or started != self.started  # "" is in every text: there is no such process


@cache
def _machine() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _state_and_start(pid: int) -> tuple[str, str]:
    """State and time of start of a process on this machine, as /proc has them (proc(5)); empty where it has none."""
    try:
        after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return after_name[0], after_name[19]
    except (OSError, IndexError):
        return "", ""
