"""Norms that hold where parts of a sample cancel, and where numbers are near the largest there is."""

import math

import pytest
import torch
import torch.nn.functional as F
from draws import generator
from gradient_checks import cross_entropy, restricted
from torch import nn

from dpbench.gradients import FlatParameters, PerSampleGradients
from dpbench.gradients.clipped import clipped_by
from dpbench.gradients.fused import FusedGradients
from dpbench.gradients.joined import SameInput, SideBySide
from dpbench.gradients.request import Request
from dpbench.gradients.summands import Factored, Held, Tied
from dpbench.gradients.tape import Tape, not_finite
from dpbench.gradients.uses import (
    GreyPatches,
    Lookup,
    Outer,
    Patches,
    Standardisation,
    StandardisedPatches,
    Strategy,
    Term,
)
from dpbench.gradients.uses.base import SMALLEST_SQUARE
from dpbench.query import Point

pytestmark = [
    pytest.mark.usefixtures("seeded"),
    pytest.mark.filterwarnings("ignore:falling back to materialised"),
]


# Norms of parts that cancel


class Difference(nn.Module):
    """A layer of two inputs that nearly agree, or both as tokens of one call."""

    def __init__(self, calls):
        super().__init__()
        self.layer, self.calls = nn.Linear(64, 64, bias=False), calls

    def forward(self, x):
        if self.calls == 1:
            h = self.layer(x)
            return (h[:, 0] - h[:, 1]).sum(1)
        return (self.layer(x[:, 0]) - self.layer(x[:, 1])).sum(1)


def difference(calls, scale):
    model = Difference(calls)
    engine = restricted(PerSampleGradients(model, FlatParameters(model), lambda outputs, _: outputs), {"gram"})
    base = scale * torch.randn(24, 1, 64)
    x = torch.cat([base, base + 0.05 * torch.randn(24, 1, 64)], 1)
    return engine, x, torch.zeros(24)


def largest_clipped(engine, x, y):
    """Norm of one sample's part of the sum that is clipped to 1, the largest of all samples."""
    points = [Point(1.0, engine.flat.vector)]
    clip = lambda norms: (1 / norms).clamp(max=1)  # noqa: E731
    parts = [engine.clipped_sum(points, [(x[i : i + 1], y[i : i + 1])], clip).total.norm() for i in range(len(x))]
    return float(torch.stack(parts).max())


@pytest.mark.parametrize("scale", [1.0, 10.0, 100.0, 1000.0])
@pytest.mark.parametrize("calls", [1, 2])
def test_no_sample_exceeds_its_bound_where_its_parts_cancel(calls, scale):
    engine, x, y = difference(calls, scale)
    assert largest_clipped(engine, x, y) < 1.002
    found = engine.clipped_sum([Point(1.0, engine.flat.vector)], [(x, y)], torch.ones_like)
    want = 8 * (x[:, 0].double() - x[:, 1].double()).norm(dim=1)
    torch.testing.assert_close(found.norms.double(), want, rtol=1e-4, atol=0)


@pytest.mark.parametrize("calls", [1, 2])
def test_inner_products_in_single_precision_would_let_samples_exceed_it(calls, monkeypatch):
    # The comparison of a batch would notice.
    monkeypatch.setattr("dpbench.gradients.settle.short_norm", lambda *_: None)
    monkeypatch.setattr("dpbench.gradients.tape.CANCELLING", 0.0)
    assert largest_clipped(*difference(calls, 1000.0)) > 1.5


def test_seeds_that_share_a_pass_have_norms_as_exact():
    engine, x, y = difference(2, 1000.0)
    vectors = [engine.flat.vector + 0.1 * torch.randn_like(engine.flat.vector) for _ in range(2)]
    fused = restricted(FusedGradients(engine.model, engine.flat, engine.loss), {"gram"})
    clip = lambda norms: (1 / norms).clamp(max=1)  # noqa: E731
    requests = [Request(engine, [Point(1.0, vector)], [(x, y)], clip) for vector in vectors]
    want = 8 * (x[:, 0].double() - x[:, 1].double()).norm(dim=1)
    for found in fused.clipped_sums(requests):
        torch.testing.assert_close(found.norms.double(), want, rtol=1e-4, atol=0)


