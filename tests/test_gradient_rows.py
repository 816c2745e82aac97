"""Rows that follow the data, which a batch need not show: operations that pick them, and models that do."""

import random

import pytest
import torch
import torch.nn.functional as F
from gradient_checks import assert_right, cross_entropy, engine_in_float64, one_by_one
from small_models import CLASSES, TOKENS, TokenClassifier
from torch import nn

from dpbench.gradients import PerSampleGradients
from dpbench.gradients.fused import FusedGradients
from dpbench.gradients.request import Request
from dpbench.gradients.row_order import rows_by_data
from dpbench.gradients.settle import UNDECIDED, problem_in_batch
from dpbench.gradients.way import Books, Rows
from dpbench.query import Point

pytestmark = [
    pytest.mark.usefixtures("seeded"),
    pytest.mark.filterwarnings("ignore:falling back to materialised"),
    pytest.mark.filterwarnings("ignore:index_reduce.. is in beta"),
]


RAGGED = torch.tensor([[5, 0, 0, 0], [3, 8, 8, 0], [1, 1, 6, 2], [2, 5, 3, 7]])
ODD = torch.tensor([[5, 0, 0, 0], [3, 8, 8, 4], [1, 1, 6, 2], [2, 5, 3, 7]])


class WithoutPadding(TokenClassifier):
    def hidden(self, ids):
        real, h = ids != 0, self.embedding(ids)
        out = torch.zeros_like(h)
        out[real] = torch.tanh(self.inner(h[real]))
        return out.sum(1)


class WithoutPaddingByIndex(TokenClassifier):
    def hidden(self, ids):
        h = self.embedding(ids)
        places = (ids != 0).flatten().nonzero().squeeze(1)
        inner = torch.tanh(self.inner(h.flatten(0, 1).index_select(0, places)))
        return torch.zeros_like(h).flatten(0, 1).index_copy(0, places, inner).view_as(h).sum(1)


class ByLength(TokenClassifier):
    def hidden(self, ids):
        order = (ids != 0).sum(1).argsort(descending=True, stable=True)
        return torch.tanh(self.inner(self.embedding(ids[order]))).mean(1)[order.argsort()]


class ByLengthInPython(TokenClassifier):
    def hidden(self, ids):
        lengths = [sum(token != 0 for token in row) for row in ids.tolist()]
        order = torch.tensor(sorted(range(len(ids)), key=lambda i: -lengths[i]))
        return torch.tanh(self.inner(self.embedding(ids[order]))).mean(1)[order.argsort()]


class ByLengthNumberByNumber(TokenClassifier):
    def hidden(self, ids):
        lengths = (ids != 0).sum(1)
        order = torch.tensor(sorted(range(len(ids)), key=lambda i: -int(lengths[i])))
        return torch.tanh(self.inner(self.embedding(ids[order]))).mean(1)[order.argsort()]


class WithoutPaddingInPython(TokenClassifier):
    def hidden(self, ids):
        lengths = (ids != 0).sum(1).tolist()
        real = torch.cat([row[:length] for row, length in zip(self.embedding(ids), lengths, strict=True)])
        return torch.stack([part.sum(0) for part in torch.tanh(self.inner(real)).split(lengths)])


class IdsWithoutPadding(TokenClassifier):
    def hidden(self, ids):
        lengths = (ids != 0).sum(1)
        real = torch.cat([row[: int(length)] for row, length in zip(ids, lengths, strict=True)])
        parts = torch.tanh(self.inner(self.embedding(real))).split(lengths.tolist())
        return torch.stack([part.sum(0) for part in parts])


class ByLengthOneByOne(TokenClassifier):
    """Puts rows in the order of their length one by one, or where that leaves room for what is cut."""

    def __init__(self, padded):
        super().__init__()
        self.padded = padded

    def hidden(self, ids):
        lengths, h = (ids != 0).sum(1).tolist(), self.embedding(ids)
        order = sorted(range(len(ids)), key=lambda i: -lengths[i])
        if self.padded:
            h = nn.utils.rnn.pad_sequence([h[i, : lengths[i]] for i in order], batch_first=True)
        else:
            h = torch.stack([h[i] for i in order])
        out = torch.tanh(self.inner(h)).mean(1)
        return torch.stack([out[order.index(i)] for i in range(len(ids))])


