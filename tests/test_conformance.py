"""What holds for every algorithm: each file of conf/algo is taken through all of this, a new one too.

A new algorithm needs one thing more: the reference in references.py that it is compared with.
"""

import io
import math
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

import mutants
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from draws import normal
from helpers import ALGORITHMS, composed, precision
from references import REFERENCES, Task, abadi
from scipy import stats

from dpbench.clip import NoClip, ThresholdClip
from dpbench.config.schema import EvaluationTimes
from dpbench.error_feedback import ErrorFeedbackClip
from dpbench.filters import Exponential
from dpbench.models import MLP
from dpbench.noise import BandedNoise, TreeNoise
from dpbench.privacy import BudgetError, Ledger
from dpbench.privacy.gaussian import GaussianSource, SeededGaussian
from dpbench.query import ApartIterates, LastIterates, TwoPoint
from dpbench.stage import Course, forgotten
from dpbench.step import STAGES, PrivateStep
from dpbench.threshold import PercentileThreshold
from dpbench.training.assemble import assemble
from dpbench.training.budget import open_ledger
from dpbench.training.lockstep import alone
from dpbench.training.loop import DivergedError, train

CPU = torch.device("cpu")
MULTIPLIER = 1.0
STEPS = 20
EMPTY = 7  # the step whose batch is empty
TOLERANCE = 1e-9  # of float64, where denominators are small
NOISE_OF_EPS_8 = 1.07  # 57 steps of 256 samples on average, by RDP; with a histogram beside the sum

every_algorithm = pytest.mark.parametrize("algo", ALGORITHMS)


def composed_of(algo):
    return composed(f"algo={algo}", "model=linear", "batch_size=72", "epochs=1")


def config_of(algo):
    """Twenty steps of 72 samples on average, with softmax regression, as its reference has it."""
    return changed(composed_of(algo), REFERENCES[algo].settings if algo in REFERENCES else {})


def changed(config, settings):
    """With other values of some fields of some stages."""
    stages = {stage: replace(getattr(config, stage), **values) for stage, values in settings.items()}
    return replace(config, **stages)


@cache
def digits(dtype):
    splits = composed().dataset.load(Path("nowhere"), download=False)
    for split in (splits.train, splits.test):
        split.offset, split.factor = split.offset.to(dtype), split.factor.to(dtype)
    return splits


class Tapped(GaussianSource):
    """A source whose draws are kept."""

    def __init__(self, source):
        self.source = source
        self.draws = []

    def fill(self, out):
        self.draws.append(self.source.fill(out).clone())
        return out

    def since(self, count):
        return [draw.numpy() for draw in self.draws[count:]]


@dataclass
class Run:
    """What there is to see of a run, step by step; also the recorder of its gradients."""

    start: torch.Tensor
    step: PrivateStep
    ledger: Ledger
    batches: list = field(default_factory=list)
    noise: list = field(default_factory=list)
    side: list = field(default_factory=list)
    iterates: list = field(default_factory=list)
    sensitivities: list = field(default_factory=list)
    means: list = field(default_factory=list)
    released: list = field(default_factory=list)

    def unnoised(self, gradient):
        self.means.append(gradient.clone())

    def norms(self, norms, error_weight):
        pass

    def private(self, gradient):
        self.released.append(gradient.clone())


def carried_out(config, multiplier=MULTIPLIER, dtype=torch.float64):
    """Train from beginning to end, with one empty batch among the others, in float64 unless said otherwise."""
    with precision(dtype):
        ledger = open_ledger(config, multiplier)
        parts = assemble(config, CPU, multiplier, ledger)
        step = parts.step
        run = Run(step.gradients.flat.vector.clone(), step, ledger)
        noise = step.noise_source = Tapped(step.noise_source)
        side = step.side_source = Tapped(step.side_source)
        step.recorder = run
        take = step.take
        drawn = [0, 0]

        def watched(batch):
            batch = list(batch) if step.steps != EMPTY else []
            run.batches.append(batch)
            run.sensitivities.append(step.sensitivity(step.threshold.value(step.steps)))
            drawn[:] = len(noise.draws), len(side.draws)
            return take(batch)

        def on_step(_):
            run.noise.append(noise.since(drawn[0]))
            run.side.append(side.since(drawn[1]))
            run.iterates.append(step.gradients.flat.vector.clone())

        step.take = watched
        trained_without_an_account(config, parts, ledger, on_step=on_step, dtype=dtype)
    return run


