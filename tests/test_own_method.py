"""A method from outside the package: the examples of the documentation as they stand, and what is refused."""

import re
from pathlib import Path

import pytest
import torch
from cli import PLAIN, ROOT, read, records, run, started, status, write_option
from documented_examples import OWN_METHOD, typed, write_own_method

from dpbench.config import compose_jobs, config_hash, resolved
from dpbench.privacy.__main__ import main as privacy
from dpbench.run import main as dpbench_run

README = (ROOT / "README.md").read_text()


@pytest.fixture(scope="module")
def my_conf(tmp_path_factory) -> Path:
    return write_own_method(tmp_path_factory.mktemp("outside"))


def composed_with(conf: Path, *overrides: str):
    return compose_jobs(overrides, multirun=False, config_dirs=[conf])[0].config


def test_the_combination_in_readme_is_the_one_typed(tmp_path):
    (shown,) = re.findall(r"`my_conf/(algo/disk_adp.yaml)`.*?```yaml\n(.*?)```", README, re.DOTALL)
    name, content = shown
    (tmp_path / name).parent.mkdir()
    (tmp_path / name).write_text(content)
    typed = re.search(r"`(algo=disk noise=\S+ schedule=\S+)`", README)[1]
    (combined,) = compose_jobs(typed.split(), multirun=False)
    assert config_hash(composed_with(tmp_path, "algo=disk_adp")) == config_hash(combined.config)


def test_the_example_trains_in_a_process_of_its_own(my_conf):
    done = started(my_conf.parent, *typed(OWN_METHOD)[0], *PLAIN)
    assert (done.returncode, done.stderr) == (0, "")
    (record,) = records(my_conf.parent / "results")
    assert status(record) == "finished"
    summary = read(record, "summary.json")
    assert summary["algorithm"] == "mine"
    assert summary["eps"] <= 8
    assert summary["test_accuracy"]["final"] > 0.3  # a tenth by guessing
    assert "  kind: my_filters.Median\n  window: 5\n" in (record / "config.yaml").read_text()


def test_the_example_sweeps_beside_a_built_in_method(my_conf, tmp_path):
    sweep, crossed, modelled = typed(OWN_METHOD)[1:4]
    at = sweep.index("my_conf")
    outcome = run(tmp_path, *sweep[:at], str(my_conf), *sweep[at + 1 :], settings=PLAIN)
    assert (outcome.code, outcome.err) == (0, "")
    found = {read(record, "summary.json")["algorithm"]: record for record in records(tmp_path)}
    assert found.keys() == {"mine", "dpsgd"}
    # The first step of either is the same, the others are not.
    final = {name: read(record, "summary.json")["test_accuracy"] for name, record in found.items()}
    assert final["mine"] != final["dpsgd"]
    at = crossed.index("my_conf")
    plan = run(tmp_path, *crossed[:at], str(my_conf), *crossed[at + 1 :], "plan=true", settings=PLAIN)
    assert (plan.code, plan.err) == (0, "")
    at = modelled.index("my_conf")
    outcome = run(tmp_path / "own", *modelled[:at], str(my_conf), *modelled[at + 1 :], settings=PLAIN)
    assert (outcome.code, outcome.err) == (0, "")
    (record,) = records(tmp_path / "own")
    assert read(record, "summary.json")["model"] == "patches"
    assert read(record, "summary.json")["test_accuracy"]["final"] > 0.3


def test_the_optimizer_of_the_example_takes_the_suggested_rate(my_conf):
    config = composed_with(my_conf, *[word for word in typed(OWN_METHOD)[4] if word not in ("-cd", "my_conf")])
    own = config.optim.build([torch.nn.Parameter(torch.zeros(2))])
    assert isinstance(own, torch.optim.NAdam)
    assert own.param_groups[0]["lr"] == composed_with(my_conf, "optim=adam").optim.lr != 0.1


def test_the_privacy_command_takes_it(my_conf, capsys):
    assert privacy(["-cd", str(my_conf), "algo=mine", "epochs=1", "privacy.accountant=rdp", "--grid", "2"]) == 0
    assert "differentially private" in capsys.readouterr().out
    assert privacy(["-cd", str(my_conf / "nowhere"), "algo=mine"]) == 2


