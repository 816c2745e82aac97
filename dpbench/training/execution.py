"""One run, from its configuration to its record."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from dpbench.config import Job
from dpbench.data import Splits
from dpbench.errors import UserError
from dpbench.files import jsonable
from dpbench.garbage import uncollected
from dpbench.privacy import Ledger
from dpbench.tracking import RunRecord, Status, Tracker, open_tracker
from dpbench.tracking.lock import LockLostError, LockRemovedError
from dpbench.tracking.record import GRADIENTS, MODEL, RecordError
from dpbench.tracking.status import FOR_GOOD
from dpbench.training.display import Display
from dpbench.training.distributed import TorchTeam
from dpbench.training.following import call_together
from dpbench.training.interruption import Occasion, Occasions, StoppedError
from dpbench.training.job_record import OUTLASTING, fail, failed_to_begin, in_a_sentence, recorded_settings
from dpbench.training.keeping import Found, Keeper, final_weights
from dpbench.training.lockstep import Steps
from dpbench.training.loop import DivergedError, Metrics, train
from dpbench.training.preparing import Prepared, prepare
from dpbench.training.recorder import GradientRecorder
from dpbench.training.repeating import computed_by
from dpbench.training.summary import spent_by, summary_of, why_invalid
from dpbench.training.torchrun import current_team


class Execution:
    """The state of one run while it is carried out.

    Attributes:
        job: the run.
        config: of it.
        record: of it.
        console: is told how it goes.
        team: that trains it; this process leads it.
        keeper: of its checkpoints.
        prepared: what training needs, from `prepare` until `give_up`.
    """

    prepared: Prepared

    def __init__(self, job: Job, record: RunRecord, console: Console) -> None:
        self.config = job.config
        self.job = job
        self.record = record
        self.console = console
        self.team = current_team()
        self.keeper = Keeper(job.config, record, console.print, self.team)
        self._tracker: Tracker | None = None
        self._ranks: list[dict[str, str | int]] = []

    def may_begin(self) -> bool:
        """Whether there is something to run and this process now holds the lock on it; says so where not."""
        if not self.job.config.force and self.record.finished():
            self.console.print(f"  finished already: {self.record.folder} (force=true runs it again)")
            return False
        try:
            held = self.record.acquire()
        except RecordError as error:
            self._unrecorded(str(error))
            return False
        if not held:
            self.console.print(f"  another process is running this one already: {self.record.folder}")
        elif not self.job.config.force and self.record.finished():  # by the one that held the lock until now
            self.record.lock.release()
            self.console.print(f"  finished by another process: {self.record.folder}")
        else:
            return True
        return False

    def clear_damage(self) -> bool:
        """Keep a damaged record aside, so that this run takes its place; whether that went well."""
        damage = self.record.damage()
        if damage is None:
            return True
        try:
            aside = self.record.set_aside()
        except RecordError as error:
            self._unrecorded(str(error))
            return False
        said = f"  its record is damaged ({damage}): kept in {aside}, and the run is run again"
        self.console.print(said, style="yellow")
        return True

    def give_up(self) -> None:
        """Let go of the run's lock and of all that was prepared for it, if anything was."""
        self.record.lock.release()
        vars(self).pop("prepared", None)

    def prepare(self, splits: Splits | None) -> bool:
        """Make everything that training needs; whether that went well. Bad input leaves no record.

        Args:
            splits: data, if they are not to be loaded.
        """

        def work() -> None:
            self.prepared = prepare(
                self.config, self.record, splits, team=self.team, keeper=self.keeper, say=self.console.print
            )

        with uncollected():  # the first run imports what reads its data, and a compiler with its optimizer
            return self._went_well(work)

    def _went_well(self, work: Callable[[], None]) -> bool:
        """Whether some work before the first step did; why not, if it didn't, is recorded or noted."""
        try:
            try:
                work()
            except UserError as error:
                self.record.refuse(str(error))
            except Exception as error:  # what happens in training is recorded there
                failed_to_begin(self.job, self.record, in_a_sentence(error, self.config), traceback.format_exc())
            else:
                return True
        except RecordError as error:
            self._unrecorded(str(error))
        return False

    def _unrecorded(self, why: str) -> None:
        """Tell of a failure that no record can tell of."""
        self.console.print(f"  {why}", style="red")
        self.record.keep_untold(why)

    def bring_in_others(self) -> bool:
        """Let the other processes, if any, stand where this one does, or all where all can; whether that went well."""
        team = self.team
        if not isinstance(team, TorchTeam):
            return True
        misfits: list[str] = []
        while self._went_well(lambda: misfits.extend(self._call_together(team))):
            if not misfits:
                return True
            misfits.clear()
            if not self.prepare(self.prepared.splits):
                break
        return False

    def _call_together(self, team: TorchTeam) -> list[str]:
        """Let the others stand where this process does; why they can't go on from the checkpoint, which is set aside.

        Raises:
            UserError: one of them must not go on.
        """
        training, _, _, origin, found = self.prepared
        standings = call_together(team, self.job, training, found, self.keeper.repeats.seen)
        if found is not None:  # what the others have now takes as much memory as all of their states
            found.others.clear()
        refusals = [standing.refused for standing in standings if standing.refused is not None]
        if refusals:
            raise UserError(refusals[0])
        misfits = [standing.misfit for standing in standings if standing.misfit is not None]
        if misfits:
            assert found is not None, "nothing else can be a misfit"
            self.keeper.set_aside(found.step, misfits[0])
            return misfits
        self._ranks = [standing.about for standing in standings]
        (origin if found is None else origin["resumed"][-1])["ranks"] = self._ranks
        same = all(standing.same for standing in standings)
        self.keeper.stand_together(found, same, [standing.computed_by for standing in standings[1:]])
        return []

    def carry_out(self, display: Display, occasions: Occasions, seeds_at_once: int = 1) -> Steps[Status]:
        """Train, see `train`; says so, and leaves the record alone, where another process has taken the run over.

        Where nobody has its lock the run has failed, and is not begun again by itself: somebody removed that.
        """
        try:
            return (yield from self.train(display, occasions, seeds_at_once))
        except LockRemovedError as error:
            self.console.print(f"  stopped: {error}", style="red")
            fail(self.job, str(error))
            return Status.FAILED
        except LockLostError as error:
            self.console.print(f"  stopped, nothing more is recorded: {error}", style="red")
            return Status.FAILED

    def train(self, display: Display, occasions: Occasions, seeds_at_once: int = 1) -> Steps[Status]:
        """Train, and record how it ended, whatever happens; to be carried out by lockstep.py."""
        training, _, _, origin, found = self.prepared
        began = time.perf_counter() - training.progress.seconds
        origin = {**origin, "seeds_at_once": seeds_at_once}
        logged = [metrics.as_dict() for metrics in training.metrics]
        status, reason, trace = Status.FAILED, None, None
        kept = () if self.config.force else OUTLASTING
        try:
            self.record.start(recorded_settings(self.job), origin, metrics=logged, keep=kept)
        except RecordError as error:
            self._unrecorded(str(error))
            return status
        try:
            if found is not None:
                training.load_global_streams(found.streams)
            self._tracker = tracker = self._open_tracker(found, logged)
            yield from self._steps(tracker, display, occasions)
            if self.config.keep_model:
                self.record.write_bytes(MODEL, final_weights(training.parts))
            reason = why_invalid(self.config, training.ledger)
            status = Status.FINISHED if reason is None else Status.INVALID
        except KeyboardInterrupt:
            status, reason = Status.INTERRUPTED, "by the user"
            raise
        except StoppedError as stopped:
            status, reason = Status.INTERRUPTED, str(stopped)
        except SystemExit:  # by a handler of others, where their signal came
            status, reason = Status.INTERRUPTED, "its process was told to end"
            raise
        except DivergedError as error:
            status, reason = Status.DIVERGED, str(error)
        except Exception as error:
            reason, trace = in_a_sentence(error, self.config), traceback.format_exc()
        finally:
            status = self._close(status, reason, trace, origin, began)
        return status

    def _close(
        self, status: Status, reason: str | None, trace: str | None, origin: dict[str, Any], began: float
    ) -> Status:
        """Write what a run leaves, its status last, and let go of W&B; the status that it has by that.

        Args:
            status: how it ended.
            reason: why.
            trace: of an error.
            origin: what provenance.json holds.
            began: when it would have begun without a break, by `time.perf_counter`.
        """
        training, _, spends, _, _ = self.prepared
        parts, ledger = training.parts, training.ledger
        summary: dict[str, Any] = {}
        recorded = False
        try:
            try:
                if diverged := status == Status.DIVERGED:  # of which everyone is told
                    self.keeper.publish(len(ledger), training)
                summary = summary_of(self.config, training, self.keeper.made(ledger), spends, diverged=diverged)
                self._write_ledger(ledger, diverged=diverged)
                self.record.write("summary.json", summary)
                if isinstance(parts.step.recorder, GradientRecorder):
                    self.record.write_bytes(GRADIENTS, parts.step.recorder.archive())
                for rank, by in zip(self._ranks, [computed_by(parts), *self.keeper.others], strict=False):
                    rank["at_once"] = by["at_once"]
                wall = round(time.perf_counter() - began, 3)
                self.record.write("provenance.json", {**origin, "at_once": parts.at_once, "wall_seconds": wall})
            except LockLostError:
                raise
            except Exception as error:  # a run is finished if all that its record consists of is written
                reason = reason or in_a_sentence(error, self.config)
                status = status if status == Status.INTERRUPTED else Status.FAILED
            status = self._set_status(status, reason, trace)
            recorded = True
            if status in FOR_GOOD:
                self.keeper.remove(finished=status == Status.FINISHED)
        finally:  # W&B is waited for, whether the record could be closed or not
            if self._tracker is not None:
                self._tracker.finish(jsonable(summary), succeeded=recorded and status == Status.FINISHED)
        return status

    def wait_for_tracker(self) -> None:
        """Wait until W&B has what it is sent: once runs in step with this one have written what they leave."""
        if self._tracker is not None:
            self._tracker.wait()

    def _set_status(self, status: Status, reason: str | None, trace: str | None) -> Status:
        """Record how the run ended, the last thing written of it; the status that it has by that."""
        try:
            self.record.set_status(status, reason, trace)
        except RecordError as error:
            self._unrecorded(reason or str(error))
            return Status.FAILED
        return status

    def _open_tracker(self, found: Found | None, logged: Sequence[dict[str, float]]) -> Tracker:
        config = self.config
        return open_tracker(
            config.tracker,
            Path(config.results_dir),
            name=self.job.name,
            config={**recorded_settings(self.job), "hash": self.record.folder.parent.name},
            tags=[str(config.algo["name"]), config.dataset.name, config.model.name],
            say=self.console.print,
            resumed=None if found is None else found.tracker,
            logged=logged,
        )

    def _steps(self, tracker: Tracker, display: Display, occasions: Occasions) -> Steps[None]:
        training = self.prepared.training
        parts, ledger, progress, _ = training

        def on_step(step: int) -> None:
            if self.record.lock.lost:
                self.record.lock.check()
            self.keeper.repeats.check(parts, step)
            display.step(step)
            occasion = self.team.occasion if isinstance(self.team, TorchTeam) else self._wish(occasions, step)
            if occasion.write:
                occasions.written(self.keeper.write(training, step, tracker.id))
            if occasion.stop is not None:
                occasions.heed(occasion.stop)
                raise StoppedError(occasion.stop)

        def on_evaluation(metrics: Metrics) -> None:
            self.keeper.publish(metrics.step, training)  # before anybody, the summary too, can see them
            training.metrics.append(metrics)
            self._write_ledger(ledger)
            self.record.append_metrics(metrics.as_dict())
            tracker.log(metrics.as_dict(), metrics.step)
            display.evaluation(metrics)

        with display.watching():
            yield from train(
                self.config,
                parts,
                self.prepared.splits,
                ledger,
                team=self.team,
                on_step=on_step,
                on_evaluation=on_evaluation,
                progress=progress,
            )

    def wish(self, occasions: Occasions) -> Occasion:
        """What this process wants to do after the step under way, which several processes tell each other."""
        return self._wish(occasions, self.prepared.training.parts.step.steps + 1)

    def _wish(self, occasions: Occasions, step: int) -> Occasion:
        occasion = occasions.after(step)
        return occasion._replace(write=occasion.write or self.keeper.wanted(self.prepared.training, step))

    def _write_ledger(self, ledger: Ledger, *, diverged: bool = False) -> None:
        made = self.keeper.made(ledger)
        self.record.write("ledger.json", {**made.state_dict(), "eps": spent_by(made, diverged=diverged)})
