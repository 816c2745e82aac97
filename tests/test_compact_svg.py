"""A compact picture draws what the picture drew."""

import io
import re
import xml.etree.ElementTree as ET

import matplotlib as mpl
import numpy as np
import pytest
from fontTools.pens.recordingPen import RecordingPen
from fontTools.svgLib.path import parse_path
from matplotlib.figure import Figure

from dpbench.report.compact_svg import LINK, compact, relative
from dpbench.report.shared_styles import rules_of, share_styles

DRAWN = ("path", "use", "rect", "text")
NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e-?\d+)?")


def picture():
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "x"}):
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


def outline(path):
    """What fontTools, which reads all of SVG's paths, draws of one: commands with points."""
    pen = RecordingPen()
    parse_path(path, pen)
    return pen.value


def marks(svg):
    """What each drawing element draws: its kind, numbers and style, and that of what it refers to."""
    root = ET.fromstring(svg)
    by_id = {element.get("id"): element for element in root.iter() if element.get("id")}
    rules = re.findall(r"\.(\w+)\s*\{([^}]*)\}", "".join(root.itertext()))
    for element in root.iter():
        for name, rule in rules:
            if element.get("class") == name:
                assert "style" not in element.attrib
                element.set("style", rule)

    def numbers(element):
        shown = element.attrib
        text = " ".join(shown.get(key, "") for key in ("x", "y", "width", "height", "transform"))
        places = [place for _, points in outline(shown.get("d", "")) for point in points for place in point]
        return [*places, *(float(number) for number in NUMBER.findall(text))]

    def walk(element, at, inherited=""):
        own = [*at, *numbers(element)] if element.tag.endswith("}g") else at
        inherited = element.get("style", inherited)
        if element.tag.rpartition("}")[2] in DRAWN:
            target = by_id[element.get(LINK)[1:]] if element.get(LINK) else None
            style = inherited if target is None else target.get("style", inherited)
            yield (
                element.tag,
                element.text and element.text.strip(),
                re.sub(r"url\(#[^)]*\)", "url", style.replace(" ", "")),
                element.get("clip-path") is None,
                [*own, *numbers(element)],
                [] if target is None else numbers(target),
            )
        for child in element:
            yield from walk(child, own, inherited)

    return list(walk(root, []))


def test_a_compact_picture_has_the_same_marks_in_the_same_places():
    original = picture()
    small = compact(original)
    one, other = marks(original), marks(small)
    assert len(one) == len(other) > 40
    for before, after in zip(one, other, strict=True):
        assert before[:4] == after[:4]
        for numbers in (4, 5):
            assert after[numbers] == pytest.approx(before[numbers], abs=0.0051)


def test_a_compact_picture_is_smaller_and_keeps_its_description():
    original = picture()
    small = compact(original)
    assert len(small) < 0.7 * len(original)
    assert b"0123abcd" in small[:1500]
    assert b"<!--" not in small
    assert compact(small) == small


def test_a_style_of_many_marks_is_said_once():
    small = compact(picture()).decode()
    styles = [style for style in re.findall(r' style="([^"]*)"', small) if "url" not in style]
    assert len(styles) == len(set(styles))
    names = [name for name, _ in re.findall(r"\.(\w+)\{([^}]*)\}", small)]
    assert len(names) == len(set(names)) > 3
    used = re.findall(r' class="([^"]*)"', small)
    assert set(used) == set(names)
    assert all(used.count(name) > 1 for name in names)


@pytest.mark.parametrize("style", ["fill:red}*{display:none", "fill:&lt;/style&gt;", "fill:url(&amp;x)"])
def test_a_style_that_could_leave_its_rule_stays_with_its_marks(style):
    picture = f'<svg><path style="{style}"/><path style="{style}"/></svg>'
    assert share_styles([picture], "s") == ([picture], "")


def test_pictures_share_the_styles_that_occur_in_any_of_them():
    one = '<path style="fill:red"/><path style="fill:blue"/><path style="fill:red"/>'
    other = '<path style="fill:blue"/><path style="fill:green"/>'
    pictures, rules = share_styles([one, other], "x")
    assert pictures == [
        '<path class="x0"/><path class="x1"/><path class="x0"/>',
        '<path class="x1"/><path style="fill:green"/>',
    ]
    assert rules_of(rules) == {"x0": "fill:red", "x1": "fill:blue"}


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


@pytest.mark.parametrize("seed", range(20))
def test_steps_lead_to_the_same_places(seed):
    rng = np.random.default_rng(seed)
    words, grid = ["M 3 4"], np.array([-3.0, -0.5, 0.0, 0.01, 0.25, 7.0, 120.125, 3000.0])
    for _ in range(30):
        command = rng.choice(["M", "L", "L", "Q", "C", "z"])
        count = {"M": 1, "L": 1, "Q": 2, "C": 3, "z": 0}[command]
        if command == "z" and words[-1] == "z":
            continue
        words.append(" ".join([command, *(f"{number:.6g}" for number in rng.choice(grid, 2 * count))]))
    path = " ".join(words)
    short = relative(path)
    before, after = outline(path), outline(short)
    assert [command for command, _ in after] == [command for command, _ in before]
    for (_, one), (_, other) in zip(before, after, strict=True):
        assert np.array(other) == pytest.approx(np.array(one), abs=0.0051)


@pytest.mark.parametrize("path", ["m1 1 2 2h5", "M 1 1 A 5 5 0 0 1 2 2", ""])
def test_a_path_with_other_commands_stays(path):
    assert relative(path) == path


def test_a_group_has_the_style_that_all_in_it_have():
    svg = """<svg xmlns="http://www.w3.org/2000/svg"><g transform="scale(2)">
      <defs><path d="M 0 0" style="fill: red"/></defs><path d="M 1 1" style="fill: blue"/>{}</g></svg>"""

    def styles(second):
        root = ET.fromstring(compact(svg.format(second).encode()))
        return [
            (element.tag.rpartition("}")[2], element.get("style")) for element in root.iter() if element.get("style")
        ]

    inside = ("path", "fill:red")
    assert styles('<path d="M 2 2" style="fill: blue"/>') == [("g", "fill:blue"), inside]
    assert styles('<path d="M 2 2" style="fill: green"/>') == [inside, ("path", "fill:blue"), ("path", "fill:green")]
    assert styles('<path d="M 2 2"/>') == [inside, ("path", "fill:blue")]
    see_through = svg.replace("fill: blue", "opacity: 0.5")
    root = ET.fromstring(compact(see_through.format('<path d="M 2 2" style="opacity: 0.5"/>').encode()))
    assert [element.get("style") for element in root.iter() if element.tag.endswith("g")] == [None, None]


def test_a_use_leaves_its_style_to_what_it_shows_where_that_says_the_same():
    svg = """<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink">
      <defs><path id="a" d="M 0 0" style="{}"/></defs><use xlink:href="#a" style="{}"/></svg>"""

    def style(path, use):
        root = ET.fromstring(compact(svg.format(path, use).encode()))
        return next(root.iter("{http://www.w3.org/2000/svg}use")).get("style")

    assert style("fill: red", "fill: red") is None
    assert style("fill: red", "fill: blue") == "fill:blue"
    assert style("opacity: 0.5", "opacity: 0.5") == "opacity:0.5"
