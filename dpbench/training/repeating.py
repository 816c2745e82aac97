"""Steps are taken again only as the releases that they were: what each process of a run sees to, see resume.py."""

from __future__ import annotations

import math
from typing import Any

from dpbench.config import RunConfig
from dpbench.devices import describe
from dpbench.errors import UserError
from dpbench.privacy.gaussian import SEEDED_NOISE
from dpbench.tracking.published import Published, device_kind
from dpbench.training.assemble import Assembly


class Repeats:
    """Compares what this process computes with what was seen of the run.

    Attributes:
        seen: what was.
    """

    def __init__(self, config: RunConfig, processes: int) -> None:
        """Set up.

        Args:
            config: of the run.
            processes: that train it.
        """
        self.seen = Published()
        self._config = config
        self._processes = processes
        self._at_once: int | None = None

    def conditions(self, parts: Assembly) -> dict[str, Any]:
        """What decides which numbers a step draws, beside seed and settings, as `Published` has it."""
        return {
            "device": _device_of(parts),
            "noise": SEEDED_NOISE,
            "micro_batch": parts.micro_batch,
            "processes": self._processes,
        }

    def exact(self, parts: Assembly) -> bool:
        """Whether steps that are taken again are the same releases, to the last bit.

        With secure noise they are others; on a GPU some sums have no fixed order, which without privacy is no harm.
        """
        if self._config.privacy.secure_noise:
            return False
        return _in_fixed_order(parts) or math.isinf(self._config.eps)

    def memory_ran_out(self, parts: Assembly) -> bool:
        """Whether it did since `kept`: steps up to here can't be repeated, as it need not run out there again."""
        return parts.at_once < (self._at_once or parts.micro_batch)

    def kept(self, parts: Assembly) -> None:
        """There is a checkpoint of the run as it is."""
        self._at_once = parts.at_once

    def check(self, parts: Assembly, step: int) -> None:
        """What was published is computed again as it was, though memory runs out.

        Args:
            parts: of the run, of which nothing has been seen since the step before.
            step: steps taken.

        Raises:
            UserError: the step is another release.
        """
        seen, at_once = self.seen, parts.at_once
        if step <= seen.step and seen.at_once not in (None, at_once):
            raise UserError(
                f"metrics of step {seen.step:.0f} are published, computed {seen.at_once} samples at a time; memory ran "
                f"out, and with {at_once} at a time step {step} is another release with the same noise, beyond the "
                "run's eps: go on where more memory is free, take another seed, or force=true where nothing of that "
                "was seen",
                field="micro_batch",
                value=self._config.micro_batch,
            )

    def take_over(self, seen: Published, parts: Assembly, step: int) -> None:
        """Steps behind which something was seen are taken again only if they are the same releases.

        Args:
            seen: of the run, as this process has to know it.
            parts: of the run that would go on; they take over the strategies of the first attempt, and the micro-batch
                if they may.
            step: after which it would.

        Raises:
            UserError: they would be others.
        """
        self.seen = seen
        if seen.step <= step:
            return
        if self._config.privacy.secure_noise:
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
        if seen.device not in (None, _device_of(parts)):
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
                f"metrics of step {seen.step:.0f} are published, computed by {in_words(seen.processes)}; by "
                f"{in_words(self._processes)} the steps after step {step} would be other releases with the same "
                "noise, beyond the run's eps: start as many, take another seed, or force=true where nothing of that "
                "was seen"
            )
        if seen.strategies is not None:  # timing, here and now, may choose others; a checkpoint has some of them
            gradients = parts.step.gradients
            gradients.load_state_dict({**gradients.state_dict(), "strategies": seen.strategies})


def computed_by(parts: Assembly) -> dict[str, Any]:
    """By what this process computes, as `Published.others` has it."""
    return {
        "device": _device_of(parts),
        "micro_batch": parts.micro_batch,
        "at_once": parts.at_once,
        "strategies": parts.step.gradients.state_dict()["strategies"],
    }


def in_words(processes: int) -> str:
    """So many processes."""
    return "one process" if processes == 1 else f"{processes} processes"


def _in_fixed_order(parts: Assembly) -> bool:
    """Whether what computes a run sums in the same order each time."""
    return not parts.step.gradients.flat.vector.is_cuda


def _device_of(parts: Assembly) -> str:
    return device_kind(describe(parts.step.gradients.flat.vector.device))
