"""The engines that are compared: each computes one sum of clipped per-sample gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from opacus import GradSampleModule
from opacus.grad_sample import GradSampleModuleExpandedWeights, GradSampleModuleFastGradientClipping
from opacus.grad_sample.gsm_base import AbstractGradSampleModule
from opacus.optimizers import DPOptimizer
from opacus.optimizers.optimizer_fast_gradient_clipping import DPOptimizerFastGradientClipping
from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from benchmarks.mixtures import DISK, ONE_POINT, PMLF, Mixture, Pieces, probe_of, trained
from benchmarks.models import Case
from dpbench.clip import ThresholdClip
from dpbench.query import Point
from dpbench.training.losses import per_sample_loss

# Maps inputs and targets to the sum, in pieces whose concatenation is the flat vector: no engine pays for a copy that
# it does not need.
Compute = Callable[[Tensor, Tensor], Pieces]
# Makes the computation for the model of a case and a threshold.
Build = Callable[[Case, float], Compute]


@dataclass(frozen=True)
class Engine:
    """A way to compute a sum of gradients.

    Attributes:
        title: as a table names it.
        build: makes its computation.
        mixture: what is clipped and summed; None for the plain sum.
        on_gpu: it is of use on a GPU alone.
    """

    title: str
    build: Build
    mixture: Mixture | None = ONE_POINT
    on_gpu: bool = False


def _taken_gradients(parameters: Sequence[nn.Parameter]) -> list[Tensor]:
    """The parameters' ``.grad``, of which the parameters let go."""
    gradients = []
    for parameter in parameters:
        assert parameter.grad is not None
        gradients.append(parameter.grad)
        parameter.grad = None
    return gradients


def non_private(case: Case, threshold: float) -> Compute:
    """Forward and backward pass without privacy."""
    model = case.copy()
    parameters = trained(model)

    def compute(inputs: Tensor, targets: Tensor) -> Pieces:
        per_sample_loss(model(inputs), targets).sum().backward()
        return _taken_gradients(parameters)

    return compute


def non_private_replayed(case: Case, threshold: float) -> Compute:
    """The same as a CUDA graph, which dpbench makes of its passes too: recorded once and replayed."""
    model = case.copy()
    own = case.inputs.clone(), case.targets.clone()

    def gradients(inputs: Tensor, targets: Tensor) -> Pieces:
        return torch.autograd.grad(per_sample_loss(model(inputs), targets).sum(), trained(model))

    apart = torch.cuda.Stream()
    apart.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(apart):
        for _ in range(3):
            gradients(*own)
    torch.cuda.current_stream().wait_stream(apart)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = gradients(*own)

    def compute(inputs: Tensor, targets: Tensor) -> Pieces:
        if inputs.shape != own[0].shape:
            return gradients(inputs, targets)
        for kept, new in zip(own, (inputs, targets), strict=True):
            kept.copy_(new)
        graph.replay()
        return found

    return compute


def dpbench(mixture: Mixture) -> Build:
    """One point or two, by dpbench."""

    def build(case: Case, threshold: float) -> Compute:
        engine, clip = case.gradients, ThresholdClip()
        current = engine.flat.vector
        points = [Point(mixture.current, current)]
        if mixture.probe:
            points.insert(0, Point(mixture.probe, probe_of(current)))

        factors = partial(clip.factors, threshold=threshold)

        def compute(inputs: Tensor, targets: Tensor) -> Pieces:
            with torch.no_grad():
                return [engine.clipped_sum(points, [(inputs, targets)], factors).total]

        return compute

    return build


def opacus_per_sample(wrap: Callable[[nn.Module], AbstractGradSampleModule]) -> Build:
    """An Opacus module that keeps per-sample gradients, which Opacus' optimizer then clips and sums."""

    def build(case: Case, threshold: float) -> Compute:
        module = wrap(case.copy())
        optimizer = DPOptimizer(
            torch.optim.SGD(trained(module), lr=0.1),
            noise_multiplier=0.0,
            max_grad_norm=threshold,
            expected_batch_size=None,
            loss_reduction="sum",
        )

        def compute(inputs: Tensor, targets: Tensor) -> Pieces:
            per_sample_loss(module(inputs), targets).sum().backward()
            optimizer.clip_and_accumulate()
            total = [parameter.summed_grad for parameter in optimizer.params]
            optimizer.zero_grad(set_to_none=True)
            return total

        return compute

    return build


