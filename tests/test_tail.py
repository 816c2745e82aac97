"""Where noise of finite precision ends, and what is said of it."""

import json
import math
import re

import pytest
import torch
from cli import ROOT, only_record, run
from helpers import composed
from scipy.stats import norm

from dpbench.privacy.gaussian import SeededGaussian
from dpbench.privacy.tail import END, END_BEFORE, END_ON_GPU_BEFORE, LONGER_SINCE, probability_beyond
from dpbench.report.run_records import _configuration
from dpbench.training.budget import budget, guarantee_of, in_words

SHOWS = "a sample shows for sure"


def test_the_probability_is_that_of_sums_that_noise_alone_never_gives():
    """Simulated with noise that ends at 2: a sample that is drawn moves its mean by 1/z."""
    end, rate, multiplier, runs = 2.0, 0.1, 1.5, 400_000
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(runs * 2, generator=generator, dtype=torch.float64)
    noise = noise[noise.abs() <= end][:runs]
    drawn = torch.rand(runs, generator=generator) < rate
    shown = float((noise + drawn / multiplier > end).double().mean())
    found = probability_beyond(end, [(1, rate, multiplier)])
    # Which takes the noise for whole beyond its end, so errs upwards by the share that lies there.
    inside = float(norm.cdf(end) - norm.cdf(-end))
    exact = rate * (norm.sf(end - 1 / multiplier) - norm.sf(end)) / inside
    assert shown == pytest.approx(exact, abs=5 * math.sqrt(exact / runs))
    assert exact < found < 1.5 * exact


def test_releases_add_up():
    alike = probability_beyond(END, [(1000, 0.01, 0.3)])
    assert alike == pytest.approx(1000 * 0.01 * norm.sf(END - 1 / 0.3), rel=1e-9)
    assert probability_beyond(END, [(400, 0.01, 0.3), (600, 0.01, 0.3)]) == pytest.approx(alike, rel=1e-12)
    assert probability_beyond(END, [(10, 0.01, 0.0)]) == pytest.approx(0.1)
    assert probability_beyond(math.inf, [(1000, 0.01, 0.3)]) == 0.0


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
    told = guarantee_of(config, found), in_words(config, found)
    assert [SHOWS in text for text in told] == [more and not secure] * 2
    assert ("Whoever has or guesses the seed" in told[0]) == (not secure)


def test_the_page_on_privacy_has_the_probabilities_of_its_example():
    """Read from the page: DP-SGD, ten passes over MNIST at batch size 1,000, with the tightest account."""
    page = " ".join((ROOT / "docs" / "privacy.md").read_text().split())
    (said,) = re.findall(
        r"over MNIST at batch size 1,000 that has a probability of (\S+) at eps=(\S+), of (\S+) at (\d+), and "
        r"from about (\d+) on of more than delta",
        page,
    )
    (before,) = re.findall(r"to (\S+) for DP-SGD on MNIST at eps=8, whose delta is (\S+) \(", page)
    delta = 60_000**-1.1
    assert f"{delta:.1e}".replace("e-0", "e-") == before[1]

    def beyond(eps: float, end: float = END) -> float:
        found = budget(composed("dataset=mnist", "algo=dpsgd", "batch_size=1000", "epochs=10", f"eps={eps}"))
        return probability_beyond(end, [(600, 1 / 60, found.noise_multiplier)])

    first, at_first, second, at_second, least = map(float, said)
    assert float(f"{beyond(at_first):.0e}") == first
    assert float(f"{beyond(at_second):.0e}") == second
    assert beyond(least - 1) < delta < beyond(least + 1)
    assert float(f"{beyond(8, END_BEFORE):.1e}") == float(before[0])


@pytest.fixture(scope="module")
def record(tmp_path_factory):
    """Of a run at an eps at which noise that ends at 6.7 does not keep delta, and at 8.16 does."""
    folder = tmp_path_factory.mktemp("run")
    assert run(folder, "algo=dpsgd", "eps=40").code == 0
    return only_record(folder)


@pytest.mark.parametrize(
    ("origin", "told"),
    [
        ({}, None),
        ({"seeded_noise": None}, None),
        ({"seeded_noise": None, "started": f"{LONGER_SINCE}T00:24:54+00:00"}, None),
        ({"seeded_noise": None, "started": "2026-11-24T22:37:17+00:00"}, "ends at 5.77 standard deviations"),
        ({"seeded_noise": None, "started": "2026-11-24T22:37:17+00:00", "cuda": "13.0"}, "ends at 6.7 standard"),
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
    assert (SHOWS in text) == (told is not None)
    assert told is None or told in text
