"""Optimizers that place the filter themselves, against their printed recursions in NumPy and torch's own Adam."""

from copy import deepcopy

import numpy as np
import pytest
import torch
from draws import normal
from helpers import assembled, composed
from scipy.signal import lfilter
from torch import nn

from dpbench.errors import UserError
from dpbench.filters import Identity, RecursiveLowPass
from dpbench.gradients import FlatParameters
from dpbench.optim import SGD, AdaGradNorm, Adam, AdamBC, FilteredAdam, GaLore, UncertifiedAdaGradNorm
from dpbench.update import tell, update

EXACT = {"rtol": 1e-10, "atol": 1e-12}
FIRST_V2 = {"b": [3 / 11, -1 / 11], "a": [-9 / 11]}
MOMENTUM = {"b": [0.1], "a": [-0.9]}


class Descent:
    """A model's parameters, moved by given private gradients."""

    def __init__(self, optim, filter=None, model=None):
        model = nn.Linear(3, 2, dtype=torch.float64) if model is None else deepcopy(model)
        self.flat = FlatParameters(model)
        with torch.no_grad():
            self.flat.vector.copy_(normal(len(self.flat), seed=1))
        self.filter = Identity() if filter is None else filter
        self.optimizer = optim.build(self.flat.parameters)

    @torch.no_grad()
    def run(self, gradients, noise_std=0.0):
        """Iterates, shape (T + 1, d)."""
        stds = [noise_std] * len(gradients) if isinstance(noise_std, float) else noise_std
        iterates = [self.flat.vector.clone()]
        for gradient, std in zip(gradients, stds, strict=True):
            update(self.flat, gradient.clone(), std, self.filter, self.optimizer)
            iterates.append(torch.cat([p.detach().reshape(-1) for p in self.flat.parameters]))
        return torch.stack(iterates)


def low_passed(gradients, b, a):
    ones = np.ones(len(gradients))
    return lfilter(b, [1, *a], gradients, axis=0) / lfilter(b, [1, *a], ones)[:, None]


def second_moment(gradients, beta2=0.999):
    """Bias-corrected, of all steps."""
    average = lfilter([1 - beta2], [1, -beta2], gradients**2, axis=0)
    return average / (1 - beta2 ** np.arange(1, len(gradients) + 1))[:, None]


def moved(start, directions, lr):
    return np.vstack([start, start - lr * np.cumsum(directions, axis=0)])


GRADIENTS = normal(40, 8)


@pytest.mark.parametrize("taps", [FIRST_V2, MOMENTUM, {"b": [1.0], "a": []}], ids=["first_v2", "momentum", "none"])
@pytest.mark.parametrize("floor", [1e-5, 0.8])
def test_filtered_adam_is_algorithm_3(taps, floor):
    descent = Descent(FilteredAdam(lr=0.03, floor=floor), RecursiveLowPass(**taps))
    found = descent.run(GRADIENTS)
    g = GRADIENTS.numpy()
    directions = low_passed(g, **taps) / np.maximum(np.sqrt(second_moment(g)), floor)
    np.testing.assert_allclose(found, moved(found[0].numpy(), directions, 0.03), rtol=1e-9, atol=1e-11)


def test_with_the_momentum_filter_it_is_torchs_adam_up_to_the_form_of_the_denominator():
    ours = Descent(FilteredAdam(lr=0.03, floor=1e-30), RecursiveLowPass(**MOMENTUM)).run(GRADIENTS)
    torchs = Descent(Adam(lr=0.03, eps=1e-30)).run(GRADIENTS)
    torch.testing.assert_close(ours, torchs, **EXACT)


def test_the_filter_before_adam_would_be_another_method():
    placed = Descent(FilteredAdam(lr=0.03), RecursiveLowPass(**FIRST_V2)).run(GRADIENTS)
    stacked = Descent(Adam(lr=0.03), RecursiveLowPass(**FIRST_V2)).run(GRADIENTS)
    assert (placed[-1] - stacked[-1]).abs().max() > 0.01


