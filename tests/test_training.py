import hashlib
import math
import random
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import assembled, composed, trained

from dpbench.clip import ThresholdClip
from dpbench.config import config_hash
from dpbench.devices import choose_device
from dpbench.errors import UserError
from dpbench.optim import SGD
from dpbench.randomness import STREAMS, generator, global_stream
from dpbench.schedules import Constant, Cosine, InverseSqrt, SqrtDecay
from dpbench.step import Seen
from dpbench.training.assemble import assemble, draws_of
from dpbench.training.budget import budget, open_ledger
from dpbench.training.evaluation import evaluate
from dpbench.training.loop import DivergedError, Progress, _require_finite
from dpbench.training.micro_batch import measured_fit


@pytest.mark.parametrize("algo", ["dpsgd", "dpadam", "doppler", "disk"])
def test_digits_are_learned_within_the_budget(algo):
    metrics = trained(f"algo={algo}", "eps=8", "privacy.accountant=rdp", "evaluation.every_epochs=10").metrics
    assert metrics[-1].test_accuracy > 0.88
    assert metrics[-1].test_accuracy > metrics[0].test_accuracy - 0.03
    assert 7.9 < metrics[-1].eps <= 8
    assert [m.eps for m in metrics] == sorted(m.eps for m in metrics)


@pytest.mark.parametrize(
    "overrides",
    [
        ("precision=bfloat16", "epochs=10"),
        ("augmentation=crop_flip", "augmentation.copies=2", "augmentation.crop=1", "augmentation.flip=false"),
        ("model=wrn_16_4", "model.width=1", "model.depth=10", "optim=adam", "epochs=3", "channels_last=true"),
    ],
)
def test_variants_of_the_engine_learn_digits(overrides):
    metrics = trained(
        "algo=disk", "eps=8", "privacy.accountant=rdp", "evaluation.every_epochs=null", *overrides
    ).metrics
    assert metrics[-1].test_accuracy > (0.4 if "epochs=3" in overrides else 0.75)


def test_mixtures_with_large_weights_are_no_wrong_gradients_in_half_precision():
    """c = 90: what bfloat16 rounds is in proportion to the two gradients, not to their small difference."""
    weights = ("algo.kappa=0.1", "algo.gamma=0.1", "precision=bfloat16")
    metrics = trained("algo=disk", *weights, "eps=8", "privacy.accountant=rdp", "epochs=12").metrics
    assert math.isfinite(metrics[-1].test_loss)


def test_memory_layout_changes_a_run_by_no_more_than_rounding():
    settings = ["model=wrn_16_4", "model.width=1", "model.depth=10", "batch_size=64", "epochs=0.1"]
    plain = trained(*settings).vector
    last = trained(*settings, "channels_last=true").vector
    torch.testing.assert_close(plain, last, rtol=0, atol=1e-4)


def test_real_images_are_learned_under_privacy(data_root):
    metrics = trained(
        "dataset=mnist",
        "algo=disk",
        "eps=8",
        "privacy.accountant=rdp",
        "batch_size=250",
        "epochs=0.3",
        root=data_root("mnist"),
    ).metrics
    assert metrics[-1].test_accuracy > 0.75
    assert metrics[-1].eps <= 8


def test_less_budget_means_more_noise_and_infinity_none():
    multipliers = [budget(composed(f"eps={eps}", "privacy.accountant=rdp")).noise_multiplier for eps in (1, 8, "inf")]
    assert multipliers[0] > multipliers[1] > multipliers[2] == 0


@pytest.mark.usefixtures("shared_streams")
def test_a_run_without_noise_spends_infinity_and_differs_by_clipping():
    metrics, clipped, _ = trained("eps=inf", "epochs=2")
    free = trained("eps=inf", "clip=none", "epochs=2").vector
    assert metrics[-1].eps == math.inf
    assert not torch.equal(clipped, free)


SHORT = ("epochs=2", "eps=4", "privacy.accountant=rdp")


@cache
def of_dpsgd():
    return trained(*SHORT, "micro_batch=1000").vector


