"""Which folders never import which, by whatever way: what comes after the noise never sees data; records are read
without training."""

import ast
from functools import cache
from pathlib import Path

import pytest
from cli import ROOT

STAGES = ("query", "clip", "threshold", "noise")
AFTER_THE_NOISE = ("filters", "optim", "averaging", "update", "schedules")
READERS = ("claims", "tracking", "results", "report", "trained")

NEVER = {
    **{name: {"data", "gradients", "privacy", "query", "training", "config"} for name in AFTER_THE_NOISE},
    **{name: {"data", "gradients", "training", "config"} for name in STAGES},
    "step": {"training", "config"},
    "gradients": {"privacy", "step", "training", "config"},
    "privacy": {"gradients", "step", "training", "config"},
    "config": {"gradients", "step", "training", "launch"},
    **{name: {"gradients", "step", "training", "launch", "computed"} for name in READERS},
    "computed": {"training", "launch"},
    "training": {"claims", "report", "launch", "results"},
    "launch": {"claims", "report", "results"},
}


@cache
def imports(package: Path) -> dict[str, set[str]]:
    """What each folder or module at the top of a package imports of the package, by name.

    Left out are commands (__main__.py, and those of cli/ that they call), which bring everything together.
    """
    found: dict[str, set[str]] = {}
    for path in package.rglob("*.py"):
        own = path.relative_to(package).parts[0].removesuffix(".py")
        if path.name == "__main__.py" or own == "cli":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module == package.name:
                found.setdefault(own, set()).update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith(f"{package.name}."):
                found.setdefault(own, set()).add(node.module.split(".")[1])
            elif isinstance(node, ast.Import):
                names = (alias.name.split(".") for alias in node.names)
                found.setdefault(own, set()).update(
                    parts[1] for parts in names if parts[0] == package.name and parts[1:]
                )
    return found


def reached(graph: dict[str, set[str]], start: str) -> set[str]:
    """Everything that is imported, and what that imports in turn."""
    seen, waiting = set(), [start]
    while waiting:
        new = graph.get(waiting.pop(), set()) - seen
        seen |= new
        waiting += new
    return seen


@pytest.mark.parametrize("name", NEVER)
def test_it_never_imports_what_lies_on_the_other_side(name):
    package = ROOT / "dpbench"
    assert (package / name).is_dir() or (package / f"{name}.py").is_file()
    assert not reached(imports(package), name) & NEVER[name]


@pytest.mark.parametrize(
    "line", ["from dpbench.training.loop import train", "import dpbench.training.loop", "from dpbench import training"]
)
def test_an_import_by_way_of_another_module_is_noticed(tmp_path, line):
    package = tmp_path / "dpbench"
    (package / "filters").mkdir(parents=True)
    (package / "filters" / "mine.py").write_text("from dpbench.stage import Stage\n")
    (package / "stage.py").write_text(f"def late():\n    {line}\n")
    assert reached(imports(package), "filters") == {"stage", "training"}
