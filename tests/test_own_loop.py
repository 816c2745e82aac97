"""docs/own_loop.md: the program that it shows does what it says."""

import re

import numpy as np
import pytest
import torch
from cli import ROOT
from dp_accounting import dp_event, get_epsilon_gaussian, pld

from dpbench.privacy import BudgetError

PROGRAM, CORRELATED = re.findall(r"```python\n(.*?)```", (ROOT / "docs/own_loop.md").read_text(), re.DOTALL)


def changed(old: str, new: str, program: str = PROGRAM) -> str:
    assert old in program
    return program.replace(old, new)


def carried_out(program: str) -> dict:
    names: dict = {}
    torch.manual_seed(0)  # weights
    exec(compile(program, "own_loop.md", "exec"), names)
    return names


# As the page says of experiments, and of fewer steps.
SEEDED = changed("import torch\n", "import torch\nfrom dpbench.randomness import generator\n")
for name, old, new in (
    ("noise", "noise_source=SecureGaussian()", "noise_source=SeededGaussian"),
    ("side", "side_source=SecureGaussian()", "side_source=SeededGaussian"),
    ("sampling", 'SecureUniform(torch.device("cpu"))', "SeededUniform"),
):
    SEEDED = changed(old, f'{new}(generator(1, "{name}", torch.device("cpu"), "own"))', SEEDED)
SEEDED = changed("import SecureGaussian", "import SeededGaussian", SEEDED)
SEEDED = changed("import SecureUniform", "import SeededUniform", SEEDED)
SEEDED = changed("256, 200, 3.0", "256, 20, 3.0", SEEDED)


def test_it_trains_within_its_eps(capsys):
    names = carried_out(PROGRAM)
    assert names["accuracy"] > 0.9
    assert re.fullmatch(r"9\d\.\d% of the digits .* at eps=[23]\.\d{3}, delta=1e-05\n", capsys.readouterr().out)
    rate, multiplier = names["batch"] / names["size"], names["noise_multiplier"]
    accountant = pld.PLDAccountant()
    accountant.compose(dp_event.PoissonSampledDpEvent(rate, dp_event.GaussianDpEvent(multiplier)), names["steps"])
    assert accountant.get_epsilon(1e-5) == pytest.approx(names["ledger"].epsilon(), rel=1e-3)
    assert names["ledger"].epsilon() <= 3


def test_a_release_beyond_the_plan_is_refused_before_it_is_made():
    names = carried_out(SEEDED)
    before = names["flat"].vector.clone()
    with pytest.raises(BudgetError):
        names["step"]([(names["inputs"][:9], names["labels"][:9])])
    assert torch.equal(names["flat"].vector, before)


def test_seeded_sources_repeat_it_bit_for_bit_and_secure_ones_do_not():
    one, other = (carried_out(SEEDED) for _ in range(2))
    assert torch.equal(one["flat"].vector, other["flat"].vector)
    drawn = [getattr(one["step"], source).fill(torch.empty(5)) for source in ("noise_source", "side_source")]
    assert not torch.equal(*drawn)
    secure = changed("256, 200, 3.0", "256, 20, 3.0")
    assert not torch.equal(*(carried_out(secure)["flat"].vector for _ in range(2)))


@pytest.mark.parametrize("seeded", ["", ".manual_seed(1)"])
def test_sources_that_would_give_the_same_noise_are_refused(seeded):
    """A generator that nobody seeded has one seed always."""
    same = re.sub(r"SeededGaussian\(generator\([^\n]*", f"SeededGaussian(torch.Generator(){seeded}),", SEEDED)
    with pytest.raises(ValueError, match="noise_source and side_source would give the same numbers"):
        carried_out(same)


def test_a_batch_that_is_not_in_micro_batches_is_refused():
    names = carried_out(SEEDED)
    with pytest.raises(TypeError, match=r"pairs of inputs and targets: step\(\[\(inputs, targets\)\]\)"):
        names["step"]((names["inputs"][:9], names["labels"][:9]))


def test_batches_without_samples_are_steps_of_noise():
    """At an expected batch of one, about a third of the draws are empty."""
    names = carried_out(changed("256, 20, 3.0", "1, 20, 3.0", SEEDED))
    assert len(names["ledger"]) == 20
    assert np.isfinite(names["flat"].vector.numpy()).all()


def with_trees() -> str:
    """The program with what the page says of correlated noise in the place of its plan, calibration and ledger."""
    imports = "import math\nfrom dpbench.noise import TreeNoise\nfrom dpbench.stage import Course\n"
    before, planned = SEEDED.split("scheme = SCHEMES")
    after = planned[planned.index("\nflat = ") :]
    return imports + before + CORRELATED + changed("noise=ConstantNoise()", "noise=noise", after)


def test_correlated_noise_spends_what_its_matrix_does():
    """A sample at place p of a pass moves C x by the sum of columns p, p + 8, ... of C, a row for each interval."""
    names = carried_out(with_trees())
    steps, epoch = 20, 8
    assert (len(names["ledger"]), names["epoch"]) == (steps, epoch)
    rows = np.zeros((steps, steps))
    for end in range(1, steps + 1):
        rows[end - 1, end - (end & -end) : end] = 1
    sensitivity = max(np.linalg.norm(rows[:, place::epoch].sum(1)) for place in range(epoch))
    spent = get_epsilon_gaussian(names["noise_multiplier"] / sensitivity, 1e-5)
    assert names["ledger"].epsilon() == pytest.approx(spent, rel=1e-6)
    assert 2.99 < spent <= 3


@pytest.mark.parametrize("noise", ["TreeNoise()", "TreeNoise(restart=True)", "BandedNoise()"])
def test_correlated_noise_under_a_plan_of_independent_noise_is_refused(noise):
    """It would spend more than the ledger says: with all samples in all batches, ‖C 1‖ > sqrt(T) times as much mu."""
    imported = changed("import ConstantNoise", "import BandedNoise, TreeNoise", SEEDED)
    with pytest.raises(ValueError, match="make the plan with correlation"):
        carried_out(changed("noise=ConstantNoise()", f"noise={noise}", imported))


def test_a_plan_of_correlated_noise_is_not_for_independent_noise():
    program = changed("noise=noise", "noise=ConstantNoise()", with_trees())
    with pytest.raises(ValueError, match="make the plan with correlation"):
        carried_out(program)
