"""What a run remembers, as one state to be kept in a checkpoint, and a run that goes on from such a state.

A run that goes on is the run that was never stopped, bit for bit on the same kind of device. Steps that were taken
after the checkpoint are taken again, and are no second use of the data: samples and noise come from seeded generators,
which are in the state, so that each such step makes the release that it made before, and the ledger goes on with the
releases up to the checkpoint. A step enters its release before it uses it, and nothing of a step leaves the process
before the next evaluation; so one that was broken off half-way has released nothing.

The seeded noise does not depend on the noise multiplier, which another version of an accountant may give anew. A run
keeps the multiplier that it was begun with as long as that stays within eps, and is refused otherwise: two releases of
one sum with the same noise at two multipliers would give away the sum.

Which of several exact ways sums the gradients of a layer is timed (gradients/choice.py); elsewhere or later it may be
another one, which rounds otherwise. A checkpoint has those that were chosen so far, and the note of what was published
those that were in force then: steps up to there are taken again by them. They are those of each process that trains
one seed; a pass that several seeds share chooses anew.

Whether these gradients are those of books, of torch.func or of one sample after the other is found in the first
micro-batch (gradients/settle.py), and may change in a later one, where comparisons say so. A run that goes on has the
way from its checkpoint, with what was compared so far: on another one a model would draw in another order. It compares
that once more, and ends where it is wrong; steps that are taken again find what they found.

What a model draws for a sample hangs on which others are computed with it. Where memory runs out these are fewer from
then on, and it need not run out there again: a checkpoint follows before anything is published, and a run goes on from
one before that only if nothing was. Where memory runs out in a step that is taken again, that attempt ends.

Where several processes train a run, each goes on from its own part of one checkpoint, in a team of the same size: they
sum up other samples otherwise, and draw other augmentation and dropout. The part is what differs between them: these
generators, the ways to sum gradients, and the states of filter and optimizer where these are in parts. All else they
have from rank 0. Each sees to it that what it computed for steps that were seen is computed again as it was.

On a GPU some sums have no fixed order, so steps that are taken again may round otherwise. There a checkpoint comes
before each evaluation of a private run, and one goes on behind what was seen of it; only where that checkpoint is lost
are steps repeated but for rounding.

With `privacy.secure_noise` neither samples nor noise can be drawn again, by design. A step that is taken again is then
a release of its own, and spends nothing only if the first one was never seen. Therefore such a run is written to disk
before each evaluation, the first that anybody sees of its iterates, and goes on only from a state behind which nothing
was published.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from dpbench.devices import out_of_memory
from dpbench.privacy import Ledger
from dpbench.privacy.gaussian import SeededGaussian
from dpbench.privacy.uniform import SeededUniform
from dpbench.randomness import Generators
from dpbench.state import State, same_state
from dpbench.training.assemble import Assembly
from dpbench.training.loop import Metrics, Progress
from dpbench.training.recorder import GradientRecorder

# The global generators, which layers such as dropout draw from: set where training begins, as others use them too.
GLOBAL = "streams of the model"
AUGMENTATION = "stream of augmentation"
# Of rank 0 alone.
RECORDER = "recorder"


class MisfitError(Exception):
    """A state is not one of this run and this code; in words that go on from "the checkpoint of step 12"."""


class Remembers(Protocol):
    """A part of a run that has a state."""

    def state_dict(self) -> Any:
        """Everything that it remembers, as tensors and plain values."""

    def load_state_dict(self, state: Any) -> None:
        """Continue from a state that `state_dict` returned."""


class Training(NamedTuple):
    """A run, as far as it changes from step to step.

    Attributes:
        parts: model, private step and average.
        ledger: of the step.
        progress: of the loop.
        metrics: of all evaluations so far.
    """

    parts: Assembly
    ledger: Ledger
    progress: Progress
    metrics: list[Metrics]

    def remembering(self) -> dict[str, Remembers]:
        """Every part that remembers anything, in the order in which they are to be loaded."""
        step, progress = self.parts.step, self.progress
        found: dict[str, Remembers] = {
            "model": _Tensors(self.parts.model),
            "step": step,
            "averaging": self.parts.averaging,
            "sampler": progress.sampler,
            "loop": progress,
            "metrics": _MetricsSoFar(self.metrics),
            "ledger": _LedgerSoFar(self.ledger, self.metrics),
            AUGMENTATION: _Stream(progress.augmenting),
            GLOBAL: self._global_streams,
        }
        for name, source in (("noise", step.noise_source), ("side noise", step.side_source)):
            if isinstance(source, SeededGaussian):
                found[f"stream of {name}"] = _Stream(source.generator)
        if isinstance(progress.draws, SeededUniform):
            found["stream of samples"] = _Stream(progress.draws.generator)
        if isinstance(step.recorder, GradientRecorder):
            found[RECORDER] = step.recorder
        return found

    def state_dict(self) -> State:
        """The states of all parts."""
        return {name: part.state_dict() for name, part in self.remembering().items()}

    def own_state(self) -> State:
        """What of the state is this process's alone where several train the run."""
        parts, step = self.remembering(), self.parts.step
        in_parts = step.moved is not step.gradients.flat
        of_step = step.state_dict()
        own = {name: of_step[name] for name in ("gradients", *(("filter", "optimizer") if in_parts else ()))}
        return {"step": own, **{name: parts[name].state_dict() for name in (AUGMENTATION, GLOBAL)}}

    def shared_state(self) -> State:
        """What of the state is the same in all processes that train the run."""
        state, own = self.state_dict(), self.own_state()
        shared = {name: value for name, value in state.items() if name not in (AUGMENTATION, GLOBAL, RECORDER)}
        return {**shared, "step": {name: value for name, value in state["step"].items() if name not in own["step"]}}

    def load_state_dict(self, state: State) -> None:
        """Continue from a state that `state_dict` returned, but for the global generators.

        Raises:
            MisfitError: it is of other code. What was loaded so far stays, so the run is of no use any more.
        """
        parts = self.remembering()
        if state.keys() != parts.keys():
            raise MisfitError(f"does not fit this code: other parts ({', '.join(sorted(state.keys() ^ parts.keys()))})")
        for name, part in parts.items():
            if name == GLOBAL:
                continue
            try:
                part.load_state_dict(state[name])
            except Exception as error:  # of any kind: the state may be of other code
                if out_of_memory(error):
                    raise
                raise MisfitError(f"does not fit this code, {name}: {type(error).__name__}: {error}") from error
            if not same_state(part.state_dict(), state[name]):
                raise MisfitError(f"does not fit this code, {name}: not all of it is taken up")

    def load_global_streams(self, state: State) -> None:
        """Let the global generators go on where they were."""
        self._global_streams.load_state_dict(state)

    @property
    def _global_streams(self) -> Generators:
        device = self.parts.step.gradients.flat.vector.device
        return Generators([device] if device.type == "cuda" else [])


