"""--help and what else tells of a command without running anything."""

import importlib
import re
import subprocess
import sys

import pytest
import yaml
from cli import CONF, ROOT, records, run

from dpbench import __version__
from dpbench.config import compose_jobs

SLURM = CONF / "hydra" / "launcher" / "slurm.yaml"
TOLD = {
    "--info searchpath": r"hydra\.searchpath in main +\| python://",
    "--info config": "suggested:\n",
    "--info defaults-tree": "    query: one_point:\n",
    "algo=disk --info": "BasicSweeper",
    "--info config algo=disk": "query: two_point:\n",
    "algo=disk --hydra-help": "--shell-completion,-sc",
}
# Imports what all need, and carries each command line out in a process of its own.
EACH_APART = """
import os, runpy, sys
import dpbench.run, hydra.main, hydra._internal.hydra
folder, *lines = sys.argv[1:]
for number, line in enumerate(lines):
    child = os.fork()
    if not child:
        for stream, name in ((1, "out"), (2, "err")):
            os.dup2(os.open(f"{folder}/{number}.{name}", os.O_CREAT | os.O_WRONLY), stream)
        sys.argv = ["dpbench", *line.split()]
        runpy.run_module("dpbench.run", run_name="__main__")
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    """By command line, its exit code, output and errors."""
    folder = tmp_path_factory.mktemp("told")
    command = [sys.executable, "-W", "ignore", "-c", EACH_APART, folder, *TOLD]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    files = [[(folder / f"{number}.{name}").read_text() for name in ("out", "err")] for number in range(len(TOLD))]
    return {line: (int(code), *texts) for line, code, texts in zip(TOLD, done.stdout.splitlines(), files, strict=True)}


@pytest.mark.parametrize("typed", TOLD)
def test_what_hydra_tells_of_itself_is_told(typed, told):
    """Where no command has looked for options yet."""
    code, out, err = told[typed]
    assert (code, err) == (0, "")
    assert re.search(TOLD[typed], out), out


def test_what_hydra_can_not_tell_is_said_in_a_line(tmp_path):
    outcome = run(tmp_path, "nosuch=3", "--info", "config")
    assert outcome.code == 2
    assert outcome.error().startswith("nosuch=3: no such setting; a run has algo, ")


def test_help_lists_every_group_with_every_option_and_nothing_internal(tmp_path):
    outcome = run(tmp_path, "algo=disk", "--help")
    assert (outcome.code, outcome.err) == (0, "")
    shown = outcome.out.splitlines()
    folders = {option.parent for option in CONF.glob("*/**/*.yaml") if "paper" not in option.parts}
    assert CONF / "hydra" / "launcher" in folders
    for folder in folders:
        start = shown.index(f"  {folder.relative_to(CONF)}") + 1
        section = shown[start : shown.index("", start)]
        listed = [match[1] for line in section if (match := re.match(r"  [ *] (\S+)", line))]
        assert sorted(listed) == sorted(path.stem for path in folder.glob("*.yaml"))
    assert "schema" not in outcome.out
    codes = "0; 1, a run failed; 2, bad input; 130, interrupted; 143, ended by SIGTERM."
    assert outcome.out.endswith(f"\nExit codes: {codes}\n\n")
    assert records(tmp_path) == []


def test_what_only_some_runs_need_is_not_imported_at_the_start():
    """Each takes half a second and more."""
    slow = ("transformers", "torchvision", "dp_accounting", "scipy.optimize", "matplotlib", "jinja2", "wandb")
    code = f"import sys, dpbench.run; print([name for name in {slow} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("module", ["run", "results.__main__", "data.__main__", "reproduce", "privacy.__main__"])
def test_every_command_tells_its_version(module, capsys):
    assert importlib.import_module(f"dpbench.{module}").main(["--version"]) == 0
    assert capsys.readouterr().out == f"dpbench {__version__}\n"


def test_help_lists_options_of_a_folder_of_ones_own(tmp_path):
    mine = tmp_path / "conf" / "algo" / "mine.yaml"
    mine.parent.mkdir(parents=True)
    mine.write_text("# @package _global_\n# A method of mine.\nalgo:\n  name: mine\n  depth: 3\n")
    outcome = run(tmp_path, "--help", "-cd", str(tmp_path / "conf"))
    assert re.search(r"^    mine +A method of mine\.\n +algo\.depth$", outcome.out, re.MULTILINE)
    assert re.search(r"^    disk  ", outcome.out, re.MULTILINE)
    missing = run(tmp_path, "--help", "-cd", str(tmp_path / "nowhere"))
    assert (missing.code, missing.error()) == (2, f"-cd {tmp_path / 'nowhere'}: no such folder")


def test_help_lists_the_settings_that_an_option_has_from_another(tmp_path):
    mine = tmp_path / "conf" / "clip" / "mine.yaml"
    mine.parent.mkdir(parents=True)
    mine.write_text("# A clip of mine.\ndefaults:\n  - automatic\n  - _self_\nstabiliser: 0.5\nbend: 2\n")
    shown = " ".join(run(tmp_path, "--help", "-cd", str(tmp_path / "conf")).out.split())
    assert "A clip of mine. clip.scope, clip.stabiliser, clip.bend " in shown
    privacy = "privacy.sampler, privacy.accountant, privacy.noise_multiplier, privacy.search_runs, privacy.secure_noise"
    assert f"blank one sample. {privacy} " in shown
    assert f"{privacy}, privacy.published " in shown


def test_help_marks_the_defaults_and_lists_the_settings(tmp_path):
    shown = run(tmp_path, "-h", settings=()).out
    defaults = compose_jobs([], multirun=False)[0]
    for group, option in defaults.choices.items():
        section = shown[shown.index(f"\n  {group}\n") :]
        assert re.search(r"^  \* (\S+)", section, re.MULTILINE)[1] == option
    for setting in ("eps", "delta", "seed", "device", "batch_size", "epochs", "results_dir", "force", "plan"):
        assert re.search(rf"^  {setting}: \S", shown, re.MULTILINE)


def test_what_a_launcher_says_to_type_shows_its_options(tmp_path):
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher")
    (line,) = re.findall(r"^# Every other option: python -m dpbench\.run (.*)$", SLURM.read_text(), re.MULTILINE)
    outcome = run(tmp_path, *line.split(), settings=())
    assert (outcome.code, outcome.err) == (0, "")
    shown, named = yaml.safe_load(outcome.out), yaml.safe_load(SLURM.read_text())
    del named["defaults"]
    assert {name: shown[name] for name in named} == named
    assert "qos" in shown  # which it does not name
    assert records(tmp_path) == []


def test_cfg_prints_every_setting_and_trains_nothing(tmp_path):
    outcome = run(tmp_path, "algo=disk", "eps=3", "--cfg", "job")
    assert outcome.code == 0
    assert "\neps: 3" in f"\n{outcome.out}"
    assert "\n  kappa: 0.7\n" in outcome.out
    assert records(tmp_path) == []
