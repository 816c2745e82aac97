"""What a person sees while a run trains."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from dpbench.training.loop import Metrics

SECONDS_BETWEEN_LINES = 15.0


class Display:
    """A progress bar on a terminal; elsewhere a line now and then."""

    def __init__(self, console: Console, steps: int) -> None:
        self._console = console
        self._steps = steps
        self._last_line = time.monotonic()
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
        self._bar.stop()

    def step(self, taken: int) -> None:
        """So many steps are taken."""
        self._bar.update(self._task, completed=taken)

    def evaluation(self, metrics: Metrics) -> None:
        """An evaluation is done."""
        text = f"loss {metrics.train_loss:.3f}  accuracy {100 * metrics.test_accuracy:5.2f} %  eps {metrics.eps:.3f}"
        self._bar.update(self._task, description=text)
        now = time.monotonic()
        if not self._console.is_terminal and now - self._last_line > SECONDS_BETWEEN_LINES:
            left = metrics.seconds / metrics.step * (self._steps - metrics.step)
            self._console.print(f"  step {metrics.step}/{self._steps}  {text}  {left:.0f} s left")
            self._last_line = now
