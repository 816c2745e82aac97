"""How long a run will take, from a few of its own steps on made-up data."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

from dpbench.config.identity import plain
from dpbench.config.schema import RunConfig
from dpbench.devices import choose_device, fastest_seconds, prepare_device
from dpbench.models import PretrainedModel
from dpbench.noise import ConstantNoise
from dpbench.privacy import Ledger, Plan, Release
from dpbench.training.assemble import assemble
from dpbench.training.micro_batch import blank

TIMED_STEPS = 3
# Enough samples to keep the device busy; larger batches scale from here.
MOST_SAMPLES = 256


# What the time of a step depends on, but for the values of real numbers among it.
COSTLY = ("query", "clip", "threshold", "filter", "optim", "augmentation", "model", "dataset", "averaging")
ALSO = ("device", "micro_batch", "precision", "channels_last", "record_coordinates", "shard_states")

# Seconds of a step by its kind, in this process.
_timed: dict[str, float] = {}


def seconds_of_training(config: RunConfig) -> float:
    """Estimated seconds of all steps on this device, evaluations left out; runs with equal steps are timed once."""
    size = min(config.batch_size, MOST_SAMPLES)
    stages = [_without_reals(plain(getattr(config, name))) for name in COSTLY]
    kind = json.dumps([size, stages, [getattr(config, name) for name in ALSO], _noise_multiplier(config)])
    if kind not in _timed:
        _timed[kind] = seconds_of_step(config, size)
    return _timed[kind] * config.steps * config.batch_size / size


def _without_reals(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_reals(item) for key, item in value.items() if not isinstance(item, float)}
    return value


def _noise_multiplier(config: RunConfig) -> float:
    """1, for the size of the noise makes no step longer; 0 where eps is inf, since a clip may then have no bound."""
    return 0.0 if math.isinf(config.eps) else 1.0


def seconds_of_step(config: RunConfig, size: int) -> float:
    """Seconds of a step with `size` samples on this device, the fastest of a few.

    Noise is drawn anew for each step: what correlated noise takes besides is left out.
    """
    device = choose_device(config.device)
    prepare_device(device)
    multiplier = _noise_multiplier(config)
    release = Release(config.sampling_rate, multiplier, config.threshold.beside)
    ledger = Ledger(Plan.of([release] * (1 + TIMED_STEPS)), eps=1.0, delta=0.5, accountant="rdp")
    model = config.model
    if isinstance(model, PretrainedModel):  # random weights take as long, and need not be here
        model = replace(model, pretrained=None)
    parts = assemble(replace(config, model=model, noise=ConstantNoise()), device, multiplier, ledger)
    inputs, targets = blank(config, size, device)

    def step() -> None:
        parts.step(zip(inputs.split(parts.micro_batch), targets.split(parts.micro_batch), strict=True))

    return fastest_seconds([step], device, TIMED_STEPS)[0]
