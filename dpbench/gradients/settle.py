"""The way to a model's per-sample gradients: the fastest one that agrees with plain autograd.

A way is compared on a copy of the model, in its own mode and in double precision, for some samples, each of which goes
through the model alone for that; and in the first batch, and again in some of those that follow, on the model itself
and for all samples at once.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from dpbench.devices import may_be_out_of_memory, out_of_memory
from dpbench.errors import UserError
from dpbench.gradients.buffers import buffers_kept
from dpbench.gradients.draws import LEVELS, UnknownDraw, held_still
from dpbench.gradients.effects import keeps_of_first_pass, keeps_of_samples, leaves_gradients
from dpbench.gradients.loss import sample_losses
from dpbench.gradients.passes import Passes
from dpbench.gradients.row_order import rows_by_data
from dpbench.gradients.verify import (
    LARGE,
    SAMPLES,
    Losses,
    deviation,
    deviation_of_sums,
    draws_at_random,
    losses_differ,
    mixes_samples,
    nearby,
    short_norm,
    some,
    undisturbed_copy,
    without_fast_paths,
)
from dpbench.gradients.way import Books, Settled, Way
from dpbench.query import Point

# A parameter that no known layer owns is used once per row of the model's input; where its first dimension is not the
# one that is shared by the rows, so many dimensions may stand between the row and the parameter's own.
LEADING = (1, 0, 2)
UNDECIDED = "gradients are not finite"
# From the seed of a comparison to that of the second; random draws are held at the same level.
AGAIN = 1000 * len(LEVELS)
MIXED = "in a batch, the loss of a sample depends on other samples"
MIXES = f"{MIXED}: it is trained on batches of one, and evaluated in larger ones"
# Within a layer of no known kind; a copy of the parameter for each sample takes its place, with dimensions before its
# own, which sums and products of elements take, and products of matrices do not.
OWN_USE = "parameter {!r} is used outside of known layers such as nn.Linear, perhaps not element by element alone"


def settle(engine: Passes, inputs: Tensor, targets: Tensor) -> Settled | None:
    """The way for a model, found on the first samples of a batch; None where their gradients are not finite.

    Samples are as for `Passes.record_by`.

    Raises:
        UserError: the model keeps, or changes itself by, values of its samples; or a backward pass would leave what
            they add up to outside of it.
    """
    inputs, targets = some(inputs), some(targets)
    draws = _require_function(engine, inputs, targets)
    if _loss_reads_parameters(engine, inputs, targets):
        return Settled(engine.one_by_one(), "the loss reads parameters by itself, past all layers")
    own = engine.flat.vector.dtype
    for dtype in (torch.float64, own)[len(engine.flat) > LARGE :]:
        copy = undisturbed_copy(engine.model)
        if copy is None:
            return Settled(engine.one_by_one(), "it can't be copied, and so not be compared with plain autograd")
        try:
            found = _agreeing(engine, copy.to(dtype), inputs, targets)
            if found is not None and isinstance(found.way, Books):
                way = found.way._replace(draws=draws, channels_last=engine.channels_last)
                return found._replace(way=way)
            return found
        except UserError:
            raise
        except UnknownDraw as draw:
            return Settled(engine.one_by_one(), str(draw))
        except Exception as error:  # some models compute in float32 alone
            if dtype == own or out_of_memory(error):
                raise
    raise AssertionError("the model's own precision is always tried")


def _require_function(engine: Passes, inputs: Tensor, targets: Tensor) -> bool:
    """Raise `UserError` unless the model itself is a function of its samples and of random draws; whether it draws.

    Copies alone would not do, for not every model can be copied; nor would the place where parameters begin, for
    outputs may all be zero there.
    """
    flat, half = engine.flat, engine.in_half

    def losses_of(model: nn.Module) -> Losses:
        return lambda inputs, targets: sample_losses(model, engine.loss, inputs, targets, engine.views)

    with flat.at(nearby(flat.vector, 0)), engine.autocast(), without_fast_paths():
        # Before the model itself has seen a sample.
        problem = keeps_of_first_pass(engine.model, losses_of, inputs, targets, half=half)
        problem = problem or keeps_of_samples(engine.model, engine.losses, inputs, targets, half=half)
        if problem is None:
            with buffers_kept(engine.model):
                problem = leaves_gradients(flat, engine.losses, inputs, targets)
        if problem is not None:
            raise UserError(problem)
        return draws_at_random(engine.model, engine.losses, inputs, targets)


def _loss_reads_parameters(engine: Passes, inputs: Tensor, targets: Tensor) -> bool:
    """Whether the loss has a gradient beside that by way of the model's outputs, such as a weight decay of its own.

    Neither layers that keep books nor a copy of the model would see it.
    """

    def outputs(rows: Tensor) -> Tensor:
        with torch.no_grad():
            return engine.model(rows)  # type: ignore[no-any-return]

    with engine.autocast(), without_fast_paths(), buffers_kept(engine.model), torch.enable_grad():
        with held_still(LEVELS[0], of_one_shape=True):
            losses = sample_losses(outputs, engine.loss, inputs, targets, engine.views)
        if not losses.requires_grad:
            return False
        parts = torch.autograd.grad(losses.sum(), engine.flat.parameters, allow_unused=True)
    return any(part is not None for part in parts)


def _agreeing(engine: Passes, copy: nn.Module, inputs: Tensor, targets: Tensor) -> Settled | None:
    """The way that agrees on a copy of the model."""
    twin = engine.of_copy(copy)
    owners = twin.owners
    inputs = inputs.to(twin.flat.vector.dtype) if inputs.is_floating_point() else inputs
    levels: tuple[float | None, ...] = LEVELS if draws_at_random(copy, twin.losses, inputs, targets) else (None,)
    points = [Point(1.5, nearby(twin.flat.vector, 0)), Point(-0.5, nearby(twin.flat.vector, 1))]
    with without_fast_paths():
        with twin.flat.at(points[0].iterate):
            if any(mixes_samples(copy, twin.losses, level, inputs, targets) for level in levels):
                return Settled(engine.one_by_one(), MIXES)
        candidates: list[tuple[Way, Way]] = []
        rows = inputs.flatten(0, 1) if engine.views > 1 else inputs
        try:
            with held_still(levels[0]):
                complaint = rows_by_data(copy, owners.layers, owners.direct, rows)
            complaint = complaint or _used_otherwise(twin, levels, inputs, targets)
        except Exception as error:  # it can't be followed, perhaps because it is compiled
            complaint = f"{type(error).__name__}: {error}"
        if complaint is None:
            ways = [Books(leading) for leading in (LEADING if owners.direct else LEADING[:1])]
            candidates += zip(ways, ways, strict=True)
        candidates.append((twin.by_vmap(), engine.by_vmap()))
        for of_copy, way in candidates:
            found = [_problem(twin, of_copy, points, level, inputs, targets) for level in levels]
            if UNDECIDED in found:
                return None
            problem = next((text for text in found if text is not None), None)
            if problem is None:
                return Settled(way, "" if isinstance(way, Books) else complaint or "")
            if isinstance(way, Books) and owners.direct:
                problem = f"{OWN_USE.format(owners.direct[0])}: {problem}"
            complaint = complaint or problem
        return Settled(engine.one_by_one(), complaint or "")


def _used_otherwise(twin: Passes, levels: Sequence[float | None], inputs: Tensor, targets: Tensor) -> str | None:
    """What is wrong with books that do not see all uses of a parameter, or None.

    Its gradient by the others is asked for, which may be zero for these samples.
    """
    flat = twin.flat
    for level in levels:
        with held_still(level):
            with twin.owners.constant(), torch.enable_grad():
                losses = twin.losses(inputs, targets)
            if not losses.requires_grad:
                continue
            parts = torch.autograd.grad(losses.sum(), flat.parameters, allow_unused=True)
        for name, part in zip(flat.names, parts, strict=True):
            if part is not None:
                return f"parameter {name!r} is used past its layer, or under another name"
    return None


def _problem(
    twin: Passes, way: Way, points: Sequence[Point], level: float | None, inputs: Tensor, targets: Tensor
) -> str | None:
    """What is wrong with a way at a level of random draws, if the model draws; `UNDECIDED`; or None."""
    alone = twin.one_by_one().gradients
    references = [twin.flat.vector.new_zeros(len(twin.flat)) for _ in targets]
    for weight, iterate in points:
        with twin.flat.at(iterate):
            for i, reference in enumerate(references):
                with held_still(level):
                    reference.add_(alone(inputs[i : i + 1], targets[i : i + 1])[1][0], alpha=weight)
    if not all(reference.isfinite().all() for reference in references):
        return UNDECIDED
    try:
        with held_still(level):
            tape = twin.record_by(way, points, inputs, targets)
        return deviation(twin.flat, tape, references)
    except Exception as error:
        if out_of_memory(error):
            raise
        return f"{type(error).__name__}: {error}"


def problem_in_batch(
    engine: Passes, way: Way, points: Sequence[Point], inputs: Tensor, targets: Tensor, seed: int
) -> str | None:
    """What is wrong with a way for this batch; None for nothing, `UNDECIDED` where gradients are not finite.

    Points and samples are as for `Passes.record_by`. For random factors c_i, which follow from the seed, the sum
    Σ_i c_i G_i is compared with the gradient of Σ_i c_i f(θ; x_i), which plain autograd gives for all samples at once:
    a row that is taken for another sample's shows. The norm of one sample, by the strategies that are taken for so
    many, is compared with what a sum has of it. A model that mixes samples in large batches alone shows by their losses
    in half of the batch or alone.

    What deviates is compared once more, elsewhere: where the input of a ReLU is zero but for rounding, both gradients
    of its sample are right, and they differ. Such a place is not met twice, and what is wrong is wrong at both.
    """
    problem = _problem_near(engine, way, points, inputs, targets, seed)
    return (
        problem if problem in (None, UNDECIDED) else _problem_near(engine, way, points, inputs, targets, seed + AGAIN)
    )


def _problem_near(
    engine: Passes, way: Way, points: Sequence[Point], inputs: Tensor, targets: Tensor, seed: int
) -> str | None:
    """`problem_in_batch`, at one place near the points, which the seed decides with the factors."""
    flat = engine.flat
    # At most 1: whether a run ends here must not hang on one sample whose inputs, multiplied, are beyond all numbers.
    generator = torch.Generator().manual_seed(seed)
    factors = torch.rand(len(targets), generator=generator, device="cpu").mul_(2).sub_(1).to(flat.vector)
    level = LEVELS[seed % len(LEVELS)]
    # Elsewhere than where training is: where it has come to rest, gradients are but rounding.
    elsewhere = [Point(weight, nearby(iterate, seed)) for weight, iterate in points]
    want, of_parts = torch.zeros_like(flat.vector), torch.zeros_like(flat.vector[0])
    with buffers_kept(engine.model), without_fast_paths():
        for weight, iterate in elsewhere:
            with flat.at(iterate), torch.enable_grad(), held_still(level), engine.autocast():
                losses = engine.losses(inputs, targets)
                parts = torch.autograd.grad(
                    (losses * factors).sum(), flat.parameters, allow_unused=True, materialize_grads=True
                )
                gradient = torch.cat([part.flatten() for part in parts])
                want.add_(gradient, alpha=float(weight))
                of_parts += abs(float(weight)) * gradient.norm()
        if not bool(want.isfinite().all()):
            good = losses.isfinite()
            if bool(good.all()) or not bool(good.any()):
                return UNDECIDED
            return _problem_near(engine, way, points, inputs[good], targets[good], seed)
        if isinstance(way, Books) and len(targets) > SAMPLES:
            for which in (slice(None, None, 2), slice(0, 1)):
                few, of_few = inputs[which].contiguous(), targets[which].contiguous()
                with flat.at(elsewhere[-1].iterate), held_still(level), engine.autocast(), torch.no_grad():
                    again = engine.losses(few, of_few)
                if losses_differ(losses[which], again, half=engine.in_half):
                    return MIXED
        try:
            with held_still(level):
                tape = engine.record_by(way, elsewhere, inputs, targets)
                have = tape.weighted_sum(factors.expand(engine.groups, -1))
                place = int(torch.randint(len(targets), (), generator=generator, device="cpu"))
                short = short_norm(flat, tape, place)
        except Exception as error:
            if may_be_out_of_memory(error, len(targets)):
                raise
            return f"{type(error).__name__}: {error}"
    return deviation_of_sums(flat, have, want, of_parts=of_parts if engine.in_half else None) or short