@pytest.mark.parametrize("taps", [FIRST_V2, MOMENTUM], ids=["LP-DPAdamBC", "DPAdamBC"])
def test_adambc_takes_the_noise_variance_out_of_the_second_moment(taps):
    found = Descent(AdamBC(lr=0.03, floor=1e-4), RecursiveLowPass(**taps)).run(GRADIENTS, 0.7)
    g = GRADIENTS.numpy()
    directions = low_passed(g, **taps) / np.sqrt(np.maximum(second_moment(g) - 0.7**2, 1e-8))
    np.testing.assert_allclose(found, moved(found[0].numpy(), directions, 0.03), rtol=1e-8, atol=1e-9)


def test_adambc_is_the_literal_algorithm_where_there_is_no_noise():
    bc = Descent(AdamBC(lr=0.03, floor=1e-5), RecursiveLowPass(**FIRST_V2)).run(GRADIENTS)
    literal = Descent(FilteredAdam(lr=0.03, floor=1e-5), RecursiveLowPass(**FIRST_V2)).run(GRADIENTS, 0.7)
    assert torch.equal(bc, literal)


def test_adambc_removes_the_noise_of_each_step_where_it_varies():
    stds = torch.linspace(0.2, 1.0, 40, dtype=torch.float64).tolist()
    found = Descent(AdamBC(lr=0.03)).run(GRADIENTS, stds)
    g = GRADIENTS.numpy()
    noise = second_moment(np.array(stds)[:, None] * np.ones(8))
    directions = g / np.sqrt(np.maximum(second_moment(g) - noise, 1e-8))
    np.testing.assert_allclose(found, moved(found[0].numpy(), directions, 0.03), rtol=1e-8, atol=1e-8)


def test_second_moment_of_pure_noise_is_unbiased_only_with_the_correction():
    """E v̂ = σ²; the mean of 200,000 squares has a relative standard error of 0.3 %."""
    noise = 0.3 * normal(50, 4000)
    model = nn.Linear(4000, 1, bias=False, dtype=torch.float64)
    descent = Descent(AdamBC(), model=model)
    descent.run(noise, 0.3)
    (group,) = descent.optimizer.param_groups
    (state,) = descent.optimizer.state.values()
    corrected = (state["second_moment"].mean() - group["noise_moment"]) / (1 - 0.999**50)
    assert abs(float(corrected)) < 5 * 0.003 * 0.3**2


def test_the_step_tells_the_noise_of_g_t():
    parts = assembled(composed("algo=lp_dpadambc", "threshold.norm=0.5", "batch_size=64"), noise_multiplier=2.0)
    step = parts.step
    seen = []
    step.filter.expect = seen.append
    with torch.no_grad():
        step.gradients.flat.vector.zero_()
    taken = []
    apply = step.filter.apply
    step.filter.apply = lambda g: apply(taken.append(g.clone()) or g)
    for _ in range(3):
        step([])
    # multiplier 2, sensitivity 0.5, batch 64; an empty batch leaves the noise alone.
    assert seen == pytest.approx([2.0 * 0.5 / 64] * 3)
    assert step.optimizer.param_groups[0]["noise_std"] == seen[0]
    # 3 x 4,810 draws: relative standard error of the std 0.6 %.
    assert float(torch.stack(taken).std()) == pytest.approx(seen[0], rel=0.03)