@pytest.mark.parametrize("kind", ["gram", "pass"])
@pytest.mark.parametrize("order", [1, -1])
def test_tokens_that_cancel_are_noticed_in_whichever_call_they_are(kind, order):
    """Of a layer that is called twice, the other time on tokens of which hardly anything comes."""
    a, b = torch.randn(4, 1, 48).repeat(1, 2, 1), torch.randn(4, 1, 5) * torch.tensor([1.0, -1 - 2**-20]).view(1, 2, 1)
    model, summand = nn.Linear(48, 5, bias=False), Factored(Outer(((5, 48),)), Strategy(kind))
    for term in (Term(a, b), Term(1e-3 * torch.randn(4, 2, 48), 1e-3 * torch.randn(4, 2, 5)))[::order]:
        summand.add(term, summand.use)
    assert bool(Tape(torch.zeros(4), FlatParameters(model), {(model.weight,): summand}, {model.weight: 0}).doubtful())


def test_layers_that_read_the_same_tokens_have_norms_in_double_precision_where_these_cancel():
    a, opposite = torch.randn(4, 1, 48).repeat(1, 2, 1), torch.tensor([1.0, -1 - 2**-20]).view(1, 2, 1)
    b = [torch.randn(4, 1, size) * opposite for size in (5, 7)]
    layers = [Factored(Outer(((size, 48),)), Strategy("gram")) for size in (5, 7)]
    for layer, own in zip(layers, b, strict=True):
        layer.add(Term(a, own), layer.use)
    found = SameInput(layers).squares(precise=True).whole
    want = sum(torch.einsum("btp,btd->bpd", own.double(), a.double()).square().sum((1, 2)) for own in b)
    torch.testing.assert_close(found, want, rtol=1e-3, atol=0)


@pytest.mark.parametrize("together", [False, True])
def test_squares_that_single_precision_does_not_have_are_there_in_double_precision(together):
    """Of gradients that are held, alone or side by side."""
    use, strategy = Outer(((5, 3),)), Strategy("hold")
    held = Held(strategy)
    held.add(Term(1e-25 * torch.randn(4, 1, 3), torch.randn(4, 1, 5)), use)
    rows = held.rows()
    assert rows is not None
    summand = SideBySide(rows) if together else held
    assert summand.squares().whole.tolist() == [0.0] * 4
    want = rows[0].double().square().sum(1)
    torch.testing.assert_close(summand.squares(precise=True).whole, want, rtol=1e-6, atol=0)


def test_what_is_added_up_of_grey_maps_is_that_of_a_kernel_that_reads_all_channels():
    a, b = torch.randn(3, 2, 1, 6, 5), torch.randn(3, 2, 4, 4, 3)
    grey = GreyPatches(((4, 3, 3, 3),)).gram_squares([Term(a, b)], Strategy("gram", "unfolded"))
    plain = Patches(((4, 3, 3, 3),)).gram_squares([Term(a.expand(-1, -1, 3, -1, -1), b)], Strategy("gram", "unfolded"))
    for found, want in zip(grey, plain, strict=True):
        torch.testing.assert_close(found, want, rtol=1e-5, atol=0)


@pytest.mark.parametrize(("tokens", "width", "large"), [(1024, 1, 2e4), (2, 1024, 1e5), (1, 1024, 1e5)])
@pytest.mark.parametrize("swapped", [False, True])
def test_squares_that_underflow_are_doubted_however_many_tokens_or_channels_hide_them(tokens, width, large, swapped):
    """Each square is just below half of the smallest number; all together are beyond a thousandth of what matters."""
    small = 2.6e-23
    terms = large * torch.ones(1, tokens, 1), small * torch.ones(1, tokens, width)
    exact = (tokens * large * small) ** 2 * width
    assert 1e-3 * SMALLEST_SQUARE < exact < SMALLEST_SQUARE
    shape = (1, width) if swapped else (width, 1)
    found = Outer((shape,)).gram_squares([Term(*terms[:: -1 if swapped else 1])], Strategy("gram"))
    assert float(found.whole) == 0
    assert found.parts.isinf().all()


STANDARDISATION = Standardisation(
    F.normalize(torch.linspace(-1, 1, 54).view(2, 27).double()), *torch.tensor([1e-3, 1, 1, 0]).double().view(4, 1, 1)
)


