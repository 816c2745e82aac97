"""Which files decide what is computed, hashed, drawn and kept: a change of one of them is noticed."""

import ast
import shutil

import pytest

from dpbench import sources
from dpbench.reproduction.hashes import fingerprint
from dpbench.sources import ROOT, digest_of, sources_of

# Modules whose results are kept, with some of what these depend on, and what they must not depend on.
KEPT = {
    "dpbench.computed.disk": (
        ("computed/disk.py", "computed/common.py", "computed/regression.py", "filters/kalman.py", "query.py"),
        ("report/", "cli/", "audit/", "training/", "reproduction/"),
    ),
    "dpbench.config": (
        ("config/identity.py", "privacy/accountants.py", "privacy/published.py", "mixing.py", "models/wide_resnet.py"),
        ("report/", "claims/", "tracking/", "training/", "gradients/", "reproduction/"),
    ),
    "dpbench.report.figures": (
        ("report/figures.py", "report/picture.py", "report/svg_text.py", "claims/draw.py", "claims/computed_file.py"),
        ("claims/verdict.py", "report/scorecard.py", "tracking/", "config/"),
    ),
    "dpbench.tracking.index": (
        ("tracking/index.py", "tracking/columns.py", "tracking/reading.py", "tracking/shapes.py", "tracking/status.py"),
        ("tracking/record.py", "config/", "models/", "claims/"),
    ),
}


def names_of(module: str) -> set[str]:
    return {str(path.relative_to(ROOT / "dpbench")) for path in sources_of(module)}


@pytest.mark.parametrize("module", KEPT)
def test_a_module_is_made_of_what_it_imports_and_of_no_more(module):
    parts, others = KEPT[module]
    names = names_of(module)
    assert set(parts) <= names
    assert not [name for name in names if name.startswith(others)]
    assert all((ROOT / "dpbench" / name).is_file() for name in names)


def test_every_import_of_a_file_that_counts_is_one_that_counts():
    """By another way than the walk's: names bound in the files themselves."""
    found = sources_of("dpbench.report.figures")
    for path in found:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("dpbench."):
                base = ROOT.joinpath(*node.module.split("."))
                inside = {base / f"{alias.name}.py" for alias in node.names}
                assert {base.with_suffix(".py"), base / "__init__.py", *inside} & found, (path.name, node.module)


def test_a_digest_is_of_names_and_contents_and_not_of_places(tmp_path):
    for folder, content in (("one", "x"), ("two", "x"), ("three", "y")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "a.py").write_text(content)
    one, two, three = (tmp_path / folder / "a.py" for folder in ("one", "two", "three"))
    assert digest_of([one]) == digest_of([two]) != digest_of([three])
    assert digest_of([one, three]) == digest_of([three, one]) != digest_of([one])
    assert digest_of([one], "1") != digest_of([one]) != digest_of([one.rename(tmp_path / "b.py")])


def test_hashes_are_kept_only_while_all_that_decides_them_stays(tmp_path, monkeypatch):
    shutil.copytree(ROOT / "dpbench", tmp_path / "dpbench", ignore=shutil.ignore_patterns("__pycache__"))
    before = fingerprint()
    monkeypatch.setattr(sources, "ROOT", tmp_path)
    assert fingerprint() == before
    for changed in ("privacy/accountants.py", "privacy/published.py", "mixing.py", "config/compose.py"):
        path = tmp_path / "dpbench" / changed
        path.write_text(path.read_text() + "\n")
        assert fingerprint() != before, changed
        before = fingerprint()
    own = tmp_path / "own"
    (own / "filter").mkdir(parents=True)
    (own / "filter" / "mine.yaml").write_text("window: 1\n")
    with_own = fingerprint([own])
    assert with_own != before
    (own / "my_filters.py").write_text("")
    assert fingerprint([own]) != with_own
