"""Command lines of dpbench.run in this process, and reading what they leave."""

import json
import logging
import os
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from functools import cache
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from helpers import job_of
from hydra.core.global_hydra import GlobalHydra

from dpbench.config import config_hash
from dpbench.run import main
from dpbench.step import PrivateStep

ROOT = Path(__file__).resolve().parents[1]
CONF = ROOT / "conf"

PLAIN = ("device=cpu", "tracker=disabled", "privacy.accountant=rdp")
STEPS = 3
# A run of three steps that is evaluated after two of them and at the end.
SMALL = (
    *PLAIN,
    "model=linear",
    "batch_size=64",
    "epochs=0.1",
    "evaluation.every_steps=2",
)


@cache
def hash_of(*overrides: str) -> str:
    """Hash of the run that the overrides give."""
    return config_hash(job_of(*overrides).config)


@dataclass(frozen=True)
class Outcome:
    """What a command line came to."""

    code: int
    out: str
    err: str
    results: Path

    def error(self) -> str:
        """The one line on stderr of a command line that went wrong, without its mark."""
        shown = self.err.removesuffix("\n")
        assert shown.startswith("error: "), f"stderr: {self.err!r}"
        assert "\n" not in shown, f"more than one line: {self.err!r}"
        assert "Traceback" not in self.out
        return shown.removeprefix("error: ")


def run(results: Path, *arguments: str, settings: tuple[str, ...] = SMALL) -> Outcome:
    """Run a command line as in a fresh process; later arguments win over the settings of a small run."""
    out, err = StringIO(), StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        typed = [f"results_dir={results}", *settings, *arguments]
        patch.setattr(sys, "argv", ["dpbench", *typed])
        patch.setattr(sys, "path", [*sys.path])
        patch.delenv("DPBENCH_DATA", raising=False)
        forget_logging(patch)
        try:
            code = main(typed)
        finally:
            GlobalHydra.instance().clear()
    return Outcome(code, out.getvalue(), err.getvalue(), results)


def forget_logging(patch: pytest.MonkeyPatch) -> None:
    """Let a command line set logging up as if nobody had, and undo afterwards what it did."""
    patch.setattr(logging.root, "handlers", [])
    patch.setattr(logging.root, "level", logging.WARNING)
    for logger in logging.root.manager.loggerDict.values():
        if isinstance(logger, logging.Logger):
            patch.setattr(logger, "disabled", False)
    # Setting logging up anew closes all handlers, and absl's takes pytest's stderr with it.
    patch.setattr(logging, "shutdown", lambda *_: None)


def environment(*folders: Path) -> dict[str, str]:
    """That of a process of its own, which finds modules in these folders, and dpbench where this one does."""
    paths = [*map(str, folders), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def started(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """`python -m dpbench.run` in a process of its own."""
    command = [sys.executable, "-m", "dpbench.run", *arguments]
    return subprocess.run(command, cwd=folder, env=environment(), capture_output=True, text=True, timeout=120)


def records(results: Path) -> list[Path]:
    """The folders of all runs that left anything, whatever came of them."""
    files = (path for path in (results / "runs").rglob("*") if path.is_file() and path.suffix != ".published")
    return sorted({path.parent for path in files})


def only_record(results: Path) -> Path:
    (record,) = records(results)
    return record


def read(record: Path, name: str) -> Any:
    """A JSON file of a record, which holds no NaN or Infinity: JSON has none."""
    return json.loads((record / name).read_text(), parse_constant=_not_json)


def read_metrics(record: Path) -> list[dict[str, Any]]:
    lines = (record / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line, parse_constant=_not_json) for line in lines]


def _not_json(word: str) -> None:
    raise ValueError(f"{word} is no JSON")


def status(record: Path) -> str:
    return read(record, "status.json")["status"]


def final_accuracy(record: Path) -> float:
    return read(record, "summary.json")["test_accuracy"]["final"]


def snapshot(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Time and content of every file below a folder."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): (path.stat().st_mtime_ns, path.read_bytes()) for path in files}


def raise_after(patch: pytest.MonkeyPatch, steps: int, error: BaseException, query: str | None = None) -> None:
    """Make every run, or those with this kind of query, raise when it has taken so many steps."""
    original = PrivateStep.take

    def call(self: PrivateStep, batch: Any) -> Any:
        if self.steps == steps and query in (None, type(self.query).__name__):
            raise error
        return original(self, batch)

    patch.setattr(PrivateStep, "take", call)


def write_option(conf: Path, name: str, schema: str, extra: str = "", group: str = "filter") -> None:
    """A YAML file of one's own that chooses a class of one's own."""
    (conf / group).mkdir(exist_ok=True)
    text = f"defaults:\n  - /schema/{group}@_here_: {schema}\n  - _self_\n{extra}\n"
    (conf / group / f"{name}.yaml").write_text(text)
