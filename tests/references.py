"""Every algorithm of conf/algo once more: slow, in float64, from its publication's pseudo-code, with NumPy alone.

An algorithm is covered once a function here bears its name:

    @reference("name")
    def name(task):
        for t in range(task.steps):
            ...
            yield theta  # the parameters after step t

It writes out the constants that conf/algo/name.yaml stands for, except the learning rate. Of the run that it is
compared with it gets what was drawn: batches and noise. It shares no line with dpbench.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from scipy import signal

Vector = np.ndarray
Bound = Callable[[Vector, float], Vector]
Batch = tuple[Vector, Vector]


# Clipping: factors of norms.


def automatic(norms: Vector, threshold: float) -> Vector:
    """Bu et al. 2023, AUTO-S with the constant of their library."""
    return threshold / (norms + 0.01)


def abadi(norms: Vector, threshold: float) -> Vector:
    """Abadi et al. 2016."""
    return np.minimum(1, threshold / np.maximum(norms, 1e-300))


def psac(norms: Vector, threshold: float) -> Vector:
    """Xia et al. 2023, with r = 0.1."""
    return threshold / (norms + 0.1 / (norms + 0.1))


@dataclass(frozen=True)
class Task:
    """Softmax regression of given batches with given noise.

    Attributes:
        start: θ_0, shape (d,): weights (classes, inputs) by rows, then biases.
        batches: inputs (B_t, inputs) and labels (B_t,) of each step.
        noise: what each step drew at unit variance for its sum, in order: one vector (d,) with independent noise.
        side: the same for what is released beside the sum.
        expected_batch: B.
        multiplier: z.
        lr: learning rate before any schedule.
        bound: factors of norms where the publication leaves the choice; automatic is the framework's default.
        classes: number of classes.
    """

    start: Vector
    batches: Sequence[Batch]
    noise: Sequence[Sequence[Vector]]
    side: Sequence[Sequence[Vector]]
    expected_batch: float
    multiplier: float
    lr: float
    bound: Bound = automatic
    classes: int = 10

    @property
    def steps(self) -> int:
        return len(self.batches)

    def drawn(self, step: int) -> Vector:
        """The noise of a step that draws once."""
        (noise,) = self.noise[step]
        return noise

    def gradients(self, theta: Vector, step: int) -> Vector:
        """∇f(θ; x_i) of each sample of the step's batch, shape (B_t, d): (p - onehot(y)) ⊗ (x, 1)."""
        inputs, labels = self.batches[step]
        weights, biases = self.split(theta)
        logits = inputs @ weights.T + biases
        exponentials = np.exp(logits - logits.max(1, keepdims=True))
        errors = exponentials / exponentials.sum(1, keepdims=True) - np.eye(self.classes)[labels]
        of_weights = np.einsum("ik,ij->ikj", errors, inputs).reshape(len(inputs), weights.size)
        return np.concatenate([of_weights, errors], 1)

    def split(self, theta: Vector) -> tuple[Vector, Vector]:
        """Weights and biases."""
        return theta[: -self.classes].reshape(self.classes, -1), theta[-self.classes :]

    def clipped_sum(
        self, step: int, points: Sequence[tuple[float, Vector]], bound: Bound, threshold: float = 1.0
    ) -> Vector:
        """Σ_i h_i bound(‖h_i‖), h_i = Σ_j w_j ∇f(θ_j; x_i)."""
        vectors = sum(weight * self.gradients(theta, step) for weight, theta in points)
        norms = np.linalg.norm(vectors, axis=1)
        return (vectors * bound(norms, threshold)[:, None]).sum(0)

    def norms(self, step: int, theta: Vector) -> Vector:
        """‖∇f(θ; x_i)‖ of each sample."""
        return np.linalg.norm(self.gradients(theta, step), axis=1)

    def mean(self, step: int, total: Vector, sensitivity: float = 1.0, scale: float = 1.0) -> Vector:
        """The private gradient: a sum, with noise of std z scale sensitivity, over the expected batch size."""
        if self.multiplier == 0:
            return total / self.expected_batch
        return (total + self.multiplier * scale * sensitivity * self.drawn(step)) / self.expected_batch

    def gradient(self, step: int, points: Sequence[tuple[float, Vector]]) -> Vector:
        """The private gradient at the threshold 1."""
        return self.mean(step, self.clipped_sum(step, points, self.bound))

    def noise_std(self) -> float:
        """Of each coordinate of `gradient`."""
        return self.multiplier / self.expected_batch


