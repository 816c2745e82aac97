"""Composing the jobs of a command line, all of them checked before the first one runs."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, cast

from hydra import compose, initialize_config_dir
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from dpbench.config.files import (
    conf_folder,
    is_unreadable,
    loader_of,
    require_names_of_their_own,
    require_readable,
)
from dpbench.config.identity import name_of
from dpbench.config.messages import GROUPS, explain, no_such_setting, unknown_setting
from dpbench.config.own import SEARCHED, contracts, find_own_stages, names_no_class, place
from dpbench.config.registry import register
from dpbench.config.schema import RunConfig
from dpbench.config.unread import refuse_unread, unread
from dpbench.errors import UserError, require, require_text
from dpbench.stage import Stage, is_own

# Of a sweep.
MOST_JOBS = 100_000

# A setting that takes its value from another one: ${algo.kappa}, or ${oc.select:algo.kappa,0.7} with a default.
REFERENCE = re.compile(r"\$\{(oc\.select:)?(?P<key>[\w.]+)(,[^}]*)?\}")
# Only there, before a quote or the end of a text in quotes, a backslash stands for anything else in Hydra's grammar.
BEFORE_QUOTE = re.compile(r"(\\*)('|\Z)")
# Of dpbench, beside run.
COMMANDS = ("reproduce", "results", "privacy", "audit", "data", "methods")
# Settings that may have any sign.
PATHS = ("results_dir", "data.root")
# What is said of several values where one run was asked for.
ADD_M = "several values make a sweep; add -m to run them all"


@dataclass(frozen=True)
class Job:
    """One run of a command line.

    Attributes:
        overrides: what the user typed for it, one value each.
        config: the checked configuration.
        choices: chosen option of each group.
    """

    overrides: tuple[str, ...]
    config: RunConfig
    choices: dict[str, str]

    @property
    def name(self) -> str:
        """What the user typed, without what does not change the run."""
        return name_of(self.overrides)


def names_apart(jobs: Sequence[Job]) -> list[str]:
    """Of each job what sets it apart from the others, as it was typed; of one alone, its name."""
    common = set.intersection(*(set(job.overrides) for job in jobs)) if len(jobs) > 1 else set()
    return [name_of(line for line in job.overrides if line not in common) for job in jobs]


def by_seed(job: Job) -> list[Job]:
    """The jobs that a job with `seeds` stands for, each as if its seed had been typed."""
    if job.config.seeds is None:
        return [job]
    jobs = []
    for seed in job.config.seeds:
        typed = tuple(f"seed={seed}" if line.startswith("seeds=") else line for line in job.overrides)
        jobs.append(replace(job, overrides=typed, config=replace(job.config, seed=seed, seeds=None)))
    return jobs


def chosen(choices: Mapping[Any, Any]) -> dict[str, str]:
    """Hydra's record of choices, without its own groups and the schemas."""
    return {str(g): str(o) for g, o in choices.items() if not str(g).startswith(("hydra", "schema"))}


def load(composed: DictConfig, choices: Mapping[str, str]) -> RunConfig:
    """A composed config as checked dataclasses.

    Args:
        composed: what Hydra composed.
        choices: chosen option of each group.

    Raises:
        UserError: a value is wrong; the message names the setting as the user would type it.
    """
    kinds = {group: OmegaConf.get_type(composed, group) or dict for group in contracts()}
    for group, kind in kinds.items():
        if names_no_class(group, kind):
            line = (
                "/schema/dataset@dataset: table" if group == "dataset" else f"/schema/{group}@_here_: <module>.<Class>"
            )
            message = f"its file names no class; its defaults need a line such as - {line}"
            raise UserError(message, field=group, value=choices.get(group))
    try:
        config = cast(RunConfig, OmegaConf.to_object(composed))
    except UserError as error:
        raise _as_typed(error, composed) from error
    except OmegaConfBaseException as error:
        raise _as_typed(explain(error, [f"{group}={option}" for group, option in choices.items()]), composed) from error
    except Exception as error:
        if where := place(error, kinds.values()):
            raise UserError(f"{where}: {type(error).__name__}: {error}") from error
        raise
    _refuse_extra_keys(config, "")
    return config


def _as_typed(error: UserError, composed: DictConfig) -> UserError:
    """Name what the user can type where a stage refers to it, algo.kappa for query.kappa, but batch_size for itself."""
    if error.field is None:
        return error
    raw: Any = OmegaConf.to_container(composed, resolve=False)
    for key in error.field.split("."):
        raw = raw.get(key) if isinstance(raw, dict) else None
    source = REFERENCE.fullmatch(raw) if isinstance(raw, str) else None
    if (
        source is not None
        and not source["key"].startswith("dataset.suggested.")
        and OmegaConf.select(composed, source["key"], default=error) is not error
    ):
        return UserError(error.message, field=source["key"], value=error.value)
    return error


