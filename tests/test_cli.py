"""The command line: what it refuses and how, sweeps, and where it is started."""

import csv
import re
import struct
import warnings
from io import StringIO
from pathlib import Path

import pytest
import torch
import yaml
from cli import CONF, SMALL, STEPS, Outcome, hash_of, only_record, read, records, run, snapshot, started, status
from helpers import accept_made_up_files, composed
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from results_command import results, rows
from rich.console import Console

from dpbench.cli.table import Row, print_means, print_table
from dpbench.config import compose_jobs, in_grammar, require_same_releases
from dpbench.console import make_console
from dpbench.errors import PlainWarning, UserError
from dpbench.filters import RecursiveLowPass
from dpbench.step import PrivateStep

# arguments, what stands for field and value, what is said to be allowed
BAD_INPUT = [
    ("eps=-1", "eps=-1", "a number > 0, or inf"),
    ("eps=0", "eps=0", "a number > 0, or inf"),
    ("eps=abc", "eps=abc", "a number"),
    ("eps=nan", "eps=nan", "a number > 0, or inf"),
    ("eps=1e9", "eps=1e+09", "at most 1e6"),
    ("algo=dikc", "algo=dikc", "lp_dpgalore; options of your own need -cd FOLDER; did you mean disk?"),
    ("dataset=sensors", "dataset=sensors", "svhn; options of your own need -cd FOLDER"),
    ("algo=disk algo.kapa=0.5", "algo.kapa=0.5", "algo.kappa"),
    ("algo.kapa=0.5", "algo.kapa=0.5", "no such setting"),
    ("lr=0.1", "lr=0.1", "did you mean optim.lr?"),
    ("lr=0.1 nosuch=1", "lr=0.1", "did you mean optim.lr?"),
    ("lr=0.1 eps=-1", "lr=0.1", "did you mean optim.lr?"),
    ("noise_multiplier=1", "noise_multiplier=1", "did you mean privacy.noise_multiplier?"),
    ("algo=disk kappa=0.5", "kappa=0.5", "did you mean algo.kappa?"),
    ("epsilon=1", "epsilon=1", "did you mean eps?"),
    ("privacy.epsilon=1", "privacy.epsilon=1", "did you mean eps?"),
    ("privacy.delta=0.1", "privacy.delta=0.1", "did you mean delta?"),
    ("agorithm=disk", "agorithm=disk", "did you mean algo?"),
    ("steps=100", "steps=100", "did you mean epochs, of which the steps follow?"),
    ("clip.norm=1", "clip.norm=1", "did you mean threshold.norm?"),
    ("max_grad_norm=1", "max_grad_norm=1", "did you mean threshold.norm?"),
    ("optim.learning_rate=1", "optim.learning_rate=1", "did you mean optim.lr?"),
    ("optim.lrr=1", "optim.lrr=1", "did you mean optim.lr?"),
    ("optimizer.lr=1", "optimizer.lr=1", "did you mean optim.lr?"),
    ("filters.b=[1]", "filters.b=[1]", "did you mean filter.b?"),
    ("checkpoints.every_steps=1", "checkpoints.every_steps=1", "did you mean checkpoint.every_steps?"),
    ("dataset.train.size=1", "dataset.train.size=1", "did you mean dataset.train_size?"),
    ("noise.bands=3", "noise.bands=3", "no such setting; noise=constant has none; it is a setting of noise=banded"),
    ("model.image_size=9", "model.image_size=9", "it is a setting of model=efficientnet_b0, model=resnet18, model="),
    ("nosuch.at.all=1", "nosuch.at.all=1", "no such setting; a run has algo"),
    ("algo=disk filter.gamma=1", "filter.gamma=1", "filter=exponential has kappa; did you mean algo.gamma?"),
    ("gpu=0", "gpu=0", "did you mean device?"),
    ("data=mnist", "data=mnist", "data.root, data.download; did you mean dataset?"),
    ("evaluation=none", "evaluation=none", "it is several settings: evaluation.every_epochs, evaluation.every_steps"),
    ("results", "results", "did you mean python -m dpbench.results?"),
    ("algo=DPSGD", "algo=DPSGD", "did you mean dpsgd?"),
    ("plan=ture", "plan=ture", "true or false"),
    ("privacy.secure_noise=ture", "privacy.secure_noise=ture", "true or false"),
    ("algo=disk algo.kappa=1.5", "algo.kappa=1.5", "a number in (0, 1]"),
    ("algo=disk algo.gamma=0", "algo.gamma=0", "a finite number but 0"),
    ("algo=disk algo.gamma=1e-6", "algo.gamma=1e-06", "at most 10000, here with κ = 0.7"),
    ("query=two_point query.kappa=1.5", "query.kappa=1.5", "a number in (0, 1]"),
    ("model=mlp model.hidden=64", "model.hidden=64", "a list, such as [64]"),
    ("tracker=null", "tracker=null", "the name of one of its options"),
    ("dataset.suggested.lr=1", "dataset.suggested.lr=1", "a value for each name"),
    ("tracker.project=[x]", "tracker.project=[x]", "one text"),
    ("results_dir=", "results_dir=''", "the name of a folder"),
    ("delta=2", "delta=2", "a number from 1e-9 to 0.1, or a rule"),
    ("delta=1e-10", "delta=1e-10", "a number from 1e-9 to 0.1, or a rule"),
    ("delta=abc", "delta=abc", "a number from 1e-9 to 0.1, or a rule"),
    ("delta=1/M^1.1", "delta=1/M^1.1", "a number from 1e-9 to 0.1, or a rule"),
    ("batch_size=0", "batch_size=0", "a whole number > 0"),
    ("dataset.train_size=0", "dataset.train_size=0", "a whole number > 0"),
    (
        "dataset=mnist dataset.train_size=500 batch_size=${dataset.suggested.batch_size}",
        "batch_size=1000",
        "at most the 500",
    ),
    ("batch_size=1438", "batch_size=1438", "at most the 1437 training samples of dataset=digits"),
    ("epochs=0", "epochs=0", "a number > 0"),
    ("epochs=inf", "epochs=inf", "a number > 0"),
    ("epochs=1e-12", "epochs=1e-12", "enough for a step"),
    ("epochs=1e9", "epochs=1e+09", "at most 10,000,000 steps"),
    ("seed=-1", "seed=-1", "a whole number >= 0"),
    ("evaluation.every_epochs=inf", "evaluation.every_epochs=inf", "a finite number > 0, or null"),
    ("clip=automatic clip.stabiliser=inf", "clip.stabiliser=inf", "a finite number >= 0"),
    ("seed=1.5", "seed=1.5", "a whole number"),
    ("record_coordinates=-1", "record_coordinates=-1", "a whole number >= 0"),
    ("optim=adagrad_norm_uncertified", "optim.uncertified=false", "use optim=adagrad_norm"),
    ("algo=doppler optim=adam", "optim.beta1=0.9", "optim=filtered_adam"),
    ("algo=adp optim=adagrad_norm", "noise=step_size", "use noise=growing"),
    ("micro_batch=0", "micro_batch=0", "a whole number > 0, or null"),
    ("model=cnn5 dataset=digits", "model=cnn5", "28x28 or 32x32 pixels, but dataset=digits has 8x8"),
    ("clip=none", "clip=none", "eps=inf"),
    ("+foo=1", "+foo=1", "only set"),
    ("++algo.foo=1", "++algo.foo=1", "only set"),
    ("~algo", "~algo", "only set"),
    ("eps=1,2", "eps=1,2", "add -m"),
    ("seeds=3", "seeds=3", "several values make a sweep; add -m"),
    ("dataset.classes=3", "dataset.classes=3", "the training split has a label outside 0..2; leave it out"),
    ("dataset.train_size=1000", "dataset.train_size=1000", "the training split has images of shape (1437, 1, 8, 8)"),
    ("dataset.test_size=50", "dataset.test_size=50", "the test split has images of shape (360, 1, 8, 8)"),
    ("dataset.height=9", "dataset.height=9", "expected (1437, 1, 9, 8); leave it out"),
    ("foo", "foo", "key=value"),
    ("tracker.project=ü", "tracker.project=ü", "other signs, such as \"tracker.project='ü'\""),
    ("model.hidden=[64", "model.hidden=[64", "put quotes around a value with other signs"),
    ("algo=8", "algo=8", "the name of one of its options"),
    ("algo=[disk,dpsgd]", "algo=[disk,dpsgd]", "the name of one of its options"),
    ("algo={a:1}", "algo={a:1}", "the name of one of its options"),
    ("model={a:1} eps=3", "model={a:1}", "the name of one of its options"),
    ("=1", "=1", "key=value"),
    ("eps=null", "eps=null", "a number"),
    ("eps.x=1", "eps.x=1", "eps is one value, which has no settings of its own"),
    ("optim.lr=null", "optim.lr=null", "a number"),
    ("optim.weight_decay=inf", "optim.weight_decay=inf", "a number from 0 to 1e+38"),
    ("optim.lr=1e308", "optim.lr=1e+308", "at most 1e+38"),
    ("algo.name=null", "algo.name=null", "the name under which its runs are recorded"),
    ("model.name=", "model.name=''", "the name under which its runs are recorded"),
    ("algo=disk query.kappa=null", "query.kappa=null", "a number"),
    ("query=last_iterates query.length=null", "query.length=null", "a whole number"),
    ("algo=dp_pmlf algo.length=null", "algo.length=null", "a whole number"),
    ("model=mlp model.hidden=[null]", "model.hidden[0]=null", "a whole number"),
    ("data.root=null", "data.root=null", "a value"),
    ("data.root=", "data.root=''", "the name of a folder"),
    ("tracker.tags=null", "tracker.tags=null", "a value"),
    ("dataset.suggested=null", "dataset.suggested=null", "a value"),
    ("algo=disk algo.kappa=???", "algo.kappa=???", "a value"),
    ("optim.lr=???", "optim.lr=???", "expected a value"),
    ("dataset.suggested.lr=1", "dataset.suggested.lr=1", "a value for each name"),
    ("eps=${eps}", "eps", "Recursive interpolation"),
    ("dataset.train_size=5 batch_size=2", "delta=1/N^1.1", "that gives one, here 0.17"),
    ("hydra.job.chdir=1", "hydra.job.chdir=1", "leave it out"),
    ("hydra.nosuch=1", "hydra.nosuch=1", "no such setting; hydra has callbacks"),
    ("hydra/launcher=nosuch", "hydra/launcher=nosuch", "one of basic"),
    ("privacy.noise_multiplier=0.1", "privacy.noise_multiplier=0.1", "more than eps=8"),
    ("privacy.noise_multiplier=1 eps=inf", "privacy.noise_multiplier=1", "leave the multiplier null"),
    ("device=tpu", "device=tpu", "auto, cpu, cuda or cuda:<index>"),
    ("tracker.mode=on", "tracker.mode=on", "auto, online, offline, disabled"),
    ("-m eps=8,-1", "eps=-1", "a number > 0, or inf"),
]


