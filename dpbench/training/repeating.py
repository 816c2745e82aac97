"""Steps are taken again only as the releases that they were: what each process of a run sees to, see resume.py."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

from dpbench.config import RunConfig
from dpbench.devices import describe
from dpbench.errors import UserError
from dpbench.privacy.gaussian import SEEDED_NOISE
from dpbench.tracking.published import Published, device_kind
from dpbench.training.assemble import Assembly

BY_FORCE = "or force=true where nothing of that was seen"


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
            "channels_last": self._config.channels_last,
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
                f"{seen.in_words}, computed {seen.at_once} samples at a time; memory ran out, and with {at_once} at a "
                f"time step {step} is another release, beyond the run's eps: go on where more memory is free, take "
                f"another seed, {BY_FORCE}",
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
                f"{seen.in_words}, and without a checkpoint of that the steps after step {step} would be releases of "
                f"their own, beyond eps={self._config.eps:g}; force=true starts a run whose eps adds to that of this "
                "one",
                field="privacy.secure_noise",
                value=True,
            )
        if not seen.readable or step < (seen.since or 0):
            otherwise = (
                f"until step {seen.since} it drew on another kind of device, by another version, with other "
                "micro-batches or in another memory layout"
                if seen.readable
                else "what its note beside the record says of them can't be read"
            )
            raise UserError(
                f"metrics of this run are published, and {otherwise}; the steps after step {step} might be other "
                f"releases, beyond the run's eps: take another seed, {BY_FORCE}",
                field="seed",
                value=self._config.seed,
            )
        if self._config.micro_batch is None:
            parts.micro_batch = seen.micro_batch or parts.micro_batch
        for found in self._differences(seen, parts):
            if found.then not in (None, found.now):
                raise UserError(
                    f"{seen.in_words}, {found.how}; {found.otherwise} the steps after step {step} would be other "
                    f"releases, beyond the run's eps: {found.advice}take another seed, {BY_FORCE}",
                    field=found.field,
                    value=None if found.field is None else getattr(self._config, found.field),
                )
        if seen.strategies is not None:  # timing, here and now, may choose others; a checkpoint has some of them
            gradients = parts.step.gradients
            gradients.load_state_dict({**gradients.state_dict(), "strategies": seen.strategies})

    def _differences(self, seen: Published, parts: Assembly) -> Iterator[_Difference]:
        """All that decides what steps draw, then and now."""
        device = _device_of(parts)
        # Seeded generators draw otherwise on another kind of device.
        yield _Difference(seen.device, device, "device", f"drawn on {seen.device}", f"on {device}", "go on there, ")
        yield _Difference(
            seen.noise,
            SEEDED_NOISE,
            "seed",
            "its noise drawn by another version of dpbench",
            "by this one",
            "go on with that version, ",
        )
        # What augmentation and dropout draw for a sample hangs on which others are computed with it, where, and in
        # which order its numbers lie in memory.
        yield _Difference(
            seen.micro_batch,
            parts.micro_batch,
            "micro_batch",
            f"computed {seen.micro_batch} samples at a time",
            "with others at a time",
            "leave it out, ",
        )
        yield _Difference(
            seen.at_once,
            parts.at_once,
            "micro_batch",
            f"computed {seen.at_once} samples at a time since memory ran out",
            f"without a checkpoint of that, with {parts.at_once} at a time,",
        )
        yield _Difference(
            seen.channels_last,
            self._config.channels_last,
            "channels_last",
            "computed in another memory layout",
            "in this one",
            f"set it to {str(seen.channels_last).lower()}, ",
        )
        yield _Difference(
            seen.processes,
            self._processes,
            None,
            f"computed by {processes_in_words(seen.processes or 1)}",
            f"by {processes_in_words(self._processes)}",
            "start as many, ",
        )


class _Difference(NamedTuple):
    """What decides which numbers steps draw, and what to say where it has changed.

    Attributes:
        then: when something was seen; None where that is not known.
        now: here.
        field: the setting that has it; None where none has.
        how: it was then, in words.
        otherwise: it is now, in words.
        advice: how to have it as it was, ending in a comma, if there is a way.
    """

    then: object
    now: object
    field: str | None
    how: str
    otherwise: str
    advice: str = ""


def computed_by(parts: Assembly) -> dict[str, Any]:
    """By what this process computes, as `Published.others` has it."""
    return {
        "device": _device_of(parts),
        "micro_batch": parts.micro_batch,
        "at_once": parts.at_once,
        "strategies": parts.step.gradients.state_dict()["strategies"],
    }


def processes_in_words(processes: int) -> str:
    """So many processes."""
    return "one process" if processes == 1 else f"{processes} processes"


def _in_fixed_order(parts: Assembly) -> bool:
    """Whether what computes a run sums in the same order each time."""
    return not parts.step.gradients.flat.vector.is_cuda


def _device_of(parts: Assembly) -> str:
    return device_kind(describe(parts.step.gradients.flat.vector.device))
