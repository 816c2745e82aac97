"""What a page says that is read from the composed configuration, the stages' docstrings and the stages themselves."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

import torch
import yaml
from torch import Tensor

from dpbench.config import Job, conf_folder
from dpbench.config.compose import REFERENCE
from dpbench.config.own import contracts
from dpbench.errors import show
from dpbench.step import STAGES as OF_STEP
from dpbench.training.assemble import assemble
from dpbench.training.budget import budget, guarantee_of, open_ledger

STAGES = (*OF_STEP, "optim")
NOT_A_STAGE = {"algo", "dataset", "model", "tracker"}
ATTRIBUTE = re.compile(r"^    (\w+): (.*(?:\n {8,}.*)*)", re.MULTILINE)


@dataclass(frozen=True)
class Setting:
    """A field of a stage: how it is typed on the command line, its default, and what its docstring says of it."""

    typed: str
    default: str
    meaning: str


@dataclass(frozen=True)
class StageFacts:
    """A stage of an algorithm.

    Attributes:
        group: of the configuration.
        option: chosen in it.
        kind: class name.
        text: what its docstring says, and those of the classes it extends.
        settings: its fields.
    """

    group: str
    option: str
    kind: str
    text: str
    settings: list[Setting]


def stages(job: Job, default: Job) -> list[StageFacts]:
    """The five stages with the threshold, and other groups in which an algorithm departs from the default run."""
    others = [g for g in job.choices if g not in NOT_A_STAGE.union(STAGES) and job.choices[g] != default.choices[g]]
    return [_stage(job, group) for group in (*STAGES, *others)]


def _stage(job: Job, group: str) -> StageFacts:
    stage, option = getattr(job.config, group), job.choices[group]
    # The contract of a group says what is asked of a stage, not what this one does.
    ancestry = [kind for kind in type(stage).__mro__ if issubclass(kind, contracts()[group])]
    own = [kind for kind in ancestry if kind is not contracts()[group]] or ancestry
    meanings: dict[str, str] = {}
    for kind in reversed(ancestry):
        meanings.update(_split(kind)[1])
    raw = yaml.safe_load((conf_folder() / group / f"{option}.yaml").read_text())
    settings = [
        Setting(
            _typed(job, f"{group}.{field.name}", raw.get(field.name)),
            _shown(getattr(stage, field.name)),
            meanings.get(field.name, ""),
        )
        for field in fields(stage)
    ]
    text = "\n\n".join(filter(None, (_split(kind)[0] for kind in own)))
    return StageFacts(group, option, type(stage).__name__, text, settings)


def _typed(job: Job, key: str, raw: Any) -> str:
    """The setting that a user types: algo.kappa where the stage takes its value from there."""
    source = REFERENCE.fullmatch(raw) if isinstance(raw, str) else None
    if source is None or not source["key"].startswith("algo."):
        return key
    return source["key"] if source["key"].removeprefix("algo.") in job.config.algo else key


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(_shown(item) for item in value)}]"
    if isinstance(value, float) and float(show(value)) != value:
        return repr(value)  # so that what is shown can be typed
    return show(value)


def _split(kind: type) -> tuple[str, dict[str, str]]:
    """A docstring's text, and what it says of each attribute."""
    written = vars(kind).get("__doc__") or ""
    if written.startswith(f"{kind.__name__}("):  # made by @dataclass
        return "", {}
    text, _, attributes = inspect.cleandoc(written).partition("\n\nAttributes:\n")
    return text, {name: " ".join(meaning.split()) for name, meaning in ATTRIBUTE.findall(attributes)}


def guarantee(job: Job) -> str:
    """What the run with the default settings promises, in words."""
    return guarantee_of(job.config, budget(job.config))


def memory(job: Job) -> dict[str, float]:
    """What each stage remembers at the end of a run, in vectors of the parameters' length d.

    Counted in the states of real steps of a whole run, on empty batches, so that no data are read; how much noise they
    add changes nothing.
    """
    config = job.config
    step = assemble(config, torch.device("cpu"), 1.0, open_ledger(config, 1.0)).step
    for _ in range(config.steps):
        step([])
    state, length = step.state_dict(), len(step.gradients.flat)
    named = {name: name for name in STAGES} | {"optim": "optimizer"}
    found = {group: sum(tensor.numel() for tensor in _tensors(state[name])) for group, name in named.items()}
    return {group: round(count / length, 1) for group, count in found.items()}


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)
