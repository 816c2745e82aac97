"""Methods' pages on the page of results: equations as MathML, Markdown as HTML that fits there."""

import re
import xml.etree.ElementTree as ET

import pytest

from dpbench.config import conf_folder
from dpbench.report.mathml import UnknownTex, mathml
from dpbench.report.method_pages import method_pages

DOCS = conf_folder().parent / "docs" / "methods"
EQUATION = re.compile(r"```math\n(.*?)```", re.DOTALL)


def cell(tex: str) -> str:
    """The MathML of an expression, without the table around it."""
    return re.fullmatch(r"<math[^>]*><mtable[^>]*><mtr><mtd>(.*)</mtd></mtr></mtable></math>", mathml(tex))[1]


@pytest.mark.parametrize(
    ("tex", "expected"),
    [
        (r"\theta", "<mi>θ</mi>"),
        ("x_i", "<msub><mi>x</mi><mi>i</mi></msub>"),
        ("b^2", "<msup><mi>b</mi><mn>2</mn></msup>"),
        ("b_t^{10}", "<msubsup><mi>b</mi><mi>t</mi><mn>10</mn></msubsup>"),
        ("b^2_t", "<msubsup><mi>b</mi><mi>t</mi><mn>2</mn></msubsup>"),
        ("0.95", "<mn>0.95</mn>"),
        ("k'", "<msup><mi>k</mi><mo>′</mo></msup>"),
        (r"\frac{1}{B}", "<mfrac><mn>1</mn><mi>B</mi></mfrac>"),
        (r"\tfrac12", '<mstyle displaystyle="false"><mfrac><mn>1</mn><mn>2</mn></mfrac></mstyle>'),
        (r"\sum_{k}^n", "<munderover><mo>∑</mo><mi>k</mi><mi>n</mi></munderover>"),
        (r"\sum_k", "<munder><mo>∑</mo><mi>k</mi></munder>"),
        (r"\sqrt{x}", "<msqrt><mi>x</mi></msqrt>"),
        (r"\mathrm{clip}_C", '<msub><mi mathvariant="normal">clip</mi><mi>C</mi></msub>'),
        (r"\text{a < b}", "<mtext>a\N{NO-BREAK SPACE}&lt;\N{NO-BREAK SPACE}b</mtext>"),
        (r"\mathcal N", "<mi>𝒩</mi>"),
        (r"\qquad", '<mspace width="2em"/>'),
        (
            r"\binom{2k}{k}",
            '<mrow><mo>(</mo><mfrac linethickness="0"><mrow><mn>2</mn><mi>k</mi></mrow><mi>k</mi></mfrac>'
            "<mo>)</mo></mrow>",
        ),
    ],
)
def test_what_the_equations_are_made_of(tex, expected):
    assert cell(tex) == expected


def test_lines_and_their_sides_become_rows_and_cells():
    found = mathml("\\begin{aligned}\na &= 1 \\\\\nb &= 2\n\\end{aligned}\n")
    rows = ET.fromstring(found).findall("./mtable/mtr")
    assert [["".join(side.itertext()) for side in row] for row in rows] == [["a", "=1"], ["b", "=2"]]


@pytest.mark.parametrize("tex", [r"\unheard x", "{x", "x}", r"\frac{1}", r"\mathcal Q", "x_"])
def test_what_is_not_understood_is_refused(tex):
    with pytest.raises(UnknownTex):
        mathml(tex)


def test_every_equation_of_the_methods_is_understood_and_loses_nothing():
    """All letters and digits of the source that are not commands or sizes are there, in their order but for limits."""
    for path in sorted(DOCS.glob("*.md")):
        for tex in EQUATION.findall(path.read_text()):
            shown = "".join(ET.fromstring(mathml(tex)).itertext())
            plain = re.sub(r"\\(begin|end)\{aligned\}|\\(?!text\b|mathrm\b)[a-zA-Z]+|\\text\b|\\mathrm\b", " ", tex)
            for letter in "abcdefghijklmnopqrstuvwxyz0123456789":
                names = "".join(re.findall(r"\\(arg|exp|log|max|min)(?![a-zA-Z])", tex))
                # An indicator's 1 is a letter of its own.
                expected = (plain + names).count(letter) - (letter == "1") * tex.count(r"\mathbb 1")
                assert shown.count(letter) == expected, (path.name, letter)


def test_a_page_becomes_html_below_a_title_of_its_own(tmp_path):
    (tmp_path / "README.md").write_text("# Index")
    (tmp_path / "mine.md").write_text(
        "# Mine\n\n<!-- generated -->\n\n## Step\n\n```math\nx_i &= 1\n```\n\n```math\n\\unheard < 1\n```\n\n"
        "[other](other.md), <b>bold</b>, `a<b`\n\n| a | b |\n| --- | --- |\n| 1 | m_{t-1} |\n"
    )
    (page,) = method_pages(tmp_path)
    assert (page.name, page.title) == ("mine", "Mine")
    assert "<h4>Step</h4>" in page.body
    assert "<math " in page.body
    assert "<code>\\unheard &lt; 1\n</code>" in page.body
    assert '<a href="#method-other">other</a>' in page.body
    assert '<th scope="col">a</th>' in page.body
    assert "<td>m_{t-1}</td>" in page.body
    assert "<code>a&lt;b</code>" in page.body
    assert "generated" not in page.body
    assert "<b>" not in page.body


def test_no_folder_has_no_pages(tmp_path):
    assert method_pages(tmp_path / "none") == ()