@pytest.mark.parametrize("shape", [(3, 7), (7, 3), (4, 2, 3, 3)])
def test_galore_is_adam_on_the_projection_by_the_top_singular_vectors(shape):
    """Against a loop over matrices in NumPy: project the shorter side, filter and scale there, project back."""
    rank, interval, lr, scale = 2, 4, 0.05, 0.5
    model = nn.Module()
    model.weight = nn.Parameter(torch.zeros(shape, dtype=torch.float64))
    size = model.weight.numel()
    gradients = normal(10, size)
    optim = GaLore(lr=lr, rank=rank, interval=interval, scale=scale)
    found = Descent(optim, RecursiveLowPass(**FIRST_V2), model).run(gradients)
    rows, columns = shape[0], size // shape[0]
    projected, back = [], []
    for t, gradient in enumerate(gradients.numpy()):
        matrix = gradient.reshape(rows, columns)
        if t % interval == 0:
            values, vectors = np.linalg.eigh(matrix @ matrix.T if rows < columns else matrix.T @ matrix)
            basis = vectors[:, np.argsort(values)[::-1][:rank]]
            # Singular vectors have a sign that no definition fixes; take the one that the optimizer took.
            (state,) = _states_after(optim, model, gradients[: t + 1])
            basis = basis * np.sign((basis * state["projector"].numpy()).sum(0))
        projected.append((basis.T @ matrix if rows < columns else matrix @ basis).reshape(-1))
        back.append(basis)
    low = np.array(projected)
    directions = low_passed(low, **FIRST_V2) / np.maximum(np.sqrt(second_moment(low)), 1e-5)
    full = [
        (basis @ d.reshape(rank, columns) if rows < columns else d.reshape(rows, rank) @ basis.T).reshape(-1) * scale
        for basis, d in zip(back, directions, strict=True)
    ]
    np.testing.assert_allclose(found, moved(found[0].numpy(), np.array(full), lr), rtol=1e-8, atol=1e-9)


def _states_after(optim, model, gradients):
    descent = Descent(optim, RecursiveLowPass(**FIRST_V2), model)
    descent.run(gradients)
    return descent.optimizer.state.values()


def test_galore_leaves_what_is_no_matrix_alone_and_filters_in_the_small_space():
    filter = RecursiveLowPass(**FIRST_V2)
    descent = Descent(GaLore(rank=2), filter, nn.Linear(9, 4, dtype=torch.float64))
    descent.run(normal(3, 40))
    assert filter.state_dict()["outputs"][0].shape == (2 * 9 + 4,)
    whole = Descent(FilteredAdam(), RecursiveLowPass(**FIRST_V2), nn.Linear(9, 4, dtype=torch.float64))
    bias = slice(36, 40)
    projected = Descent(GaLore(rank=2), RecursiveLowPass(**FIRST_V2), nn.Linear(9, 4, dtype=torch.float64))
    gradients = normal(6, 40)
    torch.testing.assert_close(projected.run(gradients)[:, bias], whole.run(gradients)[:, bias], **EXACT)


def test_galore_moves_within_the_span_of_its_projector():
    descent = Descent(GaLore(rank=1, interval=100), model=nn.Linear(6, 5, bias=False, dtype=torch.float64))
    iterates = descent.run(normal(8, 30))
    change = (iterates[-1] - iterates[0]).view(5, 6)
    assert int(torch.linalg.matrix_rank(change, rtol=1e-9)) == 1


def adagrad(gradients, lr, start, floor, amplification=1.0, period=195, noise=0.0):
    g, accumulated, moves = gradients.numpy(), start, []
    for t, row in enumerate(g):
        beta = max(amplification / ((t % period) + 1), 1)
        accumulated += max(beta * ((row**2).sum() - len(row) * noise**2), floor)
        moves.append(row / np.sqrt(accumulated))
    return np.array(moves), lr


@pytest.mark.parametrize("amplification", [1.0, 512.0])
@pytest.mark.parametrize("noise", [0.0, 0.9])
def test_adagrad_norm_follows_its_recursion_on_private_norms(amplification, noise):
    optim = AdaGradNorm(lr=0.5, start=2.0, amplification=amplification, period=7)
    found = Descent(optim).run(GRADIENTS, noise)
    moves, lr = adagrad(GRADIENTS, 0.5, 2.0, 1e-5, amplification, 7, noise)
    np.testing.assert_allclose(found, moved(found[0].numpy(), moves, lr), **EXACT)


@pytest.mark.parametrize(
    ("amplification", "mean"), [(1, 1), (512, 15.4), (1024, 30.7), (2048, 61.5), (4096, 122.9), (8192, 245.9)]
)
def test_the_amplification_of_adagrad_norm_has_the_printed_mean(amplification, mean):
    """adp.md 2.5: over an epoch of 195 steps, of gradients of norm 1; it begins again in the next."""
    descent = Descent(AdaGradNorm(start=20.0, amplification=amplification))
    unit = torch.ones(195, 8, dtype=torch.float64) / 8**0.5
    totals = []
    for _ in range(2):
        descent.run(unit)
        totals.append(descent.optimizer.param_groups[0]["accumulated"] - 20)
    assert totals[0] / 195 == pytest.approx(mean, abs=0.06)
    assert totals[1] == pytest.approx(2 * totals[0])


