"""Reading records: the one notion of what a valid one is.

A record counts for nothing unless status.json and summary.json have the shapes of `shapes.py`. Another file of a wrong
shape is as one that is not there: what it would say is missing, and the rest of the record counts.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from dpbench.console import make_console
from dpbench.files import stamp
from dpbench.tracking import shapes
from dpbench.tracking.lock import is_held, lock_of
from dpbench.tracking.safe_yaml import parse_yaml
from dpbench.tracking.shapes import Shape
from dpbench.tracking.status import Status

# What status.json may say; a run that was refused left no record.
WORDS = tuple(str(status) for status in Status if status != Status.REFUSED)
DAMAGED = "damaged"
# Why a run was interrupted that could not say so itself.
KILLED = "its process died without saying why"
# A record that changes while it is read is read again so often.
ATTEMPTS = 5

_HASH, _SEED = re.compile("[0-9a-f]+"), re.compile("0|[1-9][0-9]*")

_named: set[Path] = set()


class DamageError(ValueError):
    """A file of a record can't be read, or is of a wrong shape; says which, and why."""


@dataclass
class Recorded:
    """The record of one run as it was at one moment.

    Attributes:
        folder: of the record.
        word: what status.json says; None where that is missing or of a wrong shape.
        reason: why, where the run is not finished.
        summary: content of summary.json; empty where the record is damaged or has none yet.
        problems: what is wrong with files read so far, by their names.
    """

    folder: Path
    word: str | None = None
    reason: str | None = None
    summary: Mapping[str, Any] = field(default_factory=dict)
    problems: dict[str, str] = field(default_factory=dict)

    @classmethod
    def read(cls, folder: Path) -> Recorded:
        """Read status and summary, which belong together even if the record is replaced meanwhile."""
        for _ in range(ATTEMPTS):
            before, found = stamp(folder), cls._read(folder)
            if not found.problems or before == stamp(folder):
                break
        return found

    @classmethod
    def _read(cls, folder: Path) -> Recorded:
        found = cls(folder)
        try:
            content = _status(folder)
        except DamageError as error:
            found.problems["status.json"] = str(error)
            return found
        if content is None:  # it is the first file that a run writes
            return found
        found.word, found.reason = content["status"], content.get("reason")
        finished = found.word == Status.FINISHED
        try:
            summary = _json(folder / "summary.json", shapes.summary(finished=finished))
        except DamageError as error:
            found.problems["summary.json"] = str(error)
            return found
        if summary is None and finished:
            found.problems["summary.json"] = "is missing"
        found.summary = summary or {}
        return found

    @property
    def damaged(self) -> bool:
        """Whether the record counts for nothing."""
        return "status.json" in self.problems or "summary.json" in self.problems

    @property
    def damage(self) -> str | None:
        """What is wrong with it, in words; None for nothing."""
        return problems_in_words(self.problems) or None

    @property
    def exists(self) -> bool:
        """Whether there is a record, whatever its state."""
        return self.word is not None or self.damaged

    @property
    def status(self) -> str | None:
        """How the run stands, or that its record is damaged; None where there is no record."""
        return DAMAGED if self.damaged else self.word

    @property
    def finished(self) -> bool:
        """Whether the run finished, and its record counts."""
        return self.status == Status.FINISHED

    @cached_property
    def ledger(self) -> Mapping[str, Any]:
        """Content of ledger.json."""
        return self._object("ledger.json", shapes.LEDGER)

    @cached_property
    def provenance(self) -> Mapping[str, Any]:
        """Content of provenance.json."""
        return self._object("provenance.json", shapes.PROVENANCE)

    @cached_property
    def settings(self) -> Mapping[str, Any]:
        """Content of config.yaml."""
        try:
            return read_settings(self.folder / "config.yaml") or {}
        except DamageError as error:
            self.problems["config.yaml"] = str(error)
            return {}

    @cached_property
    def metrics(self) -> tuple[Mapping[str, Any], ...]:
        """The lines of metrics.jsonl."""
        try:
            text = _text(self.folder / "metrics.jsonl")
            lines = [] if text is None else [_parsed(line) for line in text.splitlines()]
            _check(lines, shapes.list_of(shapes.EVALUATION))
        except DamageError as error:
            self.problems["metrics.jsonl"] = str(error)
            return ()
        return tuple(lines)

    @property
    def so_far(self) -> Mapping[str, Any]:
        """Content of summary.json; of a run that has left none yet, what its ledger says in the same words."""
        ledger = {} if self.summary or self.damaged else self.ledger
        if not ledger:
            return self.summary
        stages = (self.settings.get(name, {}) for name in ("clip", "optim"))
        proven = not any(stage.get("uncertified") for stage in stages)
        return {
            **{name: ledger.get(name) for name in ("eps", "target_eps", "published_eps", "delta")},
            "private": proven and math.isfinite(float(self.settings.get("eps", 0))),
            "steps": releases_in(ledger["releases"]),
        }

    def _object(self, name: str, shape: Shape) -> Mapping[str, Any]:
        try:
            return _json(self.folder / name, shape) or {}
        except DamageError as error:
            self.problems[name] = str(error)
            return {}

    def complete(self) -> Recorded:
        """This record with all of its files read."""
        _ = self.settings, self.ledger, self.provenance, self.metrics
        return self

    def warn(self) -> Recorded:
        """This record, after its damage has been told."""
        tell(self.folder, self.problems, damaged=self.damaged)
        return self


