from copy import deepcopy

import numpy as np
import pytest
import torch
from draws import generator, normal
from helpers import NOISE_SEED, assembled, composed
from scipy.signal import lfilter
from torch import nn
from toy_problems import disk_step, gradient, linear, logistic, squared, unclipped_step

from dpbench.clip import ThresholdClip
from dpbench.errors import UserError
from dpbench.filters import Exponential
from dpbench.optim import SGD, Adam, AdamW
from dpbench.query import OnePoint, Point, TwoPoint

LR = 0.2
EXACT = {"rtol": 1e-10, "atol": 1e-11}  # float64, a few dozen steps


def quartic(outputs, targets):
    return 0.25 * (outputs - targets).pow(4).sum(1)


BATCH = (normal(6, 3, seed=1), normal(6, 2, seed=2))
START = normal(2, 3, seed=3)


def perceptron(dtype):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).to(dtype)


def clipped_sum(per_sample, threshold):
    return sum(v * min(1.0, threshold / v.norm().item()) for v in per_sample)


def noises(steps, size):
    draws = generator(NOISE_SEED)
    return [torch.empty(size, dtype=torch.float64).normal_(generator=draws) for _ in range(steps)]


def train(step, batches):
    """x_0, x_1, ... of shape (T + 1, d) and m_0, m_1, ... of shape (T, d)."""
    flat = step.gradients.flat
    iterates, filtered = [flat.vector.clone()], []
    for batch in batches:
        step([batch])
        iterates.append(torch.cat([p.detach().reshape(-1) for p in flat.parameters]))
        filtered.append(torch.cat([p.grad.reshape(-1) for p in flat.parameters]))
    return torch.stack(iterates), torch.stack(filtered)


def descent(loss, steps):
    """Iterates of plain gradient descent, by autograd alone."""
    iterates = [START.flatten()]
    for _ in range(steps):
        iterates.append(iterates[-1] - LR * gradient(loss, iterates[-1], BATCH))
    return torch.stack(iterates)


# (kappa, gamma) with mixing coefficients c inside [0, 1], above 1, far above 1, and below 0.
MIXTURES = pytest.mark.parametrize(("kappa", "gamma"), [(0.7, 0.5), (0.5, 0.5), (0.5, 0.2), (0.7, -1)])


@MIXTURES
def test_a_clipped_noisy_run_is_algorithm_3(kappa, gamma):
    steps, threshold, noise_multiplier = 6, 1.0, 0.5
    step = disk_step(
        linear(START),
        squared,
        kappa,
        gamma,
        clip=ThresholdClip(),
        threshold=threshold,
        noise_multiplier=noise_multiplier,
    )
    iterates, filtered = train(step, [BATCH] * steps)

    c = (1 - kappa) / (kappa * gamma)
    x, d, m = START.flatten(), torch.zeros(6, dtype=torch.float64), None
    clipped = 0
    for t, noise in enumerate(noises(steps, 6)):
        mixtures = []
        for inputs, targets in zip(*BATCH, strict=True):
            sample = (inputs[None], targets[None])
            mixtures.append(c * gradient(squared, x + gamma * d, sample) + (1 - c) * gradient(squared, x, sample))
        clipped += sum(h.norm() > threshold for h in mixtures)
        g = (clipped_sum(mixtures, threshold) + noise_multiplier * threshold * noise) / len(mixtures)
        m = g if m is None else (1 - kappa) * m + kappa * g
        torch.testing.assert_close(filtered[t], m, **EXACT)
        d = -LR * m
        x = x + d
        torch.testing.assert_close(iterates[t + 1], x, **EXACT)
    assert 0 < clipped < 6 * steps


# U1
def weights_after_three_steps(algo, optim, noise_multiplier, **query):
    config = composed(*algo, "dataset=mnist", "model=cnn_small")
    config.optim = optim
    for name, value in query.items():
        setattr(config.query, name, value)
    step = assembled(config, noise_multiplier=noise_multiplier).step
    for t in range(3):
        step([(normal(8, 1, 28, 28, seed=t, dtype=torch.float32), torch.arange(8))])
    return step.gradients.flat.vector