def _refuse_extra_keys(value: Any, path: str) -> None:
    """Hydra lets ``+key=value`` add keys even to a schema; a setting that nothing reads is an error."""
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return
    known = {field.name for field in dataclasses.fields(value)}
    if isinstance(value, Stage) and is_own(type(value)):
        _require_what_it_remembers(value, path.removesuffix("."))
    for name, item in vars(value).items():
        if name not in known and not name.startswith("_"):
            if is_own(type(value)):
                message = f"it sets {name}, which is no field of it; call what it remembers or derives _{name}"
                raise UserError(message, field=path.removesuffix("."), value=type(value).__name__)
            raise UserError(f"no such setting; known here: {', '.join(sorted(known))}", field=path + name, value=item)
        _refuse_extra_keys(item, f"{path}{name}.")


def _require_what_it_remembers(stage: Stage, field: str) -> None:
    """A checkpoint could not be written, or would be of no use later, where a stage begins without it."""
    kind = type(stage)
    names: Sequence[str] = stage.remembers
    if isinstance(names, str):
        message = f"its remembers is one text; a tuple ends in a comma, ({names!r},)"
        raise UserError(message, field=field, value=kind.__name__)
    if kind.load_state_dict is not Stage.load_state_dict:
        return
    if lacking := [name for name in names if not hasattr(stage, name)]:
        named = ", ".join(lacking)
        message = f"it names {named} in remembers, but begins without; set it in __post_init__, to None say"
        raise UserError(message, field=field, value=kind.__name__)


def quoted(override: str) -> str:
    """Put quotes around what Hydra's grammar does not take: the ^ of a rule for delta, and any sign in a path."""
    key, _, value = override.partition("=")
    if not value or value == "null" or value.startswith(("'", '"')):
        return override
    if key in PATHS:
        return f"{key}={in_grammar(value)}"
    if key == "delta" and "^" in value:
        return "delta=" + ",".join(f"'{part}'" if "^" in part else part for part in value.split(","))
    return override


def in_grammar(value: str) -> str:
    """A text as a value in Hydra's grammar, whatever signs it has."""
    escaped = BEFORE_QUOTE.sub(lambda found: 2 * found[1] + ("\\'" if found[2] else ""), value)
    return f"'{escaped}'"


def compose_jobs(overrides: Sequence[str], *, multirun: bool, config_dirs: Sequence[Path] = ()) -> list[Job]:
    """Compose and check every job of a command line.

    Args:
        overrides: Hydra overrides as typed.
        multirun: whether several values of a key make a sweep.
        config_dirs: further folders searched for options, whose names the project's own have not.

    Raises:
        UserError: the first thing that is wrong, in one sentence.
    """
    with _composer(config_dirs) as composer:
        parsed = _parse([quoted(override) for override in overrides], config_dirs)
        for override in parsed:
            if override.is_sweep_override() and not multirun:
                raise UserError(f"{override.input_line}: {ADD_M}")
            if override.key_or_group.startswith("hydra"):
                continue
            if override.is_add() or override.is_force_add():
                raise UserError(f"{override.input_line}: settings can't be added, only set; leave out the plus sign")
            if override.key_or_group in GROUPS and isinstance(override.value(), (list, dict)):
                raise UserError(f"{override.input_line}: expected the name of one of its options")
            if override.is_delete():
                raise UserError(f"{override.input_line}: settings can't be removed, only set")
        # The launcher reads hydra.* settings; they are no part of a run.
        own = [o for o in parsed if not o.key_or_group.startswith("hydra")]
        swept = [o for o in own if o.is_sweep_override()]
        patterns = ", ".join(str(o.input_line) for o in swept)
        _refuse_too_many(swept, patterns)
        try:
            lines = BasicSweeper.split_arguments(own, None)[0]
        except (HydraException, ValueError) as error:
            raise UserError(f"{patterns}: no sweep over a list of values ({error})") from error
        if not lines:
            raise UserError(f"{patterns}: no option matches")
        return [_job(tuple(line), composer) for line in lines]


def _refuse_too_many(swept: Sequence[Override], patterns: str) -> None:
    """Before they are listed: a range may have any number of values."""
    count = 1
    for override in swept:
        try:
            count *= sum(1 for _ in islice(override.sweep_iterator(), MOST_JOBS + 1))
        except (HydraException, ValueError):
            return  # which listing them explains
        if count > MOST_JOBS:
            raise UserError(f"{patterns}: more than the {MOST_JOBS:,} runs that a sweep may have")


def compose_each(lines: Sequence[Sequence[str]], config_dirs: Sequence[Path] = ()) -> list[Job]:
    """Compose and check many single runs; those that choose the same options share the reading of files.

    Args:
        lines: overrides of each, one value a key.
        config_dirs: further folders searched for options, whose names the project's own have not.

    Raises:
        UserError: the first thing that is wrong, in one sentence.
    """
    with _composer(config_dirs) as composer:
        return [_job(tuple(quoted(override) for override in line), composer) for line in lines]


