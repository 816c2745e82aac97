"""What a page shows of the runs behind its numbers, by configuration."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Any

from dpbench.claims.evidence import FRACTIONS
from dpbench.claims.schema import METRICS
from dpbench.config.identity import changes_nothing, is_identity
from dpbench.config.rules import trained_on
from dpbench.errors import show
from dpbench.privacy.guarantee import ACCOUNTS, circumstances, promise, sentence, shown
from dpbench.privacy.sampling import SCHEMES
from dpbench.privacy.tail import END, tail_in_words
from dpbench.report.run_curve import Points
from dpbench.tracking.proven import UNPROVEN, is_proven
from dpbench.tracking.reading import releases_in
from dpbench.wording import NOTHING

UNKNOWN = "unknown"


@dataclass(frozen=True)
class Made:
    """Where runs were made, in words.

    Attributes:
        commit: of this code, and whether it was modified.
        device: that computed.
        platform: Python and operating system.
        versions: of libraries.
    """

    commit: str
    device: str
    platform: str
    versions: str

    @classmethod
    def of(cls, origin: Mapping[str, Any]) -> Made:
        """From a record's provenance.json."""
        cuda, versions = origin.get("cuda"), origin.get("versions") or {}
        return cls(
            commit=str(origin.get("commit") or UNKNOWN)[:12] + (", modified" if origin.get("dirty") else ""),
            device=str(origin.get("device") or UNKNOWN) + (f", CUDA {cuda}" if cuda else ""),
            platform=f"Python {origin.get('python') or UNKNOWN}, {origin.get('platform') or UNKNOWN}",
            versions=", ".join(f"{name} {version}" for name, version in versions.items() if version),
        )


@dataclass(frozen=True)
class RunView:
    """One run.

    Attributes:
        seed: of the run.
        status: how it stands, and why.
        summary: content of summary.json.
        seconds: that it took; None where the record doesn't say.
        made: number of where it was made, from 1; None where the record doesn't say.
        points: its learning curve.
        noise_end: standard deviations at which its noise ends, see privacy/tail.py; inf where it doesn't.
    """

    seed: int
    status: str
    summary: Mapping[str, Any]
    seconds: float | None
    made: int | None
    points: Points
    noise_end: float

    def accuracy(self, which: str) -> str:
        """Test accuracy in per cent, "final" or "best"; a dash where there is none."""
        return percent((self.summary.get("test_accuracy") or {}).get(which))

    @property
    def eps(self) -> str:
        """Spent; a dash where the record doesn't say."""
        spent = self.summary.get("eps")
        return decimal(spent) + ("" if spent is None or is_proven(self.summary) else UNPROVEN)

    def score(self, metric: str) -> str:
        """Another number that claims may be about; a dash where there is none."""
        value = self.summary.get(metric)
        return percent(value) if metric in FRACTIONS else decimal(value)


