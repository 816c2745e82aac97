"""What is wrong with one record: files that lack or are damaged, and files that contradict each other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from typing import Any

from dpbench.tracking.damage import damage_of
from dpbench.tracking.reading import Recorded, in_words, releases_in
from dpbench.tracking.status import Status

NOT_BEGUN = "status.json is missing"  # the first file that a run writes
# What rounding may leave between an eps and its target.
ROUNDING = 1e-6


def problems_of(record: Recorded, hash_of: Callable[[Mapping[str, Any]], str]) -> list[str]:
    """What is wrong with a record, one thing an entry; a run that is under way may lack anything.

    Args:
        record: to be looked at; its files are read.
        hash_of: hash of a configuration from the content of its config.yaml.
    """
    if not record.exists:
        return [NOT_BEGUN]
    record.complete()
    if record.problems:
        return [in_words({name: problem}) for name, problem in record.problems.items()]
    found = [*_settings(record, hash_of)]
    if record.word != Status.RUNNING:
        found += [*_ledger(record)]
    if record.finished:
        found += filter(None, [damage_of(record)])
        found += [*_of_finished(record)]
    return found


def _settings(record: Recorded, hash_of: Callable[[Mapping[str, Any]], str]) -> Iterator[str]:
    settings, digest, seed = record.settings, record.folder.parent.name, int(record.folder.name)
    if not settings:
        return
    if settings.get("seed") != seed:
        yield f"config.yaml is of seed {settings.get('seed')}"
    try:
        found = hash_of(settings)
    except ValueError as error:
        yield f"config.yaml {error}"
        return
    if found != digest:
        yield f"config.yaml is of the hash {found}"


def _ledger(record: Recorded) -> Iterator[str]:
    """What the ledger says, and whether the summary says the same."""
    ledger, summary = record.ledger, record.summary
    if not ledger:
        return
    made, steps = releases_in(ledger["releases"]), summary.get("steps")
    if steps is not None and steps != made:
        yield f"summary.json has {steps} steps, ledger.json {made} releases"
    spent, target = ledger.get("eps"), ledger.get("target_eps")
    if summary.get("eps") is not None and summary["eps"] != spent:
        yield f"summary.json has eps {summary['eps']}, ledger.json {spent}"
    # A publication's own arithmetic may allow for more; then its eps is the one that was to be kept.
    allowed = ledger["published_eps"] if ledger.get("published_eps") is not None else spent
    if allowed is not None and target is not None and float(allowed) > float(target) * (1 + ROUNDING):
        yield f"ledger.json spends eps {allowed} of {target}"


def _of_finished(record: Recorded) -> Iterator[str]:
    ledger, summary, lines = record.ledger, record.summary, record.metrics
    planned = ledger.get("planned")
    made = releases_in(ledger.get("releases", ()))
    if planned is not None and made != planned:
        yield f"status.json says finished, ledger.json has {made} of {planned} releases"
    if summary.get("seed") not in (None, int(record.folder.name)):
        yield f"summary.json is of seed {summary['seed']}"
    steps = [int(line.get("step", -1)) for line in lines]
    if any(later <= earlier for earlier, later in pairwise((-1, *steps))):
        yield "metrics.jsonl has steps that do not grow"
    last, final = lines[-1].get("test_accuracy") if lines else None, summary["test_accuracy"]["final"]
    if lines and last != final:
        yield f"metrics.jsonl ends with accuracy {last}, summary.json has {final}"
