"""What the papers claim, and what the records say about it. Reads files and records, imports nothing of training."""

from dpbench.claims.evidence import Evidence, Measured
from dpbench.claims.load import load_all, load_artefact
from dpbench.claims.needs import cost, needs_of
from dpbench.claims.schema import PAPERS, Artefact, Cell, Kind
from dpbench.claims.scorecard import Scorecard, judge, score
from dpbench.claims.verdict import Finding, Outcome

__all__ = [
    "PAPERS",
    "Artefact",
    "Cell",
    "Evidence",
    "Finding",
    "Kind",
    "Measured",
    "Outcome",
    "Scorecard",
    "cost",
    "judge",
    "load_all",
    "load_artefact",
    "needs_of",
    "score",
]
