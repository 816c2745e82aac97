"""Which records are meant: by the settings of their runs, or by the beginning of their hashes."""

from __future__ import annotations

import difflib
import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from dpbench.errors import UserError, require, show
from dpbench.tracking.columns import ABSENT
from dpbench.tracking.index import OWN, Index
from dpbench.tracking.reading import DAMAGED, WORDS
from dpbench.tracking.shapes import is_number
from dpbench.tracking.status import Status
from dpbench.tracking.values import ANY, canonical
from dpbench.wording import is_decimal, seconds_of

# Short names of columns.
SHORT = {
    "accuracy": "summary.test_accuracy.final",
    "best": "summary.test_accuracy.best",
    "steps": "summary.steps",
    "spent": "summary.eps",
    "search_eps": "summary.search_eps",
    "noise_multiplier": "summary.noise_multiplier",
    "seconds": "provenance.wall_seconds",
    "commit": "provenance.commit",
    "age": "provenance.started",
    "algo": "algo.name",
    "algorithm": "algo.name",
    "dataset": "dataset.name",
    "model": "model.name",
}
# Of settings that may be rules, in words, the column of the number that they give.
NUMBERS = {"delta": "summary.delta"}
# What every run has, though it may not be recorded yet of those that are just being begun.
ALWAYS = (*SHORT, *OWN, "eps")
# Numbers of a run that has not finished are none of its configuration.
ONLY_FINISHED = ("accuracy", "best", "summary.test_accuracy.final", "summary.test_accuracy.best")
COMPARISONS: dict[str, Callable[[float, float], bool]] = {
    "<=": operator.le,
    ">=": operator.ge,
    "<": operator.lt,
    ">": operator.gt,
}
CONDITION = re.compile(r"(?P<key>[A-Za-z_][\w.-]*)(?P<sign><=|>=|!=|<|>|=)(?P<value>.*)", re.DOTALL)
HASH = re.compile(r"(?P<hash>[0-9a-f]{4,})(/(?P<seed>\d+))?")


@dataclass(frozen=True)
class Condition:
    """One that a setting must meet.

    Attributes:
        key: name of the setting.
        sign: = or !=, which take several values, or a comparison of numbers.
        values: as typed.
    """

    key: str
    sign: str
    values: tuple[str, ...]

    @property
    def text(self) -> str:
        """As it was typed."""
        return f"{self.key}{self.sign}{','.join(self.values)}"

    def met(self, index: Index) -> list[bool]:
        """Whether each record meets it.

        Raises:
            UserError: no record has such a setting.
        """
        held, number = values_of(index, self.key), NUMBERS.get(self.key)
        if number is not None and (self.sign in COMPARISONS or all(map(is_decimal, self.values))):
            held = [
                typed if found is ABSENT else found for typed, found in zip(held, index.column(number), strict=True)
            ]
        test = self._test()
        known: dict[Any, bool] = {}
        found = []
        for value in held:
            key = value if value is ABSENT or not isinstance(value, list) else str(value)
            verdict = known.get(key)
            if verdict is None:
                verdict = known[key] = test(value)
            found.append(verdict)
        return found

    def _test(self) -> Callable[[Any], bool]:
        if self.key == "age":
            return self._of_age()
        if self.sign in COMPARISONS:
            (typed,) = self.values
            if not is_decimal(typed):
                raise UserError(f"{self.key}{self.sign}{typed}: expected a number, to compare with")
            compare, limit = COMPARISONS[self.sign], float(typed)
            if self.key in ONLY_FINISHED and limit > 1:
                raise UserError(f"{self.key}{self.sign}{typed}: expected a share from 0 to 1, such as 0.9")
            return lambda value: is_number(value) and compare(float(value), limit)
        if self.key == "status":
            for word in self.values:
                require(word in (*WORDS, DAMAGED), "status", word, f"one of {', '.join((*WORDS, DAMAGED))}")
        same = _begins if self.key == "commit" else same_value
        wanted = self.sign == "="
        return lambda value: any(same(value, typed) for typed in self.values) == wanted

    def _of_age(self) -> Callable[[Any], bool]:
        if self.sign not in COMPARISONS:
            raise UserError(f"age{self.sign}{','.join(self.values)}: expected a comparison, such as age<2d")
        (typed,) = self.values
        try:
            limit = seconds_of("age", typed)
        except UserError as error:
            raise UserError(f"age{self.sign}{typed}: {error.message}") from error
        compare, now = COMPARISONS[self.sign], datetime.now(UTC)

        def test(value: Any) -> bool:
            seconds = age(value, now)
            return seconds is not None and compare(seconds, limit)

        return test


