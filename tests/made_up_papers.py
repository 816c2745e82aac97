"""A folder of claims about runs of seconds, and records made up for them."""

import json
from pathlib import Path

import yaml

from dpbench.claims import Artefact, Cell, load_all
from dpbench.config import Job, config_hash, resolved
from dpbench.files import jsonable

TABLE = """
title: Made up
kind: trained
source: made_up.md 5
seeds: 2
common: >-
  dataset=digits model=linear batch_size=64 epochs=0.2 privacy=poisson privacy.accountant=rdp optim.lr=0.5
rows:
  method:
    new: algo=disk
    old: algo=dpsgd
columns:
  eps:
    2: eps=2
    8: eps=8
values: |
  method | 2  | 8
  new    | 60 | 70
  old    | 55 | 69.5
"""
SEARCH = """
title: The best of three
kind: trained
source: made_up.md 6
seeds: 2
common: >-
  dataset=digits model=linear batch_size=64 epochs=0.2 privacy=poisson privacy.accountant=rdp
rows:
  method:
    new: algo=disk optim.lr=0.1,0.5,1
columns:
  eps:
    2: eps=2.0
values: |
  method | 2
  new    | 60
"""


def claims(folder: Path, **files: str) -> Path:
    """A folder of claims with these files of the paper "adp"."""
    (folder / "claims" / "adp").mkdir(parents=True, exist_ok=True)
    for name, text in (files or {"table_1": TABLE, "table_2": SEARCH}).items():
        (folder / "claims" / "adp" / f"{name}.yaml").write_text(text)
    return folder / "claims"


def loaded(folder: Path, **files: str) -> tuple[Artefact, ...]:
    return load_all(claims(folder, **files), ["adp"])


def only_cell(artefacts: tuple[Artefact, ...]) -> Cell:
    ((cell,),) = [artefact.cells for artefact in artefacts]
    return cell


def record(results: Path, job: Job, seed: int, accuracy: float = 0.6, status: str = "finished", **summary) -> Path:
    """The record of a run, without the run."""
    folder = results / "runs" / config_hash(job.config) / str(seed)
    folder.mkdir(parents=True, exist_ok=True)
    settings = jsonable({**resolved(job.config), "choices": job.choices, "overrides": list(job.overrides)})
    (folder / "config.yaml").write_text(yaml.safe_dump(settings, sort_keys=False))
    entry = {"final": accuracy, "best": accuracy, "best_step": 1}
    content = {"test_accuracy": entry, "eps": job.config.eps, "target_eps": job.config.eps, "steps": 100, **summary}
    (folder / "summary.json").write_text(json.dumps(jsonable(content)))
    (folder / "status.json").write_text(json.dumps({"status": status}))
    return folder
