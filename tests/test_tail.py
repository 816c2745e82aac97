"""Where noise of finite precision ends, and what is said of it."""

import json
import math
import re
from dataclasses import replace

import numpy as np
import pytest
import short_noise
import torch
from cli import ROOT, only_record, run
from closed_form_references import gaussian_eps
from helpers import composed
from scipy.stats import norm

from dpbench.config import RunConfig
from dpbench.privacy import epsilon
from dpbench.privacy.correlation import Tree
from dpbench.privacy.gaussian import SeededGaussian
from dpbench.privacy.guarantee import shown, tail_of
from dpbench.privacy.plan import Part, Plan, Release
from dpbench.privacy.sampling import CYCLIC, FIXED_SIZE, POISSON
from dpbench.privacy.tail import COORDINATES, END, END_BEFORE, END_ON_GPU_BEFORE, LONGER_SINCE, probability_beyond
from dpbench.report.run_records import _configuration
from dpbench.training.budget import budget, guarantee_of, noise_in_words

SHOWS = "a sample shows for sure"


@pytest.mark.parametrize(("coordinates", "moved"), [(1, 1 / 1.5), (100, 1 / 1.5), (100, 0.2), (4, 1.0)])
def test_the_probability_is_at_least_that_of_numbers_that_noise_alone_never_gives(coordinates, moved):
    """Simulated with noise that ends at 2, a sample moving all of its numbers alike, or one of them."""
    end, rate, runs = 2.0, 0.1, 4_000_000 // coordinates
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(runs * coordinates * 2, generator=generator, dtype=torch.float64)
    noise = noise[noise.abs() <= end][: runs * coordinates].view(runs, coordinates)
    drawn = torch.rand(runs, generator=generator) < rate
    found = probability_beyond(end, [(1, rate, moved)], coordinates=coordinates)
    for spread in {1, coordinates}:
        added = torch.zeros(coordinates, dtype=torch.float64)
        added[:spread] = moved / math.sqrt(spread)
        shown = float((noise + torch.outer(drawn.double(), added) > end).any(1).double().mean())
        of_one = (norm.sf(end - moved / math.sqrt(spread)) - norm.sf(end)) / (norm.cdf(end) - norm.cdf(-end))
        exact = rate * (1 - (1 - of_one) ** spread)
        assert shown == pytest.approx(exact, abs=5 * math.sqrt(exact / runs))
        # Which takes the noise for whole beyond its end, and both spreads together.
        assert exact < found < rate * 5.2 * (1 if coordinates == 1 else coordinates**0.5) * of_one * spread**0.5


@pytest.mark.parametrize("coordinates", [1, 2, 30, 1000])
@pytest.mark.parametrize("end", [2.5, 5.77, END])
def test_no_way_to_spread_a_move_over_coordinates_exceeds_the_probability(coordinates, end):
    """Random moves of a norm, from all in one coordinate to alike in all, by the law that ends there."""
    draws = np.random.default_rng(0)
    for moved in (0.05, 0.5, 1.0, end - 1):
        found = probability_beyond(end, [(1, 1.0, moved)], coordinates=coordinates)
        for power in (0, 1, 3, 10):
            parts = draws.random(coordinates) ** power
            parts *= moved / np.linalg.norm(parts)
            assert (norm.sf(end - parts) - norm.sf(end)).sum() <= found


@pytest.mark.parametrize("coordinates", [1, 1e9])
def test_a_move_to_the_end_of_the_noise_shows_for_sure(coordinates):
    """So it counts from one standard deviation before it, where the bound for many coordinates holds no more."""
    for beyond in (-0.99, 0.0, 3.0):
        assert probability_beyond(END, [(1, 0.25, END + beyond)], coordinates=coordinates) == 0.25
    assert probability_beyond(END, [(1, 0.25, END - 1)], coordinates=1) < 0.25


def test_releases_add_up():
    alike = probability_beyond(END, [(1000, 0.01, 1 / 0.3)], coordinates=1e4)
    expected = norm.sf(END - 1 / 0.3) + norm.pdf(END) / 0.3 * 100
    assert alike == pytest.approx(1000 * 0.01 * expected, rel=1e-9)
    halves = [(400, 0.01, 1 / 0.3), (600, 0.01, 1 / 0.3)]
    assert probability_beyond(END, halves, coordinates=1e4) == pytest.approx(alike, rel=1e-12)
    assert probability_beyond(END, [(10, 0.01, math.inf)]) == pytest.approx(0.1)
    assert probability_beyond(math.inf, [(1000, 0.01, 3.0)]) == 0.0


def test_a_replaced_sample_moves_twice_as_far_as_one_that_is_added():
    release = [(100, 0.01, 0.5)]
    added, replaced = (shown(scheme, release, correlated=None, delta=1e-5) for scheme in (POISSON, FIXED_SIZE))
    assert added == probability_beyond(END, [(100, 0.01, 2.0)])
    assert replaced == probability_beyond(END, [(100, 0.01, 4.0)])


@pytest.mark.parametrize("moved", [0.3, 2.0, 5.0])
def test_correlated_noise_is_one_release_that_moves_as_far_as_its_eps_says(moved):
    eps = gaussian_eps(moved, 1e-5)
    steps = [(400, 0.1, 7.0), (200, 0.1, 9.0)]
    expected = probability_beyond(END, [(1, 1.0, moved)], coordinates=600 * COORDINATES)
    assert shown(CYCLIC, steps, correlated=eps, delta=1e-5) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(("beside", "told"), [(5.0, False), (0.12, True)])
def test_what_is_released_beside_the_sums_counts_with_its_own_noise(beside, told):
    plan = Plan.of([Release(0.01, 5.0, (Part("histogram of norms", beside),))] * 100)
    assert (tail_of(plan, 50.0, 1e-5) is not None) == told


