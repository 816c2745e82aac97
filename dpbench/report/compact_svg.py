"""Pictures in fewer bytes, drawn alike to a hundredth of a point."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET

from dpbench.report.shared_styles import share_styles

SVG = "http://www.w3.org/2000/svg"
XLINK = "http://www.w3.org/1999/xlink"
LINK = f"{{{XLINK}}}href"
CLASSES = "s"
NAMESPACES = {
    "": SVG,
    "xlink": XLINK,
    "cc": "http://creativecommons.org/ns#",
    "dc": "http://purl.org/dc/elements/1.1/",
    "rdf": "http://www.w3.org/1999/02/22-rdf-syntax-ns#",
}
WITHIN = re.compile(r"url\(#([^)]+)\)")
LONG = re.compile(r"-?\d+\.\d{3,}")
PLACE = re.compile(r"(translate|rotate)\([^)]*\)")
POSITIONS = ("x", "y", "cx", "cy", "points")
TOKEN = re.compile(r"[A-Za-z]|-?\d+(?:\.\d+)?(?:e-?\d+)?")
# Numbers that a command of a path takes.
TAKES = {"M": 2, "L": 2, "Q": 4, "C": 6, "z": 0}
OPACITY = re.compile(r"(^|;)opacity:")


def compact(svg: bytes) -> bytes:
    """The same picture without comments, spaces, names that nothing refers to and digits that nobody sees.

    Styles that occur more than once go into its style sheet, if it has one.

    Args:
        svg: as matplotlib writes it.
    """
    for prefix, address in NAMESPACES.items():
        ET.register_namespace(prefix, address)
    root = ET.fromstring(svg)
    values = [(key, value) for element in root.iter() for key, value in element.attrib.items()]
    used = [name for key, value in values for name in ([value[1:]] if key == LINK else WITHIN.findall(value))]
    short = {name: f"i{i}" for i, name in enumerate(dict.fromkeys(used))}
    for element in root.iter():
        if element.tag != f"{{{SVG}}}style":
            _shorten(element, short)
    _inherit(root)
    _unwrap(root)
    _gather(root)
    text = ET.tostring(root, encoding="unicode")
    (shared,), rules = share_styles([text], CLASSES)
    small = shared.replace("</style>", f"{rules}</style>", 1) if "</style>" in text else text
    return small.encode("ascii", "xmlcharrefreplace")


def _shorten(element: ET.Element, short: dict[str, str]) -> None:
    element.text = element.text if (element.text or "").strip() else None
    element.tail = element.tail if (element.tail or "").strip() else None
    for key, value in list(element.attrib.items()):
        if key == "id":
            del element.attrib[key]
            if value in short:
                element.attrib[key] = short[value]
        elif key == LINK:
            element.attrib[key] = f"#{short[value[1:]]}"
        elif key == "d":
            element.attrib[key] = relative(value)
        elif key in POSITIONS:
            element.attrib[key] = " ".join(LONG.sub(_rounded, value).split())
        elif key == "transform":  # scales keep their digits
            element.attrib[key] = PLACE.sub(lambda match: LONG.sub(_rounded, match[0]), value)
        else:
            value = value.replace(": ", ":").replace("; ", ";") if key == "style" else value
            element.attrib[key] = WITHIN.sub(lambda match: f"url(#{short[match[1]]})", value)


def _rounded(match: re.Match[str]) -> str:
    return f"{round(float(match[0]), 2) + 0.0:g}"  # no -0


def relative(path: str) -> str:
    """The same path with steps in place of places, in hundredths; as it is where it has other commands.

    Args:
        path: the `d` of a path, in absolute places.
    """
    tokens = TOKEN.findall(path)
    if not {token for token in tokens if token.isalpha()} <= TAKES.keys():
        return path
    x = y = 0
    start, before, text, at = (0, 0), "", "", 0
    while at < len(tokens):
        command, at = tokens[at], at + 1
        numbers = [round(100 * float(token)) for token in tokens[at : at + TAKES[command]]]
        at += len(numbers)
        if command == "z":
            (x, y), before, text = start, "z", text + "z"
            continue
        steps = [number - (y if i % 2 else x) for i, number in enumerate(numbers)]
        x, y = numbers[-2:]
        letter = command.lower()
        if command == "M":
            start, letter = (x, y), "m" if text else "M"
        elif command == "L" and 0 in steps:
            letter, steps = ("h", steps[:1]) if steps[1] == 0 else ("v", steps[1:])
        text += "" if letter == before and letter not in "Mm" else letter
        for step in steps:
            text += (" " if text[-1].isdigit() and step >= 0 else "") + _hundredths(step)
        before = letter
    return text


def _hundredths(number: int) -> str:
    digits = f"{abs(number) / 100:.2f}".rstrip("0").rstrip(".")
    return ("-" if number < 0 else "") + (digits.removeprefix("0") or "0")


def _inherit(root: ET.Element) -> None:
    """Take from uses the style that what they show has itself."""
    own = {f"#{element.get('id')}": element.get("style") for element in root.iter() if "id" in element.attrib}
    for use in root.iter(f"{{{SVG}}}use"):
        style = use.get("style")
        if style and style == own[use.attrib[LINK]] and not OPACITY.search(style):  # which would hold twice
            del use.attrib["style"]


def _gather(element: ET.Element) -> None:
    """Put the style that all in a group have on the group, of which they inherit it."""
    for child in element:
        _gather(child)
    drawn = [child for child in element if child.tag != f"{{{SVG}}}defs"]
    styles = {child.attrib.get("style", "") for child in drawn}
    if element.tag == f"{{{SVG}}}g" and len(drawn) > 1 and len(styles) == 1 and "style" not in element.attrib:
        (style,) = styles
        if style and not OPACITY.search(style):  # which a group has as a whole
            element.attrib["style"] = style
            for child in drawn:
                del child.attrib["style"]


def _unwrap(element: ET.Element) -> None:
    """Put what is in groups that say nothing in their place."""
    for child in element:
        _unwrap(child)
    children: list[ET.Element] = []
    for child in element:
        bare = child.tag == f"{{{SVG}}}g" and not child.attrib
        children += list(child) if bare else [child]
    element[:] = children
