"""The pages of docs/methods as HTML, to stand on a page with others."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from pathlib import Path

from markdown_it import MarkdownIt
from markdown_it.token import Token
from markupsafe import Markup

from dpbench.report.mathml import UnknownTex, mathml

INDEX = "README.md"
# A title of a page is a title of the third order where pages stand together.
DEEPER = 2


@dataclass(frozen=True)
class MethodPage:
    """The page of a method.

    Attributes:
        name: of the algorithm, as in algo=<name>.
        title: of the page.
        body: HTML without the title.
    """

    name: str
    title: str
    body: Markup


def method_pages(folder: Path) -> tuple[MethodPage, ...]:
    """The pages in a folder by name; none where there is no such folder."""
    return tuple(_page(path) for path in sorted(folder.glob("*.md")) if path.name != INDEX)


def _page(path: Path) -> MethodPage:
    markdown = MarkdownIt("commonmark").enable("table")
    # Comments and whatever else is HTML of its own has no place here.
    tokens = [token for token in markdown.parse(path.read_text()) if token.type != "html_block"]
    title = path.stem
    if len(tokens) > 2 and tokens[0].type == "heading_open":
        title, tokens = tokens[1].content, tokens[3:]
    pieces = [_adapted(token, path.stem) for token in tokens]
    body = markdown.renderer.render(pieces, markdown.options, {})
    return MethodPage(path.stem, title, Markup(body))


def _adapted(token: Token, name: str) -> Token:
    match token.type:
        case "heading_open" | "heading_close":
            token.tag = f"h{int(token.tag[1]) + DEEPER}"
        case "th_open":
            token.attrSet("scope", "col")
        case "table_open":
            return _html('<div class="scroll" tabindex="0" role="group" aria-label="' + escape(name) + '"><table>\n')
        case "table_close":
            return _html("</table></div>\n")
        case "fence" if token.info.strip() == "math":
            return _html(_equation(token.content))
        case "inline":
            token.children = [_linked(child) for child in token.children or [] if child.type != "html_inline"]
    return token


def _linked(token: Token) -> Token:
    """Links between pages become links within the page."""
    target = token.attrGet("href") if token.type == "link_open" else None
    if isinstance(target, str) and target.endswith(".md") and "/" not in target:
        token.attrSet("href", f"#method-{target.removesuffix('.md')}")
    return token


def _equation(tex: str) -> str:
    """As MathML; as it is written where that is not possible, which is legible, too."""
    try:
        shown = mathml(tex)
    except UnknownTex:
        return f"<pre><code>{escape(tex)}</code></pre>\n"
    return f'<div class="scroll" tabindex="0" role="group" aria-label="equation">{shown}</div>\n'


def _html(content: str) -> Token:
    return Token("html_block", "", 0, content=content)
