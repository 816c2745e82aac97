"""Whether runs that differ in their seeds alone share their passes."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial

import torch
from torch import Tensor, nn

from dpbench import cache
from dpbench.config import RunConfig
from dpbench.config.identity import plain
from dpbench.data import Splits
from dpbench.devices import describe, fastest_seconds
from dpbench.gradients import FusedGradients, Request
from dpbench.query import Point
from dpbench.training.assemble import Assembly, gradients_of
from dpbench.training.micro_batch import fused_rows

# With fuse_seeds=auto, seeds share passes where that takes at most so much of the time of separate ones. Beside the
# passes, what is kept for all seeds at once leaves less of a processor's caches to the rest of a step.
WORTH_FUSING = 0.8
# With fuse_seeds=auto, seeds whose passes take longer than this go one by one, without more ado: there the arithmetic
# takes the time, of which sharing saves none.
LONG_PASS = 0.2
# Samples of each seed that are timed, where a micro-batch is smaller, and how often.
TIMED_SAMPLES, TIMED_ROUNDS = 256, 5
# Samples that the gradients of a fused pass are checked on.
CHECKED_SAMPLES = 9


def fused_gradients(config: RunConfig, runs: Sequence[Assembly], splits: Splits) -> tuple[FusedGradients | None, str]:
    """The gradients that these runs share, None where they had better not; and why, in a few words.

    Args:
        config: of any of the runs, which does not say false for `fuse_seeds`.
        runs: one for each seed, two or more, not yet trained.
        splits: samples of the training split are what the gradients are checked and timed on, which leaves no trace.
    """
    with ExitStack() as stack:
        for run in runs:
            stack.enter_context(run.step.gradients.undisturbed())
        try:
            return _fused_gradients(config, runs, splits)
        except Exception as error:  # such as no memory for it; one that is a run's own is met again where it trains
            return None, f"{type(error).__name__}: {error}"


def _fused_gradients(config: RunConfig, runs: Sequence[Assembly], splits: Splits) -> tuple[FusedGradients | None, str]:
    if not _alike([run.model for run in runs]):
        return None, "what the models do not train differs between the seeds"
    if not config.dataset.one_shape:
        return None, "their samples are of different lengths"
    first = runs[0]
    rows = max(1, fused_rows(config, first.model, first.step.gradients, len(runs)))
    fused = gradients_of(config, first.model, first.step.gradients.flat, partial(FusedGradients, rows=rows))
    if config.fuse_seeds == "auto" and (seconds := _seconds_of_a_pass(config, first, splits)) > LONG_PASS:
        return None, f"a pass of one seed takes {seconds:.1f} s, of which sharing saves little"
    objection = fused.objection(*_some(config, splits, CHECKED_SAMPLES))
    if objection is not None:
        return None, objection
    if config.fuse_seeds is True:
        return fused, "fuse_seeds=true"
    share = _share_of_time(config, runs, fused, splits)
    return (fused if share <= WORTH_FUSING else None), f"{100 * share:.0f} % of the time for gradients"


def _alike(models: Sequence[nn.Module]) -> bool:
    """Whether all that is not trained, frozen parameters and buffers, is the same in all models."""

    def fixed(model: nn.Module) -> list[tuple[str, Tensor]]:
        return [(n, p) for n, p in model.named_parameters() if not p.requires_grad] + list(model.named_buffers())

    first, *others = map(fixed, models)
    return all(
        len(first) == len(other)
        and all(a == b and torch.equal(x, y) for (a, x), (b, y) in zip(first, other, strict=True))
        for other in others
    )


def _some(config: RunConfig, splits: Splits, count: int) -> tuple[Tensor, Tensor]:
    """Views of the first samples, from a generator of their own."""
    images, labels = splits.train.take(slice(0, count))
    return config.augmentation.views(images, torch.Generator(images.device)), labels


def _request(config: RunConfig, run: Assembly, samples: Tensor, labels: Tensor) -> Request:
    points = [Point(1.0, run.step.gradients.flat.vector)] * config.query.most_points
    batch = zip(samples.split(run.micro_batch), labels.split(run.micro_batch), strict=True)
    return Request(run.step.gradients, points, batch, torch.ones_like)


@torch.no_grad()
def _seconds_of_a_pass(config: RunConfig, run: Assembly, splits: Splits) -> float:
    """Seconds for one micro-batch of one seed."""
    samples, labels = _some(config, splits, min(config.batch_size, run.micro_batch, TIMED_SAMPLES))
    return fastest_seconds([lambda: _request(config, run, samples, labels).alone()], labels.device, rounds=1)[0]


@torch.no_grad()
def _share_of_time(config: RunConfig, runs: Sequence[Assembly], fused: FusedGradients, splits: Splits) -> float:
    """Time of the gradients of all runs together, divided by that of one after the other; timed once and cached."""
    size = min(config.batch_size, max(TIMED_SAMPLES, runs[0].micro_batch))
    samples, labels = _some(config, splits, size)
    shape = [len(runs), runs[0].micro_batch, *samples.shape, config.dataset.classes]
    settings = [config.model, config.query.most_points, config.precision, config.clip.scope]
    key = [describe(labels.device), torch.__version__, shape, *map(plain, settings)]
    known = cache.read("fusing", key)
    if isinstance(known, float):
        return known

    def separate() -> None:
        for run in runs:
            _request(config, run, samples, labels).alone()

    def together() -> None:
        fused.clipped_sums([_request(config, run, samples, labels) for run in runs])

    fastest = fastest_seconds([together, separate], labels.device, TIMED_ROUNDS)
    share = fastest[0] / fastest[1]
    cache.write("fusing", key, share)
    return share
