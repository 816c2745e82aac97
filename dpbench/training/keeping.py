"""Keeping a run: its checkpoints while it is under way, and its weights when it has ended."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from dpbench.config import RunConfig
from dpbench.devices import describe
from dpbench.errors import UserError
from dpbench.privacy import Ledger
from dpbench.privacy.gaussian import SEEDED_NOISE
from dpbench.stage import Stage, State, forgotten
from dpbench.step import STAGES
from dpbench.tracking import RunRecord
from dpbench.tracking.published import Published, device_kind, forget
from dpbench.tracking.record import RecordError
from dpbench.training.assemble import Assembly
from dpbench.training.budget import affords
from dpbench.training.checkpoint import Checkpoints, DamagedError
from dpbench.training.loop import evaluated_after
from dpbench.training.resume import GLOBAL, MisfitError, Training

# Multipliers are solved for, and differ between machines in their last digits; the ledger has the one of the run.
SAME_MULTIPLIER = 1e-9
CONTENT = {"run", "device", "conditions", "since", "noise_multiplier", "tracker", "training"}


class Found(NamedTuple):
    """What a run needs of its checkpoint once its parts have theirs.

    Attributes:
        tracker: id of its W&B run; None where nothing was tracked.
        streams: state of the global generators.
    """

    tracker: str | None
    streams: Any


class Keeper:
    """Writes the checkpoints of one run, and finds the one that it goes on from.

    A checkpoint has the states of all parts (`Training`), which run it is of, and what that run has taken over from
    this machine.
    """

    def __init__(self, config: RunConfig, record: RunRecord, say: Callable[[str], object], processes: int) -> None:
        """Set up.

        Args:
            config: of the run.
            record: of the run.
            say: told in one line of what could not be written or read.
            processes: that train the run.
        """
        self._config = config
        self._record = record
        self._say = say
        self._processes = processes
        self._secure = config.privacy.secure_noise
        self._warned = False
        self._seen = Published()
        self._released: Ledger | None = None
        self._at_once: int | None = None
        self._since = 0

    def made(self, ledger: Ledger) -> Ledger:
        """All releases of a run so far, its ledger having those of this attempt: what was seen stays released.

        Steps that are taken again count once, for they make the releases that they made before.
        """
        if self._seen.step <= len(ledger):
            return ledger
        if self._released is None:  # what it spends takes a while to find, and stays the same
            self._released = ledger.reaching(self._seen.step)
        return self._released

    def wanted(self, training: Training, step: int) -> bool:
        """Whether this step needs a checkpoint at any rate: one before each publication of what can't be repeated.

        Nor can steps up to one in which memory ran out: it need not run out there again.

        Args:
            training: the run.
            step: steps taken.
        """
        halved = training.parts.at_once < (self._at_once or training.parts.micro_batch)
        return halved or (self._secure and evaluated_after(self._config, step))

    def check(self, training: Training, step: int) -> None:
        """See resume.py: what was published is computed again as it was, though memory runs out.

        Args:
            training: the run, of which nothing has been seen since the step before.
            step: steps taken.

        Raises:
            UserError: the step is another release.
        """
        seen, at_once = self._seen, training.parts.at_once
        if step <= seen.step and seen.at_once not in (None, at_once):
            raise UserError(
                f"metrics of step {seen.step:.0f} are published, computed {seen.at_once} samples at a time; memory ran "
                f"out, and with {at_once} at a time step {step} is another release with the same noise, beyond the "
                "run's eps: go on where more memory is free, take another seed, or force=true where nothing of that "
                "was seen",
                field="micro_batch",
                value=self._config.micro_batch,
            )

    def write(self, training: Training, step: int, tracker: str | None) -> float:
        """Write a checkpoint of a run that has taken so many steps, or say why it can't be; returns the seconds.

        Args:
            training: the run.
            step: steps taken.
            tracker: id of its W&B run.
        """
        start = time.monotonic()
        private, self._at_once = training.parts.step, training.parts.at_once
        self._warn_of_what_is_forgotten(training.parts)
        content = {
            "run": self._run,
            "device": private.gradients.flat.vector.device.type,
            "conditions": self._conditions(training.parts),
            "since": self._since,
            "noise_multiplier": private.noise_multiplier,
            "tracker": tracker,
        }
        state = {**content, "training": training.state_dict()}
        try:
            # Who was away for long may have lost the run to another process, which has checkpoints of its own.
            Checkpoints(self._record.working).write(step, state, self._record.require_lock)
        except (OSError, TypeError, MemoryError, torch.OutOfMemoryError) as error:
            self._say(f"  no checkpoint of step {step}, the run goes on: {error}")
        return time.monotonic() - start

    def _conditions(self, parts: Assembly) -> dict[str, Any]:
        """What decides which numbers a step draws, beside seed and settings, as `Published` has it."""
        return {
            "device": device_kind(describe(parts.step.gradients.flat.vector.device)),
            "noise": SEEDED_NOISE,
            "micro_batch": parts.micro_batch,
            "processes": self._processes,
        }

    def _warn_of_what_is_forgotten(self, parts: Assembly) -> None:
        if self._warned:
            return
        self._warned = True
        stages: dict[str, Stage] = {name: getattr(parts.step, name) for name in STAGES}
        for name, stage in {**stages, "averaging": parts.averaging}.items():
            for attribute in forgotten(stage, getattr(self._config, name)):
                kind = type(stage).__name__
                self._say(
                    f"  warning: {kind} ({name}) keeps {attribute} from step to step, but has no state_dict: a run "
                    "that goes on from a checkpoint would differ"
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
                training = self._gone_on(training, begin, content)
            except (DamagedError, MisfitError) as error:
                aside = checkpoints.set_aside(step)
                why = " ".join(str(error).split())
                self._say(f"  the checkpoint of step {step} {why}; set aside as {aside}")
                training = begin(None)
                continue
            self._refuse_otherwise(training, step)
            same = content["conditions"] == self._conditions(training.parts)
            self._since = content["since"] if same else step
            self._say(f"  goes on after step {step} of {self._config.steps}")
            return training, Found(content["tracker"], content["training"][GLOBAL])
        self.refuse_beginning(training)
        return training, None

    def refuse_beginning(self, training: Training) -> None:
        """See resume.py: a run whose metrics were seen begins again only if it makes the same releases.

        Args:
            training: the run that would begin; it takes over what it may of the first attempt.

        Raises:
            UserError: it would make others.
        """
        if self._config.force:
            return
        seen = self._refuse_otherwise(training, 0)
        first, own = seen.noise_multiplier, _first_multiplier(training.ledger)
        if seen.step and first is not None and not math.isclose(first, own, rel_tol=SAME_MULTIPLIER):
            raise self._other_noise(first, own)

    def _refuse_otherwise(self, training: Training, step: int) -> Published:
        """See resume.py: steps behind which something was seen are taken again only if they are the same releases.

        Args:
            training: the run that would go on; it takes over the strategies of the first attempt, and the micro-batch
                if it may.
            step: after which it would.

        Returns:
            What was seen.

        Raises:
            UserError: they would be others.
        """
        seen = self._seen = Published.read(self._record.folder)
        if seen.step <= step:
            return seen
        if self._secure:
            raise UserError(
                f"metrics of step {seen.step:.0f} are published, and without a checkpoint of it the steps after step "
                f"{step} would be releases of their own, beyond eps={self._config.eps:g}; force=true starts a run "
                "whose eps adds to that of this one",
                field="privacy.secure_noise",
                value=True,
            )
        if not seen.readable or step < (seen.since or 0):
            otherwise = (
                f"until step {seen.since} it drew on another kind of device, by another version or with other "
                "micro-batches"
                if seen.readable
                else "what its note beside the record says of them can't be read"
            )
            raise UserError(
                f"metrics of this run are published, and {otherwise}; the steps after step {step} might be other "
                "releases, beyond the run's eps: take another seed, or force=true where nothing of that was seen",
                field="seed",
                value=self._config.seed,
            )
        # Seeded generators draw otherwise on another kind of device.
        if seen.device not in (None, device_kind(describe(training.parts.step.gradients.flat.vector.device))):
            raise UserError(
                f"a run on {seen.device} has published metrics of step {seen.step:.0f}; here the steps after step "
                f"{step} would draw other batches and noise, beyond the run's eps: go on there, take another seed, or "
                "force=true where nothing of that was seen",
                field="device",
                value=self._config.device,
            )
        if seen.noise not in (None, SEEDED_NOISE):
            raise UserError(
                f"another version of dpbench has published metrics of step {seen.step:.0f} of this run; with this one "
                f"the steps after step {step} would draw other noise, beyond the run's eps: go on with that version, "
                "take another seed, or force=true where nothing of that was seen",
                field="seed",
                value=self._config.seed,
            )
        # What augmentation and dropout draw for a sample hangs on which others are computed with it, and where.
        parts = training.parts
        if self._config.micro_batch is None:
            parts.micro_batch = seen.micro_batch or parts.micro_batch
        if seen.micro_batch not in (None, parts.micro_batch):
            raise UserError(
                f"metrics of step {seen.step:.0f} are published, computed {seen.micro_batch} samples at a time; with "
                f"others at a time the steps after step {step} would be other releases with the same noise, beyond the "
                "run's eps: leave it out, take another seed, or force=true where nothing of that was seen",
                field="micro_batch",
                value=self._config.micro_batch,
            )
        if seen.at_once not in (None, parts.at_once):
            raise UserError(
                f"metrics of step {seen.step:.0f} are published, computed {seen.at_once} samples at a time since "
                f"memory ran out; without a checkpoint of that the steps after step {step}, with {parts.at_once} at a "
                "time, would be other releases with the same noise, beyond the run's eps: take another seed, or "
                "force=true where nothing of that was seen",
                field="micro_batch",
                value=self._config.micro_batch,
            )
        if seen.processes not in (None, self._processes):
            raise UserError(
                f"metrics of step {seen.step:.0f} are published, computed by {_processes(seen.processes)}; by "
                f"{_processes(self._processes)} the steps after step {step} would be other releases with the same "
                "noise, beyond the run's eps: start as many, take another seed, or force=true where nothing of that "
                "was seen"
            )
        if seen.strategies is not None:  # timing, here and now, may choose others; a checkpoint has some of them
            gradients = parts.step.gradients
            gradients.load_state_dict({**gradients.state_dict(), "strategies": seen.strategies})
        return seen

    def _other_noise(self, multiplier: float, own: float) -> UserError:
        return UserError(
            f"this run made releases at noise multiplier {multiplier!r}, and calibration now gives {own!r}: the same "
            "noise at two multipliers would show what it hides; take another seed, or force=true where nothing of "
            "the first attempt was seen",
            field="seed",
            value=self._config.seed,
        )

    def _gone_on(self, training: Training, begin: Callable[[float | None], Training], content: State) -> Training:
        if content.keys() != CONTENT:
            raise MisfitError(f"does not fit this code: other contents ({', '.join(sorted(content.keys() ^ CONTENT))})")
        if content["run"] != self._run:
            raise MisfitError(f"is of another run, {content['run']}")
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
        self._at_once = training.parts.at_once
        return training

    def publish(self, step: int, training: Training) -> None:
        """Note that metrics of a step of a run are about to be seen."""
        if self._config.force or Published.read(self._record.folder).step < step:
            parts = training.parts
            seen = Published(
                step,
                noise_multiplier=_first_multiplier(training.ledger),
                at_once=parts.at_once,
                strategies=parts.step.gradients.state_dict()["strategies"],
                since=self._since,
                **self._conditions(parts),
            )
            self._record.publish(seen)

    def remove(self, *, finished: bool) -> None:
        """Remove all checkpoints of a run that has ended, and of one that tells itself what was seen of it the note.

        That stays with secure noise: whatever becomes of the record, nothing of the run can ever be repeated.

        Args:
            finished: whether it has taken all its steps.
        """
        Checkpoints(self._record.working).remove()
        if finished and not self._secure:
            try:
                self._record.settle()
            except RecordError:
                return  # the note may stay
            forget(self._record.folder)


def _processes(count: int) -> str:
    return "one process" if count == 1 else f"{count} processes"


def _first_multiplier(ledger: Ledger) -> float:
    """That of the first release; 0 where there is none."""
    return ledger.plan.runs[0].release.noise_multiplier if len(ledger.plan) else 0.0


def final_weights(parts: Assembly) -> bytes:
    """The weights that the last evaluation was of, as a safetensors file."""
    from safetensors.torch import save  # takes a while, which most commands have no use for

    with parts.step.gradients.flat.at(parts.averaging.average(parts.step.gradients.flat.vector)):
        # Copies: parameters are views of one vector, and layers may share them.
        return save({name: tensor.detach().clone().contiguous() for name, tensor in parts.model.state_dict().items()})
