"""What the records say about a cell. Only whole runs count: those of the cell's own configuration that finished."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dpbench.claims.computed_file import Computed, path_of, read_computed
from dpbench.claims.notation import Candidate
from dpbench.claims.schema import Artefact, Cell
from dpbench.tracking.proven import is_proven
from dpbench.tracking.reading import DAMAGED, Recorded, seeds_of
from dpbench.tracking.status import Status

# Factor by which the account may exceed the printed eps before the two are said to differ: what calibration leaves.
SLACK = 1.01
ACCURACY = "test_accuracy"
# Records hold these as fractions, and all else in the unit in which it is printed: BLEU and ROUGE-L in percent.
FRACTIONS = ("test_accuracy", "test_error", "validation_accuracy", "mismatched_accuracy")
PERCENT = {"%": 100.0}


@dataclass(frozen=True)
class Run:
    """A finished run behind a cell.

    Attributes:
        seed: of the run.
        value: its number, in the unit of the printed one.
        folder: its record.
        score: by which a search is decided, see `Cell.judged_by`.
        eps: spent, by the ledger; None where the record doesn't say.
        target_eps: that it was asked for; None where the record doesn't say.
        published_eps: that the publication's own arithmetic states; None where there is no such account.
        proven: whether the eps spent is a guarantee.
    """

    seed: int
    value: float
    folder: Path
    score: float
    eps: float | None = None
    target_eps: float | None = None
    published_eps: float | None = None
    proven: bool = True

    @property
    def overspent(self) -> bool:
        """Whether it spent more than it was asked for."""
        return self.eps is not None and self.target_eps is not None and self.eps > self.target_eps * SLACK


@dataclass(frozen=True)
class Measured:
    """What the runs of a cell came to: those with the seeds 0 to `wanted` - 1, and no others in their place.

    Attributes:
        values: of the runs that finished, in the unit of the printed number, by seed.
        wanted: how many runs the cell asks for.
        broken: how runs ended that count for nothing, by their folders: "diverged", "failed", "invalid", or that their
            records lack the number or a finite one, or are "damaged", of runs that finished; of a search those of all
            candidates.
        missing: whether a search has a configuration whose first seed has not ended yet.
        runs: those behind the values, in their order; none where a number is computed or quoted.
        overrides: of these runs, the winner's in a search; None where a number is computed, quoted or not there yet.
        search_eps: of all runs of the search together, where the printed eps covers the choice among them.
    """

    values: tuple[float, ...]
    wanted: int
    broken: Mapping[str, str]
    missing: bool = False
    runs: tuple[Run, ...] = ()
    overrides: Candidate | None = None
    search_eps: float | None = None

    @property
    def seeds(self) -> tuple[int, ...]:
        """Of the values."""
        return tuple(run.seed for run in self.runs)

    @property
    def mean(self) -> float:
        """Mean over runs; NaN without any."""
        return statistics.fmean(self.values) if self.values else math.nan

    @property
    def spread(self) -> float | None:
        """Sample standard deviation over runs (ddof = 1); None for fewer than two."""
        return statistics.stdev(self.values) if len(self.values) > 1 else None

    @property
    def overspent(self) -> Mapping[float, float]:
        """The largest eps that a run spent, by the smaller one that it was asked for; empty where none did so."""
        over: dict[float, float] = {}
        for run in self.runs:
            if run.overspent:
                assert run.eps is not None
                assert run.target_eps is not None
                over[run.target_eps] = max(run.eps, over.get(run.target_eps, 0.0))
        return over

    @property
    def search_overspent(self) -> Mapping[float, float]:
        """Eps of the search, by the smaller one that it was to stay within; empty where it did so."""
        asked = {run.target_eps for run in self.runs if run.target_eps is not None}
        spent = self.search_eps
        return {} if spent is None else {eps: spent for eps in asked if spent > eps * SLACK}

    @property
    def unproven(self) -> bool:
        """Whether the eps of some run is no guarantee."""
        return not all(run.proven for run in self.runs)

    @property
    def enough(self) -> bool:
        """Whether all runs that the cell asks for have finished."""
        return not self.missing and len(self.values) >= self.wanted

    @property
    def first(self) -> float | None:
        """The score of seed 0; None where that has none, or not yet."""
        return self.runs[0].score if 0 in self.seeds else None

    @property
    def failures(self) -> Mapping[str, str]:
        """Those of `broken` that the number lacks: of a search the winner's, for candidates that lost did no harm."""
        won = {run.folder.parent for run in self.runs}
        return {folder: how for folder, how in self.broken.items() if not won or Path(folder).parent in won}

    @property
    def lost(self) -> Mapping[int, str]:
        """How runs ended that count for nothing, by their seeds."""
        return {int(Path(folder).name): how for folder, how in self.broken.items()}


