"""The text of --help, read from the YAML files so that it is never out of date."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path

import yaml

from dpbench.config.files import conf_folder, options, purpose, require_readable
from dpbench.reproduction.options import by_default

WIDTH = 120
INDENT = " " * 21

USAGE = """\
python -m dpbench.run [GROUP=OPTION | SETTING=VALUE] ... [-m]

Trains a model under a privacy budget and records accuracy, the eps spent and where the numbers come from.

  python -m dpbench.run                                     DP-SGD on scikit-learn's digits at eps=8
  python -m dpbench.run algo=disk eps=2 dataset=mnist       another algorithm, budget and data set
  python -m dpbench.run algo=dpsgd,disk eps=1,2,4,8 -m      a sweep: all combinations, then a table
  python -m dpbench.run algo=disk seeds=5 -m                the seeds 0 to 4, at once where that is faster
  python -m dpbench.run algo=dpsgd,disk eps=1,8 -m plan=true
                                                            what the sweep would run and cost; runs nothing
  python -m dpbench.run algo=disk --cfg job                 every setting with its value
"""

FOOTER = """\
Flags: -m runs all combinations of comma-separated values; -cd FOLDER adds a folder of options and classes of your own;
--cfg job prints the composed settings, with --resolve those that follow from others as values; --hydra-help tells the
rest.
Exit codes: 0; 1, a run failed; 2, bad input; 130, interrupted; 143, ended by SIGTERM.
"""


def help_text(own: Sequence[Path] = ()) -> str:
    """Usage, groups with their options, and settings with their defaults.

    Args:
        own: folders of options beside the package's.

    Raises:
        UserError: an option there can't be read.
    """
    require_readable(own)
    conf = conf_folder()
    chosen = by_default()
    parts = [USAGE, "GROUPS (GROUP=OPTION; * marks the default)"]
    for group, files in _groups([conf, *own]).items():
        parts.append(f"\n  {group}")
        for option in files:
            mark = "*" if chosen.get(group) == option.stem else " "
            head = f"  {mark} {option.stem:<16} "
            if len(head) > len(INDENT):
                parts.append(head.rstrip())
                head = INDENT
            parts.append(textwrap.fill(purpose(option), WIDTH, initial_indent=head, subsequent_indent=INDENT))
            settings = _own_settings(group, option)
            parts += textwrap.wrap(settings, WIDTH, initial_indent=INDENT, subsequent_indent=INDENT)
    parts.append("\nSETTINGS with their defaults (nested ones with a dot: evaluation.every_steps=100)\n")
    parts.append(_settings(conf / "config.yaml"))
    parts.append(FOOTER)
    return "\n".join(parts)


def _groups(roots: Sequence[Path]) -> dict[str, list[Path]]:
    """The options of each group, both in the order of their names; of two with one name the first root's."""
    found: dict[str, dict[str, Path]] = {}
    for root in roots:
        for option in options(root):
            found.setdefault(option.parent.relative_to(root).as_posix(), {}).setdefault(option.stem, option)
    return {group: [named[name] for name in sorted(named)] for group, named in sorted(found.items())}


def _own_settings(group: str, option: Path) -> str:
    """The settings that come with an option, as one would type them; what a data set declares is no choice."""
    if group == "dataset":
        return ""
    return ", ".join(f"{group.replace('/', '.')}.{name}" for name in _names(group, option))


def _names(group: str, option: Path) -> dict[str, None]:
    """Names of an option's settings, those of the options of its group that it starts from first."""
    content = yaml.safe_load(option.read_text()) or {}
    names: dict[str, None] = {}
    for base in content.get("defaults") or ():
        places = (folder / f"{base}.yaml" for folder in (option.parent, conf_folder() / group))
        file = next((place for place in places if place.exists()), None)  # a plugin's options are no files here
        if file is not None and file != option:
            names |= _names(group, file)
    return names | {key: None for key in content.get(group, content) if key not in ("defaults", "name")}


def _settings(config: Path) -> str:
    """The settings of config.yaml as they stand, comments included."""
    text = config.read_text()
    body = text[text.index("\neps:") + 1 : text.index("\nhydra:")]
    return "".join(f"  {line}\n" if line else "\n" for line in body.splitlines())
