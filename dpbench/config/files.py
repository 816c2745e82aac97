"""The YAML files that configurations are composed of."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import takewhile
from pathlib import Path

import yaml
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.utils import create_config_search_path
from omegaconf import OmegaConf

from dpbench.errors import UserError

UNREADABLE = (yaml.YAMLError, UnicodeDecodeError)


def conf_folder() -> Path:
    """The folder of the YAML files: inside an installed package, beside it in a checkout."""
    package = Path(__file__).resolve().parents[1]
    installed = package / "conf"
    return installed if installed.is_dir() else package.parent / "conf"


def loader_of(config_dirs: Sequence[Path]) -> ConfigLoaderImpl:
    """Hydra's loader of the project's options and of those in further folders."""
    path = create_config_search_path(str(conf_folder()))
    for folder in config_dirs:
        path.prepend("command-line", f"file://{folder}")
    return ConfigLoaderImpl(config_search_path=path)


def options(folder: Path) -> Iterator[Path]:
    """The files of all options below a folder; conf/paper holds what the papers claim, nothing that a run chooses."""
    for file in sorted(folder.glob("*/**/*.yaml")):
        if file.relative_to(folder).parts[0] != "paper":
            yield file


def options_with(setting: str, group: str) -> list[str]:
    """Names of the project's options of a group that have a setting of this name."""
    files = sorted((conf_folder() / group).glob("*.yaml"))
    return [file.stem for file in files if setting in OmegaConf.load(file)]


def require_names_of_their_own(folders: Sequence[Path]) -> None:
    """Raise `UserError` about the first option in these folders that has the name of one of the project's."""
    for folder in folders:
        for file in options(folder):
            name = file.relative_to(folder)
            if (conf_folder() / name).exists():
                option = f"{name.parent.as_posix()}={name.stem}"
                raise UserError(f"{file}: {option} is an option of dpbench itself; give the file another name")


def purpose(option: Path) -> str:
    """The comment that a YAML file begins with, in one line, without directives to Hydra."""
    lines = (line for line in option.read_text().splitlines() if not line.startswith("# @package"))
    return " ".join(line.removeprefix("# ") for line in takewhile(lambda line: line.startswith("# "), lines))


def is_unreadable(error: BaseException | None) -> bool:
    """Whether composing met a file that is no YAML, which the error does not name."""
    return error is not None and (isinstance(error, UNREADABLE) or is_unreadable(error.__cause__))


def require_readable(folders: Sequence[Path]) -> None:
    """Raise `UserError` about the first option in these folders that is no YAML, with the line."""
    for file in (file for folder in folders for file in options(folder)):
        try:
            OmegaConf.load(file)
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            line = "" if mark is None else f", line {mark.line + 1}"
            raise UserError(f"{file}{line}: no YAML ({error.problem})") from error
        except (*UNREADABLE, OSError) as error:  # a control character, another encoding, no permission
            raise UserError(f"{file}: can't be read ({error})") from error
