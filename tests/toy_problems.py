"""Problems whose constants are known, on which what the papers prove is checked, and steps on them."""

import torch
import torch.nn.functional as F
from helpers import step_of
from torch import nn

from dpbench.clip import NoClip
from dpbench.computed.regression import LinearRegression
from dpbench.filters import Exponential
from dpbench.optim import SGD
from dpbench.query import TwoPoint
from dpbench.threshold import FixedThreshold


def quadratic(curvatures, start):
    """F(x) = Σ λ_i (x_i + start)²/2, whose minimum lies at -start: `descend` begins at 0."""
    curvatures = torch.as_tensor(curvatures, dtype=torch.float64)
    inputs = torch.diag(torch.sqrt(len(curvatures) * curvatures))
    return LinearRegression(inputs, inputs @ torch.full_like(curvatures, -start))


def gradients_along(problem, path):
    """Of all iterates but the last, shape (T, d)."""
    return torch.stack([problem.gradient(x) for x in path[:-1]]).numpy()


class Position(nn.Module):
    """f(x; ξ) = |x - ξ|²/2, whose gradient is x - ξ."""

    def __init__(self, start):
        super().__init__()
        self.x = nn.Parameter(torch.tensor(start, dtype=torch.float64))

    def forward(self, points):
        return self.x - points


def half_square(differences, _):
    return 0.5 * differences.square().sum(1)


def point_step(threshold, *, start=None, lr=1e-300, momentum=0.0, problem=None, **settings):
    """A step on f(x; ξ) = |x - ξ|²/2, or on another problem, a model and its loss; of all samples given."""
    optim = SGD(lr=lr, momentum=momentum)
    return step_of(*(problem or (Position(start), half_square)), threshold=threshold, optim=optim, **settings)


def linear(weight):
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False, dtype=weight.dtype)
    layer.weight.data.copy_(weight)
    return layer


def squared(outputs, targets):
    return 0.5 * (outputs - targets).square().sum(1)


def logistic(outputs, targets):
    return F.softplus(-targets.sign() * outputs).sum(1)


def gradient(loss, iterate, batch):
    """Gradient of a linear layer's mean loss, by autograd alone; shape (d,)."""
    inputs, targets = batch
    iterate = iterate.detach().clone().requires_grad_()
    mean = loss(inputs @ iterate.view(targets.shape[1], -1).T, targets).mean()
    return torch.autograd.grad(mean, iterate)[0]


def unclipped_step(model, loss, query, filter, *, clip=None, threshold=1.0, expected_batch=6, optim=None, **settings):
    """A step on batches of six samples, which clips if it is given a clip."""
    stages = {"query": query, "filter": filter, "clip": clip or NoClip(), "optim": optim or SGD(lr=0.2)}
    return step_of(
        model, loss, **stages, threshold=FixedThreshold(threshold), expected_batch=expected_batch, **settings
    )


def disk_step(model, loss, kappa, gamma, **settings):
    return unclipped_step(model, loss, TwoPoint(kappa=kappa, gamma=gamma), Exponential(kappa=kappa), **settings)
