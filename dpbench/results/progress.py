"""Showing how far the reading of many records is."""

from __future__ import annotations

from rich.console import Console
from rich.progress import Progress

# Fewer are read in a moment.
MANY = 2000


class Shown:
    """A bar that appears where many records are read, and goes when they are."""

    def __init__(self, console: Console, what: str) -> None:
        self._bar = Progress(console=console, transient=True)
        self._what = what

    def __call__(self, done: int, total: int) -> None:
        """`done` of `total` are read."""
        if total < MANY:
            return
        if not self._bar.tasks:
            self._bar.console.print(f"{self._what}: {total:,}")
            self._bar.add_task(self._what, total=total)
            self._bar.start()
        self._bar.update(self._bar.task_ids[0], completed=done)
        if done == total:
            self._bar.stop()
            self._bar.remove_task(self._bar.task_ids[0])
