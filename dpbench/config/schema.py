"""The schema of a run: every setting with its type."""

from __future__ import annotations

import math
import re
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from os.path import expanduser
from typing import Any

from omegaconf import MISSING

from dpbench import averaging, clip, filters, models, noise, optim, query, schedules, threshold
from dpbench.config import combinations, promises
from dpbench.config.privacy import Privacy
from dpbench.config.rules import delta_of, evaluated_every
from dpbench.data import Augmentation, Dataset
from dpbench.errors import require, require_text
from dpbench.privacy import Plan, Release
from dpbench.privacy.accountants import LEAST_DELTA
from dpbench.privacy.sampling import POISSON, Scheme, steps_of
from dpbench.stage import Course

PRECISIONS = ("float32", "bfloat16")
DEVICES = re.compile(r"auto|cpu|cuda(:\d+)?")
NAMED = "the name under which its runs are recorded"
# Above this privacy loss distributions overflow, and nothing is promised anyway.
LARGEST_EPS = 1e6
# A plan lists the noise of every step; so many take a GB.
MOST_STEPS = 10_000_000


@dataclass
class EvaluationTimes:
    """When the model is evaluated, besides at the end.

    Attributes:
        every_epochs: every so many times N/B steps, rounded: passes over the data on average; where batches are those
            of passes, which take a step more, evaluations fall ever earlier in them; null for never.
        every_steps: every so many steps; where set, every_epochs does not count.
    """

    every_epochs: float | None = 1.0
    every_steps: int | None = None

    def __post_init__(self) -> None:
        epochs, steps = self.every_epochs, self.every_steps
        finite = epochs is None or 0 < epochs < math.inf
        require(finite, "evaluation.every_epochs", epochs, "a finite number > 0, or null")
        require(steps is None or steps > 0, "evaluation.every_steps", steps, "a whole number > 0, or null")


@dataclass
class DataFiles:
    """Where data lie.

    Attributes:
        root: data root; the environment variable DPBENCH_DATA sets its default.
        download: fetch what is missing there.
    """

    root: str = MISSING
    download: bool = False

    def __post_init__(self) -> None:
        require_text(self.root, field="data.root")
        require(
            bool(self.root),
            "data.root",
            "''",
            "the name of a folder; by default that of the environment variable DPBENCH_DATA",
        )
        self.root = expanduser(self.root)


@dataclass
class TrackerSettings:
    """Weights & Biases.

    Attributes:
        mode: "auto" (online with a key, else offline), "online", "offline" or "disabled".
        project: W&B project.
        entity: W&B user or team; null for the default.
        group: W&B group of the runs; null names it after the sweep.
        tags: W&B tags.
    """

    mode: str = "auto"
    project: str = "dpbench"
    entity: str | None = None
    group: str | None = None
    tags: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        modes = ("auto", "online", "offline", "disabled")
        require(self.mode in modes, "tracker.mode", self.mode, f"one of {', '.join(modes)}")


@dataclass
class CheckpointTimes:
    """When a run is written to disk so that it can go on from there, besides when it is told to end.

    Attributes:
        every_seconds: of wall time; null for not by time. Longer where a checkpoint takes more than 2 % of it.
        every_steps: every so many steps; null for not by steps.
    """

    every_seconds: float | None = 600.0
    every_steps: int | None = None

    def __post_init__(self) -> None:
        seconds, steps = self.every_seconds, self.every_steps
        require(seconds is None or seconds > 0, "checkpoint.every_seconds", seconds, "a number > 0, or null")
        require(steps is None or steps > 0, "checkpoint.every_steps", steps, "a whole number > 0, or null")


