"""How long runs take on this device: from records where there are any of their kind, else from their arithmetic."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import nn

from dpbench import cache
from dpbench.config import compose_each
from dpbench.config.identity import plain
from dpbench.devices import ROWS_ON_CPU, choose_device, describe
from dpbench.models import PretrainedModel
from dpbench.reproduction.facts import Facts, kind_of
from dpbench.tracking.published import device_kind
from dpbench.tracking.reading import Recorded
from dpbench.tracking.status import WITH_RESULT

# A forward and a backward pass cost so many times what a forward pass does.
PASSES = 3
# What a run takes besides steps and evaluations: reading data, checking gradients, calibrating noise.
SECONDS_TO_START = 3.0
# The steps whose times tell a device's speed: one that is all overhead, and one that is mostly arithmetic.
SMALL = ("dataset=digits", "model=linear", "algo=dpsgd", "batch_size=64")
LARGE = ("dataset=mnist", "model=cnn5", "algo=dpsgd", "batch_size=128")
# Seconds for which a measured speed is believed: other work may have had the processor meanwhile.
SPEED_LASTS = 3600.0


class Basis(IntEnum):
    """What an estimate rests on, the best first."""

    RECORDS = 0
    OTHER_BATCHES = 1
    OTHER_THREADS = 2
    ARITHMETIC = 3

    def in_words(self) -> str:
        """For a plan."""
        records = ("records of such runs", "records of other batch sizes", "records of other thread counts")
        return (*records, "arithmetic")[self]


@dataclass(frozen=True)
class Speed:
    """Of a device.

    Attributes:
        flops: floating-point operations of private gradients in a second.
        overhead: seconds of a micro-batch besides them.
    """

    flops: float
    overhead: float


class Timed(NamedTuple):
    """A step of a record.

    Attributes:
        size: expected batch size.
        seconds: that it took.
        here: on as many threads as this process has, or the same GPU.
    """

    size: int
    seconds: float
    here: bool


class Times:
    """Estimates the seconds of a run on one device.

    Args:
        device: its name, as of `dpbench.run`.
    """

    def __init__(self, device: str) -> None:
        self._device = choose_device(device)
        self._name = describe(self._device)
        self._steps: dict[str, list[Timed]] = defaultdict(list)
        self._estimates: dict[tuple[str, int], tuple[float, Basis]] = {}
        self._flops: dict[str, float] = {}
        self._learnt: set[Path] = set()
        self._speed: Speed | None = None

    def learn(self, folder: Path, settings: Mapping[str, Any]) -> None:
        """Learn from the record of a run that ended on this device, or on a CPU with another number of threads.

        One that was interrupted has taken few steps, the first of which may have waited for a compiler.

        Args:
            folder: of the run.
            settings: its own, as `RecordIndex` holds them.
        """
        if folder in self._learnt:
            return
        record = Recorded.read(folder)
        origin, steps = record.provenance, record.summary.get("steps") or 0
        wall, size = float(origin.get("wall_seconds") or 0), settings.get("batch_size")
        device = str(origin.get("device"))
        if record.status not in WITH_RESULT or device_kind(device) != device_kind(self._name):
            return
        if not (0 < wall < math.inf and steps > 0 and isinstance(size, int) and size > 0):
            return
        try:
            kind = _recorded_kind(settings)
        except KeyError:  # settings of another kind than ours
            return
        self._learnt.add(folder)
        seconds = wall / max(1, origin.get("seeds_at_once", 1)) / steps
        self._steps[kind].append(Timed(size, seconds, device == self._name))
        self._estimates.clear()

    def seconds(self, facts: Facts) -> tuple[float, Basis]:
        """Seconds of a whole run, and what the estimate rests on."""
        step, basis = self.seconds_of_step(facts)
        seconds = SECONDS_TO_START + facts.steps * step
        if basis == Basis.ARITHMETIC:  # a recorded time has them in it
            seconds += facts.evaluations * facts.dataset.test_size * self._forward(facts) / self.speed.flops
        return seconds, basis

    def seconds_of_step(self, facts: Facts) -> tuple[float, Basis]:
        """Seconds of one of its steps, and what the estimate rests on."""
        kind = (facts.kind, facts.batch_size)
        if kind not in self._estimates:
            self._estimates[kind] = self._estimated(facts)
        return self._estimates[kind]

    def _estimated(self, facts: Facts) -> tuple[float, Basis]:
        timed = self._steps.get(facts.kind, [])
        here = [one for one in timed if one.here]
        if here:
            seconds, same = _of_steps(here, facts.batch_size)
            return seconds, Basis.RECORDS if same else Basis.OTHER_BATCHES
        if timed:  # more threads are not that much faster for most models, and operation counts tell less
            return _of_steps(timed, facts.batch_size)[0], Basis.OTHER_THREADS
        arithmetic = PASSES * facts.samples * self._forward(facts) / self.speed.flops
        parts = math.ceil(facts.samples / ROWS_ON_CPU) if self._device.type == "cpu" else 1
        return parts * self.speed.overhead + arithmetic, Basis.ARITHMETIC

    def _forward(self, facts: Facts) -> float:
        if facts.kind not in self._flops:
            self._flops[facts.kind] = forward_flops(facts)
        return self._flops[facts.kind]

    @property
    def speed(self) -> Speed:
        """Of the device, measured when the last time is an hour ago or more; takes about a second."""
        if self._speed is None:
            key = [self._name, torch.__version__, "measured at"]
            known = cache.read("speed", key)
            if known is not None and 0 <= time.time() - known[2] < SPEED_LASTS:
                self._speed = Speed(*known[:2])
            else:
                self._speed = self._measured()
                cache.write("speed", key, [self._speed.flops, self._speed.overhead, time.time()])
        return self._speed

    def _measured(self) -> Speed:
        from dpbench.training.estimate import seconds_of_step  # takes seconds, which most plans have no use for

        lines = [(*line, f"device={self._device}") for line in (SMALL, LARGE)]
        small, large = (job.config for job in compose_each(lines))
        overhead = seconds_of_step(small, small.batch_size)
        seconds = seconds_of_step(large, large.batch_size)
        facts = Facts(large.dataset, large.model, large.query, large.batch_size, 1, 1, 1)
        return Speed(PASSES * facts.samples * forward_flops(facts) / max(seconds - overhead, 1e-6), overhead)


def _of_steps(timed: Sequence[Timed], size: int) -> tuple[float, bool]:
    """Seconds of a step with batches of a size, and whether any of these has that size."""
    same = [one.seconds for one in timed if one.size == size]
    if same:
        return median(same), True
    # In proportion, from the nearest batch size; smaller batches are no faster by their overhead.
    nearest = min(timed, key=lambda one: abs(math.log(one.size / size)))
    return nearest.seconds * size / nearest.size, False


def forward_flops(facts: Facts) -> float:
    """Floating-point operations of one sample's forward pass, counted on no device and cached."""
    model, dataset = facts.model, facts.dataset
    if isinstance(model, PretrainedModel):
        model = replace(model, pretrained=None)
    key = [plain(model), list(dataset.sample_shape), dataset.classes]
    known = cache.read("flops", key)
    if known is None:
        known = _counted(replace(facts, model=model))
        cache.write("flops", key, known)
    return float(known)


