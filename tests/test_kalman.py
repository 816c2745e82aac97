"""The full Kalman filter and its gains, against Bayesian conditioning and printed values; synthetic regression."""

from copy import deepcopy
from functools import partial

import pytest
import torch
from draws import generator, normal

from dpbench.computed.regression import METHODS, LinearRegression, descend
from dpbench.errors import UserError
from dpbench.filters import Exponential, Identity, Kalman, RecursiveLowPass
from dpbench.filters.kalman import gain_rate, scalar_gains, steady_gain
from dpbench.query import OnePoint, TwoPoint

# disk.md 3.2: (w, h, v), first gains, p_inf, k_inf, rate.
PRINTED = [
    ((1, 0, 0.5), (0.600000, 0.523810, 0.505882, 0.501466, 0.500366), 0.5, 0.5, 0.25),
    ((1, 0.3, 0.2), (0.681818, 0.582656, 0.564638, 0.561196, 0.560533), 0.392262, 0.560374, 0.193271),
    ((2, 0.5, 0.1), (0.634146, 0.508393, 0.475999, 0.466951, 0.464367), 0.694987, 0.463325, 0.288020),
    ((1, 0.1, 0), (0.550000, 0.397993, 0.337355, 0.309615, 0.296134), 0.254138, 0.282376, 0.514985),
]


@pytest.mark.parametrize(("variances", "gains", "p", "k", "rate"), PRINTED)
def test_scalar_gains_have_the_printed_values(variances, gains, p, k, rate):
    found = scalar_gains(*variances, 40)
    assert [g.gain for g in found[:5]] == pytest.approx(gains, abs=6e-7)
    assert steady_gain(*variances) == pytest.approx((k, p), abs=6e-7)
    assert found[-1] == pytest.approx(steady_gain(*variances), abs=1e-9)
    assert gain_rate(*variances) == pytest.approx(rate, abs=6e-7)
    gaps = [g.variance - steady_gain(*variances).variance for g in scalar_gains(*variances, 14)]
    assert gaps[9] / gaps[8] == pytest.approx(rate, rel=1e-3)


@pytest.mark.parametrize(
    ("kappa", "ratio"), [(0.5, 0.5), (0.6, 0.9), (0.7, 1.6333), (0.8, 3.2), (0.9, 8.1), (0.99, 98.01)]
)
def test_drift_that_makes_a_gain(kappa, ratio):
    drift = kappa**2 / (1 - kappa)  # σ_v²/σ_w² at σ_H² = 0
    assert drift == pytest.approx(ratio, rel=1e-4)
    assert steady_gain(1.0, 0.0, drift).gain == pytest.approx(kappa)


def filtered(stage, observations, shifts):
    found = []
    for observation, shift in zip(observations, shifts, strict=True):
        stage.predict(shift)
        found.append(stage.apply(observation).clone())
    return torch.stack(found)


def test_the_filter_has_the_scalar_gains_where_all_is_isotropic():
    variances = (1.0, 0.3, 0.2)
    observations, shifts = normal(8, 3), normal(8, 3, seed=1)
    found = filtered(Kalman(*variances), observations, shifts)
    m = torch.zeros(3, dtype=torch.float64)
    for t, (gain, _) in enumerate(scalar_gains(*variances, 8)):
        m = m + shifts[t]
        m = m + gain * (observations[t] - m)
        torch.testing.assert_close(found[t], m, rtol=1e-10, atol=1e-12)


