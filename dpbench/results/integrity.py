"""What is wrong with one record: files that lack or are damaged, and files that contradict each other."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

from dpbench.tracking.damage import damage_of
from dpbench.tracking.reading import Recorded, problems_in_words, releases_in
from dpbench.tracking.status import Status

NOT_BEGUN = "status.json is missing"  # the first file that a run writes


def problems_of(record: Recorded) -> list[str]:
    """What is wrong with a record, one thing an entry; its files are read. A run under way may lack anything."""
    if not record.exists:
        return [NOT_BEGUN]
    record.complete()
    if record.problems:
        return [problems_in_words({name: problem}) for name, problem in record.problems.items()]
    found = [*_settings(record)]
    if record.word != Status.RUNNING:
        found += [*_ledger(record)]
    if record.finished:
        found += filter(None, [damage_of(record)])
        found += [*_of_finished(record)]
    return found


def _settings(record: Recorded) -> Iterator[str]:
    from dpbench.config.recorded import recorded_hash  # takes seconds to import

    settings, digest, seed = record.settings, record.folder.parent.name, int(record.folder.name)
    if not settings:
        return
    if settings.get("seed") != seed:
        yield f"config.yaml is of seed {settings.get('seed')}"
    try:
        found = recorded_hash(settings)
    except ValueError as error:
        yield f"config.yaml {error}"
        return
    if found != digest:
        yield f"config.yaml is of the hash {found}"
        return
    yield from _budget(record)


def _budget(record: Recorded) -> Iterator[str]:
    """Whether ledger and summary are of the settings; these are such as a run can have."""
    from dpbench.config.rules import delta_of, trained_on  # take seconds to import

    settings, ledger, summary = record.settings, record.ledger, record.summary
    size, given = trained_on(settings["dataset"]), settings["privacy"]["noise_multiplier"]
    rate = settings["batch_size"] / size
    asked = {
        "target_eps": settings["eps"],
        "delta": delta_of(settings["delta"], size),
        "sampling_rate": rate,
        "sampler": settings["privacy"]["sampler"],
        "noise_multiplier": given,
        "algorithm": settings["algo"]["name"],
        "dataset": settings["dataset"]["name"],
        "model": settings["model"]["name"],
    }
    for name, content in (("ledger.json", ledger), ("summary.json", summary)):
        for key, value in asked.items():
            if value is not None and content.get(key) is not None and not _equal(content[key], value):
                yield f"{name} has {key} {content[key]}, config.yaml {value}"
    rates = {entry["sampling_rate"] for entry in ledger.get("releases", ())}
    if not all(_equal(one, rate) for one in rates):
        yield f"ledger.json has sampling rates {', '.join(map(str, sorted(rates)))}, config.yaml {rate}"


def _equal(one: Any, other: Any) -> bool:
    """Whether two entries are equal; numbers, which JSON may have as words, to rounding."""
    if isinstance(other, str):
        return bool(one == other)
    return math.isclose(float(one), float(other), rel_tol=1e-9)


def _ledger(record: Recorded) -> Iterator[str]:
    """What the ledger says, and whether the summary says the same."""
    from dpbench.privacy.ledger import exceeds  # takes seconds to import

    ledger, summary = record.ledger, record.summary
    if not ledger:
        return
    made, steps = releases_in(ledger["releases"]), summary.get("steps")
    if steps is not None and steps != made:
        yield f"summary.json has {steps} steps, ledger.json {made} releases"
    spent, target = ledger.get("eps"), ledger.get("target_eps")
    for key in ("eps", "target_eps", "delta", "accountant", "sampler"):
        if summary.get(key) is not None and summary[key] != ledger.get(key):
            yield f"summary.json has {key} {summary[key]}, ledger.json {ledger.get(key)}"
    multipliers = {one for entry in ledger["releases"] for one in entry["noise_multipliers"]}
    constant = record.settings.get("noise", {}).get("kind") == "ConstantNoise" and len(multipliers) == 1
    if constant and summary.get("noise_multiplier") is not None and summary["noise_multiplier"] not in multipliers:
        yield f"summary.json has noise_multiplier {summary['noise_multiplier']}, ledger.json {multipliers.pop()}"
    # A publication's own arithmetic may allow for more; then its eps is the one that was to be kept.
    allowed = ledger["published_eps"] if ledger.get("published_eps") is not None else spent
    if allowed is not None and target is not None and exceeds(float(allowed), float(target)):
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
    best = summary["test_accuracy"].get("best")
    if best is not None and float(best) < float(summary["test_accuracy"]["final"]):
        yield f"summary.json has a best accuracy of {best}, below the last one"
    last, final = lines[-1].get("test_accuracy") if lines else None, summary["test_accuracy"]["final"]
    if lines and last != final:
        yield f"metrics.jsonl ends with accuracy {last}, summary.json has {final}"
