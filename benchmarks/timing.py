"""How long engines and steps take on one model."""

from __future__ import annotations

import gc
import math
import time
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor

from benchmarks.engines import DPBENCH, ENGINES, NON_PRIVATE, takes_part
from benchmarks.mixtures import ONE_POINT, Reference, flattened
from benchmarks.models import Case, build_case
from benchmarks.process import reason, tune_allocator
from benchmarks.steps import DPSGD_STEP, NON_PRIVATE_STEP, STEPS
from dpbench.devices import prepare_device

# Rounds in which all take part: of three the median is none that is out of line, such as the first one of an engine
# that takes much memory, which the system has to find.
FEWEST_ROUNDS = 3
# The others are of those that once took at most so many times the time of their base, for each point that they compute
# at: whoever is far behind shows it in those, of which a comparison of dpbench with itself may have been in one.
SLOW = {"cpu": 1.5, "cuda": 2.5}
# Of dpbench, whose first step of a query that remembers has one point. Its gradients are compared with autograd's in
# batches 1, 4, 16, ... of all its contenders together, and on a GPU its replays 1, 4, 16, ... of each with what they
# replay: the first of them are no rounds, and medians don't show the others.
WARMUPS = {"cpu": 3, "cuda": 7}
# Relative error of the clipped sum above which an engine counts as failed.
LARGEST_ERROR = 1e-2

# What has two points, and the same with one.
DPSGD_OF = {name: DPBENCH for name, engine in ENGINES.items() if engine.mixture not in (None, ONE_POINT)} | {
    name: DPSGD_STEP for name in STEPS if name not in (NON_PRIVATE_STEP, DPSGD_STEP)
}


@dataclass(frozen=True)
class Settings:
    """How a model is timed.

    Attributes:
        device: "cpu" or "cuda".
        threads: of torch.
        rounds: most rounds.
        seconds: of a model's rounds beyond those in which all take part; no new one is begun after that.
        allocator: one of `process.ALLOCATORS`.
        small: the small version of each model.
        steps: time whole steps too.
    """

    device: str = "cpu"
    threads: int = 1
    rounds: int = 20
    seconds: float = 5.0
    allocator: str = "default"
    small: bool = False
    steps: bool = True


