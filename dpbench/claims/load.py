"""Reading conf/paper: every file is checked, and expanded into cells."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from dpbench.claims.draw import NOT_AXES, Draw, default_draw, parse_draw
from dpbench.claims.notation import BETWEEN, Labels, Overrides, Printed, parse_grid, parse_overrides, parse_printed
from dpbench.claims.pairs import check_claims
from dpbench.claims.schema import (
    SECTIONS,
    STATISTICS,
    Artefact,
    Cell,
    Claim,
    Kind,
    Needs,
    Order,
    Tolerance,
    Trend,
    Words,
)
from dpbench.claims.strict_yaml import read_yaml
from dpbench.errors import UserError, require

NOT_PRINTED = "not printed"
KEYS = {
    "title", "kind", "reason", "source", "metric", "unit", "statistic", "seeds", "tolerance", "needs", "common", "rows",
    "columns", "values", "derived", "taken_over", "sparse", "where", "each", "claims", "deviations", "readings", "draw",
}  # fmt: skip
# What a line of `where` may say about the cells that it names.
RULES = {
    "set", "absent", "quoted", "derived", "taken_over", "minus", "metric", "unit", "statistic", "points", "weights",
    "hours", "source",
}  # fmt: skip
CLAIMS: dict[str, set[str]] = {
    "order": {"higher", "lower", "at", "pairs", "margin", "within", "at_least", "printed", "own"},
    "trend": {"along", "ends", "rising", "of", "at", "printed"},
    "words": {"why"},
}
# What a claim of each kind must say; the first of these tells the kind.
REQUIRED = {"order": ("higher", "lower"), "trend": ("along", "ends", "rising"), "words": ("why",)}
# What else than labels a claim may say, by key: its types, and what they are in words.
_FLAG, _NUMBER = ((bool,), "true or false"), ((int, float), "a number")
VALUES: dict[str, tuple[tuple[type, ...], str]] = {
    "pairs": ((int,), "a whole number > 0"),
    "margin": _NUMBER,
    "within": _NUMBER,
    "at_least": _FLAG,
    "printed": _FLAG,
    "own": _FLAG,
    "rising": _FLAG,
    "why": ((str,), "a text"),
}


def load_all(folder: Path, papers: Sequence[str] = ()) -> tuple[Artefact, ...]:
    """Every artefact of papers, and of our own comparisons, in the order of `SECTIONS` and of their names.

    Args:
        folder: conf/paper.
        papers: all that it has, unless some are named.

    Raises:
        UserError: the first thing that is wrong, naming file, field and value.
    """
    named = papers or [paper for paper in SECTIONS if (folder / paper).is_dir()]
    require(bool(named), "claims", folder, f"a folder with folders of papers: {', '.join(SECTIONS)}")
    for other in sorted(path for path in folder.glob("*") if path.is_dir() and path.name not in SECTIONS):
        if any(other.glob("*.yaml")):
            raise UserError(
                f"expected one of {', '.join(SECTIONS)}; beyond is for what no paper has", field="claims", value=other
            )
    found = []
    for paper in named:
        files = sorted((folder / paper).glob("*.yaml"), key=lambda path: _natural(path.stem))
        require(bool(files), "claims", folder / paper, "a folder with files of tables and figures")
        found += [load_artefact(path) for path in files]
    return tuple(found)


def load_artefact(path: Path) -> Artefact:
    """One artefact from its file, <paper>/<name>.yaml.

    Raises:
        UserError: something is wrong, naming file, field and value.
    """
    where = f"{path.parent.name}/{path.name}"
    try:
        return _Reader(path, read_yaml(path)).artefact()
    except UserError as error:
        raise UserError(error.message, field=f"{where}: {error.field}", value=error.value) from error


def _natural(name: str) -> list[tuple[int, str]]:
    """Sorts table_10 behind table_9, and figure_6b behind figure_6a."""
    return [(int(part), "") if part.isdigit() else (0, part) for part in re.split(r"(\d+)", name)]


class _Reader:
    """Turns the content of one file into an artefact."""

    def __init__(self, path: Path, content: Any) -> None:
        require(isinstance(content, dict), "file", type(content).__name__, "a mapping")
        _known(content, KEYS, "")
        self.path = path
        self.content: dict[str, Any] = content
        self.rows = self._axes("rows")
        self.columns = self._axes("columns")
        twice = set(self.rows) & set(self.columns)
        require(not twice, "columns", ", ".join(twice), "names of axes that are no row axes")
        self.axes = {**self.rows, **self.columns}
        self.rules = self._rules()
        self.each = {
            key: self._grid(text, f"each.{key}") for key, text in self._mapping(content.get("each"), "each").items()
        }

    def artefact(self) -> Artefact:
        content = self.content
        kind = self._text("kind")
        require(kind in list(Kind), "kind", kind, " or ".join(Kind))
        reason = content.get("reason")
        trained = kind == Kind.TRAINED
        require(trained or isinstance(reason, str), "reason", reason, "why it is not trained")
        cells = tuple(self._cells(trained)) if self.axes or "values" in content else ()
        require(bool(cells) or not trained, "rows", None, "cells of what is trained")
        claims = [self._claim(index, claim) for index, claim in enumerate(content.get("claims") or [])]
        readings = {str(key): str(text) for key, text in self._mapping(content.get("readings"), "readings").items()}
        deviations = content.get("deviations") or []
        require(isinstance(deviations, list), "deviations", deviations, "a list of sentences")
        artefact = Artefact(
            paper=self.path.parent.name,
            name=self.path.stem,
            title=self._text("title"),
            kind=Kind(kind),
            reason=reason,
            source=self._text("source"),
            rows={axis: tuple(labels) for axis, labels in self.rows.items()},
            columns={axis: tuple(labels) for axis, labels in self.columns.items()},
            cells=cells,
            printed=any(cell.printed is not None for cell in cells),
            claims=tuple(claims),
            deviations=tuple(str(line) for line in deviations),
            readings=readings,
            draw=self._draw(trained),
        )
        check_claims(artefact)
        return artefact

    def _draw(self, trained: bool) -> Draw | None:
        require(trained or "draw" not in self.content, "draw", self.content.get("draw"), "no such key unless trained")
        if not trained:
            return None
        axes = {axis: tuple(labels) for axis, labels in self.axes.items()}
        return parse_draw(self.content["draw"], axes) if "draw" in self.content else default_draw(axes)

    def _text(self, key: str) -> str:
        value = self.content.get(key)
        require(isinstance(value, str) and bool(value), key, value, "a text")
        return str(value)

    @staticmethod
    def _mapping(value: Any, field: str) -> dict[str, Any]:
        require(value is None or isinstance(value, dict), field, value, "a mapping")
        return {str(key): item for key, item in (value or {}).items()}

    def _axes(self, key: str) -> dict[str, dict[str, Overrides]]:
        axes = {}
        for axis, labels in self._mapping(self.content.get(key), key).items():
            field = f"{key}.{axis}"
            require(axis not in NOT_AXES, key, axis, f"another name than {', '.join(NOT_AXES)}, which draw has for x")
            if isinstance(labels, list):
                require(len({str(label) for label in labels}) == len(labels), field, labels, "every label once")
                labels = dict.fromkeys(labels, "")
            texts = self._mapping(labels, field)
            require(bool(texts), field, labels, "labels, with their overrides")
            axes[axis] = {name: parse_overrides(text or "", f"{field}.{name}") for name, text in texts.items()}
        return axes

    def _selection(self, value: Any, field: str) -> dict[str, tuple[str, ...]]:
        """Labels by axis; a single label may stand without brackets."""
        selected = {}
        for axis, labels in self._mapping(value, field).items():
            require(axis in self.axes, field, axis, f"one of the axes {', '.join(self.axes)}")
            chosen = tuple(str(one) for one in (labels if isinstance(labels, list) else [labels]))
            for label in chosen:
                require(label in self.axes[axis], f"{field}.{axis}", label, f"one of {', '.join(self.axes[axis])}")
            selected[axis] = chosen
        return selected

    def _rules(self) -> list[tuple[dict[str, tuple[str, ...]], dict[str, Any]]]:
        rules = []
        for index, line in enumerate(self.content.get("where") or []):
            field = f"where[{index}]"
            entries = self._mapping(line, field)
            says = {key: value for key, value in entries.items() if key in RULES}
            require(bool(says), field, ", ".join(entries), f"one of {', '.join(sorted(RULES))}")
            if "set" in says:
                says["set"] = parse_overrides(says["set"], f"{field}.set")
            selection = self._selection({key: value for key, value in entries.items() if key not in RULES}, field)
            rules.append((selection, says))
        return rules

    def _grid(self, text: Any, field: str) -> Mapping[tuple[Labels, Labels], str]:
        require(isinstance(text, str), field, text, "a table")
        grid = parse_grid(str(text), tuple(self.rows), tuple(self.columns), field)
        for row, column in grid:
            for (axis, labels), label in zip(self.axes.items(), (*row, *column), strict=True):
                require(label in labels, f"{field}, {axis}", label, f"one of {', '.join(labels)}")
        return grid

    def _cells(self, trained: bool) -> Iterator[Cell]:
        values = self.content.get("values")
        grid = {} if values == NOT_PRINTED else self._grid(values, "values")
        left = set(grid)
        for row in itertools.product(*self.rows.values()):
            for column in itertools.product(*self.columns.values()):
                at = dict(zip(self.axes, (*row, *column), strict=True))
                rules = self._rules_at(at)
                if rules.get("absent"):
                    continue
                text = grid.get((row, column))
                if text is None and self.content.get("sparse"):
                    continue
                if text is None and values != NOT_PRINTED:
                    raise UserError("the table has no entry there", field="values", value=BETWEEN.join(at.values()))
                left.discard((row, column))
                printed = parse_printed(text, f"values at {BETWEEN.join(at.values())}") if text is not None else None
                yield self._cell(row, column, at, rules, printed, trained)
        require(not left, "values", left, "no entry for what is said to be absent")

    def _rules_at(self, at: Mapping[str, str]) -> dict[str, Any]:
        """What the lines of `where` say of a cell, later ones over earlier ones; overrides add up."""
        said: dict[str, Any] = {}
        settings: Overrides = {}
        for selection, says in self.rules:
            if all(at[axis] in labels for axis, labels in selection.items()):
                settings |= says.get("set", {})
                said |= says
        return {**said, "set": settings}

    def _cell(
        self,
        row: Labels,
        column: Labels,
        at: dict[str, str],
        rules: dict[str, Any],
        printed: Printed | None,
        trained: bool,
    ) -> Cell:
        content = self.content
        overrides = parse_overrides(content.get("common") or "", "common")
        for axis, labels in self.axes.items():
            overrides |= labels[at[axis]]
        overrides |= rules["set"]
        overrides |= {key: grid[row, column] for key, grid in self.each.items() if (row, column) in grid}
        for key in ("seed", "seeds"):
            allowed = "settings without it; the key seeds of the file says how many runs a cell has"
            require(key not in overrides, key, overrides.get(key), allowed)
        needs = {**self._mapping(content.get("needs"), "needs")}
        needs |= {key: rules[key] for key in ("weights", "hours", "source") if key in rules}
        _known(needs, {"weights", "hours", "source"}, "needs.")
        hours = needs.get("hours")
        rule = self._mapping(content.get("tolerance"), "tolerance")
        _known(rule, {"points"}, "tolerance.")
        rule |= {"points": rules["points"]} if "points" in rules else {}
        points = rule.get("points", 1)
        require(type(points) in _NUMBER[0], "tolerance.points", points, "a number >= 0")
        statistic = rules.get("statistic", content.get("statistic", "last"))
        require(statistic in STATISTICS, "statistic", statistic, " or ".join(STATISTICS))
        seeds = content.get("seeds", 1 if not trained else None)
        require(isinstance(seeds, int) and seeds > 0, "seeds", seeds, "a whole number > 0")
        runs = "minus" not in rules and "quoted" not in rules
        require(bool(overrides) or not (trained and runs), "common", None, "overrides of every cell that is trained")
        return Cell(
            at=at,
            row=row,
            column=column,
            overrides=overrides,
            printed=printed,
            metric=str(rules.get("metric", content.get("metric", "test_accuracy" if trained else "computed"))),
            unit=str(rules.get("unit", content.get("unit", "%" if trained else ""))),
            statistic=statistic,
            seeds=int(seeds or 1),
            tolerance=Tolerance(**rule),
            needs=Needs(needs.get("weights"), None if hours is None else (hours[0], hours[1]), needs.get("source")),
            minus=self._difference(rules["minus"], "where") if "minus" in rules else None,
            quoted=rules.get("quoted"),
            derived=rules.get("derived", content.get("derived")),
            taken_over=bool(rules.get("taken_over", content.get("taken_over", False))),
        )

    def _difference(self, value: Any, field: str) -> tuple[str, str, str]:
        """``{method: [A, B]}`` as (method, A, B)."""
        selected = self._selection(value, field)
        valid = len(selected) == 1 and all(len(labels) == 2 for labels in selected.values())
        require(valid, field, value, "one axis with two labels, the second taken off the first")
        ((axis, (first, second)),) = selected.items()
        return axis, first, second

    def _claim(self, index: int, value: Any) -> Claim:
        field = f"claims[{index}]"
        entries = self._mapping(value, field)
        says = entries.pop("says", None)
        require(isinstance(says, str), f"{field}.says", says, "the claim in words")
        kind = next((kind for kind, keys in REQUIRED.items() if keys[0] in entries), None)
        forms = "; or ".join(f"{', '.join(keys)} ({kind})" for kind, keys in REQUIRED.items())
        require(kind is not None, field, ", ".join(entries), forms)
        assert kind is not None
        _known(entries, CLAIMS[kind], f"{field}.")
        for key in REQUIRED[kind]:
            require(key in entries, f"{field}.{key}", None, VALUES.get(key, ((), "labels of an axis"))[1])
        for key, (types, allowed) in VALUES.items():
            require(key not in entries or type(entries[key]) in types, f"{field}.{key}", entries.get(key), allowed)
        try:
            return self._typed(kind, says, entries, field)
        except UserError as error:
            raise UserError(error.message, field=_below(error.field, field), value=error.value) from error
        except (KeyError, TypeError) as error:
            raise UserError(f"expected {kind} to have {error}", field=field, value=says) from error

    def _typed(self, kind: str, says: str, entries: dict[str, Any], field: str) -> Claim:
        if kind == "words":
            return Words(says, entries["why"])
        entries["at"] = self._selection(entries.get("at"), f"{field}.at")
        if kind == "order":
            for side in ("higher", "lower"):
                entries[side] = self._selection(entries[side], f"{field}.{side}")
            return Order(says, **entries)
        along, ends = str(entries.pop("along")), [str(end) for end in entries.pop("ends")]
        self._selection({along: ends}, f"{field}.along")
        of = self._difference(entries.pop("of"), f"{field}.of") if "of" in entries else None
        return Trend(says, along, (ends[0], ends[1]), of=of, **entries)


def _below(field: str | None, parent: str) -> str:
    return str(field) if field is not None and field.startswith(parent) else f"{parent}.{field}"


def _known(content: Mapping[str, Any], known: set[str], prefix: str) -> None:
    for key in content:
        require(key in known, f"{prefix}{key}", content[key], f"one of the keys {', '.join(sorted(known))}")