@dataclass
class RunConfig:
    """One training run.

    Attributes:
        eps: privacy budget, > 0; inf trains without noise.
        delta: failure probability: a number, or a rule in the number of training samples N ("1/N^1.1", "1/N").
        seed: every random stream derives from it.
        device: auto, cpu, cuda or cuda:<index>.
        batch_size: expected batch size B.
        epochs: passes over the data E; the run takes T = ceil(E N / B) steps.
        micro_batch: samples whose gradients are computed at once; null chooses what fits into memory.
        precision: float32, or bfloat16 to run the model under autocast; norms, sums and noise stay in float32.
        channels_last: memory layout of images; a GPU may prefer it.
        record_coordinates: so many coordinates of the gradients of all steps, chosen at random, are kept before and
            after noise in gradients.npz, and norms of the last step's samples, which is not private; 0 for none.
        results_dir: folder of the records.
        seeds: train these in one process; the command line sets it, in place of `seed`.
        fuse_seeds: whether they share their passes: "auto" (where that is faster), true or false.
        keep_model: keep the weights of the last evaluation in model.safetensors.
        shard_states: where several processes train the run, each keeps the states of filter and optimizer for its
            part of the parameters alone; the numbers are the same.
        force: run from the beginning, also what is finished already or was begun.
        plan: only print what would be run.
    """

    eps: float = MISSING
    delta: Any = MISSING
    seed: int = MISSING
    device: str = MISSING
    batch_size: int = MISSING
    epochs: float = MISSING
    micro_batch: int | None = None
    precision: str = "float32"
    channels_last: bool = False
    record_coordinates: int = 0
    results_dir: str = MISSING
    seeds: list[int] | None = None
    fuse_seeds: Any = "auto"
    keep_model: bool = False
    shard_states: bool = False
    force: bool = False
    plan: bool = False
    algo: dict[str, Any] = MISSING
    query: query.Query = MISSING
    clip: clip.Clip = MISSING
    threshold: threshold.Threshold = MISSING
    noise: noise.Noise = MISSING
    filter: filters.Filter = MISSING
    optim: optim.Optimizer = MISSING
    schedule: schedules.Schedule = MISSING
    averaging: averaging.Averaging = MISSING
    dataset: Dataset = MISSING
    augmentation: Augmentation = MISSING
    model: models.Model = MISSING
    privacy: Privacy = MISSING
    evaluation: EvaluationTimes = field(default_factory=EvaluationTimes)
    checkpoint: CheckpointTimes = field(default_factory=CheckpointTimes)
    data: DataFiles = field(default_factory=DataFiles)
    tracker: TrackerSettings = MISSING

    def __post_init__(self) -> None:
        name = self.algo.get("name")
        require(isinstance(name, str) and bool(name), "algo.name", name, NAMED)
        require(bool(self.model.name), "model.name", "''", NAMED)
        require(self.eps > 0, "eps", self.eps, "a number > 0, or inf to train without noise")
        bounded = self.eps <= LARGEST_EPS or self.eps == math.inf
        require(bounded, "eps", self.eps, "at most 1e6, beyond which accounts overflow, or inf to train without noise")
        # Below, PLD may be less than eps by its floating point; above, it takes all memory, for a promise to nobody.
        sensible = LEAST_DELTA <= self.delta_value <= 0.1
        here = "" if self.delta_value == self.delta or math.isnan(self.delta_value) else f", here {self.delta_value:g}"
        rule = f"a number from 1e-9 to 0.1, or a rule such as 1/N^1.1 or 1/N that gives one{here}"
        require(sensible, "delta", self.delta, rule)
        known = DEVICES.fullmatch(self.device) is not None
        require(known, "device", self.device, "auto, cpu, cuda or cuda:<index>")
        require(self.batch_size > 0, "batch_size", self.batch_size, "a whole number > 0")
        size = self.dataset.trained_on
        require(
            self.batch_size <= size,
            "batch_size",
            self.batch_size,
            f"at most the {size} training samples of dataset={self.dataset.name}",
        )
        enough = 0 < self.epochs < math.inf and self.steps > 0
        require(enough, "epochs", self.epochs, "a number > 0, and enough for a step")
        most = f"so few that the run has at most {MOST_STEPS:,} steps, here {self.steps:.4g}"
        require(self.steps <= MOST_STEPS, "epochs", self.epochs, most)
        micro = self.micro_batch
        require(micro is None or micro > 0, "micro_batch", micro, "a whole number > 0, or null")
        require(self.precision in PRECISIONS, "precision", self.precision, f"one of {', '.join(PRECISIONS)}")
        require(bool(self.results_dir), "results_dir", "''", "the name of a folder")
        self.results_dir = expanduser(self.results_dir)
        kept = self.record_coordinates
        require(kept >= 0, "record_coordinates", kept, "a whole number >= 0")
        require(self.seed >= 0, "seed", self.seed, "a whole number >= 0")
        fuse = self.fuse_seeds
        require(fuse == "auto" or isinstance(fuse, bool), "fuse_seeds", fuse, "auto, true or false")
        combinations.check(self)
        # Their own, so that a configuration made of another one leaves that as it is.
        self.noise, self.threshold = deepcopy(self.noise), deepcopy(self.threshold)
        rate = partial(self.schedule.factor, steps=self.steps)
        course = Course(self.steps, self.batch_size, rate, self._epoch(self.privacy.scheme))
        self.noise.prepare(course)
        self.threshold.prepare(course)
        promises.check(self)

    @property
    def uncertified(self) -> str | None:
        """What reaches the iterates beside what the ledger records, so that eps is not proven; None for nothing."""
        return combinations.uncertified(self)

    @property
    def delta_value(self) -> float:
        """Delta as a number."""
        return delta_of(self.delta, self.dataset.trained_on)

    @property
    def sampling_rate(self) -> float:
        """Q = B/N."""
        return self.batch_size / self.dataset.trained_on

    @property
    def steps(self) -> int:
        """T = ceil(E N / B), or E ceil(N / B) where the sampler passes over the data."""
        return steps_of(self.privacy.scheme, self.dataset.trained_on, self.batch_size, self.epochs)

    def passes_after(self, steps: int) -> float:
        """How often a sample has taken part after `steps` steps, on average."""
        scheme = self.privacy.scheme
        return steps / self._epoch(scheme) if scheme.passes else steps * self.sampling_rate

    @property
    def evaluate_every(self) -> int:
        """Steps between evaluations; the last step is evaluated in any case."""
        times = self.evaluation
        return evaluated_every(times.every_steps, times.every_epochs, self.sampling_rate, self.steps)

    def release_plan(self) -> Plan:
        """The releases of the run, with the relative scales s_t as multipliers."""
        return self._plan([self.noise.scale(step) for step in range(self.steps)], self.privacy.scheme)

    def published_plan(self) -> Plan:
        """The releases as an accountant sees them that takes every batch for a Poisson sample."""
        return self._plan([self.noise.claimed_scale(step) for step in range(self.steps)], POISSON)

    def _plan(self, scales: list[float], scheme: Scheme) -> Plan:
        beside = self.threshold.beside
        releases = (Release(self.sampling_rate, scale, beside) for scale in scales)
        return Plan.of(releases, scheme, self._epoch(scheme), self.noise.correlation)

    def _epoch(self, scheme: Scheme) -> int:
        """Steps of a pass over the data; 0 where the sampler makes none."""
        return math.ceil(self.dataset.trained_on / self.batch_size) if scheme.passes else 0
