"""A compact picture draws what the picture drew."""

import io
import re
import xml.etree.ElementTree as ET

import matplotlib as mpl
import pytest
from matplotlib.figure import Figure

from dpbench.report.compact_svg import LINK, compact

DRAWN = ("path", "use", "rect")
NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e-?\d+)?")


def picture():
    with mpl.rc_context({"svg.fonttype": "path", "svg.hashsalt": "x"}):
        figure = Figure(figsize=(4, 3))
        axes = figure.add_subplot()
        axes.plot([0.123456, 1.234567, 2.7], [-3.3333, 0.1, 2.2222], marker="o", label="a curve − with a legend")
        axes.bar([0, 1], [1.11111, 2.22222], hatch="//")
        axes.set_title("Title & more")
        axes.set_ylabel("rotated")
        axes.legend()
        drawn = io.BytesIO()
        figure.savefig(drawn, format="svg", metadata={"Description": "0123abcd", "Date": None})
    return drawn.getvalue()


def marks(svg):
    """What each drawing element draws: its kind, numbers and style, and that of what it refers to."""
    root = ET.fromstring(svg)
    by_id = {element.get("id"): element for element in root.iter() if element.get("id")}

    def numbers(element):
        shown = dict(element.attrib)
        shift = re.fullmatch(r"translate\((\S+)[ ,]0\)", shown.get("transform", ""))
        if shift and element.tag.endswith("use"):  # the same as a position
            shown |= {"x": shift[1], "transform": ""}
        text = " ".join(shown.get(key, "") for key in ("d", "x", "y", "width", "height", "transform"))
        return [float(number) for number in NUMBER.findall(text)]

    def walk(element, at):
        own = [*at, *numbers(element)] if element.tag.endswith("}g") else at
        if element.tag.rpartition("}")[2] in DRAWN:
            target = by_id[element.get(LINK)[1:]] if element.get(LINK) else None
            style = re.sub(r"url\(#[^)]*\)", "url", element.get("style", "").replace(" ", ""))
            yield (
                element.tag,
                style,
                element.get("clip-path") is None,
                [*own, *numbers(element)],
                [] if target is None else numbers(target),
            )
        for child in element:
            yield from walk(child, own)

    return list(walk(root, []))


def test_a_compact_picture_has_the_same_marks_in_the_same_places():
    original = picture()
    small = compact(original)
    one, other = marks(original), marks(small)
    assert len(one) == len(other) > 50
    for before, after in zip(one, other, strict=True):
        assert before[:3] == after[:3]
        for numbers in (3, 4):
            assert after[numbers] == pytest.approx(before[numbers], abs=0.0051)


def test_a_compact_picture_is_smaller_and_keeps_its_description():
    original = picture()
    small = compact(original)
    assert len(small) < 0.8 * len(original)
    assert b"0123abcd" in small[:1500]
    assert b"<!--" not in small
    assert compact(small) == small


def test_references_of_a_compact_picture_lead_somewhere():
    root = ET.fromstring(compact(picture()))
    ids = [element.get("id") for element in root.iter() if element.get("id")]
    used = set()
    for element in root.iter():
        used |= {value[1:] for key, value in element.attrib.items() if key == LINK}
        used |= {name for value in element.attrib.values() for name in re.findall(r"url\(#([^)]+)\)", value)}
    assert len(ids) == len(set(ids))
    assert used == set(ids)
    assert any("url" in element.get("style", "") for element in root.iter())  # a hatch
