"""Telling whether the record of a run has to be made again, and keeping aside what can't be read."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dpbench.tracking.published import Published, device_kind
from dpbench.tracking.reading import Recorded, is_seed
from dpbench.tracking.status import Status

QUARANTINE = "quarantine"
# Files that every finished run has, besides status and summary, without which it is damaged.
OF_FINISHED = ("config.yaml", "ledger.json", "provenance.json", "metrics.jsonl")


def damage_of(record: Recorded) -> str | None:
    """What is wrong with the record of a run that calls itself finished, in words; None for nothing.

    Of one that does not, only status and summary must be readable: it is run again in any case.
    """
    if not record.finished:
        return record.damage
    missing = [f"{name} is missing" for name in OF_FINISHED if not (record.folder / name).exists()]
    record.complete()
    return record.damage or "; ".join(missing) or _cut_short(record)


def _cut_short(record: Recorded) -> str | None:
    """Whole lines may be missing; the last step of a run is always evaluated."""
    last, steps = record.metrics[-1]["step"] if record.metrics else None, record.summary.get("steps")
    return None if last == steps else f"metrics.jsonl ends at step {last or 0} of {steps}"


def set_aside(path: Path, results_dir: Path) -> Path:
    """Move a record, or what lies beside one, to <results_dir>/quarantine in one step; what is there already stays.

    What was seen of a run stays noted where its record was.

    Returns:
        Where it is now.

    Raises:
        OSError: it can't be moved.
    """
    below = path.relative_to(results_dir / "runs")
    target = results_dir / QUARANTINE / below
    target.parent.mkdir(parents=True, exist_ok=True)
    attempt = 1
    while target.exists():
        attempt += 1
        target = results_dir / QUARANTINE / below.with_name(f"{below.name}.{attempt}")
    note_what_is_shown(path)
    return path.rename(target)


def note_what_is_shown(path: Path) -> None:
    """Before a record goes: what was seen of its run stays noted where it was, unless there was no privacy to lose.

    Raises:
        OSError: the note can't be written.
    """
    record = Recorded.read(path)
    if not is_seed(path.name) or record.settings.get("eps") in (math.inf, "inf"):
        return
    if (shown := _shown_by(record)).step > Published.read(path).step:
        shown.write(path)


def _shown_by(record: Recorded) -> Published:
    """What was seen of a run, as far as its record can be read."""
    origin, since = record.provenance, 0
    for part in origin.get("resumed", ()):
        now = {**record.provenance, **part}
        if (_drawn_by(now), _drawn_by_others(now)) != (_drawn_by(origin), _drawn_by_others(origin)):
            since = part["step"]
        origin = now
    noise = (each for entry in record.ledger.get("releases", ()) for each in entry["noise_multipliers"])
    unknown = math.inf if record.damaged else 0
    end = record.summary.get("steps", math.inf) if record.word == Status.FINISHED else unknown
    last = record.metrics[-1]["step"] if record.metrics else end
    others = [
        {**drawn, "at_once": rank.get("at_once"), "strategies": None}
        for drawn, rank in zip(_drawn_by_others(origin), origin.get("ranks", ())[1:], strict=True)
    ]
    return Published(
        last,
        noise_multiplier=next(noise, None),
        at_once=origin.get("at_once"),
        since=since,
        others=others or None,
        **_drawn_by(origin),
    )


def _drawn_by(origin: Mapping[str, Any]) -> dict[str, Any]:
    """What of a provenance decides which numbers are drawn, as a note has it."""
    return {
        **_of_process(origin),
        "noise": origin.get("seeded_noise"),
        "channels_last": origin.get("channels_last"),
        "processes": origin.get("processes"),
    }


def _drawn_by_others(origin: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The same of what each process from process 1 on has of its own."""
    return [_of_process(rank) for rank in origin.get("ranks", ())[1:]]


def _of_process(found: Mapping[str, Any]) -> dict[str, Any]:
    device = found.get("device")
    return {"device": device and device_kind(device), "micro_batch": found.get("micro_batch")}