def _hooks(model: nn.Module) -> AbstractGradSampleModule:
    return GradSampleModule(model, loss_reduction="sum")


def _functorch(model: nn.Module) -> AbstractGradSampleModule:
    return GradSampleModule(model, loss_reduction="sum", force_functorch=True)


def _expanded_weights(model: nn.Module) -> AbstractGradSampleModule:
    return GradSampleModuleExpandedWeights(model, loss_reduction="sum")


def opacus_ghost(case: Case, threshold: float) -> Compute:
    """Opacus' ghost clipping: norms in one backward pass, the sum in a second."""
    model = case.copy()
    module = GradSampleModuleFastGradientClipping(model, loss_reduction="sum", max_grad_norm=threshold)
    parameters = trained(model)
    optimizer = DPOptimizerFastGradientClipping(
        torch.optim.SGD(parameters, lr=0.1),
        noise_multiplier=0.0,
        max_grad_norm=threshold,
        expected_batch_size=None,
        loss_reduction="sum",
    )
    criterion = DPLossFastGradientClipping(module, optimizer, nn.CrossEntropyLoss(reduction="sum"), "sum")

    def compute(inputs: Tensor, targets: Tensor) -> Pieces:
        criterion(module(inputs), targets).backward()
        return _taken_gradients(parameters)

    return compute


def vmap_grad(chunk: int) -> Build:
    """torch.func: per-sample gradients of a chunk of samples at a time."""

    def build(case: Case, threshold: float) -> Compute:
        model = case.copy()
        parameters = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}

        def loss(parameters: dict[str, Tensor], one_input: Tensor, one_target: Tensor) -> Tensor:
            logits = functional_call(model, parameters, (one_input.unsqueeze(0),))
            return per_sample_loss(logits, one_target.unsqueeze(0))[0]

        per_sample = vmap(grad(loss), in_dims=(None, 0, 0))

        def compute(inputs: Tensor, targets: Tensor) -> Pieces:
            totals = [torch.zeros_like(parameter).view(-1) for parameter in parameters.values()]
            for x, y in zip(inputs.split(chunk), targets.split(chunk), strict=True):
                gradients = [gradient.flatten(1) for gradient in per_sample(parameters, x, y).values()]
                norms = torch.stack([gradient.norm(dim=1) for gradient in gradients]).norm(dim=0)
                factors = (threshold / norms).clamp(max=1.0)
                for total, gradient in zip(totals, gradients, strict=True):
                    total.addmv_(gradient.T, factors)
            return totals

        return compute

    return build


NON_PRIVATE = "nonprivate"
NON_PRIVATE_REPLAYED = "nonprivate_replayed"
DPBENCH = "dpbench"

ENGINES: dict[str, Engine] = {
    NON_PRIVATE: Engine("non-private", non_private, mixture=None),
    NON_PRIVATE_REPLAYED: Engine("non-private, replayed", non_private_replayed, mixture=None, on_gpu=True),
    DPBENCH: Engine("dpbench", dpbench(ONE_POINT)),
    "dpbench_disk": Engine("dpbench, DiSK", dpbench(DISK), DISK),
    "dpbench_pmlf": Engine("dpbench, PMLF", dpbench(PMLF), PMLF),
    "opacus_hooks": Engine("Opacus hooks", opacus_per_sample(_hooks)),
    "opacus_functorch": Engine("Opacus functorch", opacus_per_sample(_functorch)),
    "opacus_ew": Engine("Opacus ExpandedWeights", opacus_per_sample(_expanded_weights)),
    "opacus_ghost": Engine("Opacus ghost", opacus_ghost),
    "vmap_8": Engine("torch.func, chunks of 8", vmap_grad(8)),
    "vmap_32": Engine("torch.func, chunks of 32", vmap_grad(32)),
    "vmap_128": Engine("torch.func, chunks of 128", vmap_grad(128), on_gpu=True),
}


def takes_part(names: Iterable[str], device: str) -> list[str]:
    """The engines of these names that there are on a kind of device, in their order; the non-private one always.

    Args:
        names: keys of `ENGINES`.
        device: "cpu" or "cuda".
    """
    chosen = {NON_PRIVATE, *names}
    return [name for name, engine in ENGINES.items() if name in chosen and (device == "cuda" or not engine.on_gpu)]