def _parse(overrides: Sequence[str], config_dirs: Sequence[Path]) -> list[Override]:
    parser = OverridesParser.create(loader_of(config_dirs))
    parsed = []
    for line in overrides:
        require_text(line)
        if line.startswith("="):
            raise UserError(f"{line}: expected key=value")
        try:
            parsed += parser.parse_overrides([line])
        except HydraException as error:
            if line in COMMANDS:
                raise UserError(f"{line}: expected key=value; did you mean python -m dpbench.{line}?") from error
            how = f"put quotes around a value with other signs{_in_quotes(line)}"
            raise UserError(f"{line}: expected key=value; {how}") from error
    return parsed


def _in_quotes(override: str) -> str:
    """How one value with other signs is typed: a shell takes off the outer quotes."""
    key, _, value = override.partition("=")
    plain = value and re.fullmatch(r"[\w./]+", key, re.ASCII) and not set(value) & set("='\"[]{}(),$`!\\")
    return f""", such as "{key}={in_grammar(value)}\"""" if plain else ""


def _group(override: str) -> str:
    return override.partition("=")[0]


def _compose(overrides: Sequence[str], config_dirs: Sequence[Path]) -> DictConfig:
    searched = ",".join([*(f"file://{folder}" for folder in config_dirs), SEARCHED])
    return compose("config", [*overrides, f"hydra.searchpath=[{searched}]"], return_hydra_config=True)


class _Composer:
    """Composes many command lines; those that choose the same options share the reading of files."""

    def __init__(self, config_dirs: Sequence[Path]) -> None:
        self.config_dirs = config_dirs
        self._of_choices: dict[tuple[str, ...], tuple[DictConfig, dict[str, str]]] = {}
        self._unread: dict[tuple[str, ...], dict[str, Any]] = {}
        self._parsed: dict[str, Override] = {}

    def __call__(self, overrides: Sequence[str]) -> tuple[DictConfig, dict[str, str]]:
        """What Hydra composes of these overrides, and the chosen option of each group."""
        options = tuple(sorted((line for line in overrides if _group(line) in GROUPS), key=_group))
        if options not in self._of_choices:
            composed, choices = self._whole(options)
            self._unread[options] = unread(composed, choices["algo"])
            self._of_choices[options] = composed, choices
        shared, choices = self._of_choices[options]
        refuse_unread(self._unread[options], overrides, self.config_dirs, choices["algo"])
        composed = deepcopy(shared)
        try:
            for override in (self._parse(line) for line in overrides if line not in options):
                key, value = override.key_or_group, override.value()
                OmegaConf.update(composed, key, value, merge=True)
                _require_flag(OmegaConf.select(composed, key), key, value)
        except OmegaConfBaseException:
            return self._whole(overrides)  # whose error says which override is meant
        return composed, choices

    def _parse(self, line: str) -> Override:
        if line not in self._parsed:
            (override,) = _parse([line], self.config_dirs)
            if override.is_sweep_override():
                raise UserError(f"{line}: expected one value")
            self._parsed[line] = override
        return self._parsed[line]

    def _whole(self, overrides: Sequence[str]) -> tuple[DictConfig, dict[str, str]]:
        composed = _compose(overrides, self.config_dirs)
        choices = chosen(composed.hydra.runtime.choices)
        OmegaConf.set_struct(composed, False)
        del composed["hydra"]
        OmegaConf.set_struct(composed, True)
        return composed, choices


@contextmanager
def _composer(config_dirs: Sequence[Path]) -> Iterator[_Composer]:
    """Composes with the options of the package and of further folders, whose stages are known from then on."""
    register()
    require_names_of_their_own(config_dirs)
    find_own_stages(config_dirs)
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(conf_folder()), version_base="1.3", job_name="run"):
        yield _Composer(config_dirs)


def _require_flag(became: object, key: str, value: object) -> None:
    """OmegaConf takes every number but 0 for true."""
    if isinstance(became, bool) and not isinstance(value, (bool, str)):
        require(value in (0, 1), key, value, "true or false")


def _job(overrides: tuple[str, ...], compose_line: _Composer) -> Job:
    try:
        composed, choices = compose_line(overrides)
    except Exception as error:
        bad = unknown_setting(error, overrides)
        if bad is not None:
            options = [line for line in overrides if _group(line) in GROUPS]  # other settings may be wrong, too
            raise no_such_setting(bad, _compose(options, compose_line.config_dirs)) from error
        if is_unreadable(error):
            require_readable(compose_line.config_dirs)
        raise explain(error, overrides, compose_line.config_dirs) from error
    OmegaConf.set_struct(composed, False)
    return Job(overrides, load(composed, choices), choices)
