import contextlib
import io
import json
import math
import re

import pytest
import torch
from cli import only_record, run
from closed_form_references import gaussian_eps
from dp_accounting import get_epsilon_gaussian
from helpers import assembled, composed

from dpbench.audit.tap import Tap
from dpbench.gradients import Clipped
from dpbench.privacy import calibrate
from dpbench.privacy.__main__ import main
from dpbench.privacy.gaussian import GRID, SecureGaussian
from dpbench.privacy.guarantee import statement
from dpbench.privacy.tuning import RandomStopping
from dpbench.training.assemble import assemble
from dpbench.training.budget import budget, open_ledger

SMALL = ("dataset=digits", "batch_size=128", "epochs=5")


def table(text: str) -> dict[str, list[str]]:
    """Rows of all tables: name, and the cells behind it."""
    rows = (re.split(r"\s{2,}", line.strip()) for line in text.splitlines())
    return {cells[0]: cells[1:] for cells in rows if len(cells) > 1}


@pytest.fixture(scope="module")
def printed():
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        assert main([*SMALL, "eps=1,8", "--grid", "4"]) == 0
    return out.getvalue()


def test_every_scheme_and_accountant_has_its_multiplier(printed):
    """That of a run with these settings, which other tests compare with references."""
    rows = table(printed)
    for name in ("poisson, pld", "poisson, rdp", "fixed_size, rdp", "shuffled, gdp", "cyclic, rdp"):
        sampler, accountant = name.split(", ")
        for cell, eps in zip(rows[name], (1, 8), strict=True):
            config = composed(*SMALL, f"privacy={sampler}", f"privacy.accountant={accountant}", f"eps={eps}")
            assert float(cell) == pytest.approx(budget(config).noise_multiplier, rel=1e-3)


def test_cost_of_tuning_is_that_of_its_theorem(printed):
    rows = table(printed)
    assert not any("search" in name for name in rows)
    plan = composed(*SMALL).release_plan()
    delta = composed(*SMALL).delta_value
    eps, of_one = RandomStopping.over(4).per_run(8.0, delta)
    wanted = calibrate(plan, eps, of_one, "rdp").noise_multiplier
    stopping = next(cells for name, cells in rows.items() if name.startswith("random stopping"))
    assert float(stopping[1]) == pytest.approx(wanted, rel=1e-3)
    none, everything = float(rows["no tuning"][1]), float(rows["all 4 results published"][1])
    assert none < everything < 2.2 * none  # four runs need at most about twice the noise


def test_a_search_has_a_row_of_its_own_beside_what_one_run_needs(capsys):
    assert main([*SMALL, "eps=8", "privacy.search_runs=8", "--grid", "4"]) == 0
    printed = capsys.readouterr().out
    rows = table(printed)
    assert "noise multiplier by one run, no search" in printed
    alone, searched = (
        budget(composed(*SMALL, "eps=8", *more)).noise_multiplier for more in ([], ["privacy.search_runs=8"])
    )
    assert float(rows["poisson, pld"][0]) == pytest.approx(alone, rel=1e-3)
    assert float(rows["random search (privacy.search_runs)"][0]) == pytest.approx(searched, rel=1e-3)
    assert searched > 1.2 * alone


@pytest.mark.parametrize("eps", ["eps=1", "eps=8"])
def test_the_guarantee_names_what_it_rests_on(printed, eps):
    """What is the same for both is said once."""
    lines = printed.splitlines()
    (of_this,) = [line for line in lines if line.startswith(f"{eps} (noise multiplier")]
    (of_each,) = [line for line in lines if line.startswith("In each of these cases: It protects")]
    assert "57 steps" in of_this
    for part in ("1437 training samples", "add or remove one sample", "independently", "Not counted:"):
        assert part in of_each


def test_a_given_multiplier_is_turned_into_eps(capsys):
    assert main([*SMALL, "privacy.noise_multiplier=2.5"]) == 0
    rows = table(capsys.readouterr().out)
    spent = budget(composed(*SMALL, "privacy.noise_multiplier=2.5")).eps
    assert float(rows["poisson, pld"][0]) == pytest.approx(spent, rel=1e-3)
    assert "poisson, central limit (not a bound)" in rows