@pytest.mark.parametrize("optim", [SGD(), Adam(lr=0.01)], ids=["sgd", "adam"])
@pytest.mark.parametrize("noise_multiplier", [0.0, 1.0])
@pytest.mark.usefixtures("shared_streams")
def test_kappa_one_is_the_base_optimizer_bit_for_bit(noise_multiplier, optim):
    base = weights_after_three_steps(["algo=dpsgd"], optim, noise_multiplier)
    for gamma in (0.5, -1.0, 3.0):
        same = weights_after_three_steps(["algo=disk", "algo.kappa=1"], optim, noise_multiplier, gamma=gamma)
        assert torch.equal(same, base)
    other = weights_after_three_steps(["algo=disk"], optim, noise_multiplier)
    assert not torch.allclose(other, base, rtol=1e-3)


# U2
@pytest.mark.parametrize("kappa", [0.3, 0.7])
def test_without_the_probe_it_is_a_first_order_low_pass_over_private_gradients(kappa):
    steps, threshold, noise_multiplier = 12, 1.5, 0.5
    step = unclipped_step(
        linear(START),
        logistic,
        OnePoint(),
        Exponential(kappa=kappa),
        clip=ThresholdClip(),
        threshold=threshold,
        noise_multiplier=noise_multiplier,
    )
    iterates, filtered = train(step, [BATCH] * steps)
    private = []
    for x, noise in zip(iterates, noises(steps, 6), strict=False):
        per_sample = [gradient(logistic, x, (i[None], y[None])) for i, y in zip(*BATCH, strict=True)]
        private.append((clipped_sum(per_sample, threshold) + noise_multiplier * threshold * noise) / 6)
    g = torch.stack(private).numpy()
    low_pass, _ = lfilter([kappa], [1, kappa - 1], g, axis=0, zi=(1 - kappa) * g[:1])
    np.testing.assert_allclose(filtered, low_pass, **EXACT)


# U3
@pytest.mark.parametrize("size", [1, 6])
@pytest.mark.parametrize("alpha", [0.2, 0.7])
def test_gamma_minus_one_is_storm(alpha, size):
    batches = [(normal(size, 3, seed=10 + t), normal(size, 2, seed=40 + t)) for t in range(20)]
    step = disk_step(linear(START), logistic, alpha, -1.0, expected_batch=size)
    iterates, filtered = train(step, batches)

    previous = x = START.flatten()
    m = gradient(logistic, x, batches[0])
    for t, batch in enumerate(batches):
        now = gradient(logistic, x, batch)
        if t > 0:
            m = (1 - alpha) * m + alpha * now + (1 - alpha) * (now - gradient(logistic, previous, batch))
        previous, x = x, x - LR * m
        torch.testing.assert_close(filtered[t], m, **EXACT)
        torch.testing.assert_close(iterates[t + 1], x, **EXACT)


# U4
@pytest.mark.parametrize("kappa", [0.3, 0.5, 0.7, 0.9])
def test_mixing_coefficient_one_is_accelerated_descent(kappa):
    step = disk_step(linear(START), logistic, kappa, (1 - kappa) / kappa)
    iterates, _ = train(step, [BATCH] * 30)
    mu = 1 - kappa
    x = START.flatten()
    n = LR * gradient(logistic, x, BATCH)
    for t in range(30):
        ahead = x if t == 0 else x - mu / kappa * n
        n = mu * n + LR * kappa * gradient(logistic, ahead, BATCH)
        x = x - n
        torch.testing.assert_close(iterates[t + 1], x, **EXACT)


def accelerated(kappa, lr, look_ahead, weight, steps=10):
    """n_t = (1 - κ) n_{t-1} + weight ∇F(x_t - look_ahead n_{t-1}), x_{t+1} = x_t - n_t; begun as DiSK begins."""
    x = START.flatten()
    n = lr * gradient(logistic, x, BATCH)
    iterates = [x]
    for t in range(steps):
        ahead = x - look_ahead * n if t else x
        n = (1 - kappa) * n + weight * gradient(logistic, ahead, BATCH)
        x = x - n
        iterates.append(x)
    return torch.stack(iterates)