@pytest.mark.parametrize(
    ("use", "channels", "extra"),
    [
        (Patches(((2, 3, 3, 3),)), 3, None),
        (GreyPatches(((2, 3, 3, 3),)), 1, None),
        (StandardisedPatches(((2, 3, 3, 3), (2,))), 3, STANDARDISATION),  # of a gain, whose scale is none of the filter
    ],
    ids=["conv", "grey conv", "standardised conv"],
)
def test_rounding_errors_are_looked_for_up_to_the_sum_of_all_pixels(use, channels, extra):
    """(Σ_τ ‖G_τ‖)² pixel by pixel, of inputs and output gradients that are alike everywhere."""
    a, b = torch.ones(1, 1, channels, 6, 6).double(), torch.ones(1, 1, 2, 4, 4).double()
    a[:, :, 1:] = -0.5
    whole = 0.0
    for pixel in range(16):
        alone = torch.zeros_like(b)
        alone[..., pixel // 4, pixel % 4] = 1
        whole += float(torch.cat(use.rows(Term(a, alone, extra), Strategy("pass", "unfolded")), 1).norm())
    assert float(use.reach(Term(a, b, extra))) >= whole**2


# Numbers near the largest there is


@pytest.mark.parametrize("magnitude", [1e37, 3e38])
def test_one_sample_of_huge_inputs_does_not_stop_a_run(magnitude):
    """Batches 4 and 16 are compared with autograd, and whether that ends a run must not hang on one sample."""
    model = nn.Sequential(nn.Linear(20, 64), nn.Tanh(), nn.Linear(64, 3))
    engine = PerSampleGradients(model, FlatParameters(model), cross_entropy)
    for batch in range(1, 17):
        x, y = torch.randn(100, 20), torch.randint(3, (100,))
        if batch in (4, 16):
            x[:7] = magnitude * torch.randn(7, 20).sign()
        found = engine.clipped_sum([Point(1.0, engine.flat.vector)], [(x, y)], lambda norms: (1 / norms).clamp(max=1))
        assert found.total.isfinite().all()


def sure_of_the_last():
    """A model, and samples of which it is sure of the last one, whose inputs are huge."""
    model = nn.Sequential(nn.Linear(20, 64), nn.Tanh(), nn.Linear(64, 3))
    x, y = torch.randn(17, 20), torch.randint(3, (17,))
    x[16] = 1e37 * torch.randn(20).sign()
    with torch.no_grad():
        y[16] = model(x[16:]).argmax()
        model[2].bias[y[16]] += 20
    return model, x, y


@pytest.mark.parametrize("broken", [False, True])
@pytest.mark.parametrize("strategy", ["pass", "hold", "gram"])
def test_a_factor_above_one_does_not_take_a_finite_gradient_beyond_all_numbers(strategy, broken):
    """A sample that the model is sure of has hardly a gradient, and automatic clipping scales it up: inf times 0.

    So it does beside a broken sample, which adds nothing.
    """
    model, x, y = sure_of_the_last()
    engine = restricted(PerSampleGradients(model, FlatParameters(model), cross_entropy), {strategy})
    points = [Point(1.0, engine.flat.vector)]
    nothing = (torch.full((1, 20), torch.nan), y[:1])
    with_it, without = (
        engine.clipped_sum(
            points,
            [tuple(torch.cat(pair) for pair in zip(batch, nothing, strict=True)) if broken else batch],
            lambda norms: 1 / (norms + 0.01),
            remainder=True,
        )
        for batch in ((x, y), (x[:16], y[:16]))
    )
    assert 0 < with_it.norms[16] < 1e-3
    assert with_it.norms.isinf().tolist() == [False] * 17 + [True] * broken
    assert float((with_it.total - without.total).norm()) < 1.001
    assert float((with_it.remainder - without.remainder).norm()) < 1.001


def test_nor_does_it_where_seeds_share_a_pass():
    model, x, y = sure_of_the_last()
    engine = PerSampleGradients(model, FlatParameters(model), cross_entropy)
    fused = restricted(FusedGradients(model, engine.flat, cross_entropy), {"pass"})
    clip = lambda norms: 1 / (norms + 0.01)  # noqa: E731
    vectors = [engine.flat.vector, 0.99 * engine.flat.vector]
    for inputs in (x.clamp(-2, 2), x):  # the first pass is compared with what each seed gets alone
        requests = [Request(engine, [Point(1.0, vector)], [(inputs, y)], clip) for vector in vectors]
        for request, found in zip(requests, fused.clipped_sums(requests), strict=True):
            torch.testing.assert_close(found.total, request.alone().total, rtol=1e-4, atol=1e-5)


def test_norms_in_double_precision_are_not_below_what_that_may_have_lost():
    """Two tokens whose outer products cancel but for one number's last bit: a clip that normalises keeps its bound."""
    a = torch.randn(400, 1, 48, generator=generator(1)).repeat(1, 2, 1)
    a[:, 1, 0] = torch.nextafter(a[:, 1, 0], torch.tensor(math.inf))
    b = torch.randn(400, 1, 5, generator=generator(2)) * torch.tensor([1.0, -1.0]).view(1, 2, 1)
    exact = torch.linalg.matrix_norm(torch.einsum("btp,btd->bpd", b.double(), a.double()))
    assert (exact > 0).all()
    model = nn.Linear(48, 5, bias=False)
    summand = Factored(Outer(((5, 48),)), Strategy("gram"))
    summand.add(Term(a, b), summand.use)
    tape = Tape(torch.zeros(400), FlatParameters(model), {(model.weight,): summand}, {model.weight: 0})
    assert bool(tape.doubtful())
    tape.refine()
    norms = tape.norms()[0].double()
    assert ((exact / norms)[norms > 0] <= 1.001).all()


def test_norms_that_are_right_stay_bit_for_bit_beside_one_that_is_doubtful():
    """Else one sample would change what all others add, by rounding, beyond its own bound."""
    a, b = torch.randn(30, 2, 48, generator=generator(1)), torch.randn(30, 2, 5, generator=generator(2))
    a[0, 1], b[0, 1] = a[0, 0], -b[0, 0] * (1 + 2**-20)
    model = nn.Linear(48, 5, bias=False)

    def norms(first):
        summand = Factored(Outer(((5, 48),)), Strategy("gram"))
        summand.add(Term(a[first:], b[first:]), summand.use)
        own = {(model.weight,): summand}
        tape = Tape(torch.zeros(30 - first), FlatParameters(model), own, {model.weight: 0})
        if bool(tape.doubtful()):
            tape.refine()
            assert first == 0
        return tape.norms()[0]

    assert torch.equal(norms(0)[1:], norms(1))


def test_a_broken_sample_leaves_the_sum_of_the_others_bit_for_bit():
    """Its norm is inf in double precision too, so nothing asks for sums in that, which round otherwise."""
    a, b = torch.randn(30, 2, 48, generator=generator(1)), torch.randn(30, 2, 5, generator=generator(2))
    model = nn.Linear(48, 5, bias=False)

    def total(of_first):
        summand = Factored(Outer(((5, 48),)), Strategy("gram"))
        summand.add(Term(a, torch.cat([torch.full_like(b[:1], of_first), b[1:]])), summand.use)
        tape = Tape(torch.zeros(30), FlatParameters(model), {(model.weight,): summand}, {model.weight: 0})
        return clipped_by(tape, 30, lambda norms: (1 / norms).clamp(max=1), remainder=False).total

    assert torch.equal(total(math.nan), total(0.0))


def test_a_table_that_is_a_linear_layer_too_has_its_norm_in_double_precision():
    """Rows of the lookup nearly cancel those of the outer product; against the whole gradient, made in float64."""
    ids, a = torch.tensor([[0], [3], [2]]), torch.randn(3, 1, 6, generator=generator(1))
    onto = torch.zeros(3, 1, 4).scatter_(2, ids.unsqueeze(2), 1.0)
    lookup = -a * (1 + 2**-18)
    tied = Tied()
    tied.add(Term(ids, lookup), Lookup(((4, 6),)))
    tied.add(Term(a, onto), Outer(((4, 6),)))
    whole = torch.einsum("btv,btd->bvd", onto.double(), a.double())
    whole.scatter_add_(1, ids.unsqueeze(2).expand(-1, -1, 6), lookup.double())
    found = tied.squares(precise=True).whole
    torch.testing.assert_close(found, whole.square().sum((1, 2)), rtol=1e-3, atol=0)


@pytest.mark.parametrize("broken", [math.inf, -math.inf, math.nan])
def test_one_number_beyond_all_numbers_is_not_finite(broken):
    fine = torch.tensor([3e38, -3e38, 1.0])
    assert not bool(not_finite([fine, fine]))
    assert bool(not_finite([fine, torch.tensor([1.0, broken])]))
