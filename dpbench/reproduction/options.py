"""What options mean, from their files alone: Hydra composes a whole run in a third of a second."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache as remembered
from typing import Any

import yaml

from dpbench.config import conf_folder
from dpbench.config.registry import SCHEMAS


@remembered
def read_option(group: str, option: str) -> Mapping[str, Any]:
    """A YAML file of an option over those that it extends, with its text before the defaults as "head".

    Raises:
        OSError: there is no such file.
    """
    text = (conf_folder() / group / f"{option}.yaml").read_text()
    found: dict[str, Any] = {**(yaml.safe_load(text) or {}), "head": text.partition("defaults:")[0]}
    for line in found.get("defaults", []):
        if isinstance(line, str) and line != "_self_":
            extended = read_option(group, line)
            found = {**extended, **found, "defaults": [*extended["defaults"], *found["defaults"]]}
    return found


def _defaults(content: Mapping[str, Any]) -> dict[str, str]:
    """The defaults list of a file, without the options that it extends."""
    lines = [line for line in content.get("defaults", []) if isinstance(line, dict)]
    return {key: str(option) for line in lines for key, option in line.items()}


def chosen_by(content: Mapping[str, Any], group: str) -> str | None:
    """The option of another group that a file chooses."""
    return _defaults(content).get(f"override /{group}")


def schema_of(content: Mapping[str, Any], group: str) -> str:
    """The schema that a file names for its group.

    Raises:
        KeyError: it names none.
    """
    found = _defaults(content)
    return found.get(f"/schema/{group}@{group}") or found[f"/schema/{group}@_here_"]


def own_settings(content: Mapping[str, Any], group: str) -> dict[str, Any]:
    """What a file sets in its group."""
    own = content[group] if "@package _global_" in content["head"] else content
    return {key: value for key, value in own.items() if key not in ("defaults", "head")}


@remembered
def option_name(group: str, option: str) -> str | None:
    """The name that an option gives itself in records; None where its file can't tell."""
    try:
        return str(own_settings(read_option(group, option), group)["name"])
    except (OSError, KeyError):
        return None


@remembered
def by_default() -> Mapping[str, str]:
    """The option of each group where none is typed, chosen by an algorithm or by a data set."""
    return _defaults(yaml.safe_load((conf_folder() / "config.yaml").read_text()))


@remembered
def kinds_of(options: tuple[tuple[str, str], ...]) -> tuple[str, ...]:
    """``<group>.kind=<class>`` of every stage that a run has where these options were typed, by group.

    Groups whose files can't tell are left out.
    """
    typed, chosen = dict(options), dict(by_default())
    for group in ("dataset", "algo"):
        option = typed.get(group, chosen[group])
        try:
            others = _defaults(read_option(group, option))
        except OSError:
            return ()
        chosen |= {key.removeprefix("override /"): choice for key, choice in others.items()}
    return tuple(f"{group}.kind={kind}" for group, kind in _kinds({**chosen, **typed}))


def _kinds(chosen: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    for group in SCHEMAS.keys() & chosen.keys():
        try:
            yield group, SCHEMAS[group][schema_of(read_option(group, chosen[group]), group)].__name__
        except (OSError, KeyError):  # a class of one's own, or a file of another form
            continue