class Reference(NamedTuple):
    """A reference.

    Attributes:
        iterates: gives θ_1, θ_2, ...
        settings: of the algorithm's stages where its YAML's values would hide something.
    """

    iterates: Callable[..., Iterator[Vector]]
    settings: Mapping[str, Mapping[str, Any]]


REFERENCES: dict[str, Reference] = {}


def reference(*names: str, **settings: Mapping[str, Any]):
    """Enter the reference of the algorithms of these names."""

    def enter(function):
        REFERENCES.update({name: Reference(function, settings) for name in names})
        return function

    return enter


# Post-processing.


@dataclass
class LowPass:
    """DOPPLER, Alg. 2: a linear recursive filter of all gradients so far, over its response to the constant 1."""

    b: Sequence[float]
    a: Sequence[float] = ()
    seen: list[Vector] = field(default_factory=list)

    def __call__(self, gradient: Vector) -> Vector:
        self.seen.append(np.array(gradient))
        denominator = [1.0, *self.a]
        filtered = signal.lfilter(self.b, denominator, np.stack(self.seen), axis=0)[-1]
        return filtered / signal.lfilter(self.b, denominator, np.ones(len(self.seen)))[-1]


def momentum() -> LowPass:
    """DOPPLER, Table 2."""
    return LowPass([0.1], [-0.9])


def first_v2() -> LowPass:
    """DOPPLER, Table 2."""
    return LowPass([3 / 11, -1 / 11], [-9 / 11])


@dataclass
class Moment:
    """E_t = β E_{t-1} + (1 - β) x_t over 1 - β^t: Adam's moments without their bias."""

    beta: float
    value: Any = 0.0
    steps: int = 0

    def __call__(self, new: Any) -> Any:
        self.steps += 1
        self.value = self.beta * self.value + (1 - self.beta) * new
        return self.value / (1 - self.beta**self.steps)


@dataclass
class Adam:
    """Kingma & Ba 2015, with decoupled weight decay (Loshchilov & Hutter 2019)."""

    lr: float
    weight_decay: float = 0.0
    first: Moment = field(default_factory=lambda: Moment(0.9))
    second: Moment = field(default_factory=lambda: Moment(0.999))

    def __call__(self, theta: Vector, gradient: Vector) -> Vector:
        direction = self.first(gradient) / (np.sqrt(self.second(gradient**2)) + 1e-8)
        return theta - self.lr * self.weight_decay * theta - self.lr * direction


# One gradient, plain steps.


@reference("dpsgd")
def dpsgd(task):
    """Abadi et al. 2016, Alg. 1."""
    theta = task.start
    for t in range(task.steps):
        theta = theta - task.lr * task.gradient(t, [(1, theta)])
        yield theta


@reference("dp_psac")
def dp_psac(task):
    """Xia et al. 2023, Alg. 1."""
    theta = task.start
    for t in range(task.steps):
        theta = theta - task.lr * task.mean(t, task.clipped_sum(t, [(1, theta)], psac))
        yield theta


@reference("doppler")
def doppler(task, b=(3 / 11, -1 / 11), a=(-9 / 11,)):
    """Zhang et al. 2024 (DOPPLER), Alg. 2."""
    theta, smooth = task.start, LowPass(b, a)
    for t in range(task.steps):
        theta = theta - task.lr * smooth(task.gradient(t, [(1, theta)]))
        yield theta


# Several gradients of each sample.


@reference("disk")
def disk(task, kappa=0.7, gamma=0.5):
    """Zhang et al. 2024 (DiSK), Alg. 3."""
    c = (1 - kappa) / (kappa * gamma)
    theta, move, average = task.start, np.zeros_like(task.start), None
    for t in range(task.steps):
        gradient = task.gradient(t, [(c, theta + gamma * move), (1 - c, theta)])
        average = gradient if average is None else (1 - kappa) * average + kappa * gradient
        move = -task.lr * average
        theta = theta + move
        yield theta


