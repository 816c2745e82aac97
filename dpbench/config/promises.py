"""What the account of a run takes for granted of stages, tried on those from outside the package.

Stages of the package are tested; one of one's own may be wrong, and would then train under an eps that does not hold.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from copy import deepcopy
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from dpbench.clip import Clip
from dpbench.data import Augmentation, ImageDataset
from dpbench.errors import UserError
from dpbench.noise import Noise
from dpbench.privacy.gaussian import SeededGaussian
from dpbench.privacy.plan import Part, Plan
from dpbench.query import Query
from dpbench.stage import is_own
from dpbench.state import same_state
from dpbench.threshold import Threshold
from dpbench.wording import number_of

if TYPE_CHECKING:
    from dpbench.config.schema import RunConfig

THRESHOLDS = (1e-3, 1.0, 1e3)
NORMS = (0.0, 1e-9, 1e-4, 1e-3, 0.01, 0.1, 0.5, 0.999, 1.0, 1.001, 2.0, 10.0, 100.0, 1e3, 1e4, 1e9)
# Groups of parameters, as many as a model may have layers.
GROUPS = (3, 9, 64)
# Of products in float32.
ROUNDING = 1e-4
# Normal numbers of a step; their deviation errs by 0.7 %, the correlation of two steps by 0.01, of two halves by 0.014.
DRAWN = 10_000
DRAWN_STEPS = 64
LEAST_DEVIATION = 0.95
MOST_CORRELATION = 0.06
# Numbers that are few: the 64 of a coordinate, whose deviation errs by 9 %, and those of a step where all are drawn.
FEW = 100
LEAST_OF_FEW = 0.5
MOST_STEPS_DRAWN = 20_000
# Steps whose correlation is taken off again; the matrix of so many takes 128 MB.
LARGEST_STRATEGY = 4096
# Steps of a threshold that are tried.
RELEASED_STEPS = 3
# Norms that a threshold is shown, over its own value: few, so that the noise decides. Then it releases with so many
# draws, ever larger ones, since what it makes of some may be the same.
SEEN = (0.5, 2.0)
DRAWS = 32


def check(config: RunConfig) -> None:
    """Raise `UserError` if a stage of one's own does not keep what eps rests on; reads no data."""
    if is_own(type(config.clip)):
        _factors(config.clip, torch.tensor([NORMS]), 1.0)
    if is_own(type(config.threshold)):
        _observed(config.threshold)
    if config.eps == math.inf:
        return
    if is_own(type(config.query)):
        _sensitivity("query", config.query, config.query.sensitivity, "")
        _sum(config.query)
    if is_own(type(config.clip)):
        for threshold in THRESHOLDS:
            _bound(config.clip, threshold)
            _one_by_one(config.clip, threshold)
            _forgotten(config.clip, threshold)
    if is_own(type(config.threshold)):
        _beside(config.threshold)
        _released(config.threshold, config.steps)
    if is_own(type(config.noise)):
        for step in range(config.steps):
            _scale(config.noise, config.noise.scale(step), step)
        _drawn(config.noise, config.release_plan())
    if is_own(type(config.augmentation)) and isinstance(config.dataset, ImageDataset):
        _views(config.augmentation, config.dataset.sample_shape)


def _sensitivity(group: str, stage: object, promised: float, where: str) -> None:
    if not 0 < promised < math.inf:
        message = f"expected a finite sensitivity > 0, for noise is made in proportion to it, not {promised:g}{where}"
        raise UserError(message, field=group, value=type(stage).__name__)


def _sum(query: Query) -> None:
    """A mixture is clipped once, whatever its weights; of points that are clipped one by one, each may be as long."""
    if query.sensitivity >= (query.most_points if query.clipped_apart else 1):
        return
    if query.clipped_apart:
        what = f"clipped one by one, its {query.most_points} points add up to as many clipped vectors"
    else:
        what = "its mixture of gradients is clipped as a whole and may be one clipped vector"
    message = f"{what}, more than its sensitivity of {query.sensitivity:g}, on which eps rests"
    raise UserError(message, field="query", value=type(query).__name__)


