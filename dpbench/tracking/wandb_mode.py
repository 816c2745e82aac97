"""Whether W&B records online, offline or not at all, and why."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Literal, cast, get_args

from dpbench.tracking.tracker import service

if TYPE_CHECKING:  # reading records does without the schema, which imports torch
    from dpbench.config.schema import TrackerSettings

Mode = Literal["online", "offline", "disabled"]
# Words of older versions of W&B that it still takes in WANDB_MODE.
OLDER_WORDS = {"dryrun": "offline", "run": "online"}


def choose_mode(settings: TrackerSettings) -> tuple[Mode, str]:
    """The mode that the settings come to, and why: auto is online where an API key is known (no network needed)."""
    if service().hangs:
        return "disabled", "it does not answer"
    mode, why = _asked_for(settings)
    return ("offline", "it could not go online") if mode == "online" and service().offline else (mode, why)


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