@reference("dp_pmlf")
def dp_pmlf(task, k=2, beta=0.1, b=(0.1,), a=(-0.9,)):
    """Xu et al. 2025, Alg. 1: the window is filled with x_0, and LP4 is the filter unless another is given."""
    weights = beta ** np.arange(k) / (beta ** np.arange(k)).sum()
    iterates, smooth = [task.start] * k, LowPass(b, a)
    for t in range(task.steps):
        theta = iterates[0] - task.lr * smooth(task.gradient(t, list(zip(weights, iterates, strict=True))))
        iterates = [theta, *iterates[:-1]]
        yield theta


@reference("dp_pmlf_released")
def dp_pmlf_released(task, k=2):
    """The code published with DP-PMLF: clipped gradients at lags 0, 2, ..., k add up, so a sample moves k C."""
    iterates, smooth = [task.start] * (k + 1), momentum()
    for t in range(task.steps):
        total = sum(task.clipped_sum(t, [(1, iterates[lag])], task.bound) for lag in (0, *range(2, k + 1)))
        theta = iterates[0] - task.lr * smooth(task.mean(t, total, sensitivity=k))
        iterates = [theta, *iterates[:-1]]
        yield theta


@reference("innerouter")
def innerouter(task):
    """Xiao et al. 2023 as DP-PMLF compares with it: momentum without normalisation inside and outside the clip."""
    theta, before, velocity = task.start, task.start, 0.0
    for t in range(task.steps):
        velocity = 0.9 * velocity + task.gradient(t, [(1, theta), (0.1, before)])
        theta, before = theta - task.lr * velocity, theta
        yield theta


# Adam and its kin.


@reference("dpadam")
def dpadam(task, weight_decay=0.0):
    """Adam of private gradients."""
    theta, adam = task.start, Adam(task.lr, weight_decay)
    for t in range(task.steps):
        theta = adam(theta, task.gradient(t, [(1, theta)]))
        yield theta


@reference("dpadamw")
def dpadamw(task):
    """Adam of private gradients with decoupled weight decay."""
    return dpadam(task, weight_decay=0.01)


@reference("lp_dpadam")
def lp_dpadam(task):
    """DOPPLER, Alg. 3 as printed, but for v_t = β v_{t-1} + (1 - β) g_t² where the paper swaps the weights."""
    theta, smooth, second = task.start, first_v2(), Moment(0.999)
    for t in range(task.steps):
        gradient = task.gradient(t, [(1, theta)])
        theta = theta - task.lr * smooth(gradient) / np.maximum(np.sqrt(second(gradient**2)), 1e-5)
        yield theta


def without_noise_bias(task, smooth):
    """Tang et al. 2024: the noise's variance is taken out of the second moment, of which γ' = 1e-8 stays."""
    theta, second = task.start, Moment(0.999)
    for t in range(task.steps):
        gradient = task.gradient(t, [(1, theta)])
        corrected = np.maximum(second(gradient**2) - task.noise_std() ** 2, 1e-8)
        theta = theta - task.lr * smooth(gradient) / np.sqrt(corrected)
        yield theta


@reference("dpadambc")
def dpadambc(task):
    """The filter is Adam's first moment, β1 = 0.9."""
    return without_noise_bias(task, Moment(0.9))


@reference("lp_dpadambc")
def lp_dpadambc(task):
    """DOPPLER's filter in place of Adam's first moment."""
    return without_noise_bias(task, first_v2())


def projected(task, make_filter):
    """DOPPLER, Alg. 3 with the lines for GaLore: weights in the space of their first gradient's left vectors.

    Rank 3 instead of 128, of which a matrix of ten rows has no use. Later projectors are in test_optim.py: the signs
    of singular vectors are anyone's choice, and moments that outlive a projector depend on them.
    """
    theta, projector = task.start, None
    smooth, second = (make_filter(), make_filter()), (Moment(0.999), Moment(0.999))
    for t in range(task.steps):
        matrix, biases = task.split(task.gradient(t, [(1, theta)]))
        if projector is None:
            projector = np.linalg.svd(matrix)[0][:, :3]
        directions = []
        for number, coordinates in enumerate((projector.T @ matrix, biases)):
            root = np.maximum(np.sqrt(second[number](coordinates**2)), 1e-5)
            directions.append(smooth[number](coordinates) / root)
        move = np.concatenate([(projector @ directions[0]).ravel(), directions[1]])
        theta = theta - task.lr * move
        yield theta


