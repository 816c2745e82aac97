"""What the papers claim, and what the records say about it. Reads files and records, imports nothing of training.

A file conf/paper/<paper>/<artefact>.yaml is one table or figure; docs/own_claims.md has its keys. A computed number
(`metric: computed`) has settings of what computes it for overrides (`dpbench.computed`), and is looked up in
<results_dir>/computed/<paper>/<artefact>.json by its place in words, such as "data MNIST, delta here".
"""

from dpbench.claims.evidence import Evidence, Measured, Run
from dpbench.claims.finding import Finding, Lack, Outcome
from dpbench.claims.load import load_all, load_artefact
from dpbench.claims.needs import cost
from dpbench.claims.schema import SECTIONS, Artefact, Cell, Claim, Kind
from dpbench.claims.scorecard import JudgedCell, Judgement, Scorecard, examine

__all__ = [
    "SECTIONS",
    "Artefact",
    "Cell",
    "Claim",
    "Evidence",
    "Finding",
    "JudgedCell",
    "Judgement",
    "Kind",
    "Lack",
    "Measured",
    "Outcome",
    "Run",
    "Scorecard",
    "cost",
    "examine",
    "load_all",
    "load_artefact",
]