def test_the_hash_tells_module_and_name_and_leaves_built_in_ones_as_they_were(tmp_path):
    for module in ("one", "two"):
        (tmp_path / f"own_{module}.py").write_text(
            "from dataclasses import dataclass\n"
            "from dpbench.filters import Filter\n"
            "@dataclass\n"
            "class Identity(Filter):\n"
            "    def apply(self, gradient):\n"
            "        return gradient\n"
        )
        write_option(tmp_path, module, f"own_{module}.Identity")
    hashes = {config_hash(composed_with(tmp_path, f"filter={name}")) for name in ("none", "one", "two")}
    assert len(hashes) == 3
    assert resolved(composed_with(tmp_path, "filter=none"))["filter"] == {"kind": "Identity"}
    assert resolved(composed_with(tmp_path, "filter=one"))["filter"] == {"kind": "own_one.Identity"}


BAD_CLASSES = """
from dataclasses import dataclass
from torch import Tensor
from dpbench.clip import Clip
from dpbench.filters import Filter

number = 3

@dataclass
class Good(Filter):
    window: int = 3

    def apply(self, gradient):
        return gradient

class Bare(Filter):
    window: int = 3

@dataclass
class Lacking(Filter):
    window: int = 3

@dataclass
class NoFilter(Clip):
    pass

@dataclass
class Public(Good):
    def __post_init__(self):
        self.last = None

@dataclass
class Unset(Good):
    remembers = ("_last", "_mean")

    def __post_init__(self):
        self._last = None

@dataclass
class NoTuple(Good):
    remembers = ("_last")

@dataclass
class Named(Good):
    kind: str = "median"

@dataclass
class Unusual(Good):
    taps: Tensor | None = None
"""
EXTENDS = "expected a dataclass that extends dpbench.filters.base.Filter"
BAD = {
    "no module": ("nowhere.Good", "", "/schema/filter=nowhere.Good: there is no module nowhere; put it into"),
    "no submodule": ("bad_stages.deep.Good", "", "/schema/filter=bad_stages.deep.Good: there is no module"),
    "imports what is missing": ("bad_import.X", "", "/schema/filter=bad_import.X: its module can't be imported: No"),
    "raises": ("bad_module.X", "", "/schema/filter=bad_module.X: its module can't be imported: ZeroDivisionError"),
    "no class": ("bad_stages.Nothing", "", "bad_stages.py has no class Nothing"),
    "no class at all": ("bad_stages.number", "", f"/schema/filter=bad_stages.number: {EXTENDS}"),
    "of another group": ("bad_stages.NoFilter", "", f"/schema/filter=bad_stages.NoFilter: {EXTENDS}"),
    "no dataclass": ("bad_stages.Bare", "", f"/schema/filter=bad_stages.Bare: {EXTENDS}; it lacks @dataclass"),
    "no method": ("bad_stages.Lacking", "", "bad_stages.Lacking: it lacks apply, which Filter leaves to it"),
    "what it remembers without an underscore": (
        "bad_stages.Public",
        "",
        "filter=Public: it sets last, which is no field of it; call what it remembers or derives _last",
    ),
    "what it remembers before it is set": (
        "bad_stages.Unset",
        "",
        "filter=Unset: it names _mean in remembers, but begins without; set it in __post_init__, to None say",
    ),
    "what it remembers as a text": (
        "bad_stages.NoTuple",
        "",
        "filter=NoTuple: its remembers is one text; a tuple ends in a comma, ('_last',)",
    ),
    "a field with the name of the class": (
        "bad_stages.Named",
        "",
        "/schema/filter=bad_stages.Named: its field kind has the name under which a record has the class; call it",
    ),
    "a field that is no setting": ("bad_stages.Unusual", "", "its fields can't all be settings"),
    "a field it lacks": ("bad_stages.Good", "windw: 3", "filter.windw: a YAML file sets it, but Good has no such"),
    "a value of another type": ("bad_stages.Good", "window: three", "filter.window=three: expected a whole number"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_is_wrong_is_one_line(tmp_path, case):
    schema, extra, expected = BAD[case]
    (tmp_path / "bad_stages.py").write_text(BAD_CLASSES)
    (tmp_path / "bad_import.py").write_text("import a_package_that_nobody_has\n")
    (tmp_path / "bad_module.py").write_text("1 / 0\n")
    write_option(tmp_path, "own", schema, extra)
    outcome = run(tmp_path / "results", "-cd", str(tmp_path), "filter=own")
    assert outcome.code == 2
    assert expected in outcome.error()
    assert records(tmp_path / "results") == []


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("algo.window=0", "algo.window=0: expected a whole number >= 1"),
        ("filter.window=x", "filter.window=x: expected a whole number"),
        ("filter.windw=3", "filter.windw=3: no such setting; filter=median has window; did you mean filter.window?"),
        (
            "shard_states=true",
            "shard_states=true: Median does not say that it works element by element, by elementwise = True in its "
            "class, so no process can have a part of it",
        ),
    ],
)
def test_settings_typed_for_it_are_checked_as_those_of_a_built_in_stage(my_conf, tmp_path, typed, expected):
    outcome = run(tmp_path, "-cd", str(my_conf), "algo=mine", typed)
    assert outcome.code == 2
    assert outcome.error() == expected


