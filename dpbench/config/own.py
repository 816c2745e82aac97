"""Stages from outside the package: a YAML file names the schema <module>.<Class> where others name a built-in one."""

from __future__ import annotations

import importlib
import re
import sys
import traceback
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from functools import cache
from inspect import isabstract
from pathlib import Path
from typing import Any, get_type_hints

from hydra.core.object_type import ObjectType
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigResult, ConfigSource
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from typing_extensions import override

from dpbench.config.registry import SCHEMAS
from dpbench.config.schema import RunConfig
from dpbench.errors import UserError
from dpbench.stage import is_own

# Where Hydra looks for them; conf/config.yaml has it too, for what a launcher composes.
SEARCHED = "python://"
SCHEMA = re.compile(r"schema/(?P<group>\w+)/(?P<module>\w+(\.\w+)*)\.(?P<name>\w+)")


class OwnStages(ConfigSource):
    """Hydra's source of the schemas ``/schema/<group>: <module>.<Class>``, made of classes that Python can import.

    It stands on Hydra's search path as ``python://``.
    """

    @staticmethod
    @override
    def scheme() -> str:
        return "python"

    @override
    def available(self) -> bool:
        return True

    @override
    def is_group(self, config_path: str) -> bool:
        return False

    @override
    def is_config(self, config_path: str) -> bool:
        found = SCHEMA.fullmatch(config_path)
        return found is not None and found["group"] in SCHEMAS

    @override
    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        return []

    @override
    def load_config(self, config_path: str) -> ConfigResult:
        found = SCHEMA.fullmatch(config_path)
        assert found is not None, "Hydra asks is_config() first"
        kind = own_stage(found["group"], found["module"], found["name"])
        try:
            node = OmegaConf.structured(kind)
        except OmegaConfBaseException as error:
            problem = f"its fields can't all be settings: {str(error).splitlines()[0]}"
            raise _refused(found["group"], f"{found['module']}.{found['name']}", problem) from error
        return ConfigResult(config=node, path=self.full_path(), provider=self.provider, header={"package": None})


def own_stage(group: str, module: str, name: str) -> type:
    """The class of a stage that lives outside the package.

    Raises:
        UserError: there is no such module or class, or it is no stage of that group.
    """
    typed = f"{module}.{name}"
    try:
        loaded = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise _refused(group, typed, f"its module can't be imported: {error}") from error
        hint = "put it into the folder of -cd, or on PYTHONPATH"
        raise _refused(group, typed, f"there is no module {error.name}; {hint}") from error
    except Exception as error:
        raise _refused(group, typed, f"its module can't be imported: {type(error).__name__}: {error}") from error
    kind = getattr(loaded, name, None)
    if kind is None:
        raise _refused(group, typed, f"{loaded.__file__ or module} has no class {name}")
    contract = contracts()[group]
    expected = f"expected a dataclass that extends {contract.__module__}.{contract.__qualname__}"
    if not isinstance(kind, type) or not issubclass(kind, contract):
        raise _refused(group, typed, expected)
    # A subclass inherits what makes its parent a dataclass, but the fields that it adds itself would not be settings.
    if not is_dataclass(kind) or "__dataclass_params__" not in vars(kind):
        raise _refused(group, typed, f"{expected}; it lacks @dataclass")
    if any(field.name == "kind" for field in fields(kind)):
        problem = "its field kind has the name under which a record has the class; call it otherwise"
        raise _refused(group, typed, problem)
    if isabstract(kind):
        missing = " and ".join(sorted(kind.__abstractmethods__))
        raise _refused(group, typed, f"it lacks {missing}, which {contract.__name__} leaves to it")
    return kind


def names_no_class(group: str, kind: type) -> bool:
    """Whether a stage is of the contract itself, which leaves something to those who extend it."""
    return kind is contracts()[group] and isabstract(kind)


def place(error: Exception, kinds: Iterable[type]) -> str:
    """File and line of one's own where an error was raised, or what raised it was called; empty where none is to blame.

    Args:
        error: raised.
        kinds: the classes of a run.
    """
    own = {kind.__module__ for kind in kinds if is_own(kind)}
    files = {getattr(sys.modules.get(module), "__file__", None) for module in own}
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename in files]
    return f"{Path(frames[-1].filename).name}, line {frames[-1].lineno}" if frames else ""


def place_in(error: Exception, config: RunConfig) -> str:
    """Where in the classes of a run an error was raised, see `place`."""
    return place(error, [type(getattr(config, group)) for group in contracts()])


@contextmanager
def own_errors_placed(config: RunConfig) -> Iterator[None]:
    """An error that a class of one's own raises is bad input, of that file and line; others leave as they are."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        if where := place_in(error, config):
            raise UserError(f"{where}: {type(error).__name__}: {error}") from error
        raise


def _refused(group: str, typed: str, message: str) -> UserError:
    return UserError(message, field=f"/schema/{group}", value=typed)


@cache
def contracts() -> dict[str, type]:
    """What a stage of each group extends."""
    hints: dict[str, Any] = get_type_hints(RunConfig)
    return {group: hints[group] for group in SCHEMAS}


def find_own_stages(folders: Sequence[Path]) -> None:
    """Let YAML files name classes of modules on Python's path, and of those in these folders."""
    Plugins.instance().register(OwnStages)
    for folder in map(str, folders):
        if folder not in sys.path:
            sys.path.append(folder)  # last: a file of one's own does not take the place of a library