def joined(shared: State, own: State) -> State:
    """The state of a process, of what all share and its own."""
    return {**shared, **own, "step": {**shared["step"], **own["step"]}}


class _Tensors:
    """Parameters and buffers of a model, by name."""

    def __init__(self, model: nn.Module) -> None:
        self._named = {**dict(model.named_parameters()), **dict(model.named_buffers())}

    def state_dict(self) -> State:
        return {name: tensor.detach() for name, tensor in self._named.items()}

    @torch.no_grad()
    def load_state_dict(self, state: State) -> None:
        for name, tensor in self._named.items():
            if state[name].shape != tensor.shape:
                raise ValueError(f"{name} has shape {tuple(state[name].shape)}, not {tuple(tensor.shape)}")
            tensor.copy_(state[name])


class _Stream:
    """A generator."""

    def __init__(self, generator: torch.Generator) -> None:
        self._generator = generator

    def state_dict(self) -> Tensor:
        return self._generator.get_state()

    def load_state_dict(self, state: Tensor) -> None:
        self._generator.set_state(state)


class _MetricsSoFar:
    """A list of metrics, which is filled in place."""

    def __init__(self, metrics: list[Metrics]) -> None:
        self._metrics = metrics

    def state_dict(self) -> list[State]:
        return [asdict(metrics) for metrics in self._metrics]

    def load_state_dict(self, state: list[State]) -> None:
        self._metrics[:] = [Metrics(**numbers) for numbers in state]


class _LedgerSoFar:
    """A ledger that was asked for eps at each evaluation."""

    def __init__(self, ledger: Ledger, metrics: list[Metrics]) -> None:
        self._ledger, self._metrics = ledger, metrics

    def state_dict(self) -> State:
        return self._ledger.state_dict()

    def load_state_dict(self, state: State) -> None:
        self._ledger.load_state_dict(state, asked=[metrics.step for metrics in self._metrics])