def test_an_option_that_no_folder_has_is_not_said_to_need_one(my_conf, tmp_path):
    said = run(tmp_path, "-cd", str(my_conf), "algo=mien").error()
    assert said.endswith("lp_dpgalore, mine; did you mean mine?")


@pytest.mark.parametrize("command", [dpbench_run, privacy], ids=["run", "privacy"])
def test_a_second_folder_of_options_is_refused(my_conf, tmp_path, command, capsys):
    assert command(["-cd", str(my_conf), "-cd", str(tmp_path), "algo=mine"]) == 2
    assert " ".join(capsys.readouterr().err.split()) == f"error: -cd {tmp_path}: expected once"


@pytest.mark.parametrize("group", ["clip", "filter", "model", "noise", "optim", "query", "schedule", "threshold"])
def test_a_file_that_names_no_class_of_a_stage_is_refused(tmp_path, group):
    (tmp_path / "conf" / group).mkdir(parents=True)
    (tmp_path / "conf" / group / "empty.yaml").write_text("# Mine.\n")
    outcome = run(tmp_path, "-cd", str(tmp_path / "conf"), f"{group}=empty", settings=())
    assert outcome.code == 2
    assert outcome.error() == (
        f"{group}=empty: its file names no class; "
        f"its defaults need a line such as - /schema/{group}@_here_: <module>.<Class>"
    )


