"""Equations of the methods' pages as MathML, which browsers show without scripts.

The subset of LaTeX that docs/methods/source uses. What is not in it is refused, so that nothing is shown wrong. The
library latex2mathml (3.81) lets unknown commands through, has no ``aligned``, and writes script letters as a
``mathvariant`` that browsers no longer follow.
"""

from __future__ import annotations

import re
from html import escape

TEXT = re.compile(r"\\(?P<kind>text|mathrm)\{(?P<text>[^{}]*)\}")
TOKEN = re.compile(r"\\(?:text|mathrm)\{[^{}]*\}|\\[a-zA-Z]+|\\.|[^\s\\]")

GREEK = {
    "alpha": "α", "beta": "β", "gamma": "γ", "delta": "δ", "zeta": "ζ", "eta": "η", "theta": "θ", "kappa": "κ",
    "lambda": "λ", "mu": "μ", "nu": "ν", "xi": "ξ", "rho": "ρ", "sigma": "σ", "tau": "τ", "phi": "φ",
}  # fmt: skip
OPERATORS = {
    "in": "∈", "sim": "∼", "le": "≤", "ge": "≥", "nabla": "∇", "top": "⊤", "cdot": "·", "dots": "…", "times": "×",
    "lVert": "‖", "rVert": "‖",
}  # fmt: skip
FUNCTIONS = ("arg", "exp", "log", "max", "min")
# Those whose index stands below them in a displayed equation.
WITH_LIMITS = ("arg", "max", "min")
SPACES = {",": "0.17em", ";": "0.28em", " ": "0.3em", "quad": "1em", "qquad": "2em"}
SIZES = {"big": "1.2em", "Big": "1.8em"}
SCRIPT = {"B": "ℬ", "D": "𝒟", "N": "𝒩"}
BLACKBOARD = {"1": "𝟙", "E": "𝔼", "R": "ℝ"}


class UnknownTex(ValueError):
    """A command that is not in the subset, or brackets that don't match."""


def mathml(tex: str) -> str:
    """An equation as a <math> element: an ``aligned`` environment, or a single line.

    Raises:
        UnknownTex: it is not in the subset.
    """
    body = re.sub(r"\\(begin|end)\{aligned\}", "", tex).strip()
    rows = "".join(
        f"<mtr>{''.join(f'<mtd>{_Parser(cell).whole()}</mtd>' for cell in _split(line, '&'))}</mtr>"
        for line in _split(body, r"\\")
    )
    return f'<math display="block"><mtable displaystyle="true">{rows}</mtable></math>'


def _split(text: str, mark: str) -> list[str]:
    return [part.strip() for part in text.split(mark)]


