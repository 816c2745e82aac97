"""Weights & Biases as a copy of the local record. Nothing that fails here ever stops a run."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, cast, get_args

from dpbench.config.schema import TrackerSettings

Mode = Literal["online", "offline", "disabled"]

# Metrics that W&B plots over epochs; the summary keeps their last value, for the best one on test data is a choice
# made by looking at test data.
METRICS = ("train_loss", "test_loss", "test_accuracy", "eps")


def choose_mode(settings: TrackerSettings) -> tuple[Mode, str]:
    """The mode that the settings come to, and why: auto is online where an API key is known (no network needed)."""
    if settings.mode != "auto":
        return cast(Mode, settings.mode), "as asked"
    if os.environ.get("WANDB_MODE") in get_args(Mode):
        return cast(Mode, os.environ["WANDB_MODE"]), "as WANDB_MODE says"
    try:
        import wandb

        if wandb.setup().settings.api_key:
            return "online", "tracker.mode=offline keeps it here"
        return "offline", "no API key; log in with: wandb login"
    except Exception as error:
        return "disabled", f"can't be set up: {type(error).__name__}: {error}"


def tracker_line(settings: TrackerSettings, results_dir: Path) -> str:
    """One line that says whether and where W&B records, and why."""
    mode, why = choose_mode(settings)
    where = {
        "online": f", project {settings.project}",
        "offline": f", in {results_dir / 'wandb'}",
        "disabled": "",
    }
    return f"W&B: {mode} ({why}){where[mode]}"


class Tracker:
    """One W&B run; a no-op once anything about it has failed, which it says."""

    def __init__(self, start: Callable[[], Any] | None, say: Callable[[str], object]) -> None:
        """Start a run.

        Args:
            start: makes the W&B run; None for no tracking.
            say: told of a failure in one line.
        """
        self._say = say
        self._run: Any = None
        if start is not None:
            self._guard("start", lambda: setattr(self, "_run", start()))

    def _guard(self, what: str, action: Callable[[], object]) -> None:
        try:
            action()
        except Exception as error:
            self._run = None
            self._say(f"W&B failed to {what} ({type(error).__name__}: {error}); the run goes on without it")

    def log(self, metrics: dict[str, float], step: int) -> None:
        """Record the metrics of an evaluation."""
        run = self._run
        if run is not None:
            # W&B has no infinity: eps is left out where there is no noise.
            finite = {key: value for key, value in metrics.items() if math.isfinite(value)}
            self._guard("log", lambda: run.log(finite, step=step))

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
    settings: TrackerSettings,
    results_dir: Path,
    *,
    name: str,
    config: dict[str, Any],
    tags: Sequence[str],
    say: Callable[[str], object],
) -> Tracker:
    """A W&B run for one training run; `say` is told of a failure."""
    mode, _ = choose_mode(settings)
    if mode == "disabled":
        return Tracker(None, say)

    def start() -> Any:
        run = _init(settings, results_dir, mode, "train", name, _finite(config), [*settings.tags, *tags])
        for metric in METRICS:
            run.define_metric(metric, step_metric="epoch", summary="last")
        return run

    return Tracker(start, say)


def log_once(
    settings: TrackerSettings,
    results_dir: Path,
    *,
    job_type: str,
    name: str,
    content: Callable[[], dict[str, Any]],
    say: Callable[[str], object],
) -> bool:
    """A W&B run that logs one set of things and ends, in the sweep's group.

    Args:
        settings: of the tracker.
        results_dir: where W&B keeps what it records offline.
        job_type: what kind of run it is.
        name: of the run.
        content: makes what is logged, by name; called only where W&B records.
        say: told of a failure.

    Returns:
        Whether W&B records.
    """
    mode, _ = choose_mode(settings)
    if mode == "disabled":
        return False

    def start() -> Any:
        run = _init(settings, results_dir, mode, job_type, name, {}, list(settings.tags))
        run.log(content())
        return run

    Tracker(start, say).finish({}, succeeded=True)
    return True


def log_table(
    settings: TrackerSettings,
    results_dir: Path,
    *,
    name: str,
    columns: Sequence[str],
    rows: list[list[Any]],
    say: Callable[[str], object],
) -> None:
    """The accuracy table of a sweep, as a W&B run of its own in the sweep's group."""

    def content() -> dict[str, Any]:
        import wandb

        return {"accuracy": wandb.Table(columns=list(columns), data=rows)}

    log_once(settings, results_dir, job_type="table", name=name, content=content, say=say)


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
