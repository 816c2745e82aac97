"""Which records can be those of a candidate, from the settings that were typed: a filter before hashes are compared."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import cache as remembered
from pathlib import Path
from typing import Any

import yaml

from dpbench import cache
from dpbench.config import conf_folder
from dpbench.config.identity import NOT_IDENTITY
from dpbench.config.messages import GROUPS

# Groups whose options have names that records hold.
NAMED = ("dataset", "model")
# Settings that a record may hold as something else than was typed.
DERIVED = ("delta", "evaluation")
NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)(e[-+]?\d+)?|[-+]?inf", re.IGNORECASE)
WORD = re.compile(r"[A-Za-z][\w./-]*")
# Words that a yes-or-no setting takes for true and false.
SWITCHES = {"true": 1.0, "false": 0.0}
AMBIGUOUS = {"yes", "no", "on", "off", "y", "n", "none"}
# A value about which nothing can be said: it may be any.
ANY = object()


class RecordIndex:
    """The settings of all records below <results_dir>/runs, by hash.

    A record is ruled out only by a setting that was typed and that it holds with another value, so none is ever
    missed; which of the others are a candidate's is for their hashes to say.
    """

    def __init__(self, results_dir: Path) -> None:
        self._folder = results_dir / "runs"
        self._settings: dict[str, Mapping[str, Any]] = {}
        self._unread: set[str] = set()
        self._possible: dict[str, frozenset[str]] = {}
        self.refresh()

    def refresh(self) -> None:
        """Read the settings of records that are new."""
        known = cache.read("records", str(self._folder.absolute())) or {}
        found = {folder.name for folder in self._folder.glob("*") if folder.is_dir()}
        self._settings = {digest: settings for digest, settings in self._settings.items() if digest in found}
        fresh = {}
        for digest in found - set(self._settings):
            settings = known.get(digest) or _read(self._folder / digest)
            if settings is not None:
                fresh[digest] = settings
        self._settings |= fresh
        self._unread = found - set(self._settings)
        self._possible.clear()
        if any(digest not in known for digest in fresh):
            cache.write("records", str(self._folder.absolute()), self._settings)

    @property
    def settings(self) -> Mapping[str, Mapping[str, Any]]:
        """By hash, the settings of a record by their dotted names."""
        return self._settings

    def possible(self, overrides: Iterable[str]) -> frozenset[str]:
        """Hashes of the records that these overrides do not rule out."""
        found: frozenset[str] | None = None
        for override in overrides:
            if override not in self._possible:
                self._possible[override] = self._matching(override)
            found = self._possible[override] if found is None else found & self._possible[override]
            if not found:
                return found
        return frozenset(self._settings) | self._unread if found is None else found

    def _matching(self, override: str) -> frozenset[str]:
        key, _, typed = override.partition("=")
        everything = frozenset(self._settings) | self._unread
        if key in NAMED:
            name = option_name(key, typed)
            wanted = ANY if name is None else canonical(name)
            key = f"{key}.name"
        elif key in GROUPS or key in NOT_IDENTITY or key.partition(".")[0] in (*NOT_IDENTITY, *DERIVED):
            wanted = ANY
        else:
            wanted = canonical(typed)
        if wanted is ANY:
            return everything
        return frozenset(
            digest for digest in everything if _may_be(self._settings.get(digest, {}).get(key, ANY), wanted)
        )


def canonical(value: Any) -> Any:
    """A setting as it can be compared however it was typed: numbers and yes-or-no as floats; `ANY` where unsure."""
    if isinstance(value, bool | int | float):
        return float(value)
    if value is None:
        return None
    if not isinstance(value, str) or value.lower() in AMBIGUOUS:
        return ANY
    if value.lower() == "null":
        return None
    if value.lower() in SWITCHES:
        return SWITCHES[value.lower()]
    if NUMBER.fullmatch(value):
        return float(value)
    return value if WORD.fullmatch(value) else ANY


@remembered
def option_name(group: str, option: str) -> str | None:
    """The name that an option gives itself in records; None where its file can't tell."""
    file = conf_folder() / group / f"{option}.yaml"
    found = re.search(r"^ *name: ([\w.-]+) *(#.*)?$", file.read_text(), re.MULTILINE) if file.is_file() else None
    return found[1] if found is not None else None


def _may_be(recorded: Any, wanted: Any) -> bool:
    held = ANY if recorded is ANY else canonical(recorded)
    return held is ANY or held == wanted


def _read(folder: Path) -> Mapping[str, Any] | None:
    """The settings that the runs below a hash share; None where none can be read."""
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    for file in sorted(folder.glob("*/config.yaml")):
        try:
            content = yaml.load(file.read_text(), Loader=loader)
        except (OSError, yaml.YAMLError):
            continue
        if isinstance(content, dict):
            return dict(_flat(content, ""))
    return None


def _flat(content: Mapping[str, Any], prefix: str) -> Iterable[tuple[str, Any]]:
    for key, value in content.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
