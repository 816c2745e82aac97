"""From overrides to the hash of a run, composed once and kept for as long as code and options stay as they are."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from dpbench import cache
from dpbench.claims.notation import Candidate
from dpbench.config import compose_each, conf_folder, config_hash
from dpbench.errors import UserError
from dpbench.reproduction.index import RecordIndex
from dpbench.sources import digest_of, sources_of


class Hashes:
    """Gives `Evidence` the hash of a candidate, or None where no record can be its own.

    Args:
        index: of the records.
        config_dirs: further folders searched for options.
    """

    def __init__(self, index: RecordIndex, config_dirs: Sequence[Path] = ()) -> None:
        self.index = index
        self._config_dirs = config_dirs
        self._key = fingerprint(config_dirs)
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
            found = [config_hash(job.config) for job in compose_each(candidates, self._config_dirs)]
        except UserError:  # one of them is wrong; which one, they say one by one
            found = [self._hash(one) for one in candidates]
        self._known |= dict(zip(map(_text, candidates), found, strict=True))
        cache.write("hashes", self._key, self._known)

    def _hash(self, candidate: Candidate) -> str:
        """The hash; empty where its options don't exist or don't go together, so that there is no such run."""
        try:
            return config_hash(compose_each([candidate], self._config_dirs)[0].config)
        except UserError:
            return ""


def _text(candidate: Candidate) -> str:
    return "\n".join(candidate)


def fingerprint(config_dirs: Sequence[Path] = ()) -> str:
    """Of all that decides which hash overrides have: the options, and the code that composes them and the stages."""
    conf = conf_folder()
    files = sources_of("dpbench.config")
    files |= {file for file in conf.rglob("*.yaml") if "paper" not in file.relative_to(conf).parts}
    own = {file for folder in config_dirs for kind in ("*.yaml", "*.py") for file in folder.rglob(kind)}
    return digest_of(files | own, *map(str, config_dirs))