@dataclass(frozen=True)
class Configuration:
    """Runs that differ in their seeds alone.

    Attributes:
        digest: hash of the configuration, the name of the folder of its records.
        runs: by seed.
        config: content of config.yaml of the first run that has one.
        ledger: content of ledger.json, likewise.
        artefacts: tables and figures whose numbers rest on it, by their files below conf/paper.
        audits: what was found by attacking its step, a line each.
        places: words of a command that say where records and options of one's own lie.
    """

    digest: str
    runs: tuple[RunView, ...]
    config: Mapping[str, Any]
    ledger: Mapping[str, Any]
    artefacts: tuple[str, ...]
    audits: tuple[str, ...]
    places: tuple[str, ...] = ()

    @cached_property
    def overrides(self) -> tuple[str, ...]:
        """What was typed for it, without what names a machine, a folder or a seed."""
        typed = (str(line) for line in self.config.get("overrides") or ())
        return tuple(line for line in typed if not changes_nothing(line))

    @property
    def command(self) -> str:
        """What runs it again."""
        seeds = ",".join(str(run.seed) for run in self.runs)
        typed = shlex.join((*self.places, *self.overrides, f"seed={seeds}", *("-m",) * (len(self.runs) > 1)))
        return f"python -m dpbench.run {typed}"

    @property
    def metrics(self) -> tuple[str, ...]:
        """What claims may be about, beside the accuracy, of which any run has a number."""
        others = (name for name in METRICS if name != "test_accuracy")
        return tuple(name for name in others if any(run.summary.get(name) is not None for run in self.runs))

    @cached_property
    def settings(self) -> tuple[tuple[str, str], ...]:
        """All settings that can change the numbers, group by group: the option chosen, and what it stands for."""
        choices = self.config.get("choices") or {}
        single, groups = [], []
        for key, value in self.config.items():
            if not is_identity(key):
                continue
            if not isinstance(value, dict):
                single.append(f"{key}={_shown(value)}")
            elif key in choices:
                groups.append((f"{key}={choices[key]}", _stage({**value, "kind": ""})))
            else:
                groups.append((key, _stage(value)))
        return ((f"algo={choices.get('algo', NOTHING)}", ", ".join(single)), *groups) if self.config else ()

    @property
    def spent(self) -> str | None:
        """The ledger in a line: releases, what they cost, and who says so."""
        if not self.ledger:
            return None
        ledger = self.ledger
        releases = ledger.get("releases") or []
        count = releases_in(releases)
        parts = [
            f"{count} of {ledger.get('planned', count)} planned releases",
            f"sampling rate {_span(release['sampling_rate'] for release in releases)}",
            f"noise multiplier {_span(of_one for release in releases for of_one in release['noise_multipliers'])}",
        ]
        beside = {(part["name"], part["noise_multiplier"]) for release in releases for part in release["beside"]}
        parts += [f"beside each {name} at {multiplier:.4g}" for name, multiplier in sorted(beside)]
        parts += [f"noise correlated between steps: {ledger['correlation']}"] if ledger.get("correlation") else []
        parts.append(f"eps {decimal(ledger.get('eps'))} of {decimal(ledger.get('target_eps'))} asked for")
        parts.append(f"delta {decimal(ledger.get('delta'))}")
        parts.append(f"accountant {ledger.get('accountant')}, sampler {ledger.get('sampler')}")
        parts.append(f"neighbours: {ledger.get('neighbouring')}")
        return "; ".join(parts)

    @property
    def guarantee(self) -> str | None:
        """What the runs promise, in words; None where the record doesn't say enough."""
        ledger = self.ledger
        scheme, data = SCHEMES.get(str(ledger.get("sampler"))), self.config.get("dataset") or {}
        said = (scheme, data.get("train_size"), ledger.get("eps"))
        if scheme is None or None in said or ledger.get("accountant") not in ACCOUNTS:
            return None
        releases = ledger.get("releases") or []
        eps = float(ledger["eps"])
        if math.isfinite(eps) and not all(run.summary.get("private", True) for run in self.runs):
            return "None that is proven: something reaches the model that the ledger does not record."
        text = promise(
            scheme,
            steps=releases_in(releases),
            beside=(part["name"] for release in releases for part in release["beside"]),
            correlated=ledger.get("correlation") is not None,
            eps=eps,
            delta=float(ledger["delta"]),
            accountant=str(ledger["accountant"]),
            size=trained_on(data),
            aside=int(data.get("validation_size") or 0),
        )
        if self.config.get("record_coordinates"):
            text += " It does not hold for gradients.npz in the record, which has gradients and norms without noise."
        published, spent = ledger.get("published_eps"), self.runs[0].summary.get("search_eps")
        runs = (self.config.get("privacy") or {}).get("search_runs")
        search = None if spent is None or runs is None else (float(runs), float(spent))
        text += circumstances(search, None if published is None else float(published))
        return text + (sentence(self._tail) if math.isfinite(eps) else "")

    @property
    def _tail(self) -> str | None:
        """What noise from a seed lacks, where that may matter; see privacy/tail.py."""
        end = min(run.noise_end for run in self.runs)
        if end < END:
            return f"seeded noise ended at {end:g} standard deviations then, so that delta may be more: see above"
        if math.isinf(end):
            return None
        releases = (
            (entry["count"] * times, entry["sampling_rate"], multiplier)
            for entry in self.ledger.get("releases") or ()
            for times, multiplier in (
                *((1, of_one) for of_one in entry["noise_multipliers"]),
                *((len(entry["noise_multipliers"]), part["noise_multiplier"]) for part in entry["beside"]),
            )
        )
        delta = float(self.ledger["delta"])
        correlated = float(self.ledger["eps"]) if self.ledger.get("correlation") else None
        scheme = SCHEMES[self.ledger["sampler"]]
        return tail_in_words(shown(scheme, releases, correlated=correlated, delta=delta), delta)

    @property
    def score(self) -> tuple[str, str]:
        """The number that the learning curves show, and its unit."""
        return (
            ("test accuracy", " %") if any(run.accuracy("final") != NOTHING for run in self.runs) else ("test loss", "")
        )


