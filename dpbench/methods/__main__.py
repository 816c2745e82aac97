"""python -m dpbench.methods: write the pages of docs/methods."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from dpbench.config import conf_folder
from dpbench.console import make_console
from dpbench.errors import UserError
from dpbench.methods import write


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m dpbench.methods",
        description="Writes a page for each algorithm of conf/algo, and an index of them.",
    )
    pages = conf_folder().parent / "docs" / "methods"
    text = "holds source/<algorithm>.yaml and gets the pages; default: docs/methods of the checkout"
    parser.add_argument("--docs", type=Path, default=pages, metavar="FOLDER", help=text)
    try:
        changed = write(parser.parse_args(arguments).docs)
    except UserError as error:
        make_console(stderr=True).print(f"error: {error}", style="red")
        return 2
    make_console().print("\n".join(map(str, changed)) or "all pages are up to date")
    return 0


if __name__ == "__main__":
    sys.exit(main())
