"""python -m dpbench.results: what has been recorded."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from dpbench.cli.command import FAILED, OK, run_command
from dpbench.console import make_console
from dpbench.errors import require
from dpbench.results.arguments import Arguments, help_text, parse
from dpbench.wording import number_of


def main(typed: Sequence[str] | None = None) -> int:
    """Run a command line; returns the exit code."""
    return run_command(_code, typed, help_text, "interrupted")


def _code(words: Sequence[str]) -> int:
    return OK if _main(parse(words)) else FAILED


def _main(arguments: Arguments) -> bool:
    """Carry out a command; whether all is well. What a verb needs is imported for it alone: listing takes a second."""
    from dpbench.results.progress import Shown
    from dpbench.tracking.index import Index

    require(arguments.results_dir.is_dir(), "results_dir", arguments.results_dir, "a folder that exists")
    console, errors = make_console(), make_console(stderr=True)
    if arguments.verb == "check":
        from dpbench.results.checking import check

        return check(arguments, console, Shown(errors, "configurations to check"))
    to = arguments.options.get("to", "")
    if arguments.verb == "export" and to != "wandb":
        from dpbench.results.export import require_format

        path = require_format(to)
    index = Index(arguments.results_dir, Shown(errors, "new or changed records to read"))
    if arguments.verb == "list":
        from dpbench.results.listing import print_list

        print_list(index, arguments, console)
    elif arguments.verb == "compare":
        from dpbench.results.comparison import print_comparison

        print_comparison(index, arguments, console)
    elif arguments.verb == "remove":
        from dpbench.results.removal import remove

        remove(index, arguments, console)
    elif to == "wandb":
        from dpbench.results.sync import sync

        return sync(index, arguments, console.print)
    else:
        from dpbench.results.export import export
        from dpbench.results.listing import warn

        warn(index)
        places = arguments.selection.places(index)
        export(index, places, path)
        console.print(f"{number_of(len(places), 'run')} written to {path}")
    return True


if __name__ == "__main__":
    sys.exit(main())
