"""docs/own_loop.md: the program that it shows does what it says."""

import re

import numpy as np
import pytest
import torch
from cli import ROOT
from dp_accounting import dp_event, get_epsilon_gaussian, pld
from helpers import Kept

from dpbench.devices import prepare_device, require_exact_products
from dpbench.errors import UserError
from dpbench.privacy import SCHEMES, BudgetError, make_sampler
from dpbench.privacy.uniform import SeededUniform
from dpbench.randomness import generator

PROGRAM, KEPT, CORRELATED = re.findall(r"```python\n(.*?)```", (ROOT / "docs/own_loop.md").read_text(), re.DOTALL)


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
    ("sampling", "SecureUniform(device)", "SeededUniform"),
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


def test_steps_do_not_ask_for_the_default_device():
    """As a loop of one's own may set it to a GPU, beside generators on the CPU: here to one that holds no numbers."""
    elsewhere = changed("for _ in range(steps):", "torch.set_default_device('meta')\nfor _ in range(steps):", SEEDED)
    elsewhere = changed("accuracy = (", "torch.set_default_device(None)\naccuracy = (", elsewhere)
    try:
        found = carried_out(elsewhere)["flat"].vector
    finally:
        torch.set_default_device(None)
    assert torch.equal(found, carried_out(SEEDED)["flat"].vector)


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


@pytest.mark.parametrize(
    "part",
    [
        "(({'ids': inputs[:9]}), labels[:9])",
        "((inputs[:9], inputs[:9]), labels[:9])",
        "(inputs[:9], labels[:9], labels[:9])",
        "inputs[:9]",
    ],
)
def test_what_is_no_micro_batch_is_refused(part):
    names = carried_out(SEEDED)
    before = names["step"].steps
    with pytest.raises(TypeError, match="a micro-batch is a pair of two tensors"):
        names["step"](iter([eval(part, names)]))
    assert names["step"].steps == before


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("expected_batch=batch", "expected_batch=0", "expected_batch=0: expected a finite number > 0"),
        ("expected_batch=batch", "expected_batch=float('nan')", "expected_batch=nan: expected a finite number > 0"),
        ("sampling_rate=batch / size", "sampling_rate=2", "sampling_rate=2: expected a share of the data, above 0"),
        ("noise_multiplier=noise_multiplier", "noise_multiplier=-1", "noise_multiplier=-1: expected a finite number"),
        ("[Release(batch / size, 1.0)]", "[Release(1.1, 1.0)]", "sampling_rate=1.1: expected a share of the data"),
        ("[Release(batch / size, 1.0)]", "[Release(float('nan'), 1.0)]", "sampling_rate=nan: expected a share"),
        ("make_sampler(scheme, size, batch", "make_sampler(scheme, size, size + 1", "batch=1798: expected a number"),
        ("make_sampler(scheme, size, batch", "make_sampler(scheme, size, -2", "batch=-2: expected a number above 0"),
        ("make_sampler(scheme, size, batch", "make_sampler(scheme, 0, 0", "size=0: expected a whole number > 0"),
        ('delta, "pld").noise', 'delta, "foo").noise', "foo gives no bound for poisson sampling; take pld or rdp"),
        ("SGD(flat.parameters", "SGD(model[0].parameters()", "the optimizer has other parameters than the gradients"),
        ("SGD(flat.parameters", "SGD(nn.Linear(2, 2).parameters()", "make it of flat.parameters"),
        ("SGD(flat.parameters", "LBFGS(flat.parameters", "LBFGS computes the loss anew within its step, a further use"),
        ("[Release(batch / size, 1.0)] * steps", "[]", "the plan has no releases, for which no noise is to be found"),
    ],
)
def test_what_makes_no_step_is_refused_before_one_is_taken(old, new, says):
    program = changed(old, new, SEEDED)
    with pytest.raises((UserError, ValueError), match=re.escape(says)):
        carried_out(program.replace("for _ in range(steps):", "for _ in range(0):"))


def test_a_gpu_that_would_round_products_is_refused():
    gpu = torch.device("cuda")
    for owner in (torch.backends.cudnn, torch.backends.cuda.matmul):
        prepare_device(gpu)
        require_exact_products(gpu)
        owner.allow_tf32 = True
        require_exact_products(torch.device("cpu"))
        with pytest.raises(UserError, match=r"TensorFloat-32.*call dpbench.devices.prepare_device\(device\) before"):
            require_exact_products(gpu)
    prepare_device(gpu)


