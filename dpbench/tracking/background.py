"""Calls that nobody waits for, carried out one after the other."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue


class Background:
    """A thread that carries out calls in their order, so that a slow one costs whoever asks for it no time.

    The calls handle their own errors. The thread ends with the process, whatever it waits for.
    """

    def __init__(self) -> None:
        self._calls: SimpleQueue[Callable[[], object]] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def put(self, call: Callable[[], object]) -> None:
        """Have a call carried out after those before it."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="dpbench-background", daemon=True)
            self._thread.start()
        self._calls.put(call)

    def _work(self) -> None:
        while True:
            self._calls.get()()