@pytest.mark.parametrize("sampler", ["poisson", "shuffled"])
def test_the_central_limit_counts_what_is_released_beside_each_sum(capsys, sampler):
    """On Poisson batches: mu = q sqrt(T (exp(1/z² + 1/z_b²) - 1)), T = ceil(5 N/B)."""
    typed = ["algo=dcsgd_p", "threshold.histogram_noise=2", f"privacy={sampler}", "privacy.noise_multiplier=3"]
    assert main([*SMALL, *typed]) == 0
    cell = table(capsys.readouterr().out)["poisson, central limit (not a bound)"][0]
    mu = 128 / 1437 * math.sqrt(57 * math.expm1(1 / 9 + 1 / 4))
    assert float(cell) == pytest.approx(get_epsilon_gaussian(1 / mu, composed(*SMALL).delta_value), rel=1e-3)


@pytest.mark.parametrize("algo", ["dp_ftrl", "dp_ftrl_banded"])
def test_no_limit_of_independent_steps_is_given_where_noise_is_correlated(capsys, algo):
    assert main([*SMALL, f"algo={algo}", "privacy.noise_multiplier=20"]) == 0
    assert table(capsys.readouterr().out)["poisson, central limit (not a bound)"] == ["–"]


def test_a_multiplier_that_spends_more_than_a_run_may_is_told_of_like_any_other(capsys):
    assert main([*SMALL, "privacy.noise_multiplier=0.4", "privacy.accountant=rdp"]) == 0
    out = capsys.readouterr().out
    spent = float(table(out)["poisson, rdp"][0])
    assert spent > 8
    refused = f"noise multiplier 0.4: a run of it is refused. privacy.noise_multiplier=0.4: spends eps={spent:.4g} over"
    assert refused in " ".join(out.split())


def test_seeds_change_nothing(capsys):
    outs = []
    for typed in ((), ("seeds=3", "-m"), ("seed=4,5",)):
        assert main([*SMALL, *typed, "privacy.accountant=rdp", "eps=8", "--grid", "1"]) == 0
        outs.append(capsys.readouterr().out)
    assert outs[0] == outs[1] == outs[2]


def test_other_releases_and_other_accounting_are_said(capsys):
    assert main([*SMALL, "algo=dcsgd_p", "privacy=as_published", "--grid", "1"]) == 0
    out = capsys.readouterr().out
    assert "histogram of norms of the same batch is released, and counted" in out
    assert re.search(
        r"Accounting differs: by the publication's rule the run would spend eps=(8|7\.99\d), which is none that", out
    )
    assert "conditions" not in out


