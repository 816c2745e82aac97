"""Weights & Biases as a copy of the local record. Nothing that fails or hangs here ever stops a run.

A server that can't be reached is tried once by a process, whose later runs are recorded here instead.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpbench.files import jsonable
from dpbench.tracking.tracker import Tracker, service
from dpbench.tracking.wandb_mode import Mode, choose_mode

if TYPE_CHECKING:  # reading records does without the schema, which imports torch
    from dpbench.config.schema import TrackerSettings

# Metrics that W&B plots over epochs; the summary keeps their last value, for the best one on test data is a choice
# made by looking at test data.
METRICS = ("train_loss", "gradient_norm", "above_threshold", "test_loss", "test_accuracy", "eps", "threshold")

# Seconds that W&B gets to reach its server, and to send what is left at the end, unless its own variables say more.
TIMEOUTS = {"init_timeout": 30.0, "finish_timeout": 60.0}
# How the line begins that says that runs are recorded here from now on.
UNREACHABLE = "W&B can't go online"


def open_tracker(
    settings: TrackerSettings,
    results_dir: Path,
    *,
    name: str,
    config: dict[str, Any],
    tags: Sequence[str],
    say: Callable[[str], object],
    resumed: str | None = None,
    logged: Sequence[dict[str, float]] = (),
    run_id: str | None = None,
) -> Tracker:
    """A W&B run for one training run, or the one that was begun for it.

    W&B can't go on with a run that it recorded offline: there the run is written once more from the beginning, under
    the id that it had, and takes the place of its first part when it is synchronised.

    Args:
        settings: of the tracker.
        results_dir: where W&B keeps what it records offline.
        name: of the run.
        config: of the run.
        tags: beside those of the settings.
        say: told of a failure.
        resumed: id of the run to go on with.
        logged: metrics of the evaluations before, with their steps.
        run_id: takes the place of what W&B has under this id; None for a run of its own.
    """
    mode, _ = choose_mode(settings)
    if mode == "disabled":
        return Tracker(None, say)

    # Known before W&B has answered, as a checkpoint may be written by then.
    id = resumed or run_id or secrets.token_hex(4)

    def start() -> Any:
        plain = jsonable(config)  # W&B turns infinities into a word of its own; ours is "inf"
        known = {"job_type": "train", "name": name, "config": plain, "tags": [*settings.tags, *tags], "id": id}
        run = _init(settings, results_dir, mode, known, say, goes_on=resumed is not None)
        for metric in METRICS:
            run.define_metric(metric, step_metric="epoch", summary="last")
        return run

    tracker = Tracker(start, say, id)
    tracker.catch_up(logged)
    return tracker


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

    known = {"job_type": job_type, "name": name, "config": {}, "tags": list(settings.tags)}
    tracker = Tracker(lambda: _init(settings, results_dir, mode, known, say), say)
    tracker.add(content)
    tracker.finish({}, succeeded=True)
    tracker.wait()
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
    known: dict[str, Any],
    say: Callable[[str], object],
    *,
    goes_on: bool = False,
) -> Any:
    """Start a W&B run; offline where its server can't be reached, unless this process has others under way.

    Args:
        settings: of the tracker.
        results_dir: where W&B keeps what it records offline.
        mode: "online" or "offline".
        known: of the run, by the names of `wandb.init`.
        say: told where the server can't be reached.
        goes_on: whether W&B has the run already.
    """
    import wandb

    results_dir.mkdir(parents=True, exist_ok=True)
    own: Any = {name: value for name, value in TIMEOUTS.items() if f"WANDB_{name.upper()}" not in os.environ}
    start = partial(
        wandb.init,
        project=settings.project,
        entity=settings.entity,
        group=settings.group,
        **known,
        dir=str(results_dir),
        # Without this a second run in the process would be appended to the first one.
        reinit="create_new",
        settings=wandb.Settings(silent=True, console="off", finish_timeout_raises=True, **own),
    )
    if service().offline:  # since the mode was chosen
        mode = "offline"
    if mode == "offline":  # which W&B's telemetry of its own calls does not ask for
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    try:
        # Offline "allow" would only warn.
        return start(mode=mode, resume="allow" if goes_on and mode == "online" else None)
    except wandb.errors.CommError as error:
        if mode != "online" or service().under_way:
            raise
        service().offline = True
        # W&B holds on to the id of a run that did not start for as long as its service lives.
        wandb.teardown()
        why, here = str(error).partition("\n")[0], results_dir / "wandb"
        say(f"{UNREACHABLE} ({why}); this run and those after it are recorded in {here}, which wandb sync sends")
        return start(mode="offline")
