"""What a run is: the settings that can change its numbers, and their hash."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from dpbench.config.schema import RunConfig
from dpbench.stage import is_own

# What of a config.yaml says where and how a run is carried out or shown, not what it computes.
# `algo` only names values that the stages hold; `seed` is the folder below the hash; `choices` and `overrides` tell how
# it was typed.
NOT_IDENTITY = frozenset(
    {
        "algo",
        "channels_last",
        "checkpoint",
        "choices",
        "data",
        "device",
        "force",
        "fuse_seeds",
        "keep_model",
        "micro_batch",
        "overrides",
        "plan",
        "results_dir",
        "seed",
        "seeds",
        "shard_states",
        "tracker",
        "dataset.resident",
        "dataset.suggested",
    }
)
# Settings that older records lack: a run without them is one for which they are null.
NULL_WHERE_ABSENT = frozenset({"dataset.validation_size", "privacy.search_runs"})


def is_identity(name: str) -> bool:
    """Whether a setting, by its dotted name, is one of those that can change the numbers of a run."""
    return not _is_among(name, NOT_IDENTITY)


def _is_among(name: str, groups: Iterable[str]) -> bool:
    return any(name == one or name.startswith(f"{one}.") for one in groups)


def changes_nothing(override: str) -> bool:
    """Whether what was typed only says where, how or for which seed a run is carried out, or shown."""
    key = override.lstrip("+~").partition("=")[0]
    return not is_identity(key) and not _is_among(key, ("algo", "dataset.suggested"))  # from which a run takes values


def name_of(overrides: Iterable[str]) -> str:
    """What was typed for a run, with its seeds, without what does not change it."""
    telling = (line for line in overrides if line.startswith(("seed=", "seeds=")) or not changes_nothing(line))
    return " ".join(telling) or "defaults"


def plain(value: Any) -> Any:
    """A setting as plain values; a stage becomes its class and its fields."""
    if is_dataclass(value) and not isinstance(value, type):
        return {
            "kind": _kind(type(value)),
            **{f.name: plain(getattr(value, f.name)) for f in fields(value)},
        }
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value


def _kind(cls: type) -> str:
    """The name of a class; with its module where that is outside the package and may have any names."""
    return f"{cls.__module__}.{cls.__qualname__}" if is_own(cls) else cls.__name__


def resolved(config: RunConfig) -> dict[str, Any]:
    """The whole configuration as plain values, for config.yaml and the tracker."""
    settings: dict[str, Any] = plain(config)
    del settings["kind"]
    return settings


def identity(config: RunConfig) -> dict[str, Any]:
    """The settings that can change the numbers of a run, see `identifying`."""
    return identifying(resolved(config), delta=config.delta_value, evaluated_every=config.evaluate_every)


def identifying(settings: Mapping[str, Any], *, delta: float, evaluated_every: int) -> dict[str, Any]:
    """Of all settings those that can change the numbers of a run.

    Args:
        settings: plain values, or what else config.yaml holds.
        delta: as a number, however it was typed.
        evaluated_every: steps between evaluations, however they were typed.
    """
    kept = {name: value for name, value in settings.items() if is_identity(name)}
    kept["dataset"] = {name: value for name, value in kept["dataset"].items() if is_identity(f"dataset.{name}")}
    for setting in NULL_WHERE_ABSENT:  # a run that is of no search is what it was before there were any
        group, _, absent = setting.partition(".")
        kept[group] = {name: value for name, value in kept[group].items() if name != absent or value is not None}
    return {**kept, "delta": delta, "evaluation": evaluated_every}


def config_hash(config: RunConfig) -> str:
    """The hash of a run's identity; equal however the settings were typed."""
    return digest(identity(config))


def digest(identity: Mapping[str, Any]) -> str:
    """12 hexadecimal digits of an identity's SHA-256."""
    canonical = json.dumps(identity, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()[:12]