@reference("dpgalore", optim={"rank": 3})
def dpgalore(task):
    """GaLore with Adam's first moment, β1 = 0.9."""
    return projected(task, lambda: Moment(0.9))


@reference("lp_dpgalore", optim={"rank": 3})
def lp_dpgalore(task):
    """GaLore with DOPPLER's filter."""
    return projected(task, first_v2)


# Step sizes and noise that change by plan.


def by_schedule(task, rates):
    """Wu et al. 2021, Alg. 1 with α_t² = 1/η_t."""
    theta = task.start
    for t, rate in enumerate(rates):
        total = task.clipped_sum(t, [(1, theta)], task.bound)
        theta = theta - task.lr * rate * task.mean(t, total, scale=1 / math.sqrt(rate))
        yield theta


@reference("adp")
def adp(task):
    """Schedule (ii)."""
    return by_schedule(task, [1 / math.sqrt(20 + t) for t in range(task.steps)])


@reference("adp_sqrt")
def adp_sqrt(task):
    """Schedule (i) over its first value, η_t = 0.1 - r_T sqrt(t) with η_T = 1e-10."""
    slope = (0.1 - 1e-10) / math.sqrt(task.steps)
    return by_schedule(task, [(0.1 - slope * math.sqrt(t)) / 0.1 for t in range(task.steps)])


@reference("adp_adagrad")
def adp_adagrad(task, beta=1.0, period=195):
    """AdaGrad-Norm steps with b_0² = 20, from the private gradient's norm less what the noise adds to its square."""
    theta, accumulated = task.start, 20.0
    for t in range(task.steps):
        scale = (20 + 1e-4 * (t + 1)) ** 0.25
        gradient = task.mean(t, task.clipped_sum(t, [(1, theta)], task.bound), scale=scale)
        expected = len(theta) * (task.noise_std() * scale) ** 2
        amplified = max(beta / (t % period + 1), 1) * (gradient @ gradient - expected)
        accumulated += max(amplified, 1e-5)
        theta = theta - task.lr / math.sqrt(accumulated) * gradient
        yield theta


@reference("dynamic_dpsgd")
def dynamic_dpsgd(task, of_threshold=0.5, of_noise=0.5):
    """Du et al. 2021: C_t = C_0 ρ_C^(-t/T), and μ_t = μ_0 ρ_μ^(-t/T) with μ_t = C_t over the noise's std."""
    theta = task.start
    for t in range(task.steps):
        threshold, scale = of_threshold ** (t / task.steps), of_noise ** (t / task.steps)
        total = task.clipped_sum(t, [(1, theta)], abadi, threshold)
        theta = theta - task.lr * task.mean(t, total, sensitivity=threshold, scale=scale)
        yield theta


# Thresholds that follow the norms.


@reference("andrew")
def andrew(task, quantile=0.5, rate=0.2):
    """Andrew et al. 2021, Alg. 1, one sample a client, with Adam at the server."""
    size = task.expected_batch
    theta, adam, threshold = task.start, Adam(task.lr), 1.0
    for t in range(task.steps):
        total = task.clipped_sum(t, [(1, theta)], abadi, threshold)
        inside = task.norms(t, theta) <= threshold
        count = (inside - 0.5).sum() + sum(size / 20 * draw[0] for draw in task.side[t])
        theta = adam(theta, task.mean(t, total, sensitivity=threshold))
        threshold *= math.exp(-rate * (count / size + 0.5 - quantile))
        yield theta


def by_histogram(task, rule, reach):
    """Wei et al. 2025 (DC-SGD), one training step: 20 bins, σ_H = 5, C_0 = 1, with Adam."""
    theta, adam, threshold = task.start, Adam(task.lr), 1.0
    for t in range(task.steps):
        total = task.clipped_sum(t, [(1, theta)], abadi, threshold)
        counts = np.zeros(20)
        for norm in task.norms(t, theta):
            counts[min(19, math.floor(20 * norm / reach))] += 1
        counts += sum(5 * draw for draw in task.side[t])
        theta = adam(theta, task.mean(t, total, sensitivity=threshold))
        error_weight = task.multiplier**2 * len(theta) / task.expected_batch**2
        if counts.sum() > 0:
            threshold, reach = rule(counts, threshold, reach, error_weight)
        yield theta