@pytest.mark.parametrize("kappa", [0.3, 0.7, 0.9])
@pytest.mark.parametrize("lr", [0.2, 0.5, 1.0])
def test_at_mixing_coefficient_one_it_is_not_the_method_of_nesterov(kappa, lr):
    """disk.md A5: Nesterov looks ahead by μ = 1 - κ, the displayed form, of step size s = κ, by μ/s."""
    step = disk_step(linear(START), logistic, kappa, (1 - kappa) / kappa, optim=SGD(lr=lr))
    iterates, _ = train(step, [BATCH] * 10)
    moved = (iterates - START.flatten()).norm()
    mu = 1 - kappa
    torch.testing.assert_close(iterates, accelerated(kappa, lr, mu / kappa, lr * kappa), **EXACT)
    for weight in (lr * kappa, lr, kappa):
        assert (iterates - accelerated(kappa, lr, mu, weight)).norm() > 1e-4 * moved
    displayed = (iterates - accelerated(kappa, lr, mu / kappa, kappa)).norm()
    assert (displayed < 1e-9 * moved) == (lr == 1)
    assert displayed < 1e-9 * moved or displayed > 1e-4 * moved


# U5
@pytest.mark.parametrize("kappa", [0.3, 0.7])
def test_gamma_does_not_matter_for_linear_gradients_even_with_noise(kappa):
    def iterates(loss, gamma):
        settings = {"clip": ThresholdClip(), "threshold": 1e3, "noise_multiplier": 1e-3}
        return train(disk_step(linear(START), loss, kappa, gamma, **settings), [BATCH] * 25)[0]

    reference = iterates(squared, 0.5)
    assert not torch.allclose(reference, descent(squared, 25), rtol=1e-2)  # the noise is not negligible
    for gamma in (0.05, 1.0, 3.0, -1.0, -0.3, (1 - kappa) / kappa):
        torch.testing.assert_close(iterates(squared, gamma), reference, **EXACT)
        assert not torch.allclose(iterates(logistic, gamma), iterates(logistic, 0.5), rtol=1e-6)


# U6
@pytest.mark.parametrize(("kappa", "gamma"), [(0.7, 0.5), (0.3, -1), (0.3, 7 / 3), (0.9, 2), (0.5, 0.2)])
def test_on_a_quadratic_it_is_plain_gradient_descent(kappa, gamma):
    iterates, filtered = train(disk_step(linear(START), squared, kappa, gamma), [BATCH] * 25)
    expected = descent(squared, 25)
    torch.testing.assert_close(iterates, expected, **EXACT)
    gradients = torch.stack([gradient(squared, x, BATCH) for x in expected[:-1]])
    torch.testing.assert_close(filtered, gradients, **EXACT)


def test_on_a_quadratic_the_swapped_weight_is_not_gradient_descent():
    step = unclipped_step(linear(START), squared, TwoPoint(kappa=0.7, gamma=0.5), Exponential(kappa=1 - 0.7))
    assert not torch.allclose(train(step, [BATCH] * 25)[0], descent(squared, 25), rtol=1e-2)


# U7
@pytest.mark.parametrize(("kappa", "gamma"), [(0.7, 0.5), (0.3, -1), (0.3, 7 / 3)])
def test_on_a_quadratic_a_filter_started_at_zero_forgets_it_geometrically(kappa, gamma):
    step = disk_step(linear(START), squared, kappa, gamma)
    step.filter.apply(torch.zeros(6, dtype=torch.float64))  # m_{-1} = 0
    iterates, filtered = train(step, [BATCH] * 12)
    gradients = torch.stack([gradient(squared, x, BATCH) for x in iterates[:-1]])
    powers = (1 - kappa) ** torch.arange(1, 13, dtype=torch.float64)
    torch.testing.assert_close(gradients - filtered, powers[:, None] * gradients[0], **EXACT)