class Turned(TokenClassifier):
    """Turns the samples around by a number that it reads, in one call or by two cuts."""

    def __init__(self, cut):
        super().__init__()
        self.cut = cut

    def turned(self, x, by):
        return torch.cat([x[-by:], x[:-by]]) if self.cut else x.roll(by, 0)

    def hidden(self, ids):
        h, by = self.embedding(ids).mean(1), int((ids == 0).any(1).sum())
        return self.turned(torch.tanh(self.inner(self.turned(h, by))), len(ids) - by)


def permutation(numbers):
    """The matrix whose product with rows puts them in the order of these numbers, of rows, shape (n, n)."""
    places = torch.arange(len(numbers))
    before = (numbers < numbers.unsqueeze(1)) | ((numbers == numbers.unsqueeze(1)) & (places < places.unsqueeze(1)))
    return F.one_hot(before.sum(1), len(numbers)).t()


class ByAMatrix(TokenClassifier):
    """Puts samples in the order of their lengths by a product with a permutation."""

    def hidden(self, ids):
        order = permutation((ids == 0).sum(1)).to(self.inner.weight)
        return order.t() @ torch.tanh(self.inner(order @ self.embedding(ids).mean(1)))


class Dispatched(TokenClassifier):
    """A mixture of experts that has a place for each sample, which a cumulative sum gives and a product fills."""

    def hidden(self, ids):
        h = self.embedding(ids).mean(1)
        expert = F.one_hot((ids == 0).any(1).long(), 2)
        place = F.one_hot(((expert.cumsum(0) - 1) * expert).sum(1), len(ids))
        dispatch = (expert.unsqueeze(2) * place.unsqueeze(1)).to(h)
        read = torch.einsum("bec,bd->ecd", dispatch, h)
        out = torch.stack([torch.tanh(self.inner(read[0])), torch.sin(self.inner(read[1]))])
        return h + torch.einsum("bec,ecd->bd", dispatch, out)


class Routed(TokenClassifier):
    """A mixture of experts: each sample goes to one of two layers."""

    def hidden(self, ids):
        h = self.embedding(ids).mean(1)
        out = torch.zeros_like(h)
        for expert, one in enumerate((torch.tanh, torch.sin)):
            (which,) = torch.where(ids[:, 0] % 2 == expert)
            out = out.index_add(0, which, one(self.inner(h[which])))
        return out


INNOCENT = torch.tensor([[2, 4, 1, 3], [2, 8, 8, 4], [4, 1, 6, 2], [2, 5, 3, 7]])
BY_DATA = {
    "mask": WithoutPadding,
    "indices": WithoutPaddingByIndex,
    "cuts": WithoutPaddingInPython,
    "cuts of ids": IdsWithoutPadding,
    "order": ByLength,
    "order in Python": ByLengthInPython,
    "order number by number": ByLengthNumberByNumber,
    "order row by row": lambda: ByLengthOneByOne(padded=False),
    "order row by row, filled up": lambda: ByLengthOneByOne(padded=True),
    "turn": lambda: Turned(cut=False),
    "turn by cuts": lambda: Turned(cut=True),
    "permutation": ByAMatrix,
    "dispatch": Dispatched,
    "routes": Routed,
}


@pytest.mark.parametrize("name", BY_DATA)
def test_rows_that_follow_the_data_are_found_in_a_batch_that_shows_nothing(name):
    engine = engine_in_float64(BY_DATA[name]())
    assert_right(engine, (INNOCENT, CLASSES))
    assert isinstance(engine._way, Rows)
    assert_right(engine, (TOKENS, CLASSES), (RAGGED, CLASSES), (ODD, CLASSES))


class EndOfSequence(TokenClassifier):
    """Picks one token of each sample, after all layers or before the last."""

    before = False

    def forward(self, ids):
        last = (ids != 0).sum(1) - 1
        h = torch.tanh(self.inner(self.embedding(ids)))
        if self.before:
            return self.head(h[torch.arange(len(ids)), last])
        return self.head(h)[torch.arange(len(ids)), last]


