"""A folder of claims, and records made up for what they say, by which they are judged."""

import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path

from dpbench.claims import Artefact, Evidence, Finding, examine, load_artefact

FILE = """
title: Made up
kind: trained
source: made_up.md 5
seeds: 3
common: dataset=digits
rows:
  method:
    new: algo=disk
    old: algo=dpsgd
    gain:
columns:
  eps:
    1: eps=1
    8: eps=8
values: |
  method | 1          | 8
  new    | 60 ± 0.3   | 70 ± 3
  old    | 55         | 69.5
  gain   | 5          | 0.5
where:
  - {method: gain, minus: {method: [new, old]}, unit: points}
needs:
  weights: some-model
  hours: [2, 4]
  source: made_up.md 4
claims: CLAIMS
"""
ABOVE = "{says: better, higher: {method: new}, lower: {method: old}%s}"
BELOW = "{says: worse, higher: {method: old}, lower: {method: new}%s}"
# The runs of both methods at eps 1.
NEW, OLD = "dataset=digits algo=disk eps=1", "dataset=digits algo=dpsgd eps=1"


def digest(overrides: Sequence[str]) -> str:
    return hashlib.sha256(" ".join(sorted(overrides)).encode()).hexdigest()[:12]


def search(text: str) -> str:
    """The same file with a search over two learning rates in its first row."""
    return text.replace("new: algo=disk", "new: algo=disk optim.lr=1,2")


class World:
    """A results folder, and files of claims about it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.results = folder / "results"
        self.evidence = Evidence(self.results, digest)

    def artefact(self, *claims: str, change: Callable[[str], str] = lambda text: text) -> Artefact:
        path = self.folder / "adp" / "made_up.yaml"
        path.parent.mkdir(exist_ok=True)
        path.write_text(change(FILE.replace("CLAIMS", f"[{', '.join(claims)}]")))
        return load_artefact(path)

    def run(self, overrides: str, seed: int, accuracy: float, status: str = "finished", **summary: object) -> Path:
        """The record of a run: accuracy at its end in per cent, with a best that is one point above it."""
        folder = self.results / "runs" / digest(overrides.split()) / str(seed)
        folder.mkdir(parents=True)
        entry = {"final": accuracy / 100, "best": (accuracy + 1) / 100, "best_step": 1}
        (folder / "summary.json").write_text(
            json.dumps({"test_accuracy": entry, "eps": 0.999, "target_eps": 1.0, **summary})
        )
        (folder / "status.json").write_text(json.dumps({"status": status}))
        return folder

    def runs(self, overrides: str, *accuracies: float, **summary: object) -> None:
        for seed, accuracy in enumerate(accuracies):
            self.run(overrides, seed, accuracy, **summary)

    def values(self, *accuracies: float, change: Callable[[str], str] = lambda text: text) -> Finding:
        """The verdict on "new" at eps 1, printed as 60, where its runs came to these accuracies."""
        self.runs("dataset=digits algo=disk eps=1", *accuracies)
        return examine(self.artefact(change=change), self.evidence).findings[0]

    def order(self, claim: str, new: Sequence[Sequence[float]], old: Sequence[Sequence[float]]) -> Finding:
        """The verdict on a claim, where the runs of both methods at eps 1 and 8 came to these accuracies."""
        for algo, found in (("disk", new), ("dpsgd", old)):
            for eps, accuracies in zip((1, 8), found, strict=True):
                self.runs(f"dataset=digits algo={algo} eps={eps}", *accuracies)
        return examine(self.artefact(claim), self.evidence).findings[-1]
