"""docs/own_claims.md: its examples are read and planned, and it has every key that a file of claims may have."""

import re
import shlex
from pathlib import Path

import pytest
import yaml
from cli import PLAIN
from documented_examples import OWN_CLAIMS, write_own_method

from dpbench import reproduce
from dpbench.claims import load_artefact
from dpbench.claims.load import CLAIMS, KEYS, RULES
from dpbench.claims.schema import Artefact
from dpbench.reproduction.times import Speed, Times

((NAME, TABLE),) = re.findall(r"`(my_claims/\S+)`[^`]*```yaml\n(.*?)```", OWN_CLAIMS, re.DOTALL)
(FURTHER,) = re.findall(r"```yaml\n(where:.*?)```", OWN_CLAIMS, re.DOTALL)
COMMANDS = [line for line in OWN_CLAIMS.splitlines() if line.startswith("    python -m dpbench.reproduce")]


def written(folder: Path, content: str) -> Artefact:
    path = folder / NAME
    path.parent.mkdir(parents=True)
    path.write_text(content)
    return load_artefact(path)


@pytest.mark.parametrize("line", COMMANDS)
def test_the_example_is_planned(line, tmp_path, monkeypatch, capsys):
    write_own_method(tmp_path)
    written(tmp_path, TABLE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Times, "speed", Speed(flops=1e9, overhead=1e-3))
    typed = [word for word in shlex.split(line)[3:] if word != "plan=true"]
    assert reproduce.main([*typed, "plan=true", *PLAIN[:2]]) == 0
    # Two cells of three seeds; two of a search over two candidates, the better of which has two further seeds.
    assert "What can be run here: 14 runs" in capsys.readouterr().out


def test_what_it_shows_of_where_each_and_values_is_of_the_example(tmp_path):
    content = yaml.safe_load(TABLE) | yaml.safe_load(FURTHER)
    artefact = written(tmp_path, yaml.safe_dump(content))
    cells = {(cell.at["method"], cell.at["eps"]): cell for cell in artefact.cells}
    assert {at: cell.overrides.get("optim.lr") for at, cell in cells.items()} == {
        ("DP-SGD", "2"): "0.2",
        ("DP-SGD", "8"): "0.5",
        ("mine", "2"): "0.1",
        ("mine", "8"): "0.5",
    }
    assert {at: cell.tolerance.points for at, cell in cells.items()} == {
        at: 2 if at[0] == "DP-SGD" else 1 for at in cells
    }
    printed = {at: cell.printed and (cell.printed.value, cell.printed.spread) for at, cell in cells.items()}
    assert printed == {
        ("DP-SGD", "2"): (81.0, None),
        ("DP-SGD", "8"): (85.2, 0.5),
        ("mine", "2"): None,
        ("mine", "8"): (86.0, None),
    }


def test_the_picture_that_it_shows_is_read(tmp_path):
    shown = re.findall(r"`(draw: \{.*?\})`", OWN_CLAIMS)
    assert shown == ["draw: {x: eps, lines: method, panels: data}"]
    content = yaml.safe_load(TABLE) | yaml.safe_load(shown[0])
    content["columns"]["data"] = ["digits"]
    draw = written(tmp_path, yaml.safe_dump(content)).draw
    assert draw is not None
    assert (draw.x, draw.lines, draw.panels) == ("eps", ("method",), ("data",))


def test_every_key_is_explained():
    """Also the forms of a claim, and what a line of `where` may say."""
    explained = set(re.findall(r"`(\w+)(?::[^`]*)?`", OWN_CLAIMS))
    assert KEYS | RULES | set.union(*CLAIMS.values()) | {"says"} <= explained