@pytest.mark.parametrize(
    ("overrides", "same"),
    [
        (("algo=doppler", "filter=none"), True),
        (("algo=doppler", "filter=sgd"), True),
        (("algo=disk", "algo.kappa=1"), True),
        (("algo=dp_pmlf", "algo.length=1", "filter=none"), True),
        (("algo=dp_pmlf", "algo.decay=0", "filter=none"), True),
        (("algo=dp_pmlf_released", "algo.length=1", "filter=none"), True),
        (("noise=step_size",), True),
        (("noise=decay", "noise.decay=1"), True),
        (("threshold=decay", "threshold.decay=1"), True),
        (("averaging=exponential",), True),
        (("record_coordinates=5",), True),
        (("micro_batch=1000",), True),
        (("algo=doppler",), False),
        (("algo=disk",), False),
        (("algo=dp_pmlf", "filter=none"), False),
        (("seed=1",), False),
    ],
)
@pytest.mark.usefixtures("shared_streams")
def test_special_cases_are_dpsgd_bit_for_bit(overrides, same):
    options = (*SHORT, *(() if any("micro_batch" in o for o in overrides) else ("micro_batch=1000",)))
    other = trained(*options, *overrides).vector
    assert torch.equal(of_dpsgd(), other) is same


def test_runs_of_one_seed_share_neither_noise_nor_samples():
    device = torch.device("cpu")
    noise, samples, views = [], [], []
    for eps in (1, 8):
        config = composed(f"eps={eps}")
        parts = assemble(config, device, 1.0, open_ledger(config, 1.0))
        noise.append(torch.randn(1000, generator=parts.step.noise_source.generator))
        samples.append(draws_of(config, device).fill(torch.empty(1000)))
        progress = Progress.start(config, config.dataset.load(Path("nowhere"), download=False))
        views.append(torch.rand(1000, generator=progress.augmenting))
    for first, second in (noise, samples, views):
        assert abs(float(torch.corrcoef(torch.stack([first, second]))[0, 1])) < 5 / math.sqrt(1000)


def test_doppler_without_a_filter_is_the_run_of_dpsgd():
    assert config_hash(composed("algo=doppler", "filter=none")) == config_hash(composed("algo=dpsgd"))


def test_a_run_repeats_itself_exactly():
    first, x, _ = trained(*SHORT, "algo=disk")
    second, y, _ = trained(*SHORT, "algo=disk")
    assert torch.equal(x, y)
    assert [m.test_loss for m in first] == [m.test_loss for m in second]


def test_learning_rate_follows_the_schedule():
    metrics = trained(
        "epochs=1", "eps=inf", "schedule=inverse_sqrt", "optim.lr=2.0", "evaluation.every_steps=1"
    ).metrics
    assert [m.lr for m in metrics] == pytest.approx([2 / math.sqrt(20 + t) for t in range(len(metrics))])


def test_evaluations_come_when_asked():
    def steps(*overrides):
        return [m.step for m in trained("eps=inf", "batch_size=100", *overrides).metrics]

    assert steps("epochs=2") == [14, 28, 29]
    assert steps("epochs=1", "evaluation.every_steps=6") == [6, 12, 15]
    assert steps("epochs=1", "evaluation.every_epochs=null") == [15]


def test_a_line_has_nine_digits_and_all_of_eps_and_accuracy():
    """Float32 numbers with neighbours stay apart, as do infinities and what is no number."""
    (metrics, *_) = trained("epochs=1", "eps=inf", "evaluation.every_epochs=null").metrics
    close = [np.float32(2.3), np.nextafter(np.float32(2.3), np.float32(3))]
    odd = {"eps": 1 / 3, "test_loss": math.inf, "gradient_norm": math.nan, "epoch": 2 / 3, "test_accuracy": 2 / 3}
    lines = [replace(metrics, train_loss=float(loss), **odd).as_dict() for loss in close]
    assert [line["train_loss"] for line in lines] == [2.29999995, 2.30000019]
    assert [np.float32(line["train_loss"]) for line in lines] == close
    for line in lines:
        assert (line["eps"], line["epoch"], line["test_accuracy"]) == (1 / 3, 0.666666667, 2 / 3)
        assert line["test_loss"] == math.inf
        assert math.isnan(line["gradient_norm"])