# U8. The error is an autoregressive process in each of 200 coordinates, so the mean of its squares over them and 280
# steps has a standard deviation of 0.8 % at most (kappa = 0.5): a correct filter fails at 4 % in fewer than 1 of
# 10^6 choices of the seed, in each case.
@pytest.mark.parametrize(
    ("kappa", "gamma", "lr"), [(0.7, 0.5, 0.05), (0.7, -1, 0.2), (0.5, 0.5, 0.05), (0.5, 1, 0.05), (0.9, 0.5, 0.05)]
)
def test_on_a_quadratic_the_noise_left_in_the_filter_is_kappa_over_two_minus_kappa(kappa, gamma, lr):
    inputs, targets = normal(30, 20, seed=1), normal(30, 10, seed=2)
    deviation, threshold = 0.3, 1e4
    settings = {"clip": ThresholdClip(), "threshold": threshold, "noise_multiplier": deviation * 30 / threshold}
    step = disk_step(
        linear(normal(10, 20, seed=3)), squared, kappa, gamma, expected_batch=30, optim=SGD(lr=lr), **settings
    )
    iterates, filtered = train(step, [(inputs, targets)] * 300)
    weights = iterates[:-1].view(-1, 10, 20)
    gradients = (weights @ (inputs.T @ inputs) - targets.T @ inputs) / 30
    error = (filtered - gradients.flatten(1))[20:]
    assert error.square().mean().item() == pytest.approx(deviation**2 * kappa / (2 - kappa), rel=0.04)


# U8 with the weight swapped (D1): what noise alone makes of the error, as the difference of two runs at the same
# start. Small steps, for large ones feed the noise back through the mixture that does not match.
def test_on_a_quadratic_the_swapped_weight_leaves_another_share_of_the_noise():
    inputs, targets = normal(30, 20, seed=1), normal(30, 10, seed=2)
    errors = []
    for deviation in (0.3, 0.0):
        settings = {"clip": ThresholdClip(), "threshold": 1e4, "noise_multiplier": deviation * 30 / 1e4}
        step = unclipped_step(
            linear(normal(10, 20, seed=3)),
            squared,
            TwoPoint(kappa=0.7, gamma=0.5),
            Exponential(kappa=1 - 0.7),
            expected_batch=30,
            optim=SGD(lr=0.002),
            **settings,
        )
        iterates, filtered = train(step, [(inputs, targets)] * 300)
        weights = iterates[:-1].view(-1, 10, 20)
        errors.append(filtered - ((weights @ (inputs.T @ inputs) - targets.T @ inputs) / 30).flatten(1))
    share = (errors[0] - errors[1])[20:].square().mean().item() / 0.3**2
    assert share == pytest.approx(0.1765, rel=0.04)


# disk.md 2.8: kappa, gamma: c, 1 - c, |c| + |1 - c|.
MIXING = {
    (0.7, 0.5): (0.857, 0.143, 1),
    (0.7, 1): (0.429, 0.571, 1),
    (0.7, -1): (-0.429, 1.429, 1.857),
    (0.6, 0.5): (1.333, -0.333, 1.667),
    (0.5, 0.5): (2, -1, 3),
    (0.5, 0.2): (5, -4, 9),
    (0.8, 0.5): (0.5, 0.5, 1),
    (0.9, 0.5): (0.222, 0.778, 1),
    (0.99, 0.5): (0.020, 0.980, 1),
}


@pytest.mark.parametrize("key", MIXING, ids=str)
def test_mixing_coefficients_have_the_printed_values(key):
    query = TwoPoint(*key)
    query.points(torch.zeros(2))
    (own, iterate), (ahead, probe) = query.points(torch.ones(2))
    assert [ahead, own, abs(ahead) + abs(own)] == pytest.approx(MIXING[key], abs=6e-4)
    assert torch.equal(iterate, torch.ones(2))
    assert torch.equal(probe, torch.full((2,), 1 + key[1]))


