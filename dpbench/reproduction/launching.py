"""Handing runs over: to this process, or to one of Hydra's launchers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console

from dpbench.claims import Cell
from dpbench.claims.notation import Candidate
from dpbench.config import Job, by_seed, compose_each, in_grammar, require_same_releases
from dpbench.errors import UserError
from dpbench.launch.execute import execute
from dpbench.launch.launcher import Launcher, LauncherError
from dpbench.launch.rounds import always, carry_through
from dpbench.reproduction.queue import Work
from dpbench.reproduction.standing import Batch
from dpbench.tracking.lock import is_held
from dpbench.tracking.status import NOT_RUN, WITH_RESULT, Status, status_in_words
from dpbench.training.job_record import record_of


class Launch:
    """Carries out runs, and counts how they end.

    Attributes:
        ended: runs that finished or diverged.
        failures: why runs failed or could not be started, by their names.
        elsewhere: runs that other processes are at, with the work that they belong to.
        broken: why the launcher could not do its work; None while it can.
    """

    def __init__(
        self,
        results_dir: Path,
        passed_on: Sequence[str],
        launcher: Launcher | None,
        console: Console,
        config_dirs: Sequence[Path] = (),
    ) -> None:
        """Set up.

        Args:
            results_dir: folder of the records.
            passed_on: settings of all runs.
            launcher: to hand them to; None for this process.
            console: is told what runs.
            config_dirs: further folders searched for options.
        """
        self._results_dir = results_dir
        self._passed_on = tuple(passed_on)
        self._console = console
        self._launcher = launcher
        self._config_dirs = config_dirs
        self._checked: set[tuple[Candidate, ...]] = set()
        self.ended = 0
        self.failures: dict[str, str] = {}
        self.elsewhere: list[tuple[Work, Job]] = []
        self.broken: str | None = None

    def __call__(self, wave: Sequence[Work]) -> None:
        """Carry out runs; how each ended is in its record. Those that others are at are left to `come_back`."""
        begun: list[tuple[Work, Job]] = []
        with self._seen_to(begun):
            for work in wave:
                try:
                    jobs = by_seed(compose_each([self._line(work)], self._config_dirs)[0])
                    self._require_same_releases(work.entry.cell, jobs[0])
                except UserError as error:
                    self.failures[" ".join(work.batch.candidate)] = str(error)
                    continue
                begun += [(work, job) for job in jobs]
                if self._launcher is None:
                    self._console.print(f"{work.entry.artefact.stem}, {work.entry.cell.place}:")
                    execute(jobs, self._console)
            if self._launcher is not None:
                self._carry_through([job for _, job in begun], end=0)

    def come_back(self, end: float) -> tuple[list[Work], list[Batch]]:
        """Wait for runs that other processes are at; those whose holders have gone are carried out here, in time.

        Args:
            end: when to wait no longer, by `time.monotonic`; what is expected to end later is not begun.

        Returns:
            The work that such runs belonged to, and the runs of it that nobody is at and for which no time is left.
        """
        waited, self.elsewhere = self.elsewhere, []
        works = {id(job): work for work, job in waited}

        def fits(job: Job) -> bool:
            work = works[id(job)]
            return work.seconds / len(work.batch.seeds) <= end - time.monotonic()

        with self._seen_to(waited):
            late = [id(job) for job in self._carry_through([job for _, job in waited], end, fits)]
            unbegun = [Batch(work.batch.candidate, (job.config.seed,)) for work, job in waited if id(job) in late]
            waited[:] = [(work, job) for work, job in waited if id(job) not in late]
        return [*works.values()], unbegun

    @contextmanager
    def _seen_to(self, begun: Sequence[tuple[Work, Job]]) -> Iterator[None]:
        """See afterwards how runs ended, also where something interrupted them."""
        whole = False
        try:
            yield
            whole = True
        finally:
            for work, job in begun:
                if is_held(record_of(job).lock.path):
                    self.elsewhere.append((work, job))
                else:
                    self._count(job, whole=whole)

    def _carry_through(self, jobs: Sequence[Job], end: float, fits: Callable[[Job], bool] = always) -> list[Job]:
        try:
            return carry_through(jobs, self._start, self._console, end=end, fits=fits)
        except LauncherError as error:
            self.broken = str(error)
            return []

    def _start(self, jobs: Sequence[Job]) -> dict[int, str]:
        if self._launcher is None:
            for job in jobs:
                execute([job], self._console)
            return {}
        raised = self._launcher([job.overrides for job in jobs])
        return {place: trace for place, trace in enumerate(raised) if trace is not None}

    def _require_same_releases(self, cell: Cell, job: Job) -> None:
        """Of the candidates of a cell that is a search, once."""
        if job.config.privacy.search_runs is not None and cell.candidates not in self._checked:
            lines = [(*one, *self._passed_on) for one in cell.candidates]
            require_same_releases(compose_each(lines, self._config_dirs))
            self._checked.add(cell.candidates)

    def _line(self, work: Work) -> tuple[str, ...]:
        """Overrides of the runs of a cell, the seeds last."""
        where = [f"results_dir={in_grammar(str(self._results_dir))}"]
        if not any(line.startswith("tracker.group=") for line in self._passed_on):
            where.append(f"tracker.group={work.entry.artefact.paper}-{work.entry.artefact.name}")
        return (*work.batch.candidate, *self._passed_on, *where, f"seeds={list(work.batch.seeds)}".replace(" ", ""))

    def _count(self, job: Job, *, whole: bool) -> None:
        """Count how a run ended; what an interruption kept from its end is neither."""
        status, reason, _ = record_of(job).outcome(forced=job.config.force)
        if not whole and status in (NOT_RUN, Status.RUNNING, Status.INTERRUPTED):
            return
        if status in WITH_RESULT:
            self.ended += 1
            if status == Status.DIVERGED:
                self._console.print(f"  diverged (recorded as its result): {reason}")
        elif self.broken is None or status != NOT_RUN or reason:  # else the launcher is why it was not begun
            reason = status_in_words(status, reason)
            self.failures[job.name] = reason
            self._console.print(f"  {reason}", style="red")