def _counted(facts: Facts) -> float:
    from torch.utils.flop_counter import FlopCounterMode  # brings a compiler, for which most commands have no use

    nowhere = torch.device("meta")
    with torch.random.fork_rng(devices=[]), torch.no_grad(), nowhere:
        net = facts.model.build(facts.dataset).eval()
        inputs, _ = facts.dataset.blank(1, nowhere)
        if not inputs.is_floating_point():  # a text, whose models look at it, and use each weight once a token
            tables = [layer for layer in net.modules() if isinstance(layer, nn.Embedding)]
            looked_up = {id(weight) for table in tables for weight in table.parameters()}
            return 2.0 * inputs.shape[1] * sum(w.numel() for w in net.parameters() if id(w) not in looked_up)
        counter = FlopCounterMode(display=False)
        with counter:
            net(inputs)
    return float(counter.get_total_flops())


def _recorded_kind(settings: Mapping[str, Any]) -> str:
    """`Facts.kind` of a record."""
    nested: dict[str, Any] = {"dataset": {}, "model": {}, "query": {}}
    for key, value in settings.items():
        group, _, name = key.partition(".")
        if group in nested and name:
            nested[group][name] = value
    return kind_of(nested["dataset"], nested["model"], nested["query"], settings.get("augmentation.copies", 1))
