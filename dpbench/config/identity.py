"""What a run is: the settings that can change its numbers, and their hash."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import fields, is_dataclass
from typing import Any

from dpbench.config.schema import RunConfig

# Settings that say where and how a run is carried out or shown, not what it computes.
# `algo` only names values that the stages hold; `seed` is the folder below the hash.
NOT_IDENTITY = frozenset(
    {
        "algo",
        "channels_last",
        "checkpoint",
        "data",
        "device",
        "force",
        "fuse_seeds",
        "keep_model",
        "micro_batch",
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
NULL_WHERE_ABSENT = frozenset({"privacy.search_runs"})
# What config.yaml holds besides the settings.
BESIDE = frozenset({"choices", "overrides"})


def changes_nothing(override: str) -> bool:
    """Whether what was typed only says where, how or for which seed a run is carried out, or shown."""
    key = override.lstrip("+~").partition("=")[0]
    return any(key == one or key.startswith(f"{one}.") for one in NOT_IDENTITY - {"algo"})


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
    ours = cls.__module__.split(".")[0] == "dpbench"
    return cls.__name__ if ours else f"{cls.__module__}.{cls.__qualname__}"


def resolved(config: RunConfig) -> dict[str, Any]:
    """The whole configuration as plain values, for config.yaml and the tracker."""
    settings: dict[str, Any] = plain(config)
    del settings["kind"]
    return settings


def identity(config: RunConfig) -> dict[str, Any]:
    """The settings that can change the numbers of a run, delta as a number."""
    settings = {key: value for key, value in resolved(config).items() if key not in NOT_IDENTITY}
    settings["dataset"] = {k: v for k, v in settings["dataset"].items() if f"dataset.{k}" not in NOT_IDENTITY}
    leave_out_absent(settings)
    settings["delta"] = config.delta_value
    settings["evaluation"] = config.evaluate_every
    return settings


def leave_out_absent(settings: dict[str, Any]) -> None:
    """Take out of an identity what a run has not: one that is of no search is what it was before there were any."""
    for setting in NULL_WHERE_ABSENT:
        group, _, name = setting.partition(".")
        if settings[group].get(name) is None:
            settings[group].pop(name, None)


def config_hash(config: RunConfig) -> str:
    """12 hexadecimal digits of the identity's SHA-256; equal however the settings were typed."""
    canonical = json.dumps(identity(config), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()[:12]
