"""Labels of a picture as text, which can be searched and copied, and which takes the same room everywhere."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET

from matplotlib.font_manager import FontProperties
from matplotlib.textpath import text_to_path

from dpbench.report.compact_svg import SVG

# What the picture is laid out with, and what those see who lack it: the next of that width that many systems have.
FONT = "DejaVu Sans"
FAMILIES = f"{FONT}, Verdana, sans-serif"
OWN_FAMILY = re.compile(r"; font-family: [^;]*")
UPRIGHT = re.compile(r"rotate\(-?0 [^)]*\)")
SIZE = re.compile(r"font-size: ([\d.]+)px")
WEIGHT = re.compile(r"font-weight: (\d+)")


def settled(svg: bytes) -> bytes:
    """The picture with its font named once and with each text's length in that font.

    In another font a text's letters become wider or narrower, but labels do not run into each other.

    Args:
        svg: as matplotlib writes it with `svg.fonttype` none.
    """
    root = ET.fromstring(svg)
    root.attrib["font-family"] = FAMILIES
    for text in root.iter(f"{{{SVG}}}text"):
        if text.text and text.text.strip():  # else a formula, each of whose signs has its own place
            text.attrib["textLength"] = f"{_length(text.text, text.attrib['style']):.2f}"
            text.attrib["lengthAdjust"] = "spacingAndGlyphs"
        if UPRIGHT.fullmatch(text.attrib.get("transform", "")):
            del text.attrib["transform"]
        for element in text.iter():
            if "style" in element.attrib:
                element.attrib["style"] = OWN_FAMILY.sub("", element.attrib["style"])
    return ET.tostring(root)


def _length(text: str, style: str) -> float:
    sizes, weights = SIZE.findall(style), WEIGHT.findall(style)
    font = FontProperties(family=FONT, size=float(sizes[0]), weight=int(weights[0]) if weights else 400)
    return float(text_to_path.get_text_width_height_descent(text, font, ismath=False)[0])