@pytest.mark.parametrize(("arguments", "typed", "allowed"), BAD_INPUT, ids=[case[0] for case in BAD_INPUT])
def test_bad_input_is_one_line_that_names_field_value_and_what_is_allowed(tmp_path, arguments, typed, allowed):
    outcome = run(tmp_path / "results", *arguments.split())
    assert outcome.code == 2
    assert outcome.error().startswith(f"{typed}: ")
    assert allowed in outcome.error()
    assert records(tmp_path / "results") == []


@pytest.mark.parametrize(
    ("arguments", "culprit"),
    [
        ("--nonsense", "--nonsense"),
        ("--cfg job -m", "-m and --cfg: Hydra does one of these at a time, for one run; leave out -m"),
        ("hydra/launcher=basic -m --cfg hydra", "-m and --cfg"),
        ("--info config -m", "-m and --info"),
        ("--cfg job --info config", "--cfg and --info"),
        ("--cfg job eps=abc", "eps=abc"),
        ("--config-name nonsense", "nonsense"),
        ("--experimental-rerun gone.pickle", "gone.pickle"),
        ("-m optim.lr=interval(0,1)", "interval(0,1)"),
        ("-m eps=range(1,3,0)", "range(1,3,0)"),
        ("hydra.job.chdir=true", "stay in the folder"),
        ("-m eps=8,4 +hydra.job.chdir=True", "stay in the folder"),
        ("-m eps=8,4 hydra.sweep.dir=here", "set that instead"),
        ("-m +hydra.sweeper.params.seed='0,1'", "are typed as in eps=2,8 -m"),
    ],
)
def test_flags_that_make_no_sense_are_one_line_that_names_them(tmp_path, arguments, culprit):
    outcome = run(tmp_path / "results", *arguments.split())
    assert outcome.code == 2
    assert culprit in outcome.error()
    assert records(tmp_path / "results") == []


