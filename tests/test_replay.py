"""Passes that are recorded and replayed, with graphs that compute on the CPU; tests/test_gpu.py has the real ones."""

from contextlib import nullcontext

import pytest
import torch
from helpers import composed
from replay_checks import halved, replay_counts, two_points
from torch import nn

from dpbench.errors import UserError
from dpbench.gradients import FlatParameters, PerSampleGradients, Tape, replay
from dpbench.gradients.clipped import clipped_by
from dpbench.gradients.replay import Replays, padded, rounded_up
from dpbench.gradients.way import Books
from dpbench.query import Point
from dpbench.training.losses import per_sample_loss

# Sizes that recur


def test_sizes_are_rounded_up_by_an_eighth_at_most():
    sizes = {count: rounded_up(count) for count in range(1, 5000)}
    assert all(count <= size < 1.126 * count for count, size in sizes.items())
    assert all(sizes[count] == count for count in range(1, 16))
    assert len({size for count, size in sizes.items() if 200 <= count <= 310}) <= 7
    assert all(rounded_up(size) == size for size in sizes.values())


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=["first", "last"])
def test_filled_up_batches_keep_their_layout(layout):
    x = torch.rand(5, 3, 4, 4).to(memory_format=layout)
    filled = padded(x, 8)
    assert filled.is_contiguous(memory_format=layout)
    assert torch.equal(filled, x[[0, 1, 2, 3, 4, 0, 0, 0]])
    assert padded(x, 5) is x
    assert padded(torch.arange(3), 8).tolist() == [0, 1, 2, 0, 0, 0, 0, 0]


def test_filled_up_views_keep_their_layout():
    x = torch.rand(10, 3, 4, 4).to(memory_format=torch.channels_last).view(5, 2, 3, 4, 4)
    filled = padded(x, 8)
    assert filled.flatten(0, 1).is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(filled, x[[0, 1, 2, 3, 4, 0, 0, 0]])


def test_rows_that_have_gaps_are_filled_up():
    x = torch.rand(5, 6)[:, ::2]
    assert torch.equal(padded(x, 7), x[[0, 1, 2, 3, 4, 0, 0]])


@pytest.mark.parametrize("broken", [[], [2], [0, 3]], ids=str)
def test_samples_that_fill_a_batch_up_count_for_nothing(broken):
    engine, points, x, y = small(6)
    engine.record(points, x, y)
    x[broken] = torch.nan
    want = clipped_by(engine.record(points, x, y), 6, halved, remainder=True)
    found = clipped_by(engine.record(points, padded(x, 11), padded(y, 11)), 6, halved, remainder=True)
    assert_same(found, want)
    assert float(found.total.norm()) > 0


# Recordings


class Again:
    """In the place of a graph: what was recorded is computed anew, into the tensors that it gave."""

    made = 0

    def __init__(self, work, place):
        self._work, self.outputs = work, tuple(t.clone() for t in work())
        type(self).made += 1

    def replay(self):
        for output, new in zip(self.outputs, self._work(), strict=True):
            output.copy_(new)