@pytest.mark.parametrize("precision", ["tf32", "bf16"])
@pytest.mark.parametrize("products", ["matmul", "conv", "rnn"])
def test_a_cpu_that_would_round_products_is_refused(products, precision):
    """As after torch.set_float32_matmul_precision("medium")."""
    here = torch.device("cpu")
    prepare_device(here)
    getattr(torch.backends.mkldnn, products).fp32_precision = precision
    try:
        with pytest.raises(UserError, match=r"lets a CPU round products to (TensorFloat-32|bfloat16), so that norms"):
            require_exact_products(here)
    finally:
        prepare_device(here)
    require_exact_products(here)


def test_batches_without_samples_are_steps_of_noise():
    """At an expected batch of one, about a third of the draws are empty."""
    names = carried_out(changed("256, 20, 3.0", "1, 20, 3.0", SEEDED))
    assert len(names["ledger"]) == 20
    assert np.isfinite(names["flat"].vector.numpy()).all()


def with_trees() -> str:
    """The program with what the page says of correlated noise in the place of its plan, calibration and ledger."""
    before, planned = SEEDED.split("scheme = SCHEMES")
    after = planned[planned.index("\nflat = ") :]
    for old, new in (
        ("query=TwoPoint(gamma=0.5, kappa=0.7)", "query=OnePoint()"),
        ("noise=ConstantNoise()", "noise=noise"),
        ("filter=Exponential(kappa=0.7)", "filter=Identity()"),
    ):
        after = changed(old, new, after)
    return before + CORRELATED + after


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


def made(scheme: str) -> dict:
    """What the program with trees makes, and what the page says of checkpoints, before the first step."""
    names = carried_out(changed("for _ in range(steps):", "for _ in range(0):", with_trees()))
    if scheme != "cyclic":  # the step and its ledger stay those of trees: this is about the batches
        source = SeededUniform(generator(1, "sampling", names["device"], "own"))
        names["sampler"] = make_sampler(SCHEMES[scheme], names["size"], names["batch"], source)
    exec(compile(KEPT, "own_loop.md", "exec"), names)
    names["step"].recorder = Kept()
    return names


def taken(names: dict, steps: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Batches and released gradients of so many further steps."""
    batches, before = [], len(names["step"].recorder.private_gradients)
    for _ in range(steps):
        batches.append(names["sampler"].draw())
        names["step"]([(names["inputs"][batches[-1]], names["labels"][batches[-1]])])
    return batches, names["step"].recorder.private_gradients[before:]


def generators(names: dict) -> list[torch.Generator]:
    sources = (names["step"].noise_source, names["step"].side_source, names["sampler"]._source)
    return [source.generator for source in sources]


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(one) == len(other) > 0 and all(map(torch.equal, one, other))


@pytest.mark.parametrize("scheme", ["cyclic", "shuffled", "poisson", "fixed_size"])
@pytest.mark.parametrize("with_sampler", [True, False])
def test_a_checkpoint_goes_on_as_if_nothing_had_been(tmp_path, scheme, with_sampler):
    """In the second pass of 8 steps; without the state of a sampler of passes the batches are others."""
    stopped = made(scheme)
    taken(stopped, 11)
    stopped["write"](tmp_path / "checkpoint.pt")
    seeds = [one.get_state() for one in generators(stopped)]
    batches, gradients = taken(stopped, 9)

    resumed = made(scheme)
    if not with_sampler:
        del resumed["remembering"]["sampler"]
    resumed["read"](tmp_path / "checkpoint.pt")
    for one, state in zip(generators(resumed), seeds, strict=True):
        one.set_state(state)
    assert len(resumed["ledger"]) == 11
    again, of_again = taken(resumed, 9)

    alike = with_sampler or not SCHEMES[scheme].passes
    assert same(again, batches) == same(of_again, gradients) == alike
    assert torch.equal(resumed["flat"].vector, stopped["flat"].vector) == alike
    assert resumed["ledger"].complete()
    with pytest.raises(BudgetError):
        taken(resumed, 1)


@pytest.mark.parametrize("restart", [True, False])
def test_noise_that_begins_anew_at_other_steps_than_in_the_plan_is_refused(restart):
    """With trees over 16 steps a sample of passes of 8 moves more than the plan counts; without restarts none begin."""
    program = changed("TreeNoise()", f"TreeNoise(restart={restart})", with_trees())
    carried_out(program)
    other = changed("rate=lambda t: 1.0, epoch=epoch", "rate=lambda t: 1.0, epoch=2 * epoch", program)
    if restart:
        with pytest.raises(ValueError, match="begins anew every 16 steps and in the ledger's plan every 8"):
            carried_out(other)
    else:
        carried_out(other)