def _views(augmentation: Augmentation, shape: Sequence[int]) -> None:
    """An image in views of others, as mixup puts it there, or of a later batch, changes their gradients."""
    images = torch.rand(4, *shape, generator=torch.Generator().manual_seed(0))
    others = torch.cat([images.new_zeros(1, *shape), images[1:]])
    tried, name = deepcopy(augmentation), type(augmentation).__name__

    def views(batch: Tensor, seed: int) -> Tensor:
        torch.manual_seed(seed)  # of the generator that is not to be drawn from
        given = batch.clone()
        found: object = tried.views(given, torch.Generator().manual_seed(0))
        if not isinstance(found, Tensor) or found.shape[:1] != (4,) or found.shape[-3:] != tuple(shape):
            each = ", ".join(map(str, shape))
            message = f"expected views() to return a tensor of shape (4, {each}) or (4, copies, {each})"
            raise UserError(f"{message} for 4 images, not {_told(found)}", field="augmentation", value=name)
        if not torch.equal(given, batch):
            raise UserError("its views() changes the images that it is given", field="augmentation", value=name)
        return found[1:].clone()

    def same(one: Tensor, other: Tensor) -> bool:
        return one.shape == other.shape and torch.allclose(one, other, rtol=ROUNDING, atol=ROUNDING)

    with torch.random.fork_rng(devices=[]):
        first, of_others, again, elsewhere = views(images, 0), views(others, 0), views(images, 0), views(images, 1)
    if not same(first, again):
        what = "batches before"
    elif not same(first, of_others):
        what = "which others are in the batch"
    elif not same(first, elsewhere):
        message = "its views() draws from elsewhere than the generator that it is given, which checkpoints carry"
        raise UserError(message, field="augmentation", value=name)
    else:
        return
    message = (
        f"the views of an image depend on {what}, so that a sample changes sums by more than its own term, on which "
        "eps rests"
    )
    raise UserError(message, field="augmentation", value=name)


def _told(found: object) -> str:
    """What was returned in the place of a tensor of some shape."""
    return f"one of shape {tuple(found.shape)}" if isinstance(found, Tensor) else f"a {type(found).__name__}"


def _bound(clip: Clip, threshold: float) -> None:
    """Try norms of one group of parameters, all pairs of them for two groups, and alike or single ones for more."""
    promised = clip.sensitivity(threshold)
    _sensitivity("clip", clip, promised, f" at threshold {threshold:g}")
    one = torch.tensor([NORMS])
    several = [norms for groups in GROUPS for norms in (one.expand(groups, -1), torch.eye(groups, 1) * one)]
    for norms in (one, torch.cartesian_prod(one[0], one[0]).T.contiguous(), *several):
        clipped = torch.linalg.vector_norm(_factors(clip, norms, threshold).double() * norms, dim=0)
        broken = ~(clipped <= promised * (1 + ROUNDING))
        if broken.any():
            first = int(broken.nonzero()[0])
            groups = [f"{norm:g}" for norm in norms[:, first].tolist()]
            told = " and ".join(groups) if len(groups) < 3 else f"{groups[0]}, {groups[1]}, ..."
            parts = f" whose {len(groups)} groups of parameters have norms {told}" if len(groups) > 1 else ""
            message = (
                f"it leaves a gradient{parts or f' of norm {told}'} with norm {float(clipped[first]):g} "
                f"at threshold {threshold:g}, more than its sensitivity of {promised:g}, on which eps rests"
            )
            if parts:
                message += "; extend dpbench.clip.GroupClip, which gives each group its part of the threshold"
            raise UserError(message, field="clip", value=type(clip).__name__)


def _one_by_one(clip: Clip, threshold: float) -> None:
    """A sample that changes the factors of others changes the sum by more than its own bounded vector."""
    norms = torch.tensor([NORMS])
    together = _factors(clip, norms, threshold)
    alone = torch.cat([_factors(clip, norm, threshold) for norm in norms.split(1, dim=1)], dim=1)
    if not torch.allclose(together, alone, rtol=ROUNDING, atol=0, equal_nan=True):
        message = (
            f"the factor of a gradient at threshold {threshold:g} depends on which others are in the batch, so that a "
            "sample changes the sum by more than its own term, on which eps rests"
        )
        raise UserError(message, field="clip", value=type(clip).__name__)


