"""What is written: everything as JSON, and the tables of it as Markdown."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.engines import DPBENCH, ENGINES, NON_PRIVATE, NON_PRIVATE_REPLAYED
from benchmarks.mixtures import ONE_POINT
from benchmarks.models import SPECS
from benchmarks.steps import DPSGD_STEP, NON_PRIVATE_STEP, STEPS
from benchmarks.timing import FEWEST_ROUNDS, LARGEST_ERROR, SLOW
from dpbench.markdown import table

Results = dict[str, Any]
# A cell's text for a model's results and the name of a column.
Cell = Callable[[Results, str], str]

ABSENT = "–"
FAILED = "fails"

REPLAYED = (
    " On a GPU dpbench replays the kernels of a pass as a CUDA graph, which the others launch one by one; what that "
    "alone is worth shows in the column of the non-private pass that is replayed too."
)

# What one gradient of a DP-SGD step may be computed with.
ONE_POINT_ENGINES = [name for name, engine in ENGINES.items() if engine.mixture == ONE_POINT]
TWO_POINT_ENGINES = [name for name, engine in ENGINES.items() if engine.mixture not in (None, ONE_POINT)]


def write(results: Results, folder: Path, name: str) -> tuple[Path, Path]:
    """Write `<name>.json` and `<name>.md`; returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    data, tables = folder / f"{name}.json", folder / f"{name}.md"
    data.write_text(json.dumps(results, indent=1) + "\n")
    tables.write_text(markdown(results))
    return data, tables


def markdown(results: Results) -> str:
    """All tables."""
    models: dict[str, Results] = results["models"]
    chosen = [name for name in ENGINES if name in results["engines"]]
    one_point = [name for name in chosen if name in ONE_POINT_ENGINES]
    two_points = [name for name in chosen if name in TWO_POINT_ENGINES]
    titles = {name: engine.title for name, engine in ENGINES.items()} | {name: step[0] for name, step in STEPS.items()}

    on_gpu = results["settings"]["device"] == "cuda"
    parts = ["# One private gradient: time and memory", _conditions(results)]
    parts += [
        "## Time of one clipped sum",
        "Divided by a forward and backward pass without privacy on the same batch. The fastest private one is bold."
        + (REPLAYED if on_gpu else ""),
        _table(
            models,
            {
                "batch": _batch,
                "non-private": _milliseconds("engines", NON_PRIVATE),
                **{titles[name]: _always(_ratio("engines"), name) for name in chosen if name == NON_PRIVATE_REPLAYED},
            },
            {name: titles[name] for name in one_point},
            _fastest(_ratio("engines"), one_point),
        ),
        "### Samples per second",
        _table(
            models,
            {},
            {name: titles[name] for name in chosen if name not in two_points},
            _samples_per_second,
        ),
    ]
    if two_points and DPBENCH in chosen:
        parts += [
            "## Two gradients per sample",
            "dpbench clips the mixture of each sample's gradients at two iterates, exactly. Divided by one point.",
            _table(models, {}, {name: titles[name] for name in two_points}, _ratio("engines", "ratio_to_dpsgd")),
        ]
    if any(model.get("steps") for model in models.values()):
        two_point_steps = [name for name in STEPS if name not in (NON_PRIVATE_STEP, DPSGD_STEP)]
        parts += [
            "## Whole steps of dpbench",
            "Gradient, noise, filter and optimizer (SGD). DP-SGD is divided by a step without privacy, the others by "
            "DP-SGD.",
            _table(
                models,
                {
                    "non-private": _milliseconds("steps", NON_PRIVATE_STEP),
                    "DP-SGD": lambda model, _: _ratio("steps")(model, DPSGD_STEP),
                },
                {name: titles[name] for name in two_point_steps},
                _ratio("steps", "ratio_to_dpsgd"),
            ),
        ]
    if any(model.get("memory") for model in models.values()):
        parts += [
            "## Peak memory of one gradient",
            (
                "What torch has reserved of the GPU above model and data after some gradients of a batch, with what "
                "recorded passes keep for themselves; "
                if on_gpu
                else "What torch holds above model and data in the second gradient of a batch, "
            )
            + "one process per cell. Divided by the non-private gradient's.",
            _table(
                models,
                {"non-private": _megabytes(NON_PRIVATE)},
                {name: titles[name] for name in one_point + two_points},
                _ratio("memory"),
            ),
        ]
    parts += [
        "## Deviation",
        "Relative error of the clipped sum: against one backward pass per sample, then against dpbench. Where there "
        "are ReLUs, the few inputs that round to the other side of 0 in a batch of one dominate the former.",
        _table(models, {}, {name: titles[name] for name in chosen}, _error),
        *_failures(models, titles),
    ]
    return "\n\n".join(parts) + "\n"