def test_an_enormous_eps_is_reached(tmp_path):
    outcome = run(tmp_path / "results", "eps=1e6", "privacy.accountant=pld")
    assert (outcome.code, outcome.err) == (0, "")
    assert 0.9e6 < read(only_record(outcome.results), "summary.json")["eps"] <= 1e6


@pytest.mark.parametrize(
    "arguments",
    [
        "filter=online_fir filter.smallest=inf",
        "optim=adam optim.eps=inf",
        "optim=filtered_adam optim.floor=inf",
        "optim=adagrad_norm noise=growing optim.floor=inf",
        "optim=galore optim.floor=inf",
        "optim=galore optim.scale=inf",
        "dataset.mean=[nan]",
        "dataset.std=[inf]",
    ],
)
def test_settings_that_are_not_finite_are_refused_by_name(arguments):
    culprit, _, _ = arguments.split()[-1].partition("=")
    with pytest.raises(UserError, match=rf"^{re.escape(culprit)}=.*: expected .*finite"):
        composed(*arguments.split())


@pytest.mark.parametrize(
    ("typed", "named"),
    [
        ("eps=8,8.0", r"eps=8 and .*eps=8\.0"),
        ("micro_batch=4,8", "^micro_batch=4 and micro_batch=8"),  # which is no part of a run's name
        ("checkpoint.every_steps=4,8 seed=3", r"^checkpoint\.every_steps=4 and checkpoint\.every_steps=8"),
    ],
)
def test_two_jobs_of_a_sweep_that_are_the_same_run_are_refused(tmp_path, typed, named):
    outcome = run(tmp_path / "results", "-m", *typed.split())
    assert outcome.code == 2
    assert re.search(rf"{named} are the same run; drop one$", outcome.error())
    assert records(tmp_path / "results") == []


