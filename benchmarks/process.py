"""Processes of their own for measurements, so that none disturbs another."""

from __future__ import annotations

import multiprocessing
import os
import re
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from dpbench.devices import keep_freed_memory

# Imported once; processes are forked from there, before any thread is started.
_SLOW_IMPORTS = [
    "benchmarks.timing",
    "benchmarks.memory",
    "transformers.models.roberta.modeling_roberta",
    "transformers.models.vit.modeling_vit",
]
_LONGEST_REASON = 160

ALLOCATORS = ("default", "tuned")


class MeasurementError(RuntimeError):
    """A measurement failed as a whole; the text is the short reason."""


def reason(error: BaseException) -> str:
    """An error in one line: its type and the first line of its text, without the folders of paths."""
    text = str(error).strip()
    first = re.sub(r"(?<![\w.])/(?:[\w.+-]+/)+", "", text.splitlines()[0] if text else "")
    return f"{type(error).__name__}: {first}"[:_LONGEST_REASON]


def tune_allocator() -> None:
    """Let glibc keep freed memory, as a run of dpbench does: large temporaries then cost no page faults.

    Raises:
        MeasurementError: the system has no glibc.
    """
    if not keep_freed_memory():
        raise MeasurementError("--allocator tuned needs glibc")


def _serve(
    connection: Connection, environment: dict[str, str], function: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    os.environ.update(environment)
    try:
        connection.send((True, function(*arguments)))
    except Exception as error:
        connection.send((False, reason(error)))


def in_own_process(
    function: Callable[..., Any], *arguments: Any, timeout: float, environment: dict[str, str] | None = None
) -> Any:
    """What the function returns, called in a process of its own with additions to its environment.

    Raises:
        MeasurementError: it raised, its process died, or it took longer than `timeout` seconds.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_SLOW_IMPORTS)
    receiving, sending = context.Pipe(duplex=False)
    process = context.Process(target=_serve, args=(sending, environment or {}, function, arguments))
    process.start()
    sending.close()
    try:
        if not receiving.poll(timeout):
            raise MeasurementError(f"stopped after {timeout:.0f} s")
        succeeded, result = receiving.recv()
    except EOFError:
        process.join()
        raise MeasurementError(f"its process ended with code {process.exitcode}") from None
    finally:
        process.kill()
        process.join()
    if not succeeded:
        raise MeasurementError(result)
    return result
