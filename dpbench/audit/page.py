"""The result of an audit, to be read by a person."""

from __future__ import annotations

import math

from rich.console import Console
from rich.text import Text

from dpbench.audit.result import CONSISTENT, VIOLATES, Audit, Finding
from dpbench.console import new_table

COLUMNS = ("attack", "attacked", "claimed eps", "shown eps", "claimed mu", "shown mu", "what it says")
# Of its sensitivity, what a canary reaches where clipping only rounds.
WHOLE = 0.99
LEFT = ("attack", "attacked", "what it says")


def print_audit(audit: Audit, console: Console) -> None:
    """Print all findings, what they mean, and the verdict."""
    table = new_table()
    for column in COLUMNS:
        table.add_column(column, justify="left" if column in LEFT else "right", overflow="fold")
    for finding in audit.findings:
        table.add_row(*_cells(finding))
    console.print(table)
    delta = audit.findings[0].delta
    console.print(
        f"\nshown: lower bounds, all of which hold together with {100 * audit.confidence:g} % confidence; eps at "
        f"delta={delta:.3g}\nmu: standard deviations of the noise by which one sample moves a release"
    )
    if unseen := audit.findings[0].details.get("unseen"):
        names = " and ".join(unseen)
        console.print(
            f"No attack sees what is released beside each gradient ({names}): it has a share in what is claimed, and "
            "too little noise in it goes unnoticed"
        )
    for finding in audit.findings:
        for line in _notes(finding):
            console.print(f"{finding.attack}, {finding.attacked}: {line}")
    console.print(f"\n{audit.verdict}", style="bold red" if audit.violated else "bold green")


def _cells(finding: Finding) -> list[str | Text]:
    mus = [finding.details.get(name) for name in ("claimed_mu", "mu_at_least")]
    says = Text(VIOLATES, "red") if finding.violated else Text(CONSISTENT)
    eps = [f"{finding.claimed_eps:.3f}", f">= {finding.eps_at_least:.3f}"]
    return [
        finding.attack,
        finding.attacked,
        *eps,
        *("" if mu is None else f"{mark}{mu:.3f}" for mark, mu in zip(("", ">= "), mus, strict=True)),
        says,
    ]


def _notes(finding: Finding) -> list[str]:
    """What the numbers of an attack can't tell."""
    notes = []
    factor = finding.details.get("notices_noise_too_small_by")
    if factor is not None and math.isinf(factor):
        notes.append("not even a hundredth of the noise would be noticed; more runs of the step (audit.runs) would")
    elif factor is not None:
        notes.append(f"noise too small by a factor of {factor:.2f} would be noticed in about half of all audits")
    reach = finding.details.get("reach", 1.0)
    if reach < WHOLE:
        notes.append(
            f"the canary reaches {100 * reach:.0f} % of the threshold, so no larger share of mu can be shown by it"
        )
    most = finding.details.get("most_that_could_be_shown")
    if most is not None and most < finding.claimed_eps:
        notes.append(
            f"with all guesses right it would show eps >= {most:.3f}, so it can't refute this claim; it could at a "
            "smaller eps or delta"
        )
    return notes
