"""Labels are text that has the length of its letters in the font of the layout."""

import io
import re
import xml.etree.ElementTree as ET
from itertools import pairwise
from pathlib import Path

import matplotlib as mpl
import pytest
from fontTools.ttLib import TTFont
from matplotlib.figure import Figure

from dpbench.report.compact_svg import compact
from dpbench.report.svg_text import settled

SVG = "{http://www.w3.org/2000/svg}"
FONTS = Path(mpl.get_data_path()) / "fonts" / "ttf"


def texts(svg):
    """The texts of a picture by what they say."""
    return {"".join(text.itertext()): text for text in ET.fromstring(svg).iter(f"{SVG}text")}


@pytest.fixture(scope="module")
def picture():
    with mpl.rc_context({"svg.fonttype": "none", "font.family": "DejaVu Sans", "font.size": 7.5}):
        figure = Figure(figsize=(3, 2))
        axes = figure.add_subplot()
        axes.plot([1, 2], [0.1, 100])
        axes.set_yscale("log")
        axes.set_ylabel("DP-SGD")
        axes.set_title("Average & Variance", weight="bold", size=8)
        drawn = io.BytesIO()
        figure.savefig(drawn, format="svg")
    return drawn.getvalue()


def advance(text, name, size):
    """The sum of the advances and kernings that the font file has, in points."""
    font = TTFont(FONTS / f"{name}.ttf")
    glyphs = [font.getBestCmap()[ord(letter)] for letter in text]
    kerned = font["kern"].kernTables[0].kernTable
    units = sum(font["hmtx"][glyph][0] for glyph in glyphs) + sum(kerned.get(pair, 0) for pair in pairwise(glyphs))
    return units * size / font["head"].unitsPerEm


@pytest.mark.parametrize(
    ("text", "font", "size"),
    [("1.0", "DejaVuSans", 7.5), ("DP-SGD", "DejaVuSans", 7.5), ("Average & Variance", "DejaVuSans-Bold", 8)],
)
def test_a_text_has_the_length_that_it_has_in_the_font(picture, text, font, size):
    found = texts(settled(picture))[text]
    assert float(found.get("textLength")) == pytest.approx(advance(text, font, size), abs=0.01)
    assert found.get("lengthAdjust") == "spacingAndGlyphs"


def test_the_font_is_named_once(picture):
    root = ET.fromstring(settled(picture))
    assert root.get("font-family") == "DejaVu Sans, Verdana, sans-serif"
    assert not [element for element in root.iter() if "font-family" in element.get("style", "")]


def test_signs_of_a_formula_keep_their_places(picture):
    before, after = power(picture), power(settled(picture))
    assert [sign.get("x") for sign in after] == [sign.get("x") for sign in before] != []
    assert after.get("textLength") is None


def power(svg):
    """The text of a tick at 10²."""
    return next(text for said, text in texts(svg).items() if re.sub(r"\s", "", said) == "102")


def test_only_what_is_turned_is_turned(picture):
    turned = {text: found.get("transform") for text, found in texts(settled(picture)).items()}
    assert turned["DP-SGD"].startswith("rotate(-90 ")
    assert turned["1.0"] is None


def test_a_settled_picture_is_made_compact_and_stays_so(picture):
    small = compact(settled(picture))
    assert compact(small) == small
    assert texts(small)["DP-SGD"].get("textLength") == texts(settled(picture))["DP-SGD"].get("textLength")