def trained_without_an_account(config, parts, ledger, on_step=lambda _: None, dtype=torch.float32):
    """Metrics of all evaluations; what releases cost is not worked out, which takes longer than the steps."""
    metrics = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Ledger, "epsilon", lambda self: math.nan)
        alone(train(config, parts, digits(dtype), ledger, on_step=on_step, on_evaluation=metrics.append))
    return metrics


@every_algorithm
def test_what_a_stage_keeps_is_in_its_state(algo):
    config, step = config_of(algo), recorded(algo).step
    found = {name: forgotten(getattr(step, name), getattr(config, name)) for name in STAGES}
    assert not any(found.values()), found


def task_of(config, run, multiplier=MULTIPLIER):
    return Task(
        start=run.start.numpy(),
        batches=[stacked(batch) for batch in run.batches],
        noise=run.noise,
        side=run.side,
        expected_batch=config.batch_size,
        multiplier=multiplier,
        lr=config.optim.lr,
    )


def stacked(batch):
    """Inputs and labels of all micro-batches."""
    if not batch:
        return np.zeros((0, 64)), np.zeros(0, dtype=int)
    return (
        torch.cat([inputs.flatten(1) for inputs, _ in batch]).numpy(),
        torch.cat([labels for _, labels in batch]).numpy(),
    )


@cache
def recorded(algo):
    """A run of the algorithm that tests share."""
    return carried_out(config_of(algo))


def deviation(run, expected):
    """Largest deviation of an iterate from the expected one, over the largest move so far."""
    expected = [np.asarray(theirs) for theirs in expected]
    assert len(expected) == len(run.iterates) == STEPS
    start = run.start.numpy()
    return max(
        float(np.abs(mine.numpy() - theirs).max() / np.abs(theirs - start).max())
        for mine, theirs in zip(run.iterates, expected, strict=True)
    )


@every_algorithm
def test_it_has_a_reference(algo):
    assert algo in REFERENCES, (
        f"conf/algo/{algo}.yaml has no reference: write one from the publication's pseudo-code, with NumPy alone, as a "
        f'function under @reference("{algo}") in tests/references.py'
    )


def test_every_reference_has_an_algorithm():
    assert set(REFERENCES) <= set(ALGORITHMS)


@every_algorithm
def test_each_step_is_that_of_the_publication(algo):
    """In float64, with the batches and the noise that the run drew."""
    found = deviation(recorded(algo), REFERENCES[algo].iterates(task_of(config_of(algo), recorded(algo))))
    assert found < TOLERANCE


LP7 = {"b": [0.05, 0.05], "a": [-0.7, -0.2]}
F6 = {"b": [0.025, 0.025], "a": [-1.8, 0.85]}
FAR, BACK = {"kappa": 0.5, "gamma": 0.2}, {"kappa": 0.6, "gamma": -1.0}