def test_norms_in_the_metrics_are_those_of_the_closed_form():
    """A softmax's gradient is (p - e_y) x^T and p - e_y; the parameters stay where they are."""
    still = ("model=linear", "batch_size=1437", "epochs=2", "eps=inf", "optim.lr=1e-30", "threshold.norm=4")
    metrics, vector, _ = trained(*still)
    config = composed(*still)
    inputs, labels = config.dataset.load(Path("nowhere"), download=False).train.take(slice(None))
    x, weight, bias = inputs.flatten(1).double(), vector[:640].view(10, 64).double(), vector[640:].double()
    residual = (x @ weight.T + bias).softmax(1) - torch.eye(10, dtype=torch.float64)[labels]
    norms = residual.norm(dim=1) * (x.square().sum(1) + 1).sqrt()
    above = (norms > 4).double().mean()
    assert 0.1 < above < 0.9
    assert [m.gradient_norm for m in metrics] == pytest.approx([float(norms.mean())] * 2, rel=1e-6)
    assert [m.above_threshold for m in metrics] == pytest.approx([float(above)] * 2, abs=1e-12)
    assert [m.threshold for m in metrics] == [4, 4]


def test_norms_in_the_metrics_are_of_the_samples_since_the_last_evaluation():
    config = composed("dataset=digits")
    progress = Progress.start(config, config.dataset.load(Path("nowhere"), download=False))
    assert all(map(math.isnan, progress.take_means()))
    progress.add(Seen(torch.tensor([1.0, 2.0]), torch.tensor([3.0, math.inf]), 2.5))
    progress.add(Seen(torch.tensor([6.0]), torch.tensor([1.0]), 0.5))
    progress.add(Seen(torch.zeros(0), torch.zeros(0), 0.1))
    kept = progress.state_dict()
    assert progress.take_means() == (3, 2, 1)  # the one that is not finite has no norm, and is above the threshold
    assert all(map(math.isnan, progress.take_means()))
    progress.load_state_dict(kept)
    assert (progress.take_means(), progress.threshold) == ((3, 2, 1), 0.1)
    progress.add(Seen(torch.tensor([1.0, 1.0]), torch.tensor([2.0, 4.0]), 2.0))
    assert progress.take_means() == (1, 3, 0.5)


def test_evaluation_counts_over_uneven_batches(monkeypatch):
    config = composed("dataset=digits", "model=linear")
    split = config.dataset.load(Path("nowhere"), download=False).test
    model = config.model.build(config.dataset)
    inputs, labels = split.take(slice(None))
    want = (model(inputs).argmax(1) == labels).double().mean()
    monkeypatch.setattr("dpbench.training.evaluation.EVALUATION_BATCH", 77)
    found = evaluate(model, split, 1000)
    assert found.accuracy == pytest.approx(float(want))
    assert found.loss == pytest.approx(
        float(torch.nn.functional.cross_entropy(model(inputs), labels).detach()), rel=1e-5
    )
    assert model.training


def test_evaluation_drops_nothing_out():
    config = composed("dataset=digits", "model=linear")
    split = config.dataset.load(Path("nowhere"), download=False).test
    whole = config.model.build(config.dataset)
    dropping = torch.nn.Sequential(torch.nn.Dropout(0.5), whole)
    assert evaluate(dropping, split, 1000) == evaluate(whole, split, 1000)
    assert dropping.training


def test_numbers_whose_sum_is_no_float_are_finite():
    _require_finite(torch.tensor([3e38, 3e38]), "a parameter", 1)
    for broken in (math.inf, math.nan):
        with pytest.raises(DivergedError, match=r"a parameter is no finite number after 1 step$"):
            _require_finite(torch.tensor([3e38, broken]), "a parameter", 1)


def test_schedules_follow_their_formulas():
    steps = 1000
    assert Constant().factor(7, steps) == 1
    cosine = Cosine(warmup=0.1, floor=0.2)
    assert cosine.factor(0, steps) == pytest.approx(0.01)
    assert cosine.factor(99, steps) == pytest.approx(1)
    assert cosine.factor(100, steps) == pytest.approx(1)
    assert cosine.factor(550, steps) == pytest.approx(0.6)
    assert cosine.factor(999, steps) == pytest.approx(0.2, abs=1e-4)
    assert Cosine(warmup=0.0).factor(0, 1) == 1
    # adp.md 2.4 with T = 11,760: eta_t = 0.1 - r_T sqrt(t), r_T = 9.2214e-4; sums of eta_t in 2.6.
    decay = [0.1 * SqrtDecay().factor(t, 11_760) for t in range(11_760)]
    assert decay[4000] == pytest.approx(0.1 - 9.2214e-4 * math.sqrt(4000), rel=1e-4)
    assert sum(decay) == pytest.approx(392.050, abs=1e-3)
    assert sum(InverseSqrt().factor(t, 11_760) for t in range(11_760)) == pytest.approx(208.235, abs=1e-3)


