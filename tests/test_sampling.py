"""Samplers: what a batch holds, and what is remembered between batches."""

import math
from fractions import Fraction
from unittest.mock import patch

import pytest
import torch
from scipy import stats

from dpbench.privacy.sampling import (
    CYCLIC,
    FIXED_SIZE,
    POISSON,
    SCHEMES,
    SHUFFLED,
    FixedSizeSampler,
    PassSampler,
    PoissonSampler,
    make_sampler,
    steps_of,
)
from dpbench.privacy.uniform import SecureUniform, SeededUniform
from dpbench.randomness import generator

# Every statistical test below has a fixed seed or key and fails with probability below this for a right sampler.
ERROR = 1e-6


def seeded(seed=1):
    return SeededUniform(torch.Generator().manual_seed(seed))


def secure(key=bytes(range(32))):
    with patch("os.urandom", return_value=key):
        return SecureUniform(torch.device("cpu"))


either = pytest.mark.parametrize("source", [seeded, secure])


# Poisson


@either
def test_poisson_sampler_takes_each_sample_at_its_rate_independently(source):
    size, rate, draws = 2000, 0.03, 500
    sampler = PoissonSampler(size, round(size * rate), source())
    taken = torch.zeros(draws, size)
    for draw in taken:
        indices = sampler.draw()
        assert (indices.diff() > 0).all()
        draw[indices] = 1
    # Counts per sample are Binomial(500, 0.03), batch sizes Binomial(2000, 0.03): their chi-square sums are within
    # 5 standard deviations of their means except with probability below 1e-6.
    for counts, trials in ((taken.sum(0), draws), (taken.sum(1), size)):
        squares = ((counts - trials * rate) ** 2 / (trials * rate * (1 - rate))).sum()
        assert abs(squares - len(counts)) < 5 * math.sqrt(2.2 * len(counts))
    both = (taken[:, ::2] * taken[:, 1::2]).mean()
    assert both == pytest.approx(rate**2, abs=5 * rate / math.sqrt(draws * size / 2))


def test_poisson_sampler_is_exact_at_its_ends():
    assert len(PoissonSampler(50, 50, seeded()).draw()) == 50
    sampler = PoissonSampler(5, 1e-300, seeded())
    assert all(len(sampler.draw()) == 0 for _ in range(100))


def test_poisson_sampler_compares_with_its_rate_in_double_precision():
    """In single precision numbers this near to 0.03 are one."""

    class Given(SeededUniform):
        def fill(self, out):
            assert out.dtype == torch.float64
            return out.copy_(torch.tensor([0.03 * (1 - 1e-12), 0.03 * (1 + 1e-12)], dtype=torch.float64).repeat(50))

    sampler = PoissonSampler(100, 3, Given(torch.Generator()))
    assert sampler.draw().tolist() == list(range(0, 100, 2))


# Fixed size


def subsets(sampler, draws):
    """The number of the subset that each of so many batches is, as the bits of an integer."""
    return torch.stack([(1 << sampler.draw()).sum() for _ in range(draws)])


def p_value_of_uniform(numbers, cells):
    """Chi-square test of equal probabilities; `numbers` are from 0 to `cells` - 1."""
    return stats.chisquare(torch.bincount(numbers, minlength=cells).numpy()).pvalue


@either
def test_fixed_size_sampler_takes_every_subset_with_the_same_probability(source):
    drawn = subsets(FixedSizeSampler(6, 3, source()), 20_000)
    kinds, numbers = drawn.unique(return_inverse=True)
    assert len(kinds) == math.comb(6, 3)
    assert all(int(kind).bit_count() == 3 for kind in kinds)
    assert p_value_of_uniform(numbers, len(kinds)) > ERROR


