"""What decides how long a run takes and what it reads, from the options named in its overrides alone.

A plan asks this of hundreds of kinds of runs. Data set, model and query are made of their own files here; everything
else that matters is a number that was typed.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from functools import cache as remembered
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from dpbench.claims.notation import Candidate, Overrides
from dpbench.config import compose_each
from dpbench.config.identity import plain
from dpbench.config.registry import SCHEMAS
from dpbench.config.rules import evaluated_every
from dpbench.config.schema import RunConfig
from dpbench.data import Dataset
from dpbench.models import Model, PretrainedModel
from dpbench.query import Query
from dpbench.reproduction.options import chosen_by, own_settings, read_option, schema_of


@dataclass(frozen=True)
class Facts:
    """What is known of a run before it is composed.

    Attributes:
        dataset: its declaration.
        model: its settings.
        query: which gradients a step asks for.
        batch_size: expected.
        steps: that it takes, for a sampler of any kind, to rounding.
        evaluations: of the test split.
        copies: views of a sample.
    """

    dataset: Dataset
    model: Model
    query: Query
    batch_size: int
    steps: int
    evaluations: int
    copies: int

    @property
    def samples(self) -> float:
        """Gradients of samples in a step: batch size, points and views."""
        return float(self.batch_size * self.query.most_points * self.copies)

    @property
    def weights(self) -> str | None:
        """Where the model's weights come from; None for random ones."""
        return self.model.pretrained if isinstance(self.model, PretrainedModel) else None

    @cached_property
    def kind(self) -> str:
        """What the time of a sample's gradient depends on."""
        return kind_of(plain(self.dataset), plain(self.model), plain(self.query), self.copies)


def kind_of(dataset: Any, model: Any, query: Any, copies: int) -> str:
    """A text that tells kinds of gradients apart, from plain values; images or rows of one size take one time."""
    shape = [dataset[name] for name in _shape_names(dataset)]
    points = {name: value for name, value in query.items() if not isinstance(value, float)}  # but for their weights
    return json.dumps([shape, model, points, copies], sort_keys=True)


def _shape_names(dataset: Any) -> tuple[str, ...]:
    if "height" in dataset:
        return ("channels", "height", "width", "classes")
    return ("features", "classes") if "features" in dataset else ("name", "max_length", "classes")


def facts_of(overrides: Overrides, config_dirs: tuple[Path, ...] = ()) -> Facts:
    """The facts of a candidate.

    Args:
        overrides: its own.
        config_dirs: further folders searched for options.

    Raises:
        UserError: its options don't exist or don't go together.
    """
    try:
        dataset, model = _made(("dataset", "model"), _below(overrides, ("dataset", "model")))
        (query,) = _made(("query",), _below(overrides, ("algo", "query")))
    except (KeyError, OSError, OmegaConfBaseException, yaml.YAMLError):  # files elsewhere, or of another form than ours
        return _composed(tuple(f"{key}={value}" for key, value in overrides.items()), config_dirs)
    batch_size = int(overrides.get("batch_size", dataset.suggested.batch_size))
    rate = batch_size / dataset.trained_on
    steps = math.ceil(float(overrides.get("epochs", dataset.suggested.epochs)) / rate)
    every_steps = overrides.get("evaluation.every_steps", "null")
    every_epochs = overrides.get("evaluation.every_epochs", "1")
    every = evaluated_every(
        None if every_steps == "null" else int(every_steps),
        None if every_epochs == "null" else float(every_epochs),
        rate,
        steps,
    )
    copies = int(overrides.get("augmentation.copies", 1))
    return Facts(dataset, model, query, batch_size, steps, math.ceil(steps / every), copies)


def _below(overrides: Overrides, groups: tuple[str, ...]) -> tuple[tuple[str, str], ...]:
    return tuple(sorted((key, value) for key, value in overrides.items() if key.partition(".")[0] in groups))


@remembered
def _made(groups: tuple[str, ...], settings: tuple[tuple[str, str], ...]) -> list[Any]:
    """Stages from the files of their options; KeyError and the like where those are not of the usual form."""
    overrides = dict(settings)
    algo = read_option("algo", overrides["algo"]) if "algo" in overrides else {}
    tree = OmegaConf.create({"algo": algo.get("algo", {})})
    for group in groups:
        option = overrides.get(group) or (chosen_by(algo, group) or "one_point" if group == "query" else "")
        content = read_option(group, option)
        schema = OmegaConf.structured(SCHEMAS[group][schema_of(content, group)])
        tree[group] = OmegaConf.unsafe_merge(schema, own_settings(content, group))
    for key, value in settings:
        if "." in key:
            OmegaConf.update(tree, key, yaml.safe_load(value), merge=True)
    return [OmegaConf.to_object(tree[group]) for group in groups]


@remembered
def _composed(candidate: Candidate, config_dirs: tuple[Path, ...]) -> Facts:
    return facts_of_run(compose_each([candidate], config_dirs)[0].config)


def facts_of_run(config: RunConfig) -> Facts:
    """The facts of a run that is composed."""
    return Facts(
        config.dataset,
        config.model,
        config.query,
        config.batch_size,
        config.steps,
        math.ceil(config.steps / config.evaluate_every),
        config.augmentation.copies,
    )