def test_streams_are_independent_of_each_other_and_derive_from_the_seed():
    cpu = torch.device("cpu")
    draws = {(seed, name): torch.randn(4, generator=generator(seed, name, cpu)) for seed in (0, 1) for name in STREAMS}
    values = list(draws.values())
    assert all(not torch.equal(x, y) for i, x in enumerate(values) for y in values[:i])
    assert torch.equal(draws[0, "noise"], torch.randn(4, generator=generator(0, "noise", cpu)))
    with pytest.raises(ValueError, match="unknown stream"):
        generator(0, "coffee", cpu)


def of_each_generator():
    """Numbers that the global generators of torch, Python and NumPy give, those of the last two in two ways."""
    of_python, of_numpy = [random.gauss(0, 1), random.random()], [np.random.standard_normal(), np.random.random()]
    return [torch.rand(2).tolist(), of_python, of_numpy]


def test_a_global_stream_leaves_the_generators_as_they_were():
    def seed():
        torch.manual_seed(3)
        random.seed(3)
        np.random.seed(3)
        random.gauss(0, 1)  # of a pair, the other one waits
        np.random.standard_normal()

    seed()
    want = of_each_generator()
    seed()
    with global_stream(0, "weights"):
        of_each_generator()
    assert of_each_generator() == want


def test_a_global_stream_seeds_every_generator():
    def drawn(*stream):
        with global_stream(*stream):
            return of_each_generator()

    streams = [(0, "model", "a"), (1, "model", "a"), (0, "weights", "a"), (0, "model", "b")]
    assert drawn(*streams[0]) == drawn(*streams[0])
    for one, *others in zip(*map(drawn, *zip(*streams, strict=True)), strict=True):
        assert one not in others


def test_generators_of_one_global_stream_draw_different_numbers():
    """All three are Mersenne twisters: of one seed they give the same words."""
    with global_stream(0, "model"):
        torch.rand(1)  # the state is made anew with the first number
        random.random()
        np.random.random()
        of_torch = set(torch.get_rng_state()[24 : 24 + 8 * 624].view(torch.int64).tolist())
        of_python, of_numpy = set(random.getstate()[1][:-1]), set(np.random.get_state()[1].tolist())
    assert min(map(len, (of_torch, of_python, of_numpy))) > 600
    assert len(of_torch | of_python | of_numpy) == len(of_torch) + len(of_python) + len(of_numpy)


def micro_batch_of(*overrides):
    parts = assembled(composed(*overrides))
    return parts.micro_batch


def test_micro_batch_on_a_cpu_depends_on_its_memory_alone(monkeypatch):
    sizes = []
    for total in (2**20, 2**27, 2**40):
        monkeypatch.setattr("dpbench.training.micro_batch.total_memory", lambda _, total=total: total)
        sizes.append(micro_batch_of("dataset=cifar10", "model=cnn5"))
    assert sizes[0] == 1 < sizes[1] < sizes[2] == 128


def test_small_models_take_more_samples_at_once_on_a_cpu_and_large_ones_do_not():
    small, larger = micro_batch_of("model=linear"), micro_batch_of("model=mlp")
    assert small > 2 * larger > 2 * 1024
    assert micro_batch_of("model=linear", "algo=disk") == small // 2
    assert micro_batch_of("dataset=cifar10", "model=cnn5") == 128


def test_micro_batch_counts_views_and_iterates(monkeypatch):
    monkeypatch.setattr("dpbench.training.micro_batch.total_memory", lambda _: 2**28)
    one = micro_batch_of("dataset=cifar10", "model=cnn5")
    two_points = micro_batch_of("dataset=cifar10", "model=cnn5", "algo=disk")
    four_views = ("augmentation=crop_flip", "augmentation.copies=4")
    views = micro_batch_of("dataset=cifar10", "model=cnn5", *four_views)
    assert two_points == pytest.approx(one / 2, abs=1)
    assert views <= one / 4 + 1
    monkeypatch.setattr("dpbench.training.micro_batch.total_memory", lambda _: 2**40)
    assert micro_batch_of("dataset=cifar10", "model=cnn5", *four_views) == 128 // 4


def test_micro_batch_of_views_as_large_as_the_model_takes_them_is_that_of_the_images(monkeypatch):
    monkeypatch.setattr("dpbench.training.micro_batch.total_memory", lambda _: 2**32)
    model = ("dataset=cifar10", "model=resnet18", "model.stem=small", "model.image_size=40")
    want = micro_batch_of(*model)
    assert want < 128
    assert micro_batch_of(*model, "augmentation=autoaugment") == want
    two_views = ("augmentation=autoaugment", "augmentation.copies=2")
    assert micro_batch_of(*model, *two_views) == pytest.approx(want / 2, abs=1)  # the weights are there once


