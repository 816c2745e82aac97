"""Where a run's numbers come from: code, versions, machine."""

from __future__ import annotations

import platform
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from dpbench.devices import describe
from dpbench.privacy.gaussian import SEEDED_NOISE

PACKAGES = (
    "dpbench",
    "torch",
    "torchvision",
    "dp-accounting",
    "hydra-core",
    "numpy",
    "opacus",
    "scikit-learn",
)
# Of a run that reads texts or begins with others' weights, which loads one of the first two.
FURTHER = (
    "transformers",
    "timm",
    "tokenizers",
    "datasets",
    "huggingface-hub",
    "peft",
    "nltk",
    "sacrebleu",
    "rouge-score",
)


def _git(*arguments: str) -> str | None:
    """Output of git in the folder of this source; None outside a checkout."""
    folder = Path(__file__).resolve().parent
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _in_checkout() -> bool:
    """Whether git tracks this source: a package that is installed within somebody's project is no part of that."""
    return _git("ls-files", "--error-unmatch", "--", Path(__file__).resolve().name) is not None


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


# The command line that a process of a launcher works for; its own has a launcher's words and paths of this machine.
_worked_for: ContextVar[Sequence[str] | None] = ContextVar("worked_for", default=None)


@contextmanager
def working_for(command: Sequence[str]) -> Iterator[None]:
    """What is carried out meanwhile was asked for by this command line, see `command_line`."""
    before = _worked_for.set(command)
    try:
        yield
    finally:
        _worked_for.reset(before)


def command_line() -> list[str]:
    """The command line, with its module or program by name: where it lies is nobody else's business."""
    if (handed := _worked_for.get()) is not None:
        return [*handed]
    module = getattr(sys.modules["__main__"], "__spec__", None)
    if module is not None:
        return ["python", "-m", module.name.removesuffix(".__main__"), *sys.argv[1:]]
    return [Path(sys.argv[0]).name, *sys.argv[1:]]


def provenance(device: torch.device) -> dict[str, Any]:
    """Time, commit, versions and device of a run that starts now.

    `dirty` is of what computes, the package and its configs: runs write beside them, and so change the checkout.
    """
    tracked = _in_checkout()
    further = () if sys.modules.keys().isdisjoint(FURTHER[:2]) else FURTHER
    changes = _git("status", "--porcelain", "--", ":/dpbench", ":/conf") if tracked else None
    return {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": _git("rev-parse", "HEAD") if tracked else None,
        "dirty": None if changes is None else bool(changes),
        "command": command_line(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "versions": {package: _version(package) for package in (*PACKAGES, *further)},
        "device": describe(device),
        "seeded_noise": SEEDED_NOISE,
        "cuda": torch.version.cuda if device.type == "cuda" else None,
    }


def gone_on(first: dict[str, Any], step: int, now: dict[str, Any]) -> dict[str, Any]:
    """Provenance of a run that goes on: that of its first part, and of each later one where it differs.

    Args:
        first: of the parts so far; empty where it is lost.
        step: after which the run goes on.
        now: of this part.
    """
    other = {key: value for key, value in now.items() if first.get(key) != value}
    return {**(first or now), "resumed": [*first.get("resumed", []), {"step": step, **other}]}