def best_of(candidates: Iterable[Measured]) -> Measured:
    """The winner of a search: the candidate that is best at seed 0; one that lost this seed is behind all others."""
    return max(candidates, key=lambda runs: -math.inf if runs.first is None else runs.first)


class Evidence:
    """Looks up records.

    Attributes:
        results_dir: folder of the records.
        hash_of: the configuration hash of a run from its overrides; None where its groups don't exist.
    """

    def __init__(self, results_dir: Path, hash_of: Callable[[Candidate], str | None]) -> None:
        self.results_dir = results_dir
        self.hash_of = hash_of

    def computed(self, artefact: Artefact) -> Computed | None:
        """What a program computed of an artefact; None where it has not."""
        return read_computed(path_of(self.results_dir, artefact.paper, artefact.name))

    def measure(self, cell: Cell, computed: Computed | None) -> Measured:
        """What the records say about a cell of an artefact, of which something may be computed.

        A search is judged as the papers ran theirs: the candidate that is best at seed 0 is the winner, and its runs
        with all seeds are the cell's.
        """
        if cell.metric == "computed":
            value = None if computed is None else computed.values.get(cell.place)
            return Measured(() if value is None else (value,), 1, {})
        found = []
        for candidate in cell.candidates:
            runs = self.runs(cell, candidate)
            # One whose first seed has not ended may still win, so there is no winner yet.
            if len(cell.candidates) > 1 and runs.first is None and 0 not in runs.lost:
                return Measured((), cell.seeds, {}, missing=True)
            found.append(runs)
        winner = best_of(found)
        broken = {folder: how for runs in found for folder, how in runs.broken.items()}
        spent = None if computed is None else computed.spent.get(cell.place)
        return replace(winner, broken=broken, search_eps=spent)

    def runs(self, cell: Cell, overrides: Candidate) -> Measured:
        """What the records say about one candidate of a cell, by the seeds that the cell asks for."""
        digest = self.hash_of(overrides)
        recorded = seeds_of(self.results_dir / "runs" / digest) if digest else []
        folders = [folder for folder in recorded if int(folder.name) < cell.seeds]
        same = cell.judged_by == cell.metric
        judge = cell if same else replace(cell, metric=cell.judged_by, statistic="last")
        runs: dict[int, Run] = {}
        broken: dict[str, str] = {}
        for folder in folders:
            record = Recorded.read(folder).warn()
            summary = record.summary
            value = _value(cell, summary)
            score = value if same else value_in(judge, summary)
            if record.finished and value is not None and score is not None:
                seed = int(folder.name)
                accounts = {name: _number(summary.get(name)) for name in ("eps", "target_eps", "published_eps")}
                runs[seed] = Run(seed, value, folder, score, **accounts, proven=is_proven(summary))
            elif record.finished:
                broken[str(folder)] = _lack(cell if value is None else judge, summary)
            elif record.word == Status.FINISHED and record.damaged:
                broken[str(folder)] = DAMAGED
            elif record.word in (Status.DIVERGED, Status.FAILED, Status.INVALID):
                broken[str(folder)] = record.word
        by_seed = tuple(runs[seed] for seed in sorted(runs))
        values = tuple(run.value for run in by_seed)
        return Measured(values, cell.seeds, broken, runs=by_seed, overrides=overrides if runs else None)


def _value(cell: Cell, summary: Mapping[str, Any]) -> float | None:
    """The number of one run, of its summary, which holds the best over all evaluations of the accuracy alone."""
    known = cell.statistic == "last" or isinstance(_entry(cell, summary), dict)
    return value_in(cell, summary) if known else None


def value_in(cell: Cell, record: Mapping[str, Any]) -> float | None:
    """The number of a cell in its unit, of a run's summary or of one evaluation; None where the record has none."""
    entry = _entry(cell, record)
    if isinstance(entry, dict):
        entry = entry.get("final" if cell.statistic == "last" else "best")
    if not isinstance(entry, (int, float)) or not math.isfinite(entry):
        return None
    value = 1 - entry if cell.metric == "test_error" else float(entry)
    return value * PERCENT.get(cell.unit, 1.0) if cell.metric in FRACTIONS else value


def _lack(cell: Cell, summary: Mapping[str, Any]) -> str:
    """What a finished run has in place of the number of a cell: the run would end the same way again."""
    entry = _entry(cell, summary)
    if entry is None:
        return f"no {cell.metric} in the record"
    if cell.statistic == "best" and not isinstance(entry, dict):
        return f"no best {cell.metric} in the record"
    return f"no finite {cell.metric} in the record"


def _entry(cell: Cell, record: Mapping[str, Any]) -> Any:
    return record.get(ACCURACY if cell.metric == "test_error" else cell.metric)


def _number(entry: Any) -> float | None:
    """A number of a record, which may be "inf"."""
    return None if entry is None else float(entry)
