"""Attacks on the real private step that bound from below how much it reveals: `python -m dpbench.audit`."""

from dpbench.audit.attacks import audit
from dpbench.audit.result import Audit, Finding
from dpbench.audit.settings import AuditSettings

__all__ = ["Audit", "AuditSettings", "Finding", "audit"]
