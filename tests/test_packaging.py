import ast
import importlib
import pkgutil
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import packages_distributions

import pytest
from cli import ROOT

import dpbench

# Come with Hydra's launchers, which say the versions that they work with.
OF_LAUNCHERS = {"ray", "submitit"}


@pytest.mark.parametrize("name", [m.name for m in pkgutil.walk_packages(dpbench.__path__, "dpbench.")])
def test_every_module_imports_and_exports_what_it_names(name):
    module = importlib.import_module(name)
    for exported in getattr(module, "__all__", []):
        assert hasattr(module, exported), exported


def imported(folder: str) -> Iterator[str]:
    """Top-level names of all modules that the sources of a folder import, anywhere in them."""
    for path in (ROOT / folder).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                yield from (alias.name.partition(".")[0] for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                yield node.module.partition(".")[0]


def canonical(distribution: str) -> str:
    return re.sub(r"[-_.]+", "-", distribution).lower()


@pytest.mark.parametrize(("folder", "extras"), [("dpbench", []), ("tests", ["dev"])])
def test_what_is_imported_is_declared(folder, extras):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = [*project["dependencies"], *(line for extra in extras for line in project["optional-dependencies"][extra])]
    declared = {canonical(re.split(r"[<>=]", line)[0]) for line in lines}
    known = packages_distributions()
    own = {path.stem for path in (ROOT / "tests").glob("*.py")} | {"dpbench", "benchmarks", "scripts"}
    others = set(imported(folder)) - sys.stdlib_module_names - own - OF_LAUNCHERS
    lacking = {name for name in others if not declared & {canonical(one) for one in known.get(name, [name])}}
    assert lacking == set()


@pytest.mark.slow
def test_an_installed_package_trains_from_any_folder(tmp_path):
    """Needs the package index for the build backend."""
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "wheel", "--no-deps", "--wheel-dir", str(tmp_path), str(ROOT)], check=True)
    (wheel,) = tmp_path.glob("dpbench-*.whl")
    site = tmp_path / "site"
    subprocess.run([*pip, "install", "--no-deps", "--target", str(site), str(wheel)], check=True)
    command = [sys.executable, "-m", "dpbench", "algo=disk", "epochs=0.5", "tracker=disabled"]
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    done = subprocess.run(
        command, cwd=elsewhere, env={"PYTHONPATH": str(site)}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert (site / "dpbench" / "conf" / "config.yaml").is_file()
    (summary,) = elsewhere.glob("results/runs/*/0/summary.json")
    assert '"algorithm": "disk"' in summary.read_text()
