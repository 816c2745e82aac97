import importlib
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import dpbench

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize("name", [m.name for m in pkgutil.walk_packages(dpbench.__path__, "dpbench.")])
def test_every_module_imports_and_exports_what_it_names(name):
    module = importlib.import_module(name)
    for exported in getattr(module, "__all__", []):
        assert hasattr(module, exported), exported


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
