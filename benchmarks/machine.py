"""Where measurements are made: device, versions, commit. Nothing here names a host or a folder."""

from __future__ import annotations

import os
import platform
import re
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from benchmarks.timing import Settings
from dpbench.tracking.provenance import provenance

_CPUINFO = Path("/proc/cpuinfo")
# Words of a device's name that do not tell it apart.
_FILLER = re.compile(
    r"\((?:R|TM|C)\)|\b(?:Processor|CPU|PCIe|\d+-Core|\d+GB|HBM\w*|SXM\d?)\b|@.*",
    re.IGNORECASE,
)


def device_name(device: str) -> str:
    """The name of the processor or GPU as the system gives it."""
    if device == "cuda":
        return torch.cuda.get_device_name()
    if _CPUINFO.exists():
        for line in _CPUINFO.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def slug(settings: Settings, *, partial: bool) -> str:
    """A file name that tells apart measurements which must not be compared."""
    name = _FILLER.sub(" ", device_name(settings.device))
    words = re.findall(r"[a-z0-9]+(?:[.-][a-z0-9]+)*", name.lower())
    if settings.device == "cpu":
        words = ["cpu", *words, str(settings.threads), "threads" if settings.threads > 1 else "thread"]
    if settings.device == "cpu" and settings.allocator == "default":
        words += ["default", "allocator"]
    words += ["quick"] * settings.small + ["partial"] * partial
    return "-".join(words)


def describe(settings: Settings) -> dict[str, Any]:
    """Device, load, versions, commit and date."""
    facts = provenance(torch.device(settings.device))
    return {
        "device": device_name(settings.device),
        "threads": settings.threads,
        # Other work: with as many threads as cores, it slows down everything many times over.
        "load": round(os.getloadavg()[0], 1) if hasattr(os, "getloadavg") else None,
        "platform": f"{platform.system()} {platform.machine()}",
        "python": facts["python"],
        "versions": facts["versions"] | {"transformers": version("transformers")},
        "cuda": facts["cuda"],
        "commit": facts["commit"],
        "dirty": facts["dirty"],
        "date": datetime.now(UTC).date().isoformat(),
    }