class Contenders:
    """Callables that are timed against each other, and why those failed that did.

    Attributes:
        runs: by name, what is timed.
        failures: by name, the short reason; nothing that fails stops the rest.
        seconds: by name, the time in each round; None in a round that it sat out.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.runs: dict[str, Callable[[], object]] = {}
        self.failures: dict[str, str] = {}
        self.seconds: dict[str, list[float | None]] = {}

    def add(self, name: str, make: Callable[[], Callable[[], object]], *, warmups: int) -> None:
        """Make a contender and warm it up."""
        try:
            run = make()
            for _ in range(warmups):
                run()
        except Exception as error:
            self.failures[name] = reason(error)
        else:
            self.runs[name] = run

    def race(self, bases: dict[str, str], *, rounds: int, seconds: float) -> None:
        """Time all in rounds, each round in another order.

        Args:
            bases: by name, the contender that its time is divided by.
            rounds: most rounds.
            seconds: so long after those in which all take part, no new round is begun.
        """
        self.seconds = {name: [] for name in self.runs}
        # What exists now lives on: it need not be looked through before each call.
        gc.collect()
        gc.freeze()
        gc.disable()
        began = math.inf
        for number in range(rounds):
            if number == FEWEST_ROUNDS:
                began = time.perf_counter()
            if time.perf_counter() - began >= seconds:
                break
            names = list(self.runs)
            first = number % max(len(names), 1)
            all_of_them = number < FEWEST_ROUNDS
            taking_part = {name for name in names if all_of_them or not self._slow(name, bases[name])}
            for name in names[first:] + names[:first]:
                self.seconds[name].append(self._time(name) if name in taking_part else None)
            self._drop_failed()
        gc.enable()
        gc.unfreeze()

    def ratio(self, name: str, base: str) -> float | None:
        """Median over rounds of the time of one over that of another in the same round; None if they share none."""
        ratios = self._ratios(name, base)
        return median(ratios) if ratios else None

    def _ratios(self, name: str, base: str) -> list[float]:
        if name not in self.seconds or base not in self.seconds:
            return []
        pairs = zip(self.seconds[name], self.seconds[base], strict=True)
        return [mine / its for mine, its in pairs if mine is not None and its is not None]

    def result(self, name: str, base: str) -> dict[str, Any]:
        """What is reported of one: its times and ratios, or why it failed."""
        if name in self.failures:
            return {"failed": self.failures[name]}
        seconds = self.seconds[name]
        result: dict[str, Any] = {
            "median_seconds": median(value for value in seconds if value is not None),
            "ratio": self.ratio(name, base),
            "seconds": seconds,
        }
        if name in DPSGD_OF:
            result["ratio_to_dpsgd"] = self.ratio(name, DPSGD_OF[name])
        return result

    def _slow(self, name: str, base: str) -> bool:
        ratios = self._ratios(name, base)
        return bool(ratios) and min(ratios) > SLOW[self._device.type] * (2 if name in DPSGD_OF else 1)

    def _time(self, name: str) -> float | None:
        gc.collect()
        self._synchronise()
        began = time.perf_counter()
        try:
            self.runs[name]()
            self._synchronise()
        except Exception as error:
            self.failures[name] = reason(error)
            return None
        return time.perf_counter() - began

    def _synchronise(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _drop_failed(self) -> None:
        for name in self.failures.keys() & self.runs.keys():
            del self.runs[name], self.seconds[name]


def time_model(name: str, engines: Iterable[str], settings: Settings) -> dict[str, Any]:
    """Times of one model, all engines and steps in turn; call it in a process of its own.

    Returns:
        `batch`, `parameters`, `threshold`, and `engines` and `steps`: by name, either `failed` with the reason, or
        `seconds` per round, their median, the `ratio` to the non-private one and, for what has two points, to the
        one of DP-SGD. Engines have the relative `error` of their sum, against one backward pass per sample, and
        their deviation `from_dpbench` where dpbench computes the same sum.
    """
    warnings.simplefilter("ignore")
    if settings.allocator == "tuned":
        tune_allocator()
    torch.set_num_threads(settings.threads)
    device = torch.device(settings.device)
    if device.type == "cuda":  # as runs compute: full float32, and convolutions that repeat themselves
        prepare_device(device)
    case = build_case(name, device, small=settings.small)
    return time_case(case, engines, settings)


def time_case(case: Case, engines: Iterable[str], settings: Settings) -> dict[str, Any]:
    """`time_model` of a case that is built, in this process."""
    # The base of all ratios takes part, and dpbench comes before the others, which are compared with it.
    names = takes_part(engines, case.device.type)
    steps = list(STEPS) if settings.steps else []
    comparison = Comparison(case)
    threshold = comparison.reference.threshold
    contenders = Contenders(case.device)
    for name in names:
        warmups = WARMUPS[case.device.type] if name == DPBENCH or name in DPSGD_OF else 0
        contenders.add(name, partial(comparison.checked, name), warmups=warmups)
    for name in steps:
        contenders.add(name, partial(_step, name, case, threshold), warmups=WARMUPS[case.device.type])
    bases = dict.fromkeys(names, NON_PRIVATE) | dict.fromkeys(steps, NON_PRIVATE_STEP)
    contenders.race(bases, rounds=settings.rounds, seconds=settings.seconds)
    return {
        "batch": case.batch,
        "parameters": comparison.reference.plain.numel(),
        "threshold": threshold,
        "engines": {name: contenders.result(name, bases[name]) | comparison.found.get(name, {}) for name in names},
        "steps": {name: contenders.result(name, bases[name]) for name in steps},
    }


class Comparison:
    """Checks the sums of a case's engines.

    Attributes:
        reference: what the sums should be.
        found: by engine, its `error` and deviation `from_dpbench`.
    """

    def __init__(self, case: Case) -> None:
        self._case = case
        self.reference = Reference(case)
        self.found: dict[str, dict[str, float]] = {}
        self._by_dpbench: Tensor | None = None

    def checked(self, name: str) -> Callable[[], object]:
        """The engine ready to run, if its first sum is right.

        Raises:
            ArithmeticError: it is not.
        """
        case, mixture = self._case, ENGINES[name].mixture
        compute = ENGINES[name].build(case, self.reference.threshold)
        result = flattened(compute(case.inputs, case.targets))
        error = _deviation(result, self.reference.plain if mixture is None else self.reference.clipped[mixture])
        self.found[name] = {"error": error}
        if name == DPBENCH:
            self._by_dpbench = result
        elif mixture == ONE_POINT and self._by_dpbench is not None:
            self.found[name]["from_dpbench"] = _deviation(result, self._by_dpbench)
        # Written so that NaN fails too.
        if not error <= LARGEST_ERROR:
            raise ArithmeticError(f"relative error {error:.1e} of the sum")
        return lambda: compute(case.inputs, case.targets)


def _deviation(result: Tensor, expected: Tensor) -> float:
    return float((result - expected).norm() / expected.norm())


def _step(name: str, case: Case, threshold: float) -> Callable[[], object]:
    step = STEPS[name][1](case, threshold)
    return lambda: step(case.inputs, case.targets)
