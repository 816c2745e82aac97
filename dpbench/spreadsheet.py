"""Cells of CSV files, which people open in spreadsheets."""

from __future__ import annotations

import re

NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)(e[-+]?\d+)?|[-+]?(inf|nan)", re.IGNORECASE)


def as_text(cell: str) -> str:
    """A cell that a spreadsheet takes for a text or a number, never for a formula that it carries out."""
    formula = cell.startswith(("=", "+", "-", "@", "\t", "\r")) and not NUMBER.fullmatch(cell)
    return f"'{cell}" if formula else cell
