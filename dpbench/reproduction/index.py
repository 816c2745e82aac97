"""Which records can be those of a candidate, from the settings that were typed: a filter before hashes are compared."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from dpbench.config.identity import NULL_WHERE_ABSENT, is_identity
from dpbench.config.messages import GROUPS
from dpbench.reproduction.options import kinds_of, option_name
from dpbench.tracking.columns import ABSENT
from dpbench.tracking.index import Index
from dpbench.tracking.values import ANY, canonical

# Groups whose options have names that records hold.
NAMED = ("dataset", "model")
# Settings that a record may hold as something else than was typed.
DERIVED = ("delta", "evaluation")


class RecordIndex:
    """The settings of all records below <results_dir>/runs, by hash, as `dpbench.tracking.index` holds them.

    A record is ruled out only by a setting that was typed, or a stage that was chosen, and that it holds with another
    value, so none is ever missed; which of the others are a candidate's is for their hashes to say.
    """

    def __init__(self, results_dir: Path) -> None:
        self._index = Index(results_dir)
        self._look()

    def refresh(self) -> None:
        """Take notice of records that are new, changed or gone."""
        self._index.refresh()
        self._look()

    def _look(self) -> None:
        # Runs that share a hash share what can rule it out; the one that is asked has settings that can be read.
        self._places: dict[str, int] = {}
        self._unread: set[str] = set()
        self._possible: dict[str, frozenset[str]] = {}
        for place, (digest, eps) in enumerate(zip(self._index.column("hash"), self._index.column("eps"), strict=True)):
            if eps is ABSENT:
                self._unread.add(digest)
            else:
                self._places.setdefault(digest, place)
        self._unread -= self._places.keys()
        self._settings = {name: self._index.column(name) for name in self._index.settings}

    @property
    def digests(self) -> Iterable[str]:
        """Hashes of the records whose settings can be read."""
        return self._places.keys()

    def settings_of(self, digest: str) -> dict[str, Any]:
        """The settings of a record by their dotted names; none where they can't be read."""
        if (place := self._places.get(digest)) is None:
            return {}
        return {name: held[place] for name, held in self._settings.items() if held[place] is not ABSENT}

    def possible(self, overrides: Iterable[str]) -> frozenset[str]:
        """Hashes of the records that these overrides do not rule out."""
        lines = list(overrides)
        options = tuple((key, value) for key, _, value in (line.partition("=") for line in lines) if key in GROUPS)
        left = []
        for typed in (*lines, *kinds_of(options)):
            if typed not in self._possible:
                self._possible[typed] = self._matching(typed)
            left.append(self._possible[typed])
        # Small sets first: an intersection takes as long as the smaller of its two sets is large.
        return frozenset.intersection(*sorted(left, key=len)) if left else self._all

    @property
    def _all(self) -> frozenset[str]:
        return frozenset(self._places) | self._unread

    def _matching(self, line: str) -> frozenset[str]:
        key, _, typed = line.partition("=")
        if key in NAMED:
            name = option_name(key, typed)
            wanted = ANY if name is None else canonical(name)
            key = f"{key}.name"
        elif key in GROUPS or not is_identity(key) or key.partition(".")[0] in DERIVED:
            wanted = ANY
        else:
            wanted = canonical(typed)
        if wanted is ANY:
            return self._all
        held = self._index.column(key)
        absent = None if key in NULL_WHERE_ABSENT else ANY
        known = {d: absent if held[place] is ABSENT else canonical(held[place]) for d, place in self._places.items()}
        return frozenset(self._unread).union(d for d, value in known.items() if value is ANY or value == wanted)
