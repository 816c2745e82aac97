"""Weights & Biases as a copy of the local record. Nothing that fails here ever stops a run."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, cast

from dpbench.config.schema import TrackerSettings

Mode = Literal["online", "offline", "disabled"]

log = logging.getLogger(__name__)

# Metrics that W&B plots over epochs; the summary keeps their last value, for the best one on test data is a choice
# made by looking at test data.
METRICS = ("train_loss", "test_loss", "test_accuracy", "eps")


def choose_mode(settings: TrackerSettings) -> Mode:
    """The mode that the settings come to: auto is online where an API key is known, which needs no network."""
    if settings.mode != "auto":
        return cast(Mode, settings.mode)
    try:
        import wandb

        return "online" if wandb.setup().settings.api_key else "offline"
    except Exception as error:
        log.warning("W&B can't be set up (%s)", error)
        return "disabled"


def tracker_line(settings: TrackerSettings, results_dir: Path) -> str:
    """One line that says whether and where W&B records, and how to change it."""
    mode = choose_mode(settings)
    if mode == "disabled":
        return "W&B: disabled"
    if mode == "online":
        return f"W&B: online, project {settings.project} (tracker.mode=offline keeps it here)"
    why = "no API key; log in with: wandb login" if settings.mode == "auto" else "as asked"
    return f"W&B: offline ({why}), in {results_dir / 'wandb'}"


class Tracker:
    """One W&B run; a no-op once anything about it has failed."""

    def __init__(self, start: Callable[[], Any] | None) -> None:
        self._run: Any = None
        if start is not None:
            self._guard("start", lambda: setattr(self, "_run", start()))

    def _guard(self, what: str, action: Callable[[], object]) -> None:
        try:
            action()
        except Exception as error:
            self._run = None
            log.warning("W&B failed to %s (%s: %s); the run goes on without it", what, type(error).__name__, error)

    def log(self, metrics: dict[str, Any], step: int) -> None:
        """Record the metrics of an evaluation."""
        run = self._run
        if run is not None:
            self._guard("log", lambda: run.log(metrics, step=step))

    def finish(self, summary: dict[str, Any], *, succeeded: bool) -> None:
        """Write the summary and close the run."""
        run = self._run
        if run is not None:
            self._guard("write the summary", lambda: run.summary.update(flatten(summary)))
            self._guard("finish", lambda: run.finish(exit_code=0 if succeeded else 1))
            self._run = None


def flatten(nested: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested dictionaries with keys joined by slashes."""
    flat: dict[str, Any] = {}
    for key, value in nested.items():
        if isinstance(value, dict):
            flat.update(flatten(value, f"{prefix}{key}/"))
        else:
            flat[prefix + key] = value
    return flat


def _finite(value: Any) -> Any:
    """W&B turns infinities into a word of its own; ours is "inf"."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def open_tracker(
    settings: TrackerSettings, results_dir: Path, *, name: str, config: dict[str, Any], tags: Sequence[str]
) -> Tracker:
    """A W&B run for one training run."""
    mode = choose_mode(settings)
    if mode == "disabled":
        return Tracker(None)

    def start() -> Any:
        run = _init(settings, results_dir, mode, "train", name, _finite(config), [*settings.tags, *tags])
        for metric in METRICS:
            run.define_metric(metric, step_metric="epoch", summary="last")
        return run

    return Tracker(start)


def log_table(
    settings: TrackerSettings, results_dir: Path, *, name: str, columns: Sequence[str], rows: list[list[Any]]
) -> None:
    """The accuracy table of a sweep, as a W&B run of its own in the sweep's group."""
    mode = choose_mode(settings)
    if mode == "disabled":
        return

    def start() -> Any:
        import wandb

        run = _init(settings, results_dir, mode, "table", name, {}, list(settings.tags))
        run.log({"accuracy": wandb.Table(columns=list(columns), data=rows)})
        return run

    Tracker(start).finish({}, succeeded=True)


def _init(
    settings: TrackerSettings,
    results_dir: Path,
    mode: Mode,
    job_type: str,
    name: str,
    config: dict[str, Any],
    tags: list[str],
) -> Any:
    import wandb

    results_dir.mkdir(parents=True, exist_ok=True)
    return wandb.init(
        project=settings.project,
        entity=settings.entity,
        group=settings.group,
        job_type=job_type,
        name=name,
        config=config,
        tags=tags,
        dir=str(results_dir),
        mode=mode,
        # Without this a second run in the process would be appended to the first one.
        reinit="create_new",
        settings=wandb.Settings(silent=True, console="off"),
    )
