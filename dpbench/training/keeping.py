"""Keeping a run: its checkpoints while it is under way, and its weights when it has ended."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from dpbench.config import RunConfig
from dpbench.errors import UserError
from dpbench.privacy import Ledger
from dpbench.stage import Stage, forgotten
from dpbench.state import State
from dpbench.step import STAGES
from dpbench.tracking import RunRecord
from dpbench.tracking.published import Published, forget
from dpbench.tracking.record import RecordError
from dpbench.training.assemble import Assembly
from dpbench.training.budget import affords
from dpbench.training.checkpoint import Checkpoints, DamagedError, can_not_be_had
from dpbench.training.distributed import PartError, TorchTeam
from dpbench.training.loop import evaluated_after
from dpbench.training.repeating import BY_FORCE, Repeats, computed_by, processes_in_words
from dpbench.training.resume import GLOBAL, MisfitError, Training
from dpbench.training.team import Team

# Multipliers are solved for, and differ between machines in their last digits; the ledger has the one of the run.
SAME_MULTIPLIER = 1e-9
CONTENT = {"run", "device", "conditions", "since", "noise_multiplier", "tracker", "training"}
# Where several processes train the run: what each of the others has of its own, and whether filter and optimizer
# states are in parts.
OTHERS, IN_PARTS = OF_SEVERAL = ("others", "in parts")


class Found(NamedTuple):
    """What a run needs of its checkpoint once its parts have theirs.

    Attributes:
        step: that it is of.
        tracker: id of its W&B run; None where nothing was tracked.
        streams: state of the global generators.
        others: what the other processes of the run have of it, `packed` parts by rank.
    """

    step: int
    tracker: str | None
    streams: Any
    others: list[Tensor]


class Keeper:
    """Writes the checkpoints of one run, and finds the one that it goes on from.

    A checkpoint has the states of all parts (`Training`), which run it is of, and what that run has taken over from
    this machine; where several processes train the run, also what each of the others has of its own.

    Attributes:
        repeats: what this process sees to where steps are taken again.
        others: by what the other processes compute, by rank, as they said last.
    """

    def __init__(self, config: RunConfig, record: RunRecord, say: Callable[[str], object], team: Team) -> None:
        """Set up.

        Args:
            config: of the run.
            record: of the run.
            say: told in one line of what could not be written or read.
            team: that trains the run; this process leads it.
        """
        self.repeats = Repeats(config, team.size)
        self.others: list[dict[str, Any]] = []
        self._config = config
        self._record = record
        self._say = say
        self._team = team
        self._warned = False
        self._released: Ledger | None = None
        self._since = 0

    def made(self, ledger: Ledger) -> Ledger:
        """All releases of a run so far, its ledger having those of this attempt: what was seen stays released.

        Steps that are taken again count once, for they make the releases that they made before.
        """
        seen = self.repeats.seen
        if seen.step <= len(ledger):
            return ledger
        if self._released is None:  # what it spends takes a while to find, and stays the same
            self._released = ledger.reaching(seen.step)
        return self._released

    def wanted(self, training: Training, step: int) -> bool:
        """Whether this step needs a checkpoint at any rate: one before each publication of what can't be repeated.

        Nor can steps up to one in which memory ran out: it need not run out there again.

        Args:
            training: the run.
            step: steps taken.
        """
        if self.repeats.memory_ran_out(training.parts):
            return True
        return evaluated_after(self._config, step) and not self.repeats.exact(training.parts)

    def write(self, training: Training, step: int, tracker: str | None) -> float:
        """Write a checkpoint of a run, or say why it can't be; returns the seconds that it took.

        Args:
            training: the run.
            step: steps taken.
            tracker: id of its W&B run.
        """
        start = time.monotonic()
        private = training.parts.step
        self.repeats.kept(training.parts)
        self._warn_of_what_is_forgotten(training.parts)
        content = {
            "run": self._run,
            "device": private.gradients.flat.vector.device.type,
            "conditions": self.repeats.conditions(training.parts),
            "since": self._since,
            "noise_multiplier": private.noise_multiplier,
            "tracker": tracker,
        }
        try:
            state = {**content, **self._state(training)}
            # Who was away for long may have lost the run to another process, which has checkpoints of its own.
            Checkpoints(self._record.working).write(step, state, self._record.require_lock)
        except Exception as error:
            if not (isinstance(error, (OSError, PartError)) or can_not_be_had(error)):
                raise
            self._say(f"  no checkpoint of step {step}, the run goes on: {error}")
        return time.monotonic() - start

    def _state(self, training: Training) -> dict[str, Any]:
        """What a run goes on from, with the other processes' parts of it, who are told where this one has none.

        Raises:
            PartError: a process has none.
        """
        if not isinstance(self._team, TorchTeam):
            return {"training": training.state_dict()}
        state, problem = None, None
        try:
            state = training.state_dict()
        except Exception as error:
            if not can_not_be_had(error):
                raise
            problem = str(error)
        return {"training": state, OTHERS: self._team.collect(problem=problem), IN_PARTS: self._config.shard_states}

    def _warn_of_what_is_forgotten(self, parts: Assembly) -> None:
        if self._warned:
            return
        self._warned = True
        stages: dict[str, Stage] = {name: getattr(parts.step, name) for name in STAGES}
        for name, stage in {**stages, "averaging": parts.averaging}.items():
            for attribute in forgotten(stage, getattr(self._config, name)):
                kind = type(stage).__name__
                self._say(
                    f"  warning: {kind} ({name}) keeps {attribute} from step to step, but does not name it in "
                    "remembers: a run that goes on from a checkpoint would differ"
                )

    @property
    def _run(self) -> str:
        return str(self._record.folder.relative_to(self._record.folder.parents[1]))

    def resume(self, begin: Callable[[float | None], Training]) -> tuple[Training, Found | None]:
        """The run as its newest checkpoint of use has it, and what else is in that; or from the beginning, and None.

        Checkpoints that are of no use are set aside.

        Args:
            begin: makes a run that has taken no step, with this noise multiplier instead of its own.

        Raises:
            UserError: the run could go on elsewhere, would spend more than its eps, or would make a release again
                with other noise.
        """
        training = begin(None)
        if self._config.force:
            return training, None
        checkpoints = Checkpoints(self._record.folder)
        for step in checkpoints.steps():
            try:
                content = checkpoints.read(step, training.parts.step.gradients.flat.vector.device)
                training = self._gone_on(training, begin, content, step)
            except (DamagedError, MisfitError) as error:
                self.set_aside(step, str(error))
                training = begin(None)
                continue
            self.repeats.take_over(Published.read(self._record.folder), training.parts, step)
            same = content["conditions"] == self.repeats.conditions(training.parts)
            self._since = content["since"] if same else step
            self._say(f"  goes on after step {step} of {self._config.steps}")
            return training, Found(step, content["tracker"], content["training"][GLOBAL], content.get(OTHERS, []))
        self._refuse_beginning(training)
        return training, None

    def _refuse_beginning(self, training: Training) -> None:
        """See resume.py: a run whose metrics were seen begins again only if it makes the same releases.

        Args:
            training: the run that would begin; it takes over what it may of the first attempt.

        Raises:
            UserError: it would make others.
        """
        self.repeats.take_over(Published.read(self._record.folder), training.parts, 0)
        seen = self.repeats.seen
        first, own = seen.noise_multiplier, _first_multiplier(training.ledger)
        if seen.step and first is not None and not math.isclose(first, own, rel_tol=SAME_MULTIPLIER):
            raise self._other_noise(first, own)

    def set_aside(self, step: int, why: str) -> None:
        """Rename a checkpoint that is of no use, so that it is not read again.

        Args:
            step: of the checkpoint.
            why: in words that go on from "the checkpoint of step 12".
        """
        aside = Checkpoints(self._record.folder).set_aside(step)
        self._say(f"  the checkpoint of step {step} {' '.join(why.split())}; set aside as {aside}")

    def _require_as_many_processes(self, count: int, step: int) -> None:
        """A run goes on in as many processes as its checkpoint is of; unless something was seen it may begin anew."""
        if count == self._team.size:
            return
        those, these = processes_in_words(count), processes_in_words(self._team.size)
        seen = Published.read(self._record.folder)
        if seen.step:
            raise UserError(
                f"{seen.in_words}, and the checkpoint of step {step} is of {those}, from which {these} can't go on: "
                f"start as many, take another seed, {BY_FORCE}"
            )
        raise MisfitError(f"is of {those}, from which {these} can't go on")

    def stand_together(self, found: Found | None, same: bool, others: list[dict[str, Any]]) -> None:
        """All processes stand where this one does.

        Args:
            found: what they go on from.
            same: whether all go on as the checkpoint says that they drew before.
            others: by what the others compute, by rank.
        """
        self.others = others
        if found is not None and not same:
            self._since = found.step

    def _other_noise(self, multiplier: float, own: float) -> UserError:
        return UserError(
            f"this run made releases at noise multiplier {multiplier!r}, and calibration now gives {own!r}: the same "
            f"noise at two multipliers would show what it hides; take another seed, {BY_FORCE}",
            field="seed",
            value=self._config.seed,
        )

    def _gone_on(
        self, training: Training, begin: Callable[[float | None], Training], content: State, step: int
    ) -> Training:
        if other := (content.keys() ^ CONTENT) - {*OF_SEVERAL}:
            raise MisfitError(f"does not fit this code: other contents ({', '.join(sorted(other))})")
        if content["run"] != self._run:
            raise MisfitError(f"is of another run, {content['run']}")
        self._require_as_many_processes(1 + len(content.get(OTHERS, ())), step)
        in_parts = content.get(IN_PARTS, self._config.shard_states)
        if in_parts != self._config.shard_states:
            raise UserError(
                f"this run was begun with shard_states={str(in_parts).lower()}, with which it can go on; force=true "
                "starts it anew",
                field="shard_states",
                value=self._config.shard_states,
            )
        device = training.parts.step.gradients.flat.vector.device.type
        if content["device"] != device:
            raise UserError(
                f"this run was begun on {content['device']}, where it can go on; force=true starts it anew",
                field="device",
                value=self._config.device,
            )
        multiplier, own = content["noise_multiplier"], training.parts.step.noise_multiplier
        if not math.isclose(multiplier, own, rel_tol=SAME_MULTIPLIER) and not affords(self._config, multiplier):
            raise self._other_noise(multiplier, own)
        if multiplier != own:
            training = begin(multiplier)
        training.load_state_dict(content["training"])
        if self._config.micro_batch is None:
            training.parts.micro_batch = content["conditions"]["micro_batch"]
        self.repeats.kept(training.parts)
        return training

    def publish(self, step: int, training: Training) -> None:
        """Note that metrics of a step of a run are about to be seen; all processes come here."""
        self.others = self._team.gather(computed_by(training.parts))[1:]
        if self._config.force or Published.read(self._record.folder).step < step:
            parts = training.parts
            seen = Published(
                step,
                noise_multiplier=_first_multiplier(training.ledger),
                since=self._since,
                others=self.others or None,
                **(self.repeats.conditions(parts) | computed_by(parts)),
            )
            self._record.publish(seen)

    def remove(self, *, finished: bool) -> None:
        """Remove the checkpoints of a run that has ended, and its note of what was seen if the record now says as much.

        The note stays with secure noise: whatever becomes of the record, nothing of the run can ever be repeated.

        Args:
            finished: whether it has taken all its steps.
        """
        try:
            Checkpoints(self._record.working).remove()
            if finished and not self._config.privacy.secure_noise:
                self._record.settle()
                forget(self._record.folder)
        except (OSError, RecordError):  # all of it may stay
            return


def _first_multiplier(ledger: Ledger) -> float:
    """That of the first release; 0 where there is none."""
    return ledger.plan.runs[0].release.noise_multiplier if len(ledger.plan) else 0.0


def final_weights(parts: Assembly) -> bytes:
    """The weights that the last evaluation was of, as a safetensors file."""
    from safetensors.torch import save  # takes a while, which most commands have no use for

    with parts.step.gradients.flat.at(parts.averaging.average(parts.step.gradients.flat.vector)):
        # Copies: parameters are views of one vector, and layers may share them.
        return save({name: tensor.detach().clone().contiguous() for name, tensor in parts.model.state_dict().items()})