class Backwards(TokenClassifier):
    """Reorders features and tokens, but no samples."""

    def hidden(self, ids):
        order = torch.tensor([3, 1, 0, 2])
        h = self.embedding(ids)[:, order]
        h[ids == 0] = 0.0
        return self.inner(h[..., torch.tensor([4, 3, 2, 1, 0])]).mean(1)


@pytest.mark.parametrize("before", [False, True])
def test_picking_a_token_of_each_sample_keeps_books(before):
    model = EndOfSequence()
    model.before = before
    engine = engine_in_float64(model)
    assert_right(engine, (TOKENS, CLASSES), (RAGGED, CLASSES), (ODD, CLASSES))
    assert isinstance(engine._way, Books)


def test_reordering_within_samples_keeps_books():
    engine = engine_in_float64(Backwards())
    assert_right(engine, (TOKENS, CLASSES), (RAGGED, CLASSES))
    assert isinstance(engine._way, Books)


# (what is done with an input (4, 3) before a layer reads it, whether it picks rows by the data)
CHOICES = {
    "sort of samples": (lambda x: x.sort(0)[0], True),
    "sort of features": (lambda x: x.sort(1)[0], False),
    "stable sort of samples": (lambda x: x.sort(dim=0, stable=True)[0], True),
    "stable sort of features": (lambda x: x.sort(dim=1, stable=True)[0], False),
    "samples as a table": (lambda x: F.embedding(x[:, 0].argsort(), x), True),
    "take": (lambda x: x.take(x.argsort(0)), True),
    "largest of samples": (lambda x: x.topk(4, 0)[0], True),
    "largest of features": (lambda x: x.topk(3, 1)[0], False),
    "gather of samples": (lambda x: x.gather(0, x.argsort(0)), True),
    "gather of features": (lambda x: x.gather(1, x.argsort(1)), False),
    "mask": (lambda x: x[x[:, 0] > -9], True),
    "mask of values": (lambda x: x.masked_fill(x > 0, 0.0), False),
    "some set to a constant": (lambda x: x.index_put((x[:, 0] > 0,), torch.tensor(0.0)), False),
    "distinct": (lambda x: x.unique(dim=0), True),
    "repeated": (lambda x: x.repeat_interleave((x[:, 0] > -9).long(), 0), True),
    "repeated evenly": (lambda x: x.repeat_interleave(1, 0), False),
    "fixed order of samples": (lambda x: x[torch.tensor([1, 0, 2, 3])], True),
    "order of samples as it is": (lambda x: x[torch.arange(4)], False),
    "scattered": (lambda x: torch.zeros_like(x).scatter_add(0, x.argsort(0), x), True),
    "copied to other places": (lambda x: torch.zeros(4, 3).index_copy_(0, torch.tensor([1, 0, 3, 2]), x), True),
    "put to other places": (lambda x: torch.zeros(4, 3).index_put_((torch.tensor([1, 0, 3, 2]),), x), True),
    "fixed table of features": (lambda x: torch.eye(3)[torch.tensor([2, 0, 1])][0] * x, False),
    "through a buffer": (lambda x: torch.empty(4, 3).copy_(x)[torch.tensor([1, 0, 2, 3])], True),
    "table by data": (lambda x: torch.arange(12.0).view(4, 3)[(x[:, 0] > 0).long()], False),
    "largest of all": (lambda x: x / x.max().item(), False),
    "reduced to other places": (
        lambda x: torch.zeros(4, 3).index_reduce(0, torch.tensor([1, 0, 3, 2]), x, "amax"),
        True,
    ),
    "rows cut and joined": (
        lambda x: torch.cat([row[:2] for row in in_python(x)]).view(4, 2).repeat(1, 2)[:, :3],
        True,
    ),
    "rows cut and stacked": (lambda x: torch.stack([row[:2].repeat(2)[:3] for row in in_python(x)]), True),
    "part of one row filled up": (lambda x: x + torch.cat([in_python(x)[0][:2], x.new_ones(1)]), False),
    "rows stacked without a look": (lambda x: torch.stack(list(x)), False),
    "one row stacked often": (lambda x: torch.stack([in_python(x)[0]] * 4), False),
    "rows put to places": (lambda x: put(in_python(x)), True),
    "rows put to places without a look": (lambda x: put(x), False),
    "parts of samples": (lambda x: torch.cat(x.split(2)), False),
    "parts of samples by numbers": (lambda x: torch.cat(x.split([int((x > -9).sum()) // 6, 2])), True),
    "parts of features by numbers": (lambda x: torch.cat(x.split([int((x > -9).sum()) // 6, 1], 1), 1), False),
    "turn by a number": (lambda x: x.roll(int(x[0, 0] > 9), 0), True),
    "turn of all by a number": (lambda x: x.roll(3 * int(x[0, 0] > 9)), True),
    "turn of features by a number": (lambda x: x.roll(int(x[0, 0] > 9), 1), False),
    "product with a permutation": (lambda x: order(x) @ x, True),
    "product of sequences with a permutation": (lambda x: (order(x) @ x.expand(5, 4, 3))[0], True),
    "sum with a permutation": (lambda x: (order(x) @ x[:, 0]).unsqueeze(1).expand(4, 3), True),
    "product of each sample": (lambda x: (x.unsqueeze(1) @ x.unsqueeze(2) @ x.unsqueeze(1)).squeeze(1), False),
    "product of one sample after the other": (lambda x: torch.stack([row.outer(row) @ row for row in x]), False),
    "product with what is made for it": (lambda x: x @ x.new_ones(3, 3), False),
}


def in_python(x):
    """The samples, after their numbers were read by Python."""
    assert x.tolist()
    return list(x)


def order(x):
    return permutation(x[:, 0]).to(x)


def put(rows):
    """Rows in one tensor."""
    whole = torch.zeros(4, 3)
    for place, row in zip(whole, rows, strict=True):
        place.copy_(row)
    return whole


@pytest.mark.parametrize("name", CHOICES)
def test_operations_that_pick_rows_by_data(name):
    before, picks = CHOICES[name]

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 2)

        def forward(self, x):
            return self.layer(before(x))

    model = Model()
    assert (rows_by_data(model, [model.layer], [], torch.randn(4, 3)) is not None) == picks


# What layers read, which shows in the pass


class WithoutPaddingWhereThereIsSome(TokenClassifier):
    """Spares itself the trouble in a batch without."""

    def hidden(self, ids):
        real, h = ids != 0, self.embedding(ids)
        if real.all():
            return torch.tanh(self.inner(h)).sum(1)
        out = torch.zeros_like(h)
        out[real] = torch.tanh(self.inner(h[real]))
        return out.sum(1)


class CutToTheLongest(TokenClassifier):
    def hidden(self, ids):
        ids = ids[:, : int((ids != 0).sum(1).max())]
        return (torch.tanh(self.inner(self.embedding(ids))) * (ids != 0).unsqueeze(2)).sum(1)


class NowAndThen(TokenClassifier):
    """Leaves a layer out of some passes, at random."""

    def hidden(self, ids):
        h = self.embedding(ids).sum(1)
        return torch.tanh(self.inner(h)) if random.random() < 0.5 else h


class Pooled(TokenClassifier):
    def hidden(self, ids):
        return torch.tanh(self.inner(self.embedding(ids))).sum(1)


@pytest.fixture
def compared(monkeypatch):
    """Grows with each comparison of a batch."""
    calls = []

    def counted(*arguments):
        calls.append(arguments)
        return problem_in_batch(*arguments)

    monkeypatch.setattr("dpbench.gradients.per_sample.problem_in_batch", counted)
    return calls


def comparisons(engine, calls, *batches):
    """How many there are of each batch, which is no due one."""
    numbers = []
    for ids in batches:
        engine._batches, before = 4, len(calls)
        engine.record([Point(1.0, engine.flat.vector)], ids, CLASSES[: len(ids)])
        numbers.append(len(calls) - before)
    return numbers


def test_a_batch_in_which_a_layer_reads_something_new_is_compared_before_it_counts(compared):
    engine = engine_in_float64(WithoutPaddingWhereThereIsSome())
    assert comparisons(engine, compared, INNOCENT, TOKENS, INNOCENT[:2]) == [1, 0, 0]
    assert isinstance(engine._way, Books)
    assert_right(engine, (RAGGED, CLASSES), (ODD, CLASSES), (INNOCENT, CLASSES))
    assert isinstance(engine._way, Rows)


def test_such_a_batch_is_no_surprise_where_books_are_right(compared):
    """A length of tokens is one more comparison, whether it is that of the inputs or one that the model cuts to."""
    shorter = INNOCENT * torch.tensor([1, 1, 1, 0])
    engine = engine_in_float64(CutToTheLongest())
    batches = INNOCENT, TOKENS, INNOCENT[:3], shorter, shorter[:2], INNOCENT, shorter
    assert comparisons(engine, compared, *batches) == [1, 0, 0, 1, 0, 0, 0]
    assert_right(engine, (INNOCENT, CLASSES), (shorter, CLASSES), (RAGGED, CLASSES))
    assert isinstance(engine._way, Books)
    resumed = PerSampleGradients(engine.model, engine.flat, engine.loss)
    resumed.load_state_dict(engine.state_dict())
    assert comparisons(resumed, compared, shorter, *batches) == [1] + [0] * 7


def test_ordinary_batches_are_compared_once_for_each_length(compared):
    engine = engine_in_float64(Pooled())
    batches = INNOCENT, RAGGED, INNOCENT[:, :3], INNOCENT[:1], INNOCENT[:3, :3], ODD
    assert comparisons(engine, compared, *batches) == [1, 0, 1, 0, 0, 0]


def test_a_layer_that_some_passes_leave_out_is_compared_once(compared):
    engine = engine_in_float64(NowAndThen().train())
    for seed in range(12):
        random.seed(seed)
        comparisons(engine, compared, INNOCENT)
    assert isinstance(engine._way, Books)
    assert len(compared) == 2


def test_a_batch_that_can_not_be_compared_settles_nothing(monkeypatch):
    engine = engine_in_float64(WithoutPaddingWhereThereIsSome())
    points = [Point(1.0, engine.flat.vector)]
    engine.record(points, INNOCENT, CLASSES)
    want = one_by_one(engine, RAGGED, CLASSES).norm(dim=1)
    with monkeypatch.context() as patch:
        patch.setattr("dpbench.gradients.per_sample.problem_in_batch", lambda *_: UNDECIDED)
        with pytest.warns(UserWarning, match="not finite: such a batch takes one backward pass per sample"):
            torch.testing.assert_close(engine.record(points, RAGGED, CLASSES).norms()[0], want)
    assert isinstance(engine._way, Books)
    torch.testing.assert_close(engine.record(points, RAGGED, CLASSES).norms()[0], want)
    assert isinstance(engine._way, Rows)


def test_what_layers_read_is_plain(tmp_path):
    engine = engine_in_float64(Pooled())
    engine.record([Point(1.0, engine.flat.vector)], TOKENS, CLASSES)
    # The place of the parameter, rows for each sample, and the shape of one of them.
    state = engine.state_dict()
    assert state["compared_batches"]["reads"] == [(0, 1.0, 4), (1, 1.0, 4, 5), (3, 1.0, 5)]
    torch.save(state, tmp_path / "state.pt")
    resumed = PerSampleGradients(engine.model, engine.flat, engine.loss)
    resumed.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert resumed.state_dict() == state


def test_seeds_do_not_share_a_pass_in_which_a_layer_reads_something_new():
    engines = [engine_in_float64(WithoutPaddingWhereThereIsSome()) for _ in range(3)]
    fused = FusedGradients(engines[0].model, engines[0].flat, cross_entropy)

    def sums(ids):
        requests = [Request(one, [Point(1.0, one.flat.vector)], [(ids, CLASSES)], torch.ones_like) for one in engines]
        for found, one in zip(fused.clipped_sums(requests), engines, strict=True):
            torch.testing.assert_close(found.total, one_by_one(one, ids, CLASSES).sum(0))
            torch.testing.assert_close(found.norms, one_by_one(one, ids, CLASSES).norm(dim=1))

    for _ in range(2):
        sums(INNOCENT)
    with pytest.warns(UserWarning, match="seeds computed one by one"):
        sums(RAGGED)
    sums(ODD)