def _conditions(results: Results) -> str:
    machine, settings = results["machine"], results["settings"]
    versions = ", ".join(f"{name} {machine['versions'][name]}" for name in ("torch", "opacus", "transformers"))
    commit = (machine["commit"] or "unknown")[:10] + (" with changes" if machine["dirty"] else "")
    threads = "1 thread" if machine["threads"] == 1 else f"{machine['threads']} threads"
    small = " Small models: the figures say nothing about speed." if settings["small"] else ""
    return (
        f"{machine['device']}, {threads}, {settings['allocator']} allocator, float32; {versions}; "
        f"dpbench at {commit}; {machine['date']}; load of other work {machine['load']}.{small}\n\n"
        f"All engines of a model alternate in one process, in an order that rotates; a ratio is the median over "
        f"at most {settings['rounds']} rounds of two times of the same round, and over {FEWEST_ROUNDS} for what takes "
        f"more than {SLOW[settings['device']]:g} times its base for each point. An engine fails that raises, or whose "
        f"sum is off by more than {LARGEST_ERROR:g}."
    )


def _table(models: dict[str, Results], leading: dict[str, Cell], columns: dict[str, str], cell: Cell) -> str:
    """A table of models (rows); leading columns have cells of their own."""
    rows = []
    for name, model in models.items():
        lead = [own(model, title) for title, own in leading.items()]
        rows.append([SPECS[name].title, *lead, *(cell(model, column) for column in columns)])
    numbers = [*leading, *columns.values()]
    return table(["model", *numbers], rows, numbers=numbers)


def _entry(model: Results, kind: str, name: str) -> Results:
    """What is known of an engine, a step or a memory cell; empty where it was not measured."""
    if "failed" in model:
        return {"failed": model["failed"]}
    failed_before = kind == "memory" and "failed" in model["engines"].get(name, {})
    entry: Results = model["engines" if failed_before else kind].get(name, {})
    return entry


def _text(entry: Results, key: str, form: Callable[[Any], str]) -> str:
    if "failed" in entry:
        return FAILED
    value = entry.get(key)
    return ABSENT if value is None else form(value)


def _batch(model: Results, _: str) -> str:
    return _text(model, "batch", str)


def _ratio(kind: str, key: str = "ratio") -> Cell:
    return lambda model, name: _text(_entry(model, kind, name), key, lambda value: f"{value:.2f}")


def _always(cell: Cell, name: str) -> Cell:
    """The cell of one name, whatever the column is called."""
    return lambda model, _: cell(model, name)


def _samples_per_second(model: Results, name: str) -> str:
    return _text(_entry(model, "engines", name), "median_seconds", lambda value: f"{model['batch'] / value:,.0f}")


def _milliseconds(kind: str, name: str) -> Cell:
    return lambda model, _: _text(
        _entry(model, kind, name), "median_seconds", lambda value: f"{1000 * value:.{1 if value < 0.01 else 0}f} ms"
    )


def _megabytes(name: str) -> Cell:
    return lambda model, _: _text(_entry(model, "memory", name), "bytes", lambda value: f"{value / 2**20:.0f} MB")


def _fastest(cell: Cell, names: Sequence[str]) -> Cell:
    """The same cells, with the smallest ratio of each model in bold."""

    def emphasised(model: Results, name: str) -> str:
        known = {one: _entry(model, "engines", one).get("ratio") for one in names}
        ratios = {one: ratio for one, ratio in known.items() if ratio is not None}
        text = cell(model, name)
        return f"**{text}**" if ratios and name == min(ratios, key=ratios.__getitem__) else text

    return emphasised


def _error(model: Results, name: str) -> str:
    entry = _entry(model, "engines", name)
    errors = [f"{entry[key]:.0e}" for key in ("error", "from_dpbench") if key in entry]
    # An engine that failed because of its error shows it.
    return " / ".join(errors) if errors else _text(entry, "error", str)


def _failures(models: dict[str, Results], titles: dict[str, str]) -> Iterable[str]:
    """What failed and why, each pair of contender and reason once."""
    found: dict[tuple[str, str], list[str]] = {}
    for name, model in models.items():
        if "failed" in model:
            found.setdefault(("all", model["failed"]), []).append(SPECS[name].title)
            continue
        for kind, label in (("engines", "{}"), ("steps", "step of {}"), ("memory", "memory of {}")):
            for one, entry in model[kind].items():
                if "failed" in entry:
                    key = (label.format(titles[one]), entry["failed"])
                    found.setdefault(key, []).append(SPECS[name].title)
    if found:
        yield "## What fails"
        yield "\n".join(f"- {who} ({'; '.join(where)}): `{why}`" for (who, why), where in found.items())