class _Parser:
    def __init__(self, tex: str) -> None:
        self.tokens = TOKEN.findall(tex)
        self.raw = tex
        self.place = 0

    def whole(self) -> str:
        found = self._row(closing=None)
        if self.place < len(self.tokens):
            raise UnknownTex(f"a bracket too many in {self.raw}")
        return found

    def _peek(self) -> str | None:
        return self.tokens[self.place] if self.place < len(self.tokens) else None

    def _next(self) -> str:
        token = self._peek()
        if token is None:
            raise UnknownTex(f"{self.raw} ends too early")
        self.place += 1
        return token

    def _row(self, closing: str | None) -> str:
        """Elements until a closing bracket or the end, as one <mrow>."""
        found: list[str] = []
        while (token := self._peek()) is not None and token != "}":
            if token == r"\textstyle":  # for all that follows
                self.place += 1
                return f"<mrow>{''.join(found)}<mstyle displaystyle='false'>{self._row(closing)}</mstyle></mrow>"
            found.append(self._scripted())
        if closing is not None and self._peek() != closing:
            raise UnknownTex(f"a bracket is missing in {self.raw}")
        return found[0] if len(found) == 1 else f"<mrow>{''.join(found)}</mrow>"

    def _scripted(self) -> str:
        """An element with its index and exponent."""
        first = self._peek()
        base = self._number() if first is not None and first.isdigit() else self._atom()
        scripts: dict[str, str] = {}
        while self._peek() in ("_", "^", "'"):
            mark = self._next()
            scripts["^" if mark == "'" else mark] = "<mo>′</mo>" if mark == "'" else self._atom()
        if not scripts:
            return base
        limits = first in (r"\sum", *(f"\\{name}" for name in WITH_LIMITS))
        kinds = ("munder", "mover", "munderover") if limits else ("msub", "msup", "msubsup")
        kind = kinds[2 if len(scripts) == 2 else int("^" in scripts)]
        return f"<{kind}>{base}{''.join(scripts[mark] for mark in '_^' if mark in scripts)}</{kind}>"

    def _number(self) -> str:
        digits = self._next()
        while (token := self._peek()) is not None and (token.isdigit() or token == "."):
            digits += self._next()
        return f"<mn>{digits}</mn>"

    def _atom(self) -> str:
        token = self._next()
        if token == "{":
            row = self._row(closing="}")
            self.place += 1
            return row
        if (found := TEXT.fullmatch(token)) is not None:
            return _upright(found["kind"], found["text"])
        if token.startswith("\\"):
            return self._command(token[1:])
        if token.isdigit():
            return f"<mn>{token}</mn>"
        if token.isalpha():
            return f"<mi>{token}</mi>"
        # Brackets keep their size unless \big says otherwise.
        return f'<mo stretchy="false">{escape({"-": "−"}.get(token, token))}</mo>'

    def _command(self, name: str) -> str:
        if name in GREEK:
            return f"<mi>{GREEK[name]}</mi>"
        if name in OPERATORS:
            return f'<mo stretchy="false">{OPERATORS[name]}</mo>'
        if name in FUNCTIONS:
            return f'<mo lspace="0" rspace="0.17em">{name}</mo>'
        if name in SPACES:
            return f'<mspace width="{SPACES[name]}"/>'
        if name in SIZES:
            return _bracket(self._next(), SIZES[name])
        if name in ("{", "}"):
            return f'<mo stretchy="false">{name}</mo>'
        match name:
            case "sum":
                return "<mo>∑</mo>"
            case "frac":
                return f"<mfrac>{self._atom()}{self._atom()}</mfrac>"
            case "tfrac":
                return f'<mstyle displaystyle="false"><mfrac>{self._atom()}{self._atom()}</mfrac></mstyle>'
            case "binom":
                pair = f'<mfrac linethickness="0">{self._atom()}{self._atom()}</mfrac>'
                return f"<mrow><mo>(</mo>{pair}<mo>)</mo></mrow>"
            case "sqrt":
                return f"<msqrt>{self._atom()}</msqrt>"
            case "hat":
                return f"<mover accent='true'>{self._atom()}<mo>^</mo></mover>"
            case "mathcal":
                return f"<mi>{self._letter(SCRIPT)}</mi>"
            case "mathbb":
                return f"<mi>{self._letter(BLACKBOARD)}</mi>"
        raise UnknownTex(f"\\{name} is not known")

    def _letter(self, alphabet: dict[str, str]) -> str:
        letter = self._next()
        if letter not in alphabet:
            raise UnknownTex(f"{letter} is not in the alphabet asked for")
        return alphabet[letter]


def _bracket(sign: str, size: str) -> str:
    """A bracket of a size; in a row that is not only an operator, or exponents would keep it from growing."""
    spaces = 'lspace="0" rspace="0"'
    operator = f'<mo stretchy="true" symmetric="true" minsize="{size}" maxsize="{size}" {spaces}>{escape(sign)}</mo>'
    return f"<mrow><mi></mi>{operator}</mrow>"


def _upright(kind: str, text: str) -> str:
    """Words, upright; only in ``text`` do their spaces count."""
    if kind == "mathrm":
        return f'<mi mathvariant="normal">{escape(text)}</mi>'
    return f"<mtext>{escape(text).replace(' ', chr(0xA0))}</mtext>"