@pytest.mark.parametrize(
    ("algo", "settings", "constants"),
    [
        ("disk", {"query": FAR, "filter": {"kappa": 0.5}}, FAR),
        ("disk", {"query": BACK, "filter": {"kappa": 0.6}}, BACK),
        ("doppler", {"filter": F6}, F6),
        ("dp_pmlf", {"query": {"length": 4, "decay": 0.7}, "filter": LP7}, {"k": 4, "beta": 0.7, **LP7}),
        ("dp_pmlf_released", {"query": {"length": 4}}, {"k": 4}),
        (
            "dynamic_dpsgd",
            {"threshold": {"decay": 0.2}, "noise": {"decay": 0.7}},
            {"of_threshold": 0.2, "of_noise": 0.7},
        ),
        ("adp_adagrad", {"optim": {"amplification": 512.0, "period": 3}}, {"beta": 512, "period": 3}),
        ("andrew", {"threshold": {"quantile": 0.9, "rate": 0.7}}, {"quantile": 0.9, "rate": 0.7}),
        ("dcsgd_p", {"threshold": {"quantile": 0.8}}, {"p": 0.8}),
    ],
)
def test_each_step_is_that_of_the_publication_at_other_constants(algo, settings, constants):
    """And with the threshold clip where the default is the automatic one."""
    config = replace(changed(config_of(algo), settings), clip=ThresholdClip())
    run = carried_out(config)
    task = replace(task_of(config, run), bound=abadi)
    found = deviation(run, REFERENCES[algo].iterates(task, **constants))
    assert found < TOLERANCE


@pytest.mark.parametrize(
    ("algo", "broken"),
    [
        ("dpsgd", mutants.noise_times(0.99)),
        ("adp", mutants.noise_times(1.01)),
        ("dpadam", mutants.missing_clip),
        ("doppler", mutants.clip_after_the_mean),
        ("disk", mutants.points_clipped_separately),
        ("dp_pmlf", mutants.points_clipped_separately),
        ("dp_pmlf_released", mutants.noise_times(0.5)),
        ("innerouter", mutants.divided_by_the_actual_batch_size),
    ],
)
def test_a_broken_step_is_not_that_of_the_publication(algo, broken, monkeypatch):
    broken(monkeypatch)
    config = config_of(algo)
    run = carried_out(config)
    found = deviation(run, REFERENCES[algo].iterates(task_of(config, run)))
    assert found > 1000 * TOLERANCE


def noise_problem(run, size):
    """What is wrong with the noise of a run, in units of the ledger's multiplier times the sensitivity; or None."""
    multipliers = [
        multiplier
        for entry in run.ledger.state_dict()["releases"]
        for multiplier in entry["noise_multipliers"]
        for _ in range(entry["count"])
    ]
    noise = torch.stack([b - a for a, b in zip(run.means, run.released, strict=True)]) * size
    noise /= torch.tensor(multipliers).mul(torch.tensor(run.sensitivities)).unsqueeze(1)
    # 13,000 draws: the two-sided test at level 1e-6 notices a std that is 4 % off.
    low, high = stats.chi2.ppf([5e-7, 1 - 5e-7], noise.numel())
    if not low < float(noise.square().sum()) < high:
        return f"std {float(noise.square().mean().sqrt())}"
    # 190 pairs of steps: six standard errors are passed with probability below 4e-7 in all.
    largest = float((torch.corrcoef(noise) - torch.eye(STEPS)).abs().max())
    return f"correlation {largest}" if largest > 6 / math.sqrt(noise.shape[1]) else None


@every_algorithm
def test_what_it_adds_is_the_noise_in_the_ledger_and_new_in_each_step(algo):
    config = config_of(algo)
    if config.release_plan().correlation is not None:
        pytest.skip("its noise is correlated between steps, as its reference says")
    assert noise_problem(recorded(algo), config.batch_size) is None


@pytest.mark.parametrize("broken", [mutants.noise_times(0.95), mutants.noise_reused_between_steps])
def test_broken_noise_is_not_that_in_the_ledger(broken, monkeypatch):
    broken(monkeypatch)
    config = config_of("dpsgd")
    assert noise_problem(carried_out(config), config.batch_size) is not None


@every_algorithm
def test_its_ledger_holds_the_planned_releases_and_refuses_more(algo):
    ledger = deepcopy(recorded(algo).ledger)
    assert len(ledger) == len(ledger.plan) == config_of(algo).steps == STEPS
    assert ledger.complete()
    with pytest.raises(BudgetError):
        ledger.record(ledger.plan.runs[-1].release)


