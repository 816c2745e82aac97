"""What a page says that can't be read from code: docs/methods/source/<algorithm>.yaml."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import yaml
from omegaconf import MISSING, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from dpbench.errors import UserError


@dataclass
class Deviation:
    """One point at which the paper can be read in several ways, is wrong, or is not followed.

    Attributes:
        paper: what it says, or leaves out.
        here: the reading that runs take.
        where: section, equation, table or listing of the paper.
    """

    paper: str = MISSING
    here: str = MISSING
    where: str = MISSING


@dataclass
class Entry:
    """A method as its authors describe it.

    Attributes:
        title: its name.
        sources: publications, the method's own first.
        equation: one step, lines of LaTeX.
        symbols: what the letters mean that the stages do not explain.
        deviations: from the paper, but those that the stages themselves state.
    """

    title: str = MISSING
    sources: list[str] = MISSING
    equation: str = MISSING
    symbols: str = MISSING
    deviations: list[Deviation] = field(default_factory=list)


def read_entry(source: Path, algorithm: str) -> Entry:
    """The entry of an algorithm.

    Raises:
        UserError: there is none, or it is not complete.
    """
    path = source / f"{algorithm}.yaml"
    if not path.is_file():
        raise UserError(
            "has no entry; write its title, sources, equation, symbols and deviations into "
            f"docs/methods/source/{path.name}, as docs/methods/source/disk.yaml has them, then run "
            "python -m dpbench.methods",
            field="algo",
            value=algorithm,
        )
    try:
        content = OmegaConf.create(yaml.safe_load(path.read_text()))
        return cast(Entry, OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Entry), content)))
    except (OmegaConfBaseException, yaml.YAMLError) as error:
        raise UserError(f"docs/methods/source/{path.name}: {str(error).splitlines()[0]}") from error
