"""The training loop."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field

import torch
from torch import Tensor

from dpbench.config import RunConfig, config_hash
from dpbench.data import Prompts, Splits, TextDataset
from dpbench.models import NextToken
from dpbench.privacy import Ledger, make_sampler
from dpbench.scores import text_scores
from dpbench.training.assemble import Assembly
from dpbench.training.evaluation import EVALUATION_BATCH, Evaluation, evaluate, evaluate_language_model
from dpbench.training.generation import continuations
from dpbench.training.lockstep import Steps
from dpbench.training.randomness import generator

# exp of more is no finite number.
LARGEST_EXPONENT = 700.0


class DivergedError(RuntimeError):
    """The loss on the test split is no longer a finite number."""


@dataclass(frozen=True)
class Metrics:
    """What an evaluation found; one line of metrics.jsonl.

    Attributes:
        step: steps taken.
        epoch: passes over the data, step q.
        train_loss: mean over the samples drawn since the last evaluation; not private.
        test_loss: mean over the test split.
        test_accuracy: fraction of the test split, 0 to 1.
        eps: spent so far.
        lr: learning rate of the last step.
        seconds: since training began.
        class_accuracy: of each class of the test split; in summary.json only.
        more: numbers by name of a language model or of further splits, such as perplexity or mismatched_accuracy.
    """

    step: int
    epoch: float
    train_loss: float
    test_loss: float
    test_accuracy: float
    eps: float
    lr: float
    seconds: float
    class_accuracy: tuple[float | None, ...]
    more: dict[str, float] = field(default_factory=dict)

    def as_dict(self) -> dict[str, float]:
        """The numbers of a line by name."""
        own = {name: value for name, value in asdict(self).items() if name not in ("class_accuracy", "more")}
        return own | self.more


def train(
    config: RunConfig,
    parts: Assembly,
    splits: Splits,
    ledger: Ledger,
    *,
    on_step: Callable[[int], None],
    on_evaluation: Callable[[Metrics], None],
) -> Steps[None]:
    """Train for all planned steps; a run to be carried out by lockstep.py.

    Args:
        config: the run.
        parts: model and step.
        splits: data, on the model's device.
        ledger: asked for eps at each evaluation.
        on_step: called after each step with the number of steps taken.
        on_evaluation: called after each evaluation.

    Raises:
        DivergedError: at an evaluation; the metrics have been handed over.
    """
    device = splits.train.labels.device
    run = config_hash(config)
    draws = generator(config.seed, "sampling", device, run)
    augmenting = generator(config.seed, "augmentation", device, run)
    layout = torch.channels_last if config.channels_last else torch.contiguous_format
    sampler = make_sampler(config.privacy.scheme, len(splits.train), config.batch_size, draws)
    optimizer, flat = parts.step.optimizer, parts.step.gradients.flat
    loss_sum = torch.zeros((), dtype=torch.float64, device=device)
    seen = 0
    start = time.perf_counter()
    for step in range(1, config.steps + 1):
        lr = config.optim.lr * config.schedule.factor(step - 1, config.steps)
        for group in optimizer.param_groups:
            group["lr"] = lr
        losses = yield from parts.step.take(
            (_in_layout(config.augmentation.views(images, augmenting), layout), labels)
            for images, labels in splits.train.batches(sampler.draw(), parts.micro_batch)
        )
        loss_sum += losses.sum().double()
        seen += len(losses)
        parts.averaging.update(flat.vector)
        on_step(step)
        if step % config.evaluate_every == 0 or step == config.steps:
            with flat.at(parts.averaging.average(flat.vector)):
                test, more = _evaluated(config, parts, splits, last=step == config.steps)
            metrics = Metrics(
                step=step,
                epoch=step * config.sampling_rate,
                train_loss=float(loss_sum) / seen if seen else math.nan,
                test_loss=test.loss,
                test_accuracy=test.accuracy,
                eps=ledger.epsilon(),
                lr=lr,
                seconds=time.perf_counter() - start,
                class_accuracy=test.class_accuracy,
                more=more,
            )
            loss_sum.zero_()
            seen = 0
            on_evaluation(metrics)
            if not math.isfinite(test.loss):
                raise DivergedError(f"the test loss is {test.loss} after {step} steps")


def _evaluated(
    config: RunConfig, parts: Assembly, splits: Splits, *, last: bool
) -> tuple[Evaluation, dict[str, float]]:
    """What there is to say about the model as it is: of the test split, and other numbers by name."""
    generates = config.dataset.generates
    measure = evaluate_language_model if generates else evaluate
    test = measure(parts.model, splits.test, parts.micro_batch)
    more = {"perplexity": math.exp(min(test.loss, LARGEST_EXPONENT))} if generates else {}
    for name, split in splits.others.items():
        found = measure(parts.model, split, parts.micro_batch)
        more |= {f"{name}_loss": found.loss, f"{name}_accuracy": found.accuracy}
        if generates:
            more[f"{name}_perplexity"] = math.exp(min(found.loss, LARGEST_EXPONENT))
    if last and splits.prompts is not None and math.isfinite(test.loss):
        more |= _scores(config, parts, splits.prompts)
    return test, more


def _scores(config: RunConfig, parts: Assembly, prompts: Prompts) -> dict[str, float]:
    """Scores of what a language model says."""
    data, model = config.dataset, parts.model
    assert isinstance(data, TextDataset)
    assert isinstance(model, NextToken)
    batch = min(parts.micro_batch, EVALUATION_BATCH)
    said = continuations(model, prompts, beams=data.beams, most_tokens=data.most_tokens, batch=batch)
    return text_scores(said, prompts.references)


def _in_layout(images: Tensor, layout: torch.memory_format) -> Tensor:
    """Images (B, C, H, W), or views of them (B, K, C, H, W), in a memory layout; token ids (B, T) as they are."""
    if images.dim() == 2:
        return images
    if images.dim() == 4:
        return images.contiguous(memory_format=layout)
    rows = images.flatten(0, 1).contiguous(memory_format=layout)
    return rows.view(*images.shape[:2], *rows.shape[1:])
