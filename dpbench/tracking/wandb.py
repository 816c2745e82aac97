"""Weights & Biases as a copy of the local record. Nothing that fails or hangs here ever stops a run.

W&B is called on a thread of its own, so that training waits for none of it; only the end of a run waits, and not for
ever. A server that can't be reached is tried once by a process, whose later runs are recorded here instead.
"""

from __future__ import annotations

import math
import os
import secrets
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast, get_args

from dpbench.files import jsonable
from dpbench.tracking.background import Background

if TYPE_CHECKING:  # reading records does without the schema, which imports torch
    from dpbench.config.schema import TrackerSettings

Mode = Literal["online", "offline", "disabled"]
# Words of older versions of W&B that it still takes in WANDB_MODE.
OLDER_WORDS = {"dryrun": "offline", "run": "online"}

# Metrics that W&B plots over epochs; the summary keeps their last value, for the best one on test data is a choice
# made by looking at test data.
METRICS = ("train_loss", "gradient_norm", "above_threshold", "test_loss", "test_accuracy", "eps", "threshold")


# Seconds that W&B gets to reach its server, and to send what is left at the end, unless its own variables say more.
TIMEOUTS = {"init_timeout": 30.0, "finish_timeout": 60.0}
# How the line begins that says that runs are recorded here from now on.
UNREACHABLE = "W&B can't go online"
# Seconds that the end of a run waits for W&B, whatever it does.
PATIENCE = 120.0


class _Service:
    """What this process knows of W&B.

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


_service = _Service()


def _loggable(metrics: dict[str, float]) -> dict[str, float]:
    """W&B has no infinity: eps is left out where there is no noise."""
    return {key: value for key, value in metrics.items() if math.isfinite(value)}


def choose_mode(settings: TrackerSettings) -> tuple[Mode, str]:
    """The mode that the settings come to, and why: auto is online where an API key is known (no network needed)."""
    if _service.hangs:
        return "disabled", "it does not answer"
    mode, why = _asked_for(settings)
    return ("offline", "it could not go online") if mode == "online" and _service.offline else (mode, why)


def _asked_for(settings: TrackerSettings) -> tuple[Mode, str]:
    if settings.mode != "auto":
        return cast(Mode, settings.mode), "as asked"
    of_user = os.environ.get("WANDB_MODE", "")
    if (mode := OLDER_WORDS.get(of_user, of_user)) in get_args(Mode):
        return cast(Mode, mode), "as WANDB_MODE says"
    try:
        if _has_credentials():
            return "online", "tracker.mode=offline keeps it here"
        return "offline", "no API key; log in with: wandb login"
    except Exception as error:
        return "disabled", f"can't be set up: {type(error).__name__}: {' '.join(str(error).split())}"


def _has_credentials() -> bool:
    """Whether W&B finds an API key or a token file, where `wandb login` and a person put them.

    Asked as W&B's own command asks. Its public functions start its service, or print, or prompt.
    """
    from wandb.sdk import wandb_setup

    settings = wandb_setup.singleton().settings
    if settings.api_key or settings.identity_token_file:
        return True
    from wandb.sdk.lib import wbauth

    return wbauth.read_netrc_auth(host=settings.base_url) is not None


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


def flatten(nested: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested dictionaries with keys joined by slashes."""
    flat: dict[str, Any] = {}
    for key, value in nested.items():
        if isinstance(value, dict):
            flat.update(flatten(value, f"{prefix}{key}/"))
        else:
            flat[prefix + key] = value
    return flat


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
        tagged = [*settings.tags, *tags]
        plain = jsonable(config)  # W&B turns infinities into a word of its own; ours is "inf"
        run = _init(settings, results_dir, mode, "train", name, plain, tagged, say, id, goes_on=resumed is not None)
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

    def start() -> Any:
        run = _init(settings, results_dir, mode, job_type, name, {}, list(settings.tags), say)
        run.log(content())
        return run

    tracker = Tracker(start, say)
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
    job_type: str,
    name: str,
    config: dict[str, Any],
    tags: list[str],
    say: Callable[[str], object],
    run_id: str | None = None,
    goes_on: bool = False,
) -> Any:
    """Start a W&B run; offline where its server can't be reached, unless this process has others under way."""
    import wandb

    results_dir.mkdir(parents=True, exist_ok=True)
    own: Any = {name: value for name, value in TIMEOUTS.items() if f"WANDB_{name.upper()}" not in os.environ}
    start = partial(
        wandb.init,
        project=settings.project,
        entity=settings.entity,
        group=settings.group,
        job_type=job_type,
        id=run_id,
        name=name,
        config=config,
        tags=tags,
        dir=str(results_dir),
        # Without this a second run in the process would be appended to the first one.
        reinit="create_new",
        settings=wandb.Settings(silent=True, console="off", finish_timeout_raises=True, **own),
    )
    if _service.offline:  # since the mode was chosen
        mode = "offline"
    try:
        # Offline "allow" would only warn.
        return start(mode=mode, resume="allow" if goes_on and mode == "online" else None)
    except wandb.errors.CommError as error:
        if mode != "online" or _service.under_way:
            raise
        _service.offline = True
        # W&B holds on to the id of a run that did not start for as long as its service lives.
        wandb.teardown()
        why, here = str(error).partition("\n")[0], results_dir / "wandb"
        say(f"{UNREACHABLE} ({why}); this run and those after it are recorded in {here}, which wandb sync sends")
        return start(mode="offline")