@every_algorithm
def test_an_empty_batch_is_a_step(algo):
    run = recorded(algo)
    assert run.batches[EMPTY] == []
    assert (run.released[EMPTY] != run.means[EMPTY]).all()
    assert not torch.equal(run.iterates[EMPTY], run.iterates[EMPTY - 1])
    for multiplier in (0.0, MULTIPLIER):
        step = small_step(algo, multiplier)
        for _ in range(2):
            assert step([]).shape == (0,)
        assert len(step.ledger) == 2
        assert step.gradients.flat.vector.isfinite().all()


@every_algorithm
def test_a_seed_decides_every_bit(algo):
    first, again = recorded(algo), carried_out(config_of(algo))
    other = carried_out(replace(config_of(algo), seed=1))
    assert all(map(torch.equal, first.iterates, again.iterates))
    assert not np.isclose(first.noise[0][0], other.noise[0][0]).any()
    assert not np.isclose(first.start, other.start).any()
    assert not torch.equal(first.batches[0][0][1], other.batches[0][0][1])


class WithoutPrivacy(Task):
    """Gradients of the plain sum of losses, by autograd: nothing is clipped."""

    def clipped_sum(self, step, points, bound, threshold=1.0):
        return sum(weight * self.gradient_of_sum(step, theta) for weight, theta in points)

    def gradient_of_sum(self, step, theta):
        inputs, labels = map(torch.from_numpy, self.batches[step])
        vector = torch.from_numpy(theta).requires_grad_()
        weights, biases = self.split(vector)
        loss = F.cross_entropy(inputs @ weights.T + biases, labels, reduction="sum")
        return torch.autograd.grad(loss, vector)[0].numpy()


@every_algorithm
def test_without_noise_and_clipping_its_gradient_is_the_plain_one(algo):
    config, run = without_privacy(algo)
    found = deviation(run, REFERENCES[algo].iterates(WithoutPrivacy(**vars(task_of(config, run, multiplier=0.0)))))
    assert found < TOLERANCE


@cache
def without_privacy(algo):
    config = replace(config_of(algo), eps=math.inf, clip=NoClip())
    return config, carried_out(config, multiplier=0.0)


def constant(step):
    return 1.0


PARENTS = {
    **dict.fromkeys(("dpsgd", "dp_psac", "dynamic_dpsgd"), (torch.optim.SGD, {}, constant)),
    **dict.fromkeys(("dpadam", "andrew", "dcsgd_e", "dcsgd_p"), (torch.optim.Adam, {}, constant)),
    "dpadamw": (torch.optim.AdamW, {"weight_decay": 0.01}, constant),
    "adp": (torch.optim.SGD, {}, lambda step: 1 / math.sqrt(20 + step)),
    "adp_sqrt": (torch.optim.SGD, {}, lambda step: 1 - (1 - 1e-9) * math.sqrt(step / STEPS)),
}


@pytest.mark.parametrize("algo", sorted(PARENTS))
def test_without_noise_and_clipping_it_is_its_parent_in_torch(algo):
    config, run = without_privacy(algo)
    task = WithoutPrivacy(**vars(task_of(config, run, multiplier=0.0)))
    kind, settings, rate = PARENTS[algo]
    theta = run.start.clone().requires_grad_()
    optimizer = kind([theta], lr=task.lr, **settings)
    expected = []
    for t in range(STEPS):
        optimizer.param_groups[0]["lr"] = task.lr * rate(t)
        theta.grad = torch.from_numpy(task.gradient_of_sum(t, theta.detach().numpy()) / config.batch_size)
        optimizer.step()
        expected.append(theta.detach().numpy().copy())
    found = deviation(run, expected)
    assert found < TOLERANCE


def small_step(algo, multiplier=MULTIPLIER, **changes):
    """The step of a small perceptron of two layers, not yet taken."""
    if multiplier == 0:
        changes = {"eps": math.inf, **changes}
    config = replace(config_of(algo), model=MLP(hidden=[8]), **changes)
    return assemble(config, CPU, multiplier, open_ledger(config, multiplier)).step


def samples(count=10, seed=0):
    draws = torch.Generator().manual_seed(seed)
    return torch.rand(count, 1, 8, 8, generator=draws), torch.randint(10, (count,), generator=draws)


