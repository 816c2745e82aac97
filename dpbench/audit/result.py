"""What an audit found."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

CONSISTENT, VIOLATES = "consistent with the claim", "violates the claim"


@dataclass(frozen=True)
class Finding:
    """What one attack shows.

    Attributes:
        attack: its name.
        attacked: what was attacked, in words.
        delta: at which eps is meant.
        risk: probability with which a lower bound may exceed the truth.
        claimed_eps: what the ledger says that the attacked releases spend.
        eps_at_least: lower bound on what they do spend.
        violated: whether more was shown than is claimed.
        details: what else there is to say of it, by name.
    """

    attack: str
    attacked: str
    delta: float
    risk: float
    claimed_eps: float
    eps_at_least: float
    violated: bool
    details: dict[str, Any]


@dataclass(frozen=True)
class Audit:
    """What all attacks show together.

    Attributes:
        confidence: with which all lower bounds hold at once.
        findings: one per attack.
    """

    confidence: float
    findings: tuple[Finding, ...]

    @property
    def violated(self) -> bool:
        """Whether any attack showed more than is claimed."""
        return any(finding.violated for finding in self.findings)

    @property
    def verdict(self) -> str:
        """The verdict in words."""
        return VIOLATES if self.violated else CONSISTENT

    def as_dict(self) -> dict[str, Any]:
        """The content of audit.json."""
        findings = [asdict(finding) for finding in self.findings]
        return {"verdict": self.verdict, "confidence": self.confidence, "findings": findings}