def releases_in(entries: Iterable[Mapping[str, Any]]) -> int:
    """How many releases the entries of ledger.json stand for."""
    return sum(entry["count"] * len(entry["noise_multipliers"]) for entry in entries)


def problems_in_words(problems: Mapping[str, str]) -> str:
    """Problems of files in a line."""
    return "; ".join(f"{name}: {problem}" for name, problem in problems.items())


def tell(folder: Path, problems: Mapping[str, str], *, damaged: bool) -> None:
    """Name the damage of a record in one line, once in a process."""
    if not problems or folder in _named:
        return
    _named.add(folder)
    rest = "the record counts for nothing" if damaged else "the rest of the record counts"
    make_console(stderr=True).print(f"warning: {folder}: {problems_in_words(problems)}; {rest}", style="yellow")


def seeds_of(folder: Path) -> list[Path]:
    """The folders of runs below that of a hash, by seed; whatever else lies there is no record."""
    return sorted((one for one in folder.glob("[0-9]*") if is_seed(one.name)), key=lambda one: int(one.name))


def is_seed(name: str) -> bool:
    """Whether a folder of this name below a hash is a record: 0, but not 0.rerun, 0.lock, 00 or ٣."""
    return _SEED.fullmatch(name) is not None


def is_hash(name: str) -> bool:
    """Whether a folder of this name below runs/ has records."""
    return _HASH.fullmatch(name) is not None


def _text(path: Path) -> str | None:
    """The content of a file; None where there is none."""
    try:
        return path.read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        raise DamageError(f"can't be read ({error})") from error


def _status(folder: Path) -> dict[str, Any] | None:
    """The content of status.json; a run that was left running by a process which has gone was interrupted."""
    path, shape = folder / "status.json", shapes.status(WORDS)
    content = _json(path, shape)
    if content is None or content["status"] != Status.RUNNING or is_held(lock_of(folder)):
        return content
    content = _json(path, shape)  # once more: it may just have ended
    if content is None or content["status"] != Status.RUNNING:
        return content
    return {"status": str(Status.INTERRUPTED), "reason": KILLED}


def _parsed(text: str) -> Any:
    try:
        found = json.loads(text)
        if "\\u" in text:
            json.dumps(
                found, ensure_ascii=False
            ).encode()  # raises at half of a surrogate pair, which nothing can write
        return found
    except (ValueError, RecursionError) as error:
        raise DamageError(f"is no JSON ({error})") from error


def _check(content: Any, shape: Shape) -> None:
    complaint = shape(content)
    if complaint is not None:
        raise DamageError(complaint)


def _json(path: Path, shape: Shape) -> dict[str, Any] | None:
    text = _text(path)
    if text is None:
        return None
    content = _parsed(text)
    _check(content, shape)
    found: dict[str, Any] = content
    return found


def read_audits(results_dir: Path) -> Iterator[Mapping[str, Any]]:
    """Content of each audit.json below a results folder; what is damaged is named and left out."""
    for path in sorted((results_dir / "audits").glob("*/audit.json")):
        try:
            content = _json(path, shapes.AUDIT)
        except DamageError as error:
            tell(path.parent, {path.name: str(error)}, damaged=True)
        else:
            yield content or {}


def read_settings(path: Path) -> dict[str, Any] | None:
    """The settings in a config.yaml; None where there is no such file.

    Records share most of their sections (the lines of one top-level key), and a section is parsed once: that makes
    reading many records five times as fast.

    Raises:
        DamageError: they can't be read, or are of a wrong shape.
    """
    text = _text(path)
    if text is None:
        return None
    try:
        found: dict[str, Any] = {}
        for section in _sections(text):
            content = _section(section)
            if content is None:  # comments alone
                continue
            if not isinstance(content, dict):
                raise DamageError("expected an object")
            found.update(content)
        if not found:
            raise DamageError("holds no settings")
    except (ValueError, TypeError, RecursionError) as error:
        raise error if isinstance(error, DamageError) else DamageError(f"holds {error}") from error
    _check(found, shapes.SETTINGS)
    return found


def _sections(text: str) -> Iterator[str]:
    """The top-level keys of a YAML mapping with what stands below each; all of it, if that might be of another form.

    What `RunRecord` writes has block style, with what belongs to a key indented or a list; anchors may be used
    elsewhere than where they are set.
    """
    if "&" in text or "*" in text or "{" in text[:1]:
        yield text
        return
    lines: list[str] = []
    for line in text.splitlines(keepends=True):
        if lines and not line.startswith((" ", "- ", "#", "\n")):
            yield "".join(lines)
            lines = []
        lines.append(line)
    yield "".join(lines)


@lru_cache(maxsize=50_000)
def _section(text: str) -> Any:
    return parse_yaml(text)
