"""What a person sees while a run trains."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from statistics import fmean
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from dpbench.tracking.proven import UNPROVEN
from dpbench.training.loop import Metrics

SECONDS_BETWEEN_LINES = 15.0


class Display:
    """A progress bar on a terminal; elsewhere a line now and then. Runs that go in step share it."""

    def __init__(self, console: Console, steps: int, *, proven: bool = True) -> None:
        """Set up.

        Args:
            console: where it is shown.
            steps: of each run.
            proven: whether eps is a guarantee.
        """
        self._console = console
        self._mark = "" if proven else UNPROVEN
        self._steps = steps
        self._last_line = time.monotonic()
        self._runs = self._awaited = 0
        self._evaluated: list[Metrics] = []
        self._bar = Progress(
            TextColumn("  step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=24),
            TextColumn("{task.description}"),
            TimeRemainingColumn(compact=True),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("", total=steps)

    def __enter__(self) -> Display:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._bar.disable:  # before rich 15 one that is disabled ends with an empty line
            self._bar.stop()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """One more run, from before its first step until it has ended."""
        self._runs += 1
        try:
            yield
        finally:
            self._runs -= 1

    def step(self, taken: int) -> None:
        """So many steps are taken."""
        self._bar.update(self._task, completed=taken)

    def evaluation(self, metrics: Metrics) -> None:
        """An evaluation of one run is done; shown when those of all runs at this step are."""
        if not self._evaluated or self._evaluated[0].step != metrics.step:
            # Of those that go on now: each ends with its last evaluation, before the next one's.
            self._evaluated, self._awaited = [], self._runs
        self._evaluated.append(metrics)
        if len(self._evaluated) < self._awaited:
            return
        text = f"{_in_words(self._evaluated)}{self._mark}"
        self._bar.update(self._task, description=text)
        now = time.monotonic()
        if not self._console.is_terminal and now - self._last_line > SECONDS_BETWEEN_LINES:
            left = metrics.seconds / metrics.step * (self._steps - metrics.step)
            self._console.print(f"  step {metrics.step}/{self._steps}  {text}  {left:.0f} s left")
            self._last_line = now


def _in_words(evaluated: Sequence[Metrics]) -> str:
    """One run's numbers, or the means of several with the range of their accuracies."""
    accuracies = [100 * metrics.test_accuracy for metrics in evaluated]
    loss, eps = fmean(metrics.train_loss for metrics in evaluated), max(metrics.eps for metrics in evaluated)
    spread = f" ({min(accuracies):.2f} to {max(accuracies):.2f}, {len(evaluated)} seeds)" if len(evaluated) > 1 else ""
    return f"loss {loss:.3f}  accuracy {fmean(accuracies):5.2f} %{spread}  eps {eps:#.4g}"