def taken(step, steps, *batch, micro=100):
    for _ in range(steps):
        inputs, labels = batch or samples()
        step(zip(inputs.split(micro), labels.split(micro), strict=True))
    return step


def share_of_the_sensitivity(algo):
    """Largest change of the un-noised sum when a sample is left out, over the sensitivity; less what is rounding.

    Samples are ordinary, vanishing and enormous, at a state that steps with noise have led to; in float32.
    """
    step = taken(small_step(algo), 5)
    inputs, labels = samples(24)
    sizes = [0.0, 1e-30, 1e-3, 30.0, 1e3, 1e6, 1e30, 3e38]
    inputs[8:16] *= torch.tensor(sizes).view(8, 1, 1, 1)
    inputs[16:] *= torch.linspace(-40, 40, 8).view(8, 1, 1, 1)
    threshold = step.threshold.value(step.steps)
    request = step.request([(inputs, labels)], threshold)
    whole = request.alone().total.double()
    changes = []
    for left_out in range(len(labels)):
        rest = torch.arange(len(labels)) != left_out
        total = request._replace(batch=[(inputs[rest], labels[rest])]).alone().total.double()
        changes.append(float((whole - total).norm()))
    bound = step.sensitivity(threshold)
    # Rounding: one float32 product in the factor, and one sum of vectors of at most this size.
    return (max(changes) - 1e-6 * float(whole.norm())) / bound


@every_algorithm
def test_no_sample_changes_the_sum_by_more_than_the_sensitivity(algo):
    if config_of(algo).uncertified is not None:
        pytest.skip("no bound is proven, as its runs say")
    assert 0.9 < share_of_the_sensitivity(algo) <= 1 + 1e-5


@pytest.mark.parametrize(
    ("algo", "broken"),
    [
        ("dpsgd", mutants.missing_clip),
        ("dp_pmlf_released", lambda patch: patch.setattr(ApartIterates, "sensitivity", 1.0)),
        ("innerouter", lambda patch: patch.setattr(LastIterates, "clipped_apart", True)),
    ],
)
def test_a_broken_sensitivity_is_exceeded(algo, broken, monkeypatch):
    broken(monkeypatch)
    assert share_of_the_sensitivity(algo) > 1.5


@every_algorithm
def test_micro_batches_change_nothing_but_rounding(algo):
    ends = []
    with precision(torch.float64):
        inputs, labels = samples()
        for micro in (10, 5, 2, 1):
            step = taken(small_step(algo), 5, inputs, labels, micro=micro)
            ends.append(step.gradients.flat.vector.clone())
    for end in ends[1:]:
        torch.testing.assert_close(end, ends[0], rtol=TOLERANCE, atol=TOLERANCE)


def resumes(algo):
    """Whether a step goes on, bit for bit, from a checkpoint that went through a file."""
    whole, first, second = (small_step(algo) for _ in range(3))
    taken(whole, 9)
    taken(first, 5)
    file = io.BytesIO()
    torch.save({"step": first.state_dict(), "vector": first.gradients.flat.vector}, file)
    file.seek(0)
    found = torch.load(file, weights_only=True)
    with torch.no_grad():
        second.gradients.flat.vector.copy_(found["vector"])
    second.load_state_dict(found["step"])
    second.ledger.load_state_dict(first.ledger.state_dict())
    for name in ("noise_source", "side_source"):
        getattr(second, name).generator.set_state(getattr(first, name).generator.get_state())
    taken(second, 4)
    return torch.equal(second.gradients.flat.vector, whole.gradients.flat.vector)


@every_algorithm
def test_stopped_and_resumed_is_uninterrupted(algo):
    assert resumes(algo)


@pytest.mark.parametrize(
    ("algo", "stage"), [("disk", TwoPoint), ("disk", Exponential), ("dcsgd_p", PercentileThreshold)]
)
def test_a_stage_that_forgets_is_not_resumed(algo, stage, monkeypatch):
    monkeypatch.setattr(stage, "load_state_dict", lambda self, state: None)
    assert not resumes(algo)


