"""What only a GPU shows: that nothing waits for it, that its memory may run out, and runs on it.

Gradients are compared with plain passes on a GPU by the tests of gradients, with DPBENCH_TESTS_DEVICE=cuda.
"""

from contextlib import nullcontext

import pytest
import torch
from cli import only_record, read, read_metrics, records, run
from gradient_checks import DEVICE, assert_exact, restricted
from helpers import ALGORITHMS
from replay_checks import halved, replay_counts, two_points
from resuming import STEPS, carried_out, full, outcome, resumed_at, stopped, tiny, whole
from torch import nn

from dpbench import cache
from dpbench.clip import ThresholdClip
from dpbench.data import ImageDataset
from dpbench.devices import prepare_device
from dpbench.errors import UserError
from dpbench.gradients import FlatParameters, PerSampleGradients
from dpbench.gradients.way import Books
from dpbench.models import CNN5, Model, SmallCNN, WideResNet
from dpbench.privacy.gaussian import SeededGaussian
from dpbench.query import Point
from dpbench.training.losses import per_sample_loss

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")

GPU = torch.device("cuda")
# A model with convolutions that reads digits.
NARROW = ("model=wrn_16_4", "model.width=1", "model.depth=10")
CIFAR = ImageDataset(name="cifar10", channels=3, height=32, width=32, classes=10, mean=[0.0] * 3, std=[1.0] * 3)
MNIST = ImageDataset(name="mnist", channels=1, height=28, width=28, classes=10)


@pytest.fixture(autouse=True)
def _prepared() -> None:
    torch.manual_seed(0)
    prepare_device(GPU)


def engine_of(settings: Model, dataset: ImageDataset, batch: int, *, half: bool = False):
    """A model's gradients, already compared with autograd's, and a batch."""
    model = settings.build(dataset).to(GPU)
    autocast = torch.bfloat16 if half else None
    flat = FlatParameters(model)
    engine = PerSampleGradients(model, flat, per_sample_loss, autocast=autocast)
    x = torch.rand(batch, dataset.channels, dataset.height, dataset.width, device=GPU)
    return engine, x, torch.randint(10, (batch,), device=GPU)


MODELS = {
    "cnn5": (CNN5(), MNIST),
    "small cnn": (SmallCNN(), MNIST),
    "wrn": (WideResNet(depth=10, width=1), CIFAR),
    "wrn, standardised weights": (WideResNet(depth=10, width=1, weight_standardised=True), CIFAR),
}