def test_conditions_of_a_theorem_that_do_not_hold_are_named(capsys):
    typed = ("epochs=0.5", "algo=adp", "privacy=as_published", "privacy.published=adp_theorem", "eps=12")
    assert main([*SMALL[:2], *typed, "--grid", "1"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "Nor are all conditions met that the proof of that rule needs: " in out
    assert "(exp(x) - 1)/x <= 2 at the largest eps x of a step before subsampling (here " in out
    assert "a batch is at most half of the samples" not in out  # 128 of 1437


def test_other_schemes_leave_the_schedule_of_the_run_alone(capsys):
    """Noise that decays over a run has another course where a scheme has another number of steps."""
    typed = [
        *SMALL,
        "batch_size=512",
        "noise=decay",
        "noise.decay=0.01",
        "epochs=1.5",
        "eps=2",
        "privacy.accountant=rdp",
    ]
    assert main([*typed, "--grid", "1"]) == 0
    out = capsys.readouterr().out
    wanted = budget(composed(*typed)).noise_multiplier
    rows = table(out)
    for name in ("poisson, rdp", "no tuning", "all 1 results published"):
        assert float(rows[name][0]) == pytest.approx(wanted, rel=1e-3)
    assert f"(noise multiplier {wanted:.4f}): The run is (2, " in out


def test_publishing_a_grid_counts_what_is_released_beside_each_sum(capsys):
    typed = [
        *SMALL,
        "algo=dcsgd_p",
        "privacy=shuffled",
        "privacy.accountant=gdp",
        "threshold.histogram_noise=50",
        "eps=8",
    ]
    assert main([*typed, "--grid", "10"]) == 0
    multiplier = float(table(capsys.readouterr().out)["all 10 results published"][0])
    # Ten runs of five passes, each a Gaussian release of sum and histogram: mu² = 50 (1/z² + 1/50²).
    mu = math.sqrt(50 * (multiplier**-2 + 50**-2))
    assert gaussian_eps(mu, composed(*typed).delta_value) == pytest.approx(8, rel=2e-3)
    assert main([*typed, "threshold.histogram_noise=2", "--grid", "10"]) == 0
    assert table(capsys.readouterr().out)["all 10 results published"] == ["–"]  # the histograms alone spend more


def test_a_grid_beside_given_noise_is_refused(capsys):
    assert main([*SMALL, "privacy.noise_multiplier=3", "--grid", "4"]) == 2
    assert "--grid=4: expected none beside privacy.noise_multiplier" in capsys.readouterr().err


def test_a_guarantee_of_one_step_speaks_of_one(capsys):
    assert main(["dataset=digits", "batch_size=128", "epochs=0.05", "privacy.accountant=rdp", "eps=8"]) == 0
    out = capsys.readouterr().out
    assert "N=1437, batch size 128, 1 step," in out
    assert "towards anyone who sees the model after its only step." in " ".join(out.split())


@pytest.mark.parametrize(
    "typed", [["algo=dicesgd", "clip.uncertified=true"], ["optim=adagrad_norm_uncertified", "optim.uncertified=true"]]
)
def test_what_no_proof_covers_is_no_guarantee(capsys, typed):
    assert main([*SMALL, *typed, "privacy.accountant=rdp", "eps=8"]) == 0
    out = capsys.readouterr().out
    assert "): No guarantee: un-" in out
    assert "differentially private" not in out


def test_of_several_runs_those_that_have_a_multiplier_get_their_guarantees(capsys):
    typed = [*SMALL, "algo=dcsgd_e", "privacy.accountant=rdp"]
    assert main([*typed, "eps=0.01,8"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "eps=0.01: a run of it is refused. eps=0.01: the histogram of norms at noise multiplier 5, released" in out
    assert re.search(r"eps=8 \(noise multiplier [\d.]+\): The run is \(7\.99\d*, ", out)
    assert main([*typed, "eps=0.01"]) == 2
    assert capsys.readouterr().err.startswith("error: eps=0.01: the histogram of norms at noise multiplier 5")


@pytest.mark.parametrize(
    ("typed", "refused"),
    [
        ("noise=understated noise.divisor=1e300", "noise.divisor=1e+300: "),
        ("noise=decay noise.decay=1e-300", "noise.decay=1e-300: "),
        ("privacy.noise_multiplier=1e300", "privacy.noise_multiplier=1e+300: "),
        ("algo=dcsgd_e threshold.histogram_noise=1e-200 privacy.noise_multiplier=1", None),
        ("algo=andrew threshold.count_noise=1e-200 privacy.noise_multiplier=1", None),
        (
            "algo=dcsgd_e threshold.histogram_noise=1e-200 privacy.noise_multiplier=1 privacy.published=poisson_rdp",
            None,
        ),
        ("privacy.published=adp_theorem privacy.noise_multiplier=0.001", None),
    ],
)
def test_extreme_settings_get_a_sentence(capsys, typed, refused):
    """Those that can be accounted for get their eps, which may be infinite."""
    code = main([*SMALL, *typed.split(), "privacy.accountant=rdp"])
    said = capsys.readouterr()
    if refused is not None:
        assert code == 2
        assert re.fullmatch(rf"error: {re.escape(refused)}expected .*\n", said.err)
    else:
        assert (code, said.err) == (0, "")
        assert float(table(said.out)["poisson, rdp"][0]) > 1e6
        assert ".." not in said.out


@pytest.mark.parametrize(("delta", "weak"), [(1e-5, False), (1 / 1437, False), (1.1 / 1437, True), (0.01, True)])
def test_a_delta_above_one_sample_is_called_weak(delta, weak):
    plan = composed(*SMALL).release_plan().scaled(1.0)
    text = statement(plan, eps=1.0, delta=delta, accountant="pld", size=1437, aside=0, secure=False, published=None)
    assert ("delta above 1/1437" in text) == weak


def test_no_noise_is_no_guarantee():
    plan = composed(*SMALL).release_plan().scaled(0.0)
    text = statement(plan, eps=math.inf, delta=1e-5, accountant="pld", size=10, aside=0, secure=False, published=None)
    assert text.startswith("No guarantee")


@pytest.mark.parametrize(
    ("typed", "complaint"),
    [
        (["eps=-1"], "eps=-1: expected"),
        (["eps=inf"], "without noise there is nothing to account for"),
        (["--grid", "0"], "--grid=0: expected a whole number from 1 to 1000000"),
        (["--grid", "99999999999"], "--grid=99999999999: expected a whole number from 1 to 1000000"),
        (["--gird", "2"], "unrecognized arguments: --gird"),
        (["--grid", "many"], "--grid=many: expected a whole number from 1 to"),
        (["privacy=shufled"], "did you mean shuffled?"),
        (["privacy.accountant=gdp"], "valid for poisson sampling: pld, rdp"),
    ],
)
def test_bad_input_is_one_line(capsys, typed, complaint):
    assert main(typed) == 2
    said = capsys.readouterr().err.strip()
    assert complaint in said
    assert "\n" not in said


def test_the_line_of_a_sweep_is_taken_as_it_is(capsys):
    line = [*SMALL, "eps=4", "privacy.accountant=rdp", "--grid", "2"]
    assert main(line) == 0
    plain = capsys.readouterr().out
    assert main([*line, "-m"]) == 0
    assert capsys.readouterr().out == plain


def test_sizes_are_those_of_the_first_run_only_where_others_differ(capsys):
    for others, told in (("eps=1,8", False), ("batch_size=64,128", True), ("delta=1e-5,1e-6", True)):
        assert main([*SMALL, "privacy.accountant=rdp", "--grid", "1", others]) == 0
        assert ("(of the first)" in capsys.readouterr().out.splitlines()[0]) == told


def test_runs_without_noise_are_left_out_and_said_to_be(capsys):
    printed = []
    for eps in ("eps=8", "eps=8,inf"):
        assert main([*SMALL, "privacy.accountant=rdp", "--grid", "1", eps]) == 0
        printed.append(capsys.readouterr().out.splitlines())
    left_out = "Without noise (eps=inf) there is nothing to account for: left out."
    assert left_out not in printed[0]
    assert printed[1][1] == left_out
    assert [line for line in printed[1] if line != left_out] == printed[0]


def test_help_is_printed(capsys):
    assert main(["--help"]) == 0
    assert "python -m dpbench.privacy" in capsys.readouterr().out


@pytest.mark.parametrize("eps", ["eps=8", "eps=inf"])  # where there is no noise, batches differ
def test_a_run_with_secure_noise_is_recorded_and_cannot_be_repeated(tmp_path, eps):
    settings = ("privacy.secure_noise=true", "epochs=1", "privacy.accountant=rdp", eps)
    outcomes = [run(tmp_path / name, *settings) for name in ("a", "b")]
    losses = []
    for outcome in outcomes:
        assert outcome.code == 0
        record = only_record(outcome.results)
        losses.append(json.loads((record / "summary.json").read_text())["test_loss"])
    assert losses[0] != losses[1]


def test_secure_noise_has_the_declared_deviation_in_a_step():
    parts = assembled(composed("privacy.secure_noise=true", "model=linear"), noise_multiplier=3.0)
    assert isinstance(parts.step.noise_source, SecureGaussian)
    seen = []
    Tap.into(parts.step, lambda gradient: seen.append(gradient.clone()))
    for _ in range(40):
        parts.step([])
    noise = torch.stack(seen)
    # 26,000 normals: the variance is within 5.5 of its deviations but with probability below 1e-7.
    wanted = (3.0 / parts.step.expected_batch) ** 2
    assert noise.var() == pytest.approx(wanted, rel=5.5 * math.sqrt(2 / noise.numel()))


@pytest.mark.parametrize("algorithm", ["dpsgd", "dp_ftrl", "dp_ftrl_banded"])
def test_a_step_with_secure_noise_releases_multiples_of_a_grid_that_tell_nothing_of_the_sum(algorithm):
    config = composed(f"algo={algorithm}", "privacy.secure_noise=true")
    step = assemble(config, torch.device("cpu"), 1.3, open_ledger(config, 1.3)).step
    for _ in range(2):
        total = torch.full_like(step.gradients.flat.vector, 0.3)  # which is none of them
        found = step.release(Clipped(total, torch.empty(0), torch.empty(0)), 1.0)
        places = (found.double() * GRID)[found.abs() < 2]
        assert len(places) > 100
        assert torch.equal(places, places.round())
