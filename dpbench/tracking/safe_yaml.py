"""YAML of records, whoever wrote it."""

from __future__ import annotations

import sys
from typing import Any

import yaml

# The one that is written in C is ten times as fast, where PyYAML was built with it.
SafeLoader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

# Settings lie in groups of groups; some thousand levels would end the interpreter without an error.
MOST_LEVELS = 50


class _RecordLoader(SafeLoader):  # type: ignore[misc, valid-type]  # yaml has no types
    """Refuses whole numbers larger than any float: Python writes none of some thousand digits."""

    def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
        number: int = super().construct_yaml_int(node)
        if abs(number) > sys.float_info.max:
            raise ValueError("a number that is too large")
        return number


_RecordLoader.add_constructor("tag:yaml.org,2002:int", _RecordLoader.construct_yaml_int)


def parse_yaml(text: str) -> Any:
    """Plain values.

    Raises:
        ValueError: it is no YAML, refers within itself, which may make a few lines endless, is nested too deep, or has
            whole numbers beyond those of a float.
    """
    level = 0
    try:
        for event in yaml.parse(text, Loader=SafeLoader):
            level += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if level > MOST_LEVELS or isinstance(event, yaml.AliasEvent):
                raise ValueError("no settings: nested too deep, or referring within itself")
        return yaml.load(text, Loader=_RecordLoader)  # a subclass of SafeLoader
    except yaml.YAMLError as error:
        raise ValueError("no YAML") from error