def test_the_filter_is_bayes_for_a_linear_gaussian_system():
    """Posterior means by conditioning the joint normal law of all states and observations, no recursion."""
    d, steps, w, v = 3, 5, 0.7, 0.2
    observation, shifts, seen = normal(d, d, seed=2), normal(steps, d, seed=3), normal(steps, d, seed=4)
    stage = Kalman(noise=w, drift=v)
    stage.observation = observation
    found = filtered(stage, seen, shifts)
    eye = torch.eye(d, dtype=torch.float64)
    prior_mean = shifts.cumsum(0)
    times = torch.arange(steps, dtype=torch.float64)
    # State t is the start, of variance w, and t + 1 drifts of variance v.
    walk = w + v * (1 + torch.minimum(times[:, None], times[None, :]))
    states = torch.kron(walk, eye)
    for t in range(steps):
        n = (t + 1) * d
        seeing = torch.kron(torch.eye(t + 1, dtype=torch.float64), observation)
        law = seeing @ states[:n, :n] @ seeing.T + w * torch.eye(n, dtype=torch.float64)
        innovation = seen[: t + 1].reshape(-1) - seeing @ prior_mean[: t + 1].reshape(-1)
        posterior = prior_mean[: t + 1].reshape(-1) + states[:n, :n] @ seeing.T @ torch.linalg.solve(law, innovation)
        torch.testing.assert_close(found[t], posterior[-d:], rtol=1e-9, atol=1e-10)


def test_the_published_gain_with_multiplicative_noise():
    """One step of Alg. 2 for d = 1, by hand: P⁻ = 1 + h + v, m⁻ = u."""
    stage = Kalman(noise=1.0, hessian_noise=0.2, drift=0.1, observation_noise=0.5)
    stage.observation = torch.tensor([[0.8]], dtype=torch.float64)
    found = filtered(stage, torch.tensor([[2.0]]).double(), torch.tensor([[3.0]]).double())
    gain = 1.3 * 0.8 / (0.8 * (1.3 + 0.5 * 9) * 0.8 + 1 - 0.2)
    assert float(found[0, 0]) == pytest.approx(3 + gain * (2 - 0.8 * 3))


def test_kalman_continues_from_its_state_bit_for_bit():
    observations, shifts = normal(8, 3), normal(8, 3, seed=1)
    want = filtered(Kalman(drift=0.3), observations, shifts)
    first, second = Kalman(drift=0.3), Kalman(drift=0.3)
    filtered(first, observations[:4], shifts[:4])
    second.load_state_dict(deepcopy(first.state_dict()))
    assert torch.equal(filtered(second, observations[4:], shifts[4:]), want[4:])
    second.load_state_dict(Kalman(drift=0.3).state_dict())
    assert torch.equal(filtered(second, observations, shifts), want)


@pytest.mark.parametrize("bad", [{"noise": 0.0}, {"hessian_noise": 1.0}, {"drift": -1.0}, {"observation_noise": -1.0}])
def test_variances_out_of_range_are_refused(bad):
    with pytest.raises(UserError, match=f"filter.{next(iter(bad))}"):
        Kalman(**bad)


SETTINGS = {"lr": 0.3, "steps": 200}


def test_without_noise_every_method_finds_the_least_squares_solution():
    problem = LinearRegression.draw(generator())
    for make in METHODS.values():
        query, filter = make(0.1)
        path = descend(problem, query, filter, noise_std=0.0, generator=generator(), lr=0.1, steps=1500)
        assert problem.loss(path[-1]) == pytest.approx(problem.least_loss, rel=1e-6)


def test_noisy_kf_does_not_depend_on_gamma():
    """disk.md U5: gradients are linear and the batch is full."""
    problem = LinearRegression.draw(generator())
    paths = [
        descend(
            problem,
            TwoPoint(kappa=0.4, gamma=g),
            Exponential(kappa=0.4),
            noise_std=0.5,
            generator=generator(1),
            **SETTINGS,
        )
        for g in (-1.0, 0.5, 2.0)
    ]
    for path in paths[1:]:
        torch.testing.assert_close(path, paths[0], rtol=1e-9, atol=1e-9)


def last_losses(problem, noise_std, make):
    ends = []
    for seed in range(10):
        query, filter = make()
        path = descend(problem, query, filter, noise_std=noise_std, generator=generator(seed), **SETTINGS)
        ends += [problem.loss(x) - problem.least_loss for x in path[-50:]]
    return sum(ends) / len(ends)