@pytest.mark.parametrize(
    ("kappa", "gamma", "most"), [(0.7, 0.5, 2), (1.0, 0.5, 1), (0.7, 0.3 / 0.7, 1), (0.6, 2 / 3, 1)], ids=str
)
def test_there_are_as_many_points_at_most_as_are_evaluated(kappa, gamma, most):
    query = TwoPoint(kappa=kappa, gamma=gamma)
    assert query.most_points == most == max(len(query.points(torch.full((2,), float(t)))) for t in range(4))


def longest_mixture(kappa, gamma):
    """Of two gradients of norm 1 at most."""
    found = 0.0
    for at_probe in ((0, 1), (0, -1)):
        step, ((inputs, targets),) = two_gradients((0, 1), at_probe, kappa, gamma)
        tape = step.gradients.record(step.query.points(step.gradients.flat.vector), inputs, targets)
        found = max(found, tape.norms().item())
    return found


def test_a_mixture_is_as_long_as_the_printed_bound_says_where_gradients_oppose():
    """disk.md 3.3: clipping is inactive at C >= (|c| + |1 - c|) G, and no smaller C will do."""
    for key, (*_, bound) in MIXING.items():
        assert longest_mixture(*key) == pytest.approx(bound, abs=6e-4)


def test_neither_printed_clip_threshold_leaves_every_mixture_as_it_is():
    """disk.md A24: C >= (1 + 2(1-κ)/κ) G in the theorem, which is exact at γ = -1; with κγ for κ in the appendix."""
    for kappa, gamma in [*MIXING, (0.7, -0.3), (0.3, -1), (0.5, -2)]:
        longest = longest_mixture(kappa, gamma)
        theorem, appendix = 1 + 2 * (1 - kappa) / kappa, 1 + 2 * (1 - kappa) / (kappa * gamma)
        # Too small at γ below 1 where c > 1, and between -1 and 0; and at every γ < 0.
        assert (longest > theorem + 1e-9) == ((kappa, gamma) in [(0.5, 0.2), (0.7, -0.3)])
        assert (longest > appendix + 1e-9) == (gamma < 0)
        assert (longest == pytest.approx(theorem)) == (gamma == -1 or (kappa, gamma) == (0.5, 0.5))


# U9. The loss |θ|²/2 has the gradient θ, so a step from θ_{t-1} to θ_t chooses both gradients freely.
def two_gradients(at_iterate, at_probe, kappa, gamma):
    """A step about to see these two gradients of one sample, and its batch."""
    iterate, probe = (torch.tensor(g, dtype=torch.float64) for g in (at_iterate, at_probe))
    step = disk_step(linear(iterate[:, None]), squared, kappa, gamma, clip=ThresholdClip())
    step.query.points(iterate - (probe - iterate) / gamma)
    return step, [(torch.ones(1, 1, dtype=torch.float64), torch.zeros(1, 2, dtype=torch.float64))]


def clipped_apart(step, batch):
    points = step.query.points(step.gradients.flat.vector)
    total = torch.zeros(2, dtype=torch.float64)
    for weight, iterate in points:
        tape = step.gradients.record([(1.0, iterate)], *batch[0])
        total += weight * tape.weighted_sum(step.clip.factors(tape.norms(), 1.0))
    return total


def test_the_mixture_is_clipped_and_not_its_terms():
    step, batch = two_gradients((0, 4), (3, 0), 0.7, 0.5)
    together, *_ = step.request(batch, threshold=1.0).alone()
    apart = clipped_apart(*two_gradients((0, 4), (3, 0), 0.7, 0.5))
    np.testing.assert_allclose(together, (0.976187, 0.216930), rtol=0, atol=6e-7)
    np.testing.assert_allclose(apart, (0.857143, 0.142857), rtol=0, atol=6e-7)


