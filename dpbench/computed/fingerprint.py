"""What a computed artefact is made of, in one number: if that has not changed, neither have its numbers."""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterator
from functools import cache
from importlib.metadata import version
from pathlib import Path

from dpbench.claims import Artefact
from dpbench.config import conf_folder

# Packages whose numerics enter.
PACKAGES = ("numpy", "scipy", "torch", "dp-accounting", "opacus")
ROOT = Path(__file__).resolve().parents[2]


def fingerprint(artefact: Artefact, module: str) -> str:
    """Digest of all that enters a computed artefact.

    That is the source of the module and of all of this program that it imports, directly or not; the configurations;
    the files of the paper's artefacts; and the versions of the libraries.

    Args:
        artefact: what is computed.
        module: that computes it, by its dotted name.
    """
    conf = conf_folder()
    files = sources_of(module) | {path for path in conf.rglob("*.yaml") if conf / "paper" not in path.parents}
    files |= set((conf / "paper" / artefact.paper).glob("*.yaml"))
    digest = hashlib.sha256(repr([version(package) for package in PACKAGES]).encode())
    for path in sorted(files):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:24]


def sources_of(module: str) -> set[Path]:
    """The files of a module of this program and of those that it imports."""
    found: set[Path] = set()
    waiting = [module]
    while waiting:
        path = _file(waiting.pop())
        if path is not None and path not in found:
            found.add(path)
            waiting += _imports(path)
    return found


def _file(module: str) -> Path | None:
    """Of a module or package; None for a name that is neither."""
    base = ROOT.joinpath(*module.split("."))
    return next((path for path in (base.with_suffix(".py"), base / "__init__.py") if path.is_file()), None)


@cache
def _imports(path: Path) -> tuple[str, ...]:
    """Names that a file imports from this program, with the packages around them."""
    return tuple(sorted(set(_names(ast.parse(path.read_text())))))


def _names(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        for name in names:
            parts = name.split(".")
            if parts[0] == "dpbench":
                yield from (".".join(parts[:end]) for end in range(1, len(parts) + 1))