def test_adagrad_norm_grows_within_its_bounds():
    """adp.md 2.5: b_0² + t ν <= b_t² <= b_0² + t G², of norms from 0 to G = 1."""
    descent = Descent(AdaGradNorm(start=2.0, floor=1e-3))
    norms = torch.linspace(0, 1, 40, dtype=torch.float64)[:, None]
    unit = torch.nn.functional.normalize(GRADIENTS, dim=1)
    for t, gradient in enumerate(norms * unit, 1):
        descent.run(gradient[None])
        accumulated = descent.optimizer.param_groups[0]["accumulated"]
        assert 2 + t * 1e-3 - 1e-12 <= accumulated <= 2 + t + 1e-12
    assert accumulated == pytest.approx(2 + float(norms.square().clamp(min=1e-3).sum()))


def test_adagrad_norm_takes_at_least_the_floor():
    found = Descent(AdaGradNorm(lr=0.5, start=2.0, floor=0.25)).run(torch.zeros(4, 8, dtype=torch.float64))
    assert torch.equal(found[0], found[-1])
    descent = Descent(AdaGradNorm(lr=0.5, start=2.0, floor=0.25))
    descent.run(torch.zeros(4, 8, dtype=torch.float64))
    assert descent.optimizer.param_groups[0]["accumulated"] == 3.0


def test_the_published_form_takes_the_norm_of_the_clipped_mean_before_noise():
    parts = assembled(composed("optim=adagrad_norm_uncertified", "optim.uncertified=true"), noise_multiplier=3.0)
    step = parts.step
    inputs, labels = torch.rand(20, 1, 8, 8), torch.arange(20) % 10
    want = float(step.request([(inputs, labels)], 1.0).alone().total.norm()) / step.expected_batch
    step([(inputs, labels)])
    assert step.optimizer.param_groups[0]["accumulated"] == pytest.approx(20 + want**2, rel=1e-6)
    private = assembled(composed("optim=adagrad_norm"), noise_multiplier=3.0).step
    assert "unnoised_norm" not in private.optimizer.param_groups[0]


def test_the_published_form_is_refused_unless_its_privacy_is_waived():
    with pytest.raises(UserError, match="no proof"):
        composed("optim=adagrad_norm_uncertified")
    assert composed("optim=adagrad_norm_uncertified", "optim.uncertified=true").uncertified
    assert composed("optim=adagrad_norm").uncertified is None
    assert composed("optim=adagrad_norm_uncertified", "eps=inf").eps == float("inf")


@pytest.mark.parametrize("optim", ["adam", "adamw"])
def test_a_low_pass_in_front_of_adams_first_moment_is_refused(optim):
    for filter in ("first_v2", "momentum", "butterworth", "online_fir"):
        with pytest.raises(UserError, match="first moment"):
            composed("algo=doppler", f"filter={filter}", f"optim={optim}")
    assert composed("algo=doppler", f"optim={optim}", "optim.beta1=0").optim.beta1 == 0
    assert composed("algo=disk", f"optim={optim}").optim.beta1 == 0.9


OPTIMIZERS = [
    FilteredAdam(weight_decay=0.1),
    AdamBC(),
    GaLore(rank=1, interval=3),
    AdaGradNorm(amplification=512.0, period=3),
]


@pytest.mark.parametrize("optim", OPTIMIZERS, ids=lambda o: type(o).__name__)
def test_continued_from_its_state_bit_for_bit(optim):
    whole = Descent(optim, RecursiveLowPass(**FIRST_V2))
    iterates = whole.run(GRADIENTS, 0.2)
    first = Descent(optim, RecursiveLowPass(**FIRST_V2))
    first.run(GRADIENTS[:17], 0.2)
    second = Descent(optim, RecursiveLowPass(**FIRST_V2))
    with torch.no_grad():
        second.flat.vector.copy_(first.flat.vector)
    second.filter.load_state_dict(deepcopy(first.filter.state_dict()))
    second.optimizer.load_state_dict(deepcopy(first.optimizer.state_dict()))
    assert torch.equal(second.run(GRADIENTS[17:], 0.2)[-1], iterates[-1])


