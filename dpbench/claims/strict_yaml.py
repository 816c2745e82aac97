"""YAML in which a key stands once; PyYAML takes the last of several."""

from __future__ import annotations

from collections.abc import Hashable
from pathlib import Path
from typing import Any

import yaml
from typing_extensions import override

from dpbench.errors import UserError
from dpbench.tracking.safe_yaml import SafeLoader


class _StrictLoader(SafeLoader):  # type: ignore[misc]  # yaml has no types
    @override
    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen = set()
        for key, _ in node.value:
            if key.value in seen:
                raise UserError("expected each key once", field=f"line {key.start_mark.line + 1}", value=key.value)
            seen.add(key.value)
        return dict(super().construct_mapping(node, deep))


def read_yaml(path: Path) -> Any:
    """The content of a YAML file.

    Raises:
        UserError: it is no YAML, or a key stands twice.
    """
    try:
        return yaml.load(path.read_text(), Loader=_StrictLoader)  # a subclass of SafeLoader
    except yaml.YAMLError as error:
        raise UserError(f"expected YAML; {error}", field="file", value=path.name) from error