@pytest.mark.parametrize(("kappa", "gamma", "apart"), [(0.5, 0.5, 3), (0.5, 0.2, 9), (0.7, -1, 13 / 7)])
def test_a_mixture_with_negative_weights_keeps_the_sensitivity(kappa, gamma, apart):
    step, batch = two_gradients((0, 4), (0, -3), kappa, gamma)
    together, *_ = step.request(batch, threshold=1.0).alone()
    assert together.norm().item() == pytest.approx(1, abs=1e-12)
    assert clipped_apart(*two_gradients((0, 4), (0, -3), kappa, gamma)).norm().item() == pytest.approx(apart)


# U10: t, x_t, d_{t-1}, g_t, m_t, x_{t+1} for a gradient of x³, nine decimals.
CUBIC = [
    (1.000000000, 0.000000000, 1.000000000, 1.000000000, 0.900000000),
    (0.900000000, -0.100000000, 0.630535714, 0.741375000, 0.825862500),
    (0.825862500, -0.074137500, 0.501140356, 0.573210749, 0.768541425),
    (0.768541425, -0.057321075, 0.412016238, 0.460374591, 0.722503966),
]


def test_query_and_filter_follow_the_trace_of_a_cubic_gradient():
    query, filter = TwoPoint(kappa=0.7, gamma=0.5), Exponential(kappa=0.7)
    x, previous, trace = torch.ones(1, dtype=torch.float64), 1.0, []
    for _ in CUBIC:
        g = sum(weight * iterate**3 for weight, iterate in query.points(x))
        now, m = x.item(), filter.apply(g)
        x.sub_(m, alpha=0.1)
        trace.append((now, now - previous, g.item(), m.item(), x.item()))
        previous = now
    np.testing.assert_allclose(trace, CUBIC, rtol=0, atol=6e-10)


def test_private_step_follows_the_trace_of_a_cubic_gradient():
    one = torch.ones(1, 1, dtype=torch.float64)
    step = disk_step(linear(one), quartic, 0.7, 0.5, expected_batch=1, optim=SGD(lr=0.1))
    iterates, filtered = train(step, [(one, torch.zeros_like(one))] * 4)
    trace = torch.cat([iterates[:-1], filtered, iterates[1:]], dim=1)
    np.testing.assert_allclose(trace, np.array(CUBIC)[:, [0, 3, 4]], rtol=0, atol=6e-10)


# U11
def evaluated_points(step, layer):
    """θ at every forward pass of one step."""
    seen = []
    step.gradients.record([Point(1.0, step.gradients.flat.vector)], *BATCH)  # compared with autograd, before
    step.gradients._batches = 4  # and not again soon
    with layer.register_forward_pre_hook(lambda layer, _: seen.append(layer.weight.detach().flatten().clone())):
        step([BATCH])
    return seen


@pytest.mark.parametrize(
    ("kappa", "gamma", "evaluations"),
    [
        *[(0.7, 0.5, 2), (0.7, -1.0, 2), (0.5, 0.2, 2), (0.99, 1.0, 2)],
        *[(1.0, 0.5, 1), (1.0, -1.0, 1), (0.5, 1.0, 1)],
        *[(kappa, (1 - kappa) / kappa, 1) for kappa in (0.1, 0.3, 0.6, 0.7, 0.8, 0.9, 0.99)],
    ],
)
def test_gradients_are_evaluated_no_more_often_than_needed(kappa, gamma, evaluations):
    layer = linear(START)
    step = disk_step(layer, squared, kappa, gamma)
    counts = [len(evaluated_points(step, layer)) for _ in range(4)]
    assert counts == [1] + [evaluations] * 3


OPTIMIZERS = pytest.mark.parametrize(
    ("optim", "base", "settings"),
    [
        (SGD, torch.optim.SGD, {"lr": 0.3}),
        (SGD, torch.optim.SGD, {"lr": 0.3, "momentum": 0.9, "weight_decay": 0.1}),
        (Adam, torch.optim.Adam, {"lr": 0.05}),
        (AdamW, torch.optim.AdamW, {"lr": 0.05, "weight_decay": 0.5}),
    ],
    ids=["sgd", "momentum", "adam", "adamw"],
)