@pytest.mark.parametrize("kind", ["gram", "hold"])
@pytest.mark.parametrize("half", [False, True], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", MODELS)
def test_nothing_within_a_micro_batch_waits_for_the_gpu(name, half, kind):
    engine, x, y = engine_of(*MODELS[name], 32, half=half)
    restricted(engine, {kind})
    points, clip = two_points(engine), ThresholdClip()
    with torch.no_grad():
        for _ in range(2):
            engine.record(points, x, y).norms()
        torch.cuda.set_sync_debug_mode("error")
        try:
            tape = engine.record_by(Books(1), points, x, y)
            total = tape.weighted_sum(clip.factors(tape.norms(), 0.5))
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert total.isfinite().all()


def test_a_call_that_waits_for_the_gpu_is_seen():
    torch.cuda.set_sync_debug_mode("error")
    try:
        with pytest.raises(RuntimeError, match="synchron"):
            torch.ones(3, device=GPU).sum().item()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("name", MODELS)
def test_half_precision_bounds_what_is_added(name):
    engine, x, y = engine_of(*MODELS[name], 12, half=True)
    with torch.no_grad():
        tape = engine.record(two_points(engine), x, y)
        rows = torch.stack([tape.weighted_sum(one.unsqueeze(0)) for one in torch.eye(len(x), device=GPU)])
    torch.testing.assert_close(tape.norms()[0], rows.double().norm(dim=1).float(), rtol=1e-4, atol=0)


def test_masks_of_dropout_are_those_of_all_iterates():
    model = nn.Sequential(nn.Flatten(), nn.Linear(12, 400), nn.Dropout(0.5), nn.Linear(400, 10)).to(GPU)
    engine = PerSampleGradients(model, FlatParameters(model), per_sample_loss)
    x, y = torch.rand(8, 12, device=GPU), torch.randint(10, (8,), device=GPU)
    opposite = [Point(1.0, engine.flat.vector), Point(-1.0, engine.flat.vector)]
    with torch.no_grad():
        for _ in range(2):
            norms = engine.record(opposite, x, y).norms()
            alone = engine.record(opposite[:1], x, y).norms()
    assert float(norms.max()) < 1e-3 * float(alone.min())


def test_micro_batch_that_does_not_fit_is_halved():
    engine, x, y = engine_of(WideResNet(depth=10, width=2), CIFAR, 2048)
    points = [Point(1.0, engine.flat.vector)]

    with torch.no_grad():
        engine.record(points, x[:16], y[:16])
        want = engine.clipped_sum(points, zip(x.split(64), y.split(64), strict=True), halved)
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(2**30 / torch.cuda.get_device_properties(GPU).total_memory)
        try:
            found = engine.clipped_sum(points, [(x, y)], halved)
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
    most = engine.state_dict()["most"]
    assert most is not None
    assert 1 <= most < 2048
    # Convolutions of other sizes round otherwise, which ReLUs pass on; a sample more would be ten times as much.
    assert float((found.total - want.total).norm()) < 3e-3 * float(want.total.norm())
    torch.testing.assert_close(found.norms, want.norms, rtol=1e-3, atol=0)


# Passes that are recorded and replayed


def launching(engine: PerSampleGradients) -> PerSampleGradients:
    """The same engine, which launches every pass."""
    other = PerSampleGradients(engine.model, engine.flat, engine.loss, autocast=engine._autocast)
    other._replays._possible = False
    return other


def assert_same(found, want):
    for have, expected in zip(found, want, strict=True):
        if expected is not None:
            torch.testing.assert_close(have, expected, rtol=1e-5, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("half", [False, True], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("name", MODELS)
def test_replays_are_what_the_passes_compute(name, count, half):
    engine, x, y = engine_of(*MODELS[name], 64, half=half)
    slow, remainder = launching(engine), count == 1
    with torch.no_grad():
        for step in range(8):
            size = 61 + step % 4  # all of which are rounded up to 64
            points = two_points(engine)[-count:]
            batch = x[:size] * (1 + step / 10), y[:size]
            found = engine.clipped_sum(points, [batch], halved, remainder=remainder)
            assert_same(found, slow.clipped_sum(points, [batch], halved, remainder=remainder))
            assert len(found.losses) == len(found.norms) == size
            engine.flat.vector.add_(0.01 * torch.randn_like(engine.flat.vector))
    assert replay_counts(engine) == [6]


def test_each_size_has_a_recording_of_its_own():
    engine, x, y = engine_of(*MODELS["small cnn"], 400)
    slow, points = launching(engine), [Point(1.0, engine.flat.vector)]
    with torch.no_grad():
        for size in (400, 100, 7, 1, 255) * 5:
            batch = x[:size], y[:size]
            assert_same(engine.clipped_sum(points, [batch], halved), slow.clipped_sum(points, [batch], halved))
    assert replay_counts(engine) == [3] * 5


def test_what_is_given_out_is_not_written_again():
    engine, x, y = engine_of(*MODELS["small cnn"], 64)
    points = [Point(1.0, engine.flat.vector)]
    with torch.no_grad():
        for _ in range(3):
            first = engine.clipped_sum(points, [(x, y)], halved)
        before = [t.clone() for t in first if t is not None]
        engine.clipped_sum(points, [(2 * x, y)], halved)
    assert replay_counts(engine) == [2]
    assert all(torch.equal(t, kept) for t, kept in zip([t for t in first if t is not None], before, strict=True))


@pytest.mark.parametrize("value", [torch.nan, 1e30])
@pytest.mark.parametrize("which", [[3], [0], [0, 60]], ids=str)
def test_broken_samples_add_nothing_to_replays(value, which):
    engine, x, y = engine_of(*MODELS["wrn"], 64)
    points = [Point(1.0, engine.flat.vector)]
    good = torch.ones(61, dtype=torch.bool, device=GPU)
    good[which] = False
    broken = x[:61].clone()
    broken[~good] = value
    with torch.no_grad():
        slow = launching(engine)
        for each in (slow, engine, engine, engine, engine):
            before = each.clipped_sum(points, [(x[:61], y[:61])], halved)
        want = slow.clipped_sum(points, [(broken, y[:61])], halved, remainder=True)
        found = engine.clipped_sum(points, [(broken, y[:61])], halved, remainder=True)
        after = engine.clipped_sum(points, [(x[:61], y[:61])], halved)
    assert_same(found, want)
    assert_same(after, before)
    assert replay_counts(engine) == [4]


class Odd(nn.Module):
    """A classifier with a property that recording does not know of."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.factor = kind, 1.0
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(12, 20), nn.Tanh(), nn.Linear(20, 10))
        self.dropout = nn.Dropout(0.5)

    def forward(self, x):
        if self.kind == "waits" and float(x.detach().sum()) > 1e9:
            return self.layers(-x)
        if self.kind == "knows" and torch.cuda.is_current_stream_capturing():
            return self.layers(x) * 2
        out = self.layers(x) * self.factor
        return self.dropout(out) if self.kind == "draws" else out


@pytest.mark.parametrize("kind", ["waits", "waits unnoticed", "knows", "draws", "neither"])
def test_models_that_cannot_be_replayed_are_launched(kind, monkeypatch):
    if kind == "waits unnoticed":  # beforehand, so that recording fails
        monkeypatch.setattr("dpbench.gradients.replay._waiting_refused", nullcontext)
    model = Odd(kind.split()[0]).to(GPU)
    engine = PerSampleGradients(model, FlatParameters(model), per_sample_loss)
    x, y = torch.rand(16, 12, device=GPU), torch.randint(10, (16,), device=GPU)
    points, stream = [Point(1.0, engine.flat.vector)], torch.cuda.current_stream()
    with torch.no_grad():
        for _ in range(6):
            total = engine.clipped_sum(points, [(x, y)], halved).total
        if kind != "draws":
            torch.testing.assert_close(total, launching(engine).clipped_sum(points, [(x, y)], halved).total)
    assert (kind == "neither") == any(count > 1 for count in replay_counts(engine))
    assert engine._replays._possible == (kind in ("neither", "draws"))
    # What recording uses is as it was.
    assert torch.cuda.current_stream() == stream
    state = torch.cuda.get_rng_state()
    drawn = [torch.rand(5, device=GPU) for _ in range(2)]
    assert not torch.equal(*drawn)
    torch.cuda.set_rng_state(state)
    assert torch.equal(drawn[0], torch.rand(5, device=GPU))


def test_a_model_that_changes_otherwise_than_by_its_parameters_is_refused():
    model = Odd("neither").to(GPU)
    engine = PerSampleGradients(model, FlatParameters(model), per_sample_loss)
    x, y = torch.rand(16, 12, device=GPU), torch.randint(10, (16,), device=GPU)

    def steps(count):
        for _ in range(count):
            engine.clipped_sum([Point(1.0, engine.flat.vector)], [(x, y)], halved)

    with torch.no_grad():
        steps(8)
        assert replay_counts(engine) == [6]
        model.factor = 2.0
        with pytest.raises(UserError, match="replaying the model's passes gives other gradients"):
            steps(11)  # of which the replays that are the 16th and the 17th are compared


def test_without_room_for_it_nothing_is_recorded(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (2**20, 2**36))
    engine, x, y = engine_of(*MODELS["wrn"], 64)
    with torch.no_grad():
        for _ in range(5):
            engine.clipped_sum([Point(1.0, engine.flat.vector)], [(x, y)], halved)
    assert replay_counts(engine) == []


def test_noise_is_standard_normal_and_follows_its_generator():
    def drawn(seed, size=2**22):
        return SeededGaussian(torch.Generator(GPU).manual_seed(seed)).fill(torch.empty(size, device=GPU))

    first = drawn(0)
    assert torch.equal(first, drawn(0))
    other = drawn(1)
    # Five standard errors each: for the four numbers together wrong with probability 2e-6.
    error = len(first) ** -0.5
    assert abs(float(first.double().mean())) < 5 * error
    assert abs(float(first.double().square().mean()) - 1) < 5 * 2**0.5 * error
    assert abs(float(first.double().pow(4).mean()) - 3) < 5 * 96**0.5 * error
    assert abs(float((first.double() * other.double()).mean())) < 5 * error


@pytest.mark.skipif(DEVICE.type == "cpu", reason="DPBENCH_TESTS_DEVICE is not cuda")
def test_models_on_a_gpu_are_exact_in_their_own_layout():
    model = WideResNet(depth=10, width=1).build(CIFAR).to(memory_format=torch.channels_last)
    x = torch.rand(3, 3, 32, 32).to(memory_format=torch.channels_last)
    assert_exact(model, x, spread=0.02, points=(1, 2), tolerances={torch.float64: 1e-9})


# Runs


@pytest.mark.parametrize("algo", ALGORITHMS)
def test_every_algorithm_goes_on_where_it_was(algo, tmp_path):
    config = tiny(f"algo={algo}", "device=cuda")
    stopped(config, tmp_path, 7)
    (folder,), said = carried_out(config, tmp_path)
    assert resumed_at(folder) == [6]
    assert f"goes on after step 6 of {STEPS}" in said
    assert outcome(folder) == whole(config, tmp_path)


def test_a_run_with_much_to_remember_goes_on(tmp_path):
    config = full()
    config.device = "cuda"
    stopped(config, tmp_path, 7)
    (folder,), _ = carried_out(config, tmp_path)
    assert resumed_at(folder) == [6]
    assert outcome(folder) == whole(config, tmp_path)


@pytest.mark.parametrize("model", [("model=mlp",), NARROW], ids=["mlp", "wrn"])
def test_runs_are_repeated_bit_for_bit(model, tmp_path):
    made = [run(tmp_path / str(i), "algo=disk", *model, "device=cuda") for i in range(2)]
    first, second = (read_metrics(only_record(outcome.results)) for outcome in made)
    for line in (*first, *second):
        del line["seconds"]
    assert first == second
    assert read(only_record(made[0].results), "provenance.json")["cuda"] == torch.version.cuda


@pytest.mark.parametrize("algo", ["dpsgd", "disk", "dcsgd_e", "doppler"])
def test_digits_are_learned_within_the_budget(algo, tmp_path):
    settings = ("device=cuda", "tracker=disabled", "privacy.accountant=rdp", "evaluation.every_epochs=10")
    outcome = run(tmp_path, f"algo={algo}", "eps=8", settings=settings)
    assert outcome.code == 0, outcome.err
    last = read_metrics(only_record(outcome.results))[-1]
    assert last["test_accuracy"] > 0.85
    assert 7.8 < last["eps"] <= 8


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_seeds_at_once_are_those_of_separate_runs(precision, tmp_path):
    settings = ("-m", "seed=0,1,2", "algo=disk", *NARROW, "device=cuda", f"precision={precision}", "eps=inf")
    fused, apart = (run(tmp_path / str(how), *settings, f"fuse_seeds={how}") for how in ("true", "false"))
    assert (fused.code, apart.code) == (0, 0), fused.err + apart.err
    tolerance = 1e-2 if precision == "bfloat16" else 1e-4
    for got, want in zip(records(fused.results), records(apart.results), strict=True):
        for mine, its in zip(read_metrics(got), read_metrics(want), strict=True):
            assert mine["train_loss"] == pytest.approx(its["train_loss"], rel=tolerance)


def test_micro_batch_is_measured_once(tmp_path, monkeypatch):
    monkeypatch.setenv("DPBENCH_CACHE", str(tmp_path / "cache"))
    written = []
    original = cache.write
    monkeypatch.setattr(cache, "write", lambda kind, *rest: (written.append(kind), original(kind, *rest)))
    for seed in (0, 1):
        outcome = run(tmp_path / "results", *NARROW, "device=cuda", f"seed={seed}")
        assert outcome.code == 0, outcome.err
    assert written.count("micro_batch") == 1