@pytest.mark.parametrize(
    ("arguments", "differ"),
    [
        ("batch_size=64,128", "batch_size=64 and batch_size=128"),
        ("optim.lr=1,2 epochs=0.1,0.2 eps=4,8 seed=0,1", "epochs=0.1 and epochs=0.2"),
        ("privacy=poisson,shuffled", "privacy=poisson and privacy=shuffled"),
        ("noise=step_size schedule=constant,sqrt_decay", "schedule=constant and schedule=sqrt_decay"),
        ("algo=dpsgd,dcsgd_e", "algo=dpsgd and algo=dcsgd_e"),
        (
            "algo=dcsgd_p threshold.histogram_noise=20,40",
            "threshold.histogram_noise=20 and threshold.histogram_noise=40",
        ),
        ("algo=andrew threshold.count_noise=20,40", "threshold.count_noise=20 and threshold.count_noise=40"),
        ("algo=dp_ftrl_banded noise.bands=2,3", "noise.bands=2 and noise.bands=3"),
        ("plan=true batch_size=64,128", "batch_size=64 and batch_size=128"),
        ("privacy.noise_multiplier=20,40", "privacy.noise_multiplier=20 and privacy.noise_multiplier=40"),
        ("privacy.noise_multiplier=null,40", "privacy.noise_multiplier=null and privacy.noise_multiplier=40"),
    ],
)
def test_runs_of_a_search_that_make_other_releases_are_refused(tmp_path, arguments, differ):
    outcome = run(tmp_path / "results", "-m", "privacy.search_runs=8", *arguments.split())
    assert outcome.code == 2
    assert outcome.error() == (
        f"privacy.search_runs=8: the runs of a search must make the same releases, and {differ} do not; sweep them as "
        "searches of their own"
    )
    assert not (tmp_path / "results").exists()


@pytest.mark.parametrize(
    "arguments",
    [
        "privacy.search_runs=8 algo=dpsgd,disk optim.lr=1,2 threshold.norm=1,2 seed=0,1",
        "privacy.search_runs=8 batch_size=64,128 eps=inf",
        "privacy.search_runs=8 dataset=digits,mnist model=linear",
        "privacy.search_runs=8 privacy.noise_multiplier=20 optim.lr=1,2",
        "batch_size=64,128",
    ],
)
def test_runs_of_a_search_that_make_the_same_releases_and_runs_of_no_search_are_not(arguments):
    require_same_releases(compose_jobs([*SMALL, *arguments.split()], multirun=True))


def test_searches_that_differ_in_their_budget_or_their_number_of_runs_are_several():
    lines = ("privacy.search_runs=8", "privacy.search_runs=9", "privacy.search_runs=8 eps=4")
    lines += ("privacy.search_runs=8 delta=1e-5",)
    jobs = [
        compose_jobs([*SMALL, f"batch_size={64 + place}", *line.split()], multirun=False)[0]
        for place, line in enumerate(lines)
    ]
    require_same_releases(jobs)
    again = compose_jobs([*SMALL, "batch_size=80", *lines[0].split()], multirun=False)
    with pytest.raises(UserError, match="batch_size=64 and batch_size=80 do not"):
        require_same_releases([*jobs, *again])


def test_a_results_folder_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").write_text("kept")
    results = tmp_path / "file" / "results"
    outcome = run(results)
    assert outcome.code == 2
    assert outcome.error().startswith(f"results_dir={results}: can't be written")
    assert (tmp_path / "file").read_text() == "kept"


def test_a_folder_of_own_options_that_does_not_exist_is_refused(tmp_path):
    outcome = run(tmp_path / "results", "-cd", str(tmp_path / "nowhere"))
    assert outcome.code == 2
    assert str(tmp_path / "nowhere") in outcome.error()


def test_a_pattern_that_no_option_matches_is_refused(tmp_path):
    outcome = run(tmp_path / "results", "-m", "algo=glob(nothing*)")
    assert outcome.code == 2
    assert "algo=glob(nothing*)" in outcome.error()


# Refused while a run is prepared: what is wrong shows only on this machine, or in the files.

MNIST = (
    "eps=inf",
    "dataset=mnist",
    "dataset.train_size=60",
    "dataset.test_size=20",
    "batch_size=20",
    "epochs=1",
    "data.download=false",
)


