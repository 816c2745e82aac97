"""The checks of per-sample gradients fail where the engine is wrong, and so does its own."""

import pytest
import torch
from gradient_checks import WEIGHTS, assert_exact, cross_entropy, func_gradients, iterates_of, plain_gradients, read_out
from small_models import Expanded
from torch import nn

from dpbench.gradients import FlatParameters, PerSampleGradients, uses
from dpbench.gradients.joined import SameInput, SideBySide
from dpbench.gradients.summands import Factored, Held
from dpbench.gradients.uses import GreyPatches, Lookup, Outer, Patches, Squares
from dpbench.gradients.verify import SAMPLES
from dpbench.query import Point

pytestmark = pytest.mark.usefixtures("seeded")


def test_both_references_agree():
    model = read_out(nn.Linear(4, 5), nn.Tanh(), example=torch.randn(4, 3, 4)).double()
    x, y = torch.randn(4, 3, 4).double(), torch.randint(3, (4,))
    flat = FlatParameters(model)
    _, plain = plain_gradients(model, flat.vector, x, y)
    torch.testing.assert_close(func_gradients(model, flat, flat.vector, x, y), plain, rtol=1e-12, atol=1e-14)


MECHANISMS = {
    "linear": (lambda: read_out(nn.Linear(5, 4), nn.Tanh(), example=torch.randn(4, 3, 5)), (4, 3, 5)),
    "conv": (lambda: read_out(nn.Conv2d(2, 3, 2), nn.Tanh(), example=torch.randn(4, 2, 4, 4)), (4, 2, 4, 4)),
    "embedding": (lambda: read_out(nn.Embedding(5, 4), nn.Tanh(), example=torch.randint(5, (4, 3))), None),
}


@pytest.mark.parametrize("name", MECHANISMS)
def test_gram_norms_without_cross_terms_are_noticed(name, monkeypatch):
    build, size = MECHANISMS[name]
    x = torch.randint(5, (4, 3)) if size is None else torch.randn(*size)
    gram = frozenset({"gram"})
    assert_exact(build(), x, strategies=gram)
    for module in vars(uses).values():
        if hasattr(module, "pairs"):
            monkeypatch.setattr(module, "pairs", lambda count: [(j, j) for j in range(count)])
    assert_exact(build(), x, strategies=gram, points=(1,), checked=False)
    with pytest.raises(AssertionError):
        assert_exact(build(), x, strategies=gram, points=(2,), checked=False)


@pytest.mark.parametrize("kind", ["hold", "pass"])
def test_norms_that_leave_iterates_apart_are_noticed(kind, monkeypatch):
    """‖G‖² + ‖H‖² in place of ‖G + H‖²."""

    def own_squares(use, term, strategy):
        return sum(rows.square().sum(1) for rows in use.rows(term, strategy))

    def apart(self, *, precise=False):
        strategy = self._strategy
        squares = sum(own_squares(self.use, term, strategy) for term in self.terms)
        return Squares(squares, torch.zeros(()))

    x = torch.randn(4, 3, 5)
    assert_exact(MECHANISMS["linear"][0](), x, strategies=frozenset({kind}))
    if kind == "pass":
        monkeypatch.setattr(Factored, "squares", apart)
    else:
        add = Held.add

        def add_apart(self, term, use):
            before = self.squares().whole if self._chunks else 0
            own = own_squares(use, term, self._strategy)
            add(self, term, use)
            self._squares = [before + own]

        monkeypatch.setattr(Held, "add", add_apart)
        monkeypatch.setattr(Held, "rows", lambda self: None)
    assert_exact(MECHANISMS["linear"][0](), x, strategies=frozenset({kind}), points=(1,), checked=False)
    with pytest.raises(AssertionError):
        assert_exact(MECHANISMS["linear"][0](), x, strategies=frozenset({kind}), points=(2,), checked=False)


class Gated(nn.Module):
    """Two layers that read one input, and small parameters."""

    def __init__(self):
        super().__init__()
        self.norm, self.value, self.gate = nn.LayerNorm(5), nn.Linear(5, 4), nn.Linear(5, 4)

    def forward(self, x):
        x = self.norm(x)
        return self.value(x) * self.gate(x)


def first_only(self, *, precise=False):
    """Squared norms of the first layer in place of all."""
    return self._layers[0].squares(precise=precise)