@pytest.mark.parametrize(("base", "each"), [(10**6, 5000), (0, 1), (10**9, 3 * 10**7)])
def test_micro_batch_from_measured_peaks_stays_within_what_is_allowed(base, each):
    allowed = 2 * 10**9
    fitting = measured_fit(lambda count: base + each * count, allowed)
    assert base + each * fitting <= allowed < base + each * (fitting + 1)


def test_micro_batch_is_one_where_nothing_fits():
    assert measured_fit(lambda count: 100 + count, 5) == 1


@pytest.mark.parametrize("privacy", ["poisson", "shuffled"])
def test_passes_are_counted_as_the_sampler_makes_them(privacy):
    """1,437 samples in batches of 1,000: a pass of the shuffled ones takes two steps."""
    config = composed(f"privacy={privacy}", "dataset=digits", "batch_size=1000", "epochs=40")
    assert config.passes_after(config.steps) == pytest.approx(40, abs=1000 / 1437)
    assert config.passes_after(4) == (2 if privacy == "shuffled" else pytest.approx(4000 / 1437))


@pytest.mark.parametrize(("fit", "found"), [(16, 19), (15, 19), (7, 19), (3, 19), (1, 1), (0, 1)])
def test_micro_batch_is_measured_with_fewer_samples_where_memory_runs_out(fit, found):
    def peak(count):
        if count > fit:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return 100 + 10 * count

    assert measured_fit(peak, 299) == found


def test_what_else_goes_wrong_while_memory_is_measured_is_raised():
    def peak(count):
        raise RuntimeError("no such kernel")

    with pytest.raises(RuntimeError, match="no such kernel"):
        measured_fit(peak, 299)


def test_auto_device_is_a_gpu_where_there_is_one():
    assert choose_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")
    assert choose_device("cpu").type == "cpu"


class Reading(SGD):
    """Declares that it reads the norm of un-noised gradients."""

    def build(self, parameters):
        optimizer = super().build(parameters)
        optimizer.param_groups[0]["unnoised_norm"] = 0.0
        return optimizer


class FeedingBack(ThresholdClip):
    """Declares that un-clipped gradients come back."""

    feeds_back = True


def test_an_own_optimizer_that_reads_what_has_no_noise_is_refused():
    config = replace(composed(), optim=Reading(lr=0.1))
    with pytest.raises(UserError, match=r"optim=.*un-noised gradients, for which no eps holds"):
        assemble(config, torch.device("cpu"), 1.0, open_ledger(config, 1.0))


def test_an_own_clip_that_feeds_back_has_no_proven_eps():
    assert composed().uncertified is None
    assert replace(composed(), clip=FeedingBack()).uncertified is not None


@pytest.mark.parametrize(
    ("share", "steps", "warm"), [(0.05, 25, 2), (0.1, 21, 3), (0.05, 3, 1), (0.25, 10, 3), (0.07, 100, 7)]
)
def test_a_part_of_a_step_of_warm_up_is_a_whole_one(share, steps, warm):
    factors = [Cosine(warmup=share).factor(step, steps) for step in range(steps)]
    assert factors[:warm] == pytest.approx([(step + 1) / warm for step in range(warm)])
    assert factors[warm] == 1
    assert all(later < earlier for earlier, later in zip(factors[warm:], factors[warm + 1 :], strict=False))


def test_each_source_of_a_run_draws_from_the_stream_of_its_name():
    """Else the noise would follow from which samples were drawn, and records would not be those of other versions."""
    config = composed("seed=3", "augmentation=none")
    parts = assembled(config, noise_multiplier=1.0)
    progress = Progress.start(config, config.dataset.load(Path("nowhere"), download=False))
    sources = {
        "noise": parts.step.noise_source.generator,
        "side": parts.step.side_source.generator,
        "sampling": progress.draws.generator,
        "augmentation": progress.augmenting,
    }
    for name, found in sources.items():
        digest = hashlib.sha256(f"3/{name}/{config_hash(config)}".encode()).digest()
        seed = int.from_bytes(digest[:8], "big", signed=True)
        assert torch.equal(found.get_state(), torch.Generator().manual_seed(seed).get_state()), name