def idx(path: Path, shape: tuple[int, ...], content: bytes) -> None:
    """A file in MNIST's format, whatever its content."""
    path.write_bytes(struct.pack(f">BBBB{len(shape)}I", 0, 0, 8, len(shape), *shape) + content)


def mnist(root: Path, *, train: int = 60, missing_bytes: int = 0, last_label: int = 9) -> str:
    """Write a small copy of MNIST; returns the override that points at it."""
    raw = root / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for part, count in (("train", train), ("t10k", 20)):
        pixels = bytes(range(196)) * 4 * count
        labels = bytes([*(i % 10 for i in range(count - 1)), last_label])
        idx(raw / f"{part}-images-idx3-ubyte", (count, 28, 28), pixels[: len(pixels) - missing_bytes])
        idx(raw / f"{part}-labels-idx1-ubyte", (count,), labels)
    return f"data.root={root}"


@pytest.mark.usefixtures("made_up_files")
def test_a_well_formed_copy_of_a_data_set_trains(tmp_path):
    outcome = run(tmp_path / "results", *MNIST, mnist(tmp_path / "data"))
    assert (outcome.code, outcome.err) == (0, "")
    assert status(only_record(tmp_path / "results")) == "finished"


def refused_mnist(tmp_path: Path, **damage: int) -> Outcome:
    return run(tmp_path / "results", *MNIST, mnist(tmp_path / "data", **damage))


def refused_empty(tmp_path: Path) -> Outcome:
    (tmp_path / "data").mkdir()
    return run(tmp_path / "results", *MNIST, f"data.root={tmp_path / 'data'}")


def refused_device(tmp_path: Path) -> Outcome:
    return run(tmp_path / "results", "device=cuda:7")


LATE = {
    "empty data root": (refused_empty, "dataset=mnist", "set data.download=true to fetch it, or point data.root"),
    "truncated images": (lambda path: refused_mnist(path, missing_bytes=1000), "dataset=mnist", "fetch it anew"),
    "too few images": (lambda path: refused_mnist(path, train=50), "dataset=mnist", "expected (60, 1, 28, 28)"),
    "label out of range": (lambda path: refused_mnist(path, last_label=10), "dataset=mnist", "label outside 0..9"),
    "no such GPU": (refused_device, "device=cuda:7", "use auto or cpu"),
}


@pytest.fixture(scope="module", params=LATE)
def refused(request, tmp_path_factory) -> tuple[Outcome, str, str]:
    """What came of a run that could not start, what stands for field and value, and what is said to be allowed."""
    command, typed, allowed = LATE[request.param]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "device_count", lambda: 0)
        accept_made_up_files(patch)
        return command(tmp_path_factory.mktemp("refused")), typed, allowed


def test_what_a_run_cannot_start_with_is_one_line_that_names_field_value_and_what_is_allowed(refused):
    outcome, typed, allowed = refused
    assert outcome.code == 2
    assert outcome.error().startswith(f"{typed}: ")
    assert allowed in outcome.error()
    assert "test accuracy" not in outcome.out


def test_a_run_that_cannot_start_leaves_no_record(refused):
    assert records(refused[0].results) == []


def test_one_reason_for_several_runs_of_a_sweep_is_said_once(tmp_path):
    outcome = run(tmp_path / "results", "-m", *MNIST, f"data.root={tmp_path}", "seed=3,4")
    assert outcome.code == 2
    assert "seed=3" in outcome.error()
    assert "seed=4" in outcome.error()


