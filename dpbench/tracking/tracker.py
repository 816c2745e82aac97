"""One W&B run, as the run that it copies sees it: what it is told, and what becomes of a failure.

W&B is called on a thread of its own, so that training waits for none of it; only the end of a run waits, and not for
ever.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from typing import Any

from dpbench.tracking.background import Background

# Seconds that the end of a run waits for W&B, whatever it does.
PATIENCE = 120.0


class Service:
    """What a process knows of W&B.

    Attributes:
        calls: carries out all calls, for several runs may be under way.
        under_way: trackers whose W&B run has begun and not ended.
        offline: whether it could not go online.
        hangs: whether it did not come back from a call.
    """

    def __init__(self) -> None:
        self.calls = Background()
        self.under_way: set[Tracker] = set()
        self.offline = False
        self.hangs = False


_service = Service()


def service() -> Service:
    """What this process knows of W&B."""
    return _service


class Tracker:
    """One W&B run; a no-op once anything about it has failed, which it says in one line.

    Attributes:
        id: of the W&B run, by which it can be gone on with; None where nothing is tracked.
    """

    def __init__(self, start: Callable[[], Any] | None, say: Callable[[str], object], id: str | None = None) -> None:
        """Start a run.

        Args:
            start: makes the W&B run; None for no tracking.
            say: told of a failure in one line.
            id: of the W&B run, by which it can be gone on with.
        """
        self.id = id if start is not None else None
        self._say = say
        self._run: Any = None
        self._given_up = start is None
        self._ended = threading.Event()
        if start is not None:
            self._put("start", lambda _: self._begin(start))

    def _begin(self, start: Callable[[], Any]) -> None:
        self._run = start()
        _service.under_way.add(self)

    def _end(self, run: Any, exit_code: int) -> None:
        run.finish(exit_code=exit_code)
        _service.under_way.discard(self)

    def _put(self, what: str, action: Callable[[Any], object]) -> None:
        """Have the W&B run do something, when it has done what it was asked for before."""

        def call() -> None:
            if self._given_up:
                return
            try:
                action(self._run)
            except Exception as error:
                self._give_up(f"failed to {what} ({type(error).__name__}: {' '.join(str(error).split())})")

        if not self._given_up:
            _service.calls.put(call)

    def _give_up(self, why: str) -> None:
        self._given_up, self._run = True, None
        _service.under_way.discard(self)
        self._say(f"W&B {why}; the run goes on without it")

    def catch_up(self, logged: Sequence[dict[str, float]]) -> None:
        """Record the metrics of those of these evaluations that W&B has not got."""

        def missing(run: Any) -> None:
            known = getattr(run, "step", 0)
            for metrics in logged:
                if metrics["step"] >= known:
                    run.log(_loggable(metrics), step=int(metrics["step"]))

        if logged:
            self._put("log", missing)

    def log(self, metrics: dict[str, float], step: int) -> None:
        """Record the metrics of an evaluation."""
        self._put("log", lambda run: run.log(_loggable(metrics), step=step))

    def add(self, content: Callable[[], dict[str, Any]]) -> None:
        """Record what is no metric, such as a table; it is made when W&B comes to it."""
        self._put("log", lambda run: run.log(content()))

    def finish(self, summary: dict[str, Any], *, succeeded: bool) -> None:
        """Write the summary and close the run; nothing comes after it but `wait`."""
        self._put("write the summary", lambda run: run.summary.update(flatten(summary)))
        self._put("finish", lambda run: self._end(run, 0 if succeeded else 1))
        if not self._given_up:
            _service.calls.put(self._ended.set)

    def wait(self) -> None:
        """Wait for W&B to have done what it was asked for up to the end of this run, within `PATIENCE`."""
        if self._given_up:
            return
        if _service.hangs:  # which was said; nothing of this run shall begin later
            self._given_up = True
        elif not self._ended.wait(PATIENCE):
            _service.hangs = True
            self._give_up(f"does not answer for {PATIENCE:g} s")


def _loggable(metrics: dict[str, float]) -> dict[str, float]:
    """W&B has no infinity: eps is left out where there is no noise."""
    return {key: value for key, value in metrics.items() if math.isfinite(value)}


def flatten(nested: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested dictionaries with keys joined by slashes."""
    flat: dict[str, Any] = {}
    for key, value in nested.items():
        if isinstance(value, dict):
            flat.update(flatten(value, f"{prefix}{key}/"))
        else:
            flat[prefix + key] = value
    return flat