@pytest.mark.parametrize("optim", OPTIMIZERS, ids=lambda o: type(o).__name__)
def test_a_step_of_its_own_is_one_without_a_filter(optim):
    placed, alone = Descent(optim), Descent(optim)
    want = placed.run(GRADIENTS)
    with torch.no_grad():
        for gradient in GRADIENTS:
            alone.flat.set_gradient(gradient)
            alone.optimizer.step()
    assert torch.equal(alone.flat.vector, want[-1])


@pytest.mark.parametrize("kind", [FilteredAdam, AdamBC, GaLore, AdaGradNorm])
def test_weight_decay_is_decoupled_and_of_the_iterate_before_the_step(kind):
    """(1 - rate λ) θ_t and then the step that there is without it, as in torch's AdamW."""
    plain, decayed = (Descent(kind(lr=0.5, weight_decay=decay)).run(GRADIENTS[:1], 0.2) for decay in (0.0, 0.1))
    squared = float(GRADIENTS[0].square().sum()) - 8 * 0.2**2
    rate = 0.5 / (20 + squared) ** 0.5 if kind is AdaGradNorm else 0.5
    torch.testing.assert_close(decayed[1], plain[1] - 0.1 * rate * plain[0], **EXACT)


def test_facts_reach_only_the_groups_that_have_keys_for_them():
    optimizer = SGD().build([nn.Parameter(torch.zeros(2))])
    tell(optimizer, noise_std=1.0)
    assert "noise_std" not in optimizer.param_groups[0]


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: FilteredAdam(beta2=1.0), "optim.beta2"),
        (lambda: FilteredAdam(floor=0.0), "optim.floor"),
        (lambda: GaLore(rank=0), "optim.rank"),
        (lambda: GaLore(interval=0), "optim.interval"),
        (lambda: GaLore(scale=0.0), "optim.scale"),
        (lambda: AdaGradNorm(start=0.0), "optim.start"),
        (lambda: AdaGradNorm(amplification=0.5), "optim.amplification"),
        (lambda: UncertifiedAdaGradNorm(period=0), "optim.period"),
    ],
)
def test_settings_out_of_range_are_refused(make, field):
    with pytest.raises(UserError) as error:
        make()
    assert error.value.field == field


def test_galore_projects_square_matrices_on_the_right_as_its_authors_do():
    """galore_projector.py: where there are as many rows as columns or more, the right singular vectors are taken."""
    model = nn.Linear(5, 5, bias=False, dtype=torch.float64)
    gradient = normal(25, seed=4)
    descent = Descent(GaLore(lr=0.1, rank=2, floor=1e-12), model=model)
    found = descent.run(gradient[None])
    (state,) = descent.optimizer.state.values()
    right = np.linalg.svd(gradient.view(5, 5).numpy())[2][:2].T
    np.testing.assert_allclose(np.abs(right.T @ state["projector"].numpy()), np.eye(2), atol=1e-9)
    # The first step of Adam is lr times the signs of what is projected.
    projected = gradient.view(5, 5).numpy() @ right
    np.testing.assert_allclose((found[1] - found[0]).view(5, 5), -0.1 * np.sign(projected) @ right.T, atol=1e-9)


@pytest.mark.parametrize("rank", [2, 3, 9])
def test_the_scale_of_galore_is_that_of_all_projected_parameters(rank):
    """Also of those that are only rotated, since the rank is no less than their shorter side; of no vector."""
    gradients, changes = normal(4, 18), []
    for scale in (1.0, 0.25):
        iterates = Descent(GaLore(rank=rank, scale=scale), model=nn.Linear(5, 3, dtype=torch.float64)).run(gradients)
        changes.append(iterates[1:] - iterates[0])
    whole, scaled = changes
    torch.testing.assert_close(scaled[:, :15], 0.25 * whole[:, :15], rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(scaled[:, 15:], whole[:, 15:], rtol=1e-9, atol=1e-12)