@reference("dcsgd_p")
def dcsgd_p(task, p=0.5):
    """Rule P with R_0 = 2 C_0, the rule of every later step."""

    def rule(counts, threshold, reach, error_weight):
        passed = 0.0
        for k in range(20):
            passed += counts[k]
            threshold = (k + 0.5) * reach / 20
            if passed >= p * counts.sum():
                break
        return threshold, 2 * threshold

    return by_histogram(task, rule, 2.0)


@reference("dcsgd_e")
def dcsgd_e(task):
    """Rule E with R_0 = b, and the guards that DC-SGD needs: no mean norm below 0, at most 64 passes, C within 2 R."""

    def rule(counts, threshold, reach, error_weight):
        middles = [(k + 0.5) * reach / 20 for k in range(20)]
        total = counts.sum()
        if sum(count * middle for count, middle in zip(counts, middles, strict=True)) > 0:
            for _ in range(64):
                candidates = [i * threshold / 10 for i in range(1, 21)]
                errors = []
                for c in candidates:
                    beyond = sum(n * max(m - c, 0) ** 2 for n, m in zip(counts, middles, strict=True))
                    errors.append(error_weight * c**2 + beyond / total)
                best = errors.index(min(errors))
                threshold = candidates[best]
                if best not in (0, 19):
                    break
            threshold = min(max(threshold, 1e-6 * reach), 2 * reach)
        if counts[19] >= 0.5 * total:
            return threshold, 2 * reach
        if counts[10:].sum() <= total / 20:
            return threshold, reach / 2
        return threshold, reach

    return by_histogram(task, rule, 20.0)


# Noise correlated between steps, and error feedback.


def correlated(task, rows):
    """SGD with automatic clipping, whose noise in step t is row t of the given rows."""
    theta = task.start
    for t in range(task.steps):
        noise = task.multiplier * rows[t] if task.multiplier else 0.0
        theta = theta - task.lr * (task.clipped_sum(t, [(1, theta)], task.bound) + noise) / task.expected_batch
        yield theta


@reference("dp_ftrl")
def dp_ftrl(task):
    """Kairouz et al. 2021: the noise of each prefix sum is that of the dyadic intervals it consists of.

    An interval's noise is drawn in the step that completes it. All steps lie in one pass: one tree.
    """

    def of_prefix(count):
        total = np.zeros_like(task.start)
        while count:
            total = total + task.drawn(count - 1)
            count -= count & -count
        return total

    if task.multiplier == 0:
        return correlated(task, None)
    prefixes = [of_prefix(count) for count in range(task.steps + 1)]
    return correlated(task, np.diff(prefixes, axis=0))


@reference("dp_ftrl_banded")
def dp_ftrl_banded(task, bands=4):
    """C⁻¹ Z with c_k = binom(2k, k)/4^k below the band (Kalinin & Lampert 2024)."""
    if task.multiplier == 0:
        return correlated(task, None)
    strategy = np.zeros((task.steps, task.steps))
    for k in range(bands):
        strategy += math.comb(2 * k, k) / 4**k * np.eye(task.steps, k=-k)
    return correlated(task, np.linalg.solve(strategy, np.stack([task.drawn(t) for t in range(task.steps)])))


@reference("dicesgd")
def dicesgd(task):
    """Zhang, Bu, Wu & Hong 2024: C_1 = C_2 = 1, with the published noise."""
    theta, error = task.start, np.zeros_like(task.start)
    for t in range(task.steps):
        mean = task.clipped_sum(t, [(1, theta)], lambda norms, _: np.ones_like(norms)) / task.expected_batch
        clipped = task.clipped_sum(t, [(1, theta)], abadi) / task.expected_batch
        returned = error * min(1, 1 / max(np.linalg.norm(error), 1e-300))
        step = clipped + returned
        theta = theta - task.lr * task.mean(t, task.expected_batch * step, sensitivity=math.sqrt(3))
        error = error + mean - step
        yield theta
