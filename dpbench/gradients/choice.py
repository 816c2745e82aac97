"""Which strategy a use takes: the fastest one that the memory rule allows, timed once per shape and remembered."""

from __future__ import annotations

import functools
import platform
import time
from collections.abc import Callable
from dataclasses import astuple
from functools import partial

import torch
from torch.utils._python_dispatch import _disable_current_modes

from dpbench import cache
from dpbench.gradients.summands import summand_of
from dpbench.gradients.uses import Strategy, Term, Use
from dpbench.state import State

# Below these multiplications for a batch every strategy is fast, and counting them decides.
WORTH_TIMING = 2e6
# So few samples tell little.
FEW = 8
# Samples of a first timing, which rules most strategies out; of a second one, in which the calls themselves cost no
# larger share than they will; and rounds of each.
FIRST_SAMPLES, MOST_SAMPLES = 32, 256
TIMED_ROUNDS = 6
# Strategies with so many times the multiplications of the cheapest are not timed, and those that take so much longer
# than the fastest not again.
HOPELESS_COST, HOPELESS = 3.0, 1.7
# Cycles for which a GPU idles, so that all that is timed is launched when it begins: some 2 milliseconds.
CYCLES_OF_LAUNCHES = 4_000_000


class Chooser:
    """Chooses strategies and remembers them, so that equal shapes take equal paths for good.

    What was timed on this kind of device is cached on disk; `choices` travels in checkpoints, so a resumed run
    computes as the run did that was never stopped.

    Attributes:
        choices: strategy by description of use and shapes.
    """

    def __init__(self) -> None:
        self.choices: dict[str, Strategy] = {}

    def state_dict(self) -> State:
        """The choices, as plain values."""
        return {key: list(astuple(strategy)) for key, strategy in self.choices.items()}

    def load_state_dict(self, state: State) -> None:
        """Take the choices of a state that `state_dict` returned."""
        self.choices = {key: Strategy(*values) for key, values in state.items()}

    def choose(self, use: Use, term: Term, points: int) -> Strategy:
        """The strategy for terms like this one.

        Args:
            use: of the terms.
            term: the first of them.
            points: how many there will be.
        """
        output = term.output is not None
        contiguous = term.b.is_contiguous()
        key = _key(use, term.a.shape[1:], term.b.shape[1:], term.b.dtype, output, contiguous, points)
        if key in self.choices:
            return self.choices[key]
        candidates = self._candidates(use, term, points)
        cheapest = min(candidates, key=lambda s: candidates[s])
        if len(term.b) < FEW:  # nothing that more samples should have to follow
            return cheapest
        hopeful = [s for s, cost in candidates.items() if cost <= HOPELESS_COST * candidates[cheapest]]
        if len(hopeful) == 1 or candidates[cheapest] * len(term.b) < WORTH_TIMING:
            self.choices[key] = cheapest
        else:
            self.choices[key] = self._fastest(key, use, term, points, hopeful)
        return self.choices[key]

    def _candidates(self, use: Use, term: Term, points: int) -> dict[Strategy, float]:
        """Strategies that the memory rule allows, with their multiplications."""
        cost = use.strategies(term, points)
        allowance = use.hold_factor * points * (term.a[0].numel() + term.b[0].numel())
        small = use.size <= allowance
        return {s: c for s, c in cost.items() if small or s.kind != "hold"} or cost

    def _fastest(self, key: str, use: Use, term: Term, points: int, candidates: list[Strategy]) -> Strategy:
        samples = min(MOST_SAMPLES, 2 ** (len(term.b).bit_length() - 1))
        timed = [astuple(strategy) for strategy in candidates]
        where = [_device_name(term.b.device), torch.__version__, key, samples, timed]
        known = cache.read("fastest", where)
        if isinstance(known, list) and len(known) == 3 and Strategy(*known) in candidates:
            return Strategy(*known)
        # Comparisons see every kernel that is called (draws.py), which takes longer than many kernels do.
        with _disable_current_modes():
            if samples > FIRST_SAMPLES:
                candidates = self._fast(use, term.samples(slice(0, FIRST_SAMPLES)), points, candidates)
            fastest = self._fast(use, term.samples(slice(0, samples)), points, candidates)[0]
        cache.write("fastest", where, astuple(fastest))
        return fastest

    def _fast(self, use: Use, some: Term, points: int, candidates: list[Strategy]) -> list[Strategy]:
        """Those whose time for some samples is not hopeless, the fastest one first."""
        factors = torch.ones(len(some.b), device=some.b.device, dtype=torch.float32).to(_sum_dtype(some))
        onto = [factors.new_zeros(shape) for shape in use.shapes]
        best: dict[Strategy, float] = {}

        def work(strategy: Strategy) -> None:
            summand = summand_of(use, strategy, points)
            for _ in range(points):
                summand.add(some, use)
            summand.squares()
            summand.add_weighted_sum(factors, onto)

        timed = partial(_seconds_on_gpu, some.b.device) if some.b.is_cuda else _seconds

        def seconds(strategy: Strategy) -> float:
            return timed(partial(work, strategy))

        for strategy in candidates:
            seconds(strategy)  # libraries set themselves up
            best[strategy] = seconds(strategy)
        for _ in range(TIMED_ROUNDS - 1):
            for strategy in candidates:
                if best[strategy] <= HOPELESS * min(best.values()):
                    best[strategy] = min(best[strategy], seconds(strategy))
        fastest = min(best.values())
        return sorted((s for s in best if best[s] <= HOPELESS * fastest), key=lambda s: best[s])


def _sum_dtype(term: Term) -> torch.dtype:
    return torch.float64 if term.b.dtype == torch.float64 else torch.float32


def _seconds(work: Callable[[], None]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def _seconds_on_gpu(device: torch.device, work: Callable[[], None]) -> float:
    """What the GPU takes, without waiting for launches: passes are replayed (replay.py)."""
    with torch.cuda.device(device):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(CYCLES_OF_LAUNCHES)
        start.record()
        work()
        end.record()
        end.synchronize()
    milliseconds: float = start.elapsed_time(end)
    return milliseconds / 1000


@functools.cache
def _key(
    use: Use, a: torch.Size, b: torch.Size, dtype: torch.dtype, output: bool, contiguous: bool, points: int
) -> str:
    """Everything that the time per sample depends on, as text; shapes are those of a sample."""
    settings = [type(use).__name__, *map(repr, astuple(use))]
    shapes = [repr(tuple(a)), repr(tuple(b)), str(dtype).removeprefix("torch.")]
    if output:
        shapes.append("output")
    if not contiguous:  # channels come last
        shapes.append("strided")
    return " ".join([*settings, *shapes, f"points={points}"]).replace("'", "")


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    capability = torch.backends.cpu.get_cpu_capability()
    return f"{platform.machine()} {capability} {torch.get_num_threads()}"
