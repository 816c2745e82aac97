"""What all commands have in common: their help, and how they end where something is wrong."""

from __future__ import annotations

import signal
import sys
import warnings
from argparse import Action, ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from rich.console import Console
from typing_extensions import override

from dpbench import __version__
from dpbench.console import make_console
from dpbench.errors import PlainWarning, Terminated, UserError

OK, FAILED, BAD_INPUT = 0, 1, 2
# Of commands whose runs go on where they were stopped.
GOES_ON = "interrupted; finished work is kept, and the same command goes on from there"
# Of those that have their runs begun from the beginning.
BEGINS_ANEW = "interrupted; finished work is kept, but with force=true the same command begins every run anew"


def exit_code(interruption: KeyboardInterrupt) -> int:
    """What shells say of a process that a signal ended."""
    return 128 + (signal.SIGTERM if isinstance(interruption, Terminated) else signal.SIGINT)


def run_command(
    body: Callable[[list[str]], int],
    typed: Sequence[str] | None,
    help_text: Callable[[list[str]], str],
    interrupted: str,
) -> int:
    """Run a command line; returns the exit code.

    Args:
        body: given the words of the line, does what they ask for and returns the exit code.
        typed: the words; None for those of the process.
        help_text: what -h prints, given the words.
        interrupted: what is said where the user or the system ended it.
    """
    words = list(sys.argv[1:] if typed is None else typed)
    errors = make_console(stderr=True)
    try:
        if "-h" in words or "--help" in words:
            make_console().print(help_text(words))
            return OK
        if "--version" in words:
            make_console().print(f"dpbench {__version__}")
            return OK
        with _plain_warnings(errors):
            return body(words)
    except UserError as error:
        errors.print(f"error: {error}", style="red")
        return BAD_INPUT
    except OSError as error:
        if error.filename is None:
            raise
        errors.print(f"error: {error.filename}: can't be read or written ({error.strerror})", style="red")
        return BAD_INPUT
    except KeyboardInterrupt as interruption:
        errors.print(interrupted, style="yellow")
        return exit_code(interruption)


@contextmanager
def _plain_warnings(errors: Console) -> Iterator[None]:
    """What dpbench warns of is said in a line, without the place in its sources; other warnings are shown as ever."""
    show = warnings.showwarning

    def plainly(message: Warning | str, category: type[Warning], *place: Any, **further: Any) -> None:
        if issubclass(category, PlainWarning):
            errors.print(f"warning: {' '.join(str(message).split())}", style="yellow")  # may quote an error of others
        else:
            show(message, category, *place, **further)

    warnings.showwarning = plainly
    try:
        yield
    finally:
        warnings.showwarning = show


class _Once(Action):
    """An option of which the last value would count, were several typed."""

    @override
    def __call__(self, parser: ArgumentParser, options: Namespace, value: Any, option: str | None = None) -> None:
        if getattr(options, self.dest) is not None:
            parser.error(f"{option} {value}: expected once")
        setattr(options, self.dest, value)


class OverridesParser(ArgumentParser):
    """Takes overrides and -cd, and what is added to it."""

    def __init__(self) -> None:
        super().__init__(add_help=False)
        self.add_argument("overrides", nargs="*")
        self.add_argument("-cd", "--config-dir", type=Path, action=_Once)

    @override
    def error(self, message: str) -> NoReturn:
        raise UserError(message)

    def parse(self, typed: Sequence[str]) -> tuple[Namespace, list[Path]]:
        """What was typed, and the folders of options beside the package's.

        Raises:
            UserError: a word is unknown or wrong, or there is no such folder.
        """
        options = self.parse_intermixed_args(typed)
        return options, folders_of(options)


def folders_of(options: Namespace) -> list[Path]:
    """The folders of options beside the package's, which were typed after -cd.

    Raises:
        UserError: there is no such folder.
    """
    if not options.config_dir:
        return []
    folder = Path(options.config_dir)
    if not folder.is_dir():
        raise UserError(f"-cd {folder}: no such folder")
    return [folder.absolute()]