def test_a_forced_run_that_cannot_start_is_an_error_and_keeps_the_finished_record(results_of_a_run, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    record = only_record(results_of_a_run)
    before = snapshot(record)
    outcome = run(results_of_a_run, "force=true", "device=cuda:7")
    assert snapshot(record) == before
    assert outcome.code == 2
    assert outcome.error().startswith("device=cuda:7: ")


# A sweep, and what is finished already.


@pytest.fixture(scope="module")
def sweep(tmp_path_factory) -> Outcome:
    return run(tmp_path_factory.mktemp("sweep"), "algo=dpsgd,disk", "-m", "eps=8,inf")


def table_of(results: Path) -> list[dict[str, str]]:
    (path,) = results.glob("sweeps/*/table.csv")
    with path.open(newline="") as stream:
        return list(csv.DictReader(stream))


def test_a_sweep_makes_one_finished_record_for_each_combination(sweep):
    assert (sweep.code, sweep.err) == (0, "")
    assert [status(record) for record in records(sweep.results)] == ["finished"] * 4
    summaries = [read(record, "summary.json") for record in records(sweep.results)]
    found = {(summary["algorithm"], summary["target_eps"]) for summary in summaries}
    assert found == {("dpsgd", 8.0), ("dpsgd", "inf"), ("disk", 8.0), ("disk", "inf")}


def test_the_table_of_a_sweep_says_what_the_records_say(sweep):
    rows = table_of(sweep.results)
    assert [row["run"] for row in rows] == [
        "algo=dpsgd eps=8",
        "algo=dpsgd eps=inf",
        "algo=disk eps=8",
        "algo=disk eps=inf",
    ]
    assert {Path(row["folder"]) for row in rows} == set(records(sweep.results))
    for row in rows:
        summary = read(Path(row["folder"]), "summary.json")
        assert f"algo={summary['algorithm']} eps={float(summary['target_eps']):g}" == row["run"]
        assert float(row["test accuracy, last (%)"]) == pytest.approx(100 * summary["test_accuracy"]["final"])
        assert float(row["noise multiplier"]) == pytest.approx(summary["noise_multiplier"], abs=1e-4)
        assert int(row["steps"]) == STEPS


def test_the_output_of_a_sweep_shows_every_run_and_its_folder(sweep):
    for row in table_of(sweep.results):
        assert f"{row['run']}: {row['folder']}" in sweep.out.splitlines()
        accuracy = f"{float(row['test accuracy, last (%)']):.2f}"
        assert re.search(rf"^{row['run']} .*{accuracy}.*finished", sweep.out, re.MULTILINE)


def test_a_sweep_over_seeds_ends_with_means_of_what_has_finished():
    def row(name, accuracy, digest, seed):
        status = "failed" if accuracy is None else "finished"
        return Row(name, {"test_accuracy": {"final": accuracy}}, status, None, f"/results/runs/{digest}/{seed}")

    accuracies = [0.7, 0.75, 0.77, None]
    rows = [row(f"algo=disk seed={seed}", accuracy, "a", seed) for seed, accuracy in enumerate(accuracies)]
    rows.append(row("algo=dpsgd seed=0", 0.5, "b", 0))
    shown = StringIO()
    print_means(rows, Console(file=shown, width=160))
    _, head, *lines = [re.split(r"\s{2,}", line.strip()) for line in shown.getvalue().splitlines()]
    assert head == ["mean over seeds", "test accuracy, last (%), ± standard deviation", "seeds"]
    # (70 + 75 + 77)/3, and the root of (4² + 1² + 3²)/2
    assert lines == [["algo=disk", "74.00 ± 3.61", "3"], ["algo=dpsgd", "50.00", "1"]]
    shown = StringIO()
    print_means([rows[0], rows[3], rows[4]], Console(file=shown, width=160))
    assert shown.getvalue() == ""


def test_a_folder_is_shown_only_where_it_is(tmp_path):
    outcome = run(tmp_path, "-m", "seed=3,4", "dataset=digits,mnist", f"data.root={tmp_path}")
    assert outcome.code == 2
    shown = [line.partition(": ")[2] for line in outcome.out.splitlines() if ": /" in line]
    assert [*map(Path, shown)] == [Path(row["folder"]) for row in table_of(tmp_path) if row["folder"]]
    assert {*map(Path, shown)} == set(records(tmp_path))
    assert len(shown) == 2


def test_names_and_folders_are_shown_as_they_are():
    row = Row("algo=[disk,dpsgd]", {}, "failed", "no reason", "/results [old]/runs/0")
    console = make_console()
    console.file = shown = StringIO()
    print_table([row], console)
    assert f"\n{row.name}: {row.folder}\n" in shown.getvalue()
    assert re.search(rf"^{re.escape(row.name)} ", shown.getvalue(), re.MULTILINE)


def test_a_finished_sweep_trains_nothing_when_run_again(sweep, monkeypatch):
    before = snapshot(sweep.results)
    monkeypatch.setattr(PrivateStep, "take", lambda *_: pytest.fail("trained"))
    again = run(sweep.results, "-m", "eps=8,inf", "algo=dpsgd,disk")
    assert (again.code, again.err) == (0, "")
    assert snapshot(sweep.results) == before
    for row in table_of(sweep.results):
        assert row["folder"] in again.out


def test_a_plan_knows_what_is_finished(sweep):
    plan = run(sweep.results, "-m", "algo=dpsgd", "eps=inf", "seed=0,1", "plan=true")
    first, second = (line for line in plan.out.splitlines() if hash_of(*SMALL, "eps=inf") in line)
    assert re.search(r" 0 .* finished$", first.rstrip())
    assert re.search(r" 1 .* to run$", second.rstrip())


def test_a_sweep_runs_only_what_is_not_finished(results_of_a_run):
    before = snapshot(results_of_a_run / "runs")
    outcome = run(results_of_a_run, "-m", "seed=0,1")
    after = snapshot(results_of_a_run / "runs")
    assert outcome.code == 0
    assert "2 runs, 1 of them finished already" in outcome.out
    assert {name: after[name] for name in before} == before
    assert [record.name for record in records(results_of_a_run)] == ["0", "1"]


def test_a_finished_run_says_so_and_what_it_does_not_have(results_of_a_run):
    again = run(results_of_a_run)
    assert (again.code, again.err) == (0, "")
    assert "the run is finished already; force=true runs it anew" in again.out
    asked = run(results_of_a_run, "keep_model=true")
    assert asked.code == 0
    assert "finished without keep_model; force=true runs it anew" in " ".join(asked.err.split())
    assert run(results_of_a_run, "keep_model=true", "force=true").err == ""
    assert run(results_of_a_run, "keep_model=true").err == ""


def test_force_runs_again_and_keeps_the_old_record_until_the_new_one_is_finished(results_of_a_run, monkeypatch):
    record = only_record(results_of_a_run)
    before = snapshot(record)
    seen = []
    original = PrivateStep.take

    def call(self, batch):
        seen.append(snapshot(record))
        return original(self, batch)

    monkeypatch.setattr(PrivateStep, "take", call)
    outcome = run(results_of_a_run, "force=true")
    assert outcome.code == 0
    assert seen == [before] * STEPS
    assert only_record(results_of_a_run) == record
    after = snapshot(record)
    assert after.keys() == before.keys()
    assert all(after[name][0] > before[name][0] for name in before)
    assert status(record) == "finished"
    assert [path.name for path in record.parent.iterdir()] == [record.name]


def test_a_single_run_is_composed_once(tmp_path, monkeypatch, composed_anew):
    composed, compose = [], ConfigLoaderImpl.load_configuration

    def counted(self, *arguments, **named):
        composed.append(arguments)
        return compose(self, *arguments, **named)

    monkeypatch.setattr(ConfigLoaderImpl, "load_configuration", counted)
    run(tmp_path, "algo=disk")
    assert status(only_record(tmp_path)) == "finished"
    assert len(composed) == 1


def test_settings_of_hydra_have_hydra_carry_out_a_single_run(tmp_path):
    typed = ("seeds=1", f"hydra.run.dir={tmp_path / 'made by Hydra'}")
    run(tmp_path / "results", *typed)
    record = only_record(tmp_path / "results")
    assert status(record) == "finished"
    assert (tmp_path / "made by Hydra").is_dir()
    assert read(record, "provenance.json")["command"][-2:] == [*typed]  # and not as Hydra was told


@pytest.mark.parametrize("position", [0, 1, 2])
def test_the_flag_of_a_sweep_may_stand_anywhere(tmp_path, position):
    arguments = ["algo=dpsgd", "seed=1,2", "plan=true"]
    arguments.insert(position, "-m")
    outcome = run(tmp_path, *arguments)
    assert (outcome.code, outcome.err) == (0, "")
    assert sum("to run" in line for line in outcome.out.splitlines()) == 2


def test_a_sweep_of_one_value_is_a_sweep(tmp_path):
    outcome = run(tmp_path, "eps=8", "-m")
    assert outcome.code == 0
    assert len(table_of(tmp_path)) == len(records(tmp_path)) == 1


# eps=inf


@pytest.mark.parametrize(("clip", "word"), [("automatic", "on"), ("none", "off")])
def test_without_a_budget_the_run_says_whether_it_clips(tmp_path, clip, word):
    outcome = run(tmp_path, "eps=inf", f"clip={clip}")
    assert outcome.code == 0
    assert f"eps=inf: not private; no noise, clipping {word}" in outcome.out
    summary = read(only_record(tmp_path), "summary.json")
    assert (summary["eps"], summary["private"], summary["noise_multiplier"]) == ("inf", False, 0.0)
    assert summary["clipped"] is (word == "on")


@pytest.mark.parametrize("typed", ["keep_model=2", "force=0.5", "data.download=-1"])
def test_a_number_is_no_flag(tmp_path, typed):
    outcome = run(tmp_path, typed)
    assert outcome.code == 2
    assert outcome.error() == f"{typed}: expected true or false"


# A user's own options.


def test_an_algorithm_of_the_users_own_runs_beside_the_others(tmp_path, monkeypatch):
    (tmp_path / "mine" / "algo").mkdir(parents=True)
    (tmp_path / "mine" / "algo" / "smooth.yaml").write_text(
        "# @package _global_\n"
        "defaults:\n"
        "  - override /filter: momentum\n"
        "  - override /clip: threshold\n"
        "  - _self_\n"
        "algo:\n"
        "  name: smooth\n"
    )
    expected = {"smooth": hash_of(*SMALL, "filter=momentum", "clip=threshold"), "dpsgd": hash_of(*SMALL)}
    plan = run(tmp_path, "-cd", str(tmp_path / "mine"), "algo=smooth", "plan=true")
    assert expected["smooth"] in plan.out

    monkeypatch.chdir(tmp_path)
    outcome = run(tmp_path, "-cd", "mine", "algo=smooth,dpsgd", "-m")
    assert (outcome.code, outcome.err) == (0, "")
    found = {read(record, "summary.json")["algorithm"]: record.parent.name for record in records(tmp_path)}
    assert found == expected


def test_an_option_with_the_name_of_a_built_in_one_is_refused(tmp_path):
    """Hydra would take the built-in one, and say nothing."""
    (tmp_path / "mine" / "algo").mkdir(parents=True)
    file = tmp_path / "mine" / "algo" / "disk.yaml"
    file.write_text("# @package _global_\ndefaults:\n  - /algo/dpsgd@_global_\n")
    outcome = run(tmp_path / "results", "-cd", str(tmp_path / "mine"), "algo=disk")
    assert outcome.code == 2
    assert outcome.error() == f"{file}: algo=disk is an option of dpbench itself; give the file another name"


# Paths have any signs, and a home.


def test_a_folder_is_typed_as_it_is_called(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    typed = Path("~/a, b (c)=d")
    assert run(typed, "eps=inf", "seed=0,1", "data.root=~/x{y", "-m").code == 0
    assert [path.name for path in tmp_path.iterdir()] == ["a, b (c)=d"]
    made = records(tmp_path / "a, b (c)=d")
    roots = [yaml.safe_load((record / "config.yaml").read_text())["data"]["root"] for record in made]
    assert roots == [str(tmp_path / "x{y")] * 2
    listed = results(typed, "list")
    assert (listed.code, len(rows(listed))) == (0, 2)


@pytest.mark.parametrize("name", ["a\\b", "a\\\\b", "a\\'b", "a\\\\'b'", "b\\", "'\\\\", "plain"])
def test_a_folder_with_backslashes_is_typed_as_it_is_called(name):
    (job,) = compose_jobs([f"results_dir={in_grammar(name)}"], multirun=False)
    assert job.config.results_dir == name


# Warnings.


def test_what_dpbench_warns_of_is_a_line_and_what_others_warn_of_is_shown_as_ever(tmp_path, monkeypatch, recwarn):
    apply, show = RecursiveLowPass.apply, warnings.showwarning

    def others_warn(self, gradient):
        warnings.warn("something of theirs", UserWarning, stacklevel=1)
        warnings.warn("a quotation\n  in lines", PlainWarning, stacklevel=1)
        return apply(self, gradient)

    monkeypatch.setattr(RecursiveLowPass, "apply", others_warn)
    outcome = run(tmp_path, "algo=doppler", "filter.b=[0.5,0.6]", "filter.a=[]")
    assert outcome.code == 0
    line = "warning: filter.b=[0.5, 0.6], filter.a=[]: the gain at frequency zero is not 1; the start-up correction "
    said = {f"{line}divides it out, so only the ratios within b matter", "warning: a quotation in lines"}
    assert set(outcome.err.splitlines()) == said
    assert {str(shown.message) for shown in recwarn} == {"something of theirs"}
    assert warnings.showwarning is show


# A rule for delta needs no quotes.


def test_a_rule_for_delta_is_typed_as_it_reads(tmp_path):
    outcome = run(tmp_path, "eps=inf", "delta=1/N^1.5")
    assert (outcome.code, outcome.err) == (0, "")
    assert read(only_record(tmp_path), "summary.json")["delta"] == pytest.approx(1437**-1.5)


def test_rules_for_delta_make_a_sweep(tmp_path):
    outcome = run(tmp_path, "eps=inf", "delta=1/N^1.1,1/N", "-m")
    assert (outcome.code, outcome.err) == (0, "")
    deltas = sorted(read(record, "summary.json")["delta"] for record in records(tmp_path))
    assert deltas == [pytest.approx(1437**-1.1), pytest.approx(1 / 1437)]


# As a user starts it, from another folder.


@pytest.mark.parametrize("pattern", ["dp_ftrl*", pytest.param("*", marks=pytest.mark.slow)])
def test_the_module_sweeps_over_all_algorithms_of_a_pattern_into_the_folder_it_is_started_in(tmp_path, pattern):
    done = started(tmp_path, *SMALL, f"algo=glob({pattern})", "-m", "eps=inf")
    assert (done.returncode, done.stderr) == (0, "")
    found = [read(record, "summary.json")["algorithm"] for record in records(tmp_path / "results")]
    assert sorted(found) == sorted(path.stem for path in (CONF / "algo").glob(f"{pattern}.yaml"))
    assert [path.name for path in tmp_path.iterdir()] == ["results"]
    assert len(table_of(tmp_path / "results")) == len(found)


def test_the_module_exits_with_2_and_one_line_on_bad_input(tmp_path):
    done = started(tmp_path, "eps=-1")
    assert done.returncode == 2
    assert done.stderr == "error: eps=-1: expected a number > 0, or inf to train without noise\n"
    assert done.stdout == ""
    assert list(tmp_path.iterdir()) == []
