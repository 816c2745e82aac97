"""The pages in Markdown."""

from __future__ import annotations

import re
from pathlib import Path

from dpbench.config import Job, compose_jobs, conf_folder
from dpbench.config.files import purpose
from dpbench.config.registry import register
from dpbench.errors import UserError
from dpbench.markdown import table
from dpbench.methods.entry import Entry, read_entry
from dpbench.methods.facts import StageFacts, guarantee, memory, stages

NAMES = {"optim": "optimizer"}
GENERATED = "<!-- Written by python -m dpbench.methods; edit {source} instead. -->"


def generated(docs: Path) -> dict[str, str]:
    """Content of every page by file name.

    Args:
        docs: folder that holds source/<algorithm>.yaml.

    Raises:
        UserError: an algorithm has no entry, or an entry no algorithm.
    """
    register()
    algorithms = sorted(path.stem for path in (conf_folder() / "algo").glob("*.yaml"))
    entries = {name: read_entry(docs / "source", name) for name in algorithms}
    for path in sorted((docs / "source").glob("*.yaml")):
        if path.stem not in entries:
            raise UserError(f"docs/methods/source/{path.name}: there is no algo={path.stem}")
    default = _job()
    pages = {f"{name}.md": _page(_job(f"algo={name}"), default, entry) for name, entry in entries.items()}
    return {"README.md": _index(entries), **pages}


def write(docs: Path) -> list[Path]:
    """Write the pages that are not up to date, and remove those of algorithms that are gone; returns which."""
    pages = generated(docs)
    changed = [path for path in sorted(docs.glob("*.md")) if path.name not in pages]
    for path in changed:
        path.unlink()
    for name, content in pages.items():
        path = docs / name
        if not path.is_file() or path.read_text() != content:
            path.write_text(content)
            changed.append(path)
    return changed


def _job(*overrides: str) -> Job:
    # The rest is the default run, on digits; the micro-batch is given because finding one takes time.
    return compose_jobs([*overrides, "device=cpu", "micro_batch=256"], multirun=False)[0]


def _index(entries: dict[str, Entry]) -> str:
    rows = [[f"[`{name}`]({name}.md)", _cell(entry.title), _cell(_summary(name))] for name, entry in entries.items()]
    parts = [
        "# Methods",
        GENERATED.format(source="docs/methods/source/ and conf/algo/"),
        "Equation, stages with their settings, guarantee, cost and deviations from its paper, of each algorithm.",
        table(["`algo=`", "method", ""], rows),
    ]
    return "\n\n".join(parts) + "\n"


def _page(job: Job, default: Job, entry: Entry) -> str:
    name = job.choices["algo"]
    found = stages(job, default)
    parts = [
        f"# {entry.title}",
        GENERATED.format(source=f"docs/methods/source/{name}.yaml, conf/algo/{name}.yaml or a stage"),
        f"`algo={name}`. {_prose(_summary(name))}",
        "## Step",
        f"```math\n\\begin{{aligned}}\n{_lines(entry.equation)}\n\\end{{aligned}}\n```",
        _prose(entry.symbols.strip()),
        "## Stages",
        table(
            ["stage", "default", "what it does"],
            [[_name(s.group), f"`{s.group}={s.option}`", _cell(s.text.split("\n\n")[0])] for s in found],
        ),
        "Settings, with their defaults on `dataset=digits`:",
        _settings(found),
        *_details(found),
        "## Privacy",
        f"With the default settings (`dataset=digits`, eps={job.config.eps:g}): {guarantee(job)}",
        "## Cost of a step",
        _cost(job),
        "## Deviations",
        _deviations(entry),
        "## Sources",
        "\n".join(f"- {_prose(source)}" for source in entry.sources),
    ]
    return "\n\n".join(parts) + "\n"


def _summary(name: str) -> str:
    return purpose(conf_folder() / "algo" / f"{name}.yaml")


def _lines(equation: str) -> str:
    return " \\\\\n".join(line for line in equation.strip().splitlines() if line.strip())


def _settings(found: list[StageFacts]) -> str:
    """All settings of the stages, once each: some stages share theirs through algo.*."""
    defaults: dict[str, str] = {}
    meanings: dict[str, list[str]] = {}
    for stage in found:
        for setting in stage.settings:
            defaults[setting.typed] = setting.default
            known = meanings.setdefault(setting.typed, [])
            text = setting.meaning.removesuffix(".")
            if text not in known:
                known.append(text)
    rows = [[f"`{typed}`", f"`{defaults[typed]}`", _cell("; ".join(meanings[typed]))] for typed in defaults]
    return table(["setting", "default", "meaning"], rows)


def _details(found: list[StageFacts]) -> list[str]:
    """What the docstrings say beyond their first paragraphs."""
    long = [(stage, rest) for stage in found if (rest := stage.text.split("\n\n", 1)[1:])]
    return [f"**{_name(stage.group)}** (`{stage.kind}`). {_prose(rest[0])}" for stage, rest in long]


def _cost(job: Job) -> str:
    points = job.config.query.most_points
    gradients = "One gradient" if points == 1 else f"Up to {points} gradients"
    kept = {group: vectors for group, vectors in memory(job).items() if vectors}
    whose = " + ".join(f"{vectors:g} ({_name(group)})" for group, vectors in kept.items())
    return (
        f"{gradients} per sample. Vectors of the parameters' length that the stages keep between steps, counted at the "
        f"end of the default run: {whose or 'none'}."
    )


def _deviations(entry: Entry) -> str:
    if not entry.deviations:
        return "None beyond what the stages state above."
    rows = [[_cell(point.paper), _cell(point.here), _cell(point.where)] for point in entry.deviations]
    return table(["paper", "here", "where"], rows)


def _name(group: str) -> str:
    return NAMES.get(group, group)


def _prose(text: str) -> str:
    """Text with the signs escaped that Markdown would take for its own; code between backticks stays."""
    parts = re.split(r"(`+[^`]*`+)", text)
    return "".join(part if i % 2 else re.sub(r"([*<])", r"\\\1", part) for i, part in enumerate(parts))


def _cell(text: str) -> str:
    """Text as one line of a table."""
    return _prose(" ".join(text.split()))