@either
def test_fixed_size_batches_are_independent_between_steps(source):
    kinds, numbers = subsets(FixedSizeSampler(5, 2, source()), 20_001).unique(return_inverse=True)
    # Pairs of successive batches, taken apart so that they don't overlap.
    pairs = numbers[:-1:2] * len(kinds) + numbers[1::2]
    assert p_value_of_uniform(pairs, len(kinds) ** 2) > ERROR


def test_fixed_size_sampler_of_all_samples_takes_all():
    assert sorted(FixedSizeSampler(7, 7, seeded()).draw().tolist()) == list(range(7))


# Passes


def passes(sampler, count):
    """The batches of so many passes, as lists."""
    per_pass = math.ceil(sampler.size / sampler.batch)
    return [[sampler.draw().tolist() for _ in range(per_pass)] for _ in range(count)]


def check_pass(batches, size, batch):
    assert sorted(index for each in batches for index in each) == list(range(size))
    assert [len(each) for each in batches[:-1]] == [batch] * (len(batches) - 1)
    assert len(batches[-1]) == size - batch * (len(batches) - 1)


@pytest.mark.parametrize("reshuffle", [True, False])
@pytest.mark.parametrize(("size", "batch"), [(10, 3), (12, 4), (7, 7), (5, 1), (9, 8)])
def test_a_pass_holds_every_sample_once_and_ends_with_what_is_left(size, batch, reshuffle):
    for batches in passes(PassSampler(size, batch, seeded(), reshuffle=reshuffle), 4):
        check_pass(batches, size, batch)


def test_a_sampler_that_passes_over_a_sample_twice_is_found():
    class Overlapping(PassSampler):
        def draw(self):
            batch = super().draw()
            self._next -= 1
            return batch

    with pytest.raises(AssertionError):
        check_pass(passes(Overlapping(10, 3, seeded(), reshuffle=True), 1)[0], 10, 3)


def test_passes_differ_where_they_are_reshuffled_and_are_equal_otherwise():
    first, second, third = passes(PassSampler(40, 7, seeded(), reshuffle=True), 3)
    assert first != second != third
    first, second, third = passes(PassSampler(40, 7, seeded(), reshuffle=False), 3)
    assert first == second == third


@either
@pytest.mark.parametrize("reshuffle", [True, False])
def test_the_place_of_a_sample_in_a_pass_is_uniform(reshuffle, source):
    sampled = source()
    places = []
    for _ in range(4000):
        sampler = PassSampler(9, 3, sampled, reshuffle=reshuffle)
        if reshuffle:
            passes(sampler, 1)  # so that the second pass is what is looked at
        places.append([0 in batch for batch in passes(sampler, 1)[0]].index(True))
    assert p_value_of_uniform(torch.tensor(places), 3) > ERROR


# Continuing


@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("taken", [0, 1, 4, 5, 7])
def test_a_sampler_continues_from_its_state_exactly(name, taken):
    # 4 batches are a pass; the first is never drawn at 0, 4 is between two passes.
    draws = seeded()
    sampler = make_sampler(SCHEMES[name], 10, 3, draws)
    for _ in range(taken):
        sampler.draw()
    state, of_generator = sampler.state_dict(), draws.generator.get_state()
    expected = [sampler.draw().tolist() for _ in range(9)]

    other = torch.Generator()
    other.set_state(of_generator)
    resumed = make_sampler(SCHEMES[name], 10, 3, SeededUniform(other))
    resumed.load_state_dict(state)
    assert [resumed.draw().tolist() for _ in range(9)] == expected


def test_a_state_is_a_copy():
    sampler = PassSampler(10, 3, seeded(), reshuffle=False)
    first = sampler.draw()
    state = sampler.state_dict()
    order = state["order"].clone()
    for _ in range(5):
        sampler.draw()
    sampler.load_state_dict(state)
    sampler._order.zero_()
    assert torch.equal(state["order"], order)
    assert torch.equal(order[:3], first)