def squares_of_first_half(self, *, precise=False):
    half = self._rows[:, : self._rows.shape[1] // 2]
    return Squares(half.square().sum(1), torch.zeros(()))


def turned_around(self, factors, onto):
    total = (factors @ self._rows).flip(0)
    for target, part in zip(onto, total.split(self._sizes), strict=True):
        target.add_(part.view_as(target))


@pytest.mark.parametrize(
    ("joined", "method", "wrong"),
    [
        (SameInput, "squares", first_only),
        (SideBySide, "squares", squares_of_first_half),
        (SideBySide, "add_weighted_sum", turned_around),
    ],
)
def test_what_goes_wrong_together_is_noticed(joined, method, wrong, monkeypatch):
    x = torch.randn(4, 3, 5)
    model, gram = read_out(Gated(), example=x), frozenset({"gram"})
    assert_exact(model, x, strategies=gram)
    monkeypatch.setattr(joined, method, wrong)
    with pytest.raises(AssertionError):
        assert_exact(model, x, strategies=gram, points=(1,), books=None, checked=False)


def test_norm_of_a_mixture_is_no_mixture_of_norms():
    x, y = torch.randn(4, 3, 5).double(), torch.randint(3, (4,))
    model = MECHANISMS["linear"][0]().double()
    flat = FlatParameters(model)
    engine = PerSampleGradients(model, flat, cross_entropy)
    points = [Point(w, at) for w, at in zip(WEIGHTS[2], iterates_of(flat.vector, 2, 0.5), strict=True)]
    mixture = engine.record(points, x, y).norms()
    apart = [engine.record([point], x, y).norms() for point in points]
    for other in (apart[0] + apart[1], (apart[0] - apart[1]).abs(), (apart[0] ** 2 + apart[1] ** 2).sqrt()):
        assert ((other - mixture).abs() > 0.01 * mixture).all()


def test_wrong_weighted_sums_are_noticed(monkeypatch):
    add = Outer.add_weighted_sum

    def once(self, term, factors, onto):
        if not onto[0].any():
            add(self, term, factors, onto)

    x = torch.randn(4, 3, 5)
    gram = frozenset({"gram"})
    monkeypatch.setattr(Outer, "add_weighted_sum", once)
    assert_exact(MECHANISMS["linear"][0](), x, strategies=gram, points=(1,), checked=False)
    with pytest.raises(AssertionError):
        assert_exact(MECHANISMS["linear"][0](), x, strategies=gram, points=(2,), checked=False)


def zeros_for_squares(self, terms, *_):
    zeros = torch.zeros(len(terms[0].b), dtype=terms[0].b.dtype)
    return Squares(zeros, zeros)


def halves_of(method):
    return lambda self, term, strategy: tuple(0.5 * rows for rows in method(self, term, strategy))


def nothing(self, term, factors, onto):
    pass


def grey():
    return nn.Sequential(Expanded(3), nn.Conv2d(3, 4, 3))


# (model, size of its inputs or None for ids, what is spoilt of which use): the strategies that few samples take.
SPOILT = {
    "norms of linear": (lambda: nn.Linear(5, 4), (4, 5), Outer, "gram_squares", zeros_for_squares),
    "sums of linear": (lambda: nn.Linear(5, 4), (4, 5), Outer, "add_weighted_sum", nothing),
    "gradients of linear": (lambda: nn.Linear(5, 4), (4, 6, 5), Outer, "rows", halves_of(Outer.rows)),
    "gradients of conv": (lambda: nn.Conv2d(2, 3, 2), (4, 2, 4, 4), Patches, "rows", halves_of(Patches.rows)),
    "gradients of grey conv": (grey, (4, 1, 6, 6), GreyPatches, "rows", halves_of(GreyPatches.rows)),
    "norms of grey conv": (grey, (4, 1, 3, 3), GreyPatches, "gram_squares", zeros_for_squares),
    "sums of grey conv": (grey, (4, 1, 3, 3), GreyPatches, "add_weighted_sum", nothing),
    "norms of embedding": (lambda: nn.Embedding(9, 4), None, Lookup, "gram_squares", zeros_for_squares),
    "sums of embedding": (lambda: nn.Embedding(9, 4), None, Lookup, "add_weighted_sum", nothing),
}


@pytest.mark.parametrize("name", SPOILT)
def test_wrong_books_are_rejected_for_right_gradients(name, monkeypatch):
    build, size, use, method, wrong = SPOILT[name]
    x = torch.randint(9, (4, 2)) if size is None else torch.randn(*size)
    model = read_out(build(), nn.Tanh(), example=x)
    assert_exact(model, x)
    monkeypatch.setattr(use, method, wrong)
    assert_exact(model, x, books=False)
    with pytest.raises(AssertionError):
        assert_exact(model, x, points=(1,), books=None, checked=False)


def too_short_in_batches(method):
    def squares(self, terms, strategy):
        found = method(self, terms, strategy)
        return found if len(terms[0].b) <= SAMPLES else Squares(0.5 * found.whole, found.parts)

    return squares


@pytest.mark.parametrize("use", [Outer, Patches, Lookup])
def test_norms_that_are_wrong_in_whole_batches_alone_are_noticed(use, monkeypatch):
    build, x = {
        Outer: (lambda: nn.Linear(5, 4), torch.randn(9, 3, 5)),
        Patches: (lambda: nn.Conv2d(2, 3, 2), torch.randn(9, 2, 4, 4)),
        Lookup: (lambda: nn.Embedding(9, 4), torch.randint(9, (9, 3))),
    }[use]
    model = read_out(build(), nn.Tanh(), example=x)
    gram = frozenset({"gram"})
    assert_exact(model, x, strategies=gram)
    monkeypatch.setattr(use, "gram_squares", too_short_in_batches(use.gram_squares))
    assert_exact(model, x, strategies=gram, books=False)
    with pytest.raises(AssertionError):
        assert_exact(model, x, strategies=gram, points=(1,), checked=False)