@pytest.mark.parametrize("noise_std", [0.3, 1.0, 3.0])
def test_noisy_kf_ends_lowest_at_every_noise_level(noise_std):
    """DiSK's figure 6(a). The means differ by factors, over 10 seeds of 50 iterates each."""
    problem = LinearRegression.draw(generator())
    losses = {name: last_losses(problem, noise_std, partial(make, 0.1)) for name, make in METHODS.items()}
    assert losses["NoisyKF"] < 0.7 * min(losses["NoisyGD"], losses["NoisyLP"])


def test_noisy_gd_has_the_stationary_loss_of_the_closed_form():
    """x_{t+1} - x* = (I - lr H)(x_t - x*) - lr w: E excess = (σ²/2) Σ lr/(2 - lr λ). 500 correlated samples: 10 %."""
    problem = LinearRegression.draw(generator())
    eigenvalues = torch.linalg.eigvalsh(problem.hessian)
    want = 0.5 * 1.0 * (SETTINGS["lr"] / (2 - SETTINGS["lr"] * eigenvalues)).sum()
    assert last_losses(problem, 1.0, lambda: (OnePoint(), Identity())) == pytest.approx(float(want), rel=0.1)


def test_the_full_filter_denoises_the_gradient_better_than_a_low_pass():
    problem = LinearRegression.draw(generator())
    errors = {}
    for name, filter in (("full", Kalman(noise=1.0)), ("low-pass", RecursiveLowPass(b=[0.1], a=[-0.9]))):
        path = descend(problem, OnePoint(), filter, noise_std=1.0, generator=generator(5), **SETTINGS)
        used = (path[:-1] - path[1:]) / SETTINGS["lr"]
        true = torch.stack([problem.gradient(x) for x in path[:-1]])
        errors[name] = float((used - true).square().sum(1)[100:].mean())
    assert errors["full"] < 0.5 * errors["low-pass"]


@pytest.mark.parametrize("variances", [(1.0, 0.0, 0.5), (1.0, 0.3, 0.2), (2.0, 0.5, 0.1)])
@pytest.mark.parametrize("gamma", [0.5, -1.0])
def test_at_its_steady_gain_the_full_filter_is_disk(variances, gamma):
    """disk.md 2.7, steps 1 to 4 of the simplification, on a quadratic with its exact Hessian; begun at m_{-1} = 0."""
    problem, (kappa, variance) = LinearRegression.draw(generator()), steady_gain(*variances)
    zero = torch.zeros(problem.inputs.shape[1], dtype=torch.float64)
    full, simplified = Kalman(*variances), Exponential(kappa=kappa)
    full.load_state_dict({"estimate": zero, "covariance": variance * torch.eye(len(zero), dtype=torch.float64)})
    simplified.apply(zero)
    settings = {"noise_std": 0.7, "lr": 0.3, "steps": 60}
    one = descend(problem, OnePoint(), full, generator=generator(1), **settings)
    other = descend(problem, TwoPoint(kappa=kappa, gamma=gamma), simplified, generator=generator(1), **settings)
    torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-10)
    assert (one[-1] - one[0]).norm() > 1
    # From P_{-1} = σ_w² the gains are larger at first, so that it is another method.
    assert (descend(problem, OnePoint(), Kalman(*variances), generator=generator(1), **settings) - other).norm() > 0.1


def test_a_shift_is_of_the_next_observation_alone():
    """Where none is told the gradient is predicted to stay, whatever it did a step before."""
    told, silent = (Kalman(noise=2.0, drift=0.1) for _ in range(2))
    shift, gradients = normal(3, seed=1), normal(3, 3, seed=2)
    for t, gradient in enumerate(gradients):
        told.predict(shift if t == 1 else torch.zeros_like(shift))
        if t == 1:
            silent.predict(shift)
        assert torch.equal(told.apply(gradient), silent.apply(gradient))
