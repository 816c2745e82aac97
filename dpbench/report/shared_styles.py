"""Styles that many marks of pictures have, said once in a style sheet."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

# What could end its rule or the sheet stays where it is, and so does what refers to an element.
STYLE = re.compile(r' style="([^"{}<&()]*)"')
RULE = re.compile(r"\.([\w-]+)\{([^{}]*)\}")


def share_styles(pictures: Sequence[str], prefix: str) -> tuple[list[str], str]:
    """The pictures with classes in place of the styles that occur more than once, and the rules of these classes.

    Args:
        pictures: SVG elements as text.
        prefix: begins the name of each class; those that are there must not begin with it.
    """
    counts = Counter(style for picture in pictures for style in STYLE.findall(picture))
    often = [style for style, count in counts.items() if count > 1]
    names = {style: f"{prefix}{i}" for i, style in enumerate(often)}

    def named(match: re.Match[str]) -> str:
        name = names.get(match[1])
        return match[0] if name is None else f' class="{name}"'

    rules = "".join(f".{name}{{{style}}}" for style, name in names.items())
    return [STYLE.sub(named, picture) for picture in pictures], rules


def rules_of(sheet: str) -> dict[str, str]:
    """What the classes of a style sheet say, by their names."""
    return dict(RULE.findall(sheet))