PACKAGE = "# @package _global_\n"
NAMED = "algo:\n  name: mine\n"
UNNAMED = "algo/mine.yaml sets no algo.name, under which its runs are recorded"
SLIPS = {
    "a name that nothing reads": (
        PACKAGE + "algo:\n  name: mine\n  kapa: 0.3\n",
        "algo.kapa=0.3: algo/mine.yaml sets it, but nothing reads it; did you mean algo.kappa?",
    ),
    "a name like no other": (
        PACKAGE + "algo:\n  name: mine\n  zzz: 1\n",
        "algo.zzz=1: algo/mine.yaml sets it, but nothing reads it; an option would, by ${algo.zzz}",
    ),
    "no package": ("algo:\n  name: mine\n", "algo/mine.yaml lacks the line # @package _global_ at its beginning"),
    "no package, with defaults": (
        "defaults:\n  - override /filter: exponential\n  - _self_\nalgo:\n  name: mine\n",
        "algo/mine.yaml lacks the line # @package _global_ at its beginning",
    ),
    "no group": (
        PACKAGE + "algo:\n  name: mine\nfiltr:\n  kappa: 1\n",
        "filtr: a YAML file sets it, but a run has no such setting; did you mean filter?",
    ),
    "no number": (PACKAGE + "optim:\n  lr: fast\n" + NAMED, "optim.lr=fast: expected a number"),
    "null for a number": (PACKAGE + "optim:\n  lr: null\n" + NAMED, "optim.lr=null: expected a number"),
    "null for a setting of the run": (PACKAGE + "eps: null\n" + NAMED, "eps=null: expected a number"),
    "an option as a setting": (
        PACKAGE + NAMED + "filter: momentum\n",
        "algo/mine.yaml: filter=momentum is chosen in its defaults, by the line - override /filter: momentum",
    ),
    "an option that does not override": (
        PACKAGE + "defaults:\n  - filter: momentum\n  - _self_\n" + NAMED,
        "algo/mine.yaml: filter=momentum is chosen in its defaults, by the line - override /filter: momentum",
    ),
    "an option from the top that does not override": (
        PACKAGE + "defaults:\n  - /filter: momentum\n  - _self_\n" + NAMED,
        "a YAML file: filter=momentum is chosen in its defaults, by the line - override /filter: momentum",
    ),
    "a group that is not there": (
        PACKAGE + "defaults:\n  - override /filtr: momentum\n  - _self_\n" + NAMED,
        "algo/mine.yaml: there is no group filtr to override; did you mean filter?",
    ),
    "a group that is not named from the top": (
        PACKAGE + "defaults:\n  - override filter: momentum\n  - _self_\n" + NAMED,
        "algo/mine.yaml: filter is overridden under its name from the top, - override /filter: ...",
    ),
    "comments alone": ("# A method of mine.\n", UNNAMED),
    "nothing": ("", UNNAMED),
    "a word": ("mine\n", UNNAMED),
    "no name": (PACKAGE + "eps: 3\n", UNNAMED),
    "a list": ("- 1\n- 2\n", "algo/mine.yaml: expected lines such as key: value, not [1, 2]"),
    "itself": (
        PACKAGE + "defaults:\n  - mine\n" + NAMED,
        "a YAML file has itself among its defaults; to change an option, name it there and set the rest",
    ),
    "a value to be given": (
        PACKAGE + "defaults:\n  - override /filter: exponential\n  - _self_\n" + NAMED + "  kappa: ???\n",
        "algo.kappa=???: expected a value",
    ),
    "a setting without the stage that takes it": (
        PACKAGE + NAMED + "  kappa: 0.7\n",
        "algo.kappa=0.7: algo/mine.yaml sets it, but no stage that it chooses reads it; "
        "filter=exponential or noise=disk_released or query=two_point would",
    ),
    "a reference to nothing": (
        PACKAGE + "optim:\n  lr: ${algo.lr}\n" + NAMED,
        "optim.lr: it takes its value from algo.lr, which nothing sets; set one of the two",
    ),
}


@pytest.mark.parametrize("case", SLIPS)
def test_a_slip_in_the_file_of_an_algorithm_is_one_line(tmp_path, case):
    content, expected = SLIPS[case]
    (tmp_path / "algo").mkdir()
    (tmp_path / "algo/mine.yaml").write_text(content)
    outcome = run(tmp_path / "results", "-cd", str(tmp_path), "algo=mine")
    assert (outcome.code, outcome.error()) == (2, expected)


