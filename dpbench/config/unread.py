"""Settings of algorithms that no stage takes: most likely a slip in a name."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from omegaconf import DictConfig, OmegaConf

from dpbench.config.files import conf_folder, options
from dpbench.config.messages import most_like
from dpbench.errors import UserError

READ = re.compile(r"\$\{[^}]*\balgo\.(\w+)")


def unread(composed: DictConfig, chosen: str) -> dict[str, Any]:
    """The settings of the chosen algorithm that no other setting takes its value from.

    Raises:
        UserError: the algorithm has no name.
    """
    raw = cast(dict[str, Any], OmegaConf.to_container(composed, resolve=False))
    algo = raw.pop("algo")
    if not isinstance(algo, dict) or not (algo.get("name") or "algo" in algo):
        raise UserError(f"algo/{chosen}.yaml sets no algo.name, under which its runs are recorded")
    read = set(READ.findall(str(raw)))
    return {name: value for name, value in algo.items() if name not in ("name", *read)}


def refuse_unread(settings: Mapping[str, Any], typed: Sequence[str], folders: Sequence[Path], chosen: str) -> None:
    """Refuse what is set without effect.

    An algorithm's file may set what only stages read that the command line has replaced, or have what it sets from
    another algorithm whose stages it replaces; then it is no slip.

    Args:
        settings: of the algorithm, unread.
        typed: overrides.
        folders: of options, beside the package's.
        chosen: name of the algorithm.

    Raises:
        UserError: one of the settings was typed, or the file sets it and no option that was replaced could read it.
    """
    replaced = {line.partition("=")[0] for line in typed}
    searched = [*folders, conf_folder()]
    for name, value in settings.items():
        field = f"algo.{name}"
        for line in typed:
            if line.startswith(f"{field}="):
                raise UserError(f"{line}: no stage that is chosen here reads it; leave it out")
        if name == "algo" and isinstance(value, dict):
            raise UserError(f"algo/{chosen}.yaml lacks the line # @package _global_ at its beginning")
        readers = _readers(searched)
        if name not in readers:
            close = most_like(name, sorted(readers))
            hint = f"; did you mean algo.{close}?" if close else f"; an option would, by ${{{field}}}"
            raise UserError(f"algo/{chosen}.yaml sets it, but nothing reads it{hint}", field=field, value=value)
        if name in _set_by(chosen, searched) and not any(one.partition("=")[0] in replaced for one in readers[name]):
            would = " or ".join(sorted(readers[name]))
            message = f"algo/{chosen}.yaml sets it, but no stage that it chooses reads it; {would} would"
            raise UserError(message, field=field, value=value)


def _set_by(algorithm: str, folders: Sequence[Path]) -> set[str]:
    """The settings in the file of an algorithm itself, which is the first one of its name."""
    file = next(path for folder in folders if (path := folder / "algo" / f"{algorithm}.yaml").is_file())
    content = cast(dict[str, Any], OmegaConf.to_container(OmegaConf.load(file), resolve=False))
    return set(content.get("algo") or {})


def _readers(folders: Sequence[Path]) -> dict[str, set[str]]:
    """Which options read a setting of an algorithm."""
    found: dict[str, set[str]] = defaultdict(set)
    for folder in folders:
        for file in options(folder):
            option = "=".join(file.relative_to(folder).with_suffix("").parts)
            for name in READ.findall(file.read_text()):
                found[name].add(option)
    return found