@every_algorithm
def test_a_sample_that_is_not_finite_adds_nothing(algo):
    inputs, labels = samples()
    sound = torch.arange(10) > 1
    inputs[0, 0, 3, 3], inputs[1] = math.nan, math.inf
    step = taken(small_step(algo), 3)
    request = step.request([(inputs, labels)], step.threshold.value(step.steps))
    without = request._replace(batch=[(inputs[sound], labels[sound])])
    otherwise = inputs.clone()
    otherwise[0], otherwise[1, 0, 2] = -math.inf, math.nan
    broken_otherwise = request._replace(batch=[(otherwise, labels.where(sound, labels + 1).remainder(10))])
    assert torch.equal(request.alone().total, broken_otherwise.alone().total)
    # Products of another number of rows may round otherwise.
    torch.testing.assert_close(request.alone().total, without.alone().total, rtol=1e-5, atol=1e-6)
    for multiplier in (0.0, MULTIPLIER):
        step = taken(small_step(algo, multiplier), 3, inputs, labels)
        assert step.gradients.flat.vector.isfinite().all()


@every_algorithm
def test_a_model_that_is_no_longer_finite_ends_the_run_with_an_error(algo):
    config = config_of(algo)
    ledger = open_ledger(config, MULTIPLIER)
    parts = assemble(config, CPU, MULTIPLIER, ledger)

    def on_step(step):
        if step == 3:
            parts.step.gradients.flat.vector[0] = math.nan

    with pytest.raises(DivergedError, match="a parameter is no finite number after 4 steps"):
        trained_without_an_account(config, parts, ledger, on_step)


@every_algorithm
def test_it_learns_digits(algo):
    """In a quarter of the default epochs, under the noise of eps=8; at the defaults they reach 0.93 or more."""
    changes = {"model": MLP(), "batch_size": 256, "epochs": 10.0, "evaluation": EvaluationTimes(every_epochs=None)}
    config = replace(composed_of(algo), **changes)
    # Of all scales of the noise at the same sum of squared inverses, about the same privacy.
    scales = np.array([config.noise.scale(step) for step in range(config.steps)])
    multiplier = NOISE_OF_EPS_8 * math.sqrt(np.mean(scales**-2.0))
    ledger = open_ledger(config, multiplier)
    metrics = trained_without_an_account(config, assemble(config, CPU, multiplier, ledger), ledger)
    assert ledger.complete()
    assert metrics[-1].test_accuracy > 0.82


def fed_back(clip, gradient):
    total = gradient.clone()
    clip.feed_back(total, 2 * gradient, 1.0, 1.0)
    return total


def drawn(noise, gradient):
    return noise.draw(gradient.clone(), SeededGaussian(torch.Generator().manual_seed(int(1e6 * abs(gradient[0])))))


def prepared(noise):
    noise.prepare(Course(steps=20, batch=4.0, rate=lambda step: 1.0, epoch=5))
    return noise


@pytest.mark.parametrize(
    ("make", "take"),
    [
        (lambda: Exponential(kappa=0.5), lambda stage, x: stage.apply(x)),
        (lambda: TwoPoint(kappa=0.5, gamma=0.5), lambda stage, x: stage.points(x)[-1].iterate),
        (lambda: ErrorFeedbackClip(), fed_back),
        (lambda: prepared(TreeNoise()), drawn),
        (lambda: prepared(BandedNoise(bands=3)), drawn),
    ],
    ids=["exponential", "two_point", "error_feedback", "tree", "banded"],
)
def test_a_state_is_loaded_twice_and_is_still_the_state(make, take):
    """What goes on from it leaves it alone."""
    vectors = normal(9, 4, seed=3, dtype=torch.float32)
    stopped = make()
    for x in vectors[:4]:
        take(stopped, x)
    state, ends = stopped.state_dict(), []
    for _ in range(2):
        resumed = make()
        resumed.load_state_dict(state)
        ends.append(torch.stack([take(resumed, x).clone() for x in vectors[4:]]))
    assert torch.equal(*ends)