def test_what_a_file_sets_of_the_run_goes_before_the_defaults_and_what_is_typed_before_both(tmp_path):
    (tmp_path / "algo").mkdir()
    settings = (
        "eps: 3\ndelta: 1e-6\nseed: 7\ndevice: cpu\nbatch_size: 99\nepochs: 2\nkeep_model: true\n"
        "evaluation:\n  every_steps: 5\ncheckpoint:\n  every_steps: 6\noptim:\n  lr: 0.125\n"
    )
    (tmp_path / "algo/mine.yaml").write_text(f"{PACKAGE}{settings}algo:\n  name: mine\n")
    found = composed_with(tmp_path, "algo=mine", "seed=8", "evaluation.every_steps=4")
    assert (found.eps, found.delta, found.seed, found.device) == (3, 1e-6, 8, "cpu")
    assert (found.batch_size, found.epochs, found.keep_model, found.optim.lr) == (99, 2, True, 0.125)
    assert (found.evaluation.every_steps, found.checkpoint.every_steps) == (4, 6)
    (tmp_path / "dataset").mkdir()
    (tmp_path / "dataset/few.yaml").write_text(f"{PACKAGE}defaults:\n  - digits\n  - _self_\nbatch_size: 50\n")
    assert composed_with(tmp_path, "dataset=few").batch_size == 50
    assert composed_with(tmp_path, "dataset=few", "algo=mine").batch_size == 99


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"algo:\n  name: [1, 2\nx: y\n", ", line 3: no YAML (expected ',' or ']', but got ':')"),
        (b"algo:\n  name: a\n  name: b\n", ", line 3: no YAML (found duplicate key name)"),
        (b"# \xe4\nalgo:\n", ": can't be read ('utf-8' codec"),
    ],
)
@pytest.mark.parametrize("typed", ["algo=mine", "--help"])
def test_an_unreadable_file_is_named_with_its_line(tmp_path, content, expected, typed):
    (tmp_path / "algo").mkdir()
    (tmp_path / "algo/mine.yaml").write_bytes(content)
    outcome = run(tmp_path / "results", "-cd", str(tmp_path), typed)
    assert outcome.code == 2
    assert outcome.error().startswith(f"{tmp_path}/algo/mine.yaml{expected}")


def test_an_unreadable_file_that_is_not_chosen_stops_nothing(my_conf, tmp_path):
    conf = write_own_method(tmp_path)
    (conf / "algo/other.yaml").write_text("a: b: c\n")
    assert config_hash(composed_with(conf, "algo=mine")) == config_hash(composed_with(my_conf, "algo=mine"))


def test_what_is_typed_without_effect_is_refused_and_what_a_file_sets_for_a_replaced_stage_is_not(tmp_path):
    replaced = ("algo=disk", "query=one_point", "filter=none")
    assert run(tmp_path, *replaced, "plan=true", settings=PLAIN).code == 0
    outcome = run(tmp_path, *replaced, "algo.gamma=0.3")
    assert (outcome.code, outcome.error()) == (2, "algo.gamma=0.3: no stage that is chosen here reads it; leave it out")


def test_what_is_taken_over_from_a_method_whose_stages_are_replaced_is_no_slip(tmp_path):
    (tmp_path / "algo").mkdir()
    replaced = "  - override /query: one_point\n  - override /filter: momentum\n  - _self_\n"
    (tmp_path / "algo/mine.yaml").write_text(f"{PACKAGE}defaults:\n  - disk\n{replaced}algo:\n  name: mine\n")
    found = composed_with(tmp_path, "algo=mine")
    assert (found.algo["name"], found.algo["kappa"]) == ("mine", 0.7)
    assert type(found.query).__name__ == "OnePoint"


@pytest.mark.parametrize(
    "typed",
    ["algo=dp_ftrl noise=constant", "algo=innerouter query=one_point optim=adam", "algo=dicesgd clip=automatic"],
)
def test_every_stage_of_a_built_in_method_can_be_replaced(typed):
    compose_jobs(typed.split(), multirun=False)


FAILING = """\
from dataclasses import dataclass

from dpbench.filters import Filter


def helper(gradient):
    return gradient / [1]


@dataclass
class Failing(Filter):
    early: bool = False

    def __post_init__(self):
        if self.early:
            raise ValueError("not so early")

    def apply(self, gradient):
        return helper(gradient)
"""


def test_an_error_in_a_file_of_ones_own_names_file_and_line(tmp_path):
    (tmp_path / "failing_stage.py").write_text(FAILING)
    write_option(tmp_path, "own", "failing_stage.Failing", "")
    outcome = run(tmp_path / "results", "-cd", str(tmp_path), "filter=own", settings=PLAIN)
    assert outcome.code == 1
    (record,) = records(tmp_path / "results")
    reason = read(record, "status.json")["reason"]
    assert reason.startswith("TypeError: unsupported operand type(s) for /: 'Tensor' and 'list'")
    assert reason.endswith(" (failing_stage.py, line 7)")
    outcome = run(tmp_path / "results", "-cd", str(tmp_path), "filter=own", "filter.early=true", settings=PLAIN)
    assert (outcome.code, outcome.error()) == (2, "failing_stage.py, line 16: ValueError: not so early")
