"""Which settings of a run go together, and which are only run where a proof has been waived.

A stage checks its own fields, and knows nothing of the others; what depends on two of them is asked here.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from dpbench import clip, filters, noise, optim, threshold
from dpbench.data import AutoAugment, ImageDataset
from dpbench.error_feedback import ErrorFeedbackClip
from dpbench.errors import UserError, require
from dpbench.stage import is_own

if TYPE_CHECKING:
    from dpbench.config.schema import RunConfig


def check(config: RunConfig) -> None:
    """Raise `UserError` unless all settings go together; reads no data."""
    _augmentation(config)
    _without_noise(config)
    config.model.check(config.dataset)
    _filter_and_optimizer(config)
    _adagrad_norm(config)
    _correlated_noise(config)
    _error_feedback(config)
    _watched_norms(config)
    _shard_states(config)


def uncertified(config: RunConfig) -> str | None:
    """What reaches the iterates beside what the ledger records, so that eps is not proven; None for nothing."""
    if isinstance(config.optim, optim.UncertifiedAdaGradNorm):
        return "un-noised values reach the iterates"
    if config.clip.feeds_back:
        return "un-clipped gradients come back in later steps"
    return None


def _augmentation(config: RunConfig) -> None:
    crop, data = config.augmentation.crop, config.dataset
    if isinstance(data, ImageDataset):
        smaller = min(data.height, data.width)
        require(crop < smaller, "augmentation.crop", crop, f"fewer pixels than the {smaller} of dataset={data.name}")
        if isinstance(config.augmentation, AutoAugment):
            size, of_model = config.augmentation.size, getattr(config.model, "image_size", None)
            here = "null" if of_model is None else of_model
            require(size in (None, of_model), "augmentation.size", size, f"null, or model.image_size, here {here}")
            coloured = data.channels in (1, 3)
            require(coloured, "dataset.channels", data.channels, "1 or 3, of which augmentation=autoaugment is")
    elif config.augmentation.random:
        option = "autoaugment" if isinstance(config.augmentation, AutoAugment) else "crop_flip"
        why = f"applies to images only, but dataset={data.name} has {data.holds}"
        raise UserError(why, field="augmentation", value=option)


def _without_noise(config: RunConfig) -> None:
    if isinstance(config.clip, clip.NoClip) and config.eps < math.inf:
        raise UserError(
            "without clipping no noise makes a step private; use eps=inf, or another clip", field="clip", value="none"
        )
    if config.eps == math.inf and config.privacy.noise_multiplier is not None:
        raise UserError(
            "eps=inf trains without noise; leave the multiplier null",
            field="privacy.noise_multiplier",
            value=config.privacy.noise_multiplier,
        )


def _filter_and_optimizer(config: RunConfig) -> None:
    # DiSK's exponential filter does go before Adam, and is compared there without its query too.
    smooths = isinstance(config.filter, filters.OnlineFIR | filters.Designed) or (
        isinstance(config.filter, filters.RecursiveLowPass) and len(config.filter.a) + len(config.filter.b) > 1
    )
    if smooths and isinstance(config.optim, optim.Adam) and config.optim.beta1 > 0:
        raise UserError(
            "a low-pass filter replaces Adam's first moment and cannot precede it; use "
            "optim=filtered_adam, or optim.beta1=0",
            field="optim.beta1",
            value=config.optim.beta1,
        )


def _watched_norms(config: RunConfig) -> None:
    """Refuse clips that do not clip as thresholds that follow the norms of gradients assume."""
    if not isinstance(config.threshold, threshold.HistogramThreshold | threshold.QuantileThreshold):
        return
    if config.clip.scope != "flat":
        raise UserError(
            "this threshold goes by norms of whole gradients, of which none is clipped; use clip.scope=flat, or "
            "another threshold",
            field="clip.scope",
            value=config.clip.scope,
        )
    if config.query.clipped_apart:
        raise UserError(
            "this threshold goes by one norm of each sample, of which several gradients are clipped; use another "
            "query, or another threshold",
            field="query",
            value="apart_iterates",
        )
    fits = isinstance(config.clip, clip.ThresholdClip | clip.NoClip)
    if isinstance(config.threshold, threshold.ExpectedErrorThreshold) and not fits:
        raise UserError(
            "this threshold makes the error of clipping at a threshold smallest, which this clip does not do; use "
            "clip=threshold or clip=normalised, or another threshold",
            field="threshold",
            value="dcsgd_e",
        )


def _adagrad_norm(config: RunConfig) -> None:
    if isinstance(config.optim, optim.AdaGradNorm) and isinstance(config.noise, noise.StepSizeNoise):
        raise UserError(
            "AdaGrad-Norm's step sizes are not known before training, when the noise is planned; use noise=growing",
            field="noise",
            value="step_size",
        )
    unproven = isinstance(config.optim, optim.UncertifiedAdaGradNorm) and not config.optim.uncertified
    if unproven and config.eps < math.inf:
        raise UserError(
            "its step size is made of un-noised gradients, which no proof of the run's eps covers; set it to true "
            "to run it all the same, or use optim=adagrad_norm",
            field="optim.uncertified",
            value="false",
        )


def _correlated_noise(config: RunConfig) -> None:
    """Refuse what takes noise for independent between steps where it is not."""
    correlation = config.noise.correlation
    if correlation is None:
        return
    if not correlation.covers(config.privacy.scheme):
        raise UserError(
            "noise correlated between steps is accounted for by when a sample takes part, which must be once in "
            "each pass and at the same place of all; use privacy=cyclic, or privacy=shuffled with "
            "noise.restart=true",
            field="privacy.sampler",
            value=config.privacy.sampler,
        )
    if config.privacy.published is not None:
        raise UserError(
            "the rules of publications take noise for independent between steps, which this is not; leave it null",
            field="privacy.published",
            value=config.privacy.published,
        )
    if isinstance(config.filter, filters.OnlineFIR):
        raise UserError(
            "it tells signal from noise by noise being independent between steps, which this is not; use a filter "
            "with fixed taps",
            field="filter",
            value="online_fir",
        )


def _error_feedback(config: RunConfig) -> None:
    """Refuse what error feedback does not go together with, or to run it unless its eps has been waived."""
    if not isinstance(config.clip, ErrorFeedbackClip):
        return
    if config.query.clipped_apart:
        raise UserError(
            "what is left over of gradients clipped one by one is not that of their sum, which feeds back; use "
            "another query",
            field="query",
            value="apart_iterates",
        )
    if config.noise.correlation is not None:
        raise UserError(
            "error feedback spreads a sample over all later steps, and correlated noise is accounted for by when "
            "it takes part; use noise=constant",
            field="clip",
            value="error_feedback",
        )
    if not config.clip.uncertified and config.eps < math.inf:
        raise UserError(
            "un-clipped gradients come back in later steps, which no proof of the run's eps covers; set it to true "
            "to run it all the same",
            field="clip.uncertified",
            value="false",
        )


def _shard_states(config: RunConfig) -> None:
    """Refuse parts of what works on the whole."""
    for stage in (config.filter, config.optim) if config.shard_states else ():
        if not stage.elementwise:
            name = type(stage).__name__
            why = f"{name} does not work element by element"
            if is_own(type(stage)):  # which may
                why = f"{name} does not say that it works element by element, by elementwise = True in its class"
            raise UserError(f"{why}, so no process can have a part of it", field="shard_states", value="true")