def test_without_its_state_a_sampler_does_not_continue_a_pass():
    sampler = PassSampler(10, 3, seeded(), reshuffle=False)
    first, second = sampler.draw().tolist(), sampler.draw().tolist()
    restarted = PassSampler(10, 3, seeded(), reshuffle=False)
    assert restarted.draw().tolist() == first != second


# Generators


@pytest.mark.parametrize("name", SCHEMES)
def test_a_sampler_draws_from_its_own_generator_alone(name):
    device = torch.device("cpu")
    streams = {stream: generator(3, stream, device, "run") for stream in ("sampling", "noise", "augmentation")}
    before = {stream: each.get_state() for stream, each in streams.items()}
    assert len({tuple(state.tolist()) for state in before.values()}) == len(streams)
    everywhere = torch.get_rng_state()
    sampler = make_sampler(SCHEMES[name], 50, 10, SeededUniform(streams["sampling"]))
    for _ in range(7):
        sampler.draw()
    assert torch.equal(torch.get_rng_state(), everywhere)
    for stream in ("noise", "augmentation"):
        assert torch.equal(streams[stream].get_state(), before[stream])
    assert not torch.equal(streams["sampling"].get_state(), before["sampling"])


@pytest.mark.parametrize("name", SCHEMES)
def test_secure_batches_follow_from_no_seed(name):
    batches = []
    for _ in range(2):
        torch.manual_seed(0)
        source = SecureUniform(torch.device("cpu"))
        batches.append(make_sampler(SCHEMES[name], 200, 100, source).draw().tolist())
    assert batches[0] != batches[1]


def test_uniform_numbers_of_a_key_are_uniform_in_all_their_bits():
    count = 100_000
    numbers = secure().fill(torch.empty(2, count // 2, dtype=torch.float64)).flatten().numpy()
    assert stats.kstest(numbers, "uniform").pvalue > ERROR
    assert stats.kstest((numbers * 2**40) % 1, "uniform").pvalue > ERROR
    assert 0 <= numbers.min() < numbers.max() < 1


# Schemes


def test_each_scheme_has_its_sampler():
    kinds = {scheme.name: type(make_sampler(scheme, 10, 3, seeded())) for scheme in SCHEMES.values()}
    assert kinds == {
        "poisson": PoissonSampler,
        "fixed_size": FixedSizeSampler,
        "shuffled": PassSampler,
        "cyclic": PassSampler,
    }
    assert make_sampler(SHUFFLED, 10, 3, seeded()).reshuffle
    assert not make_sampler(CYCLIC, 10, 3, seeded()).reshuffle


@pytest.mark.parametrize(
    ("scheme", "size", "batch", "epochs", "steps"),
    [
        (POISSON, 60_000, 1000, 25, 1500),
        (POISSON, 50_000, 256, 60, 11_719),
        (FIXED_SIZE, 50_000, 256, 60, 11_719),
        # adp.md 2.7: 196 batches an epoch, the last of them smaller.
        (SHUFFLED, 50_000, 256, 60, 11_760),
        (CYCLIC, 50_000, 256, 0.5, 98),
    ],
)
def test_steps_of_so_many_passes(scheme, size, batch, epochs, steps):
    assert steps_of(scheme, size, batch, epochs) == steps


@pytest.mark.parametrize(
    ("scheme", "size", "batch", "epochs"),
    [
        (POISSON, 60_000, 600, "0.07"),  # 0.07 x 100 is above 7 in floating point
        (POISSON, 50_000, 500, "0.29"),  # 0.29 x 100 is below 29
        (CYCLIC, 59_990, 600, "0.14"),
        (POISSON, 60_000, 600, "1.1"),
    ],
)
def test_what_rounding_adds_to_a_part_of_a_pass_is_no_step(scheme, size, batch, epochs):
    per_pass = math.ceil(Fraction(size, batch)) if scheme.passes else Fraction(size, batch)
    assert steps_of(scheme, size, batch, float(epochs)) == math.ceil(Fraction(epochs) * per_pass)