@dataclass(frozen=True)
class Group:
    """The configurations that an artefact is the first to need.

    Attributes:
        artefact: its file below conf/paper.
        configurations: in the order in which its numbers need them.
    """

    artefact: str
    configurations: tuple[Configuration, ...]

    @cached_property
    def common(self) -> tuple[str, ...]:
        """The overrides that all of them have."""
        first, *others = self.configurations
        return tuple(line for line in first.overrides if all(line in one.overrides for one in others))

    @cached_property
    def settings(self) -> tuple[tuple[str, str], ...]:
        """The settings that all of them have; none where there is but one configuration, whose settings are its own."""
        first, *others = self.configurations
        return tuple(part for part in first.settings if others and all(part in one.settings for one in others))

    def settings_of(self, one: Configuration) -> tuple[tuple[str, str], ...]:
        """The settings of one that not all of them have."""
        return tuple(part for part in one.settings if part not in self.settings)

    def name_of(self, one: Configuration) -> str:
        """The overrides that tell it from the others."""
        own = [line for line in one.overrides if line not in self.common]
        return " ".join(own or one.overrides) or one.digest


@dataclass(frozen=True)
class Runs:
    """All runs behind the numbers of a page.

    Attributes:
        configurations: in the order in which numbers need them.
        made: where; a run has the number of its own, from 1.
    """

    configurations: tuple[Configuration, ...]
    made: tuple[Made, ...]

    @cached_property
    def groups(self) -> tuple[Group, ...]:
        """The configurations, by the artefact that first needs them."""
        together = groupby(self.configurations, key=lambda one: one.artefacts[0])
        return tuple(Group(artefact, tuple(found)) for artefact, found in together)

    @property
    def short_noise(self) -> bool:
        """Whether the noise of any ended earlier than it does now."""
        return any(run.noise_end < END for one in self.configurations for run in one.runs)

    @property
    def count(self) -> int:
        """How many runs."""
        return sum(len(configuration.runs) for configuration in self.configurations)


def in_a_line(audit: Mapping[str, Any]) -> str:
    """The content of an audit.json: each lower bound beside what the attacked releases are claimed to spend."""
    bounds = "; ".join(
        f"{one['attack']}, {one['attacked']}: at least {decimal(one['eps_at_least'])} of {decimal(one['claimed_eps'])}"
        for one in audit["findings"]
    )
    verdict, confidence = str(audit["verdict"]).capitalize(), 100 * float(audit["confidence"])
    return f"{verdict}. Lower bounds on eps, with {confidence:g} % confidence: {bounds}."


def _stage(value: Mapping[str, Any]) -> str:
    """A group of settings in a line, its class first; what is only suggested to others is left out."""
    rest = [f"{key}={_shown(item)}" for key, item in value.items() if key not in ("kind", "suggested", "resident")]
    kind = str(value.get("kind", ""))
    return f"{kind}: {', '.join(rest)}" if kind and rest else kind or ", ".join(rest)


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return f"{{{_stage(value)}}}"
    return show(value)


def _span(values: Iterable[float]) -> str:
    found = sorted(set(values)) or [math.nan]
    return f"{found[0]:.4g}" if len(found) == 1 else f"{found[0]:.4g} to {found[-1]:.4g}"


def decimal(value: Any) -> str:
    """A number with four digits; a dash for none."""
    try:
        return NOTHING if value is None else f"{float(value):.4g}"
    except (TypeError, ValueError):
        return str(value)


def percent(value: Any) -> str:
    """A fraction in per cent; a dash for none."""
    return NOTHING if not isinstance(value, (int, float)) else f"{100 * value:.2f}"
