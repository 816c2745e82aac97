"""Every cell that is trained, how it stands, and what is left to do."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from dpbench.claims import Artefact, Cell, Evidence
from dpbench.claims.notation import Candidate, in_one_form, settings_of
from dpbench.config import RunConfig
from dpbench.errors import UserError
from dpbench.reproduction.available import Available
from dpbench.reproduction.facts import Facts, facts_of
from dpbench.reproduction.hashes import Hashes
from dpbench.reproduction.index import RecordIndex
from dpbench.reproduction.standing import Batch, Standing, State, standing_of
from dpbench.reproduction.times import Basis, Times
from dpbench.tracking.reading import seeds_of

RUNNABLE = (State.PARTLY, State.MISSING)


@dataclass(eq=False)  # of which each is itself a key
class Entry:
    """One cell of a plan.

    Attributes:
        artefact: that it is a cell of.
        cell: one that is trained.
        facts: of its candidates.
        lacking: what it needs that is not here.
        standing: what is there and what is missing.
    """

    artefact: Artefact
    cell: Cell
    facts: Facts
    lacking: str | None
    standing: Standing

    @property
    def runnable(self) -> bool:
        """Whether something of it is missing that can be run here."""
        return self.standing.state in RUNNABLE

    def missing(self) -> Iterator[tuple[object, int]]:
        """Each run that it asks for, and those of its search that it will ask for together, with how many they are."""
        for batch in self.standing.batches:
            run = in_one_form(batch.candidate)
            yield from (((run, seed), 1) for seed in batch.seeds)
        if self.standing.later:
            yield frozenset(map(in_one_form, self.cell.candidates)), self.standing.later


@dataclass(frozen=True)
class Line:
    """What a plan says of some cells together.

    Attributes:
        states: how many cells stand how.
        reasons: how many cells are not run for which reason, or failed how.
        runs: that are missing and can be run here; shared ones are counted once.
        seconds: that these take on this device.
        basis: the worst that the estimate rests on; None where nothing is to be run.
    """

    states: Counter[State]
    reasons: Counter[str]
    runs: int
    seconds: float
    basis: Basis | None


class Planner:
    """What is done and what is missing of some artefacts.

    Attributes:
        entries: cells that are trained, in the order of the files.
        evidence: what the records say.
        tried: runs that this process has carried out, each by `run_of` and seed.
    """

    def __init__(
        self,
        artefacts: Sequence[Artefact],
        results_dir: Path,
        config: RunConfig,
        *,
        retry: bool,
        config_dirs: Sequence[Path] = (),
    ) -> None:
        """Look at all cells.

        Args:
            artefacts: to be reproduced.
            results_dir: folder of the records.
            config: a run with the settings that all share: device and data.
            retry: whether runs that failed are to be tried once more.
            config_dirs: further folders searched for options.
        """
        self._runs = results_dir / "runs"
        self._retry = retry
        self._config_dirs = tuple(config_dirs)
        self._index = RecordIndex(results_dir)
        self._hashes = Hashes(self._index, config_dirs)
        self._times = Times(config.device)
        self._learn(self._index.digests)
        self.evidence = Evidence(results_dir, self._hashes)
        self.tried: set[tuple[str, int]] = set()
        cells = [(artefact, cell) for artefact in artefacts for cell in artefact.cells if cell.runs]
        root, download = Path(config.data.root), config.data.download
        available = Available(root, download=download, cells=[cell for _, cell in cells])
        self._hashes.prepare(candidate for _, cell in cells for candidate in cell.candidates)
        self.entries = [self._entry(artefact, cell, available) for artefact, cell in cells]
        self._sharing: dict[Candidate, list[Entry]] = defaultdict(list)
        for entry in self.entries:
            for candidate in entry.cell.candidates:
                self._sharing[in_one_form(candidate)].append(entry)

    def _entry(self, artefact: Artefact, cell: Cell, available: Available) -> Entry:
        try:
            facts = facts_of(settings_of(cell.candidates[0]), self._config_dirs)
        except UserError as error:
            raise UserError(f"{artefact.where} at {cell.place}: {error}") from error
        lacking = available.lacks(cell, facts)
        return Entry(artefact, cell, facts, lacking, self._standing(cell, lacking))

    def _standing(self, cell: Cell, lacking: str | None) -> Standing:
        return standing_of(cell, self.evidence, self._may_retry, lacking)

    def _may_retry(self, candidate: Candidate, seed: int) -> bool:
        return self._retry and (self.run_of(candidate), seed) not in self.tried

    def note(self, batch: Batch) -> None:
        """Look again at all cells that runs belong to, which have just been carried out, and learn from their times."""
        run = self.run_of(batch.candidate)
        self.tried.update((run, seed) for seed in batch.seeds)
        self._index.refresh()
        self._hashes.prepare([batch.candidate])
        digest = self._hashes(batch.candidate)
        if digest is not None:
            self._learn([digest])
        for entry in self._sharing[in_one_form(batch.candidate)]:
            self.look(entry)

    def put_back(self, batch: Batch) -> None:
        """Of runs that were to be carried out nothing was begun."""
        run = self.run_of(batch.candidate)
        self.tried.difference_update((run, seed) for seed in batch.seeds)

    def look(self, entry: Entry) -> None:
        """Look again at a cell, whose runs may have been carried out for another one that types them differently."""
        entry.standing = self._standing(entry.cell, entry.lacking)

    def run_of(self, candidate: Candidate) -> str:
        """What all candidates that stand for one run have in common, however they type it."""
        return self._hashes.of(candidate) or " ".join(candidate)  # of an option that doesn't exist

    def _learn(self, digests: Iterable[str]) -> None:
        for digest in digests:
            for folder in seeds_of(self._runs / digest):
                self._times.learn(folder, self._index.settings_of(digest))

    def seconds_of_run(self, entry: Entry) -> tuple[float, Basis]:
        """Of each run of a cell, and what the estimate rests on."""
        return self._times.seconds(entry.facts)

    def seconds(self, entry: Entry) -> float:
        """Of all that is missing of a cell."""
        return entry.standing.runs * self.seconds_of_run(entry)[0]

    def line(self, entries: Iterable[Entry]) -> Line:
        """What there is to say of some cells together."""
        states: Counter[State] = Counter()
        reasons: Counter[str] = Counter()
        first: dict[object, Entry] = {}  # that asks for each of what is missing
        missing: Counter[Entry] = Counter()
        for entry in entries:
            states[entry.standing.state] += 1
            if entry.standing.reason:
                reasons[entry.standing.reason] += 1
            for runs, count in entry.missing() if entry.runnable else ():
                if first.setdefault(runs, entry) is entry:
                    missing[entry] += count
        estimates = [(count, *self.seconds_of_run(entry)) for entry, count in missing.items()]
        return Line(
            states,
            reasons,
            runs=missing.total(),
            seconds=sum(count * seconds for count, seconds, _ in estimates),
            basis=max((basis for _, _, basis in estimates), default=None),
        )
