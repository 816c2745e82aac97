"""What the config.yaml of a record says by itself.

Nothing is composed, so it is of the run as it was recorded, whatever options and defaults are now.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from dpbench.config.identity import digest, identifying
from dpbench.config.own import own_stage
from dpbench.config.registry import SCHEMAS
from dpbench.config.rules import delta_of, evaluated_every, trained_on
from dpbench.data.base import Suggested
from dpbench.privacy.sampling import SCHEMES, steps_of
from dpbench.tracking.shapes import NOT_FINITE


def recorded_hash(content: Mapping[str, Any]) -> str:
    """What `config_hash` was for the run with this config.yaml.

    Raises:
        ValueError: a setting is missing or has no such value as a run can have.
    """
    try:
        settings = _read(content)
        size = trained_on(settings["dataset"])
        if math.isnan(delta := delta_of(settings["delta"], size)):
            raise ValueError(f"delta={settings['delta']}")
        return digest(identifying(settings, delta=delta, evaluated_every=_evaluated_every(settings, size)))
    except (KeyError, TypeError, ValueError, AttributeError, ZeroDivisionError, OverflowError) as error:
        raise ValueError(f"has settings that no run can have ({type(error).__name__}: {error})") from error


def recorded_stage(group: str, content: Mapping[str, Any]) -> Any:
    """A stage, model or data set of a record.

    Args:
        group: its group, such as ``model``.
        content: of that name in config.yaml.

    Raises:
        UserError: it is a class of one's own that can't be imported.
        ValueError: there is no such class, or it has no such settings.
    """
    settings = _read(content)
    kind = str(settings.pop("kind", None))
    module, _, name = kind.rpartition(".")
    known = {stage.__name__: stage for stage in SCHEMAS[group].values()}
    if not module and kind not in known:
        raise ValueError(f"{group}.kind={kind}: expected one of {', '.join(known)}")
    if "suggested" in settings:
        settings["suggested"] = Suggested(**{key: x for key, x in settings["suggested"].items() if key != "kind"})
    try:
        return (own_stage(group, module, name) if module else known[kind])(**settings)
    except TypeError as error:
        raise ValueError(f"{group} has settings that {kind} can't have ({error})") from error


def _read(value: Any) -> Any:
    """A value as the run had it: config.yaml has words for numbers that JSON has none for."""
    if isinstance(value, dict):
        return {key: _read(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_read(item) for item in value]
    return float(value) if value in NOT_FINITE else value


def _evaluated_every(settings: Mapping[str, Any], size: int) -> int:
    times, batch = settings["evaluation"], settings["batch_size"]
    steps = steps_of(SCHEMES[settings["privacy"]["sampler"]], size, batch, settings["epochs"])
    return int(evaluated_every(times["every_steps"], times["every_epochs"], float(batch) / size, steps))