@dataclass(frozen=True)
class Selection:
    """Some records.

    Attributes:
        hashes: beginnings of hashes, and a seed or None; any of them. None for all records.
        conditions: all of them.
        text: as it was typed.
    """

    hashes: tuple[tuple[str, str | None], ...] = ()
    conditions: tuple[Condition, ...] = ()
    text: str = ""

    @classmethod
    def parse(cls, words: Sequence[str]) -> Selection:
        """What was typed; reads nothing.

        Raises:
            UserError: a word is neither a hash nor a condition.
        """
        hashes, conditions = [], []
        for word in words:
            condition, digest = CONDITION.fullmatch(word), HASH.fullmatch(word)
            if digest is not None:
                hashes.append((digest["hash"], digest["seed"]))
            elif condition is not None and condition["value"].startswith("="):
                raise UserError(f"{word}: expected one sign, {', '.join(('=', '!=', *COMPARISONS))}")
            elif condition is not None and condition["value"]:
                several = condition["sign"] in ("=", "!=")
                values = _alternatives(condition["value"]) if several else (condition["value"],)
                conditions.append(Condition(condition["key"], condition["sign"], values))
            else:
                hint = "; quote comparisons, as in 'accuracy>0.9'" if word in SHORT else "; see --help"
                raise UserError(f"{word}: expected setting=value, or at least four digits of a hash{hint}")
        return cls(tuple(hashes), tuple(conditions), " ".join(words))

    def places(self, index: Index) -> list[int]:
        """The places of these records in the columns of the index.

        Raises:
            UserError: no record has such a setting or hash.
        """
        found = range(index.size) if not self.hashes else self._of_hashes(index)
        for condition in self.conditions:
            met = condition.met(index)
            found = [place for place in found if met[place]]
        return list(found)

    def _of_hashes(self, index: Index) -> Sequence[int]:
        digests, seeds = index.column("hash"), index.column("seed")
        places: set[int] = set()
        for start, seed in self.hashes:
            begin = [i for i, one in enumerate(digests) if one.startswith(start)]
            if not begin:
                raise UserError(no_such_hash(start))
            own = {i for i in begin if seed in (None, str(seeds[i]))}
            if not own:
                known = ", ".join(sorted({str(seeds[i]) for i in begin}, key=int))
                raise UserError(f"{start}/{seed}: no record of that seed; there is {known}")
            places |= own
        return sorted(places)

    def names_status(self, status: str) -> bool:
        """Whether a status was typed, rather than left open."""
        return any(one.key == "status" and one.sign == "=" and status in one.values for one in self.conditions)


def no_such_hash(start: str) -> str:
    """What is said of the beginning of a hash that no record has."""
    return f"{start}: no record has a hash that begins so"


def values_of(index: Index, key: str) -> list[Any]:
    """What the records hold of a setting, under its name as it is typed.

    Raises:
        UserError: no record has a setting of that name.
    """
    name = column_of(index, key)
    values = index.column(name)
    if key not in ONLY_FINISHED:
        return values
    return [v if s == Status.FINISHED else ABSENT for v, s in zip(values, index.column("status"), strict=True)]


def column_of(index: Index, key: str) -> str:
    """The column of a setting.

    Raises:
        UserError: no record has a setting of that name.
    """
    for name in (SHORT.get(key, key), f"choices.{key}"):
        if name in index.names or key in ALWAYS:
            return name
    if not index.size:
        return key
    near = difflib.get_close_matches(key, {*SHORT, *index.names}, n=3)
    hint = f"; did you mean {', '.join(near)}?" if near else "; --help tells how settings are named"
    raise UserError(f"{key}: no record has such a setting{hint}")


def same_value(held: Any, typed: str) -> bool:
    """Whether a record holds what was typed, however numbers are written."""
    if held is ABSENT:
        return False
    if isinstance(held, list):
        parts = _alternatives(typed[1:-1]) if typed != "[]" else ()
        within = typed[:1] + typed[-1:] == "[]" and len(parts) == len(held)
        return within and all(map(same_value, held, parts))
    wanted, found = canonical(typed), canonical(held)
    if wanted is ANY or found is ANY:
        return show(held) == typed
    return bool(wanted == found)


def age(started: Any, now: datetime) -> float | None:
    """Seconds since a run began, as its record dates that; None where it doesn't."""
    try:
        return (now - datetime.fromisoformat(started)).total_seconds()
    except (TypeError, ValueError):
        return None


def _begins(held: Any, typed: str) -> bool:
    return isinstance(held, str) and held.startswith(typed)


def _alternatives(value: str) -> tuple[str, ...]:
    """Values separated by commas outside of brackets."""
    return tuple(part.strip() for part in re.split(r",(?![^\[]*\])", value))