@pytest.mark.parametrize("count", [2**10, 2**20 + 3])
def test_no_number_in_single_precision_is_beyond_the_end(count):
    """The largest that the formulas can give: both uniform numbers that make a normal one at their least."""
    largest_of_torch = math.sqrt(2 * 24 * math.log(2))
    assert math.sqrt(2) * largest_of_torch == pytest.approx(END, abs=0.005)
    assert largest_of_torch == pytest.approx(END_BEFORE, abs=0.005)
    assert math.sqrt(2 * 32 * math.log(2)) == pytest.approx(END_ON_GPU_BEFORE, abs=0.05)
    noise = SeededGaussian(torch.Generator().manual_seed(0)).fill(torch.empty(count))
    assert float(noise.abs().max()) < END + 0.05


@pytest.mark.parametrize(("eps", "more"), [(8, False), (128, True)])
@pytest.mark.parametrize("secure", [False, True])
def test_it_is_said_where_it_is_more_than_delta_and_noise_has_a_seed(eps, secure, more):
    config = composed(
        "dataset=mnist",
        "algo=dpsgd",
        "batch_size=1000",
        "epochs=10",
        "privacy.accountant=rdp",
        f"eps={eps}",
        f"privacy.secure_noise={secure}",
    )
    found = budget(config)
    told = guarantee_of(config, found), noise_in_words(config, found)
    assert [SHOWS in text for text in told] == [more and not secure] * 2
    assert ("Whoever has or guesses the seed" in told[0]) == (not secure)


def test_the_page_on_privacy_has_the_probabilities_of_its_example():
    """Read from the page: DP-SGD, ten passes over MNIST at batch size 1,000, with the tightest account."""
    page = " ".join((ROOT / "docs" / "privacy.md").read_text().split())
    (said,) = re.findall(
        r"over MNIST at batch size 1,000 that has a probability of at most (\S+) at eps=(\S+), of (\S+) at (\d+), and "
        r"from about (\d+) on of more than delta",
        page,
    )
    (before,) = re.findall(
        r"for DP-SGD on MNIST at eps=8, with the CNN of (\S+) parameters and a delta of (\S+), with a probability of "
        r"(\S+) to (\S+) \(",
        page,
    )
    delta = 60_000**-1.1
    assert f"{delta:.1e}".replace("e-0", "e-") == before[1]

    def settings(eps: float) -> RunConfig:
        return composed("dataset=mnist", "algo=dpsgd", "batch_size=1000", "epochs=10", f"eps={eps}")

    def beyond(eps: float) -> float:
        multiplier = budget(settings(eps)).noise_multiplier
        return shown(POISSON, [(600, 1 / 60, multiplier)], correlated=None, delta=delta)

    first, at_first, second, at_second, least = map(float, said)
    assert float(f"{beyond(at_first):.0e}") == first
    assert float(f"{beyond(at_second):.0e}") == second
    assert beyond(least - 1) < delta < beyond(least + 1)

    config = settings(8)
    coordinates = sum(parameter.numel() for parameter in config.model.build(config.dataset).parameters())
    assert before[0] == f"{coordinates:,}"
    in_ten_passes = [10 * one for one in short_noise.shown(1 / budget(config).noise_multiplier, coordinates)]
    assert [f"{one:.1e}".replace("e-0", "e-") for one in in_ten_passes] == list(before[2:])


@pytest.fixture(scope="module")
def record(tmp_path_factory):
    """Of a run at an eps at which noise that ends at 8.16 keeps delta."""
    folder = tmp_path_factory.mktemp("run")
    assert run(folder, "algo=dpsgd", "eps=40").code == 0
    return only_record(folder)


@pytest.mark.parametrize(
    ("origin", "told"),
    [
        ({}, None),
        ({"seeded_noise": None}, None),
        ({"seeded_noise": None, "started": f"{LONGER_SINCE}T00:24:54+00:00"}, None),
        ({"seeded_noise": None, "started": "2026-11-24T22:37:17+00:00"}, "ended at 5.77 standard deviations"),
        ({"seeded_noise": None, "started": "2026-11-24T22:37:17+00:00", "cuda": "13.0"}, "ended at 6.7 standard"),
    ],
    ids=["now", "without", "since", "before", "on a GPU"],
)
def test_records_of_runs_whose_noise_ended_earlier_say_so(record, origin, told):
    path = record / "provenance.json"
    before = path.read_text()
    changed = {**json.loads(before), **origin}
    path.write_text(json.dumps({key: value for key, value in changed.items() if value is not None}))
    try:
        text = _configuration(record.parent.name, [record], (), {}, ()).guarantee
    finally:
        path.write_text(before)
    assert SHOWS not in text
    assert ("eeded noise ended" in text) == (told is not None)
    assert told is None or told in text


def test_a_run_of_correlated_noise_says_how_far_all_of_its_steps_together_move():
    """By brute force: the sum of the columns of C in which a sample takes part, over z."""
    steps, epoch, delta = 16, 4, 1e-5
    strategy = Tree().strategy(steps, epoch)
    longest = max(np.linalg.norm(strategy[:, place::epoch].sum(1)) for place in range(epoch))
    z = longest / 4.5
    plan = Plan.of([Release(1 / epoch, z)] * steps, CYCLIC, epoch, Tree())
    eps = epsilon(plan, delta, "gdp", eps_scale=30.0)
    told = tail_of(plan, eps, delta)
    assert told is not None
    assert f"up to {norm.sf(END - 4.5):.1g}," in told
    assert tail_of(replace(plan, correlation=None), eps, delta) is None  # steps that move by less, one by one