@OPTIMIZERS
def test_probe_lies_along_the_real_displacement(optim, base, settings):
    layer = linear(START)
    step = disk_step(layer, logistic, 0.7, 0.5, optim=optim(**settings))
    previous = START.flatten()
    evaluated_points(step, layer)
    for _ in range(4):
        x = step.gradients.flat.vector.clone()
        first, probe = evaluated_points(step, layer)
        assert torch.equal(first, x)
        torch.testing.assert_close(probe, x + 0.5 * (x - previous), **EXACT)
        previous = x


def test_reported_losses_are_those_at_the_iterate():
    step = disk_step(linear(START), logistic, 0.7, 0.5)
    for _ in range(3):
        outputs = BATCH[0] @ step.gradients.flat.vector.view(2, 3).T
        torch.testing.assert_close(step([BATCH]), logistic(outputs, BATCH[1]), **EXACT)


# U12
@pytest.mark.parametrize("pieces", [2, 4, 8])
def test_micro_batches_give_the_step_of_the_whole_batch(pieces):
    inputs, targets = normal(8, 3, seed=1), torch.arange(8) % 2

    def vectors(batch):
        settings = {"clip": ThresholdClip(), "threshold": 0.5, "noise_multiplier": 0.5, "expected_batch": 8}
        loss = nn.CrossEntropyLoss(reduction="none")
        step = disk_step(perceptron(torch.float64), loss, 0.7, 0.5, **settings)
        for _ in range(4):
            step(batch)
        return step.gradients.flat.vector

    split = list(zip(inputs.chunk(pieces), targets.chunk(pieces), strict=True))
    torch.testing.assert_close(vectors(split), vectors([(inputs, targets)]), **EXACT)


# U13
@OPTIMIZERS
@pytest.mark.parametrize("gamma", [0.5, 3.0])
def test_weights_are_bit_for_bit_what_the_base_optimizer_makes_of_the_filtered_gradient(gamma, optim, base, settings):
    model = perceptron(torch.float32)
    twin = deepcopy(model)
    twin_optimizer = base(twin.parameters(), **settings)
    step = disk_step(model, squared, 0.7, gamma, optim=optim(**settings))
    batch = tuple(part.float() for part in BATCH)
    for _ in range(6):
        step([batch])
        for theirs, ours in zip(twin.parameters(), model.parameters(), strict=True):
            theirs.grad = ours.grad.clone()
        twin_optimizer.step()
        for theirs, ours in zip(twin.parameters(), model.parameters(), strict=True):
            assert torch.equal(ours, theirs)
        assert torch.equal(step.gradients.flat.vector, nn.utils.parameters_to_vector(twin.parameters()))


@pytest.mark.parametrize("split", [0, 1, 3])
def test_query_continues_from_its_state_bit_for_bit(split):
    iterates = normal(6, 4, dtype=torch.float32)

    def points(query, some):
        return [[(weight, iterate.clone()) for weight, iterate in query.points(x)] for x in some]

    uninterrupted, stopped, resumed = (TwoPoint(kappa=0.7, gamma=0.5) for _ in range(3))
    points(stopped, iterates[:split])
    state = stopped.state_dict()
    points(stopped, iterates.flip(0))
    points(resumed, iterates.flip(0))
    resumed.load_state_dict(state)
    expected = points(uninterrupted, iterates)[split:]
    for got, wanted in zip(points(resumed, iterates[split:]), expected, strict=True):
        assert [weight for weight, _ in got] == [weight for weight, _ in wanted]
        assert all(torch.equal(a, b) for (_, a), (_, b) in zip(got, wanted, strict=True))


@pytest.mark.parametrize(("kappa", "gamma", "field"), [(0, 1, "kappa"), (1.1, 1, "kappa"), (0.7, 0, "gamma")])
def test_undefined_mixtures_are_refused(kappa, gamma, field):
    with pytest.raises(UserError, match=rf"^query\.{field}="):
        TwoPoint(kappa=kappa, gamma=gamma)
