"""What was seen of a run, noted beside its record, where no new attempt at it removes the note."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from dpbench.files import write_atomically
from dpbench.tracking.shapes import NOTE

SUFFIX = "published"
# What each of several processes computed by.
OF_PROCESS = ("device", "micro_batch", "at_once", "strategies")


@dataclass(frozen=True)
class Published:
    """What was seen of a run, and how it drew what went before.

    Attributes:
        step: the last one whose metrics were seen; 0 where nothing was, inf where the note can't be read.
        device: kind of device that drew batches and noise, as `device_kind` has it; None where that is not known.
        noise: version of its seeded noise (privacy/gaussian.py); None where that is not known.
        noise_multiplier: of the first release; None where that is not known.
        micro_batch: samples that went through the model at a time; None where that is not known.
        channels_last: memory layout of its images; None where that is not known.
        processes: that trained the run; None where that is not known.
        at_once: samples of a micro-batch that were computed at once when that was seen, fewer than all since memory ran
            out; None where that is not known.
        strategies: by which gradients were summed (gradients/choice.py), of process 0; None where that is not known.
        since: the step after which all of that held, for the run went on there otherwise; None where that is not known.
        others: device, micro_batch, at_once and strategies of the processes from process 1 on; None where these are not
            known, or there are none.
    """

    step: float = 0
    device: str | None = None
    noise: int | None = None
    noise_multiplier: float | None = None
    micro_batch: int | None = None
    channels_last: bool | None = None
    processes: int | None = None
    at_once: int | None = None
    strategies: dict[str, list[object]] | None = None
    since: int | None = None
    others: list[dict[str, Any]] | None = None

    @classmethod
    def read(cls, record: Path) -> Published:
        """The note beside a record."""
        try:
            content = json.loads(note_of(record).read_text())
        except FileNotFoundError:
            return cls()
        except (OSError, ValueError, RecursionError):
            content = None
        if NOTE(content) is not None:
            return cls(step=math.inf)
        others, processes = content.get("others"), content.get("processes")
        if others is not None and len(others) + 1 != processes:
            return cls(step=math.inf)
        return cls(float(content["step"]), *(content.get(field.name) for field in fields(cls)[1:]))

    def of(self, rank: int) -> Published:
        """What one of the processes has to know of it, as far as it computed that itself."""
        if rank == 0:
            return self
        own = dict.fromkeys(OF_PROCESS) if self.others is None else self.others[rank - 1]
        device, micro_batch, at_once, strategies = (own[name] for name in OF_PROCESS)
        return replace(
            self, device=device, micro_batch=micro_batch, at_once=at_once, strategies=strategies, others=None
        )

    @property
    def readable(self) -> bool:
        """Whether there was none, or it could be read."""
        return self != Published(math.inf)

    @property
    def in_words(self) -> str:
        """What was seen."""
        return (
            f"metrics of step {self.step:.0f} are published" if self.readable else "metrics of this run are published"
        )

    def write(self, record: Path) -> None:
        """Leave the note beside a record; it is on disk when this returns.

        Raises:
            OSError: it can't be written.
        """
        write_atomically(note_of(record), json.dumps(asdict(self)) + "\n", durably=True)


def device_kind(device: str) -> str:
    """What `devices.describe` says of a device, without what no random number depends on."""
    return device.partition(",")[0]


def forget(record: Path) -> None:
    """Remove the note: the record has finished, and tells itself."""
    note_of(record).unlink(missing_ok=True)


def note_of(record: Path) -> Path:
    """The note beside a record."""
    return record.with_name(f"{record.name}.{SUFFIX}")