def _forgotten(clip: Clip, threshold: float) -> None:
    """What it remembers of norms is of samples, without noise: they would change the factors of later ones."""
    norms, tried = torch.tensor([NORMS]), deepcopy(clip)
    first, *_, again = (tried.factors(of, threshold) for of in (norms, 1e6 * norms, norms))
    if not torch.equal(first, again):
        message = (
            f"the factor of a gradient at threshold {threshold:g} depends on gradients before it, so that a sample "
            "changes sums by more than its own term, on which eps rests"
        )
        raise UserError(message, field="clip", value=type(clip).__name__)


def _factors(clip: Clip, norms: Tensor, threshold: float) -> Tensor:
    factors: object = deepcopy(clip).factors(norms, threshold)
    if not isinstance(factors, Tensor) or factors.shape != norms.shape:
        message = f"expected factors, a tensor of the norms' shape {tuple(norms.shape)}, not {_told(factors)}"
        raise UserError(message, field="clip", value=type(clip).__name__)
    return factors


def _beside(threshold: Threshold) -> None:
    parts: object = threshold.beside
    name = type(threshold).__name__
    if not isinstance(parts, tuple) or not all(isinstance(part, Part) for part in parts):
        message = "expected beside, a property, to be a tuple of Part(name, noise_multiplier)"
        raise UserError(message, field="threshold", value=name)
    for part in parts:
        if not 0 < part.noise_multiplier < math.inf:
            message = f"expected a finite noise multiplier > 0 of its {part.name}, not {part.noise_multiplier:g}"
            raise UserError(message, field="threshold", value=name)


def _observed(threshold: Threshold) -> None:
    """Norms are only shown to a threshold that releases what it makes of them: another would never change."""
    for name in ("observe", "release"):
        if getattr(type(threshold), name) is not getattr(Threshold, name) and not threshold.beside:
            message = (
                f"its {name}() is never called, because beside names no release; name what it releases of the norms, "
                "with the noise multiplier"
            )
            raise UserError(message, field="threshold", value=type(threshold).__name__)


class _Counting(SeededGaussian):
    """Noise of a seed times a factor; counts what is asked for."""

    def __init__(self, seed: int, factor: float) -> None:
        super().__init__(torch.Generator().manual_seed(seed))
        self.factor = factor
        self.drawn = 0

    @override
    def fill(self, out: Tensor) -> Tensor:
        self.drawn += out.numel()
        return super().fill(out).mul_(self.factor)


def _released(threshold: Threshold, steps: int) -> None:
    """What it releases lacks noise if none is drawn, or changes nothing afterwards; how much it has can't be tried."""
    parts = threshold.beside
    if not parts:
        return
    rests = f"for its {' and '.join(part.name for part in parts)}, on which eps rests"
    name, what = type(threshold).__name__, None
    for step in range(min(steps, RELEASED_STEPS)):
        sources = [_Counting(seed, 1 + seed / 4) for seed in range(DRAWS)]
        tried = [_after(threshold, step, source) for source in sources]
        fewest = min(source.drawn for source in sources)
        if fewest < len(parts):
            what = f"its release() draws {number_of(fewest, 'number')} of the source at step {step} {rests}"
        elif step + 1 < steps and _all_same(tried, step + 1) and not _moved_by_large_draws(threshold, step):
            what = f"it ends up the same whatever its release() draws at step {step} {rests}"
        if what is not None:
            raise UserError(what, field="threshold", value=name)
        threshold = tried[0]


def _after(threshold: Threshold, step: int, source: _Counting) -> Threshold:
    """A copy that has released a step with this noise."""
    tried = deepcopy(threshold)
    tried.observe(tried.value(step) * torch.tensor(SEEN))
    tried.release(source, 1.0)
    return tried


def _all_same(tried: Sequence[Threshold], step: int) -> bool:
    first, *others = ((one.state_dict(), one.value(step)) for one in tried)
    return all(same_state(first, other) for other in others)


