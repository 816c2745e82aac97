"""Pictures of their own files, made fit to stand within a page beside others."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from collections.abc import Mapping
from pathlib import Path

from markupsafe import Markup

from dpbench.report.compact_svg import LINK, WITHIN
from dpbench.report.compact_svg import SVG as NAMESPACE
from dpbench.report.shared_styles import rules_of

SVG = f"{{{NAMESPACE}}}"
# What only draws. Scripts, styles that would hold for the whole page, pages within the picture and metadata stay out.
DRAWS = {
    "svg", "g", "defs", "symbol", "use", "path", "rect", "circle", "ellipse", "line", "polyline", "polygon", "text",
    "tspan", "title", "desc", "clipPath", "marker", "pattern", "linearGradient", "radialGradient", "stop",
}  # fmt: skip
LENGTH = re.compile(r"(?P<number>\d+(\.\d+)?)(px|pt|in|cm|mm)?")
ELSEWHERE = re.compile(r"url\((?!#)[^)]*\)|@import|javascript:", re.IGNORECASE)


def inline_svg(path: Path, prefix: str, label: str) -> Markup | None:
    """A picture as an <svg> element; None where there is no such file, or it is no SVG.

    Args:
        path: the file.
        prefix: goes before all ids, so that those of several pictures differ.
        label: what the picture shows, for those who don't see it.
    """
    try:
        root = ET.fromstring(path.read_bytes())
    except (OSError, ET.ParseError):
        return None
    if root.tag != f"{SVG}svg":
        return None
    _clean(root, prefix, rules_of("".join(sheet.text or "" for sheet in root.iter(f"{SVG}style"))))
    # The rule of matplotlib's style sheet, which is left out.
    attributes = {"role": "img", "aria-label": label, "stroke-linejoin": "round", "stroke-linecap": "butt"}
    width, height = (LENGTH.fullmatch(root.attrib.pop(side, "")) for side in ("width", "height"))
    if width is not None and height is not None:
        root.attrib.setdefault("viewBox", f"0 0 {width['number']} {height['number']}")
        attributes["style"] = f"max-width:{width[0]}"  # shrinks where there is less room, never grows
    root.attrib |= attributes
    for element in root.iter():
        element.tag = element.tag.removeprefix(SVG)
    return Markup(ET.tostring(root, encoding="unicode"))


def _clean(element: ET.Element, prefix: str, rules: Mapping[str, str]) -> None:
    for name, value in list(element.attrib.items()):
        del element.attrib[name]
        if name == "class":  # whose rules hold in that file alone
            if value not in rules:
                continue
            name, value = "style", rules[value]
        name, value = ("href" if name == LINK else name), WITHIN.sub(rf"url(#{prefix}\1)", value)
        foreign = name == "href" and not value.startswith("#")
        if "}" in name or name.lower().startswith(("on", "aria-")) or foreign or ELSEWHERE.search(value):
            continue
        if name == "id":
            value = prefix + value
        elif name == "href":
            value = f"#{prefix}{value[1:]}"
        element.attrib[name] = value
    for child in list(element):
        if isinstance(child.tag, str) and child.tag.removeprefix(SVG) in DRAWS and child.tag.startswith(SVG):
            _clean(child, prefix, rules)
        else:
            element.remove(child)
