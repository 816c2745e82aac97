"""What docs/own_method.md, docs/own_data.md and docs/own_claims.md show and say to type."""

import re
import shlex
from pathlib import Path

from cli import ROOT

OWN_METHOD, OWN_DATA, OWN_CLAIMS = (
    (ROOT / f"docs/{name}.md").read_text() for name in ("own_method", "own_data", "own_claims")
)


def write_own_method(folder: Path) -> Path:
    """The files that docs/own_method.md shows, under the names it gives them; returns the folder of options."""
    shown = re.findall(r"`(my_conf/\S+\.\w+)`[^`]*(?:`[^`\n]+`[^`]*)*?```\w+\n(.*?)```", OWN_METHOD, re.DOTALL)
    assert [name for name, _ in shown] == [
        "my_conf/my_filters.py",
        "my_conf/filter/median.yaml",
        "my_conf/algo/mine.yaml",
        "my_conf/my_models.py",
        "my_conf/model/patches.yaml",
        "my_conf/my_table_models.py",
        "my_conf/model/gated.yaml",
        "my_conf/my_text_models.py",
        "my_conf/model/words.yaml",
        "my_conf/my_optimizers.py",
        "my_conf/optim/nadam.yaml",
    ]
    for name, content in shown:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return folder / "my_conf"


def typed(page: str) -> list[list[str]]:
    """What a page says to type after `python -m dpbench.run`."""
    return [shlex.split(line)[3:] for line in page.splitlines() if line.startswith("    python -m dpbench.run")]