def _moved_by_large_draws(threshold: Threshold, step: int) -> bool:
    """What is made of two norms and their noise may lie outside the limits that a threshold keeps to."""
    try:
        tried = [_after(threshold, step, _Counting(seed, 2.0**seed)) for seed in range(DRAWS)]
        return not _all_same(tried, step + 1)
    except Exception:  # of numbers beyond all that a run draws, which so are not ignored
        return True


def _scale(noise: Noise, scale: object, step: int) -> None:
    if not isinstance(scale, (int, float)) or not 0 < scale < math.inf:
        told = f"{scale:g}" if isinstance(scale, (int, float)) else f"a {type(scale).__name__}"
        message = f"expected a finite scale > 0 at every step, not {told} at step {step}"
        raise UserError(message, field="noise", value=type(noise).__name__)


def _drawn(noise: Noise, plan: Plan) -> None:
    """Noise that the account takes for independent numbers of deviation 1, once its correlation is taken off again.

    Args:
        noise: prepared for the run.
        plan: of the run.
    """
    name, steps, correlation = type(noise).__name__, min(len(plan), DRAWN_STEPS), noise.correlation
    known = correlation is None or len(plan) <= LARGEST_STRATEGY
    whole = correlation.strategy(len(plan), plan.epoch) if correlation is not None and known else np.eye(steps)
    of_steps = []
    for seed in range(-(-DRAWN_STEPS // steps)):
        source = SeededGaussian(torch.Generator().manual_seed(seed))
        tried = deepcopy(noise)
        rows = torch.stack([_draw(tried, DRAWN, source).double() for _ in range(steps)])
        of_steps.append(torch.from_numpy(whole[:steps, :steps].copy()) @ rows)
    fresh, found = of_steps[0], torch.cat(of_steps)
    halves = [torch.stack(pair) for step in fresh for pair in (step.chunk(2), (step[::2], step[1::2]))]
    within = max(abs(float(pair.corrcoef()[0, 1])) for pair in halves)
    between = float(fresh.corrcoef().triu(1).abs().max()) if known and steps > 1 else 0.0
    least, everywhere = (float(found.square().mean(dim).sqrt().min()) for dim in (1, 0))
    if not least >= LEAST_DEVIATION:
        what = f"it draws numbers of standard deviation {least:.3g} at scale 1, where eps rests on 1"
    elif not between <= MOST_CORRELATION:
        of_account = "gives no" if correlation is None else "gives another"
        what = (
            f"it draws noise of two steps whose correlation is {between:.3g}, but {of_account} correlation for the "
            "account"
        )
    elif not within <= MOST_CORRELATION:
        what = f"it draws numbers of one step whose correlation is {within:.3g}, where eps rests on independent ones"
    elif not everywhere >= LEAST_OF_FEW:
        what = (
            f"it draws numbers of standard deviation {everywhere:.3g} at scale 1 in a coordinate, where eps rests on 1"
        )
    elif (tired := _first_without_noise(noise, len(plan))) is not None:
        what = f"it draws numbers that are smaller than those of deviation 1 at step {tired}, where eps rests on these"
    else:
        return
    raise UserError(what, field="noise", value=name)


def _first_without_noise(noise: Noise, steps: int) -> int | None:
    """The first step whose noise is too little, of few numbers; correlation only ever adds to the deviation of one."""
    tried, source = deepcopy(noise), SeededGaussian(torch.Generator().manual_seed(0))
    for step in range(min(steps, MOST_STEPS_DRAWN)):
        if not float(_draw(tried, FEW, source).double().square().mean().sqrt()) >= LEAST_OF_FEW:
            return step
    return None


def _draw(noise: Noise, count: int, source: SeededGaussian) -> Tensor:
    """The noise of the next step, apart from memory that it may use again."""
    found: object = noise.draw(torch.empty(count), source)
    if not isinstance(found, Tensor) or found.shape != (count,):
        message = f"expected draw() to return the tensor that it is given, not {_told(found)}"
        raise UserError(message, field="noise", value=type(noise).__name__)
    return found.clone()
