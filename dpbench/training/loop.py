"""The training loop."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace

import torch
from torch import Tensor

from dpbench.config import RunConfig, config_hash
from dpbench.data import Prompts, Splits, TextDataset
from dpbench.models import NextToken
from dpbench.privacy import Ledger, make_sampler
from dpbench.privacy.sampling import Sampler
from dpbench.privacy.uniform import UniformSource
from dpbench.randomness import generator
from dpbench.scores import text_scores
from dpbench.state import State
from dpbench.step import Seen
from dpbench.training.assemble import Assembly, draws_of
from dpbench.training.evaluation import EVALUATION_BATCH, Evaluation, evaluate, evaluate_language_model
from dpbench.training.generation import continuations
from dpbench.training.lockstep import Steps
from dpbench.training.team import ALONE, Team
from dpbench.wording import number_of

# Digits of the numbers of metrics.jsonl, as many as tell float32 numbers apart, and what is held as it is.
DIGITS, EXACT = 9, ("step", "test_accuracy", "eps", "seconds")


class DivergedError(RuntimeError):
    """A parameter, or the loss on the test split, is no longer a finite number."""


@dataclass(frozen=True)
class Metrics:
    """What an evaluation found; one line of metrics.jsonl.

    Attributes:
        step: steps taken.
        epoch: passes over the data, step q.
        train_loss: mean over the samples drawn since the last evaluation, at the iterate that each step began with, or
            at the first of its points where that is none of them; not private.
        gradient_norm: mean norm before clipping over the same samples' gradients, of the first point where points are
            clipped one by one, without those that are not finite; not private.
        above_threshold: share of these samples, 0 to 1, whose norm was above the threshold; not private.
        test_loss: mean over the test split.
        test_accuracy: fraction of the test split, 0 to 1.
        eps: spent so far.
        lr: learning rate of the last step.
        threshold: C of the last step.
        seconds: since training began, to the millisecond.
        class_accuracy: of each class of the test split; in summary.json only.
        more: numbers by name of a language model or of further splits, such as perplexity or mismatched_accuracy.
    """

    step: int
    epoch: float
    train_loss: float
    gradient_norm: float
    above_threshold: float
    test_loss: float
    test_accuracy: float
    eps: float
    lr: float
    threshold: float
    seconds: float
    class_accuracy: tuple[float | None, ...]
    more: dict[str, float] = field(default_factory=dict)

    def as_dict(self) -> dict[str, float]:
        """The numbers of a line by name, to nine digits but for counts, accuracies and eps."""
        own = {name: value for name, value in asdict(self).items() if name not in ("class_accuracy", "more")}
        rounded = {name: to_digits(value) for name, value in own.items() if name not in EXACT}
        return own | rounded | self.more


def to_digits(value: float) -> float:
    """A number to `DIGITS` digits."""
    return float(f"{value:.{DIGITS}g}")


@dataclass
class Progress:
    """What the loop remembers between steps; all else is remembered by the run's parts.

    Attributes:
        sampler: draws the batches.
        draws: where the sampler draws from.
        augmenting: generator of the augmentation.
        loss_sum: of the samples drawn since the last evaluation, float64, shape ().
        norms: of these the sum of the norms that are finite, how many are, and how many are above the threshold, shape
            (3,), float64.
        seen: their number.
        threshold: of the last step.
        seconds: that training has taken.
    """

    sampler: Sampler
    draws: UniformSource
    augmenting: torch.Generator
    loss_sum: Tensor
    norms: Tensor
    seen: int = 0
    threshold: float = math.nan
    seconds: float = 0.0

    @classmethod
    def start(cls, config: RunConfig, splits: Splits, team: Team = ALONE) -> Progress:
        """Of a run that has taken no step, in this process of those that train it."""
        device, run = splits.train.labels.device, config_hash(config)
        draws = team.shared_draws(draws_of(config, device))
        return cls(
            make_sampler(config.privacy.scheme, len(splits.train), config.batch_size, draws),
            draws,
            generator(config.seed, "augmentation", device, team.stream(run)),
            torch.zeros((), dtype=torch.float64, device=device),
            torch.zeros(3, dtype=torch.float64, device=device),
        )

    def add(self, seen: Seen) -> None:
        """Take a step into account."""
        self.loss_sum += seen.losses.sum().double()
        finite = seen.norms.isfinite()
        of_finite, above = seen.norms.where(finite, 0.0), seen.norms > seen.threshold
        self.norms += torch.stack([part.sum(dtype=torch.float64) for part in (of_finite, finite, above)])
        self.seen += len(seen.losses)
        self.threshold = seen.threshold

    def take_means(self) -> tuple[float, float, float]:
        """Loss, norm and share of norms above the threshold, means since they were last taken; NaN of no samples."""
        norms, finite, above = self.norms.tolist()
        loss, seen = float(self.loss_sum), self.seen
        self.loss_sum.zero_()
        self.norms.zero_()
        self.seen = 0
        if not seen:
            return math.nan, math.nan, math.nan
        return loss / seen, norms / finite if finite else math.nan, above / seen

    def state_dict(self) -> State:
        """Everything but the sampler and the generators, which have states of their own."""
        numbers = {"seen": self.seen, "threshold": self.threshold, "seconds": self.seconds}
        return {"loss_sum": self.loss_sum.clone(), "norms": self.norms.clone(), **numbers}

    def load_state_dict(self, state: State) -> None:
        """Continue from a state that `state_dict` returned."""
        self.loss_sum.copy_(state["loss_sum"])
        self.norms.copy_(state["norms"])
        self.seen, self.threshold, self.seconds = state["seen"], state["threshold"], state["seconds"]


def train(
    config: RunConfig,
    parts: Assembly,
    splits: Splits,
    ledger: Ledger,
    *,
    team: Team = ALONE,
    on_step: Callable[[int], None],
    on_evaluation: Callable[[Metrics], None],
    progress: Progress | None = None,
) -> Steps[None]:
    """Train until all planned steps are taken; a run to be carried out by lockstep.py.

    A resumed run first makes the evaluation that is due at its last step, if any.

    Args:
        config: the run.
        parts: model and step.
        splits: data, on the model's device; the shares of this process where there are several.
        ledger: asked for eps at each evaluation.
        team: the processes that train this run.
        on_step: called after each step with the number of steps taken, before the model is evaluated. All that a
            run remembers is then as it is between two steps.
        on_evaluation: called after each evaluation.
        progress: of the run; None for one that starts.

    Raises:
        DivergedError: after a step, or at an evaluation, whose metrics have been handed over.
    """
    progress = progress or Progress.start(config, splits, team)
    layout = torch.channels_last if config.channels_last else torch.contiguous_format
    optimizer, flat = parts.step.optimizer, parts.step.gradients.flat
    team.begin()
    start = time.perf_counter() - progress.seconds
    taken = parts.step.steps
    for step in range(max(taken, 1), config.steps + 1):
        lr = config.optim.lr * config.schedule.factor(step - 1, config.steps)
        if step > taken:
            for group in optimizer.param_groups:
                group["lr"] = lr
            drawn = team.agreed(progress.sampler.draw())
            seen = yield from parts.step.take(
                (_in_layout(config.augmentation.views(images, progress.augmenting), layout), labels)
                for images, labels in splits.train.batches(drawn, parts.micro_batch)
            )
            _require_finite(flat.vector, "a parameter", step)
            progress.add(seen)
            parts.averaging.update(flat.vector)
            progress.seconds = time.perf_counter() - start
            on_step(step)
        if evaluated_after(config, step):
            average = parts.averaging.average(flat.vector)
            _require_finite(average, "an average of parameters", step)
            with flat.at(average):
                test, more = _evaluated(config, parts, splits, team, last=step == config.steps)
            loss, norm, above = progress.take_means()
            metrics = Metrics(
                step=step,
                epoch=config.passes_after(step),
                train_loss=loss,
                gradient_norm=norm,
                above_threshold=above,
                test_loss=test.loss,
                test_accuracy=test.accuracy,
                eps=ledger.epsilon(),
                lr=lr,
                threshold=progress.threshold,
                seconds=round(time.perf_counter() - start, 3),
                class_accuracy=test.class_accuracy,
                more=more,
            )
            on_evaluation(metrics)
            if not math.isfinite(test.loss):
                raise DivergedError(f"the test loss is {test.loss} after {number_of(step, 'step')}")


def _require_finite(vector: Tensor, what: str, step: int) -> None:
    """Raise `DivergedError` unless all numbers are finite: none that is not ever becomes one again.

    A loss need not tell: not every parameter takes part in it.
    """
    # The sum costs no more than reading, and is finite only if all are; large numbers may make it infinite, too.
    if not math.isfinite(float(vector.sum())) and not bool(vector.isfinite().all()):
        raise DivergedError(f"{what} is no finite number after {number_of(step, 'step')}")


def evaluated_after(config: RunConfig, step: int) -> bool:
    """Whether a model is evaluated after its first `step` steps."""
    return step % config.evaluate_every == 0 or step == config.steps


def _evaluated(
    config: RunConfig, parts: Assembly, splits: Splits, team: Team, *, last: bool
) -> tuple[Evaluation, dict[str, float]]:
    """What there is to say about the model as it is: of the test split, and other numbers by name."""
    generates = config.dataset.generates
    measure = evaluate_language_model if generates else evaluate
    test = measure(parts.model, splits.test, parts.micro_batch, team)
    more = {"perplexity": test.perplexity} if generates else {}
    for name, split in splits.others.items():
        found = measure(parts.model, split, parts.micro_batch, team)
        more |= {f"{name}_loss": found.loss, f"{name}_accuracy": found.accuracy}
        if generates:
            more[f"{name}_perplexity"] = found.perplexity
    if last and splits.prompts is not None and math.isfinite(test.loss):
        more |= _scores(config, parts, splits.prompts, team)
    return test, more


def _scores(config: RunConfig, parts: Assembly, prompts: Prompts, team: Team) -> dict[str, float]:
    """Scores of what a language model says; each process has its prompts answered, and rank 0 scores all answers."""
    data, model = config.dataset, parts.model
    assert isinstance(data, TextDataset)
    assert isinstance(model, NextToken)
    batch = min(parts.micro_batch, EVALUATION_BATCH)
    own = replace(prompts, ids=prompts.ids[team.rank :: team.size])
    answers = team.gather(continuations(model, own, beams=data.beams, most_tokens=data.most_tokens, batch=batch))
    if not team.leads:
        return {}
    said = [""] * len(prompts.ids)
    for rank, answered in enumerate(answers):
        said[rank :: team.size] = answered
    return text_scores(said, prompts.references)


def _in_layout(images: Tensor, layout: torch.memory_format) -> Tensor:
    """Images (B, C, H, W), or views of them (B, K, C, H, W), in a memory layout; token ids (B, T) as they are."""
    if images.dim() == 2:
        return images
    if images.dim() == 4:
        return images.contiguous(memory_format=layout)
    rows = images.flatten(0, 1).contiguous(memory_format=layout)
    return rows.view(*images.shape[:2], *rows.shape[1:])
