"""Which files of this program a module is made of, and one number for them: while it stays, so does what they do."""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NAME = "dpbench"


def sources_of(module: str) -> set[Path]:
    """The files of a module of this program and of all that it imports of it, directly or not, early or late.

    A package counts where a name is imported from it, and not as the way to one of its modules.
    """
    found: set[Path] = set()
    waiting = [module]
    while waiting:
        path = _file(waiting.pop())
        if path is not None and path not in found:
            found.add(path)
            waiting += _imports(path)
    return found


def digest_of(files: Iterable[Path], *others: object) -> str:
    """Of the names and contents of files, wherever they lie, and of what else is given, as it is written; in hex."""
    digest = hashlib.sha256(repr(others).encode())
    for name, content in sorted((path.name, path.read_bytes()) for path in files):
        digest.update(b"\0%b\0%d\0%b" % (name.encode(), len(content), content))
    return digest.hexdigest()


def _file(module: str) -> Path | None:
    """Of a module or package; None for a name that is neither."""
    base = ROOT.joinpath(*module.split("."))
    return next((path for path in (base.with_suffix(".py"), base / "__init__.py") if path.is_file()), None)


@cache
def _imports(path: Path) -> tuple[str, ...]:
    """Names of what a file imports from this program."""
    names = set(_names(ast.parse(path.read_text())))
    return tuple(sorted(name for name in names if name.partition(".")[0] == NAME))


def _names(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            for alias in node.names:
                inside = f"{node.module}.{alias.name}"
                yield inside if _file(inside) is not None else node.module
