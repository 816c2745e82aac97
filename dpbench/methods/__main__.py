"""python -m dpbench.methods: write the pages of docs/methods."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from dpbench.cli.command import OK, run_command
from dpbench.config import conf_folder
from dpbench.console import make_console
from dpbench.errors import UserError, require
from dpbench.methods import write

HELP = """\
python -m dpbench.methods [docs=FOLDER]

Writes a page for each algorithm of conf/algo, and an index of them.

  docs   holds source/<algorithm>.yaml and gets the pages (default: docs/methods of the checkout)

Exit codes: 0, 2 bad input, 130 interrupted.
"""


def main(typed: Sequence[str] | None = None) -> int:
    """Run a command line; returns the exit code."""
    return run_command(_main, typed, lambda _: HELP, "interrupted; some pages may be written")


def _main(words: list[str]) -> int:
    docs = conf_folder().parent / "docs" / "methods"
    for word in words:
        key, _, value = word.partition("=")
        if key != "docs" or not value:
            raise UserError(f"{word}: expected docs=FOLDER, the one setting there is")
        docs = Path(value)
        require((docs / "source").is_dir(), "docs", value, "a folder that has a folder source")
    make_console().print("\n".join(map(str, write(docs))) or "all pages are up to date")
    return OK


if __name__ == "__main__":
    sys.exit(main())
