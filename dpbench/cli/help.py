"""The text of --help, read from the YAML files so that it is never out of date."""

from __future__ import annotations

import textwrap
from itertools import takewhile
from pathlib import Path

import yaml

from dpbench.config import conf_folder

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
--cfg job prints the composed settings; --hydra-help tells the rest.
"""


def help_text() -> str:
    """Usage, groups with their options, and settings with their defaults."""
    conf = conf_folder()
    # conf/paper holds what the papers claim: nothing that a run chooses.
    groups = sorted({option.parent for option in conf.glob("*/**/*.yaml") if "paper" not in option.parts})
    chosen = _chosen(conf / "config.yaml")
    parts = [USAGE, "GROUPS (GROUP=OPTION; * marks the default)"]
    for folder in groups:
        group = folder.relative_to(conf).as_posix()
        parts.append(f"\n  {group}")
        for option in sorted(folder.glob("*.yaml")):
            mark = "*" if chosen.get(group) == option.stem else " "
            head = f"  {mark} {option.stem:<16} "
            parts.append(textwrap.fill(purpose(option), WIDTH, initial_indent=head, subsequent_indent=INDENT))
            own = _own_settings(group, option)
            parts += textwrap.wrap(own, WIDTH, initial_indent=INDENT, subsequent_indent=INDENT)
    parts.append("\nSETTINGS with their defaults (nested ones with a dot: evaluation.every_steps=100)\n")
    parts.append(_settings(conf / "config.yaml"))
    parts.append(FOOTER)
    return "\n".join(parts)


def purpose(option: Path) -> str:
    """The comment that a YAML file begins with, in one line, without directives to Hydra."""
    lines = (line for line in option.read_text().splitlines() if not line.startswith("# @package"))
    return " ".join(line.removeprefix("# ") for line in takewhile(lambda line: line.startswith("# "), lines))


def _own_settings(group: str, option: Path) -> str:
    """The settings that come with an option, as one would type them; what a data set declares is no choice."""
    if group == "dataset":
        return ""
    content = yaml.safe_load(option.read_text()) or {}
    own = content.get(group, content)
    names = [key for key in own if key not in ("defaults", "name")]
    return ", ".join(f"{group.replace('/', '.')}.{name}" for name in names)


def _chosen(config: Path) -> dict[str, str]:
    """Default option of each group, from the defaults list."""
    lines = [line.split("#")[0].strip() for line in config.read_text().splitlines() if line.startswith("  - ")]
    pairs = (line.removeprefix("- ").split(":", 1) for line in lines if ":" in line)
    return {group.strip(): option.strip() for group, option in pairs}


def _settings(config: Path) -> str:
    """The settings of config.yaml as they stand, comments included."""
    text = config.read_text()
    body = text[text.index("\neps:") + 1 : text.index("\nhydra:")]
    return "".join(f"  {line}\n" if line else "\n" for line in body.splitlines())
