"""From overrides to the hash of a run, composed once and kept for as long as code and options stay as they are."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Iterable, Sequence
from pathlib import Path

from dpbench import cache
from dpbench.claims.notation import Overrides
from dpbench.config import compose_each, conf_folder, config_hash
from dpbench.config.schema import SCHEMAS, RunConfig
from dpbench.errors import UserError
from dpbench.privacy import sampling
from dpbench.reproduction.index import RecordIndex

Candidate = tuple[str, ...]


class Hashes:
    """Gives `Evidence` the hash of a candidate, or None where no record can be its own.

    Args:
        index: of the records.
    """

    def __init__(self, index: RecordIndex) -> None:
        self.index = index
        self._key = fingerprint()
        self._known: dict[str, str] = cache.read("hashes", self._key) or {}

    def __call__(self, candidate: Candidate) -> str | None:
        """The hash; None where the records rule it out, or where its options don't exist."""
        return self.of(candidate) or None if self.index.possible(candidate) else None

    def of(self, candidate: Candidate) -> str:
        """The hash, whatever is recorded; empty where its options don't exist."""
        if _text(candidate) not in self._known:
            self.learn([candidate])
        return self._known[_text(candidate)]

    def prepare(self, candidates: Iterable[Candidate]) -> None:
        """Compose those that may have records, together, which is faster than one by one."""
        self.learn([one for one in candidates if self.index.possible(one) and _text(one) not in self._known])

    def learn(self, candidates: Sequence[Candidate]) -> None:
        """Compose candidates, and keep their hashes."""
        if not candidates:
            return
        try:
            found = [config_hash(job.config) for job in compose_each(candidates)]
        except UserError:  # one of them is wrong; which one, they say one by one
            found = [_hash(one) for one in candidates]
        self._known |= dict(zip(map(_text, candidates), found, strict=True))
        cache.write("hashes", self._key, self._known)


def _hash(candidate: Candidate) -> str:
    """The hash; empty where its options don't exist or don't go together, so that there is no such run."""
    try:
        return config_hash(compose_each([candidate])[0].config)
    except UserError:
        return ""


def _text(candidate: Candidate) -> str:
    return "\n".join(candidate)


def fingerprint() -> str:
    """Of all that decides which hash overrides have: the options, and the code that composes them and the stages."""
    conf = conf_folder()
    files = [file for file in conf.rglob("*.yaml") if "paper" not in file.relative_to(conf).parts]
    files += Path(inspect.getfile(RunConfig)).parent.glob("*.py")
    files.append(Path(sampling.__file__))
    stages = {kind for group in SCHEMAS.values() for known in group.values() for kind in known.__mro__}
    files += {Path(inspect.getfile(kind)) for kind in stages if kind.__module__.startswith("dpbench.")}
    digest = hashlib.sha256()
    for file in sorted(set(files)):
        digest.update(f"{file.name}\n".encode())
        digest.update(file.read_bytes())
    return digest.hexdigest()


def settings(candidate: Candidate) -> Overrides:
    """The overrides of a candidate by key."""
    return {key: value for key, _, value in (override.partition("=") for override in candidate)}