class Counting(nn.Module):
    """Notes how many rows each pass has, and multiplies by a number that is no parameter."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
        self.rows, self.factor = [], 1.0

    def forward(self, x):
        self.rows.append(len(x))
        return self.layers(x) * self.factor


@pytest.fixture
def replaying(monkeypatch):
    """Passes are replayed on the CPU; the number of graphs that were made."""
    for name, stand_in in {
        "Graph": Again,
        "_room": lambda: True,
        "_waiting_refused": nullcontext,
        "_undone_if_it_fails": nullcontext,
    }.items():
        monkeypatch.setattr(replay, name, stand_in)
    monkeypatch.setattr(replay.Place, "new", lambda: None)
    monkeypatch.setattr(
        "dpbench.gradients.per_sample.replayable", lambda way, inputs: isinstance(way, Books) and not way.draws
    )
    Again.made = 0
    return lambda: Again.made


def small(batch, model=None):
    """An engine, points of two iterates and a batch."""
    torch.manual_seed(0)
    model = Counting() if model is None else model
    engine = PerSampleGradients(model, FlatParameters(model), per_sample_loss)
    points = two_points(engine, 0.1)
    return engine, points, torch.randn(batch, 4), torch.randint(3, (batch,))


def launched(engine, points, x, y, **options):
    """What the passes come to, batch by batch as it is."""
    other = PerSampleGradients(engine.model, engine.flat, engine.loss)
    other.way(points, torch.ones_like(x), y)
    return clipped_by(other.record(points, x, y), len(y), halved, options.get("remainder", False))


def assert_same(found, want):
    for have, expected in zip(found, want, strict=True):
        assert (have is None) == (expected is None)
        if have is not None:
            torch.testing.assert_close(have, expected, equal_nan=True, rtol=1e-4, atol=1e-6)


def test_replays_in_double_precision_are_compared_too(replaying):
    torch.manual_seed(0)
    model = Counting().double()
    engine = PerSampleGradients(model, FlatParameters(model), per_sample_loss)
    x, y, points = torch.randn(16, 4, dtype=torch.float64), torch.randint(3, (16,)), two_points(engine, 0.1)
    for _ in range(5):
        found = engine.clipped_sum(points, [(x, y)], halved)
    assert replaying() > 0
    want = clipped_by(engine.record(points, x, y), 16, halved, remainder=False)
    torch.testing.assert_close(found.total, want.total, rtol=1e-12, atol=0)


@pytest.mark.parametrize("remainder", [False, True])
@pytest.mark.parametrize("count", [1, 2])
def test_replays_are_what_the_passes_compute(replaying, count, remainder):
    engine, _, x, y = small(64)
    for step in range(9):
        size = 61 + step % 4  # all of which are rounded up to 64
        points = two_points(engine, 0.01 * step)[-count:]
        batch = x[:size] * (1 + step / 10), y[:size]
        found = engine.clipped_sum(points, [batch], halved, remainder=remainder)
        assert_same(found, launched(engine, points, *batch, remainder=remainder))
        assert len(found.losses) == len(found.norms) == size
        engine.flat.vector.add_(0.01 * torch.randn_like(engine.flat.vector))
    assert replay_counts(engine) == [7]
    assert replaying() == 2


def test_micro_batches_of_one_size_share_a_recording(replaying):
    engine, points, x, y = small(48)
    for _ in range(2):
        pieces = list(zip(x.split(16), y.split(16), strict=True))
        found = engine.clipped_sum(points, pieces, halved, remainder=True)
        assert_same(found, launched(engine, points, x, y, remainder=True))
    assert replay_counts(engine) == [4]


def test_each_size_and_query_has_a_recording_of_its_own(replaying):
    engine, points, x, y = small(40)
    for _ in range(5):
        for size in (40, 9, 33):  # 33 and 40 are rounded up to 36 and 40
            engine.clipped_sum(points, [(x[:size], y[:size])], halved)
        engine.clipped_sum([Point(1.0, engine.flat.vector)], [(x, y)], halved)
    assert replay_counts(engine) == [3] * 4
    for training in ([False, False], [True, False]):  # of the model and of a part of it
        engine.model.train(training[0]).layers.train(training[1])
        engine.clipped_sum(points, [(x, y)], halved)
        assert replay_counts(engine) == [3] * 4


def test_of_many_sizes_some_are_launched(replaying, monkeypatch):
    monkeypatch.setattr(replay, "MOST_SIZES", 2)
    engine, points, x, y = small(9)
    for _ in range(4):
        for size in (9, 5, 3):
            batch = x[:size], y[:size]
            assert_same(engine.clipped_sum(points, [batch], halved), launched(engine, points, *batch))
    assert replay_counts(engine) == [2, 2]


def test_what_is_given_out_is_not_written_again(replaying):
    engine, points, x, y = small(12)
    for _ in range(3):
        first = engine.clipped_sum(points, [(x, y)], halved, remainder=True)
    before = [t.clone() for t in first]
    engine.clipped_sum(points, [(2 * x, y)], halved, remainder=True)
    assert replay_counts(engine) == [2]
    assert all(torch.equal(t, kept) for t, kept in zip(first, before, strict=True))


@pytest.mark.parametrize("value", [torch.nan, 1e38])
@pytest.mark.parametrize("which", [[3], [0], [0, 15]], ids=str)
def test_broken_samples_add_nothing_to_replays(replaying, value, which):
    engine, points, x, y = small(17)  # which is rounded up
    for _ in range(5):
        good = engine.clipped_sum(points, [(x, y)], halved)
    broken = x.clone()
    broken[which] = value
    found = engine.clipped_sum(points, [(broken, y)], halved, remainder=True)
    assert_same(found, launched(engine, points, broken, y, remainder=True))
    assert_same(engine.clipped_sum(points, [(x, y)], halved), good)
    assert replay_counts(engine) == [5]


def test_doubtful_norms_are_refined_though_passes_are_replayed(replaying, monkeypatch):
    engine, points, x, y = small(17)
    for _ in range(5):
        before = engine.clipped_sum(points, [(x, y)], halved)
    refined = []
    refine = Tape.refine
    monkeypatch.setattr(Tape, "refine", lambda tape: (refined.append(tape), refine(tape)))
    monkeypatch.setattr("dpbench.gradients.tape.CANCELLING", 10.0)  # so that every norm is doubtful
    assert_same(engine.clipped_sum(points, [(x, y)], halved), before)
    assert len(refined) == 1


def test_a_model_that_changes_otherwise_than_by_its_parameters_is_refused(replaying, monkeypatch):
    engine, points, x, y = small(16)
    replayed = Again.replay

    def stale(self):
        """What was recorded goes on with the number that there was."""
        now, engine.model.factor = engine.model.factor, 1.0
        replayed(self)
        engine.model.factor = now

    monkeypatch.setattr(Again, "replay", stale)
    for _ in range(5):
        engine.clipped_sum(points, [(x, y)], halved)
    engine.model.factor = 2.0
    assert_same(engine.clipped_sum(points, [(x, y)], halved), launched(engine, points, x, y))
    with pytest.raises(UserError, match="replaying the model's passes gives other gradients"):
        engine.clipped_sum(points, [(x, y)], halved)


def test_a_replay_that_differs_once_is_launched_and_the_next_is_compared(replaying, monkeypatch):
    """As where a sample is on the edge of a ReLU."""
    engine, points, x, y = small(16)
    replayed, off, compared = Again.replay, iter([]), []
    deviates = replay.Replay.deviates_from
    monkeypatch.setattr(replay.Replay, "deviates_from", lambda *both: compared.append(None) or deviates(*both))

    def otherwise(self):
        replayed(self)
        for output in self.outputs:
            if output.dtype.is_floating_point:
                output.mul_(next(off, 1.0))

    monkeypatch.setattr(Again, "replay", otherwise)
    for number in range(1, 10):
        off = iter([1.5]) if number == 4 + 2 else iter([])  # the fourth replay, which is compared
        assert_same(engine.clipped_sum(points, [(x, y)], halved), launched(engine, points, x, y))
    assert replay_counts(engine) == [7]
    assert len(compared) == 3  # the first, the fourth and the fifth


class Annealed(Counting):
    """Counts its passes in a buffer, on which its outputs depend a little."""

    def __init__(self):
        super().__init__()
        self.register_buffer("passes", torch.zeros(()))

    def forward(self, x):
        if self.training:
            self.passes += 1
        return super().forward(x) * (1 + 1e-6 * self.passes)


class Replacing(Annealed):
    """Puts another tensor in the place of that buffer instead."""

    def forward(self, x):
        self.passes = self.passes + 1
        return Counting.forward(self, x) * (1 + 1e-6 * self.passes)


@pytest.mark.parametrize(
    ("kind", "broken", "replays"),
    [(Annealed, (), [7]), (Annealed, (5, 6), [7]), (Replacing, (), [])],
    ids=["whole", "broken", "replacing"],
)
def test_a_models_buffers_count_a_batch_once(replaying, monkeypatch, kind, broken, replays):
    """Passes count for nothing that are compared with a replay, or recorded, or made again after one."""
    engine, points, x, y = small(16, kind())
    twin, *_ = small(16, kind())
    monkeypatch.setattr(twin, "_replays", type("Never", (), {"of": lambda *_: None})())
    for number in range(9):
        x[0] = torch.nan if number in broken else 1.0
        found, want = (one.clipped_sum(points, [(x, y)], halved) for one in (engine, twin))
        assert_same(found, want)
        assert engine.model.passes == twin.model.passes == 2 * (number + 1)  # at two iterates each
    assert replay_counts(engine) == replays


def test_what_is_recorded_while_things_are_tried_out_is_not_replayed_in_training(replaying):
    engine, points, x, y = small(16)
    with engine.undisturbed():
        for _ in range(5):
            engine.clipped_sum(points, [(x, y)], halved)
        assert replay_counts(engine) == [3]
    assert replay_counts(engine) == []


def test_smaller_passes_share_the_memory_of_the_largest(replaying, monkeypatch):
    rooms = iter([True, False])
    monkeypatch.setattr(replay, "_room", lambda: next(rooms))
    engine, points, x, y = small(40)
    for size in (20, 12, 40):
        for _ in range(3):
            engine.clipped_sum(points, [(x[:size], y[:size])], halved)
    assert replay_counts(engine) == [1, 1]  # the last one is larger, and finds no room


def test_what_is_replayed_otherwise_from_the_beginning_is_launched(replaying, monkeypatch):
    replayed = []

    def otherwise(self):
        replayed.append(self)
        for output in self.outputs:
            output.zero_()

    monkeypatch.setattr(Again, "replay", otherwise)
    engine, points, x, y = small(16)
    for _ in range(5):
        assert_same(engine.clipped_sum(points, [(x, y)], halved), launched(engine, points, x, y))
    assert len(replayed) == len(set(map(id, replayed))) > 0  # no graph twice
    assert replay_counts(engine) == []  # their memory is free again


def test_what_cannot_be_recorded_is_launched(replaying, monkeypatch):
    def failing(self, work, place):
        raise RuntimeError("operation not permitted when stream is capturing")

    engine, points, x, y = small(16)
    for _ in range(5):
        engine.clipped_sum(points, [(x[:12], y[:12])], halved)
    assert replay_counts(engine) == [3]
    monkeypatch.setattr(Again, "__init__", failing)
    for _ in range(5):
        assert_same(engine.clipped_sum(points, [(x, y)], halved), launched(engine, points, x, y))
    assert replay_counts(engine) == []  # nor does the recording before it hold memory any more


def test_models_that_draw_are_launched_batch_by_batch_as_they_are(replaying):
    class Dropping(Counting):
        def forward(self, x):
            return nn.functional.dropout(super().forward(x), 0.5, self.training)

    engine, points, x, y = small(17, Dropping())
    for _ in range(5):
        engine.clipped_sum(points, [(x, y)], halved)
    assert replay_counts(engine) == []
    assert 18 not in engine.model.rows


def test_micro_batches_of_one_that_do_not_fit_are_told(replaying, monkeypatch):
    engine, points, x, y = small(3)
    engine.clipped_sum(points, [(x, y)], halved)

    def full(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(Replays, "of", full)
    with pytest.raises(torch.OutOfMemoryError):
        engine.clipped_sum(points, [(x, y)], halved)


def test_a_run_in_which_passes_are_replayed_is_that_in_which_they_are_launched(replaying, tmp_path):
    from resuming import TINY, carried_out, outcome

    config = composed(*TINY)
    config.keep_model = True
    (folder,), _ = carried_out(config, tmp_path / "replayed")
    assert replaying() > 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dpbench.gradients.per_sample.replayable", lambda way, inputs: False)
        (other,), _ = carried_out(config, tmp_path / "launched")
    for mine, its in zip(outcome(folder)["metrics"], outcome(other)["metrics"], strict=True):
        assert mine == pytest.approx(its, rel=1e-4)
