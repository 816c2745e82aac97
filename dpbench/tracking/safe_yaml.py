"""YAML of records, whoever wrote it."""

from __future__ import annotations

from typing import Any

import yaml

# The one that is written in C is ten times as fast, where PyYAML was built with it.
SafeLoader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
# Settings lie in groups of groups; some thousand levels would end the interpreter without an error.
MOST_LEVELS = 50


def parse_yaml(text: str) -> Any:
    """Plain values.

    Raises:
        ValueError: it is no YAML, refers within itself, which may make a few lines endless, or is nested too deep.
    """
    level = 0
    try:
        for event in yaml.parse(text, Loader=SafeLoader):
            level += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if level > MOST_LEVELS or isinstance(event, yaml.AliasEvent):
                raise ValueError("no settings: nested too deep, or referring within itself")
        return yaml.load(text, Loader=SafeLoader)
    except yaml.YAMLError as error:
        raise ValueError("no YAML") from error
